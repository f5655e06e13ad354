"""The domain of a mask on atoms of the sequence: which pairs of tiles are live, cut or dead."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Liveness:
    """Which (row, column) pairs are live.

    Attributes:
        mask: "full", "causal" (a row sees itself and what is before it), or "window" (of those
            only the nearest).
        window: width of a window; the row itself counts.
        striped: whether atom a holds the tokens a, a + count, a + 2 count, ..., and not a run.
        count: atoms of the sequence.
        size: tokens of one atom.
        borders: of packed documents, where each begins, and the end; of these only pairs within
            one are live.
    """

    mask: str
    window: int | None
    striped: bool
    count: int
    size: int
    borders: tuple[int, ...] = ()

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
        if self.mask == "full":
            return "full"
        nearest, farthest = self._distances(row, column)
        width = self.window if self.mask == "window" else None
        if farthest < 0 or (width is not None and nearest >= width):
            return "dead"
        if nearest >= 0 and (width is None or farthest < width):
            return "full"
        if self.striped and not self._some_live(row, column):
            return "dead"
        return "cut"

    def live(self, row: int, column: int) -> bool:
        """Whether any pair of two atoms is live."""
        return self.kind(row, column) != "dead"

    def _distances(self, row: int, column: int) -> tuple[int, int]:
        """Least and most of row position - column position."""
        if self.striped:
            spread = (self.size - 1) * self.count
            return row - column - spread, row - column + spread
        return (row - column - 1) * self.size + 1, (row - column + 1) * self.size - 1

    def _some_live(self, row: int, column: int) -> bool:
        """Of striped atoms: distances are row - column plus multiples of count."""
        offset = (row - column) % self.count  # the least distance that is not negative
        width = self.window if self.mask == "window" else offset + 1
        reach = row - column + (self.size - 1) * self.count
        return offset < width and offset <= reach
