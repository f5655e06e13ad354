"""Which part of a tile the mask leaves, as blocks that a kernel can do.

A block is rows x columns of which row i sees the columns from i + low to i + high. Of a full or a
causal mask a block has no such bounds, or is a square that the diagonal cuts (torch's kernel does
nothing else on every device alike; the Triton kernel also does columns before that square with it,
and so does the one for packed documents, which is told what of a block each has); a tile is cut
into such blocks, in row order. Of a window every run of rows with every run of columns is one
block, without what no row sees and what sees nothing. An operator's own body masks by position:
its tiles are only trimmed to what is live.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from mercurygen.ir.kernel import TRITON
from mercurygen.ir.liveness import Liveness
from mercurygen.lower.packed import Piece, gapless, pieces

MOST_BLOCKS = 8  # of one tile: beyond that the kernel calls are too small
POSITIONS = "body"  # the kernel that masks by position: the operator's own lines

Band = tuple[int | None, int | None]  # row i sees columns i + low to i + high; None: no bound
EVERY: Band = (None, None)
DIAGONAL: Band = (None, 0)


class Block(NamedTuple):
    """A part of a tile: half-open ranges of its rows and columns, in tokens.

    Attributes:
        rows: (start, stop) among the tile's rows.
        cols: (start, stop) among the tile's columns.
        band: which columns of the block a row of it sees.
        by_position: whether the body masks it, by global positions; then the band says nothing.
        documents: of packed ones, what each has of the block; the kernel does no other pairs.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    band: Band = EVERY
    by_position: bool = False
    documents: tuple[Piece, ...] = ()

    @property
    def height(self) -> int:
        """Rows that the kernel is given."""
        start, stop = self.given(0)
        return stop - start

    @property
    def width(self) -> int:
        """Columns that the kernel is given."""
        start, stop = self.given(1)
        return stop - start

    def given(self, axis: int) -> tuple[int, int]:
        """Rows (0) or columns (1) of the tile that the kernel is given."""
        start, stop = self[axis]
        if not self.documents:
            return start, stop
        return start + self.documents[0][axis][0], start + self.documents[-1][axis][1]

    @property
    def causal(self) -> bool:
        """Whether its last columns are its rows' own, which the diagonal cuts."""
        return self.band[1] is not None

    @property
    def masked(self) -> bool:
        """Whether some row does not see some column."""
        return self.by_position or self.band != EVERY

    @property
    def pairs(self) -> int:
        """Live (query, key) pairs; of what is masked by position, all."""
        if self.documents:  # the last columns of each are its rows' own
            bands = (None, None)
            pairs = 0
            for height, width in sizes_of(self):
                bands = (None, width - height) if self.causal else EVERY
                pairs += band_pairs(height, width, bands)
            return pairs
        return band_pairs(self.height, self.width, self.band)


class NotCuttable(Exception):
    """A tile that the mask does not leave in blocks that the kernel can do; says why."""


def visible(
    domain: Liveness, kernel: str, rows: tuple[int, ...], cols: tuple[int, ...]
) -> tuple[Block, ...]:
    """Blocks of rows x cols that the mask leaves; together they cover each live pair once.

    Args:
        domain: of the mask.
        kernel: that runs the body.
        rows: atoms of the queries, ascending.
        cols: atoms of the keys, ascending.

    Raises:
        NotCuttable: the kernel cannot do what the mask leaves.
    """
    found = _visible(domain, kernel if kernel in (POSITIONS, TRITON) else "", rows, cols)
    if isinstance(found, str):
        raise NotCuttable(found)
    return found


