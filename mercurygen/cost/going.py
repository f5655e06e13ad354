"""Results on their way home, counted: the loops of `mercurygen.lower.nest` that send them."""

from __future__ import annotations

from mercurygen.cost.common import Part, Parts, Wire, merge_scratch
from mercurygen.cost.nested import Nested, Sizes
from mercurygen.cost.rings import NoForm
from mercurygen.cost.tally import NEVER
from mercurygen.lower.homes import sends_what_is_read
from mercurygen.lower.plan import Loop

Absent = list[bool] | None  # classes that have no results for a tile; None: all have some


class Homes(Nested):
    """A nest in which results for a tile go to its owner."""

    def part(self, number: int, tiles: Sizes) -> tuple[Parts, Absent]:
        """The results for the tile that is here, and which classes have none."""
        tally, absent = self.tally, None
        alone = number + 1 == len(self.loops)
        if self.trimmed[number] and not (alone and self.loops[number].home == "relayed"):
            absent = self.empty(number)  # else it is the call that is left out
        if absent is None:
            return (self.once() if alone else self.scope(number + 1, tiles)), None
        if all(absent):
            return Parts(self.common, {}), absent
        away = [NEVER if gone else 0 for gone in absent]
        tally.up_each(away, look=False)
        found = self.once() if alone else self.scope(number + 1, tiles)
        tally.down_each(away)
        tally.down_each([found.live if gone else 0 for gone in absent])
        return found, absent

    def unread(self, number: int, step: int) -> Absent:
        """Classes for whose tile the rank that sends results now has none."""
        loop = self.loops[number]
        walk = loop.walks[-1]
        leading = sum(not each.walks for each in self.loops)
        alone = self.steps is not None and len(self.loops) == 1 + leading
        if not alone or not walk.direct:
            return None
        row = self.steps.row(self.step)
        none = [int(not self.steps.kinds[kind]) for kind in row]
        away = self.shape.classes.away(walk.dim, -step if walk.reverse else step)
        found = [bool(none[i]) for i in away]
        return found if any(found) else None


class Going:
    """The loop of results on their way home.

    Attributes:
        size: of the dimension.
        stays: outputs that do not go home with it.
    """

    def __init__(self, nest: Homes, number: int, tiles: Sizes) -> None:
        self.nest, self.number, self.tally = nest, number, nest.tally
        self.loop: Loop = nest.loops[number]
        self.walk = self.loop.walks[-1]
        self.size = nest.mesh.extent(self.walk.dim)
        self.tiles = tiles
        self.at = 0
        self.steps = (0, *self.walk.coming(self.size))
        self.stays = tuple([n for n in nest.common.names if n not in self.loop.outputs])
        self.outer = nest.staying

    def apart(self, part: Parts) -> tuple[str, ...]:
        """Results that stay here and are in buffers of their own: they are yet to be merged."""
        return tuple([name for name in self.stays if part[name].live])

    def away(self, step: int) -> int:
        """How many places further the owner is of the tile of a step."""
        return step if self.walk.reverse else self.size - step

    def each(self, nbytes: int, absent: Absent) -> list[int]:
        """Bytes on every class."""
        if absent is None:
            return [nbytes] * self.tally.classes
        return [0 if gone else nbytes for gone in absent]

    def start(self, wire: Wire, sizes: list[int], into: list[int]) -> float:
        """Begin a batch of every class's own bytes."""
        takes = [1 if out or here else 0 for out, here in zip(sizes, into, strict=True)]
        return self.tally.start_each(wire, sizes, takes, max(sizes))

    def up(self, nbytes: int, absent: Absent) -> None:
        """A buffer, on the classes that have it."""
        if absent is None:
            self.tally.up(nbytes)
        else:
            self.tally.up_each(self.each(nbytes, absent))

    def down(self, nbytes: int, absent: Absent) -> None:
        """It is gone."""
        if absent is None:
            self.tally.down(nbytes)
        else:
            self.tally.down_each(self.each(nbytes, absent))


