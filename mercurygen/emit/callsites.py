"""What a module's text communicates, compared with its plan, without torch and without running it.

`attention` is interpreted from its syntax tree for one rank after the other, on tensors without
elements. Every transfer, wait, kernel call and merge must be the plan's next one: same group,
same peers, same buffers, same bytes, same block. Buffers are matched one to one: those of the
caller by name, others when they are first used, by what they are a copy of. Not looked at: in
which order a copy lays out the tokens, and what `_block_forward`, `_merge` and `_check` compute.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from mercurygen.emit.playback import Playback
from mercurygen.emit.python_subset import Interpreter, Module, TextMismatch
from mercurygen.ir.mesh import Mesh
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace

MOST_RANKS = 64  # of larger meshes only a sample is interpreted
NOT_INTERPRETED = ("_check", "_block_forward", "_merge")
ASIDE = {  # communicate beside `attention`: layout helpers and self-check
    *("make_mesh", "_level_group_count", "_new_group", "_from_all_ranks", "_all_gather"),
    *("unshard_sequence", "check_inputs", "_error", "_blind", "_self_check"),
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


def check_text(text: str, plan: Plan, ranks: Iterable[int] | None = None) -> Summary:
    """Compare a module's text with the plan it was made from.

    Args:
        text: of the module.
        plan: of the schedule.
        ranks: to interpret; None: all of at most 64, else those whose place along every dimension
            is the first, the second or the last, in every combination.

    Raises:
        TextMismatch: the text communicates otherwise, or with means that are not understood.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise TextMismatch(error.lineno or 1, "the module", str(error)) from error
    module, mesh = _module(tree), plan.program.mesh
    known = module.constants.get("MESH", {}), module.constants.get("WORLD_SIZE", 1)
    want = {dim.name: dim.size for dim in mesh.dims}
    if (
        [*known[0].items()] != [*want.items()]
        or known[1] != mesh.size
        or "attention" not in module.functions
    ):
        raise TextMismatch(1, "the module", f"MESH is {known[0]}, the plan's is {want}")
    sites = _sites(tree, module)
    chosen = tuple(sample(mesh) if ranks is None else ranks)
    seen: set[int] = set()
    events = 0
    for rank in chosen:
        for with_lse in (False, True):
            playback = Playback(plan, trace(plan, rank, with_lse=with_lse))
            run = Interpreter(module, playback.externals(), playback.hooks())
            _interpret(run, playback, with_lse)
            seen |= run.seen
            events += playback.compared
    for site in sites:
        if site.function not in ASIDE and id(site.node) not in seen:
            words = f"{site.name} is not what `attention` comes to on any of the ranks"
            raise TextMismatch(site.node.lineno, site.function, words)
    named: dict[str, list[str]] = {}
    for site in sites:
        named.setdefault(site.function, []).append(site.name)
    return Summary(chosen, mesh.size, events, {name: tuple(each) for name, each in named.items()})


def sample(mesh: Mesh) -> list[int]:
    """All ranks of a small mesh; of a large one, first, second and last of each dimension."""
    ranks = range(mesh.size)
    if mesh.size <= MOST_RANKS:
        return list(ranks)
    ends = {dim.name: {0, 1, dim.size - 1} for dim in mesh.dims}
    return [r for r in ranks if all(i in ends[d] for d, i in mesh.coordinate(r).items())]


def _interpret(run: Interpreter, playback: Playback, with_lse: bool) -> None:
    """Call `attention`, and see its result."""
    scale = 0.5 if with_lse else None  # handed on, or made from the head size
    tensors = playback.inputs(scale)
    node = run.module.functions["attention"]
    try:
        values = {"scale": scale, "seq": None, "return_lse": with_lse}
        result = run.top["attention"](*tensors, playback.mesh, **values)
        run.frames.append(["attention", node.end_lineno])
        playback.result(result, with_lse)
    except TextMismatch:
        raise
    except Exception as error:
        raise run.mismatch(error) from error


# --- the whole module -----------------------------------------------------------------------


def _module(tree: ast.Module) -> Module:
    """Its definitions; whatever could change one later is refused."""
    module = Module({}, {}, {}, {})
    for node in ast.walk(tree):
        nested = isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body
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
            case ast.If(ast.Compare(ast.Name("__name__"))):
                continue
            case _:
                raise _not_understood(stmt)
        if any(name in each for name in new for each in module) or "*" in new:
            raise _not_understood(stmt)
        table.update(new)
    return module


def _literal(value: ast.expr | None) -> object:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        return value  # a syntax tree: nothing that `attention` could use


def _not_understood(node: ast.AST) -> TextMismatch:
    words = ast.unparse(node).splitlines()[0]
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
                return f"{path(value)}.{name}" if path(value) else ""
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
