"""What ranks compute, step by step of a nest, without playing them.

It depends on the mask, the order of the tokens, on who has which part of the sequence, and on the
walks; many schedules of a search share it (`Program.shared`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from mercurygen.cost.kernels import bounds
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.program import Program
from mercurygen.lower.cuts import EARLIER, EQUAL, LATER, Digit, cuts_of
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Band, Block, sizes_of

# rows, columns, which of them each sees, rows left out, and of packed documents each one's
Call = tuple[int, int, Band, int, tuple[tuple[int, int], ...]]
Place = dict[str, int]
Counts = tuple[tuple[int, int, bool], ...]  # (number, times, whether the rest does not matter)


@dataclass(frozen=True, slots=True)
class Walked:
    """One walk of a nest.

    Attributes:
        dim: the mesh dimension.
        axis: whose tiles come by.
        back: +1 or -1: how the owner moves from step to step.
        first: step that the first tile is of: results alone that go home begin one ahead.
        extent: of the dimension.
        steps: of the tiles that come by, the own one's first.
    """

    dim: str
    axis: str
    back: int
    first: int
    extent: int
    steps: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many tiles come by."""
        return len(self.steps)


def walked(plan: Plan) -> tuple[Walked, ...]:
    """The walks of a nest, outermost first."""
    found = []
    for *pace, steps in [pace for loop in plan.nest.loops for pace in loop.paces]:
        size = plan.program.mesh.extent(pace[0])
        coming = tuple(range(size)) if steps is None else (0, *steps)
        found.append(Walked(*pace, size, coming))
    return tuple(found)


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
        found = program.shared[key] = Steps(program, walks, classes)
    return found


class Steps:
    """The body's calls, for every class of ranks that do the same.

    Attributes:
        kinds: the different sets of calls.
        present: per step (the last walk is the fastest) the kinds that any class has.
        sums: how often a class has each kind, the first step apart: (first kind, ((kind, times),
            ...)), with the number of such classes.
    """

    def __init__(self, program: Program, walks: tuple[Walked, ...], classes: Classes) -> None:
        tiles = [
            program.mesh.in_order((*_dims(walks, axis), *program.parallel_dims(axis)))
            for axis in program.mask_axes
        ]
        cuts, striped = cuts_of(program, *tiles), atoms_of(program).domain.striped
        self.of, self.classes, self.walks = cuts.of, classes, walks
        self.digits, self.at = [], []  # and of each the place of its walk among all
        for digit in cuts.digits:
            at = next((i for i, walk in enumerate(walks) if walk.dim == digit.dim), None)
            walk = None if at is None else walks[at]
            self.digits.append(_moving(program, digit, walk))
            self.at.append(at)
        self.kinds = tuple([tuple([_call(b, striped) for b in blocks]) for blocks in cuts.kinds])
        self._rows: dict[int, list[int]] = {}
        self._present: dict[tuple, frozenset[int]] = {}
        self.times = list(product(*(range(walk.size) for walk in walks)))
        self.present = tuple([self._kinds_at(times) for times in self.times])
        self.sums = self._sums()

    def row(self, step: int) -> list[int]:
        """The kind of every class at a step."""
        found = self._rows.get(step)
        if found is None:
            numbers = [0] * self.classes.count
            for digit, at in zip(self.digits, self.at, strict=True):
                each = digit.numbers(0 if at is None else self.times[step][at])
                here = [each[place[digit.dim]] for place in self.classes.places]
                numbers = [n * digit.radix + more for n, more in zip(numbers, here, strict=True)]
            found = self._rows[step] = list(map(self.of.__getitem__, numbers))
        return found

    def _kinds_at(self, times: tuple[int, ...]) -> frozenset[int]:
        """The kinds that any class has: every digit goes with every other."""
        each = tuple(
            [
                digit.met(0 if at is None else times[at])
                for digit, at in zip(self.digits, self.at, strict=True)
            ]
        )
        found = self._present.get(each)
        if found is None:
            numbers = {0}
            for digit, met in zip(self.digits, each, strict=True):
                numbers = {n * digit.radix + more for n in numbers for more in met}
            found = self._present[each] = frozenset(map(self.of.__getitem__, numbers))
        return found

    def _sums(self) -> tuple[tuple[int, tuple[tuple[int, int], ...], int], ...]:
        """How often a class has each kind: digit by digit, for each adds to all outside it."""
        mine = {digit.dim for digit in self.digits}
        others = prod(walk.size for walk in self.walks if walk.dim not in mine)
        many = self.classes.count // prod(digit.size for digit in self.digits)
        # Number of the first step; (number, times, whether what follows does not matter); classes.
        states = [(0, ((0, others, False),), many)]
        for digit in self.digits:
            states = [
                (first * digit.radix + here, digit.on(counts, more), classes * alike)
                for first, counts, classes in states
                for here, more, alike in digit.counts
            ]
        found: Counter[tuple] = Counter()
        for first, counts, classes in states:
            times = {self.of[first]: -1}
            for number, count, _ in counts:
                kind = self.of[number]
                times[kind] = times.get(kind, 0) + count
            rest = tuple(sorted([pair for pair in times.items() if pair[1]]))
            found[self.of[first], rest] += classes
        return tuple([(first, rest, classes) for (first, rest), classes in found.items()])


