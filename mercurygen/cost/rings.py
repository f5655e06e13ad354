"""How tiles come by, counted: the loops of `mercurygen.lower.walks`, with sums for buffers.

A buffer is gone when the last name that refers to it is bound anew, there as in an emitted module.
A tile that was made for a step (gathered, or the last of a ring) is therefore alive until the next
one is bound: `old` of its walk, or, of what the body is called with, `pending`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod

from mercurygen.cost.kernels import Kernels
from mercurygen.cost.steps import Lengths, brought, lengths_of, trimmed, walked
from mercurygen.cost.tally import NEVER, Tally
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Gather, Plan, Walk, walk_levels

Step = Callable[[int], None]


class NoForm(Exception):
    """A plan that is only simulated: it has no closed form here."""


class Gathering:
    """Every tile of a walk gathered over a dimension; the next one while one is used.

    Attributes:
        made: bytes of the tile that is there.
    """

    def __init__(self, rings: Rings, stage: Gather, sizes: list[int], on: Step, old: Step) -> None:
        """
        Args:
            rings: whose tiles.
            stage: the gather.
            sizes: bytes of a tile of each tensor, before.
            on: what is done with step after step.
            old: told the bytes of a tile once another has taken its place.
        """
        self.rings, self.stage, self.sizes, self.on, self.old = rings, stage, sizes, on, old
        self.times = rings.mesh.extent(stage.dim)
        self.bytes = sum(sizes) * self.times
        self.made = 0

    def __call__(self, step: int) -> None:
        """A tile has come by."""
        tally = self.rings.tally
        if step == 0:
            tally.up(self.bytes)  # the parts
        ends = [tally.start("all-gather", self.stage.dim, size) for size in self.sizes]
        if step:
            self.on(step - 1)
        for end in ends:
            tally.wait(end)
        for size in self.sizes:
            tally.copy(2 * size * self.times)
        tally.up(self.bytes)
        if self.made:
            self.old(self.made)
        self.made = self.bytes

    def end(self, last: int) -> None:
        """No more tiles."""
        self.on(last)
        self.rings.tally.down(self.bytes)
        self.old(self.made)


class Rings:
    """The tiles of every loop of a plan.

    Attributes:
        tally: the sums.
        times: per walk of the nest, at which step it is.
    """

    def __init__(self, plan: Plan, tally: Tally, kernels: Kernels, dims: tuple[str, ...]) -> None:
        self.plan, self.program, self.tally, self.kernels = plan, plan.program, tally, kernels
        self.mesh = self.program.mesh
        self.loops = plan.nest.loops
        self.walks = walked(plan)
        self.dims = dims
        self.sizes = [self.mesh.extent(dim) for dim in dims]
        self.times = [0] * len(self.walks)
        self.old = [0] * len(self.walks)
        self.pending = 0
        loops = range(len(self.loops))
        self.trimmed = [trimmed(self.program, self.loops, number) for number in loops]
        self.offsets: list[int] = []
        count = 0
        for loop in self.loops:
            self.offsets.append(count)
            count += len(loop.walks)

    def coming(self, number: int, sizes: list[int], body: Callable[[], None]) -> None:
        """Every tile of a loop, ours first.

        Args:
            number: of the loop.
            sizes: bytes of a tile of each tensor, after the gathers outside every walk.
            body: what is done with each.
        """
        loop, tally = self.loops[number], self.tally
        if loop.partner or any(walk.both for walk in loop.walks):
            raise NoForm("skewed, or both ways")
        levels = walk_levels(loop.walking)
        longer, spares, one = 1, 0, 0
        for walk, gathers in levels:
            size = self.mesh.extent(walk.dim)
            count = min((walk.ahead if walk.direct else max(walk.ahead, 1)) + 1, size - 1)
            one = sum(sizes) * longer
            spares += one * count
            longer *= prod(self.mesh.extent(stage.dim) for stage in gathers)
        tally.up(spares)
        first = self.offsets[number]
        self.level(number, 0, levels, sizes, body)
        tally.down(spares)
        last = first + len(levels) - 1
        for index in range(first, last):
            tally.down(self.old[index])
            self.old[index] = 0
        if not levels[-1][1]:  # the last tile is a receive buffer
            tally.alive += one
            self.old[last] = one

    def level(
        self,
        number: int,
        index: int,
        levels: list[tuple[Walk, tuple[Gather, ...]]],
        sizes: list[int],
        body: Callable[[], None],
    ) -> None:
        """The loops of a nest from one level inwards."""
        (walk, gathers), at = levels[index], self.offsets[number] + index
        size = self.mesh.extent(walk.dim)
        wider = [n * prod(self.mesh.extent(stage.dim) for stage in gathers) for n in sizes]
        innermost = index + 1 == len(levels)
        plain = not self.loops[number].outputs

        def on(step: int) -> None:
            self.times[at] = step
            if self.old[at]:
                if innermost and plain:
                    self.pending += self.old[at]
                else:
                    self.tally.alive -= self.old[at]
                self.old[at] = 0
            if innermost:
                body()
            else:
                self.level(number, index + 1, levels, wider, body)

        def replaced(nbytes: int) -> None:
            self.old[at] += nbytes

        chain: list[Gathering] = []
        inwards: Step = on
        widths = [prod(self.mesh.extent(s.dim) for s in gathers[:i]) for i in range(len(gathers))]
        for stage, width in reversed(list(zip(gathers, widths, strict=True))):
            old = replaced if not chain else self.dropped
            before = Gathering(self, stage, [n * width for n in sizes], inwards, old)
            chain.insert(0, before)
            inwards = before
        self.ring(number, index, walk, sizes, inwards)
        for gathering in chain:
            gathering.end(size - 1)

    def dropped(self, nbytes: int) -> None:
        """A tile between two gathers is gone."""
        self.tally.down(nbytes)

    # --- one ring -----------------------------------------------------------------------------

    def ring(self, number: int, index: int, walk: Walk, sizes: list[int], on: Step) -> None:
        """One walk, relayed or direct."""
        if self.trimmed[number] and self.cut(number, walk):
            self.trimmed_ring(number, index, walk, sum(sizes), on)
            return
        tally, dim, size = self.tally, walk.dim, self.mesh.extent(walk.dim)
        ahead, direct = walk.ahead, walk.direct
        flights: deque[float] = deque()
        started = 0
        for step in range(size):
            while started < min(step + ahead, size - 1):
                started += 1
                if flights and not direct:
                    tally.wait(flights[-1])
                flights.append(self.shift(dim, sizes, self.distance(walk, started)))
            on(step)
            if step < size - 1:
                if not ahead:
                    started += 1
                    flights.append(self.shift(dim, sizes, self.distance(walk, step + 1)))
                tally.wait(flights.popleft())

    def cut(self, number: int, walk: Walk) -> bool:
        """Whether a walk, or one before it, is of what every rank reads only."""
        loop = self.loops[number]
        stages, first = brought(self.loops, number)
        done = stages[: first + loop.stages.index(walk) + 1]
        return any(isinstance(stage, Walk) and stage.direct for stage in done)

    def shift(self, dim: str, tile: list[int], distance: int) -> float:
        """Start one step of a tile's tensors; classes that are not there take no part."""
        off, nbytes = self.off(), sum(tile)
        if off is None:
            return self.tally.start("shift", dim, nbytes, distance, 2 * len(tile))
        sizes = [0 if gone else nbytes for gone in off]
        return self.tally.start_each(dim, sizes, sizes, distance)

    def off(self) -> list[bool] | None:
        """Which classes do not take part, for nothing of an outer tile is read there."""
        vary = self.tally.vary
        if vary is None or min(vary) > NEVER // 2:
            return None
        return [n <= NEVER // 2 for n in vary]

    def distance(self, walk: Walk, step: int) -> int:
        """How many places further a tile goes."""
        size = self.mesh.extent(walk.dim)
        further = step if walk.direct else 1
        return size - further if walk.reverse else further

    # --- each what it reads -----------------------------------------------------------------

    def lengths(self, number: int) -> tuple[Lengths, tuple[int, ...]]:
        """Atoms of a loop's tiles, and at which steps the walks are whose owner they depend on."""
        found = lengths_of(self.program, self.loops, number, self.dims)
        around: list[int] = []
        for index, loop in enumerate(self.loops[:number]):
            if self.loops[number].tensors[0] in loop.tensors:
                at = self.offsets[index]
                around += self.times[at : at + len(loop.walks)]
        return found, tuple(around)

    def trimmed_ring(self, number: int, index: int, walk: Walk, nbytes: int, on: Step) -> None:
        """A walk of a loop of which every rank gets what it reads of a tile."""
        tally, size = self.tally, self.mesh.extent(walk.dim)
        ring = _Trimmed(self, number, index, walk, nbytes)
        started = 0
        for step in range(size):
            while started < min(step + walk.ahead, size - 1):
                started += 1
                if ring.flights and not walk.direct:
                    tally.wait(ring.flights[-1][0])
                ring.launch(started)
            on(step)
            if step < size - 1:
                if not walk.ahead:
                    started += 1
                    ring.launch(step + 1)
                ring.land()
        ring.end()

    def full(self, found: Lengths, depth: int) -> int:
        """Atoms of a whole tile."""
        done = found.stages[: found.first + depth]
        whole = {stage.dim for stage in done if isinstance(stage, Gather)}
        split = (self.mesh.extent(dim) for dim in found.split if dim not in whole)
        return self.plan.atoms.count[found.axis] // prod(split)

    def seen_from(self, values: list[int], dim: str, distance: int) -> list[int]:
        """Per class the value of the class so many places further along a dimension."""
        place = self.dims.index(dim)
        stride, size = prod(self.sizes[place + 1 :]), self.sizes[place]
        found = []
        for index in range(len(values)):
            here = index // stride % size
            found.append(values[index + ((here + distance) % size - here) * stride])
        return found

    def empty(self, number: int) -> list[bool] | None:
        """Which classes read nothing of the tile that is here; None if all read some."""
        loop = self.loops[number]
        if not self.trimmed[number]:
            return None
        found, around = self.lengths(number)
        at = self.offsets[number]
        times = tuple(self.times[at : at + len(loop.walks)])
        lengths = found.at(around, times, len(loop.stages))
        return [n == 0 for n in lengths] if 0 in lengths else None


class _Trimmed:
    """One walk of which every class gets what it reads of a tile.

    Attributes:
        flights: transfers that are not over: when they are, and the copies that they send.
    """

    def __init__(self, rings: Rings, number: int, index: int, walk: Walk, nbytes: int) -> None:
        self.rings, self.walk = rings, walk
        loop, at = rings.loops[number], rings.offsets[number]
        self.found, self.around = rings.lengths(number)
        self.depth, self.prefix = loop.stages.index(walk), tuple(rings.times[at : at + index])
        if any(isinstance(stage, Gather) for stage in loop.stages[self.depth :]):
            raise NoForm("gathered inside what is trimmed")
        self.own = self.found.at(self.around, self.prefix, self.depth)
        self.full = rings.full(self.found, self.depth)
        self.unit = nbytes // self.full
        self.off = rings.off()
        self.flights: deque[tuple[float, list[int] | None]] = deque()
        self.works: list[int] | None = None  # copies that the last transfer's name holds on to

    def launch(self, step: int) -> None:
        """Start a step's transfer."""
        unit, away = self.unit, self.rings.distance(self.walk, step)
        arriving = self.found.at(self.around, (*self.prefix, step), self.depth + 1)
        copies = None
        if self.walk.direct:
            sends = self.rings.seen_from(arriving, self.walk.dim, away)
            copies = [  # what is all of a buffer is sent from there
                unit * n if n and (n != mine or mine != self.full) else 0
                for n, mine in zip(sends, self.own, strict=True)
            ]
        else:
            sends = self.found.at(self.around, (*self.prefix, step - 1), self.depth + 1)
        if copies is not None and any(copies):
            self.rings.tally.up_each(copies)
        else:
            copies = None
        out, into = [unit * n for n in sends], [unit * n for n in arriving]
        if self.off is not None:
            out, into = (
                [0 if gone else n for n, gone in zip(sizes, self.off, strict=True)]
                for sizes in (out, into)
            )
        if copies is not None:
            self.rings.tally.copy(2 * max(copies))
        end = self.rings.tally.start_each(self.walk.dim, out, into, away)
        self.flights.append((end, copies))
        before, self.works = self.works, copies
        self.drop(before)

    def land(self) -> None:
        """Wait for the first transfer that is not over."""
        end, copies = self.flights.popleft()
        self.rings.tally.wait(end)
        self.drop(copies)

    def end(self) -> None:
        """No more tiles."""
        before, self.works = self.works, None
        self.drop(before)

    def drop(self, copies: list[int] | None) -> None:
        """Copies are gone once nothing refers to them."""
        if copies is None or copies is self.works:
            return
        if all(each is not copies for _, each in self.flights):
            self.rings.tally.down_each(copies)


def classes_of(program: Program, dims: tuple[str, ...]) -> tuple[list[int], int]:
    """The class of every rank, and how many classes there are."""
    key = "classes", dims
    found = program.shared.get(key)
    if found is None:
        mesh, numbers = program.mesh, []
        for rank in range(mesh.size):
            place, number = mesh.coordinate(rank), 0
            for dim in dims:
                number = number * mesh.extent(dim) + place[dim]
            numbers.append(number)
        found = program.shared[key] = numbers, prod(mesh.extent(dim) for dim in dims)
    return found