@lru_cache(maxsize=65536)
def _visible(
    domain: Liveness, kernel: str, rows: tuple[int, ...], cols: tuple[int, ...]
) -> tuple[Block, ...] | str:
    if not rows or not cols:
        return ()
    if domain.borders:
        return _packed(domain, kernel, rows, cols)
    if domain.mask == "full":
        return (Block((0, domain.rows.tokens(rows)), (0, domain.columns.tokens(cols))),)
    if kernel == POSITIONS:
        return _trimmed(domain, rows, cols)
    if domain.striped:
        return _striped(domain, rows, cols)
    if domain.mask == "window":
        return _banded(domain, domain.rows.runs(rows), domain.columns.runs(cols), 1)
    return _causal(domain.size, rows, cols, joined=kernel == TRITON)


def _causal(
    size: int, rows: tuple[int, ...], cols: tuple[int, ...], joined: bool
) -> tuple[Block, ...]:
    kinds = []
    for row, atom in enumerate(rows):
        before = bisect_left(cols, atom)  # atoms that lie wholly before this
        own = before < len(cols) and cols[before] == atom
        kinds.append((own, before - row if own else before))
    blocks, first = [], 0
    while first < len(kinds):  # rows of one kind, next to each other, are a block
        (own, before), last = kinds[first], first + 1
        while last < len(kinds) and kinds[last] == kinds[first]:
            last += 1
        before += first if own else 0
        span, ahead, end = (first * size, last * size), before * size, (before + last - first)
        if own and joined:
            blocks.append(Block(span, (0, end * size), (None, ahead)))
            first = last
            continue
        if before:
            blocks.append(Block(span, (0, ahead)))
        if own:  # their own atoms: a square on the diagonal
            blocks.append(Block(span, (ahead, end * size), DIAGONAL))
        first = last
    return tuple(blocks)


def _packed(
    domain: Liveness, kernel: str, rows: tuple[int, ...], cols: tuple[int, ...]
) -> tuple[Block, ...] | str:
    """Without documents, and then what they leave of each block."""
    if kernel:
        return "no kernel but torch's takes packed documents"
    if domain.striped:
        return "packed documents are runs of tokens: they are not dealt one by one"
    if domain.mask == "full":
        blocks = (Block((0, domain.rows.tokens(rows)), (0, domain.columns.tokens(cols))),)
    else:
        blocks = _causal(domain.size, rows, cols, joined=True)
    found = []
    for block in blocks:
        spans = zip((rows, cols), block[:2], strict=True)
        parts = pieces(domain, *(a[slice(*domain.rows.touched(a, span))] for a, span in spans))
        if not gapless(parts):
            return "packed documents under a full mask are one block only of contiguous tokens"
        if parts:
            found.append(block._replace(documents=parts))
    return tuple(found)


