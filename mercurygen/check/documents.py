"""Whether a call on packed documents does exactly the live pairs of its block.

Every pair of each document's part must be live, no row or column be in two parts, and there must be
as many pairs as are live in the block, counted from the documents and the positions alone.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import product

from mercurygen.check.content import brief
from mercurygen.ir.liveness import Liveness
from mercurygen.lower.packed import Piece
from mercurygen.lower.visible import Block


def fault_of_documents(
    live: Liveness, block: Block, rows: tuple[int, ...], cols: tuple[int, ...]
) -> str | None:
    """Why the kernel must not do a block, or not so: rows and columns are those of the block."""
    if not block.documents:
        return "a block of packed documents does not say what each has of it"
    done = row = col = 0
    for piece in block.documents:
        if piece.rows[0] < row or piece.cols[0] < col:
            return f"{piece} has rows or columns of the document before it"
        row, col = piece.rows[1], piece.cols[1]
        fault = _fault_of_piece(live, block.causal, piece, rows, cols)
        if fault:
            return fault
        done += _pairs(piece, block.causal)
    wanted = live_pairs_of(live, rows, cols)
    if done != wanted:
        what = f"rows {brief(rows)} and columns {brief(cols)}"
        return f"the documents do {done} pairs of {what}, of which {wanted} are live"
    return None


def _fault_of_piece(
    live: Liveness, causal: bool, piece: Piece, rows: tuple[int, ...], cols: tuple[int, ...]
) -> str | None:
    """Why not every pair of a document's part is live."""
    for atoms, (start, stop) in ((rows, piece.rows), (cols, piece.cols)):
        if not 0 <= start < stop <= len(atoms) * live.size:
            return f"{piece} is not in the block"
    mine, theirs = _runs(live, rows, *piece.rows), _runs(live, cols, *piece.cols)
    ends = (mine[0][0], mine[-1][1] - 1, theirs[0][0], theirs[-1][1] - 1)
    if len({bisect_right(live.borders, position) for position in ends}) > 1:
        return f"{piece} has tokens of several documents"
    height, stop = piece.rows[1] - piece.rows[0], piece.cols[1]
    if causal and (stop < height or _runs(live, cols, stop - height, stop) != mine):
        return f"the last columns of {piece} are not its rows"
    if not causal and live.mask == "causal" and ends[3] > ends[0]:
        return f"rows of {piece} would see columns that come after them"
    return None


def _pairs(piece: Piece, causal: bool) -> int:
    height, width = (stop - start for start, stop in piece)
    return height * (2 * width - height + 1) // 2 if causal else height * width


def _runs(live: Liveness, atoms: tuple[int, ...], start: int, stop: int) -> list[list[int]]:
    """Some tokens of atoms, by their place among them, as runs of positions."""
    found: list[list[int]] = []
    for index in range(start // live.size, -(-stop // live.size)):
        first, last = max(start, index * live.size), min(stop, (index + 1) * live.size)
        shift = (atoms[index] - index) * live.size
        if found and found[-1][1] == first + shift:
            found[-1][1] = last + shift
        else:
            found.append([first + shift, last + shift])
    return found


def live_pairs_of(live: Liveness, rows: tuple[int, ...], cols: tuple[int, ...]) -> int:
    """Live pairs of some atoms of rows and of columns."""
    total = 0
    for start, stop in zip(live.borders, live.borders[1:], strict=False):
        spans = [
            [(max(start, a * live.size), min(stop, (a + 1) * live.size)) for a in atoms]
            for atoms in (rows, cols)
        ]
        mine, theirs = ([(a, b) for a, b in each if a < b] for each in spans)
        for (a, b), (c, d) in product(mine, theirs):
            if live.mask == "full" or a > c:
                total += (b - a) * (d - c)
            elif (a, b) == (c, d):
                total += (b - a) * (b - a + 1) // 2
    return total
