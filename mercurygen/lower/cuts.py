"""What the mask leaves of every pair of tiles of its rows and its columns.

A tile has the tokens of all ranks at some coordinates. Where the mask compares positions only,
what it leaves of a pair depends, along each dimension of the token order, on which of the two
coordinates is larger, or, where only one of the tiles has one, on that; and on nothing further
inside once two differ. So the pairs of a thousand ranks, a million, are of a few kinds.

Which tiles there are depends on the token order, on the dimensions that tell them apart and on the
tile loops; schedules that agree in these share the pairs (`Program.shared`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.program import Program
from mercurygen.lower.visible import POSITIONS, Block, visible

Atoms = tuple[int, ...]
EQUAL, LATER, EARLIER = 0, 1, 2  # the rows' coordinate, beside the columns'
PAIRS = (0, 0), (1, 0), (0, 1)  # such coordinates


class Digit(NamedTuple):
    """What one dimension tells of a pair of tiles, as a number below `radix`.

    Attributes:
        dim: of the token order; "" for the parts of tile loops.
        size: of it.
        rows: whether it tells tiles of the rows apart.
        columns: and of the columns.
        compared: whether of two coordinates only the order matters.
    """

    dim: str
    size: int
    rows: bool
    columns: bool
    compared: bool

    @property
    def radix(self) -> int:
        """How many numbers there are."""
        if self.rows and self.columns:
            return 3 if self.compared else self.size**2
        return self.size

    def number(self, row: int, column: int) -> int:
        """Of a pair with these coordinates; one that its tile does not have does not matter."""
        if not (self.rows and self.columns):
            return row if self.rows else column
        if not self.compared:
            return row * self.size + column
        return EQUAL if row == column else LATER if row > column else EARLIER

    def pair(self, number: int) -> tuple[int, int]:
        """Coordinates of a pair with this number."""
        if not (self.rows and self.columns):
            return number, number
        if not self.compared:
            return divmod(number, self.size)
        return PAIRS[number]

    def parts(self, number: int) -> bool:
        """Whether tiles with this number differ, so that what is further inside does not matter."""
        return self.compared and self.rows and self.columns and number != EQUAL


class Cuts:
    """The blocks of every pair of tiles.

    Attributes:
        sizes: tokens of a tile of rows, and of one of columns.
        digits: what tells pairs apart, outermost first.
        kinds: the different blocks that a pair has.
        of: of every pair an index of `kinds`, by its digits: the outermost is major.
        firsts: indices of `kinds` of pairs of the same ranks: their results are begun with these.
    """

    def __init__(self, program: Program, rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
        """
        Args:
            program: the program.
            rows: dimensions that tell tiles of the rows apart.
            columns: and of the columns.

        Raises:
            NotCuttable: the kernel cannot do what the mask leaves of some pair.
        """
        atoms = atoms_of(program)
        self.digits = tuple(_digits(program, rows, columns))
        self._tiles = [
            _Tiles(program, axis, dims)
            for axis, dims in zip(program.mask_axes, (rows, columns), strict=True)
        ]
        self.sizes = tuple(tiles.tokens for tiles in self._tiles)
        found: dict[tuple[int, ...], int] = {}
        numbers: dict[tuple[Block, ...], int] = {}
        self.of, self.firsts = [], set()
        for at in product(*(range(digit.radix) for digit in self.digits)):
            least = self._least(at)
            kind = found.get(least)
            if kind is None:
                mine, theirs = self._pair(least)
                blocks = visible(atoms.domain, program.kernel, mine, theirs)
                kind = found[least] = numbers.setdefault(blocks, len(numbers))
            self.of.append(kind)
            if all(_same(digit, number) for digit, number in zip(self.digits, at, strict=True)):
                self.firsts.add(kind)
        self.kinds = list(numbers)

    def _least(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """The digits of a pair, those that do not matter 0."""
        differ, found = False, []
        for digit, number in zip(self.digits, at, strict=True):
            found.append(0 if differ and digit.dim else number)
            differ = differ or digit.parts(number)
        return tuple(found)

    def _pair(self, at: tuple[int, ...]) -> tuple[Atoms, Atoms]:
        """The atoms of a pair with these digits."""
        found = []
        for side, tiles in enumerate(self._tiles):
            place, part = {}, 0
            for digit, number in zip(self.digits, at, strict=True):
                if digit.dim:
                    place[digit.dim] = digit.pair(number)[side]
                elif digit.columns == side:
                    part = number
            found.append(tiles.atoms(place, part))
        return found[0], found[1]


class _Tiles:
    """The tiles of one axis.

    Attributes:
        tokens: of each.
    """

    def __init__(self, program: Program, axis: str, dims: tuple[str, ...]) -> None:
        self.program, self.axis, self.dims = program, axis, dims
        self.parts = atoms_of(program).parts(axis)
        first = self.atoms(dict.fromkeys(dims, 0), 0)
        self.tokens = atoms_of(program).length(axis, first)

    def atoms(self, place: dict[str, int], part: int) -> Atoms:
        """The atoms of a part of the tile at some coordinates."""
        held = {dim: (place.get(dim, 0),) for dim in self.dims}
        owned = atoms_of(self.program).owned(self.program.order, self.axis, held)
        size = len(owned) // self.parts
        return owned[part * size : (part + 1) * size]


def _digits(program: Program, rows: tuple[str, ...], columns: tuple[str, ...]) -> Iterator[Digit]:
    """What tells pairs apart: nothing where every pair is live."""
    packed = bool(program.documents)  # of any lengths: every pair of tiles is another
    masked = program.mask != "full" or packed
    diagonal = program.mask == "causal" and not program.banded
    compared = diagonal and program.kernel != POSITIONS and not packed
    for dim in program.order.dims if masked else ():
        if dim in rows or dim in columns:
            yield Digit(dim, program.mesh.extent(dim), dim in rows, dim in columns, compared)
    for axis, ours in zip(program.mask_axes, (True, False), strict=True):
        parts = atoms_of(program).parts(axis)
        if parts > 1 and masked:
            yield Digit("", parts, ours, not ours, False)


def _same(digit: Digit, number: int) -> bool:
    """Whether a pair is of the same ranks, as far as both its tiles have a coordinate."""
    row, column = digit.pair(number)
    return not (digit.rows and digit.columns) or row == column


def cuts_of(program: Program, rows: tuple[str, ...], columns: tuple[str, ...]) -> Cuts:
    """The pairs of tiles that are told apart by these dimensions.

    Raises:
        NotCuttable: the kernel cannot do what the mask leaves of some pair.
    """
    atoms = atoms_of(program)
    parts = tuple(atoms.parts(axis) for axis in program.mask_axes)
    key = "cuts", program.kernel, program.order, atoms.domain, parts, rows, columns
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = Cuts(program, rows, columns)
    return found
