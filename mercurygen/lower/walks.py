"""How tiles come by: rings, rings inside rings, skewed pairs of rings, and gathers.

The functions are those of an emitted module, statement for statement.
"""

from __future__ import annotations

from mercurygen.lower.events import Unpack
from mercurygen.lower.plan import Gather, Loop, Walk, walk_levels
from mercurygen.lower.recorder import Tiles, Works
from mercurygen.lower.rings import Coming, Owners, Rings


class Walks(Rings):
    """One rank's tiles, through all stages of a loop."""

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
        works = self.start_gather(tiles, parts, stage)
        return self.finish_gather(loop, depth, tiles, parts, works, stage)

    def gather_ahead(
        self, loop: Loop, depth: int, walk: Coming, stage: Gather, outer: Owners
    ) -> Coming:
        """Gather every tile of a walk; the next one's gather runs while one is used."""
        owner, tiles = next(walk)
        parts = self.parts(tiles, stage)
        works = self.start_gather(tiles, parts, stage)
        whose = {**outer, **owner}
        gathered = self.finish_gather(loop, depth, tiles, parts, works, stage, whose)
        for following, tiles in walk:  # noqa: B020 - as in the module: the name is bound anew
            works = self.start_gather(tiles, parts, stage)
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

    def start_gather(self, tiles: Tiles, parts: Tiles, stage: Gather) -> Works:
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
        return self.join_gathered(loop, depth, tiles, parts, stage, owner)

    def join_gathered(
        self,
        loop: Loop,
        depth: int,
        tiles: Tiles,
        parts: Tiles,
        stage: Gather,
        owner: Owners | None = None,
    ) -> Tiles:
        """Copies of the parts of all ranks in global order."""
        joined = []
        for x, held in zip(tiles, parts, strict=True):
            region = self.tile_region(loop, x.tensor, owner or {}, depth + 1, self.place)
            live = self.empty(f"{x.tensor.name} gathered over {stage.dim}", held.live.nbytes)
            joined.append(x._replace(live=live, region=region))
            self.events.append(Unpack(held.live.number, live.number, loop.axis, stage.join))
        return tuple(joined)
