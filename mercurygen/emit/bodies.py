"""Emitted text of the innermost function of partial results, and of what brings its tiles."""

from __future__ import annotations

from mercurygen.emit import direct, kernels, masks
from mercurygen.emit.border import runs_argument
from mercurygen.emit.levels import Names, queries_stay, with_owner
from mercurygen.emit.loops import column_parts, part_counts
from mercurygen.emit.needed import rows_are_cut
from mercurygen.emit.ring_kinds import name_of, nested
from mercurygen.emit.walk import nest_dims, spare_call
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Gather, Loop, Plan


def packed(plan: Plan, name: str) -> bool:
    """Whether the border leaves a tensor contiguous."""
    return any(name in swap.tensors for swap in plan.before)


def tiles(names: Names, loop: Loop, index: int, stages: tuple) -> str:
    """What a loop starts from, gathered over some stages."""
    fresh = index > 0 or part_counts(names.plan)  # dense already
    own = [x if fresh or packed(names.plan, x) else f"{x}.contiguous()" for x in loop.tensors]
    tiles = f"({own[0]},)" if len(own) == 1 else f"({', '.join(own)})"
    for stage in stages:
        if isinstance(stage, Gather):
            group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
            tiles = f"_gather({tiles}, {group})"
    return tiles


def prepared(names: Names, index: int) -> list[str]:
    """Lines before a ring beside a nest, whose buffers are made of what it starts from.

    A ring that has its own buffers is given that as it comes.
    """
    loop = names.levels[index].loop
    if not (_beside_nest(names, index) and loop.tensors):
        return []
    made = tiles(names, loop, index, () if part_counts(names.plan) else loop.leading)
    plain = ", ".join(loop.tensors)
    if made in (f"({plain})", f"({plain},)"):
        return []
    if made.startswith("("):  # no gather: as a tuple without its brackets
        return [f"    {plain} = {made[1:-1].removesuffix(',')}"]
    target = plain if len(loop.tensors) > 1 else f"({plain},)"
    return [f"    {target} = {made}"]


def _beside_nest(names: Names, index: int) -> bool:
    loop = names.levels[index].loop
    return loop is not None and nested(names.plan) and len(loop.walks) == 1


def coming(names: Names, index: int) -> str:
    """The tiles of a level, one after the other."""
    loop, plan = names.levels[index].loop, names.plan
    walk = loop.walks[-1]
    group = variable(walk.dim)
    if not loop.tensors:
        return f"_by_owner(q, {group})"
    if _beside_nest(names, index):
        start = f"({', '.join(loop.tensors)}{',' if len(loop.tensors) == 1 else ''})"
        given = f"{spare_call(plan, walk, start)}, "
    else:
        start = tiles(names, loop, index, () if part_counts(plan) else loop.leading)
        given = ""
    if len(loop.walks) > 1:
        return f"_walk_tiles({start}, {', '.join(map(variable, nest_dims(plan)))})"
    beside = "".join(f", {variable(dim)}" for dim in direct.beside(plan)) if walk.direct else ""
    call = f"{name_of(plan, walk)}({start}, {given}{group}{beside})"
    for stage in loop.walking[1:]:
        group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
        call = f"_gather_ahead({call}, {group})"
    return call


def body(names: Names, index: int) -> list[str]:
    """The body on what the mask leaves of tiles."""
    level = names.levels[index]
    if names.raw and not names.causal:
        return [f"    return {kernels.call(names.plan, 'q, k, v', False)}"]
    if names.plan.nest.begin == "first":
        return _first(names, index)
    if names.trimmed:
        return _one_block(names)
    rows, cols = (names.chunks(axis) for axis in names.program.mask_axes)
    if rows_are_cut(names.plan):
        return _of_last_rows(names, rows, cols)
    if queries_stay(names.plan):
        return _of_queries(names, index, rows, cols)
    plan = names.plan
    lines = [
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)",
        "    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)",
    ]
    count = column_parts(plan)
    tiled = level.loop or count > 1
    k, v = ("keys", "values") if tiled else ("k", "v")
    parts = f"zip(k.chunk({count}, dim=1), v.chunk({count}, dim=1), strict=True)"
    if not names.causal:
        tile = f"_, ({k}, {v})" if level.loop and with_owner(names.plan) else f"{k}, {v}"
        lines.append(f"    for {tile} in {coming(names, index) if level.loop else parts}:")
        whole = kernels.merged(plan, "out, lse", f"q, {k}, {v}", False)
        return [*lines, f"        {whole}", "    return out, lse"]
    lines.append(f"    mine = {rows}")
    if masks.mask_form(plan) != "spaced":
        lines.append("    size = q.shape[1] // len(mine)")
    if level.loop:
        lines.append(f"    for {names.owner(index)}, ({k}, {v}) in {coming(names, index)}:")
    elif tiled:
        lines.append(f"    for j, ({k}, {v}) in enumerate({parts}):")
        cols = f"_run({cols}, j, {count})"
    pad = "        " if tiled else "    "
    blocks = _blocks(plan, f"q[:, rows], {k}[:, cols], {v}[:, cols]", cols)
    return [*lines, *(f"{pad}{line}" for line in blocks), "    return out, lse"]


