"""Emitted text of partial results: what the ranks' keys give for queries, and its way home.

A nest of several loops prints as functions that call each other: `_attend`, one for every loop
inside it, and `_partial` for what is inside all of them.
"""

from __future__ import annotations

from mercurygen.emit import bodies, held, kernels, rings
from mercurygen.emit.levels import PAIR, Level, Names, partial, queries_stay, with_owner
from mercurygen.emit.loops import part_counts
from mercurygen.emit.needed import rows_are_cut
from mercurygen.emit.ways import beside_home, reductions, runs_of, ways_home
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Loop, Plan


def not_emitted(plan: Plan) -> str | None:
    """What of a plan with partial results has no text yet."""
    if not partial(plan):
        return "several loops" if len(plan.nest.loops) > 1 else None
    for loop in plan.nest.loops:
        if loop.partner:
            return "partial results of a skewed pair of shifts"
        if not loop.tensors and not _cut_evenly(plan, loop):
            return "results that go home from tokens in this order"
    if queries_stay(plan) and not _alone(plan):
        return "queries that come by where their results are not sent home"
    if any(reduce.dtype for reduce in plan.nest.reduces):
        return "partial results that cross links in less than float32"
    if plan.nest.begin == "first" and plan.program.mask != "full":
        return "partial results that begin with a block that the mask cuts"
    return None


def _cut_evenly(plan: Plan, loop: Loop) -> bool:
    """Whether each owner's queries are one of equal runs of those that are here."""
    order, loops = plan.program.order, plan.nest.loops
    dims = order.dims[: order.dims.index(loop.walks[-1].dim)]
    around = (walk.dim for each in loops[: loops.index(loop)] for walk in each.walks)
    single = {*plan.program.parallel_dims(loop.axis), *around}  # of whose ranks one's are here
    return order.kind == "contiguous" and single >= set(dims)


def _alone(plan: Plan) -> bool:
    """Whether queries that come by have one ring, nothing else does, and tiles are equal runs."""
    if sum(len(loop.walks) for loop in plan.nest.loops) > 1 or plan.tiles:
        return False
    (loop,) = (loop for loop in plan.nest.loops if loop.walks)
    return len(loop.stages) == 1 and not rows_are_cut(plan) and _cut_evenly(plan, loop)


def heading(plan: Plan) -> str:
    """What moves, in a few words."""
    words = []
    for loop in plan.nest.loops:
        names = " and ".join(loop.tensors)
        if loop.tensors:
            how = "come by" if len(loop.tensors) > 1 else "comes by"
            words.append(f"{names} {how}" if loop.walks else f"{names} gathered")
        if loop.outputs:
            words.append("results go home")
    words += ["results are merged"] * bool(plan.nest.reduces)
    return ", ".join(dict.fromkeys(words))


def group_dims(plan: Plan) -> list[str]:
    """Dimensions whose communicator `_attend` is given."""
    names = Names(plan)
    dims = {*names.groups(0), *(reduce.dim for reduce in plan.nest.reduces)}
    return [dim for dim in plan.program.mesh.names if dim in dims]


def functions(plan: Plan) -> list[str]:
    """`_attend` and what is inside it, callers first; not what brings tiles."""
    names = Names(plan)
    texts = [_reducing(names)] if plan.nest.reduces else []
    for index in range(len(names.levels)):
        if not names.is_block(index):
            texts.append(_function(names, index))
    return [*texts, *ways_home(names), *reductions(plan)]


def _reducing(names: Names) -> str:
    """`_attend` around the reductions."""
    plan = names.plan
    lines = [
        names.signature("_attend", [], group_dims(plan), PAIR),
        _shapes(names.plan),
        f"    out, lse = {names.call(0)}",
    ]
    if names.rounded:
        lines.append("    out = out.to(lse.dtype)")
    for reduce in plan.nest.reduces:
        group = variable(reduce.dim)
        if reduce.axis is None:
            lines.append(f"    _all_reduce(out, lse, {group})")
        else:
            given = f"out, lse, {group}{runs_of(plan, reduce)}"
            lines.append(f"    out, lse = _reduce_scatter({given})")
    return "\n".join([*lines, "    return out.to(q.dtype), lse"])


def _shapes(plan: Plan) -> str:
    """What `_attend` is given and returns."""
    q, k, out, lse = (held.length(plan, x).replace("S", "s") for x in ("q", "k", "out", "lse"))
    given = f"q [B, {q}, h, D], k [B, {k}, k, D], v [B, {k}, k, E]"
    return f'    """{given} -> out [B, {out}, h, E], lse [B, h, {lse}]"""'


