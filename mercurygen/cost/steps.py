"""What ranks compute, step by step of a nest, and what they read of a tile, without playing them.

Both depend on the mask, the order of the tokens and on who has which part of the sequence; many
schedules of a search share them (`Program.shared`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Gather, Loop, Plan, Stages, Walk
from mercurygen.lower.visible import read_run, tokens_of, visible

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
    present: tuple[tuple[int, ...], ...]
    sums: tuple[tuple[int, tuple[tuple[int, int], ...], int], ...]


def walked(plan: Plan) -> tuple[Walked, ...]:
    """The walks of a nest, outermost first."""
    mesh, found = plan.program.mesh, []
    for loop in plan.nest.loops:
        for walk in loop.walks:
            back = 1 if walk.reverse else -1
            first = 1 if not loop.tensors and loop.home == "relayed" else 0
            found.append(Walked(walk.dim, loop.axis, back, first, mesh.extent(walk.dim)))
    return tuple(found)


def telling(program: Program, walks: tuple[Walked, ...]) -> tuple[str, ...]:
    """The dimensions by whose coordinate ranks differ in what they do; see `simulate`."""
    dims = {walk.dim for walk in walks}
    for axis in program.mask_axes:
        dims.update(program.parallel_dims(axis))
    return program.mesh.in_order(dims)


def places(program: Program, dims: tuple[str, ...]) -> list[Place]:
    """Every coordinate along some dimensions, row-major."""
    spans = (range(program.mesh.extent(dim)) for dim in dims)
    return [dict(zip(dims, at, strict=True)) for at in product(*spans)]


def steps_of(program: Program, walks: tuple[Walked, ...], dims: tuple[str, ...]) -> Steps:
    """The calls of a nest with these walks."""
    split = tuple(program.parallel_dims(axis) for axis in program.mask_axes)
    key = "steps", program.kernel, program.order, walks, dims, split
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = _steps(program, walks, dims)
    return found


def _steps(program: Program, walks: tuple[Walked, ...], dims: tuple[str, ...]) -> Steps:
    domain, classes = atoms_of(program).domain, places(program, dims)
    rows, columns = (_Tiles(program, axis, walks, classes) for axis in program.mask_axes)
    cut: dict[tuple[int, int], int] = {}
    kinds: dict[tuple[Call, ...], int] = {}
    table = []
    for times in product(*(range(walk.size) for walk in walks)):
        line = []
        for pair in zip(rows.at(times), columns.at(times), strict=True):
            kind = cut.get(pair)
            if kind is None:
                lists = rows.lists[pair[0]], columns.lists[pair[1]]
                calls = tuple(
                    (*tokens_of(block, domain.size), block.causal, int(block.below))
                    for block in visible(domain, program.kernel, *lists)
                )
                kind = cut[pair] = kinds.setdefault(calls, len(kinds))
            line.append(kind)
        table.append(tuple(line))
    sums: Counter[tuple] = Counter()
    for column in zip(*table, strict=True):
        sums[column[0], tuple(sorted(Counter(column[1:]).items()))] += 1
    present = tuple(tuple(sorted(set(row))) for row in table)
    return Steps(tuple(kinds), tuple(table), present, tuple((*k, n) for k, n in sums.items()))


class _Tiles:
    """Which atoms of an axis of the mask every class works on, step by step.

    Attributes:
        lists: the different ones.
    """

    def __init__(
        self, program: Program, axis: str, walks: tuple[Walked, ...], classes: list[Place]
    ) -> None:
        self.program, self.axis, self.walks, self.classes = program, axis, walks, classes
        self.mine = [i for i, walk in enumerate(walks) if walk.axis == axis]
        walking = {walks[i].dim: i for i in self.mine}
        named = program.mesh.in_order({*walking, *program.parallel_dims(axis)})
        self.held = [(dim, walking.get(dim)) for dim in named]
        self.lists: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._found: dict[tuple[int, ...], list[int]] = {}

    def at(self, times: tuple[int, ...]) -> list[int]:
        """Per class an index of `lists`, at a step of the walks."""
        key = tuple(times[i] for i in self.mine)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = [self._number(place, times) for place in self.classes]
        return found

    def _number(self, place: Place, times: tuple[int, ...]) -> int:
        at = tuple(
            place[dim] if i is None else _owner(self.walks[i], place, times[i])
            for dim, i in self.held
        )
        number = self._numbers.get(at)
        if number is None:
            number = self._numbers[at] = len(self.lists)
            held = {dim: (i,) for (dim, _), i in zip(self.held, at, strict=True)}
            atoms = atoms_of(self.program)
            self.lists.append(atoms.owned(self.program.order, self.axis, held))
        return number


def _owner(walk: Walked, place: Place, step: int) -> int:
    return (place[walk.dim] + walk.back * (step + walk.first)) % walk.size


# --- what is read of a tile ---------------------------------------------------------------------


def brought(loops: tuple[Loop, ...], number: int) -> tuple[Stages, int]:
    """All stages of a loop's tensors, outermost first, and where those of the loop begin."""
    tensor, stages, first = loops[number].tensors[0], (), 0
    for index, loop in enumerate(loops):
        if index == number:
            first = len(stages)
        if tensor in loop.tensors:
            stages = (*stages, *loop.stages)
    return stages, first


