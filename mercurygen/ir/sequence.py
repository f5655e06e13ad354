"""One of the mask's sequences, cut into atoms: where each begins, and how many tokens it has.

Atoms are runs of tokens, of the few widths at whose edges a band is cut, or, of a striped sequence,
every n-th token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Sequence:
    """The atoms of an axis.

    Attributes:
        striped: whether atom a holds the tokens a, a + count, a + 2 count, ..., and not a run.
        count: atoms of the sequence.
        widths: tokens of the first atoms; those of all others repeat them.
    """

    striped: bool
    count: int
    widths: tuple[int, ...]

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
        ends = _ends(self.widths)
        return number * ends[-1] + ends[place]

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


@lru_cache(maxsize=1024)
def _ends(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Where atoms of these widths begin, one after the other, and the end."""
    return tuple(accumulate(widths, initial=0))


def cut_at(runs: int, size: int, edges: set[int]) -> tuple[int, ...]:
    """Widths of the atoms of equal runs of tokens, cut where some edges of a band are.

    Every run gets as many atoms as the one with most edges, because what is dealt and joined is
    counted in atoms: where there are fewer, the widest atoms are halved.

    Args:
        runs: how many.
        size: tokens of each.
        edges: positions; those outside the sequence are of no account.
    """
    inside = sorted(x for x in edges if 0 < x < runs * size and x % size)
    cuts = []
    for first in range(0, runs * size, size):
        part = inside[bisect_left(inside, first) : bisect_left(inside, first + size)]
        cuts.append([first, *part, first + size])
    most = max(map(len, cuts))
    widths: list[int] = []
    for cut in cuts:
        while len(cut) < most:
            wide, at = max((b - a, a) for a, b in zip(cut, cut[1:], strict=False))
            cut = sorted([*cut, at + wide // 2])
        widths += [b - a for a, b in zip(cut, cut[1:], strict=False)]
    return tuple(widths)
