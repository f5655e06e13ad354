"""Emitted text of what a window leaves of a tile, and of how far rings go for it.

A run of rows and a run of columns make one block at most, a band: row i sees the columns from
i + low to i + high. What nobody sees of it is left out before the kernel, or a transfer, has it.

Where queries and keys are two sequences, `window` says beside its reach, counted from the number of
a query, how long a chunk of each is: (before, after, tokens of a chunk of q, and of k).
"""

from __future__ import annotations

from mercurygen.emit.loops import runs_of_chunk
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Loop, Plan, Walk

VISIBLE = '''\
def _visible(
    rows: list[int], cols: list[int], size: int, window: tuple[int, int]
) -> Iterator[tuple[slice, slice, Band]]:
    """Cut rows x cols, chunks of `size` tokens, into the blocks that the window leaves.

    Yields rows and columns, in tokens, of which none sees, or is seen by, nothing; and the band.
    """
    for at, row, height in _runs(rows, size):
        for start, col, width in _runs(cols, size):
            low, high = row - col - window[0], row - col + window[1]
            first, last = max(0, -high), min(height, width - low)  # rows that see some column
            if first < last:
                left, right = max(0, first + low), min(width, last + high)
                band = _band(last - first, right - left, low + first - left, high + first - left)
                yield slice(at + first, at + last), slice(start + left, start + right), band'''

VISIBLE_APART = '''\
def _visible(
    rows: list[int], cols: list[int], window: Window
) -> Iterator[tuple[slice, slice, Band]]:
    """Cut rows x cols, chunks of queries and of keys, into the blocks that the mask leaves.

    Yields rows and columns, in tokens, of which none sees, or is seen by, nothing; and the band.
    """
    before, after, of_q, of_k = window
PARTS    for at, row, height in _runs(rows, of_q):
        for start, col, width in _runs(cols, of_k):
            low, high = row - col - before, row - col + after
            first, last = max(0, -high), min(height, width - low)  # rows that see some column
            if first < last:
                left, right = max(0, first + low), min(width, last + high)
                band = _band(last - first, right - left, low + first - left, high + first - left)
                yield slice(at + first, at + last), slice(start + left, start + right), band'''

RUNS = '''\
def _runs(chunks: list[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Runs of chunks that follow each other: where in the tile, position, and length, in tokens."""

    def ahead(place: int) -> int:
        """What chunks of one run have in common."""
        return chunks[place] - place

    for _, run in groupby(range(len(chunks)), ahead):
        first, *rest = run
        yield first * size, chunks[first] * size, (1 + len(rest)) * size'''

BAND = '''\
def _band(rows: int, cols: int, low: int, high: int) -> Band:
    """A band without the bounds that keep nothing out."""
    return low if low > 1 - rows else None, high if high < cols - 1 else None'''

STRIPES = '''\
def _visible(
    me: int, owner: int, tokens: int, window: tuple[int, int]
) -> Iterator[tuple[slice, slice, Band]]:
    """The block that the window leaves of our rows and an owner's columns, every {count}th token.

    Yields rows and columns, of which none sees, or is seen by, nothing; and the band.
    """
    low, high = -((window[0] - me + owner) // {count}), (me - owner + window[1]) // {count}
    first, last = max(0, -high), min(tokens, tokens - low)  # rows that see some column
    if first < last and low <= high:
        left, right = max(0, first + low), min(tokens, last + high)
        band = _band(last - first, right - left, low + first - left, high + first - left)
        yield slice(first, last), slice(left, right), band'''

STRIPES_APART = '''\
def _visible(me: int, owner: int, window: Window) -> Iterator[tuple[slice, slice, Band]]:
    """The block that the mask leaves of our rows and an owner's columns, every {count}th token.

    Yields rows and columns, of which none sees, or is seen by, nothing; and the band.
    """
    before, after, height, width = window
PARTS    low, high = -((before - me + owner) // {count}), (me - owner + after) // {count}
    first, last = max(0, -high), min(height, width - low)  # rows that see some column
    if first < last and low <= high:
        left, right = max(0, first + low), min(width, last + high)
        band = _band(last - first, right - left, low + first - left, high + first - left)
        yield slice(first, last), slice(left, right), band'''

# Of tiles of which only what is read is here.
VISIBLE_HERE = '''\
def _visible_here(
    rows: list[int], cols: list[int], size: int, window: tuple[int, int]
) -> Iterator[tuple[slice, slice, Band]]:
    """The blocks of `_visible`, of a tile of which only `_needed` has come: columns count in it."""
    first = _needed(rows, cols, size, window).start
    for span, seen, band in _visible(rows, cols, size, window):
        yield span, slice(seen.start - first, seen.stop - first), band'''

