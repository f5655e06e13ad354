"""Emitted text of what the mask leaves of a tile."""

from __future__ import annotations

from itertools import product
from typing import Literal

from mercurygen.emit import packed, windows
from mercurygen.emit.loops import column_parts, part_counts, runs_of_chunk
from mercurygen.emit.needed import need_form
from mercurygen.emit.words import letters, variable
from mercurygen.ir.kernel import TRITON
from mercurygen.ir.problem import ATTENTION
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import DIAGONAL, EVERY, Block, visible

Form = Literal["all", "before", "halves", "stripes", "spaced", "chunks", "documents"]
LISTED = ("spaced", "chunks")  # forms that go by the numbers of chunks


def mask_form(plan: Plan) -> Form:
    """How the module decides what of a tile is seen.

    "all": every tile whole. "before": tiles of earlier owners, whole. "halves": the early half
    of an earlier owner's tile; all of a later owner's, by our late half. "stripes": a causal
    square, of a later owner's tile below the diagonal. "spaced": of any stripes, by the number of
    their first chunks. "chunks": by the numbers of its chunks. "documents": by the documents that
    are packed (see `packed`).
    A closed form is used only where it is what `visible` says for every pair.
    """
    if plan.program.documents:
        return "documents"
    whole = plan.nest.begin == "only" and not any(loop.outputs for loop in plan.nest.loops)
    if plan.program.mask == "full" or whole:
        return "all"
    if plan.program.banded:
        alone = set(plan.nest.walks) == set(plan.row_dims) and len(plan.row_dims) == 1
        return "stripes" if plan.atoms.striped and alone else "chunks"
    ours = plan.nest.begin == "first" or plan.program.operator != ATTENTION[0]
    if ours and set(plan.nest.walks) == set(plan.row_dims):
        spans = [range(plan.program.mesh.extent(dim)) for dim in plan.row_dims]
        places = [dict(zip(plan.row_dims, place, strict=True)) for place in product(*spans)]
        slots = [plan.rows(place) for place in places]
        for form in ("before", "halves", "stripes"):
            if _holds(plan, form, slots):
                return form
    return "spaced" if plan.program.order.kind == "striped" else "chunks"


def _holds(plan: Plan, form: str, slots: list[tuple[int, ...]]) -> bool:
    return all(
        visible(plan.atoms.domain, plan.program.kernel, rows, cols)
        == _closed_form(form, me, owner, plan.atoms.domain.rows.tokens(rows))
        for me, rows in enumerate(slots)
        for owner, cols in enumerate(slots)
        if me != owner or plan.nest.begin != "first"
    )


def _closed_form(form: str, me: int, owner: int, size: int) -> tuple[Block, ...]:
    whole, half = (0, size), size // 2
    if form == "stripes":
        less = int(owner > me)
        blocks = (Block((less, size), (0, size - less), DIAGONAL),) if size > less else ()
        return tuple(x if x.pairs > 1 else x._replace(band=EVERY) for x in blocks)
    if owner == me:
        return (Block(whole, whole, DIAGONAL),)
    if form == "before":
        return (Block(whole, whole),) if owner < me else ()
    if owner < me:
        return (Block(whole, (0, half)),)
    return (Block((half, size), whole),)


def visible_functions(plan: Plan) -> list[str]:
    """`_visible`, and `_chunks` where something goes by their numbers."""
    form = mask_form(plan)
    if form == "documents":
        return packed.functions(plan)
    if plan.program.banded:
        texts = windows.visible(plan, form)
        listed = form == "chunks" or need_form(plan) == "chunks"
        texts += [chunks(plan)] if listed and plan.program.order.dims else []
        in_runs = "S_q" in part_counts(plan) or column_parts(plan) > 1
        return [*texts, _RUN] if form == "chunks" and in_runs else texts
    triton = plan.program.kernel == TRITON
    chunkwise = _VISIBLE_JOINED if triton else _VISIBLE_CHUNKS
    halves, stripes = _VISIBLE_HALVES, _VISIBLE_STRIPES
    if plan.nest.begin != "first":  # of our own tile, too
        halves = _ALL_HALVES.format(**(_AHEAD if triton else _CUTS))
        stripes = _ALL_STRIPES
    fixed = {"halves": halves, "stripes": stripes, "spaced": _VISIBLE_SPACED, "chunks": chunkwise}
    texts = [fixed[form]] if form in fixed else []
    if (form in LISTED or need_form(plan) == "chunks") and plan.program.order.dims:
        texts.append(chunks(plan))
    in_runs = "S_q" in part_counts(plan) or column_parts(plan) > 1
    return [*texts, _RUN] if form == "chunks" and in_runs else texts


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

