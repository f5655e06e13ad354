"""Which part of a tile the mask leaves, as blocks that a kernel can do.

Rows and columns are ascending lists of atoms of the sequence. torch's kernel does a block that is
full, or a square that the diagonal cuts; a tile is cut into such blocks, in row order. The Triton
kernel also does columns before such a square with it. So does the one for packed documents, which
is told what of a block each has. An operator's own body masks by position: its tiles are only
trimmed to what is live.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import NamedTuple

from mercurygen.ir.kernel import TRITON
from mercurygen.ir.liveness import Liveness
from mercurygen.lower.packed import Piece, gapless, pieces

MOST_BLOCKS = 8  # of one tile: beyond that the kernel calls are too small
POSITIONS = "body"  # the kernel that masks by position: the operator's own lines


class Block(NamedTuple):
    """A part of a tile: half-open ranges of row and column atoms.

    Attributes:
        rows: (start, stop) among the row atoms.
        cols: (start, stop) among the column atoms.
        causal: whether the mask cuts it: its last columns are then those of its rows, and for
            torch's kernel there are no others.
        below: of a striped square: the diagonal itself is dead, so that all rows but the first
            see all columns but the last, as a causal square.
        documents: of packed ones, what each has of the block; the kernel does no other pairs.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    causal: bool
    below: bool = False
    documents: tuple[Piece, ...] = ()


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
        return (Block((0, len(rows)), (0, len(cols)), False),)
    if kernel == POSITIONS:
        return _trimmed(domain, rows, cols)
    if domain.mask == "window":
        return "the far edge of a window cuts tiles where the kernel only knows the diagonal"
    if domain.striped:
        return _striped(domain, rows, cols)
    return _causal(rows, cols, joined=kernel == TRITON)


def _causal(rows: tuple[int, ...], cols: tuple[int, ...], joined: bool) -> tuple[Block, ...]:
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
        if own and joined:
            blocks.append(Block((first, last), (0, before + last - first), True))
            first = last
            continue
        if before:
            blocks.append(Block((first, last), (0, before), False))
        if own:  # their own atoms: a square on the diagonal
            blocks.append(Block((first, last), (before, before + last - first), True))
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
        blocks = (Block((0, len(rows)), (0, len(cols)), False),)
    else:
        blocks = _causal(rows, cols, joined=True)
    found = []
    for block in blocks:
        parts = pieces(domain, rows[slice(*block.rows)], cols[slice(*block.cols)])
        if not gapless(parts):
            return "packed documents under a full mask are one block only of contiguous tokens"
        if parts:
            found.append(block._replace(documents=parts))
    return tuple(found)


def _striped(
    domain: Liveness, rows: tuple[int, ...], cols: tuple[int, ...]
) -> tuple[Block, ...] | str:
    """Both are every n-th token: row i then sees column j if j <= i, or if j < i."""
    for atoms in (rows, cols):
        step = domain.count // len(atoms)
        if atoms != tuple(range(atoms[0], domain.count, step)) or atoms[0] >= step:
            return "the tokens of several stripes are not evenly spaced"
    if len(rows) != len(cols):
        return "rows and columns of a striped tile are not equally spaced"
    below = rows[0] < cols[0]
    if below and len(rows) * domain.size == 1:
        return ()
    return (Block((0, len(rows)), (0, len(cols)), True, below),)


def _trimmed(domain: Liveness, rows: tuple[int, ...], cols: tuple[int, ...]) -> tuple[Block, ...]:
    """One block: the rows and the columns that have any live pair, and those between them."""
    live = [[domain.kind(row, col) for col in cols] for row in rows]
    seeing = [i for i, line in enumerate(live) if any(kind != "dead" for kind in line)]
    if not seeing:
        return ()
    seen = [j for j in range(len(cols)) if any(line[j] != "dead" for line in live)]
    span, width = (seeing[0], seeing[-1] + 1), (seen[0], seen[-1] + 1)
    whole = all(kind == "full" for line in live[slice(*span)] for kind in line[slice(*width)])
    return (Block(span, width, not whole),)


def tokens_of(block: Block, size: int) -> tuple[int, int]:
    """Rows and columns of a block that the kernel is given, in tokens, with `size` an atom."""
    if block.documents:
        first, last = block.documents[0], block.documents[-1]
        return last.rows[1] - first.rows[0], last.cols[1] - first.cols[0]
    less = 1 if block.below else 0
    return (
        (block.rows[1] - block.rows[0]) * size - less,
        (block.cols[1] - block.cols[0]) * size - less,
    )


def sizes_of(block: Block) -> tuple[tuple[int, int], ...]:
    """Rows and columns, in tokens, of each packed document of a block."""
    return tuple((r[1] - r[0], c[1] - c[0]) for r, c in block.documents)


def live_pairs(block: Block, size: int) -> int:
    """Live (query, key) pairs of a block, with `size` tokens an atom."""
    if block.documents:
        return sum(pairs_of(*sizes, block.causal) for sizes in sizes_of(block))
    return pairs_of(*tokens_of(block, size), block.causal)


def pairs_of(height: int, width: int, causal: bool) -> int:
    """Live pairs of so many rows and columns, the last of them the rows' own if it is causal.

    A square of n tokens on the diagonal has n (n + 1) / 2.
    """
    return height * (2 * width - height + 1) // 2 if causal else height * width


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