def _call(block: Block, striped: bool) -> Call:
    """A block: stripes are not cut, their first rows and last columns are left out."""
    less = block.rows[0] if striped else 0
    return block.height, block.width, bounds(block), less, sizes_of(block)


class _Moving:
    """A digit of pairs of tiles, of which one comes by along the digit's dimension, or none.

    Attributes:
        counts: (number at the first step, ((number, times), ...), coordinates that are alike).
    """

    def __init__(self, digit: Digit, walk: Walked | None, rows: str) -> None:
        self.digit, self.dim, self.size, self.radix = digit, digit.dim, digit.size, digit.radix
        self.walk, self.of_rows = walk, walk is not None and walk.axis == rows
        self._numbers: dict[int, list[int]] = {}
        self._met: dict[int, frozenset[int]] = {}
        self.times = walk.size if walk else 1
        found: Counter[tuple] = Counter()
        for i, first in enumerate(self.numbers(0)):
            found[first, self._count(i)] += 1
        self.counts = [(first, more, alike) for (first, more), alike in found.items()]

    def _count(self, ours: int) -> tuple[tuple[int, int], ...]:
        """(number, times) of a rank at a coordinate: every tile in reach comes by once."""
        theirs = [ours]
        if self.walk:
            away = [self.walk.back * (step + self.walk.first) for step in self.walk.steps]
            theirs = [(ours + each) % self.size for each in away]
        if self.digit.compared and self.digit.rows and self.digit.columns and self.walk:
            before, after = ours, self.size - 1 - ours
            later, earlier = (after, before) if self.of_rows else (before, after)
            found = {EQUAL: 1, LATER: later, EARLIER: earlier}
            return tuple([pair for pair in found.items() if pair[1]])
        pairs = ((i, ours) if self.of_rows else (ours, i) for i in theirs)
        return tuple(sorted(Counter([self.digit.number(*pair) for pair in pairs]).items()))

    def on(self, counts: Counts, more: tuple[tuple[int, int], ...]) -> Counts:
        """How often numbers are met with this digit behind them."""
        found = []
        for number, times, over in counts:
            number *= self.radix
            if over:
                found.append((number, times * self.times, True))
            else:
                found += [
                    (number + digit, times * again, self.digit.parts(digit))
                    for digit, again in more
                ]
        return tuple(found)

    def numbers(self, time: int) -> list[int]:
        """The number at every coordinate of a rank, at a step of the walk."""
        found = self._numbers.get(time)
        if found is None:
            ours = range(self.size)
            theirs: Sequence[int] = ours
            if self.walk is not None:
                away = self.walk.back * (self.walk.steps[time] + self.walk.first)
                theirs = [(i + away) % self.size for i in ours]
            rows, columns = (theirs, ours) if self.of_rows else (ours, theirs)
            found = self._numbers[time] = list(map(self.digit.number, rows, columns))
        return found

    def met(self, time: int) -> frozenset[int]:
        """The numbers that any rank has."""
        found = self._met.get(time)
        if found is None:
            both = self.digit.rows and self.digit.columns and self.digit.compared
            if both and self.walk is not None:
                away = (self.walk.steps[time] + self.walk.first) % self.size
                found = frozenset((LATER, EARLIER) if away else (EQUAL,))
            else:
                found = frozenset(self.numbers(time))
            self._met[time] = found
        return found


def _moving(program: Program, digit: Digit, walk: Walked | None) -> _Moving:
    """A digit whose tiles come by so; nests of a mesh share it."""
    key = "moving", digit, walk
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = _Moving(digit, walk, program.mask_axes[0])
    return found


def _dims(walks: tuple[Walked, ...], axis: str) -> list[str]:
    return [walk.dim for walk in walks if walk.axis == axis]
