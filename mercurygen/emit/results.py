"""Emitted text of partial results: what the ranks' keys give for queries, and its way home.

A nest of several loops prints as functions that call each other: `_attend`, one for every loop
inside it, and `_partial` for what is inside all of them.
"""

from __future__ import annotations

from mercurygen.emit import held, kernels
from mercurygen.emit.border import is_striped, runs_argument
from mercurygen.emit.levels import PAIR, Level, Names, partial, with_owner
from mercurygen.emit.loops import part_counts
from mercurygen.emit.needed import need_form
from mercurygen.emit.ring import name_of, ring_of
from mercurygen.emit.ways import reduce_outer, reductions, ways_home
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Gather, Loop, Plan, Reduce


def not_emitted(plan: Plan) -> str | None:
    """What of a plan with partial results has no text yet."""
    if not partial(plan):
        return "several loops" if len(plan.nest.loops) > 1 else None
    for loop in plan.nest.loops:
        if len(loop.walks) > 1 or loop.partner:
            return "partial results of rings inside rings"
        if not loop.tensors and not _cut_evenly(plan, loop):
            return "results that go home from tokens in this order"
    if any(reduce.axis for reduce in plan.nest.reduces) and is_striped(plan):
        return "partial results that are dealt out token by token"
    if any(loop.walks and "q" in loop.tensors and not loop.home for loop in plan.nest.loops):
        return "queries that come by where their results are not sent home"
    what = _ring_not_emitted(plan)
    if what is not None:
        return what
    if any(reduce.dtype for reduce in plan.nest.reduces):
        return "partial results that cross links in less than float32"
    if plan.nest.begin == "first" and plan.program.mask != "full":
        return "partial results that begin with a block that the mask cuts"
    return None


def _ring_not_emitted(plan: Plan) -> str | None:
    """Which way that tiles come by beside partial results has no text yet."""
    loops = plan.nest.loops
    rings = {ring_of(plan, loop.walks[-1]) for loop in loops if loop.tensors and loop.walks}
    if any(ring.direct for ring in rings) and need_form(plan) != "whole":
        return "partial results where direct shifts bring what the mask leaves of tiles"
    carried = [loop for loop in loops if loop.home == "relayed"]
    own = {ring_of(plan, loop.walks[-1]) for loop in carried if loop.tensors}
    if any(ring.direct or ring.both for ring in own) or carried and any(r.reverse for r in rings):
        return "results that travel on where tiles come by otherwise than from the previous rank"
    return None


def _cut_evenly(plan: Plan, loop: Loop) -> bool:
    """Whether each owner's queries are one of equal runs of those that are here."""
    dim = loop.walks[-1].dim
    order, mesh = plan.program.order, plan.program.mesh
    return order.kind == "contiguous" and (
        order.dims[0] == dim
        or all(mesh.extent(d) == 1 for d in order.dims[: order.dims.index(dim)])
    )


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
            lines.append(f"    out, lse = _reduce_scatter(out, lse, {group}{_outer(plan, reduce)})")
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
        gathered = _tiles(names, loop, index, loop.stages)
        target = ", ".join(loop.tensors) if len(loop.tensors) > 1 else f"({loop.tensors[0]},)"
        lines.append(f"    {target} = {gathered}")
    if level.last:
        return "\n".join([*lines, *_body(names, index)])
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
        dim = level.loop.walks[-1].dim
        text = f"Out and lse of our queries over the keys that all ranks along {dim} have here."
        return [f'    """{text}"""']
    if names.trimmed:
        return ['    """Out and lse of the rows of q that see a key of k; [] if there are none."""']
    if names.raw:
        return ['    """Out and lse of q over our keys, as the kernel leaves them."""']
    keys = "all keys that come by" if level.loop else "the keys k"
    none = "; 0 and -inf of rows that see none" if names.causal else ""
    return [f'    """Out and lse of q over {keys}{none}."""']


def _dense_first(names: Names, index: int) -> list[str]:
    """Tensors that functions inside the outermost send: made contiguous once."""
    if index or names.levels[0].last or part_counts(names.plan):
        return []
    inner = [t for level in names.levels[1:] for t in _moved(level)]
    outer = _moved(names.levels[0])
    return [x for x in dict.fromkeys(inner) if x not in outer and not _packed(names.plan, x)]


def _moved(level: Level) -> list[str]:
    loops = (*level.gathers, *([level.loop] if level.loop else []))
    return [name for loop in loops for name in loop.tensors]


def _packed(plan: Plan, name: str) -> bool:
    """Whether the border leaves a tensor contiguous."""
    return any(name in swap.tensors for swap in plan.before)


def _tiles(names: Names, loop: Loop, index: int, stages: tuple) -> str:
    """What a loop starts from, gathered over some stages."""
    fresh = index > 0 or part_counts(names.plan)  # dense already
    own = [x if fresh or _packed(names.plan, x) else f"{x}.contiguous()" for x in loop.tensors]
    tiles = f"({own[0]},)" if len(own) == 1 else f"({', '.join(own)})"
    for stage in stages:
        if isinstance(stage, Gather):
            group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
            tiles = f"_gather({tiles}, {group})"
    return tiles