def _function(names: Names, index: int) -> str:
    """One level."""
    level, first = names.levels[index], index == 0
    whole = first and not names.plan.nest.reduces  # this is `_attend`
    result = "list[Tensor]" if names.trimmed and level.last else PAIR
    lines = [
        names.signature(names.function(index), names.places(index), names.groups(index), result),
        *_doc(names, index, whole),
    ]
    dense = _dense_first(names, index)
    if dense:
        plain = ", ".join(dense)
        lines.append(f"    {plain} = {', '.join(f'{x}.contiguous()' for x in dense)}")
    for loop in level.gathers:
        gathered = bodies.tiles(names, loop, index, loop.stages)
        target = ", ".join(loop.tensors) if len(loop.tensors) > 1 else f"({loop.tensors[0]},)"
        lines.append(f"    {target} = {gathered}")
    lines += bodies.prepared(names, index)
    if level.last:
        return "\n".join([*lines, *bodies.body(names, index)])
    if not level.home:
        end = ["    return out.to(q.dtype), lse" if whole else "    return out, lse"]
        return "\n".join([*lines, *_ring(names, index), *end])
    shares, home = _home(names, index)
    if not whole:
        return "\n".join([*lines, shares, f"    return {home}"])
    end = [f"    out, lse = {home}", "    return out.to(q.dtype), lse"]
    return "\n".join([*lines, shares, *end])


def _doc(names: Names, index: int, whole: bool) -> list[str]:
    """What a level does."""
    level = names.levels[index]
    if whole:
        return [_shapes(names.plan)]
    if not level.last:
        dims = " and ".join(level.dims)
        text = f"Out and lse of our queries over the keys that all ranks along {dims} have here."
        return [f'    """{text}"""']
    if names.trimmed:
        return ['    """Out and lse of the rows of q that see a key of k; [] if there are none."""']
    if names.raw:
        return ['    """Out and lse of q over our keys, as the kernel leaves them."""']
    if queries_stay(names.plan):
        return [
            '    """Out and lse of the queries of all ranks, which come by, over the keys k."""'
        ]
    keys = "all keys that come by" if level.loop else "the keys k"
    none = "; 0 and -inf of rows that see none" if names.causal else ""
    return [f'    """Out and lse of q over {keys}{none}."""']


def _dense_first(names: Names, index: int) -> list[str]:
    """Tensors that functions inside the outermost send: made contiguous once."""
    if index or names.levels[0].last or part_counts(names.plan):
        return []
    inner = [t for level in names.levels[1:] for t in _moved(level)]
    outer = _moved(names.levels[0])
    return [x for x in dict.fromkeys(inner) if x not in outer and not bodies.packed(names.plan, x)]


def _moved(level: Level) -> list[str]:
    loops = (*level.gathers, *([level.loop] if level.loop else []))
    return [name for loop in loops for name in loop.tensors]


def _home(names: Names, index: int) -> tuple[str, str]:
    """A loop whose results go to the owners of its tiles: a line, and what it comes to."""
    loop, plan = names.levels[index].loop, names.plan
    dim = loop.walks[-1].dim
    owner, tile = names.letters[dim], "(queries,)" if loop.tensors else "queries"
    inner = names.call(index + 1, q="queries")
    if names.blank:  # no row may see a key of ours
        inner = f"{inner} if queries.numel() else ()"
    share = f"({owner}, {inner})" if loop.home == "direct" else inner
    named = owner if loop.home == "direct" or names.causal else "_"
    target = f"{named}, {tile}" if with_owner(plan) else tile
    line = f"    shares = ({share} for {target} in {bodies.coming(names, index)})"
    if loop.home == "relayed":
        reverse = loop.walks[-1].reverse
        on = rings.way_argument(plan, reverse) if rings.carries_both_ways(plan) else ""
        return line, f"_carry(shares, {variable(dim)}{on})"
    return line, f"_to_owners(shares, {', '.join(map(variable, (dim, *beside_home(names))))})"


def _ring(names: Names, index: int) -> list[str]:
    """A loop around others whose results go home."""
    owner = names.owner(index) if names.causal else "_"
    tile = f"{owner}, (keys, values)" if with_owner(names.plan) else "keys, values"
    inner = names.call(index + 1, k="keys", v="values")
    more = f"_merge(out, lse, *{inner})"
    if names.is_block(index + 1):
        more = kernels.merged(names.plan, "out, lse", "q, keys, values", False)
    return [
        f"    tiles = {bodies.coming(names, index)}",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {inner}",
        f"    for {tile} in tiles:",
        f"        {more}",
    ]