class SentHome(Going):
    """Straight to the owner, one step behind the tile; ours are what they merge into."""

    def __init__(self, nest: Homes, number: int, tiles: Sizes) -> None:
        super().__init__(nest, number, tiles)
        if sends_what_is_read(nest.program, self.loop):
            raise NoForm("results of what is read of tiles")
        self.flight: tuple[float, Absent] | None = None
        self.works: list[tuple[int, Absent]] = []  # buffers that the last transfer holds on to
        self.moved = sum(nest.results.sizes[name] for name in self.loop.outputs)

    def step(self) -> None:
        """A tile is here."""
        nest, step = self.nest, self.steps[self.at]
        self.at += 1
        part, absent = nest.part(self.number, self.tiles)
        if not step:
            if absent is not None:
                raise NoForm("no results for our own tile")
            self.results = nest.widen(part)
            self.tally.alive -= part.gone(self.results)
            nest.staying = self.stays
            return
        self.land()
        if part and (stays := self.apart(part)):
            nest.merge(stays, absent)
        out = self.outgoing(part, absent)
        missing = nest.unread(self.number, step)
        self.up(self.moved, missing)
        wire = nest.common.wire("shift", self.walk.dim, self.away(step))
        if absent is None and missing is None:
            end = self.tally.start(wire, out, 2 * len(self.loop.outputs))
        else:
            end = self.start(wire, self.each(out, absent), self.each(self.moved, missing))
        self.works = [(out, absent), (self.moved, missing)]
        self.flight = end, missing

    def outgoing(self, part: Parts, absent: Absent) -> int:
        """Bytes of results ready to be sent, in the dtype that they are merged in."""
        nest = self.nest
        if not part:  # no class has any
            return self.moved
        moves = sum([part[name].live for name in self.loop.outputs])
        gone = part.live
        if nest.begin == "only" and nest.common.aten:
            self.up(self.moved, absent)
            self.tally.copy(moves + self.moved)
        else:
            gone -= moves
        if gone:
            self.down(gone, absent)
        return self.moved

    def land(self) -> None:
        """Wait for others' results for our tile, and merge them."""
        if self.flight is None:
            return
        end, missing = self.flight
        self.tally.wait(end)
        if missing is None or not all(missing):
            self.nest.merge(self.loop.outputs, missing)
        for nbytes, gone in self.works:
            self.down(nbytes, gone)
        self.flight = None

    def end(self) -> Parts:
        """No more tiles."""
        self.nest.staying = self.outer
        self.land()
        return self.results


class SentCall(Going):
    """Straight to the owner, where the body is called once for a tile, on what the mask leaves of
    it: every class sends the rows that it has worked on."""

    def __init__(self, nest: Homes, number: int, tiles: Sizes) -> None:
        super().__init__(nest, number, tiles)
        self.flight: tuple[float, list[int]] | None = None
        self.works: list[list[int]] = []
        self.names = nest.common.names
        self.moved = [i for i, name in enumerate(self.names) if name in self.loop.outputs]

    def step(self) -> None:
        """A tile is here."""
        nest, tally, step = self.nest, self.tally, self.steps[self.at]
        self.at += 1
        if not step:
            part, _ = nest.part(self.number, self.tiles)
            self.results = nest.widen(part)
            tally.alive -= part.gone(self.results)
            return
        row, calls = nest.steps.row(nest.step), nest.calls(False)
        none = (0,) * len(self.names)
        made = [calls.shares[kind] or none for kind in row]
        tally.up_each([sum(sizes) for sizes in made])
        tally.top_each(calls.scratch_each(nest.step))
        tally.run(calls.longest[nest.step], calls.hosts[nest.step])
        self.land()
        if self.stays:
            nest.merge(self.stays)
        out = [sum(sizes[i] for i in self.moved) for sizes in made]
        if nest.common.aten:
            going = [sum((calls.regions[kind] or none)[i] for i in self.moved) for kind in row]
            tally.up_each(going)
            tally.copy(max(out) + max(going))
            tally.down_each([sum(sizes) for sizes in made])
        else:
            going = out
            kept = [self.names.index(name) for name in self.stays]
            tally.down_each([sum(sizes[i] for i in kept) for sizes in made])
        first = [(calls.regions[kind] or none)[self.moved[0]] for kind in row]
        away = self.away(step)
        others = nest.shape.classes.away(self.walk.dim, -away)
        arriving, heads = ([sizes[i] for i in others] for sizes in (going, first))
        tally.up_each(arriving)
        wire = nest.common.wire("shift", self.walk.dim, away)
        end = self.start(wire, going, arriving)
        self.works = [going, arriving]
        self.flight = end, heads

    def land(self) -> None:
        """Wait for others' results for our tile, and merge them."""
        if self.flight is None:
            return
        end, heads = self.flight
        nest, out = self.nest, self.names[self.moved[0]]
        self.tally.wait(end)
        if any(c.kind == "softmax" and out in c.outputs for c in nest.program.combines):
            self.tally.top_each([merge_scratch(nest.common, n, out) for n in heads])
        for spent in nest.results.merge(self.loop.outputs)[1]:
            self.tally.spend(spent)
        for sizes in self.works:
            self.tally.down_each(sizes)
        self.flight = None

    def end(self) -> Parts:
        """No more tiles."""
        self.land()
        return self.results