def _walk(names: Names, index: int) -> str:
    """The tiles of a level, one after the other."""
    loop = names.levels[index].loop
    walk = loop.walks[-1]
    if not loop.tensors:
        return f"_by_owner(q, {variable(walk.dim)})"
    ring = name_of(names.plan, walk)
    leading = () if part_counts(names.plan) else loop.leading
    call = f"{ring}({_tiles(names, loop, index, leading)}, {variable(walk.dim)})"
    for stage in loop.walking[1:]:
        group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
        call = f"_gather_ahead({call}, {group})"
    return call


def _home(names: Names, index: int) -> tuple[str, str]:
    """A loop whose results go to the owners of its tiles: a line, and what it comes to."""
    loop, plan = names.levels[index].loop, names.plan
    dim = loop.walks[-1].dim
    owner, tile = names.letters[dim], "(queries,)" if loop.tensors else "queries"
    inner = names.call(index + 1, q="queries")
    share = f"({owner}, {inner})" if loop.home == "direct" else inner
    named = owner if loop.home == "direct" or names.causal else "_"
    target = f"{named}, {tile}" if with_owner(plan) else tile
    way = "_to_owners" if loop.home == "direct" else "_carry"
    line = f"    shares = ({share} for {target} in {_walk(names, index)})"
    return line, f"{way}(shares, {variable(dim)})"


def _ring(names: Names, index: int) -> list[str]:
    """A loop around others whose results go home."""
    owner = names.letters[names.levels[index].loop.walks[-1].dim] if names.causal else "_"
    tile = f"{owner}, (keys, values)" if with_owner(names.plan) else "keys, values"
    inner = names.call(index + 1, k="keys", v="values")
    more = f"_merge(out, lse, *{inner})"
    if names.is_block(index + 1):
        more = kernels.merged(names.plan, "out, lse", "q, keys, values", False)
    return [
        f"    tiles = {_walk(names, index)}",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {inner}",
        f"    for {tile} in tiles:",
        f"        {more}",
    ]


def _body(names: Names, index: int) -> list[str]:
    """The body on what the mask leaves of tiles."""
    level = names.levels[index]
    if names.raw and not names.causal:
        return [f"    return {kernels.call(names.plan, 'q, k, v', False)}"]
    if names.plan.nest.begin == "first":
        return _first(names, index)
    rows, cols = (names.chunks(axis) for axis in names.program.mask_axes)
    plan, word = names.plan, kernels.mask_word(names.plan)
    if names.trimmed:
        share = kernels.call(plan, "q[:, rows], k[:, cols], v[:, cols]", kernels.CUT)
        return [
            f"    theirs, mine = {rows}, {cols}",
            "    blocks = _visible(theirs, mine, q.shape[1] // len(theirs))  # one at most",
            f"    return [x for rows, cols, {word} in blocks for x in {share}]",
        ]
    lines = [
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)",
        "    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)",
    ]
    k, v = ("keys", "values") if level.loop else ("k", "v")
    pad = "        " if level.loop else "    "
    if not names.causal:
        owner = f"{names.letters[level.loop.walks[-1].dim]}, " if with_owner(names.plan) else ""
        tile = f"_, ({k}, {v})" if owner else f"{k}, {v}"
        lines.append(f"    for {tile} in {_walk(names, index)}:")
        whole = kernels.merged(plan, "out, lse", f"q, {k}, {v}", False)
        return [*lines, f"        {whole}", "    return out, lse"]
    lines += [f"    mine = {rows}", "    size = q.shape[1] // len(mine)"]
    if level.loop:
        owner = names.letters[level.loop.walks[-1].dim]
        lines.append(f"    for {owner}, ({k}, {v}) in {_walk(names, index)}:")
    tensors = f"q[:, rows], {k}[:, cols], {v}[:, cols]"
    block = kernels.merged(plan, "out[:, rows], lse[:, :, rows]", tensors, kernels.CUT)
    return [
        *lines,
        f"{pad}for rows, cols, {word} in _visible(mine, {cols}, size):",
        f"{pad}    {block}",
        "    return out, lse",
    ]


def _first(names: Names, index: int) -> list[str]:
    """The body on tiles of which the first is one block: the others are merged into its result."""
    tile = "_, (keys, values)" if with_owner(names.plan) else "keys, values"
    plan, tensors = names.plan, "q, keys, values"
    return [
        f"    tiles = {_walk(names, index)}",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {kernels.call(plan, tensors, False)}",
        *kernels.widened(plan),
        f"    for {tile} in tiles:",
        f"        {kernels.merged(plan, 'out, lse', tensors, False)}",
        "    return out, lse",
    ]


def _outer(plan: Plan, reduce: Reduce) -> str:
    return f", {reduce.join.outer}" if reduce_outer(plan) else ""
