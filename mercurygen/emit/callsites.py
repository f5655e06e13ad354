"""What a module's text communicates, compared with its plan, without torch and without running it.

`attention` is interpreted from its syntax tree for one rank after the other, on tensors without
elements. Every transfer, wait, kernel call and merge must be the plan's next one: same group,
same peers, same buffers, same bytes, same block. Buffers are matched one to one: those of the
caller by name, others when they are first used, by what they are a copy of. Not looked at: in
which order a copy lays out the tokens, where parts of results are put if the whole is viewed in
another shape, and what `_block_forward`, `_merge`, `_autocast` and `_check` compute.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from mercurygen.emit.autograd import Context, Function
from mercurygen.emit.playback import Playback
from mercurygen.emit.playback_backward import BackwardPlayback, check_saved
from mercurygen.emit.python_bounds import LARGEST_NUMBER, MOST_STEPS, STEPS_A_RANK, STEPS_AN_EVENT
from mercurygen.emit.python_expressions import Bodies, Complaint
from mercurygen.emit.python_subset import Interpreter, Module, TextMismatch
from mercurygen.errors import shorten
from mercurygen.ir.caller import INSIDE
from mercurygen.ir.mesh import Mesh
from mercurygen.lower.kept import is_outer
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import POSITIONS

MOST_DEPTH = 80  # of the syntax tree; that of an emitted module has 17
MOST_RANKS = 64  # of larger meshes only a sample is interpreted
CLASS = "_Attention"
NOT_INTERPRETED = (
    *("_autocast", "_check", "_block_forward", "_body", "_merge", "_weigh", "_unweigh"),
    *("_block_backward", "_delta", "_add", "_borders"),
)
ASIDE = {  # communicate beside `attention`: layout helpers and self-check
    *("make_mesh", "_level_group_count", "_new_group", "_from_all_ranks", "_all_gather"),
    *("unshard_sequence", "check_inputs", "_error", "_blind", "_self_check"),
    *("check_placement", "probe"),
}
_PREFIXES = ("torch.distributed", "torch.ops._c10d", "torch.ops.c10d")
_TYPES = {"torch.distributed.DeviceMesh"}
_TYPES |= {f"torch.distributed.tensor.{name}" for name in ("Placement", "Shard", "Replicate")}
_QUERIES = {  # answer from what the process knows: nothing is communicated
    f"torch.distributed.{name}" for name in ("get_process_group_ranks", "get_rank", "get_backend")
}
_OF_GROUPS = {
    "barrier",
    "broadcast",
    "send",
    "recv",
    "allreduce",
    "allgather",
    "alltoall",
    "reduce",
}
_MAIN = ast.dump(ast.parse('if __name__ == "__main__":\n    _self_check()').body[0])
_FORBIDDEN = {"exec", "eval", "compile", "globals", "locals", "vars", "setattr", "__import__"}


class Site(NamedTuple):
    """A place in the text that names something of torch.distributed."""

    function: str
    name: str
    node: ast.expr


class Summary(NamedTuple):
    """What was compared.

    Attributes:
        ranks: that were interpreted, each with and without return_lse.
        of: how many there are.
        events: transfers, waits, kernel calls, merges and results, over these ranks.
        sites: per function what it names of torch.distributed, in the order of the text.
    """

    ranks: tuple[int, ...]
    of: int
    events: int
    sites: dict[str, tuple[str, ...]]


def check_text(
    text: str,
    plan: Plan,
    ranks: Iterable[int] | None = None,
    backward: Plan | None = None,
    layout: str = INSIDE,
) -> Summary:
    """Compare a module's text with the plan it was made from.

    Of a user's own operator only the call sites are listed, and the summary has no ranks: its
    transfers are not interpreted.

    Args:
        text: of the module.
        plan: of the schedule.
        ranks: to interpret; None: all of at most 64, else those whose place along every dimension
            is the first, the second or the last, in every combination.
        backward: of the gradients, if the module is differentiable.
        layout: of the caller's tensors.

    Raises:
        TextMismatch: the text communicates otherwise, or with means that are not understood.
    """
    tree, mesh = _parsed(text), plan.program.mesh
    module = _module(tree)
    entry = plan.program.operator
    _check_mesh(module, mesh, entry)
    if backward is None and CLASS in module.classes:
        words = "the module has gradients, its schedule has no section backward"
        raise TextMismatch(module.classes[CLASS].lineno, CLASS, words)
    sites = _sites(tree, module)
    if plan.program.kernel == POSITIONS:
        return Summary((), mesh.size, 0, _named(sites))
    chosen = tuple(sample(mesh) if ranks is None else ranks)
    seen: set[int] = set()
    bodies, events = Bodies(), 0
    both = backward is not None and is_outer(plan, backward)  # lse is kept as the caller has it
    for rank in chosen:
        for with_lse in (False, True):
            planned = trace(plan, rank, with_lse=with_lse or both)
            playback = Playback(plan, planned)
            run = _interpreter(module, playback, bodies)
            _interpret(run, playback, with_lse, layout)
            if backward is not None:
                gradients = BackwardPlayback(backward, trace(backward, rank))
                again = _interpreter(module, gradients, bodies)
                _interpret_backward(run, playback, again, gradients)
                seen |= again.seen
                events += gradients.compared
            seen |= run.seen
            events += playback.compared
    for site in sites:
        if site.function not in ASIDE and id(site.node) not in seen:
            words = f"{site.name} is not what `attention` comes to on any of the ranks"
            raise TextMismatch(site.node.lineno, site.function, words)
    return Summary(chosen, mesh.size, events, _named(sites))


def _interpreter(module: Module, playback: Playback, bodies: Bodies) -> Interpreter:
    """One for a run beside a trace."""
    each = STEPS_AN_EVENT + STEPS_A_RANK * playback.program.mesh.size
    budget = MOST_STEPS + each * len(playback.trace.events)
    return Interpreter(module, playback.externals(), playback.hooks(), bodies, budget)


def _named(sites: list[Site]) -> dict[str, tuple[str, ...]]:
    """What every function names, in the order of the text."""
    named: dict[str, list[str]] = {}
    for site in sites:
        named.setdefault(site.function, []).append(site.name)
    return {name: tuple(each) for name, each in named.items()}


def _parsed(text: str) -> ast.Module:
    """The syntax tree, not too deep to be looked at."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise TextMismatch(line, "the module", str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise TextMismatch(1, "the module", "not understood: nested too deeply") from error
    layer: list[ast.AST] = [tree]
    for _ in range(MOST_DEPTH):
        layer = [inner for node in layer for inner in ast.iter_child_nodes(node)]
    if layer:
        line = next((node.lineno for node in layer if hasattr(node, "lineno")), 1)
        raise TextMismatch(line, "the module", "not understood: nested too deeply")
    return tree


