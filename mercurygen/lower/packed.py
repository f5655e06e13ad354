"""What packed documents leave of a block: of every document its rows and its columns.

Rows and columns ascend, and a document is one run of positions: its tokens are one run among those
that a rank holds, in every token order of chunks. A kernel for sequences of different lengths does
them all in one call. Of two different runs of tokens only one document can have both: the one that
goes on over the border between them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from mercurygen.errors import Refusal
from mercurygen.ir.documents import within
from mercurygen.ir.liveness import Liveness
from mercurygen.ir.problem import BACKWARD
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Loop


class Piece(NamedTuple):
    """A document's part of a block: half-open ranges of its rows and columns, in tokens.

    Attributes:
        rows: (start, stop) from the block's first row.
        cols: (start, stop) from its first column. Of a block that the diagonal cuts, the last of
            them are the rows' own.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]


def before(position: int, atoms: tuple[int, ...], size: int) -> int:
    """How many tokens of some atoms, ascending, of `size` tokens each, lie before a position."""
    atom, rest = divmod(position, size)
    index = bisect_left(atoms, atom)
    here = index < len(atoms) and atoms[index] == atom
    return index * size + (rest if here else 0)


def pieces(domain: Liveness, rows: tuple[int, ...], cols: tuple[int, ...]) -> tuple[Piece, ...]:
    """The documents that have both rows and columns.

    Args:
        domain: of the mask, with documents.
        rows: atoms of the block's rows, ascending.
        cols: atoms of its columns.
    """
    size, found = domain.size, []
    for start, stop in within(domain.borders, rows[0] * size, (rows[-1] + 1) * size):
        mine, theirs = (
            (before(start, atoms, size), before(stop, atoms, size)) for atoms in (rows, cols)
        )
        if mine[0] < mine[1] and theirs[0] < theirs[1]:
            found.append(Piece(mine, theirs))
    return tuple(found)


def gapless(found: tuple[Piece, ...]) -> bool:
    """Whether the documents follow each other without gaps, among the rows and the columns."""
    return all(
        one.rows[1] == next.rows[0] and one.cols[1] == next.cols[0]
        for one, next in zip(found, found[1:], strict=False)
    )


def refuse(program: Program, loops: tuple[Loop, ...]) -> Refusal | None:
    """Refuse what packed documents have no plan for yet, with the nearest design that has one."""
    if not program.documents:
        return None
    walks = [walk for loop in loops for walk in loop.walks]
    gradient = program.operator in BACKWARD  # of keys and values, which go with them
    travel = [x for x in loops if x.outputs and not (gradient and x.axis == program.mask_axes[1])]
    scattered = any(stage.kind == "scatter" for stage in program.stages) or program.replicated
    if program.tiles:
        what, help = "a tile loop", "leave `tile` out: --schedule ring, allgather-kv or ulysses"
    elif travel:
        what, help = "results that travel", "let keys and values come by: --schedule ring"
    elif scattered and not gradient:
        what, help = (
            "partial results of several ranks",
            "split the queries: --schedule allgather-kv",
        )
    elif any(walk.direct or walk.both for walk in walks):
        what, help = "a ring that is direct or both ways", "pass the tiles on: --schedule ring"
    else:
        return None
    return Refusal("packed-design", lambda: (f"packed documents do not go with {what} yet", help))