class Travelling(Going):
    """Sums that go around with the tiles, or, if no tile does, towards their owners."""

    def __init__(self, nest: Homes, number: int, tiles: Sizes) -> None:
        super().__init__(nest, number, tiles)
        reverse = self.walk.reverse
        self.wire = nest.common.wire("shift", self.walk.dim, self.size - 1 if reverse else 1)
        self.staying: dict[str, Part] = {}
        self.stayed = 0  # bytes of the last results that were merged into what stays
        self.moves: dict[str, Part] = {}
        self.moving = 0  # bytes of these
        self.before = 0  # bytes of the sums that the last transfer holds on to
        self.arriving = 0
        self.sums: float | None = None  # when those on their way are here

    def step(self) -> None:
        """A tile is here."""
        nest, tally, step = self.nest, self.tally, self.at
        self.at += 1
        if step and not self.loop.tensors:
            self.hand_on()
        part, absent = nest.part(self.number, self.tiles)
        if absent is not None:
            raise NoForm("no results for a tile")
        tally.alive -= self.stayed
        self.stayed, self.before = 0, self.moving
        stay = sum([part[name].live for name in self.stays]) if self.stays else 0
        self.divide(part, part.live - stay)
        if not step:
            self.staying = {name: part[name] for name in self.stays}
            nest.staying = self.stays
            self.arriving = sum([one.nbytes for one in self.moves.values()])
            tally.up(self.arriving)
        else:
            self.stayed = stay
            if stays := self.apart(part):
                nest.merge(stays)
            tally.wait(self.sums)
            nest.merge(self.loop.outputs)
        if self.loop.tensors:
            self.hand_on()

    def divide(self, part: Parts, live: int) -> None:
        """What moves on, in the dtype that it is merged in; of results with so many bytes alive."""
        nest = self.nest
        self.moves, self.moving = part, live
        if self.stays:
            self.moves = {name: part[name] for name in self.loop.outputs}
        if nest.begin == "only" and nest.common.aten:
            sizes, wide = nest.results.sizes, nest.common.wide
            self.moves = {name: Part(sizes[name], sizes[name], wide[name]) for name in self.moves}
            self.moving = sum([one.live for one in self.moves.values()])
            self.tally.up(self.moving)
            self.tally.copy(live + self.moving)
            self.tally.alive -= live

    def hand_on(self) -> None:
        """Start sending sums to the next rank; what the last transfer held on to is gone."""
        self.sums = self.tally.start(self.wire, self.arriving, 2 * len(self.loop.outputs))
        self.tally.alive -= self.before
        self.before = 0

    def end(self) -> Parts:
        """No more tiles."""
        tally, moves = self.tally, self.moves
        if self.loop.tensors:
            tally.wait(self.sums)
            tally.alive -= self.moving
            moves = {n: Part(x.nbytes, x.nbytes, x.item) for n, x in moves.items()}
        else:
            tally.alive -= self.before + self.arriving
        tally.alive -= self.stayed
        self.nest.staying = self.outer
        found = {**self.staying, **moves}
        ordered = {name: found[name] for name in self.nest.common.names}
        return Parts(self.nest.common, ordered)
