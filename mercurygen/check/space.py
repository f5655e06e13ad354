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
from mercurygen.ir.kernel import TRITON
from mercurygen.ir.program import Tensor
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import POSITIONS, Block


@lru_cache(maxsize=65536)
def bits(atoms: tuple[int, ...]) -> int:
    """A set of atoms as the bits of a number."""
    return sum(1 << atom for atom in atoms)


class Space:
    """Atoms of a plan: what a caller gives and wants on every rank, and what cells need."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program, self.atoms = plan, plan.program, plan.atoms
        self.liveness = plan.atoms.domain
        self.count = plan.atoms.count
        self.masked = plan.program.mask != "full" or bool(plan.program.documents)
        self._wanted: dict[tuple, int] = {}
        self._elements: dict[tuple, Fraction] = {}

    def pinned(self, tensor: Tensor, rank: int) -> Content:
        """What the caller holds, or wants, of a tensor on a rank."""
        place = self.program.mesh.coordinate(rank)
        return Content(tensor.name, tensor.axes, self.atoms.pinned(tensor, place))

    def elements(self, content: Content) -> Fraction:
        """Elements of a content."""
        key = content.tensor, tuple(map(len, content.region))
        if key not in self._elements:
            extents, count = self.program.extents, self.count
            self._elements[key] = prod(
                (
                    Fraction(length * extents[axis], count[axis])
                    for axis, length in zip(content.axes, key[1], strict=True)
                ),
                start=Fraction(1),
            )
        return self._elements[key]

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
    """Why the kernel cannot do a block, or must not: rows and columns are those of the block."""
    program, live = space.program, space.liveness
    if block.causal and program.mask == "full":
        return "a causal block under a full mask"
    if block.below and not live.striped:
        return "a block below the diagonal of tokens in runs"
    if live.borders:
        return fault_of_documents(live, block, rows, cols)
    if not block.causal:
        if live.mask == "causal" and not live.striped and min(rows) > max(cols):
            return None  # all are later than all
        for row in rows:
            for col in cols:
                if live.kind(row, col) != "full":
                    return f"rows of atom {row} would see columns of atom {col}"
        return None
    if program.kernel == POSITIONS:
        return None
    if live.striped:
        return _fault_of_stripe(block, rows, cols, live.count)
    if program.kernel == TRITON:
        cols = cols[-len(rows) :]  # those before are live: atoms ascend
    if rows != cols:
        return f"a causal block of rows {brief(rows)} and columns {brief(cols)} is no square"
    return None


def _fault_of_stripe(
    block: Block, rows: tuple[int, ...], cols: tuple[int, ...], count: int
) -> str | None:
    """Row i must see column j if j <= i, or, below the diagonal, if j < i, and no other."""
    step = count // len(rows)
    for atoms in (rows, cols):
        if atoms != tuple(range(atoms[0], count, step)) or atoms[0] >= step:
            return f"tokens of atoms {brief(atoms)} are not evenly spaced"
    if len(rows) != len(cols) or (rows[0] < cols[0]) != block.below:
        where = "below the diagonal" if block.below else "with the diagonal"
        return f"a causal block {where} of rows {brief(rows)} and columns {brief(cols)}"
    return None
