"""The domain of a mask on atoms of its two sequences: which pairs of tiles are live, cut or dead.

A mask is a band of global positions: a row sees the columns from `behind` before its own position
to `ahead` after it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from mercurygen.ir.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Liveness:
    """Which (row, column) pairs are live.

    Attributes:
        mask: "full", "causal" (of one sequence: a row sees itself and what is before it), or
            "window" (any other band).
        behind: how many positions before its own a row sees; None: all. Where rows stand further
            on among the columns, less than 0 if it ends after the row's own number.
        ahead: and after its own; less than 0 if it ends before.
        rows, columns: the sequences; of self-attention they are alike.
        borders: of packed documents, where each begins, and the end; of these only pairs within
            one are live.
    """

    mask: str
    behind: int | None
    ahead: int | None
    rows: Sequence
    columns: Sequence
    borders: tuple[int, ...] = ()

    @property
    def striped(self) -> bool:
        """Whether atoms are every n-th token."""
        return self.rows.striped

    @property
    def size(self) -> int:
        """Tokens of an atom, where all of both sequences are alike."""
        return self.rows.size

    @property
    def sides(self) -> tuple[Sequence, Sequence]:
        """Rows and columns."""
        return self.rows, self.columns

    def kind(self, row: int, column: int) -> str:
        """Of a pair of atoms: "full" (every pair live), "dead" (none), or "cut"."""
        kind = self._kind(row, column)
        if not self.borders or kind == "dead" or row == column and kind == "cut":
            return kind
        first, last = sorted((row, column))
        if self._one_document(first * self.size, (last + 1) * self.size - 1):
            return kind
        if row == column or self._one_document((first + 1) * self.size - 1, last * self.size):
            return "cut"
        return "dead"

    def _one_document(self, first: int, last: int) -> bool:
        """Whether two positions, in order, are of one document."""
        return bisect_right(self.borders, first) == bisect_right(self.borders, last)

    def _kind(self, row: int, column: int) -> str:
        """The same of tokens that are one document."""
        nearest, farthest = self._distances(row, column)
        before = self.behind is None or farthest <= self.behind
        after = self.ahead is None or nearest >= -self.ahead
        if before and after:
            return "full"
        if self.behind is not None and nearest > self.behind:
            return "dead"
        if self.ahead is not None and farthest < -self.ahead:
            return "dead"
        if self.striped and not self._some_live(row, column, nearest, farthest):
            return "dead"
        return "cut"

    def live(self, row: int, column: int) -> bool:
        """Whether any pair of two atoms is live."""
        return self.kind(row, column) != "dead"

    def _distances(self, row: int, column: int) -> tuple[int, int]:
        """Least and most of row position - column position."""
        rows, columns = self.rows, self.columns
        if self.striped:
            apart = row - column
            least, most = ((each.size - 1) * each.count for each in (columns, rows))
            return apart - least, apart + most
        apart = rows.start(row) - columns.start(column)
        return apart - columns.width(column) + 1, apart + rows.width(row) - 1

    def _some_live(self, row: int, column: int, nearest: int, farthest: int) -> bool:
        """Of striped atoms: distances are row - column plus multiples of their number."""
        least = nearest if self.ahead is None else max(nearest, -self.ahead)
        most = farthest if self.behind is None else min(farthest, self.behind)
        return least + (row - column - least) % self.rows.count <= most
