"""One ring of tiles: relayed or straight from their owners, either way or both ways.

The functions are those of an emitted module, statement for statement.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.plan import Gather, Loop, Plan, Stages, Walk
from mercurygen.lower.recorder import Limits, Recorder, Tiles, Works
from mercurygen.lower.visible import read_run

Owners = dict[str, int]
Coming = Iterator[tuple[Owners, Tiles]]


class Rings(Recorder):
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

    # --- one ring -----------------------------------------------------------------------------

    def steps(self, walk: Walk) -> tuple[int, ...]:
        """The steps of a walk after our own tile's."""
        return walk.coming(self.mesh.extent(walk.dim))

    def spare(self, walk: Walk, tiles: Tiles, longer: int) -> list[Tiles]:
        """Sets of receive buffers for a ring, used in turn; no more than there are transfers."""
        count = walk.ahead + 1 if walk.direct else max(walk.ahead, 1) + 1
        count = min(4 if walk.both else count, len(self.steps(walk)))
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
        spare = self.spare(walk, tiles, 1) if spare is None else spare
        if walk.both:
            return self.both_ways(loop, depth, tiles, spare, outer)
        ahead = min(walk.ahead, len(self.steps(walk)))
        if ahead == 0:
            return self.at_once(loop, depth, tiles, spare, outer)
        if ahead == 1:
            return self.one_ahead(loop, depth, tiles, spare, outer)
        if walk.direct:
            return self.fetched_ahead(loop, depth, tiles, spare, outer, ahead)
        return self.passed_ahead(loop, depth, tiles, spare, outer, ahead)

    def of_step(self, walk: Walk, step: int) -> Owners:
        """Whose tile is used at a step."""
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        return {walk.dim: (me + (step if walk.reverse else -step)) % size}

    def start_step(
        self,
        loop: Loop,
        depth: int,
        held: Tiles,
        spare: list[Tiles],
        turn: int,
        outer: Owners,
    ) -> tuple[Works, Tiles]:
        """Start to bring the tile of a turn: by passing on what is held, or from its owner."""
        walk = loop.stages[depth]
        step = self.steps(walk)[turn]
        (owner,) = self.of_step(walk, step).values()
        arriving = self.arriving(loop, depth, spare[turn % len(spare)], owner, outer)
        if walk.direct:
            return self.direct(loop, depth, held, arriving, step, outer), arriving
        return self.shift(held, arriving, walk), arriving

    def at_once(
        self, loop: Loop, depth: int, tiles: Tiles, spare: list[Tiles], outer: Owners
    ) -> Coming:
        """Nothing runs beside the transfers."""
        walk = loop.stages[depth]
        own, before = tiles, 0
        for turn, step in enumerate(self.steps(walk)):
            yield self.of_step(walk, before), tiles
            held = own if walk.direct else tiles
            works, tiles = self.start_step(loop, depth, held, spare, turn, outer)
            self.wait(works)
            before = step
        yield self.of_step(walk, before), tiles

    def one_ahead(
        self, loop: Loop, depth: int, tiles: Tiles, spare: list[Tiles], outer: Owners
    ) -> Coming:
        """The next tile arrives while one is used."""
        walk = loop.stages[depth]
        own, before = tiles, 0
        for turn, step in enumerate(self.steps(walk)):
            held = own if walk.direct else tiles
            works, arriving = self.start_step(loop, depth, held, spare, turn, outer)
            yield self.of_step(walk, before), tiles
            self.wait(works)
            before, tiles = step, arriving
        yield self.of_step(walk, before), tiles

    def passed_ahead(
        self,
        loop: Loop,
        depth: int,
        tiles: Tiles,
        spare: list[Tiles],
        outer: Owners,
        ahead: int,
    ) -> Coming:
        """Some tiles are here before they are used; the next one is on its way."""
        walk = loop.stages[depth]
        last, held = len(self.steps(walk)), [tiles]
        for turn in range(ahead - 1):
            works, arriving = self.start_step(loop, depth, held[-1], spare, turn, outer)
            self.wait(works)
            held.append(arriving)
        for turn in range(ahead - 1, last):
            works, arriving = self.start_step(loop, depth, held[-1], spare, turn, outer)
            yield self.of_step(walk, turn - ahead + 1), held.pop(0)
            self.wait(works)
            held.append(arriving)
        for step in range(last - ahead + 1, last + 1):
            yield self.of_step(walk, step), held.pop(0)

    def fetched_ahead(
        self,
        loop: Loop,
        depth: int,
        tiles: Tiles,
        spare: list[Tiles],
        outer: Owners,
        ahead: int,
    ) -> Coming:
        """Some tiles are on their way at one time, each from its owner."""
        walk = loop.stages[depth]
        own, used = tiles, (0, *self.steps(walk))
        flights = [
            self.start_step(loop, depth, own, spare, turn, outer) for turn in range(ahead - 1)
        ]
        for turn, step in enumerate(used[:-ahead]):
            flights.append(self.start_step(loop, depth, own, spare, turn + ahead - 1, outer))
            yield self.of_step(walk, step), tiles
            tiles = self.landed(flights)
        for step in used[-ahead:-1]:
            yield self.of_step(walk, step), tiles
            tiles = self.landed(flights)
        yield self.of_step(walk, used[-1]), tiles

    def landed(self, flights: list[tuple[Works, Tiles]]) -> Tiles:
        """Wait for the first flight; what it brings."""
        works, tiles = flights.pop(0)
        self.wait(works)
        return tiles

    def shift(self, tiles: Tiles, into: Tiles, walk: Walk) -> Works:
        """Start sending tiles to the next rank of the ring and receiving the previous rank's."""
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        on = -1 if walk.reverse else 1
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
                part = x if region == x.region else self.dense(x, region)
                sends.append((reader[walk.dim], part))
        recvs = [((me + back * step) % size, x) for x in into if self.nbytes(x)]
        return self.batch(walk.dim, sends, recvs)

    def both_ways(
        self, loop: Loop, depth: int, tiles: Tiles, spare: list[Tiles], outer: Owners
    ) -> Coming:
        """Ours first, then at step t the tiles of r - t and of r + t, passed on either way."""
        walk = loop.stages[depth]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        forth = back = tiles
        here = [({walk.dim: me}, tiles)]
        for step in range((size - 1) // 2):
            owners = (me - step - 1) % size, (me + step + 1) % size
            into = [spare[(2 * step + i) % len(spare)] for i in range(2)]
            coming = [
                self.arriving(loop, depth, x, owner, outer)
                for x, owner in zip(into, owners, strict=True)
            ]
            works = self.shift_both((forth, back), coming, walk)
            yield from here
            self.wait(works)
            forth, back = coming
            here = [({walk.dim: i}, x) for i, x in zip(owners, coming, strict=True)]
        if size % 2:
            yield from here
            return
        opposite = (me + size // 2) % size
        last = self.arriving(loop, depth, spare[(size - 2) % len(spare)], opposite, outer)
        works = self.shift(forth, last, walk)
        yield from here
        self.wait(works)
        yield {walk.dim: opposite}, last

    def shift_both(self, tiles: tuple[Tiles, Tiles], into: list[Tiles], walk: Walk) -> Works:
        """Start passing tiles on to the next rank of the ring, and others to the previous one."""
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        peers = ((me + 1) % size, (me - 1) % size)
        sends, recvs = [], []
        for i in range(2):
            sends += [(peers[i], x) for x in tiles[i] if self.nbytes(x)]
            recvs += [(peers[1 - i], x) for x in into[i] if self.nbytes(x)]
        return self.batch(walk.dim, sends, recvs)

    def arriving(self, loop: Loop, depth: int, into: Tiles, owner: int, outer: Owners) -> Tiles:
        """Receive buffers as the tile of an owner."""
        walk = loop.stages[depth]
        place = {**outer, walk.dim: owner % self.mesh.extent(walk.dim)}
        return tuple(
            x._replace(region=self.tile_region(loop, x.tensor, place, depth + 1, self.place))
            for x in into
        )