_ALL_HALVES = '''\
def _visible(me: int, owner: int, tokens: int) -> tuple[slice, slice, {kind}]:
    """Rows of q, columns of k and v that the causal mask leaves, and {said}."""
    if owner == me:
        return slice(None), slice(None), {cut}
    if owner < me:  # its early run is before all of ours, its late run after all
        return slice(None), slice(0, tokens // 2), {all}
    return slice(tokens // 2, None), slice(None), {all}  # our late run is after both of its runs'''
_CUTS = {"kind": "bool", "said": "whether it cuts them", "cut": True, "all": False}
_AHEAD = {"kind": "int | None", "said": "`ahead` of the block", "cut": 0, "all": None}

_ALL_STRIPES = '''\
def _visible(me: int, owner: int) -> tuple[slice, slice]:
    """Rows of q, and columns of k and v, of which the causal mask leaves row i columns up to i."""
    if owner <= me:  # its token i comes before our token i, or is it, and its next one after
        return slice(None), slice(None)
    return slice(1, None), slice(None, -1)  # its token i comes after our token i'''

_VISIBLE_SPACED = '''\
def _visible(rows: list[int], cols: list[int]) -> tuple[slice, slice]:
    """Rows of q, and columns of k and v, of which the causal mask leaves row i columns up to i.

    Both are as many evenly spaced tokens: those of the stripes of these numbers.
    """
    if cols[0] <= rows[0]:  # column i comes before row i, or is it, and the next one after
        return slice(None), slice(None)
    return slice(1, None), slice(None, -1)  # column i comes after row i'''

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

_VISIBLE_JOINED = '''\
def _visible(
    rows: list[int], cols: list[int], size: int
) -> Iterator[tuple[slice, slice, int | None]]:
    """Cut rows x cols, chunks of `size` tokens, into the blocks that the causal mask leaves.

    Yields rows and columns, in tokens, and `ahead`: row i sees columns up to i + ahead; None: all.
    """

    def kind(row: int) -> tuple[bool, int]:
        """What neighbouring rows of one block have in common."""
        before, own = bisect_left(cols, rows[row]), rows[row] in cols
        return own, before - row if own else before

    for (own, _), run in groupby(range(len(rows)), kind):
        first, *rest = run
        span = slice(first * size, (first + 1 + len(rest)) * size)
        before = bisect_left(cols, rows[first])  # chunks that lie wholly before these
        if own:  # their own chunks come last
            yield span, slice(0, (before + 1 + len(rest)) * size), before * size
        elif before:
            yield span, slice(0, before * size), None'''

_RUN = '''\
def _run(chunks: list[int], index: int, count: int) -> list[int]:
    """One of `count` equal runs of a list."""
    size = len(chunks) // count
    return chunks[index * size : (index + 1) * size]'''


def chunks(plan: Plan) -> str:
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
    runs, found = runs_of_chunk(plan), ranks
    if order.halves == 2:
        last = order.chunks(mesh) - 1
        lines.append(f"    ranks = {ranks}")
        found = f"[*ranks, *({last} - rank for rank in reversed(ranks))]"
    if runs > 1:
        lines.append(f"    chunks = {found}")
        found = f"[{runs} * chunk + part for chunk in chunks for part in range({runs})]"
    return "\n".join([*lines, f"    return {found}"])
