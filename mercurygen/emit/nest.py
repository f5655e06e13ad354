"""Emitted text of the nest: how tiles come by, what the mask leaves of each, and the merge."""

from __future__ import annotations

from itertools import product
from typing import Literal

from mercurygen.emit.border import runs_argument
from mercurygen.emit.loops import leading, levels, walking
from mercurygen.emit.words import letters, variable
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Block, visible

Form = Literal["all", "before", "halves", "stripes", "chunks"]


def mask_form(plan: Plan) -> Form:
    """How the module decides what of a tile is seen.

    "all": every tile whole. "before": tiles of earlier owners, whole. "halves": the early half
    of an earlier owner's tile; all of a later owner's, by our late half. "stripes": a causal
    square, of a later owner's tile below the diagonal. "chunks": by the numbers of its chunks. A closed form is used only where it is what `visible` says for every pair.
    """
    whole = plan.nest.begin == "only" and not any(loop.outputs for loop in plan.nest.loops)
    if plan.program.mask == "full" or whole:
        return "all"
    if plan.nest.begin == "first":
        spans = [range(plan.program.mesh.extent(dim)) for dim in plan.row_dims]
        places = [dict(zip(plan.row_dims, place, strict=True)) for place in product(*spans)]
        slots = [plan.rows(place) for place in places]
        for form in ("before", "halves", "stripes"):
            if _holds(plan, form, slots):
                return form
    return "chunks"


def _holds(plan: Plan, form: str, slots: list[tuple[int, ...]]) -> bool:
    return all(
        visible(plan.atoms.domain, plan.program.kernel, rows, cols)
        == _closed_form(form, me, owner, len(rows))
        for me, rows in enumerate(slots)
        for owner, cols in enumerate(slots)
        if me != owner
    )


def _closed_form(form: str, me: int, owner: int, size: int) -> tuple[Block, ...]:
    whole, half = (0, size), size // 2
    if form == "before":
        return (Block(whole, whole, False),) if owner < me else ()
    if form == "stripes":
        return (Block(whole, whole, True, owner > me),)
    if owner < me:
        return (Block(whole, (0, half), False),)
    return (Block((half, size), whole, False),)


# --- the body on every tile -----------------------------------------------------------------


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
    call = f"_walk_ring({tiles}, {variable(dim)})"
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


# --- what the mask leaves -------------------------------------------------------------------


def visible_functions(plan: Plan) -> list[str]:
    """`_visible`, and `_chunks` where it is by their numbers."""
    form = mask_form(plan)
    if form == "halves":
        return [_VISIBLE_HALVES]
    if form == "stripes":
        return [_VISIBLE_STRIPES]
    if form == "chunks":
        return [_VISIBLE_CHUNKS, _chunks(plan)]
    return []


_VISIBLE_HALVES = '''\
def _visible(me: int, owner: int, tokens: int) -> tuple[slice, slice]:
    """Rows of q, and columns of k and v, that the causal mask leaves of another owner's tile."""
    if owner < me:  # its early run is before all of ours, its late run after all
        return slice(None), slice(0, tokens // 2)
    return slice(tokens // 2, None), slice(None)  # our late run is after both of its runs'''

_VISIBLE_STRIPES = '''\
def _visible(me: int, owner: int) -> tuple[slice, slice]:
    """Rows of q, and columns of k and v, of which the causal mask leaves row i columns up to i."""
    if owner < me:  # its token i comes before our token i, and its next one after
        return slice(None), slice(None)
    return slice(1, None), slice(None, -1)  # its token i comes after our token i'''

_VISIBLE_CHUNKS = '''\
def _visible(
    rows: list[int], cols: list[int], size: int
) -> Iterator[tuple[slice, slice, bool]]:
    """Cut rows x cols, chunks of `size` tokens, into the blocks that the causal mask leaves.

    Yields rows and columns, in tokens, and whether the diagonal cuts the block.
    """

    def kind(row: int) -> tuple[bool, int]:
        """What neighbouring rows of one block have in common."""
        before, own = bisect_left(cols, rows[row]), rows[row] in cols
        return own, before - row if own else before

    for (own, _), run in groupby(range(len(rows)), kind):
        first, *rest = run
        span = slice(first * size, (first + 1 + len(rest)) * size)
        before = bisect_left(cols, rows[first])  # chunks that lie wholly before these
        if before:
            yield span, slice(0, before * size), False
        if own:  # their own chunks: a square on the diagonal
            yield span, slice(before * size, (before + 1 + len(rest)) * size), True'''


def _chunks(plan: Plan) -> str:
    """`_chunks`: from coordinates to the chunks that their ranks own."""
    order, mesh = plan.program.order, plan.program.mesh
    dims = tuple(dim for dim in mesh.dims if dim.name in order.dims)
    names = letters(dims)
    number = ""
    for dim in dims:
        if number:
            number = f"({number})" if " " in number else number
            number = f'{number} * MESH["{dim.name}"] + '
        number += names[dim.name]
    places = {dim.name: variable(dim.name, "places") for dim in dims}
    parameters = ", ".join(f"{places[dim.name]}: Iterable[int]" for dim in dims)
    loops = " ".join(f"for {names[dim.name]} in {places[dim.name]}" for dim in dims)
    ranks = f"list({places[dims[0].name]})" if len(dims) == 1 else f"[{number} {loops}]"
    lines = [
        f"def _chunks({parameters}) -> list[int]:",
        '    """Numbers of the chunks that the ranks at these places own, in global order."""',
    ]
    if order.halves == 1:
        return "\n".join([*lines, f"    return {ranks}"])
    last = order.chunks(mesh) - 1
    lines.append(f"    ranks = {ranks}")
    return "\n".join([*lines, f"    return [*ranks, *({last} - rank for rank in reversed(ranks))]"])
