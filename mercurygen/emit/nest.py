"""Emitted text of the nest: how tiles come by, what the mask leaves of each, and the merge."""

from __future__ import annotations

from mercurygen.emit import direct, held, kernels, packed, results, ring_kinds, walk, windows
from mercurygen.emit.border import runs_argument
from mercurygen.emit.levels import partial
from mercurygen.emit.loops import (
    column_parts,
    every_chunk,
    leading,
    levels,
    part_counts,
    walking,
)
from mercurygen.emit.masks import LISTED, Form, mask_form
from mercurygen.emit.needed import need_form
from mercurygen.emit.words import letters, variable
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Plan


def group_dims(plan: Plan) -> tuple[str, ...]:
    """The dimensions that `_attend` needs the groups of: tiles come along them, or rows differ."""
    if partial(plan):
        return tuple(results.group_dims(plan))
    stages = walking(plan) if part_counts(plan) else plan.nest.stages
    by_rows = mask_form(plan) in (*LISTED, "documents")
    rows = plan.row_dims if by_rows or not part_counts(plan) else ()
    return plan.program.mesh.in_order({*rows, *(stage.dim for stage in stages)})


def needs_attend(plan: Plan) -> bool:
    """Whether the body is more than one call of the kernel on what the border leaves.

    The Triton kernel's result is rounded after it, too.
    """
    if plan.nest.begin == "only" and plan.program.kernel == TRITON:
        return True
    if part_counts(plan):
        return plan.nest.begin != "only" or partial(plan)
    if windows.apart(plan):
        return True  # rows of other lengths than these may see no key
    if column_parts(plan) > 1:
        return True
    return bool(plan.nest.stages or plan.program.replicated)


def attend_call(plan: Plan, tiles: str) -> str:
    """The call of the body on q, k and v."""
    if not needs_attend(plan) and plan.program.documents:
        return packed.whole_call(plan, tiles)
    if not needs_attend(plan):
        return kernels.call(plan, tiles, plan.program.mask != "full")
    groups = "".join(f", {variable(dim)}" for dim in group_dims(plan))
    documents = ", borders" if plan.program.documents else ""
    more = windows.argument(plan) + (", i" if _rows_in_parts(plan) else "")
    return f"_attend({tiles}{documents}{groups}, scale{more})"


def _rows_in_parts(plan: Plan) -> bool:
    """Whether the body has to know which part of the rows it is on."""
    return "S_q" in part_counts(plan) and mask_form(plan) == "chunks"


def attend(plan: Plan) -> str:
    """`_attend`: the body on every tile that comes by."""
    nest, form, own = plan.nest, mask_form(plan), held.inside(plan)
    groups = "".join(f", {variable(dim)}: dist.ProcessGroup" for dim in group_dims(plan))
    documents = ", borders: list[int]" if form == "documents" else ""
    lines = [
        f"def _attend(q: Tensor, k: Tensor, v: Tensor{documents}{groups}, scale: float"
        f"{windows.parameter(plan)}{', i: int' if _rows_in_parts(plan) else ''})"
        " -> tuple[Tensor, Tensor]:",
        f'    """q [B, s, h, D], k [B, {own}, k, D], v [B, {own}, k, E] '
        '-> out [B, s, h, E], lse [B, h, s]"""',
    ]
    fresh = part_counts(plan) or any("k" in swap.tensors for swap in plan.before)  # dense already
    tiles = "(k, v)" if fresh else "(k.contiguous(), v.contiguous())"
    for stage in () if part_counts(plan) else leading(plan):
        tiles = f"_gather({tiles}, {variable(stage.dim)}{runs_argument(plan, stage.join)})"
    if leading(plan) and not walking(plan) and not part_counts(plan):
        lines.append(f"    k, v = {tiles}")
    if form == "documents":
        return "\n".join([*lines, *_of_documents(plan, tiles)])
    if nest.begin == "only":
        return "\n".join([*lines, *kernels.returned(plan, _held(plan))])
    if walking(plan):
        lines.append(f"    tiles = {_walk_call(plan, tiles)}")
    elif column_parts(plan) > 1:
        count = column_parts(plan)
        lines.append(
            f"    tiles = zip(k.chunk({count}, dim=1), v.chunk({count}, dim=1), strict=True)"
        )
    begins = _first(plan, form) if nest.begin == "first" else _empty()
    lines += begins if not lines[-1].endswith('"""') else begins[1:]  # else after a blank line
    if form in LISTED:
        places = ", ".join(
            f"[{variable(dim)}.rank()]" if dim in plan.row_dims else f'range(MESH["{dim}"])'
            for dim in plan.program.order.dims
        )
        mine = _all_chunks(plan, places)
        if "S_q" in part_counts(plan):
            mine = f"_run({mine}, i, {part_counts(plan)['S_q']})"
        lines.append(f"    mine = {mine}")
        sized = form == "chunks" and not windows.apart(plan)
        lines += ["    size = q.shape[1] // len(mine)"] if sized else []
    lines += _merges(plan, form)
    return "\n".join([*lines, *kernels.rounded(plan, _held(plan))])


def _of_documents(plan: Plan, tiles: str) -> list[str]:
    """The rest of the body on packed documents."""
    if walking(plan):
        lines = [
            f"    tiles = {_walk_call(plan, tiles)}",
            *packed.first(plan),
            *packed.merges(plan),
        ]
    else:
        lines = packed.gathered(plan, _empty())
    return lines if plan.nest.begin == "only" else [*lines, *kernels.rounded(plan, _held(plan))]