def trimmed(program: Program, loops: tuple[Loop, ...], number: int) -> bool:
    """Whether ranks get only what they read of a loop's tiles."""
    loop = loops[number]
    if program.mask == "full" or loop.axis not in program.mask_axes or not loop.tensors:
        return False
    stages, first = brought(loops, number)
    done = stages[: first + len(loop.stages)]
    return any(isinstance(stage, Walk) and stage.direct for stage in done)


class Lengths:
    """Atoms that every class has of the tiles of one loop, of which it gets what it reads.

    Attributes:
        stages: all of the loop's tensors.
        first: where those of the loop begin.
        outer: walks among those before them.
    """

    def __init__(
        self, program: Program, loops: tuple[Loop, ...], number: int, dims: tuple[str, ...]
    ) -> None:
        """
        Args:
            program: the program.
            loops: of the nest.
            number: of the loop.
            dims: that tell classes apart.
        """
        self.program, self.axis = program, loops[number].axis
        self.stages, self.first = brought(loops, number)
        self.outer = [s for s in self.stages[: self.first] if isinstance(s, Walk)]
        self.walks = [s for s in self.stages[self.first :] if isinstance(s, Walk)]
        self.atoms, self.classes = atoms_of(program), places(program, dims)
        tensor = program.tensor(loops[number].tensors[0])
        self.split = [
            dim
            for dim, axis in zip(program.mesh.names, program.storage(tensor), strict=True)
            if axis == self.axis
        ]
        rows, columns = program.mask_axes
        self.by_rows, self.other = self.axis == rows, columns if self.axis == rows else rows
        self._found: dict[tuple, list[int]] = {}
        others = program.parallel_dims(self.other)
        self.readers = [tuple(place[dim] for dim in others) for place in self.classes]
        self._places: dict[tuple[str, int], list[int]] = {}
        key = "read", program.order, self.axis, others
        self._lengths: dict[tuple, int] = program.shared.setdefault(key, {})
        self._others: dict[tuple, tuple[int, ...]] = {}

    def at(self, around: tuple[int, ...], times: tuple[int, ...], depth: int) -> list[int]:
        """Atoms that every class has of a tile.

        Args:
            around: steps of the walks before the loop's.
            times: steps of the loop's walks so far, outermost first.
            depth: stages of the loop that the tile has been through.
        """
        key = around, times, depth
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._at(*key)
        return found

    def _at(self, around: tuple[int, ...], times: tuple[int, ...], depth: int) -> list[int]:
        mesh, stages = self.program.mesh, self.stages[: self.first + depth]
        away = {}  # how far from a rank the owner is
        walks = (*self.outer, *self.walks[: len(times)])
        for walk, step in zip(walks, (*around, *times), strict=True):
            away[walk.dim] = (step if walk.reverse else -step) % mesh.extent(walk.dim)
        whole = {stage.dim for stage in stages if isinstance(stage, Gather)}
        split = tuple(dim for dim in self.split if dim not in whole)
        inner = tuple(  # of each direct walk that this tile has come along, the walks inside
            tuple(s.dim for s in self.stages[index + 1 :] if isinstance(s, Walk))
            for index, stage in enumerate(stages)
            if isinstance(stage, Walk) and stage.direct and away[stage.dim]
        )
        columns = [self._coordinates(dim, away.get(dim, 0)) for dim in split]
        owners = list(zip(*columns, strict=True)) or [()] * len(self.classes)
        readers = self.readers if inner else [()] * len(self.classes)
        found = []
        for number, (owner, reader) in enumerate(zip(owners, readers, strict=True)):
            key = split, inner, owner, reader
            length = self._lengths.get(key)
            if length is None:
                where = {dim: (i,) for dim, i in zip(split, owner, strict=True)}
                region = self.atoms.owned(self.program.order, self.axis, where)
                for dims in inner:
                    region = self._read(region, self.classes[number], dims)
                length = self._lengths[key] = len(region)
            found.append(length)
        return found

    def _coordinates(self, dim: str, away: int) -> list[int]:
        """Of every class the coordinate so far from it."""
        key = dim, away
        if key not in self._places:
            size = self.program.mesh.extent(dim)
            self._places[key] = [(place.get(dim, 0) + away) % size for place in self.classes]
        return self._places[key]

    def _read(
        self, region: tuple[int, ...], place: Place, inner: tuple[str, ...]
    ) -> tuple[int, ...]:
        """The run of it that a rank reads, or those that differ from it along inner walks."""
        mesh, split = self.program.mesh, self.program.parallel_dims(self.other)
        key = tuple((dim, None if dim in inner else place[dim]) for dim in split)
        others = self._others.get(key)
        if others is None:
            spans = ((range(mesh.extent(dim)) if i is None else (i,)) for dim, i in key)
            found: set[int] = set()
            for at in product(*spans):
                found.update(self.atoms.iterations(self.other, dict(zip(split, at, strict=True))))
            others = self._others[key] = tuple(sorted(found))
        start, stop = read_run(self.atoms.domain, self.by_rows, region, others)
        return region[start:stop]


def lengths_of(
    program: Program, loops: tuple[Loop, ...], number: int, dims: tuple[str, ...]
) -> Lengths:
    """The lengths of a loop; schedules that agree in what they depend on share them."""
    tensor = program.tensor(loops[number].tensors[0])
    other = tuple(program.parallel_dims(axis) for axis in program.mask_axes)
    stages = brought(loops, number)
    key = "lengths", program.order, tensor.name, stages, program.storage(tensor), dims, other
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = Lengths(program, loops, number, dims)
    return found