def _blocks(plan: Plan, tensors: str, cols: str) -> list[str]:
    """Lines that merge what the mask leaves of a tile of these columns."""
    part = "out[:, rows], lse[:, :, rows]"
    if masks.mask_form(plan) == "spaced":
        square = kernels.merged(plan, part, tensors, True)
        return [f"rows, cols = _visible(mine, {cols})", square]
    return [
        f"for rows, cols, {kernels.mask_word(plan)} in _visible(mine, {cols}, size):",
        f"    {kernels.merged(plan, part, tensors, kernels.CUT)}",
    ]


def _one_block(names: Names) -> list[str]:
    """The body where the mask leaves one block at most, which is the result."""
    plan, word = names.plan, kernels.mask_word(names.plan)
    rows, cols = (names.chunks(axis) for axis in names.program.mask_axes)
    share = kernels.call(plan, "q[:, rows], k[:, cols], v[:, cols]", kernels.CUT)
    lines, size = [f"    theirs = {rows}", f"    mine = {cols}"], "q.shape[1] // len(theirs)"
    if rows_are_cut(plan):
        lines += [
            "    size = k.shape[1] // len(mine)",
            "    theirs = theirs[len(theirs) - q.shape[1] // size :]  # q has the last of them",
        ]
        size = "size"
    return [
        *lines,
        f"    blocks = _visible(theirs, mine, {size})  # one at most",
        f"    return [x for rows, cols, {word} in blocks for x in {share}]",
    ]


def _of_queries(names: Names, index: int, rows: str, cols: str) -> list[str]:
    """The body on queries that come by, whose results stay: each tile's are a part of them."""
    plan, word = names.plan, kernels.mask_word(names.plan)
    walk = names.levels[index].loop.walks[-1]
    owner, size = names.letters[walk.dim], f"{variable(walk.dim)}.size()"
    lines = [
        f"    tokens = {size} * q.shape[1]",
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    out = q.new_zeros(q.shape[0], tokens, q.shape[2], v.shape[3], dtype=dtype)",
        "    lse = q.new_full((q.shape[0], q.shape[2], tokens), -torch.inf, dtype=dtype)",
    ]
    of_owner = f"out.chunk({size}, dim=1)[{owner}], lse.chunk({size}, dim=2)[{owner}]"
    lines += [f"    mine = {cols}"] if names.causal else []
    lines.append(f"    for {owner}, (queries,) in {coming(names, index)}:")
    if not names.causal:
        return [
            *lines,
            f"        {kernels.merged(plan, of_owner, 'queries, k, v', False)}",
            "    return out, lse",
        ]
    tensors = "queries[:, rows], k[:, cols], v[:, cols]"
    block = kernels.merged(plan, "part[:, rows], part_lse[:, :, rows]", tensors, kernels.CUT)
    return [
        *lines,
        f"        theirs = {rows}",
        f"        part, part_lse = {of_owner}",
        f"        for rows, cols, {word} in "
        "_visible(theirs, mine, queries.shape[1] // len(theirs)):",
        f"            {block}",
        "    return out, lse",
    ]


def _of_last_rows(names: Names, rows: str, cols: str) -> list[str]:
    """The body where q has only the last rows of a tile: no others see a key."""
    plan, word = names.plan, kernels.mask_word(names.plan)
    block = kernels.merged(
        plan,
        "late[:, rows], late_lse[:, :, rows]",
        "q[:, rows], k[:, cols], v[:, cols]",
        kernels.CUT,
    )
    return [
        f"    theirs = {rows}",
        f"    mine = {cols}",
        "    size = k.shape[1] // len(mine)",
        "    tokens = len(theirs) * size",
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    out = q.new_zeros(q.shape[0], tokens, q.shape[2], v.shape[3], dtype=dtype)",
        "    lse = q.new_full((q.shape[0], q.shape[2], tokens), -torch.inf, dtype=dtype)",
        "    first = tokens - q.shape[1]  # q has the last rows of the tile",
        "    late, late_lse = out[:, first:], lse[:, :, first:]",
        f"    for rows, cols, {word} in _visible(theirs[first // size :], mine, size):",
        f"        {block}",
        "    return out, lse",
    ]


def _first(names: Names, index: int) -> list[str]:
    """The body on tiles of which the first is one block: the others are merged into its result."""
    tile = "_, (keys, values)" if with_owner(names.plan) else "keys, values"
    plan, tensors = names.plan, "q, keys, values"
    return [
        f"    tiles = {coming(names, index)}",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {kernels.call(plan, tensors, False)}",
        *kernels.widened(plan),
        f"    for {tile} in tiles:",
        f"        {kernels.merged(plan, 'out, lse', tensors, False)}",
        "    return out, lse",
    ]
