"""Results on their way home, counted: the loops of `mercurygen.lower.nest` that send them."""

from __future__ import annotations

from mercurygen.cost.nested import Nested, Part, Parts, Sizes, lively, replaced
from mercurygen.cost.rings import NoForm
from mercurygen.cost.tally import NEVER
from mercurygen.lower.plan import Loop
from mercurygen.lower.sizes import ATEN

Absent = list[bool] | None  # classes that have no results for a tile; None: all have some


class Homes(Nested):
    """A nest in which results for a tile go to its owner."""

    def part(self, number: int, tiles: Sizes) -> tuple[Parts, Absent]:
        """The results for the tile that is here, and which classes have none."""
        tally = self.tally
        absent = self.absent(number)
        if absent is not None:
            if all(absent):
                return {}, absent
            away = [NEVER if gone else 0 for gone in absent]
            tally.up_each(away, look=False)
        if number + 1 < len(self.loops):
            found = self.scope(number + 1, tiles)
        else:
            found = self.once()
        if absent is not None:
            tally.down_each(away)
            tally.down_each([lively(found) if gone else 0 for gone in absent])
        return found, absent

    def absent(self, number: int) -> Absent:
        """Classes that read nothing of the tile."""
        gone = self.empty(number)
        alone = number + 1 == len(self.loops)  # then it is the call that is left out
        return None if alone and self.loops[number].home == "relayed" else gone

    def unread(self, number: int, step: int) -> Absent:
        """Classes for whose tile the rank that sends results now has none."""
        loop = self.loops[number]
        walk = loop.walks[-1]
        leading = sum(not each.walks for each in self.loops)
        alone = self.steps is not None and len(self.loops) == 1 + leading
        if not alone or not walk.direct:
            return None
        row = self.steps.table[self.step()]
        none = [int(not self.steps.kinds[kind]) for kind in row]
        size = self.mesh.extent(walk.dim)
        away = size - step if walk.reverse else step
        found = [bool(n) for n in self.seen_from(none, walk.dim, away)]
        return found if any(found) else None


class Going:
    """The loop of results on their way home.

    Attributes:
        size: of the dimension.
    """

    def __init__(self, nest: Homes, number: int, tiles: Sizes) -> None:
        self.nest, self.number, self.tally = nest, number, nest.tally
        self.loop: Loop = nest.loops[number]
        self.walk = self.loop.walks[-1]
        self.size = nest.mesh.extent(self.walk.dim)
        self.tiles = tiles
        self.at = 0
        self.results: Parts = {}

    def each(self, nbytes: int, absent: Absent) -> list[int]:
        """Bytes on every class."""
        if absent is None:
            return [nbytes] * self.tally.classes
        return [0 if gone else nbytes for gone in absent]

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
        self.flight: tuple[float, Absent] | None = None
        self.works: list[tuple[int, Absent]] = []  # buffers that the last transfer holds on to
        self.moved = sum(nest.results[name] for name in self.loop.outputs)

    def step(self) -> None:
        """A tile is here."""
        nest, step = self.nest, self.at
        self.at += 1
        part, absent = nest.part(self.number, self.tiles)
        if not step:
            if absent is not None:
                raise NoForm("no results for our own tile")
            self.results = nest.widen(part)
            self.tally.down(replaced(part, self.results))
            return
        self.land()
        stays = [name for name in part if name not in self.loop.outputs]
        if stays:
            nest.merge(stays, absent)
        out = self.outgoing(part, absent)
        missing = nest.unread(self.number, step)
        self.up(self.moved, missing)
        away = step if self.walk.reverse else self.size - step
        if absent is None and missing is None:
            end = self.tally.start("shift", self.walk.dim, out, away, 2 * len(self.loop.outputs))
        else:
            sizes = self.each(out, absent), self.each(self.moved, missing)
            end = self.tally.start_each(self.walk.dim, *sizes, away)
        self.works = [(out, absent), (self.moved, missing)]
        self.flight = end, missing

    def outgoing(self, part: Parts, absent: Absent) -> int:
        """Bytes of results ready to be sent, in the dtype that they are merged in."""
        nest = self.nest
        moves = {name: one for name, one in part.items() if name in self.loop.outputs}
        if not moves:  # no class has any
            return self.moved
        gone = lively(part)
        if nest.begin == "only" and nest.program.kernel == ATEN:
            self.up(self.moved, absent)
            self.tally.copy(lively(moves) + self.moved)
        else:
            gone -= lively(moves)
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
        self.land()
        return self.results


