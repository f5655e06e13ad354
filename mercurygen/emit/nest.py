"""Emitted text of the nest: how tiles come by, what the mask leaves of each, and the merge."""

from __future__ import annotations

from mercurygen.emit import direct, rings
from mercurygen.emit.border import runs_argument
from mercurygen.emit.loops import leading, levels, walking
from mercurygen.emit.masks import Form, mask_form
from mercurygen.emit.words import letters, variable
from mercurygen.lower.plan import Plan


def attend(plan: Plan) -> str:
    """`_attend`: the body on every tile that comes by."""
    nest, form = plan.nest, mask_form(plan)
    groups = "".join(f", {variable(dim)}: dist.ProcessGroup" for dim in plan.row_dims)
    lines = [
        f"def _attend(q: Tensor, k: Tensor, v: Tensor{groups}, scale: float)"
        " -> tuple[Tensor, Tensor]:",
        '    """q [B, s, h, D], k [B, s, k, D], v [B, s, k, E] '
        '-> out [B, s, h, E], lse [B, h, s]"""',
    ]
    fresh = any("k" in swap.tensors for swap in plan.before)  # packed by the border
    tiles = "(k, v)" if fresh else "(k.contiguous(), v.contiguous())"
    for stage in leading(plan):
        tiles = f"_gather({tiles}, {variable(stage.dim)}{runs_argument(plan, stage.join)})"
    if leading(plan) and not walking(plan):
        lines.append(f"    k, v = {tiles}")
    if nest.begin == "only":
        lines.append("    return _block_forward(q, k, v, scale, causal=False)")
        return "\n".join(lines)
    if walking(plan):
        lines.append(f"    tiles = {_walk_call(plan, tiles)}")
    lines += _first(plan, form) if nest.begin == "first" else _empty()
    if form == "chunks":
        held = ", ".join(
            f"[{variable(dim)}.rank()]" if dim in plan.row_dims else f'range(MESH["{dim}"])'
            for dim in plan.program.order.dims
        )
        lines += [f"    mine = _chunks({held})", "    size = q.shape[1] // len(mine)"]
    lines += _merges(plan, form)
    return "\n".join([*lines, "    return out.to(q.dtype), lse"])


def _walk_call(plan: Plan, tiles: str) -> str:
    found = levels(plan)
    if len(found) > 1:
        dims = ", ".join(variable(stage.dim) for stage in walking(plan))
        return f"_walk_tiles({tiles}, {dims})"
    dim, gathers = found[0]
    beside = "".join(f", {variable(each)}" for each in direct.beside(plan))
    call = f"{rings.ring_name(plan, dim)}({tiles}, {variable(dim)}{beside})"
    for stage in gathers:
        call = f"_gather_ahead({call}, {variable(stage.dim)}{runs_argument(plan, stage.join)})"
    return call


def _first(plan: Plan, form: Form) -> list[str]:
    """The first tile, our own, is one block: its result is what the others are merged into."""
    owner = {"all": "", "chunks": "_, "}.get(form, "me, ")
    tile = f"{owner}(keys, values)" if owner else "keys, values"
    causal = plan.program.mask == "causal"
    return [
        "",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = _block_forward(q, keys, values, scale, causal={causal})",
        "    out = out.to(lse.dtype)",
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
    whole = "_merge(out, lse, *_block_forward(q, keys, values, scale, causal=False))"
    if form == "all":
        return ["    for keys, values in tiles:", f"        {whole}"]
    if form == "before":
        return [
            "    for owner, (keys, values) in tiles:",
            "        if owner < me:  # a later owner's tokens come after all of ours",
            f"            {whole}",
        ]
    if form in ("halves", "stripes"):
        causal, tokens = form == "stripes", ", q.shape[1]" if form == "halves" else ""
        call = f"*_block_forward(q[:, rows], keys[:, cols], values[:, cols], scale, {causal=})"
        return [
            "    for owner, (keys, values) in tiles:",
            f"        rows, cols = _visible(me, owner{tokens})",
            f"        _merge(out[:, rows], lse[:, :, rows], {call})",
        ]
    keys, values = ("keys", "values") if walking(plan) else ("k", "v")
    call = f"*_block_forward(q[:, rows], {keys}[:, cols], {values}[:, cols], scale, causal)"
    loop = [
        f"for rows, cols, causal in _visible(mine, {_tile_chunks(plan)}, size):",
        f"    _merge(out[:, rows], lse[:, :, rows], {call})",
    ]
    if not walking(plan):
        return [f"    {line}" for line in loop]
    return [
        f"    for {_owner(plan)}, (keys, values) in tiles:",
        *(f"        {line}" for line in loop),
    ]


def _owner(plan: Plan) -> str:
    """The owner of a tile, as the walk yields it: one index, or one along every walk."""
    names = letters(plan.program.mesh.dims)
    walks = [names[dim] for dim in plan.nest.walks]
    return walks[0] if len(walks) == 1 else f"({', '.join(walks)})"


def _tile_chunks(plan: Plan) -> str:
    names = letters(plan.program.mesh.dims)
    held = ", ".join(
        f"[{names[dim]}]" if dim in plan.nest.walks else f'range(MESH["{dim}"])'
        for dim in plan.program.order.dims
    )
    return f"_chunks({held})"
