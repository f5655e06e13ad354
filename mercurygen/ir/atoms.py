"""Atoms: the equal parts that every axis is cut into, finest of all that a schedule asks for.

What a rank holds of a tensor is, per axis, a list of atoms in storage order. Lowering, proofs and
the interpreter all say it so. A sequence is dealt by the program's order, finer where its tiles
are looped over; any other axis is cut into contiguous equal parts, in mesh order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from math import lcm, prod

from mercurygen.errors import InternalError
from mercurygen.ir.documents import borders_of
from mercurygen.ir.layout import Interleaving, Order, interleaving
from mercurygen.ir.liveness import Liveness
from mercurygen.ir.problem import ATTENTION
from mercurygen.ir.program import Program, Tensor
from mercurygen.ir.sequence import Sequence, cut_at

Region = tuple[tuple[int, ...], ...]  # per axis of a tensor its atoms, in storage order
Coordinate = Mapping[str, int]


class Atoms:
    """The atoms of a complete program."""

    def __init__(self, program: Program) -> None:
        self.program, self.mesh = program, program.mesh
        self._regions: dict[tuple, Region] = {}
        self._owned: dict[tuple, tuple[int, ...]] = {}
        self._iterations: dict[tuple, tuple[int, ...]] = {}

    @cached_property
    def count(self) -> dict[str, int]:
        """Atoms of every axis."""
        program, split = self.program, self._split
        found = {}
        for axis in program.extents:
            if axis in program.mask_axes:
                continue
            ways = [self._ways(program.parallel_dims(axis))]
            ways += [self._ways(dims) for (_, carried), dims in split.items() if carried == axis]
            found[axis] = lcm(*ways) * self.parts(axis)
        if program.mask_axes:
            found |= {axis: each.count for axis, each in self.sequences.items()}
        return {axis: found[axis] for axis in program.extents}

    def equal_parts(self, axis: str) -> int:
        """Parts of an axis that are alike: its extent has to be a multiple of their number."""
        if axis not in self.program.mask_axes:
            return self.count[axis]
        return self._runs

    @cached_property
    def _runs(self) -> int:
        """Equal runs of both sequences: chunks of the order, finer where tiles are looped over."""
        finer = lcm(*(self.parts(each) for each in self.program.mask_axes))
        return self.program.order.chunks(self.mesh) * finer

    @cached_property
    def sequences(self) -> dict[str, Sequence]:
        """The mask's axes, cut into atoms that end where the edges of its band do.

        What rows from a run's first on see of the columns, and what sees columns up to its last,
        begins and ends as far from the border of a run as the band reaches.
        """
        program, runs, found = self.program, self._runs, {}
        sizes = [program.extent(axis) // runs for axis in program.mask_axes]
        for side, axis in enumerate(program.mask_axes):
            widths = (sizes[side],)
            if self.striped or not program.banded or program.operator not in ATTENTION:
                count = runs
            elif program.align is None:  # the edges are as far from the borders in every run
                size, reach = sizes[side], program.reach
                ends = sorted({0, size, *(x % size for x in reach), *(-x % size for x in reach)})
                widths = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
                count = runs * len(widths)
            else:
                widths = cut_at(runs, sizes[side], self._edges(sizes, side))
                count = len(widths)
            found[axis] = Sequence(bool(self.striped), count, widths)
        return found

    def _edges(self, sizes: list[int], side: int) -> set[int]:
        """Where the band's edges cut rows (0) or columns (1), from the borders of the others."""
        behind, ahead = self.program.reach
        way, other = (1, -1)[side], sizes[1 - side]
        reach = [x for x in (behind, None if ahead is None else -ahead) if x is not None]
        return {n * other + way * x for n in range(self._runs + 1) for x in reach}

    @cached_property
    def _split(self) -> dict[tuple[str, str], list[str]]:
        """Per (tensor, axis) the dimensions that split it, by a pin or in the schedule."""
        found: dict[tuple[str, str], list[str]] = {}
        for tensor in self.program.tensors:
            storage, name = self.program.storage(tensor), tensor.name
            for dim, pinned, stored in zip(self.mesh.names, tensor.pin, storage, strict=True):
                if pinned is not None:
                    found.setdefault((name, pinned), []).append(dim)
                if stored is not None and stored != pinned:
                    found.setdefault((name, stored), []).append(dim)
        return found

    def _ways(self, dims: Iterable[str]) -> int:
        return prod(self.mesh.extent(dim) for dim in dims)

    def parts(self, axis: str) -> int:
        """Parts that the tile loops cut an axis into."""
        if not self.program.tiles:
            return 1
        return prod(self.loop_parts(loop.axes)[axis] for loop in self.loops_of(axis)) or 1

    def loops_of(self, axis: str) -> list:
        """The tile loops that run over an axis, alone or joined with others."""
        return [loop for loop in self.program.tiles if axis in loop.axes]

    def loop_parts(self, axes: tuple[str, ...]) -> dict[str, int]:
        """Parts of each axis of a tile loop; the last of joined axes is cut first by the rest."""
        loop = next(loop for loop in self.program.tiles if loop.axes == axes)
        parts, left = {}, loop.parts
        for axis in axes:
            seen = self.program.extent(axis) // self._ways(self.program.parallel_dims(axis))
            take = left if axis == axes[-1] or left <= seen else seen
            parts[axis] = take
            left = -(-left // take)
        return parts

    def split(self, tensor: Tensor, axis: str) -> tuple[str, ...]:
        """The dimensions that split an axis of a tensor, by its pin or in the schedule.

        Those that split the iterations come first: what a rank works on is then one run.
        """
        program = self.program
        found = self._split.get((tensor.name, axis), ())
        return tuple(sorted(found, key=lambda dim: program.parallel_axis(dim) != axis))

    def order(self, tensor: Tensor | None, axis: str) -> Order:
        """How an axis is dealt to the ranks: of a tensor, or of the iterations (None)."""
        if axis in self.program.mask_axes:
            return self.program.order
        dims = self.program.parallel_dims(axis) if tensor is None else self.split(tensor, axis)
        return Order("contiguous", dims)

    def owned(self, order: Order, axis: str, held: Mapping[str, Iterable[int]]) -> tuple[int, ...]:
        """The atoms of an axis that some coordinates own, ascending.

        Args:
            order: of the axis.
            axis: the axis.
            held: per dimension of the order the coordinates; one left out is held whole.
        """
        key = order, axis, tuple((name, tuple(held[name])) for name in order.dims if name in held)
        found = self._owned.get(key)
        if found is None:
            found = order.owned(self.mesh, held)
            size = self.count[axis] // order.chunks(self.mesh)
            if size > 1:
                found = tuple(chunk * size + i for chunk in found for i in range(size))
            self._owned[key] = found
        return found

    def iterations(self, axis: str, here: Coordinate) -> tuple[int, ...]:
        """The atoms of an axis that a rank works on, over all its steps."""
        dims = self.program.parallel_dims(axis)
        key = axis, tuple(here[dim] for dim in dims)
        found = self._iterations.get(key)
        if found is None:
            held = {dim: (here[dim],) for dim in dims}
            found = self._iterations[key] = self.owned(self.order(None, axis), axis, held)
        return found

    def region(
        self, tensor: Tensor, here: Coordinate, split: Mapping[str, Iterable[str]]
    ) -> Region:
        """What a rank has of a tensor.

        Args:
            tensor: the tensor.
            here: the rank's coordinate.
            split: per axis the dimensions that split it; of an axis left out all is there.
        """
        places = tuple(
            tuple((dim, here[dim]) for dim in split.get(axis, ())) for axis in tensor.axes
        )
        key = tensor.name, places
        if key not in self._regions:
            self._regions[key] = tuple(
                self.owned(self.order(tensor, axis), axis, {dim: (i,) for dim, i in held})
                for axis, held in zip(tensor.axes, places, strict=True)
            )
        return self._regions[key]

    def pinned(self, tensor: Tensor, here: Coordinate) -> Region:
        """What the caller holds, or wants, of a tensor on a rank."""
        return self.region(tensor, here, self._by_axis(tensor, tensor.pin))

    def working(self, tensor: Tensor, here: Coordinate) -> Region:
        """What the schedule works from, or leaves, of a tensor on a rank: between the borders."""
        storage = self.program.storage(tensor)
        return self.region(tensor, here, self._by_axis(tensor, storage))

    def _by_axis(self, tensor: Tensor, split: tuple[str | None, ...]) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for dim, axis in zip(self.mesh.names, split, strict=True):
            if axis is not None:
                found[axis] = (*found.get(axis, ()), dim)
        return found

    def join(self, tensor: Tensor, axis: str, dim: str, whole: Iterable[str]) -> Interleaving:
        """How the ranks' parts along `dim` join when those along `whole` are joined already."""
        order = self.order(tensor, axis)
        if dim not in order.dims:
            raise InternalError(f"{axis} of {tensor.name} is not dealt along {dim}")
        return interleaving(order, self.mesh, dim, whole)

    @property
    def striped(self) -> tuple[str, ...]:
        """Axes whose atoms are every n-th token: of several, the tokens interleave in storage."""
        order = self.program.order
        return self.program.mask_axes if order.kind == "striped" else ()

    @cached_property
    def domain(self) -> Liveness:
        """Which pairs of atoms of the mask's axes are live."""
        program = self.program
        if not program.mask_axes:
            nothing = Sequence(False, 1, (1,))
            return Liveness("full", None, None, nothing, nothing)
        rows, columns = (self.sequences[axis] for axis in program.mask_axes)
        borders = borders_of(program.documents) if program.documents else ()
        mask = "window" if program.banded else program.mask
        return Liveness(mask, *program.reach, rows, columns, borders)

    def length(self, axis: str, owned: tuple[int, ...]) -> int:
        """Indices of some atoms of an axis."""
        if axis in self.program.mask_axes:
            return self.sequences[axis].tokens(owned)
        return len(owned) * self.program.extent(axis) // self.count[axis]

    def elements(self, tensor: Tensor, region: Region) -> int:
        """Elements of a part of a tensor."""
        lengths = tuple(map(self.length, tensor.axes, region))
        return prod(lengths)


def atoms_of(program: Program) -> Atoms:
    """The atoms of a complete program; those of one layout share them."""
    state = program.__dict__
    atoms = state.get("atoms")
    if atoms is None:
        key = "atoms", program.layout
        atoms = program.shared.get(key)
        if atoms is None:
            atoms = program.shared[key] = Atoms(program)
        state["atoms"] = atoms
    return atoms