def _check_mesh(module: Module, mesh: Mesh, entry: str) -> None:
    """The module's constants must be those of the plan."""
    want = {dim.name: dim.size for dim in mesh.dims}
    known, size = module.constants.get("MESH", {}), module.constants.get("WORLD_SIZE", 1)
    if not isinstance(known, dict) or [*known.items()] != [*want.items()]:
        shown = ast.unparse(known) if isinstance(known, ast.AST) else repr(known)
        words = f"MESH is {shorten(shown, 100)}, the plan's is {want}"
        raise TextMismatch(1, "the module", words)
    if type(size) is not int or size != mesh.size:
        raise TextMismatch(1, "the module", f"WORLD_SIZE is not the plan's {mesh.size}")
    if entry not in module.functions:
        raise TextMismatch(1, "the module", f"not understood: there is no function {entry}")


def sample(mesh: Mesh) -> list[int]:
    """All ranks of a small mesh; of a large one, first, second and last of each dimension."""
    ranks = range(mesh.size)
    if mesh.size <= MOST_RANKS:
        return list(ranks)
    ends = {dim.name: {0, 1, dim.size - 1} for dim in mesh.dims}
    return [r for r in ranks if all(i in ends[d] for d, i in mesh.coordinate(r).items())]


def _interpret(run: Interpreter, playback: Playback, with_lse: bool, layout: str) -> None:
    """Call `attention`, and see its result."""
    scale = 0.5 if with_lse else None  # handed on, or made from the head size
    tensors = playback.inputs(scale, layout)
    node = run.module.functions["attention"]
    try:
        values = {"scale": scale, "seq": None, "return_lse": with_lse}
        documents = (None,) if playback.program.documents else ()  # `_borders` has them
        result = run.top["attention"](*tensors, *documents, playback.mesh, **values)
        run.frames.append(["attention", node.end_lineno])
        playback.result(result, with_lse, layout)
    except TextMismatch:
        raise
    except Exception as error:
        raise run.mismatch(error) from error


def _interpret_backward(
    run: Interpreter, forward: Playback, again: Interpreter, playback: BackwardPlayback
) -> None:
    """Call the backward of the call of `attention`, on what that has kept, and see its result."""
    try:
        context = _context(run)
        check_saved(forward, playback, context)
    except Complaint as error:
        run.frames[:] = [["the module", 1], ["attention", 1]]
        raise run.mismatch(error) from error
    node = run.module.classes[CLASS]
    try:
        grad_out, saved = playback.given(context.saved or (), forward.scale)
        kept = Context(context.given, context.kept, saved)
        result = again.top[CLASS].backward(kept, grad_out, None)
        again.frames.append(["backward", node.end_lineno])
        playback.returned(result, context.given)
    except TextMismatch:
        raise
    except Exception as error:
        raise again.mismatch(error) from error


