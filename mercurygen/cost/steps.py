"""What ranks compute, step by step of a nest, without playing them.

It depends on the mask, the order of the tokens, on who has which part of the sequence, and on the
walks; many schedules of a search share it (`Program.shared`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from operator import add

from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.program import Program
from mercurygen.lower.cuts import cuts_of
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import tokens_of

Call = tuple[int, int, bool, int]  # rows, columns, whether the mask cuts them, rows left out
Place = dict[str, int]


@dataclass(frozen=True, slots=True)
class Walked:
    """One walk of a nest.

    Attributes:
        dim: the mesh dimension.
        axis: whose tiles come by.
        back: +1 or -1: how the owner moves from step to step.
        first: step that the first tile is of: results alone that go home begin one ahead.
        size: of the dimension.
    """

    dim: str
    axis: str
    back: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The body's calls, for every class of ranks that do the same.

    Attributes:
        kinds: the different sets of calls.
        table: per step (the last walk is the fastest) and class an index of `kinds`.
        present: per step the kinds that any class has.
        sums: how often a class has each kind, the first step apart: (first kind, ((kind, times),
            ...)), with the number of such classes.
    """

    kinds: tuple[tuple[Call, ...], ...]
    table: tuple[tuple[int, ...], ...]
    present: tuple[frozenset[int], ...]
    sums: tuple[tuple[int, tuple[tuple[int, int], ...], int], ...]


def walked(plan: Plan) -> tuple[Walked, ...]:
    """The walks of a nest, outermost first."""
    extent = plan.program.mesh.extent
    return tuple(Walked(*pace, extent(pace[0])) for loop in plan.nest.loops for pace in loop.paces)


def telling(program: Program, walks: tuple[Walked, ...]) -> tuple[str, ...]:
    """The dimensions by whose coordinate ranks differ in what they do; see `simulate`."""
    dims = {walk.dim for walk in walks}
    for axis in program.mask_axes:
        dims.update(program.parallel_dims(axis))
    return program.mesh.in_order(dims)


class Classes:
    """The ranks, told apart by their coordinates along some dimensions; a class for each.

    Attributes:
        dims: these dimensions.
        count: how many classes.
        places: the coordinates of each, row-major.
        of: the class of every rank.
    """

    def __init__(self, mesh: Mesh, dims: tuple[str, ...]) -> None:
        self.mesh, self.dims = mesh, dims
        spans = (range(mesh.extent(dim)) for dim in dims)
        self.places = [dict(zip(dims, at, strict=True)) for at in product(*spans)]
        self.count = len(self.places)
        numbers = {tuple(place.values()): i for i, place in enumerate(self.places)}
        coordinates = map(mesh.coordinate, range(mesh.size))
        self.of = [numbers[tuple(here[dim] for dim in dims)] for here in coordinates]
        self._away: dict[tuple[str, int], list[int]] = {}
        self._further: dict[tuple[str, int], list[int]] = {}

    def away(self, dim: str, distance: int) -> list[int]:
        """Per class the one so many places further along a dimension."""
        key = dim, distance
        found = self._away.get(key)
        if found is None:
            size, index = self.mesh.extent(dim), self.dims.index(dim)
            stride = prod(self.mesh.extent(inner) for inner in self.dims[index + 1 :])
            found = self._away[key] = [
                number + ((place[dim] + distance) % size - place[dim]) * stride
                for number, place in enumerate(self.places)
            ]
        return found

    def further(self, dim: str, distance: int) -> list[int]:
        """Per class its coordinate along a dimension, so many places further.

        Along other dimensions than those that tell classes apart it is that of the first rank.
        """
        key = dim, distance
        found = self._further.get(key)
        if found is None:
            size = self.mesh.extent(dim)
            found = [(place.get(dim, 0) + distance) % size for place in self.places]
            self._further[key] = found
        return found


def classes_of(program: Program, dims: tuple[str, ...]) -> Classes:
    """The ranks of a program's mesh by their coordinates along some dimensions."""
    key = "classes", dims
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = Classes(program.mesh, dims)
    return found


def steps_of(program: Program, walks: tuple[Walked, ...], classes: Classes) -> Steps:
    """The calls of a nest with these walks."""
    split = tuple(program.parallel_dims(axis) for axis in program.mask_axes)
    key = "steps", program.kernel, program.order, walks, classes.dims, split
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = _steps(program, walks, classes)
    return found


def _steps(program: Program, walks: tuple[Walked, ...], classes: Classes) -> Steps:
    rows, columns = (_Tiles(program, axis, walks, classes) for axis in program.mask_axes)
    cuts, found = cuts_of(program, rows.dims, columns.dims), []
    width, size = len(cuts.columns), atoms_of(program).domain.size
    for times in product(*(range(walk.size) for walk in walks)):
        pairs = map(add, rows.at(times, width), columns.at(times, 1))
        found.append(list(map(cuts.of.__getitem__, pairs)))
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(chain.from_iterable(found)))}
    table = tuple([tuple(map(numbers.__getitem__, row)) for row in found])
    kinds = [
        tuple([(*tokens_of(b, size), b.causal, int(b.below)) for b in cuts.kinds[kind]])
        for kind in numbers
    ]
    alike = Counter(
        [(n[0], tuple(map(n[1:].count, range(len(kinds))))) for n in zip(*table, strict=True)]
    )
    sums = [
        (first, tuple([pair for pair in enumerate(times) if pair[1]]), many)
        for (first, times), many in alike.items()
    ]
    return Steps(tuple(kinds), table, tuple(map(frozenset, table)), tuple(sums))


class _Tiles:
    """Which tile of an axis of the mask every class works on, step by step.

    Attributes:
        dims: that say which tile.
    """

    def __init__(
        self, program: Program, axis: str, walks: tuple[Walked, ...], classes: Classes
    ) -> None:
        self.classes = classes
        self.mine = [(i, walk) for i, walk in enumerate(walks) if walk.axis == axis]
        split = program.parallel_dims(axis)
        self.dims = program.mesh.in_order((*(walk.dim for _, walk in self.mine), *split))
        self.own = _numbers(program.mesh, self.dims, classes.places)
        self._found: dict[tuple[int, ...], list[int]] = {}

    def at(self, times: tuple[int, ...], width: int) -> list[int]:
        """Per class the number of its tile, times a width, at a step of the walks."""
        key = tuple([times[i] for i, _ in self.mine])
        found = self._found.get(key)
        if found is None:
            found = [n * width for n in self.own]
            for i, walk in self.mine:
                away = walk.back * (times[i] + walk.first) % walk.size
                found = [found[other] for other in self.classes.away(walk.dim, away)]
            self._found[key] = found
        return found


def _numbers(mesh: Mesh, dims: tuple[str, ...], places: list[Place]) -> list[int]:
    """Of every place its number among all coordinates along some dimensions, row-major."""
    found = [0] * len(places)
    for dim in dims:
        size = mesh.extent(dim)
        found = [n * size + place[dim] for n, place in zip(found, places, strict=True)]
    return found