def _held(plan: Plan) -> str:
    """Variables of what has come from other ranks at the end of the body."""
    if part_counts(plan):
        return ""
    return "keys, values" if walking(plan) else "k, v" if leading(plan) else ""


def _walk_call(plan: Plan, tiles: str) -> str:
    found = levels(plan)
    if len(found) > 1:
        dims = ", ".join(variable(dim) for dim in walk.nest_dims(plan))
        more = windows.argument(plan) if ring_kinds.any_short(plan) else ""
        return f"_walk_tiles({tiles}, {dims}{more})"
    dim, gathers = found[0]
    beside = "".join(f", {variable(each)}" for each in direct.beside(plan))
    beside += windows.argument(plan) if ring_kinds.short(plan, dim) else ""
    call = f"{ring_kinds.ring_name(plan, dim)}({tiles}, {variable(dim)}{beside})"
    for stage in gathers:
        call = f"_gather_ahead({call}, {variable(stage.dim)}{runs_argument(plan, stage.join)})"
    return call


def _first(plan: Plan, form: Form) -> list[str]:
    """The first tile, our own, is one block: its result is what the others are merged into."""
    owner = {"all": "", **dict.fromkeys(LISTED, "_, ")}.get(form, "me, ")
    tile = f"{owner}(keys, values)" if owner else "keys, values"
    masked = plan.program.mask != "full"
    return [
        "",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {kernels.call(plan, 'q, keys, values', masked)}",
        *kernels.widened(plan),
    ]


def _empty() -> list[str]:
    return [
        "",
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)",
        "    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)",
    ]


def _merges(plan: Plan, form: Form) -> list[str]:
    """The loop over the tiles that are left, and over what the mask leaves of each."""
    whole = kernels.merged(plan, "out, lse", "q, keys, values", False)
    part = "out[:, rows], lse[:, :, rows]"
    if form == "all":
        return ["    for keys, values in tiles:", f"        {whole}"]
    if form == "before":
        return [
            "    for owner, (keys, values) in tiles:",
            "        if owner < me:  # a later owner's tokens come after all of ours",
            f"            {whole}",
        ]
    if form == "stripes" and plan.program.banded:
        (dim,) = plan.row_dims
        me = "me" if plan.nest.begin == "first" else f"{variable(dim)}.rank()"
        return [
            "    for owner, (keys, values) in tiles:",
            f"        for rows, cols, band in _visible({me}, owner"
            f"{windows.sized(plan, 'q.shape[1]')}, window):  # or none",
            "            " + kernels.merged(plan, part, _CUT_TILES, kernels.CUT),
        ]
    if form in ("halves", "stripes"):
        tokens = ", q.shape[1]" if form == "halves" else ""
        tensors = "q[:, rows], keys[:, cols], values[:, cols]"
        return [
            "    for owner, (keys, values) in tiles:",
            f"        rows, cols = _visible(me, owner{tokens})",
            f"        {kernels.merged(plan, part, tensors, form == 'stripes')}",
        ]
    tiled = walking(plan) or column_parts(plan) > 1
    keys, values = ("keys", "values") if tiled else ("k", "v")
    tensors = f"q[:, rows], {keys}[:, cols], {values}[:, cols]"
    here = plan.program.banded and need_form(plan) == "chunks"
    visible = "_visible_here" if here else "_visible"
    if form == "spaced":
        loop = [
            f"rows, cols = _visible(mine, {_tile_chunks(plan)})",
            kernels.merged(plan, part, tensors, True),
        ]
    else:
        loop = [
            f"for rows, cols, {kernels.mask_word(plan)} in "
            f"{visible}(mine, {_tile_chunks(plan)}{windows.sized(plan, 'size')}"
            f"{windows.argument(plan)}):",
            f"    {kernels.merged(plan, part, tensors, kernels.CUT)}",
        ]
    if not tiled:
        return [f"    {line}" for line in loop]
    items = "enumerate(tiles)" if column_parts(plan) > 1 else "tiles"
    return [
        f"    for {_owner(plan)}, (keys, values) in {items}:",
        *(f"        {line}" for line in loop),
    ]


_CUT_TILES = "q[:, rows], keys[:, cols], values[:, cols]"


def _owner(plan: Plan) -> str:
    """The owner of a tile, as the walk yields it: one index, or one along every walk."""
    names = letters(plan.program.mesh.dims)
    walks = [names[dim] for dim in plan.nest.walks] or ["j"]
    return walks[0] if len(walks) == 1 else f"({', '.join(walks)})"


def _tile_chunks(plan: Plan) -> str:
    names = letters(plan.program.mesh.dims)
    places = ", ".join(
        f"[{names[dim]}]" if dim in plan.nest.walks else f'range(MESH["{dim}"])'
        for dim in plan.program.order.dims
    )
    chunks = _all_chunks(plan, places)
    count = column_parts(plan)
    return f"_run({chunks}, j, {count})" if count > 1 else chunks


def _all_chunks(plan: Plan, places: str) -> str:
    """The numbers of chunks that ranks at some places own."""
    if plan.program.order.dims:
        return f"_chunks({places})"
    return every_chunk(plan)
