"""The space that a proof is about: cells of outputs, and what the operator asks of them.

A contribution to a cell of an output is a combination of atoms of the axes that are looped over and
that the output does not carry. Of the mask's axes only live pairs contribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod

from mercurygen.check.content import Content, brief
from mercurygen.check.documents import fault_of_documents
from mercurygen.ir.atoms import Region
from mercurygen.ir.kernel import ATEN
from mercurygen.ir.liveness import Liveness
from mercurygen.ir.program import Tensor
from mercurygen.ir.sequence import Sequence
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import POSITIONS, Band, Block, band_of, band_pairs


@lru_cache(maxsize=65536)
def bits(atoms: tuple[int, ...]) -> int:
    """A set of atoms as the bits of a number."""
    return sum(1 << atom for atom in atoms)


class Space:
    """Atoms of a plan: what a caller gives and wants on every rank, and what cells need."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program, self.atoms = plan, plan.program, plan.atoms
        self.liveness = plan.atoms.domain
        self.sequences = plan.atoms.sequences if plan.program.mask_axes else {}
        self.count = plan.atoms.count
        self.masked = plan.program.mask != "full" or bool(plan.program.documents)
        self._wanted: dict[tuple, int] = {}

    def pinned(self, tensor: Tensor, rank: int) -> Content:
        """What the caller holds, or wants, of a tensor on a rank."""
        place = self.program.mesh.coordinate(rank)
        return Content(tensor.name, tensor.axes, self.atoms.pinned(tensor, place))

    def elements(self, content: Content) -> Fraction:
        """Elements of a content."""
        return prod(map(self._indices, content.axes, content.region), start=Fraction(1))

    def _indices(self, axis: str, atoms: tuple[int, ...]) -> Fraction:
        """Indices of some atoms of an axis."""
        if axis in self.program.mask_axes:
            return Fraction(self.sequences[axis].tokens(atoms))
        return Fraction(len(atoms) * self.program.extents[axis], self.count[axis])

    def reduced(self, tensor: Tensor) -> tuple[str, ...]:
        """Axes along which contributions to an output are merged."""
        return tuple(axis for axis in self.program.loops if not tensor.carries(axis))

    def shares(
        self, tensor: Tensor, region: Region, lists: Mapping[str, tuple[int, ...]], causal: bool
    ) -> tuple[int, ...]:
        """Per cell of a region the contributions that a call on some atoms makes.

        Args:
            tensor: the output.
            region: of the cells.
            lists: per axis the atoms that the call is given.
            causal: whether it masks; else it takes every pair.
        """
        reduced = self.reduced(tensor)
        masked = tuple(axis for axis in self.program.mask_axes if axis in tensor.axes)
        if not (causal and masked):  # every cell gets the same
            return (self.share(reduced, masked, (), lists, causal),) * prod(map(len, region))
        index = [tensor.axes.index(axis) for axis in masked]
        some = {
            at: self.share(reduced, masked, at, lists, causal)
            for at in product(*(region[i] for i in index))
        }
        return tuple([some[tuple([cell[i] for i in index])] for cell in product(*region)])

    def share(
        self,
        reduced: tuple[str, ...],
        masked: tuple[str, ...],
        at: tuple[int, ...],
        lists: Mapping[str, tuple[int, ...]],
        causal: bool,
    ) -> int:
        """The contributions to a cell at some atoms of the mask's axes."""
        key = (reduced, masked, at, tuple(lists[axis] for axis in reduced), causal)
        known = self._wanted.get(key)
        if known is None:
            spans = []
            for axis in reduced:
                atoms = lists[axis]
                if causal and axis in self.program.mask_axes and len(masked) == 1:
                    atoms = tuple(a for a in atoms if self.live_with(axis, a, at[0]))
                spans.append(atoms)
            known = self._bits(reduced, spans, causal and not masked)
            if (
                causal
                and len(masked) == 2
                and not self.liveness.live(*self._rows_first(masked, at))
            ):
                known = 0
            self._wanted[key] = known
        return known

    def _rows_first(self, masked: tuple[str, ...], at: tuple[int, ...]) -> tuple[int, int]:
        pair = dict(zip(masked, at, strict=True))
        rows, columns = self.program.mask_axes
        return pair[rows], pair[columns]

    def live_with(self, axis: str, atom: int, other: int) -> bool:
        """Whether an atom of one of the mask's axes is live with one of the other."""
        is_row = axis == self.program.mask_axes[0]
        return self.liveness.live(*((atom, other) if is_row else (other, atom)))

    def _bits(self, reduced: tuple[str, ...], spans: list[tuple[int, ...]], both: bool) -> int:
        """Combinations of atoms as the bits of a number."""
        total = 1
        number = 0
        strides = []
        for axis in reversed(reduced):
            strides.append(total)
            total *= self.count[axis]
        strides.reverse()
        pair = [reduced.index(axis) for axis in self.program.mask_axes if axis in reduced]
        if not reduced:
            return 1
        inner = bits(spans[-1])
        if both and len(pair) == 2:
            for places in product(*spans):
                if self.liveness.live(places[pair[0]], places[pair[1]]):
                    number |= 1 << sum(p * s for p, s in zip(places, strides, strict=True))
            return number
        for places in product(*spans[:-1]):
            number |= inner << sum(p * s for p, s in zip(places, strides, strict=False))
        return number

    def domain(self, tensor: Tensor, cell: tuple[int, ...]) -> int:
        """All contributions that a cell must get."""
        reduced = self.reduced(tensor)
        masked = tuple(axis for axis in self.program.mask_axes if axis in tensor.axes)
        at = tuple(cell[tensor.axes.index(axis)] for axis in masked)
        lists = {axis: tuple(range(self.count[axis])) for axis in reduced}
        return self.share(reduced, masked, at, lists, self.masked)

    def words(self, tensor: Tensor, number: int) -> str:
        """Contributions, in words."""
        reduced = self.reduced(tensor)
        if len(reduced) == 1:
            return f"{reduced[0]} {brief(members(number))}"
        return f"{number.bit_count()} contributions along {', '.join(reduced)}"