class SentCall(Going):
    """Straight to the owner, where the body is called once for a tile, on what the mask leaves of
    it: every class sends the rows that it has worked on."""

    def __init__(self, nest: Homes, number: int, tiles: Sizes) -> None:
        super().__init__(nest, number, tiles)
        self.flight: tuple[float, list[int]] | None = None
        self.works: list[list[int]] = []
        self.names = [t.name for t in nest.outputs]
        self.moved = [i for i, name in enumerate(self.names) if name in self.loop.outputs]

    def step(self) -> None:
        """A tile is here."""
        nest, tally, step = self.nest, self.tally, self.at
        self.at += 1
        if not step:
            part, _ = nest.part(self.number, self.tiles)
            self.results = nest.widen(part)
            tally.down(replaced(part, self.results))
            return
        row = nest.steps.table[nest.step()]
        spent, times, scratch, shares, regions = nest.calls(False)
        none = (0,) * len(self.names)
        made = [shares[kind] or none for kind in row]
        tally.up_each([sum(sizes) for sizes in made])
        tally.top_each([scratch[kind] for kind in row])
        tally.run(max(times[kind] for kind in row), max(spent[kind][3] for kind in row))
        self.land()
        stays = [i for i in range(len(self.names)) if i not in self.moved]
        if stays:
            nest.merge([self.names[i] for i in stays])
        out = [sum(sizes[i] for i in self.moved) for sizes in made]
        if nest.program.kernel == ATEN:
            going = [sum((regions[kind] or none)[i] for i in self.moved) for kind in row]
            tally.up_each(going)
            tally.copy(max(out) + max(going))
            tally.down_each([sum(sizes) for sizes in made])
        else:
            going = out
            tally.down_each([sum(sizes[i] for i in stays) for sizes in made])
        away = step if self.walk.reverse else self.size - step
        first = [(regions[kind] or none)[self.moved[0]] for kind in row]
        arriving = nest.seen_from(going, self.walk.dim, self.size - away)
        heads = nest.seen_from(first, self.walk.dim, self.size - away)
        tally.up_each(arriving)
        end = tally.start_each(self.walk.dim, going, arriving, away)
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
            self.tally.top_each([nest.merge_scratch(n, out) for n in heads])
        nest.merge_time(self.loop.outputs)
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
        self.staying: Parts = {}
        self.stays = 0  # bytes of the last results that were merged into what stays
        self.moves: Parts = {}
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
        stays = {name: one for name, one in part.items() if name not in self.loop.outputs}
        tally.down(self.stays)
        self.stays = 0
        self.before = lively(self.moves)
        self.moves = self.divided(part)
        if not step:
            self.staying = stays
            self.arriving = sum(one.nbytes for one in self.moves.values())
            tally.up(self.arriving)
        else:
            self.stays = lively(stays)
            nest.merge(stays)
            tally.wait(self.sums)
            nest.merge(self.moves)
        if self.loop.tensors:
            self.hand_on()

    def divided(self, part: Parts) -> Parts:
        """What moves on, in the dtype that it is merged in."""
        nest = self.nest
        moves = {name: one for name, one in part.items() if name in self.loop.outputs}
        if nest.begin != "only" or nest.program.kernel != ATEN:
            return moves
        sizes = {name: nest.results[name] for name in moves}
        self.tally.up(sum(sizes.values()))
        self.tally.copy(lively(moves) + sum(sizes.values()))
        self.tally.down(lively(moves))
        return {name: Part(n, n, nest.partials[name]) for name, n in sizes.items()}

    def hand_on(self) -> None:
        """Start sending sums to the next rank; what the last transfer held on to is gone."""
        away = self.size - 1 if self.walk.reverse else 1
        messages = 2 * len(self.loop.outputs)
        self.sums = self.tally.start("shift", self.walk.dim, self.arriving, away, messages)
        self.tally.down(self.before)
        self.before = 0

    def end(self) -> Parts:
        """No more tiles."""
        tally = self.tally
        if self.loop.tensors:
            tally.wait(self.sums)
            tally.down(lively(self.moves))
            self.moves = {n: Part(x.nbytes, x.nbytes, x.item) for n, x in self.moves.items()}
        else:
            tally.down(self.before + self.arriving)
        tally.down(self.stays)
        found = {**self.staying, **self.moves}
        return {t.name: found[t.name] for t in self.nest.outputs if t.name in found}
