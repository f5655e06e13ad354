"""The body on every tile that comes by, loop inside loop, and what becomes of its results."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.lower.homes import Homes, Shares
from mercurygen.lower.plan import Loop
from mercurygen.lower.recorder import Tiles
from mercurygen.lower.results import Named, named
from mercurygen.lower.walks import Owners


class Nest(Homes):
    """One rank's loops, from the tensors between the borders to complete results there."""

    def nest(self, tensors: Named) -> Named:
        """All loops and reductions."""
        results = self.scope(self.plan.nest.loops, tensors)
        if self.plan.nest.reduces:
            results = self.widen(results)
        for reduce in self.plan.nest.reduces:
            results = self.reduce(results, reduce)
        return self.narrow(results)

    def scope(self, loops: tuple[Loop, ...], tensors: Named, into: Named | None = None) -> Named:
        """The partial results of all that some loops bring; merged into others if they can be."""
        if loops and loops[0].outputs:
            return self.moving(loops, tensors)
        index = next((i for i, loop in enumerate(loops) if loop.outputs), len(loops))
        plain, rest = loops[:index], loops[index:]
        for loop in plain:
            if loop.leading and not self.led:
                led = self.lead(loop, tuple(tensors[name] for name in loop.tensors))
                tensors = {**tensors, **named(led)}
        walks = tuple(loop for loop in plain if loop.walks)
        if not walks and not rest:
            return self.once(tensors, into)
        items = self.items(walks, tensors)
        owner, tiles = {}, tensors
        if rest:
            owner, tiles = next(items)
            results = self.scope(rest, tiles)
        elif self.plan.nest.begin == "first":
            owner, tiles = next(items)
            self.turn(owner)
            results = self.widen(self.share(tiles))
        else:
            results = self.nothing()
        for owner, tiles in items:
            if rest:
                self.merge(self.scope(rest, tiles), results)
                continue
            self.turn(owner)
            self.merge_blocks(tiles, results)
        return results

    def items(self, walks: tuple[Loop, ...], tensors: Named) -> Iterator[tuple[Owners, Named]]:
        """Every tile of loops inside loops, with all that does not move."""
        if not walks:
            yield {}, tensors
            return
        loop, inner = walks[0], walks[1:]
        names = loop.tensors + (loop.partner[0] if loop.partner else ())
        for owner, tiles in self.coming(loop, tuple(tensors[name] for name in names)):
            if any(not all(x.region) for x in tiles):  # nothing of the tile is read here
                self.turn(owner)
                continue
            for deeper, found in self.items(inner, {**tensors, **named(tiles)}):
                yield {**owner, **deeper}, found

    def once(self, tensors: Named, into: Named | None = None) -> Named:
        """The results of tiles that are all there is, or all of a part."""
        self.turn({})
        if self.plan.nest.begin == "empty":
            results = into or self.nothing()
            self.merge_blocks(tensors, results)
            return results
        return self.share(tensors)

    def moving(self, loops: tuple[Loop, ...], tensors: Named) -> Named:
        """A loop whose results go to the owners of its tiles."""
        loop, rest = loops[0], loops[1:]
        if loop.tensors:
            led = tuple(tensors[name] for name in loop.tensors)
            led = led if self.led else self.lead(loop, led)
            steps = self.coming(loop, led)
        else:
            steps = self.owners(loop)
        tensors = {name: x for name, x in tensors.items() if name not in loop.tensors}
        shares = self.shares(loop, rest, steps, tensors)
        way = self.sent_home if loop.home == "direct" else self.travelling
        return way(loop, shares)

    def shares(
        self,
        loop: Loop,
        rest: tuple[Loop, ...],
        steps: Iterator[tuple[Owners, Tiles]],
        tensors: Named,
    ) -> Shares:
        """Whose tile comes by at each step, and the results for it."""
        for owner, tiles in steps:
            yield owner, self.part_results(loop, rest, owner, {**tensors, **named(tiles)})

    def part_results(
        self, loop: Loop, rest: tuple[Loop, ...], owner: Owners, tensors: Named
    ) -> Named | None:
        """The results for an owner's tile; None if the mask leaves nothing of it."""
        outer = self.limits, self.owner
        self.limits = {**self.limits, **self.limited(loop, owner)}
        if self.sends_what_is_read(loop):
            self.limits[loop.axis] = tensors[loop.tensors[0]].atoms(loop.axis)
        self.owner = {**self.owner, **owner}
        try:
            if any(not all(x.region) for x in tensors.values()):
                self.turn({})
                return None
            if not rest and self.plan.nest.begin == "only" and self.program.mask_axes:
                self.turn({})
                return self.share(tensors) if self.blocks(tensors) else None
            return self.scope(rest, tensors) if rest else self.once(tensors)
        finally:
            self.limits, self.owner = outer
