"""Edits of a module that provably change nothing, each by a rule that says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mutate import Mutant

# Calls that act on more than their result: they communicate, wait, consume, or write in place.
ACTS = ("next", "_merge", "_wait", "_block_forward")
MARKS = ("dist.", "P2POp", ".wait(", "yield", "lerp_", "out=")

MORE = "the ring has as many buffers as it needs, or more: only memory"
ANY = "torch takes an output of any shape with that many elements"
WIDTH = "the CPU's kernel takes head sizes that are no multiple of 8"
SPARE = "[tuple(map(torch.empty_like, tiles)) for _"
COPY = "the values are the same; memory is shared instead of copied"

# (function, how the edited statement begins): why. What no general rule judges.
SINGLE: dict[tuple[str, str], str] = {
    ("shard", "return shard_sequence(full, mesh, PLACEMENTS[name][1]"): "placements are alike",
    ("unshard", "return unshard_sequence(local, mesh, PLACEMENTS[name][1]"): "placements are alike",
    ("_all_gather", "return gather(parts.flatten(1, 1)"): ANY,
    ("_all_gather", "return gather(parts.flatten(0, 2)"): ANY,
    ("_all_gather", "return gather(parts.flatten(0, 0)"): ANY,
    ("_walk_tiles", "for n, of_node in _walk_ring(tiles, _spare(tiles, gpu), node)"): MORE,
    ("_spare", f"return {SPARE} in range(min(3, group.size() - 1))]"): MORE,
    ("_spare", f"return {SPARE} in range(min(2, group.size() + 1))]"): MORE,
    ("_spare", f"return {SPARE} in range(min(2, group.size() - 0))]"): MORE,
    ("_walk_ring", f"spare = {SPARE} in range(min(3, size - 1))]"): MORE,
    ("_walk_ring", f"spare = {SPARE} in range(min(2, size + 1))]"): MORE,
    ("_walk_ring", f"spare = {SPARE} in range(min(2, size - 0))]"): MORE,
    ("_block_forward", "width = -(-max(q.shape[3], v_dim) // 8) * 9"): WIDTH,
    ("_block_forward", "width = -(-max(q.shape[3], v_dim) // 7) * 8"): WIDTH,
    ("_block_forward", "q, k, v = (x if x.shape[2] == width"): "padded by nothing if it is",
    ("_heads_to_sequence", "return (lambda x: x)(parts).flatten"): COPY,
    ("shard_sequence", "return (lambda x: x)(chunks[rank])"): COPY,
    (
        "_visible",
        "before, own = (bisect_left(cols, rows[row]), cols[row] in cols)",
    ): "all are in cols",
    (
        "_chunks",
        "return [*ranks, *(8 - rank",
    ): "numbers of chunks are only compared with each other",
}
# The same for one mesh: what its sizes make of an edit.
MESHES: dict[tuple[str, str, str], str] = {
    ("'node': 2, 'gpu': 2", "_attend", "for owner, (keys, values) in __import__"): (
        "a ring of two has one other tile"
    ),
    ("'node': 2, 'gpu': 3", "_walk_ring", "arriving = spare[step % 3]"): (
        "a ring of three has two steps"
    ),
    ("'gpu': 4", "_walk_ring", f"spare = {SPARE} in range(min(2, size - 2))]"): MORE,
}
# (edit, function, how the statements begin): why.
STATEMENTS: dict[tuple[str, str, str], str] = {
    ("drop", "attention", "q, k, v = _autocast("): "nothing is cast here (test_training.py)",
    ("twice", "attention", "q, k, v = _autocast("): "cast already",
    ("twice", "_block_forward", "q, k, v = (x if"): "padded already",
    ("swap", "_block_forward", "q, k, v = (x if"): "padding keeps the device",
    ("swap", "_block_forward", "if q.is_cuda"): "transposing keeps the device",
    ("twice", "_block_forward", "if q.is_cuda"): "the same kernel again",
    ("drop", "_block_forward", "op = torch.ops.aten._scaled_dot_product_flash_attention$"): (
        "only run on CUDA"
    ),
    ("twice", "_block_forward", "out, lse, *_ = op("): "the same result again: only time",
    ("swap", "_visible", "if before: yield"): "blocks are merged in any order",
}


def reason(mutant: Mutant, acting: set[str]) -> str | None:
    """Why an edit changes nothing in a legal call; None if it may.

    Args:
        mutant: the edit.
        acting: functions of its module that act, see `acting_functions`.
    """
    if not mutant.statements:
        singles = (w for (f, new), w in SINGLE.items() if _is(mutant, f, mutant.new, new))
        meshes = (
            why
            for (mesh, function, new), why in MESHES.items()
            if f"= {{{mesh}}}" in mutant.text and _is(mutant, function, mutant.new, new)
        )
        return next(singles, None) or next(meshes, None)
    for (kind, function, old), why in STATEMENTS.items():
        if kind == mutant.kind and _is(mutant, function, mutant.old + "$", old):
            return why
    if any(_refuses(stmt) for stmt in mutant.statements):
        return "refuses arguments that a legal call does not have (test_module_contract.py)"
    if mutant.kind == "swap":
        first, second = mutant.statements
        return "neither needs the other" if _independent(first, second, acting) else None
    return _once_more(mutant.statements[0], acting) if mutant.kind == "twice" else None


def _is(mutant: Mutant, function: str, text: str, start: str) -> bool:
    return mutant.function == function and text.startswith(start)


def _once_more(stmt: ast.stmt, acting: set[str]) -> str | None:
    """Why a statement may be there twice."""
    match stmt:
        case ast.FunctionDef():
            return "defined again"
        case ast.If(body=[*_, ast.Return()], orelse=[]):
            return "either it returned, or it is false again"
        case ast.For(iter=ast.Name("tiles")) if "yield" not in ast.unparse(stmt):
            return "the generator is exhausted"
        case ast.Expr(ast.Call(ast.Name("_wait") | ast.Attribute(ast.Name(), "wait"))):
            return "what was waited for is over"
        case ast.For(body=[ast.Expr(ast.Call(ast.Attribute(attr="wait")))]):
            return "what was waited for is over"
        case ast.Assign(value=ast.IfExp(ast.Compare(ops=[ast.Is()]))):
            return "it has a value by now"
        case ast.Assign([ast.Tuple(elts)]) if any(isinstance(x, ast.Starred) for x in elts):
            return None  # consumes an iterator
        case ast.Assign(value=value) if not _loads(stmt) & _stores(stmt):
            if not _acts(value, acting) or _generator(value):
                return "the same value again"
        case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(ast.Name(base), "to"))):
            return "of that dtype already" if name == base else None
    return None


def _refuses(stmt: ast.stmt) -> bool:
    if isinstance(stmt, ast.If):
        return all(isinstance(inner, ast.Raise) for inner in stmt.body) and not stmt.orelse
    return isinstance(stmt, ast.Raise) or ast.unparse(stmt).startswith("_check(")


def _independent(first: ast.stmt, second: ast.stmt, acting: set[str]) -> bool:
    jumps = (ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, jumps) for each in (first, second) for node in ast.walk(each)):
        return False
    if _acts(first, acting) and _acts(second, acting):
        return False
    mine, other = _stores(first), _stores(second)
    return not (mine & (_loads(second) | other) or other & _loads(first))


def _generator(value: ast.expr) -> bool:
    """A generator function's call: nothing runs before the first `next`."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("_walk_ring", "_walk_tiles")


def _acts(node: ast.AST, acting: set[str]) -> bool:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    methods = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    return bool(names & acting) or "wait" in methods or any(m.endswith("_") for m in methods)


def acting_functions(text: str) -> set[str]:
    """A module's functions that do more than return a result, or call one that does."""
    tree = ast.parse(text)
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    found = {n for n, f in functions.items() if any(m in _body(f) for m in MARKS)} | set(ACTS)
    while True:
        more = {n for n, f in functions.items() if _called(f) & found} - found
        if not more:
            return found
        found |= more


def _body(function: ast.FunctionDef) -> str:
    return "\n".join(map(ast.unparse, function.body))


def _called(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in _names(function)}


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _loads(node: ast.AST) -> set[str]:
    return {x.id for x in _names(node) if isinstance(x.ctx, ast.Load)} - _bound(node)


def _bound(node: ast.AST) -> set[str]:
    """Variables of comprehensions."""
    found = (x for x in ast.walk(node) if isinstance(x, ast.comprehension))
    return {name.id for each in found for name in _names(each.target)}


def _stores(node: ast.AST) -> set[str]:
    return {x.id for x in _names(node) if isinstance(x.ctx, ast.Store)} - _bound(node)