def members(number: int) -> tuple[int, ...]:
    """The atoms whose bits a number has."""
    return tuple(i for i in range(number.bit_length()) if number >> i & 1)


def fault_of(
    space: Space, block: Block, rows: tuple[int, ...], cols: tuple[int, ...]
) -> str | None:
    """Why the kernel cannot do a block, or must not; rows and columns are the operand's atoms.

    The block has its band among its own rows and columns; the mask has one among all tokens of the
    atoms that the block has tokens of. Both must have the same pairs: the mask's that are not in
    the block would be missing.
    """
    program, live = space.program, space.liveness
    if block.masked and program.mask == "full":
        return "a block that is masked under a full mask"
    sides = zip(live.sides, (rows, cols), block[:2], strict=True)
    spans = [side.touched(a, span) for side, a, span in sides]
    if live.borders:
        fault = _fault_of_ends(live, block, (rows, cols), spans)
        atoms = [a[slice(*span)] for a, span in zip((rows, cols), spans, strict=True)]
        return fault or fault_of_documents(live, block, *atoms)
    if not block.masked or block.by_position:
        fault = _fault_of_ends(live, block, (rows, cols), spans)
        if fault or not block.by_position:
            return fault or _fault_of_whole(live, (rows, cols), spans)
        return None if program.kernel == POSITIONS else "the kernel does not mask by position"
    atoms = [a[slice(*span)] for a, span in zip((rows, cols), spans, strict=True)]
    if live.mask == "causal" and not live.striped:
        return _fault_of_diagonal(live, block, (rows, cols), spans, program.kernel == ATEN)
    lines = [_line(side, each) for side, each in zip(live.sides, atoms, strict=True)]
    for line, each in zip(lines, atoms, strict=True):
        if line is None:
            return f"tokens of atoms {brief(each)} are not evenly spaced"
    skipped = [
        part[0] - (0 if live.striped else side.tokens(a[: span[0]]))
        for side, a, part, span in zip(live.sides, (rows, cols), block[:2], spans, strict=True)
    ]
    return _fault_of_band(live, block, lines, skipped)


def _fault_of_diagonal(live: Liveness, block: Block, tile, spans, square: bool) -> str | None:
    """The last columns are the rows' own, of whatever runs; those before are seen by all rows."""
    rows, cols = (a[slice(*span)] for a, span in zip(tile, spans, strict=True))
    before = cols[: len(cols) - len(rows)]
    if cols[len(before) :] != rows or (before and square):
        return f"a causal block of rows {brief(rows)} and columns {brief(cols)} is no square"
    tokens = live.rows.tokens
    ends = [tuple(tokens(a[:i]) for i in span) for a, span in zip(tile, spans, strict=True)]
    if ends != [*block[:2]] or block.band != (None, tokens(before)):
        return f"row i of the block sees i + {block.band} of rows {brief(rows)}"
    if any(live.kind(row, col) != "full" for row in rows for col in before):
        return f"columns {brief(before)} are not seen by all rows {brief(rows)}"
    return None


def _fault_of_band(live: Liveness, block: Block, lines, skipped: list[int]) -> str | None:
    """The band is the mask's, of all tokens of the atoms that the block has any of.

    Args:
        live: of the mask.
        block: with its own band.
        lines: rows and columns of these atoms: first position, step, how many.
        skipped: of these, how many the block begins after.
    """
    (row, step, height), (col, other, width) = lines
    if step != other:
        return "rows and columns are not equally spaced"
    want = band_of(live, row - col, step)
    shift = skipped[0] - skipped[1]  # to the block's own numbers
    here = tuple(None if bound is None else bound + shift for bound in want)
    if _clipped(here, block) != _clipped(block.band, block):
        return f"row i of the block sees i + {block.band}, the mask leaves i + {here}"
    if band_pairs(height, width, want) != block.pairs:
        return "the mask leaves pairs of the block's atoms beside the block"
    return None


def _fault_of_ends(live: Liveness, block: Block, tile, spans) -> str | None:
    """A block of whole atoms."""
    for side, atoms, span, part in zip(live.sides, tile, spans, block[:2], strict=True):
        if tuple(side.tokens(atoms[:end]) for end in span) != part:
            return f"tokens {part} are not those of whole atoms of {brief(atoms)}"
    return None


def _fault_of_whole(live: Liveness, tile, spans) -> str | None:
    """Every row must see every column."""
    rows, cols = (atoms[slice(*span)] for atoms, span in zip(tile, spans, strict=True))
    if live.mask == "causal" and not live.striped and min(rows) > max(cols):
        return None  # all are later than all
    for row in rows:
        for col in cols:
            if live.kind(row, col) != "full":
                return f"rows of atom {row} would see columns of atom {col}"
    return None


def _line(live: Sequence, atoms: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Position of the first token, from one token to the next, and how many; None if uneven."""
    if live.striped:
        step = live.count // len(atoms)
        even = atoms == tuple(range(atoms[0], live.count, step)) and atoms[0] < step
        return (atoms[0], step, live.tokens(atoms)) if even else None
    runs = list(live.runs(atoms))
    return (runs[0][1], 1, runs[0][2]) if len(runs) == 1 else None


def _clipped(band: Band, block: Block) -> tuple[int, int]:
    """A band without what no row and column of a block can tell."""
    low, high = band
    least, most = 1 - block.height, block.width - 1
    return max(least, least if low is None else low), min(most, most if high is None else high)
