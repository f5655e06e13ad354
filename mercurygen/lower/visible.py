"""Which part of a tile the mask leaves, as blocks that a kernel can do.

Rows and columns are ascending lists of chunks of the sequence. A kernel does a block that is full,
or a square that the diagonal cuts; a tile is cut into such blocks, in row order.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

MOST_BLOCKS = 8  # of one tile: beyond that the kernel calls are too small


class Block(NamedTuple):
    """A part of a tile: half-open ranges of row and column chunks.

    Attributes:
        rows: (start, stop) among the row chunks.
        cols: (start, stop) among the column chunks.
        causal: whether the diagonal cuts it; it is then square.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    causal: bool


@lru_cache(maxsize=65536)
def visible(mask: str, rows: tuple[int, ...], cols: tuple[int, ...]) -> tuple[Block, ...]:
    """Blocks of rows x cols that the mask leaves; together they cover each live pair once.

    Args:
        mask: "full" or "causal".
        rows: chunks of the queries, ascending.
        cols: chunks of the keys, ascending.
    """
    if mask == "full":
        return (Block((0, len(rows)), (0, len(cols)), False),)

    def kind(row: int) -> tuple[bool, int]:  # rows of one kind, next to each other, are a block
        before, own = bisect_left(cols, rows[row]), rows[row] in cols
        return own, before - row if own else before

    blocks = []
    for (own, _), run in groupby(range(len(rows)), kind):
        first, *rest = run
        span = (first, first + len(rest) + 1)
        before = bisect_left(cols, rows[first])  # chunks that lie wholly before these
        if before:
            blocks.append(Block(span, (0, before), False))
        if own:  # their own chunks: a square on the diagonal
            blocks.append(Block(span, (before, before + len(rest) + 1), True))
    return tuple(blocks)


def live_pairs(block: Block, chunk: int) -> int:
    """Live (query, key) pairs of a block, with `chunk` tokens a chunk.

    A square of n tokens on the diagonal has n (n + 1) / 2.
    """
    height = (block.rows[1] - block.rows[0]) * chunk
    width = (block.cols[1] - block.cols[0]) * chunk
    return height * (height + 1) // 2 if block.causal else height * width
