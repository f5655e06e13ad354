"""How tiles come by: rings, rings inside rings, straight from their owners, and gathers.

The functions are those of an emitted module, statement for statement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Unpack
from mercurygen.lower.plan import Gather, Loop, Plan, Stages, Walk, walk_levels
from mercurygen.lower.recorder import Limits, Recorder, Tiles, Works
from mercurygen.lower.visible import read_run

Owners = dict[str, int]
Coming = Iterator[tuple[Owners, Tiles]]


class Walks(Recorder):
    """One rank's tiles.

    Attributes:
        part: per axis of the tile loops, which of how many parts is going on.
        limits: per axis what is worked on, where that is less than all that the rank works on.
        owner: whose tile is here, in the loops whose results go home.
        led: whether the gathers outside every walk are done already.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.part: dict[str, tuple[int, int]] = {}
        self.limits: Limits = {}
        self.owner: Owners = {}
        self.led = False

    def tile_region(
        self, loop: Loop, tensor: Tensor, owner: Owners, depth: int, reader: Owners
    ) -> Region:
        """What a rank has of an owner's tile, after so many stages of a loop.

        Args:
            loop: the loop.
            tensor: of the loop.
            owner: coordinates along the walks so far.
            depth: stages that the tile has been through.
            reader: coordinate of the rank.
        """
        stages, first = self.brought(loop, tensor)
        done = stages[: first + depth]
        whole = {s.dim for s in done if isinstance(s, Gather)}
        split: dict[str, list[str]] = {}
        for dim in self.mesh.names:
            axis = self.program.stored(tensor, dim)
            if axis is not None and dim not in whole:
                split.setdefault(axis, []).append(dim)
        walked = {s.dim for s in done if isinstance(s, Walk)}  # elsewhere it is the rank's own
        outer = {dim: i for dim, i in self.owner.items() if dim in walked}
        place = {**reader, **outer, **owner}
        region = self.of_part(tensor, self.atoms.region(tensor, place, split))
        for index, stage in enumerate(done):
            if isinstance(stage, Walk) and stage.direct and place[stage.dim] != reader[stage.dim]:
                inner = [s.dim for s in stages[index + 1 :] if isinstance(s, Walk)]
                region = self.read_of(loop.axis, tensor, region, reader, inner)
        return region

    def brought(self, loop: Loop, tensor: Tensor) -> tuple[Stages, int]:
        """All stages of a tensor, outermost first, and where those of a loop begin."""
        stages: Stages = ()
        first = 0
        for each in self.plan.nest.loops:
            if each is loop:
                first = len(stages)
            if each is loop or tensor.name in each.tensors:
                stages = (*stages, *each.stages)
        return stages, first

    def of_part(self, tensor: Tensor, region: Region) -> Region:
        """The part of the tile loops that is going on, of a region that ranks work on."""
        if not self.part:
            return region
        found = []
        for axis, atoms in zip(tensor.axes, region, strict=True):
            index, parts = self.part.get(axis, (0, 1))
            size = len(atoms) // parts
            found.append(atoms[index * size : (index + 1) * size])
        return tuple(found)

    def read_of(
        self, axis: str, tensor: Tensor, region: Region, reader: Owners, inner: list[str]
    ) -> Region:
        """The run of a tile that a rank reads, or those that differ from it along inner walks."""
        if axis not in self.program.mask_axes:
            return region
        rows, columns = self.program.mask_axes
        other = columns if axis == rows else rows
        index, others = tensor.axes.index(axis), set()
        for place in product(*(range(self.mesh.extent(dim)) for dim in inner)):
            there = {**reader, **dict(zip(inner, place, strict=True))}
            others.update(self.atoms.iterations(other, there))
        atoms = region[index]
        run = read_run(self.atoms.domain, axis == rows, atoms, tuple(sorted(others)))
        return (*region[:index], atoms[slice(*run)], *region[index + 1 :])

    # --- loops --------------------------------------------------------------------------------

    def lead(self, loop: Loop, tiles: Tiles) -> Tiles:
        """The gathers outside every walk."""
        for depth, stage in enumerate(loop.leading):
            tiles = self.gather(loop, depth, tiles, stage)
        return tiles

    def coming(self, loop: Loop, tiles: Tiles) -> Coming:
        """Yield (owner, tiles) for every tile of a loop."""
        if loop.partner:
            return self.skewed(loop, tiles)
        levels = walk_levels(loop.walking)
        if len(levels) > 1:
            return self.nested(loop, tiles)
        walk, gathers = levels[0]
        depth = len(loop.leading)
        ring = self.ring(loop, depth, tiles, None, {})
        return self.gathered(loop, depth + 1, ring, gathers, {})

    def gathered(
        self, loop: Loop, depth: int, walk: Coming, gathers: tuple[Gather, ...], outer: Owners
    ) -> Coming:
        """A walk with every tile gathered over some dimensions."""
        for index, stage in enumerate(gathers):
            walk = self.gather_ahead(loop, depth + index, walk, stage, outer)
        return walk

    def nested(self, loop: Loop, tiles: Tiles) -> Coming:
        """Rings inside rings; their buffers are kept from tile to tile."""
        spares, longer = [], 1
        for walk, gathers in walk_levels(loop.walking):
            spares.append(self.spare(walk, tiles, longer))
            for stage in gathers:
                longer *= self.mesh.extent(stage.dim)
        held: list[Tiles | None] = [None] * len(spares)  # the loop variables of the nest
        yield from self.level(loop, len(loop.leading), spares, held, tiles, {})

    def level(
        self,
        loop: Loop,
        depth: int,
        spares: list[list[Tiles]],
        held: list[Tiles | None],
        tiles: Tiles,
        owner: Owners,
    ) -> Coming:
        """The loops of a nest from one level inwards; `owner` says where the outer ones are."""
        index = len(owner)
        gathers = walk_levels(loop.walking)[index][1]
        ring = self.ring(loop, depth, tiles, spares[index], owner)
        deeper = depth + 1 + len(gathers)
        for part, tile in self.gathered(loop, depth + 1, ring, gathers, owner):
            held[index] = tile
            if index + 1 == len(spares):
                yield {**owner, **part}, tile
            else:
                yield from self.level(loop, deeper, spares, held, tile, {**owner, **part})

    def spare(self, walk: Walk, tiles: Tiles, longer: int) -> list[Tiles]:
        """Sets of receive buffers for a ring, used in turn; no more than there are transfers."""
        size = self.mesh.extent(walk.dim)
        if walk.both:
            count = min(4, size - 1)
        elif walk.direct:
            count = min(walk.ahead + 1, size - 1)
        else:
            count = min(max(walk.ahead, 1) + 1, size - 1)
        return [
            tuple(
                x._replace(
                    live=self.empty(
                        f"{x.tensor.name} arriving along {walk.dim}", x.live.nbytes * longer
                    )
                )
                for x in tiles
            )
            for _ in range(count)
        ]

    # --- one ring -----------------------------------------------------------------------------

    def ring(
        self, loop: Loop, depth: int, tiles: Tiles, spare: list[Tiles] | None, outer: Owners
    ) -> Coming:
        """Yield (owner, tiles) for every rank, ours first; the next arrive while one is used."""
        walk = loop.stages[depth]
        if walk.both:
            return self.both_ways(loop, depth, tiles, spare, outer)
        return self.one_way(loop, depth, tiles, spare, outer)

    def one_way(
        self, loop: Loop, depth: int, tiles: Tiles, spare: list[Tiles] | None, outer: Owners
    ) -> Coming:
        """The ring, relayed or direct."""
        walk = loop.stages[depth]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        back = 1 if walk.reverse else -1
        spare = self.spare(walk, tiles, 1) if spare is None else spare
        own = newest = tiles
        flights: deque[tuple[Works, Tiles]] = deque()
        started = 0
        for step in range(size):
            while started < min(step + walk.ahead, size - 1):
                started += 1
                if flights and not walk.direct:  # what is to be passed on must be here
                    newest = self.landed(flights, -1)
                arriving = self.expected(loop, depth, started, spare, outer)
                if walk.direct:
                    works = self.direct(loop, depth, own, arriving, started, outer)
                else:
                    works = self.shift(newest, arriving, walk)
                flights.append((works, arriving))
            yield {walk.dim: (me + back * step) % size}, tiles
            if step < size - 1:
                if not walk.ahead:
                    started += 1
                    arriving = self.expected(loop, depth, started, spare, outer)
                    if walk.direct:
                        works = self.direct(loop, depth, own, arriving, started, outer)
                    else:
                        works = self.shift(tiles, arriving, walk)
                    flights.append((works, arriving))
                tiles = self.landed(flights, 0)
                flights.popleft()
                if not flights:
                    newest = tiles

    def landed(self, flights: deque[tuple[Works, Tiles]], index: int) -> Tiles:
        """Wait for a flight, once, and return what it brings."""
        works, tiles = flights[index]
        self.wait(works)
        flights[index] = (Works((), ()), tiles)
        return tiles

    def expected(
        self, loop: Loop, depth: int, step: int, spare: list[Tiles], outer: Owners
    ) -> Tiles:
        """Where the tile of a step arrives, and what of it."""
        walk = loop.stages[depth]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        back = 1 if walk.reverse else -1
        owner = {**outer, walk.dim: (me + back * step) % size}
        into = spare[(step - 1) % len(spare)]
        return tuple(
            x._replace(region=self.tile_region(loop, x.tensor, owner, depth + 1, self.place))
            for x in into
        )

    def shift(self, tiles: Tiles, into: Tiles, walk: Walk, reverse: bool = False) -> Works:
        """Start sending tiles to the next rank of the ring and receiving the previous rank's."""
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        on = -1 if walk.reverse or reverse else 1
        sends = [((me + on) % size, x) for x in tiles if self.nbytes(x)]
        recvs = [((me - on) % size, x) for x in into if self.nbytes(x)]
        return self.batch(walk.dim, sends, recvs)

    def direct(
        self, loop: Loop, depth: int, own: Tiles, into: Tiles, step: int, outer: Owners
    ) -> Works:
        """Start a step of a direct ring: what is read of a tile comes from its owner."""
        walk = loop.stages[depth]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        back = 1 if walk.reverse else -1
        reader = {**self.place, walk.dim: (me - back * step) % size}
        owner = {**outer, walk.dim: me}
        sends = []
        for x in own:
            region = self.tile_region(loop, x.tensor, owner, depth + 1, reader)
            if self.plan.region_bytes(x.tensor, region, x.dtype):
                sends.append((reader[walk.dim], self.dense(x, region)))
        recvs = [((me + back * step) % size, x) for x in into if self.nbytes(x)]
        return self.batch(walk.dim, sends, recvs)

    def both_ways(
        self, loop: Loop, depth: int, tiles: Tiles, spare: list[Tiles] | None, outer: Owners
    ) -> Coming:
        """Ours first, then at step t the tiles of r - t and of r + t, passed on either way."""
        walk = loop.stages[depth]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        spare = self.spare(walk, tiles, 1) if spare is None else spare
        forth = back = tiles
        count = 0
        yield_now: list[tuple[int, Tiles]] = [(me, tiles)]
        forward = size // 2  # the ceil of (size - 1) / 2
        for step in range(forward + 1):
            works, arriving = [], []
            if step < forward:
                into = self.arriving(loop, depth, spare[count % len(spare)], me - step - 1, outer)
                works.append(self.shift(forth, into, walk))
                arriving.append(((me - step - 1) % size, into))
                count += 1
            if step < (size - 1) // 2:
                into = self.arriving(loop, depth, spare[count % len(spare)], me + step + 1, outer)
                works.append(self.shift(back, into, walk, reverse=True))
                arriving.append(((me + step + 1) % size, into))
                count += 1
            for owner, tile in yield_now:
                yield {walk.dim: owner}, tile
            for each in works:
                self.wait(each)
            yield_now = arriving
            if arriving:
                forth = arriving[0][1]
            if len(arriving) > 1:
                back = arriving[1][1]

    def arriving(self, loop: Loop, depth: int, into: Tiles, owner: int, outer: Owners) -> Tiles:
        """Receive buffers as the tile of an owner."""
        walk = loop.stages[depth]
        place = {**outer, walk.dim: owner % self.mesh.extent(walk.dim)}
        return tuple(
            x._replace(region=self.tile_region(loop, x.tensor, place, depth + 1, self.place))
            for x in into
        )

    def skewed(self, loop: Loop, tiles: Tiles) -> Coming:
        """Cannon: both operands' tiles are ahead by the other dimension's coordinate."""
        walk, (others, _) = loop.walks[-1], loop.partner
        second = Walk(walk.skew)
        size = self.mesh.extent(walk.dim)
        first = tuple(x for x in tiles if x.tensor.name not in others)
        last = tuple(x for x in tiles if x.tensor.name in others)
        ahead = (self.place[second.dim], self.place[walk.dim])
        pair = [
            (walk, first, self.aligned(loop, first, walk, ahead[0])),
            (second, last, self.aligned(loop, last, second, ahead[1])),
        ]
        spares = [self.spare(each, held, 1) for each, held, _ in pair]
        held = [now for _, _, now in pair]
        start = (self.place[walk.dim] + self.place[second.dim]) % size
        for step in range(size - 1):
            works = []
            for index, (each, _, _) in enumerate(pair):
                into = self.turned(
                    loop, spares[index][step % len(spares[index])], each, start - step - 1
                )
                works.append((self.shift(held[index], into, each), into))
            owner = (start - step) % size
            yield {walk.dim: owner, second.dim: owner}, (*held[0], *held[1])
            for each, _ in works:
                self.wait(each)
            held = [into for _, into in works]
        owner = (start - size + 1) % size
        yield {walk.dim: owner, second.dim: owner}, (*held[0], *held[1])

    def aligned(self, loop: Loop, tiles: Tiles, walk: Walk, distance: int) -> Tiles:
        """The tile that many ranks ahead; ours goes as many back."""
        if not distance:
            return tiles
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        into = self.turned(loop, self.spare(walk, tiles, 1)[0], walk, me + distance)
        sends = [((me - distance) % size, x) for x in tiles]
        works = self.batch(walk.dim, sends, [((me + distance) % size, x) for x in into])
        self.wait(works)
        return into

    def turned(self, loop: Loop, into: Tiles, walk: Walk, owner: int) -> Tiles:
        """Receive buffers as the tile of an owner along one dimension of a skewed pair."""
        place = {walk.dim: owner % self.mesh.extent(walk.dim)}
        return tuple(
            x._replace(region=self.tile_region(loop, x.tensor, place, 0, self.place)) for x in into
        )

    # --- gathers ------------------------------------------------------------------------------

    def gather(self, loop: Loop, depth: int, tiles: Tiles, stage: Gather) -> Tiles:
        """All tiles along a dimension, joined in global order."""
        parts = self.parts(tiles, stage)
        works = self.start_gather(loop, tiles, parts, stage)
        return self.finish_gather(loop, depth, tiles, parts, works, stage)

    def gather_ahead(
        self, loop: Loop, depth: int, walk: Coming, stage: Gather, outer: Owners
    ) -> Coming:
        """Gather every tile of a walk; the next one's gather runs while one is used."""
        owner, tiles = next(walk)
        parts = self.parts(tiles, stage)
        works = self.start_gather(loop, tiles, parts, stage)
        whose = {**outer, **owner}
        gathered = self.finish_gather(loop, depth, tiles, parts, works, stage, whose)
        for following, tiles in walk:  # noqa: B020 - as in the module: the name is bound anew
            works = self.start_gather(loop, tiles, parts, stage)
            yield owner, gathered
            owner = following
            whose = {**outer, **owner}
            gathered = self.finish_gather(loop, depth, tiles, parts, works, stage, whose)
        yield owner, gathered

    def parts(self, tiles: Tiles, stage: Gather) -> Tiles:
        """Buffers for the parts of all ranks along a dimension."""
        times = 1 if stage.broadcast else self.mesh.extent(stage.dim)
        return tuple(
            x._replace(live=self.empty(f"{x.tensor.name} from {stage.dim}", self.nbytes(x) * times))
            for x in tiles
        )

    def start_gather(self, loop: Loop, tiles: Tiles, parts: Tiles, stage: Gather) -> Works:
        """Start one all-gather per tensor."""
        started = [
            self.collective("all-gather", stage.dim, x, into)
            for x, into in zip(tiles, parts, strict=True)
        ]
        return Works(tuple(op for works in started for op in works.ops), (*tiles, *parts))

    def finish_gather(
        self,
        loop: Loop,
        depth: int,
        tiles: Tiles,
        parts: Tiles,
        works: Works,
        stage: Gather,
        owner: Owners | None = None,
    ) -> Tiles:
        """Wait for the parts, and copy them into global order."""
        self.wait(works)
        joined = []
        for x, held in zip(tiles, parts, strict=True):
            region = self.tile_region(loop, x.tensor, owner or {}, depth + 1, self.place)
            live = self.empty(f"{x.tensor.name} gathered over {stage.dim}", held.live.nbytes)
            joined.append(x._replace(live=live, region=region))
            self.events.append(Unpack(held.live.number, live.number, loop.axis, stage.join))
        return tuple(joined)
