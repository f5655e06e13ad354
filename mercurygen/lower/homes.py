"""Results that go to the owners of the tiles that they are of."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.ir.kernel import ATEN
from mercurygen.ir.program import Program
from mercurygen.lower.events import Cast
from mercurygen.lower.plan import Loop, Walk
from mercurygen.lower.recorder import Limits, Tiles, Works
from mercurygen.lower.reductions import Reductions
from mercurygen.lower.results import Named, named
from mercurygen.lower.visible import visible
from mercurygen.lower.walks import Owners

# Whose tile comes by at each step, and the results for it; None: the mask leaves nothing of it.
Shares = Iterator[tuple[Owners, Named | None]]


def sends_what_is_read(program: Program, loop: Loop) -> bool:
    """Whether sums for a tile are of those tokens of it that are read, where a window trims it."""
    return bool(
        program.banded
        and loop.home == "direct"
        and loop.direct
        and loop.tensors
        and all(combine.kind == "sum" for combine in program.combines)
    )


class Homes(Reductions):
    """One rank's loops whose results go home."""

    def owners(self, loop: Loop) -> Iterator[tuple[Owners, Tiles]]:
        """Whose tile is worked on at each step, if no input comes by; relayed ones end here."""
        walk = loop.walks[-1]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        back = 1 if walk.reverse else -1
        first = 1 if loop.home == "relayed" else 0
        for step in range(size):
            yield {walk.dim: (me + back * (step + first)) % size}, ()

    def limited(self, loop: Loop, owner: Owners) -> Limits:
        """What is worked on while an owner's tile is here, in all loops that are going on."""
        axis, output = loop.axis, self.program.tensor(loop.outputs[0])
        dims = set(self.program.parallel_dims(axis))
        dims |= {
            stage.dim
            for stage in self.program.stages
            if stage.kind == "walk" and stage.axis == axis and output.name in stage.tensors
        }
        walked = {w.dim for each in self.plan.nest.loops if each.axis == axis for w in each.walks}
        around = {dim: i for dim, i in self.owner.items() if dim in walked}  # not of other axes
        places = {dim: self.place[dim] for dim in dims} | around | owner
        held = {dim: (i,) for dim, i in places.items()}
        return {axis: self.atoms.owned(self.atoms.order(output, axis), axis, held)}

    def sends_what_is_read(self, loop: Loop) -> bool:
        """Whether results go home for those tokens of a tile only that a window leaves."""
        return sends_what_is_read(self.program, loop)

    def sent_home(self, loop: Loop, shares: Shares) -> Named:
        """Results straight to the owner, one step behind the tile; ours are what they merge into.

        At step t the tile of rank r - t is here, and ours at rank r + t.
        """
        walk = loop.walks[-1]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        owner, share = next(shares)
        results = self.widen(share)
        share, outer = None, self.staying
        self.staying = {n: x for n, x in results.items() if n not in loop.outputs}
        works, arriving = Works((), ()), {}
        for owner, share in shares:
            self.wait(works)
            self.merge(arriving, results)
            works, arriving = Works((), ()), {}  # what is merged is freed
            leaving: Tiles = ()
            if share is not None:
                self.merge({n: x for n, x in share.items() if n not in loop.outputs}, results)
                leaving = self.outgoing({n: share[n] for n in loop.outputs})
            share = None
            peer = (2 * me - owner[walk.dim]) % size  # where our tile is
            arriving = self.incoming(loop, {walk.dim: peer})
            sends, recvs = ((owner[walk.dim], leaving), (peer, arriving.values()))
            works = self.batch(walk.dim, *([(to, x) for x in xs] for to, xs in (sends, recvs)))
            leaving = sends = recvs = ()
        self.staying = outer
        self.wait(works)
        self.merge(arriving, results)
        return results

    def travelling(self, loop: Loop, shares: Shares) -> Named:
        """Sums that go around with the tiles, or, if no tile does, towards their owners.

        What stays here (outputs that do not move) is merged over all steps.
        """
        walk = loop.walks[-1]
        owner, share = next(shares)
        staying, moves = self.divided(loop, owner, share)
        share, outer, self.staying = None, self.staying, staying
        arriving = self.next_sums(loop, owner, walk.dim, moves)
        if loop.tensors:
            works = self.hand_on(walk, moves, arriving)
            for owner, share in shares:
                stays, moves = self.divided(loop, owner, share)
                share = None
                self.merge(stays, staying)
                self.wait(works)
                self.merge(arriving, moves)
                arriving = self.next_sums(loop, owner, walk.dim, moves, arriving)
                works = self.hand_on(walk, moves, arriving)
            self.wait(works)
            moves = arriving
        else:
            for _ in range(self.mesh.extent(walk.dim) - 1):
                works = self.hand_on(walk, moves, arriving)
                owner, share = next(shares)
                stays, moves = self.divided(loop, owner, share)
                share = None
                self.merge(stays, staying)
                self.wait(works)
                self.merge(arriving, moves)
                arriving = self.next_sums(loop, owner, walk.dim, moves, arriving)
        self.staying = outer
        results = {**staying, **moves}
        return {t.name: results[t.name] for t in self.program.outputs if t.name in results}

    def divided(self, loop: Loop, owner: Owners, share: Named | None) -> tuple[Named, Named]:
        """Of the results for a tile those that stay here, and those that move on, dense."""
        if share is None:
            share = self.within(loop, owner)
        moves = self.outgoing({n: share[n] for n in loop.outputs})
        return {n: x for n, x in share.items() if n not in loop.outputs}, named(moves)

    def outgoing(self, part: Named | None) -> Tiles:
        """Results ready to be sent: dense, in the dtype that they are merged in."""
        if part is None:
            return ()
        if self.plan.nest.begin != "only" or self.program.kernel != ATEN:
            return tuple(part.values())
        found = []
        for x in part.values():  # as the kernel leaves them they are strided
            partial = self.plan.partial(x.tensor)
            copy = self.tile(f"{x.tensor.name} going home", x.tensor, x.region, partial)
            self.events.append(Cast(x.live.number, copy.live.number))
            found.append(copy)
        return tuple(found)

    def incoming(self, loop: Loop, peer: Owners) -> Named:
        """Buffers for what a rank has worked out for our tile."""
        walk, there = loop.walks[-1], {**self.place, **peer}
        mine = self.limits | self.limited(loop, {walk.dim: self.place[walk.dim]})
        if self.sends_what_is_read(loop):
            ours, tensor = {walk.dim: self.place[walk.dim]}, self.program.tensor(loop.tensors[0])
            read = self.tile_region(loop, tensor, ours, len(loop.stages), there)
            mine = mine | {loop.axis: read[tensor.axes.index(loop.axis)]}
            if not mine[loop.axis]:
                return {}
        if self.program.mask_axes and len(self.plan.nest.loops) == 1 + self.leading_loops():
            rows, columns = self.program.mask_axes
            lists = [mine.get(axis, self.atoms.iterations(axis, there)) for axis in (rows, columns)]
            blocks = visible(self.atoms.domain, self.program.kernel, *lists)
            only = self.plan.nest.begin == "only"
            if not blocks and (only or walk.direct):
                return {}
            if only:
                for axis, span, atoms in zip((rows, columns), blocks[0][:2], lists, strict=True):
                    touched = self.atoms.sequences[axis].touched(atoms, span)
                    mine = {**mine, axis: atoms[slice(*touched)]}
        return {
            name: self.tile(
                f"{name} coming home",
                self.program.tensor(name),
                self.result_region(self.program.tensor(name), mine),
                self.plan.partial(self.program.tensor(name)),
            )
            for name in loop.outputs
        }

    def leading_loops(self) -> int:
        """Loops that only gather."""
        return sum(not loop.walks for loop in self.plan.nest.loops)

    def hand_on(self, walk: Walk, moves: Named, arriving: Named) -> Works:
        """Start sending sums to the next rank and receiving the previous rank's."""
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        on = -1 if walk.reverse else 1
        sends = [((me + on) % size, x) for x in moves.values()]
        return self.batch(walk.dim, sends, [((me - on) % size, x) for x in arriving.values()])

    def within(self, loop: Loop, owner: Owners) -> Named:
        """Empty results for a tile that nothing here is merged into."""
        outer = self.limits
        self.limits = {**self.limits, **self.limited(loop, owner)}
        try:
            return self.nothing()
        finally:
            self.limits = outer

    def next_sums(
        self, loop: Loop, owner: Owners, dim: str, moves: Named, into: Named | None = None
    ) -> Named:
        """Buffers for the sums of the tile that comes next: the ones before, if there are any."""
        size = self.mesh.extent(dim)
        back = 1 if loop.walks[-1].reverse else -1
        following = {dim: (owner[dim] + back) % size}
        mine = self.limits | self.limited(loop, following)
        found = {}
        for name, x in moves.items():
            region = self.result_region(x.tensor, mine)
            if into is None:
                found[name] = self.tile(f"{name} arriving along {dim}", x.tensor, region, x.dtype)
            else:
                found[name] = into[name]._replace(region=region)
        return found