def _context(run: Interpreter) -> Context:
    """Of the one call of the autograd function."""
    function = run.top[CLASS] if CLASS in run.module.classes else None
    if not isinstance(function, Function) or len(function.contexts) != 1:
        raise Complaint(f"not one call of {CLASS}")
    return function.contexts[0]


# --- the whole module -----------------------------------------------------------------------


def _module(tree: ast.Module) -> Module:
    """Its definitions; whatever could change one later is refused."""
    module, top = Module({}, {}, {}, {}), {id(stmt) for stmt in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            if node.value >= LARGEST_NUMBER:
                words = "not understood: a number of more than 64 bits"
                raise TextMismatch(node.lineno, "the module", words)
        nested = isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
        named = isinstance(node, ast.Name) and node.id in _FORBIDDEN
        if nested or named or isinstance(node, ast.Global | ast.Nonlocal | ast.AsyncFunctionDef):
            raise _not_understood(node)
    for stmt in tree.body:
        table: dict = {}
        match stmt:
            case ast.Import(names):
                table, new = module.imports, {x.asname or x.name: x.name for x in names}
            case ast.ImportFrom(source, names, 0):
                table = module.imports
                new = {x.asname or x.name: f"{source}.{x.name}" for x in names}
            case ast.FunctionDef(name):
                table, new = module.functions, {name: stmt}
            case ast.ClassDef(name):
                table, new = module.classes, {name: stmt}
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=value):
                table, new = module.constants, {name: _literal(value)}
            case ast.Expr(ast.Constant()) | ast.Assign([ast.Subscript(ast.Name("PLACEMENTS"))]):
                continue
            case ast.If() if ast.dump(stmt) == _MAIN:
                continue
            case _:
                raise _not_understood(stmt)
        if any(name in each for name in new for each in module) or "*" in new:
            raise _not_understood(stmt)
        table.update(new)
    _at_import(tree, module)
    return module


def _at_import(tree: ast.Module, module: Module) -> None:
    """Refuse what calls the module's functions while it is imported."""
    later = module.imports.get("annotations") == "__future__.annotations"
    todo: list[ast.AST] = [stmt for stmt in tree.body if not isinstance(stmt, ast.If)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and node.id in module.functions:
            raise _not_understood(node)
        if isinstance(node, ast.FunctionDef):
            todo += [*node.decorator_list, *node.args.defaults]
            todo += [default for default in node.args.kw_defaults if default]
            if not later:
                todo += [node.args, *([node.returns] if node.returns else [])]
        else:
            todo += ast.iter_child_nodes(node)


def _literal(value: ast.expr | None) -> object:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return value  # a syntax tree: nothing that `attention` could use


def _not_understood(node: ast.AST) -> TextMismatch:
    words = shorten(ast.unparse(node).splitlines()[0], 100)
    return TextMismatch(getattr(node, "lineno", 1), "the module", f"not understood: {words}")


def _sites(tree: ast.Module, module: Module) -> list[Site]:
    """Every place that names something of torch.distributed, or calls what a group can do.

    Types and annotations apart.
    """
    sites: list[Site] = []

    def path(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return module.imports.get(node.id, "")
        match node:
            case ast.Attribute(value, name) | ast.Call(
                ast.Name("getattr"), [value, ast.Constant(str(name)), *_]
            ):
                return f"{base}.{name}" if (base := path(value)) else ""
        return ""

    def visit(node: ast.AST, function: str) -> None:
        full = path(node)
        if full in _QUERIES:
            return
        if isinstance(node, ast.Attribute) and node.attr in _OF_GROUPS:
            full = full or f"torch.distributed.ProcessGroup.{node.attr}"
        if full.startswith(_PREFIXES) and full not in _TYPES:
            sites.append(Site(function, full.removeprefix("torch.distributed."), node))
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and function == "the module":
            function = node.name
        for name, each in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                for inner in each if isinstance(each, list) else [each]:
                    if isinstance(inner, ast.AST):
                        visit(inner, function)

    visit(tree, "the module")
    _aside(module, {site.function for site in sites})
    return sites


def _aside(module: Module, communicate: set[str]) -> None:
    """Refuse communication in what is not interpreted, or in what that calls."""
    todo, done = [*NOT_INTERPRETED], set(NOT_INTERPRETED)
    for name in todo:
        node = module.functions.get(name)
        if node is None:
            continue
        if name in communicate:
            raise TextMismatch(node.lineno, name, "communicates, and is not interpreted")
        called = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - done
        done |= called
        todo += called
