"""How tiles come by, counted: the loops of `mercurygen.lower.walks`, with sums for buffers.

A buffer is gone when the last name that refers to it is bound anew, there as in an emitted module.
A tile that was made for a step (gathered, or the last of a ring) is therefore alive until the next
one is bound: `old` of its walk, or, of what the body is called with, `pending`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from math import prod

from mercurygen.cost.common import Common, Wire
from mercurygen.cost.lengths import Lengths, brought, lengths_of, trimmed
from mercurygen.cost.shape import Shape
from mercurygen.cost.tally import NEVER, Tally
from mercurygen.lower.plan import Gather, Loop, Plan, Walk

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
        self.rings, self.sizes, self.on, self.old = rings, sizes, on, old
        times = rings.mesh.extent(stage.dim)
        self.wire = rings.common.wire("all-gather", stage.dim)
        self.bytes = sum(sizes) * times
        self.copies = [rings.common.kernels.copy(2 * size * times) for size in sizes]
        self.made = 0

    def __call__(self, step: int) -> None:
        """A tile has come by."""
        tally = self.rings.tally
        if step == 0:
            tally.up(self.bytes)  # the parts
        ends = [tally.start(self.wire, size) for size in self.sizes]
        if step:
            self.on(step - 1)
        for end in ends:
            tally.wait(end)
        for spent in self.copies:
            tally.spend(spent)
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
        step: which step of the whole nest it is.
    """

    def __init__(self, plan: Plan, tally: Tally, common: Common, shape: Shape) -> None:
        self.plan, self.program, self.tally = plan, plan.program, tally
        self.common, self.shape, self.mesh = common, shape, common.mesh
        self.loops = loops = plan.nest.loops
        self.times = [0] * len(shape.strides)
        self.step = 0
        self.old = [0] * len(shape.strides)
        self.pending = 0
        self.offsets: list[int] = []
        self.trimmed: list[bool] = []
        self._lengths: dict[int, Lengths] = {}
        count, direct = 0, any([loop.direct for loop in loops])
        for number, loop in enumerate(loops):
            self.offsets.append(count)
            self.trimmed.append(direct and trimmed(self.program, loops, number))
            count += len(loop.walks)

    def turn(self, at: int, step: int) -> None:
        """A walk is at a step."""
        self.step += (step - self.times[at]) * self.shape.strides[at]
        self.times[at] = step

    def coming(self, number: int, sizes: list[int], body: Callable[[], None]) -> None:
        """Every tile of a loop, ours first.

        Args:
            number: of the loop.
            sizes: bytes of a tile of each tensor, after the gathers outside every walk.
            body: what is done with each.
        """
        loop, tally, extent = self.loops[number], self.tally, self.mesh.extent
        if loop.partner or loop.both:
            raise NoForm("skewed, or both ways")
        levels, tile, spares, one = loop.levels, sum(sizes), 0, 0
        for walk, gathers in levels:
            ahead = walk.ahead if walk.direct else max(walk.ahead, 1)
            one = tile
            spares += one * min(ahead + 1, len(walk.coming(extent(walk.dim))))
            for stage in gathers:
                tile *= extent(stage.dim)
        tally.up(spares)
        first = self.offsets[number]
        self.level(number, 0, sizes, body)
        tally.alive -= spares
        last = first + len(levels) - 1
        for index in range(first, last):
            tally.alive -= self.old[index]
            self.old[index] = 0
        if not levels[-1][1]:  # the last tile is a receive buffer
            tally.alive += one
            self.old[last] = one

    def level(self, number: int, index: int, sizes: list[int], body: Callable[[], None]) -> None:
        """The loops of a nest from one level inwards."""
        loop, at, tally, olds = (
            self.loops[number],
            self.offsets[number] + index,
            self.tally,
            self.old,
        )
        walk, gathers = loop.levels[index]
        if index + 1 == len(loop.levels):
            inner, waits = body, not loop.outputs
        else:
            wider = [n * prod(self.mesh.extent(stage.dim) for stage in gathers) for n in sizes]
            inner, waits = (lambda: self.level(number, index + 1, wider, body)), False

        times, stride = self.times, self.shape.strides[at]

        def on(step: int) -> None:
            self.step += (step - times[at]) * stride
            times[at] = step
            old = olds[at]
            if old:
                if waits:
                    self.pending += old
                else:
                    tally.alive -= old
                olds[at] = 0
            inner()

        if not gathers:
            self.ring(number, index, walk, sizes, on)
            return
        chain = self.gathered(at, gathers, sizes, on)
        self.ring(number, index, walk, sizes, chain[0])
        for gathering in chain:
            gathering.end(len(walk.coming(self.mesh.extent(walk.dim))))

    def gathered(
        self, at: int, gathers: tuple[Gather, ...], sizes: list[int], on: Step
    ) -> list[Gathering]:
        """The tiles of a walk through gathers, outermost first."""

        def replaced(nbytes: int) -> None:
            self.old[at] += nbytes

        chain: list[Gathering] = []
        widths = [prod(self.mesh.extent(s.dim) for s in gathers[:i]) for i in range(len(gathers))]
        for stage, width in reversed(list(zip(gathers, widths, strict=True))):
            old, inwards = (self.tally.down, chain[0]) if chain else (replaced, on)
            chain.insert(0, Gathering(self, stage, [n * width for n in sizes], inwards, old))
        return chain

    # --- one ring -----------------------------------------------------------------------------

    def ring(self, number: int, index: int, walk: Walk, sizes: list[int], on: Step) -> None:
        """One walk, relayed or direct."""
        if self.trimmed[number] and self.cut(number, walk):
            _Trimmed(self, number, index, walk, sum(sizes)).play(on)
            return
        tally, nbytes = self.tally, sum(sizes)
        wires = self.wires(walk)
        off = self.off()
        wait, ahead = tally.wait, walk.ahead
        begin = partial(tally.begin, messages=2 * len(sizes))
        if off is None:
            tally.count(wires, nbytes)
        else:
            takes = [0 if gone else 1 for gone in off]
            begin = partial(self.shift, takes)
        flights: deque[float] = deque()
        started, last = 0, len(wires)
        for step in range(last + 1):
            while started < last and started < step + ahead:
                if flights and not walk.direct:
                    wait(flights[-1])
                flights.append(begin(wires[started], nbytes))
                started += 1
            on(step)
            if step < last:
                if not ahead:
                    flights.append(begin(wires[step], nbytes))
                    started += 1
                wait(flights.popleft())

    def wires(self, walk: Walk) -> tuple[Wire, ...]:
        """What the tiles of a walk's steps come over."""
        every = self.common.ring(walk.dim, walk.direct, walk.reverse)
        steps = walk.coming(len(every) + 1)
        return every if len(steps) == len(every) else tuple([every[step - 1] for step in steps])

    def cut(self, number: int, walk: Walk) -> bool:
        """Whether a walk, or one before it, is of what every rank reads only."""
        loop = self.loops[number]
        stages, first = brought(self.loops, number)
        done = stages[: first + loop.stages.index(walk) + 1]
        return any(isinstance(stage, Walk) and stage.direct for stage in done)

    def shift(self, takes: list[int], wire: Wire, nbytes: int) -> float:
        """Start one step of which some classes are not there: these take no part."""
        return self.tally.start_each(wire, takes, takes, max(takes), nbytes)

    def off(self) -> list[bool] | None:
        """Which classes do not take part, for nothing of an outer tile is read there."""
        vary = self.tally.vary
        if vary is None or min(vary) > NEVER // 2:
            return None
        return [n <= NEVER // 2 for n in vary]

    # --- each what it reads -------------------------------------------------------------------

    def lengths(self, number: int) -> tuple[Lengths, tuple[int, ...]]:
        """Tokens of a loop's tiles, and at which steps the walks are whose owner they depend on."""
        found = self._lengths.get(number)
        if found is None:
            found = lengths_of(self.program, self.loops, number, self.shape.classes)
            self._lengths[number] = found
        around: list[int] = []
        for index, loop in enumerate(self.loops[:number]):
            if self.loops[number].tensors[0] in loop.tensors:
                at = self.offsets[index]
                around += self.at_steps(loop, at)
        return found, tuple(around)

    def at_steps(self, loop: Loop, at: int) -> list[int]:
        """At which steps the walks of a loop are, of which the first has this number."""
        pairs = zip(loop.walks, self.times[at:], strict=False)
        return [time and walk.coming(time + 1)[time - 1] for walk, time in pairs]

    def empty(self, number: int) -> list[bool] | None:
        """Which classes read nothing of the tile that is here; None if all read some."""
        if not self.trimmed[number]:
            return None
        loop, at = self.loops[number], self.offsets[number]
        found, around = self.lengths(number)
        times = tuple(self.at_steps(loop, at))
        lengths = found.at(around, times, len(loop.stages))
        return [n == 0 for n in lengths] if 0 in lengths else None


class _Trimmed:
    """One walk of which every class gets what it reads of a tile.

    Attributes:
        flights: transfers that are not over: when they are, and the copies that they send.
    """

    def __init__(self, rings: Rings, number: int, index: int, walk: Walk, nbytes: int) -> None:
        self.tally, self.walk = rings.tally, walk
        self.wires = rings.wires(walk)
        self.steps = walk.coming(len(self.wires) + 1)
        loop, at = rings.loops[number], rings.offsets[number]
        self.found, around = rings.lengths(number)
        depth = loop.stages.index(walk)
        if any(isinstance(stage, Gather) for stage in loop.stages[depth:]):
            raise NoForm("gathered inside what is trimmed")
        self.unit = nbytes // self.found.depth(depth).tokens
        self.where = walk, around, tuple(rings.at_steps(loop, at)[:index]), depth
        self.off = rings.off()
        self.flights: deque[tuple[float, list[int] | None]] = deque()
        self.works: list[int] | None = None  # copies that the last transfer's name holds on to

    def play(self, on: Step) -> None:
        """Every step."""
        walk, last = self.walk, len(self.wires)
        started = 0
        for step in range(last + 1):
            while started < last and started < step + walk.ahead:
                if self.flights and not walk.direct:
                    self.tally.wait(self.flights[-1][0])
                self.launch(started)
                started += 1
            on(step)
            if step < last:
                if not walk.ahead:
                    self.launch(step)
                    started += 1
                self.land()
        before, self.works = self.works, None
        self.drop(before)

    def launch(self, index: int) -> None:
        """Start the transfer that brings the tile of the next step."""
        sent, tally, unit, copies = (
            self.found.sent(*self.where, self.steps[index]),
            self.tally,
            self.unit,
            None,
        )
        if sent.copies is not None:
            copies = [unit * n for n in sent.copies]  # a buffer of its own
            tally.up_each(copies)
            tally.copy(2 * max(copies))
        if self.off is not None:
            sent = sent.without(self.off)
        end = tally.start_each(self.wires[index], sent.out, sent.takes, sent.most, unit)
        self.flights.append((end, copies))
        before, self.works = self.works, copies
        self.drop(before)

    def land(self) -> None:
        """Wait for the first transfer that is not over."""
        end, copies = self.flights.popleft()
        self.tally.wait(end)
        self.drop(copies)

    def drop(self, copies: list[int] | None) -> None:
        """Copies are gone once nothing refers to them."""
        if copies is None or copies is self.works:
            return
        if all(each is not copies for _, each in self.flights):
            self.tally.down_each(copies)