def _striped(
    domain: Liveness, rows: tuple[int, ...], cols: tuple[int, ...]
) -> tuple[Block, ...] | str:
    """Both are every n-th token: a run in steps of n."""
    for atoms in (rows, cols):
        step = domain.rows.count // len(atoms)
        if atoms != tuple(range(atoms[0], domain.rows.count, step)) or atoms[0] >= step:
            return "the tokens of several stripes are not evenly spaced"
    if len(rows) != len(cols):
        return "rows and columns of a striped tile are not equally spaced"
    sides = zip(domain.sides, (rows, cols), strict=True)
    pairs = ([(0, atoms[0], side.tokens(atoms))] for side, atoms in sides)
    return _banded(domain, *pairs, domain.rows.count // len(rows))


def _banded(domain: Liveness, rows, cols, step: int) -> tuple[Block, ...]:
    """Every run of rows (place in the tile, position, length) with every run of columns."""
    found = []
    for (at, row, height), (start, col, width) in product(rows, list(cols)):
        band = band_of(domain, row - col, step)
        seen = trimmed(height, width, band)
        if seen is not None:
            (first, last), (left, right), band = seen
            span = (start + left, start + right)
            found.append(Block((at + first, at + last), span, band))
    return tuple(found)


def band_of(domain: Liveness, apart: int, step: int) -> Band:
    """The band of rows and columns in steps of so many positions.

    Args:
        domain: of the mask.
        apart: position of the first row, less that of the first column.
        step: positions from one row, or column, to the next.
    """
    low = None if domain.behind is None else -((domain.behind - apart) // step)
    return low, None if domain.ahead is None else (apart + domain.ahead) // step


def trimmed(
    height: int, width: int, band: Band
) -> tuple[tuple[int, int], tuple[int, int], Band] | None:
    """The rows that see any column, the columns that any row sees, and the band among these.

    A bound that keeps nothing out is None. None if no row sees a column.
    """
    low = 1 - height if band[0] is None else band[0]
    high = width - 1 if band[1] is None else band[1]
    first, last = max(0, -high), min(height, width - low)
    if first >= last or low > high:
        return None
    left, right = max(0, first + low), min(width, last + high)
    band = low + first - left, high + first - left
    return (first, last), (left, right), binding(last - first, right - left, band)


def binding(height: int, width: int, band: Band) -> Band:
    """A band without the bounds that keep nothing out of so many rows and columns."""
    low, high = band
    return (
        None if low is None or low <= 1 - height else low,
        None if high is None or high >= width - 1 else high,
    )


def band_pairs(height: int, width: int, band: Band) -> int:
    """How many pairs of so many rows and columns are in a band."""
    low, high = band
    most = height * width if high is None else _up_to(height, width, high)
    return most - (0 if low is None else _up_to(height, width, low - 1))


def _up_to(height: int, width: int, high: int) -> int:
    """Pairs of row i and columns up to i + high: sums of 0 <= i + high + 1 <= width."""

    def total(most: int) -> int:
        """Of 1 to `most`."""
        return most * (most + 1) // 2 if most > 0 else 0

    first, last = high + 1, high + height
    return total(last) - total(first - 1) - total(last - width) + total(first - 1 - width)


def _trimmed(domain: Liveness, rows: tuple[int, ...], cols: tuple[int, ...]) -> tuple[Block, ...]:
    """One block: the rows and the columns that have any live pair, and those between them."""
    live = [[domain.kind(row, col) for col in cols] for row in rows]
    seeing = [i for i, line in enumerate(live) if any(kind != "dead" for kind in line)]
    if not seeing:
        return ()
    seen = [j for j in range(len(cols)) if any(line[j] != "dead" for line in live)]
    span, width = (seeing[0], seeing[-1] + 1), (seen[0], seen[-1] + 1)
    whole = all(kind == "full" for line in live[slice(*span)] for kind in line[slice(*width)])
    parts = zip(domain.sides, (rows, cols), (span, width), strict=True)
    tokens = (tuple(side.tokens(atoms[:end]) for end in ends) for side, atoms, ends in parts)
    return (Block(*tokens, by_position=not whole),)


def sizes_of(block: Block) -> tuple[tuple[int, int], ...]:
    """Rows and columns, in tokens, of each packed document of a block."""
    return tuple((r[1] - r[0], c[1] - c[0]) for r, c in block.documents)


@lru_cache(maxsize=65536)
def read_run(
    domain: Liveness, by_rows: bool, atoms: tuple[int, ...], others: tuple[int, ...]
) -> tuple[int, int]:
    """The run of a tile that a rank reads: (start, stop) among its atoms.

    Args:
        domain: of the mask.
        by_rows: whether the tile is of rows; else of columns.
        atoms: of the tile.
        others: atoms of the other axis that the rank works on.
    """
    runs = domain.mask == "causal" and not domain.striped and not domain.borders
    if runs and others:  # as `domain.live` says
        start = bisect_left(atoms, min(others)) if by_rows else 0
        stop = len(atoms) if by_rows else bisect_right(atoms, max(others))
        return (start, stop) if start < stop else (0, 0)
    read = [
        i
        for i, atom in enumerate(atoms)
        if any(domain.live(atom, x) if by_rows else domain.live(x, atom) for x in others)
    ]
    return (read[0], read[-1] + 1) if read else (0, 0)