NEEDED = '''\
def _needed(rows: list[int], cols: list[int], size: int, window: tuple[int, int]) -> range:
    """The tokens of a tile that some rows see; both in chunks of `size` tokens."""
    seen = [cols for _, cols, _ in _visible(rows, cols, size, window)]
    return range(min((x.start for x in seen), default=0), max((x.stop for x in seen), default=0))'''

NEEDED_STRIPES = '''\
def _needed(reader: int, owner: int, tokens: int, window: tuple[int, int]) -> range:
    """The tokens of an owner's tile that a reader sees: all, or none."""
    return range(tokens if any(_visible(reader, owner, tokens, window)) else 0)'''

STEPS = '''\
def _steps(size: int, tokens: int, window: tuple[int, int]) -> list[int]:
    """Steps of a ring at which some rank reads something of a tile, `tokens` long."""
    ranks = range(size)
    return [step for step in range(1, size) if any({asked} for me in ranks)]'''


def apart(plan: Plan) -> bool:
    """Whether the window is of two sequences."""
    return plan.program.banded and plan.program.align is not None


def word(plan: Plan) -> str:
    """What the mask is, for people."""
    return "a mask of two sequences" if apart(plan) else "a window"


def kind(plan: Plan) -> str:
    """The type of `window`."""
    return "Window" if apart(plan) else "tuple[int, int]"


def parameter(plan: Plan) -> str:
    """`, window: tuple[int, int]`, of functions that are given the scale, where there is one."""
    return f", window: {kind(plan)}" if plan.program.banded else ""


def argument(plan: Plan) -> str:
    """And its argument."""
    return ", window" if plan.program.banded else ""


def sized(plan: Plan, size: str) -> str:
    """`, size`: of chunks, or of a tile, where `window` does not say how long they are."""
    return "" if apart(plan) else f", {size}"


def visible(plan: Plan, form: str) -> list[str]:
    """`_visible` and what it calls."""
    runs, count = runs_of_chunk(plan), stripes(plan)
    if form == "stripes":
        parts = f"    height, width = {count} * height, {count} * width  # so many stripes\n"
        text = STRIPES_APART.replace("PARTS", parts * (count > 1)) if apart(plan) else STRIPES
        step = plan.program.order.chunks(plan.program.mesh) // count
        return [text.format(count=step), BAND]
    if form != "chunks":
        return []
    parts = f"    of_q, of_k = of_q // {runs}, of_k // {runs}  # a part of a chunk\n"
    text = VISIBLE_APART.replace("PARTS", parts * (runs > 1)) if apart(plan) else VISIBLE
    return [text, RUNS, BAND]


def stripes(plan: Plan) -> int:
    """Stripes of one token that a tile of rows has, and of columns; 1 of other orders."""
    if plan.program.order.kind != "striped":
        return 1
    return len(plan.rows(plan.program.mesh.coordinate(0)))


def placed(plan: Plan, queries: str, keys: str) -> list[str]:
    """Lines of the public function that make the window of two sequences.

    Args:
        plan: of the module.
        queries, keys: how many tokens of each this call has in all.
    """
    if not apart(plan):
        return []
    chunks = plan.program.order.chunks(plan.program.mesh)
    before, after = "queries", "0"  # as many before a query as there are at most
    apart_by = "keys - queries" if plan.program.align == "bottom-right" else ""
    if plan.program.mask == "window":
        before, after = "window[0]", "window[1]"
        before += " - keys + queries" if apart_by else ""
        after += f" + {apart_by}" if apart_by else ""
    elif apart_by:
        after = apart_by
    sizes = ", ".join(f"{x} // {chunks}" if chunks > 1 else x for x in ("queries", "keys"))
    return [
        f"    queries, keys = {queries}, {keys}",
        f"    window = ({before}, {after}, {sizes})",
    ]


def slab(program: Program, loop: Loop, walk: Walk, tile: int) -> int | None:
    """How many tiles of so many tokens an owner along a walk's dimension has, with those inside.

    None if they are not a run of the sequence.
    """
    order = program.order
    if order.kind != "contiguous" or walk.dim not in order.dims:
        return None
    outer = order.dims[: order.dims.index(walk.dim) + 1]
    whole = program.extent(loop.axis)
    for dim in outer:
        whole //= program.mesh.extent(dim)
    return whole // tile if whole % tile == 0 else None


def hops(program: Program, walk: Walk, tokens: int) -> int:
    """Hops of a relayed ring of slabs of so many tokens, as the module counts them."""
    reach = program.ahead if walk.reverse else program.window - 1
    return min(program.mesh.extent(walk.dim) - 1, -(-reach // tokens))
