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
    atoms, classes = atoms_of(program), places(program, dims)
    domain, size = atoms.domain, atoms.domain.size
    held = []  # per axis of the mask: dimensions that its tiles are one rank's of, and their walks
    for axis in program.mask_axes:
        walking = {walk.dim: i for i, walk in enumerate(walks) if walk.axis == axis}
        named = program.mesh.in_order({*walking, *program.parallel_dims(axis)})
        held.append([(dim, walking.get(dim)) for dim in named])
    owned: list[dict[tuple, tuple[int, ...]]] = [{}, {}]
    cut: dict[tuple, int] = {}
    kinds: dict[tuple[Call, ...], int] = {}
    table = []
    for times in product(*(range(walk.size) for walk in walks)):
        row = []
        for place in classes:
            at = tuple(
                tuple(place[d] if i is None else _owner(walks[i], place, times[i]) for d, i in one)
                for one in held
            )
            kind = cut.get(at)
            if kind is None:
                lists = []
                for index, axis in enumerate(program.mask_axes):
                    if at[index] not in owned[index]:
                        where = {d: (i,) for (d, _), i in zip(held[index], at[index], strict=True)}
                        owned[index][at[index]] = atoms.owned(program.order, axis, where)
                    lists.append(owned[index][at[index]])
                blocks = visible(domain, program.kernel, *lists)
                calls = tuple(
                    (*tokens_of(block, size), block.causal, int(block.below)) for block in blocks
                )
                kind = cut[at] = kinds.setdefault(calls, len(kinds))
            row.append(kind)
        table.append(tuple(row))
    sums: Counter[tuple] = Counter()
    for column in zip(*table, strict=True):
        sums[column[0], tuple(sorted(Counter(column[1:]).items()))] += 1
    present = tuple(tuple(sorted(set(row))) for row in table)
    return Steps(tuple(kinds), tuple(table), present, tuple((*k, n) for k, n in sums.items()))


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
        self._owned: dict[tuple, tuple[int, ...]] = {}
        self._others: dict[tuple, tuple[int, ...]] = {}

    def at(self, around: tuple[int, ...], times: tuple[int, ...], depth: int) -> list[int]:
        """Atoms that every class has of a tile.

        Args:
            around: steps of the walks before the loop's.
            times: steps of the loop's walks so far, outermost first.
            depth: stages of the loop that the tile has been through.
        """
        key = around, times, depth
        if key not in self._found:
            self._found[key] = [self._length(place, *key) for place in self.classes]
        return self._found[key]

    def _length(self, place: Place, around: tuple, times: tuple, depth: int) -> int:
        stages, here = self.stages[: self.first + depth], dict(place)
        walks = (*self.outer, *self.walks[: len(times)])
        for walk, step in zip(walks, (*around, *times), strict=True):
            size, back = self.program.mesh.extent(walk.dim), 1 if walk.reverse else -1
            here[walk.dim] = (place[walk.dim] + back * step) % size
        whole = {stage.dim for stage in stages if isinstance(stage, Gather)}
        held = tuple((dim, here.get(dim, 0)) for dim in self.split if dim not in whole)
        region = self._owned.get(held)
        if region is None:
            where = {dim: (i,) for dim, i in held}
            region = self.atoms.owned(self.program.order, self.axis, where)
            self._owned[held] = region
        for index, stage in enumerate(stages):
            if isinstance(stage, Walk) and stage.direct and here[stage.dim] != place[stage.dim]:
                inner = [s.dim for s in self.stages[index + 1 :] if isinstance(s, Walk)]
                region = self._read(region, place, inner)
        return len(region)

    def _read(self, region: tuple[int, ...], place: Place, inner: list[str]) -> tuple[int, ...]:
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
