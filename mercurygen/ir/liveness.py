"""The domain of a mask on atoms of the sequence: which pairs of tiles are live, cut or dead.

A mask is a band of global positions: a row sees the columns from `behind` before it to `ahead`
after it. Atoms are runs of tokens, of the few widths at whose edges the band is cut, or, of a
striped sequence, every n-th token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Liveness:
    """Which (row, column) pairs are live.

    Attributes:
        mask: "full", "causal" (a row sees itself and what is before it), or "window" (of those,
            and of what is after it, only the nearest).
        behind: how many positions before itself a row sees; None: all.
        ahead: and after itself.
        striped: whether atom a holds the tokens a, a + count, a + 2 count, ..., and not a run.
        count: atoms of the sequence.
        widths: tokens of the first atoms; those of all others repeat them.
        borders: of packed documents, where each begins, and the end; of these only pairs within
            one are live.
    """

    mask: str
    behind: int | None
    ahead: int | None
    striped: bool
    count: int
    widths: tuple[int, ...]
    borders: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Tokens of an atom, where all are alike."""
        (size,) = self.widths
        return size

    def start(self, atom: int) -> int:
        """Position of an atom's first token."""
        if self.striped:
            return atom
        number, place = divmod(atom, len(self.widths))
        return number * sum(self.widths) + sum(self.widths[:place])

    def width(self, atom: int) -> int:
        """Tokens of an atom."""
        return self.widths[atom % len(self.widths)]

    def tokens(self, atoms: tuple[int, ...]) -> int:
        """Tokens of some atoms."""
        if len(self.widths) == 1:
            return len(atoms) * self.widths[0]
        return sum(map(self.width, atoms))

    def touched(self, atoms: tuple[int, ...], span: tuple[int, int]) -> tuple[int, int]:
        """The atoms, half-open, of which a tile's tokens from start to stop are."""
        if self.striped:  # their tokens interleave
            return (0, len(atoms)) if span[0] < span[1] else (0, 0)
        place, found = 0, []
        for index, atom in enumerate(atoms):
            if place < span[1] and place + self.width(atom) > span[0]:
                found.append(index)
            place += self.width(atom)
        return (found[0], found[-1] + 1) if found else (0, 0)

    def runs(self, atoms: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """Where each run of positions begins, in the tile and in the sequence, and its length."""
        place = 0
        first = position = -1  # of the run: place in the tile; of what would follow it
        for atom in atoms:
            if self.start(atom) != position:
                if first >= 0:
                    yield first, position - (place - first), place - first
                first = place
            place += self.width(atom)
            position = self.start(atom) + self.width(atom)
        if first >= 0:
            yield first, position - (place - first), place - first

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
        if self.striped:
            spread = (self.size - 1) * self.count
            return row - column - spread, row - column + spread
        apart = self.start(row) - self.start(column)
        return apart - self.width(column) + 1, apart + self.width(row) - 1

    def _some_live(self, row: int, column: int, nearest: int, farthest: int) -> bool:
        """Of striped atoms: distances are row - column plus multiples of count."""
        least = nearest if self.ahead is None else max(nearest, -self.ahead)
        most = farthest if self.behind is None else min(farthest, self.behind)
        return least + (row - column - least) % self.count <= most
