"""The body on every tile that comes by, and what becomes of its results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from mercurygen.errors import InternalError
from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import (
    Cast,
    Cut,
    Cuts,
    Fill,
    Kernel,
    Merge,
    Operand,
    Pack,
    Turn,
    Unweigh,
    Weigh,
)
from mercurygen.lower.plan import Loop, Reduce, Walk
from mercurygen.lower.recorder import Limits, NotARun, Tile, Tiles, Works, cuts_of
from mercurygen.lower.sizes import ATEN, scratch_bytes, share_bytes, with_block
from mercurygen.lower.visible import Block, visible
from mercurygen.lower.walks import Owners, Walks

Named = dict[str, Tile]  # tiles of inputs, or partial results of outputs, by tensor


class Nest(Walks):
    """One rank's loops, from the tensors between the borders to complete results there."""

    def nest(self, tensors: Named) -> Named:
        """All loops and reductions."""
        results = self.scope(self.plan.nest.loops, tensors)
        if self.plan.nest.reduces:
            results = self.widen(results)
        for reduce in self.plan.nest.reduces:
            results = self.reduce(results, reduce)
        return self.narrow(results)

    def scope(self, loops: tuple[Loop, ...], tensors: Named) -> Named:
        """The partial results of all that some loops bring."""
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
            return self.once(tensors)
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

    def turn(self, owner: Owners) -> None:
        """The body comes to the tile of an owner."""
        part = tuple((axis, *at) for axis, at in self.part.items())
        self.events.append(Turn(tuple({**self.owner, **owner}.items()), part))

    def once(self, tensors: Named) -> Named:
        """The results of tiles that are all there is."""
        self.turn({})
        if self.plan.nest.begin == "empty":
            results = self.nothing()
            self.merge_blocks(tensors, results)
            return results
        return self.share(tensors)

    # --- results that go home -----------------------------------------------------------------

    def moving(self, loops: tuple[Loop, ...], tensors: Named) -> Named:
        """A loop whose results go to the owners of its tiles."""
        loop, rest = loops[0], loops[1:]
        if loop.tensors:
            led = tuple(tensors[name] for name in loop.tensors)
            led = led if self.led else self.lead(loop, led)
            steps = self.coming(loop, led)
        else:
            led, steps = (), self.owners(loop)
        tensors = {name: x for name, x in tensors.items() if name not in loop.tensors}
        if loop.home == "direct":
            return self.sent_home(loop, rest, steps, tensors)
        return self.travelling(loop, rest, steps, tensors)

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
        places = {dim: self.place[dim] for dim in dims} | self.owner | owner
        held = {dim: (i,) for dim, i in places.items()}
        return {axis: self.atoms.owned(self.atoms.order(output, axis), axis, held)}

    def sent_home(
        self,
        loop: Loop,
        rest: tuple[Loop, ...],
        steps: Iterator[tuple[Owners, Tiles]],
        tensors: Named,
    ) -> Named:
        """Results straight to the owner, one step behind the tile; ours are what they merge into.

        At step t the tile of rank r - t is here, and ours at rank r + t.
        """
        walk = loop.walks[-1]
        size, me = self.mesh.extent(walk.dim), self.place[walk.dim]
        shares = self.shares(loop, rest, steps, tensors)
        owner, share = next(shares)
        results = self.widen(share)
        share = None
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
        self.wait(works)
        self.merge(arriving, results)
        return results

    def shares(
        self,
        loop: Loop,
        rest: tuple[Loop, ...],
        steps: Iterator[tuple[Owners, Tiles]],
        tensors: Named,
    ) -> Iterator[tuple[Owners, Named | None]]:
        """Whose tile comes by at each step, and the results for it."""
        for owner, tiles in steps:
            yield owner, self.part_results(loop, rest, owner, {**tensors, **named(tiles)})

    def part_results(
        self, loop: Loop, rest: tuple[Loop, ...], owner: Owners, tensors: Named
    ) -> Named | None:
        """The results for an owner's tile; None if the mask leaves nothing of it."""
        outer = self.limits, self.owner
        self.limits = {**self.limits, **self.limited(loop, owner)}
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
        if self.program.mask_axes and len(self.plan.nest.loops) == 1 + self.leading_loops():
            rows, columns = self.program.mask_axes
            lists = [mine.get(axis, self.atoms.iterations(axis, there)) for axis in (rows, columns)]
            blocks = visible(self.atoms.domain, self.program.kernel, *lists)
            only = self.plan.nest.begin == "only"
            if not blocks and (only or walk.direct):
                return {}
            if only:
                for axis, span, atoms in zip((rows, columns), blocks[0][:2], lists, strict=True):
                    mine = {**mine, axis: atoms[slice(*span)]}
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

    def travelling(
        self,
        loop: Loop,
        rest: tuple[Loop, ...],
        steps: Iterator[tuple[Owners, Tiles]],
        tensors: Named,
    ) -> Named:
        """Sums that go around with the tiles, or, if no tile does, towards their owners.

        What stays here (outputs that do not move) is merged over all steps.
        """
        walk = loop.walks[-1]
        shares = self.shares(loop, rest, steps, tensors)
        owner, share = next(shares)
        staying, moves = self.divided(loop, owner, share)
        share = None
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
        results = {**staying, **moves}
        return {t.name: results[t.name] for t in self.program.outputs if t.name in results}

    def divided(self, loop: Loop, owner: Owners, share: Named | None) -> tuple[Named, Named]:
        """Of the results for a tile those that stay here, and those that move on, dense."""
        if share is None:
            share = self.within(loop, owner)
        moves = self.outgoing({n: share[n] for n in loop.outputs})
        return {n: x for n, x in share.items() if n not in loop.outputs}, named(moves)

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

    # --- results ------------------------------------------------------------------------------

    def result_region(self, tensor: Tensor, limits: Limits) -> Region:
        """What a rank works out of an output."""
        return tuple(
            limits.get(axis) or self.atoms.iterations(axis, self.place) for axis in tensor.axes
        )

    def nothing(self) -> Named:
        """What merges to nothing."""
        results = {
            t.name: self.tile(t.name, t, self.result_region(t, self.limits), self.plan.partial(t))
            for t in self.program.outputs
        }
        self.fill(results)
        return results

    def fill(self, results: Named) -> None:
        """Buffers become what merges to nothing."""
        self.regions.update({x.live.number: x.region for x in results.values()})
        self.events.append(Fill(tuple(x.live.number for x in results.values())))

    def widen(self, results: Named) -> Named:
        """In the dtypes that they are merged in; the same buffers if they are that already."""
        return {n: self.cast(x, self.plan.partial(x.tensor)) for n, x in results.items()}

    def narrow(self, results: Named) -> Named:
        """In their own dtypes; the same buffers if they are that already."""
        return {n: self.cast(x, x.tensor.dtype) for n, x in results.items()}

    def merge(self, parts: Named, results: Named) -> None:
        """Merge partial results into others, in place."""
        for combine in self.program.combines:
            names = [name for name in combine.outputs if name in parts]
            if not names:
                continue
            first = parts[names[0]]
            cuts = cuts_of(first.tensor.axes, results[names[0]].region, first.region)
            self.events.append(
                Merge(
                    tuple(parts[name].live.number for name in names),
                    tuple(results[name].live.number for name in names),
                    cuts,
                    None,
                    self.merge_scratch(first) if combine.kind == "softmax" else 0,
                )
            )

    def merge_scratch(self, out: Tile) -> int:
        """Bytes beside a softmax merge of partial results in their own dtype."""
        rows = self.nbytes(out) // self.plan.itemsize(out.dtype) // self.program.extent("D_v")
        return 2 * rows * self.plan.itemsize("accumulator")

    # --- the body -----------------------------------------------------------------------------

    def operands(self, tensors: Named, outputs: Named) -> tuple[dict, tuple[Operand, ...], tuple]:
        """What all operands of the body have in common, and each cut to it."""
        tiles = [tensors[t.name] for t in self.program.read]
        results = list(outputs.values())
        signature = tuple((x.tensor.axes, x.region) for x in (*tiles, *results))
        common, cuts = _aligned(signature, tuple(sorted(self.limits.items())))
        found = [
            Operand(x.live.number, cut) for x, cut in zip((*tiles, *results), cuts, strict=True)
        ]
        return dict(common), tuple(found[: len(tiles)]), tuple(found[len(tiles) :])

    def blocks(self, tensors: Named) -> tuple[Block, ...] | None:
        """What the mask leaves of the tiles that are here; None of an operator without one."""
        if not self.program.mask_axes:
            return None
        common, _, _ = self.operands(tensors, {})
        rows, columns = (common[axis] for axis in self.program.mask_axes)
        return visible(self.atoms.domain, self.program.kernel, rows, columns)

    def merge_blocks(self, tensors: Named, results: Named) -> None:
        """The body on what the mask leaves of the tiles, merged into results."""
        common, inputs, outputs = self.operands(tensors, results)
        blocks: tuple[Block | None, ...] = (None,)
        if self.program.mask_axes:
            rows, columns = (common[axis] for axis in self.program.mask_axes)
            blocks = visible(self.atoms.domain, self.program.kernel, rows, columns)
        for block in blocks:
            extents = with_block(self.plan, self.lengths(common), block)
            self.kernel(inputs, outputs, block, True, extents)

    def share(self, tensors: Named) -> Named:
        """The result of tiles that are one block."""
        common, inputs, _ = self.operands(tensors, {})
        blocks = self.blocks(tensors)
        block = None
        if blocks is not None:
            (block,) = blocks
            for axis, span in zip(self.program.mask_axes, block[:2], strict=True):
                common = {**common, axis: common[axis][slice(*span)]}
        whole = self.lengths(common)
        extents = with_block(self.plan, whole, block)
        results = {}
        for tensor, nbytes in zip(
            self.program.outputs, share_bytes(self.plan, extents), strict=True
        ):
            aten = self.program.kernel == ATEN
            dtype = tensor.dtype if aten else self.plan.partial(tensor)
            live = self.empty(tensor.name, nbytes)
            results[tensor.name] = Tile(live, tensor, self.region_in(tensor, common), dtype)
        outputs = tuple(Operand(x.live.number) for x in results.values())
        self.kernel(inputs, outputs, block, False, extents)
        return results

    def region_in(self, tensor: Tensor, common: Limits) -> Region:
        """The part of an output that a call works out."""
        return tuple(
            common.get(axis) or self.limits.get(axis) or self.atoms.iterations(axis, self.place)
            for axis in tensor.axes
        )

    def lengths(self, common: Limits) -> dict[str, int]:
        """Indices along every axis."""
        count = self.atoms.count
        return {
            axis.name: len(common.get(axis.name, (0,))) * (axis.extent // count[axis.name])
            for axis in self.program.axes
        }

    def kernel(self, inputs, outputs, block: Block | None, merge: bool, extents) -> None:
        """The body on one block; its share is merged into the outputs, or is them."""
        scratch = scratch_bytes(self.plan, extents, merge)
        numbers = tuple(extents[axis.name] for axis in self.program.axes)
        self.events.append(Kernel(inputs, outputs, block, merge, scratch, numbers))

    # --- reductions ---------------------------------------------------------------------------

    def reduce(self, results: Named, reduce: Reduce) -> Named:
        """Partial results of a dimension's ranks, as one."""
        mine = {name: x for name, x in results.items() if name in reduce.tensors}
        mine = self.widen(mine)
        results = {**results, **mine}
        if reduce.kind == "sum":
            for name, x in list(mine.items()):
                way = self.scatter_sum if reduce.axis else self.sum_over
                mine[name] = results[name] = way(x, reduce)
                del x
            return results
        if reduce.kind == "softmax" and reduce.axis is None:
            self.softmax_over(mine, reduce)
            return results
        return {**results, **self.exchange(mine, reduce)}

    def narrowed(self, x: Tile, reduce: Reduce) -> Tile:
        """In the dtype that is asked for on the link."""
        return x if reduce.dtype is None else self.cast(x, reduce.dtype)

    def scatter_sum(self, x: Tile, reduce: Reduce) -> Tile:
        """Everyone's sum of its part."""
        x = self.narrowed(x, reduce)
        parts = self.like(f"{x.tensor.name} in parts", x)
        self.events.append(Pack(x.live.number, parts.live.number, reduce.axis, reduce.join))
        region = self.scattered(x, reduce)
        target = self.tile(f"{x.tensor.name} of {reduce.dim}", x.tensor, region, x.dtype)
        self.wait(self.collective("reduce-scatter", reduce.dim, parts, target))
        return self.cast(target, self.plan.partial(x.tensor))

    def sum_over(self, x: Tile, reduce: Reduce) -> Tile:
        """The sum of all, everywhere."""
        x = self.narrowed(x, reduce)
        self.wait(self.collective("all-reduce", reduce.dim, x, x))
        return self.cast(x, self.plan.partial(x.tensor))

    def softmax_over(self, mine: Named, reduce: Reduce) -> None:
        """The maximum of lse, then one sum of what is weighed by it, in place."""
        out, lse = (mine[name] for name in reduce.tensors)
        most = self.like("largest lse", lse)
        self.events.append(Cut(lse.live.number, most.live.number, ()))
        self.wait(self.collective("all-reduce", reduce.dim, most, most, reduce="max"))
        packed = out._replace(
            live=self.empty("weighed out and weights", self.nbytes(out) + self.nbytes(lse))
        )
        pair = (out.live.number, lse.live.number)
        self.events.append(Weigh(pair, most.live.number, packed.live.number))
        self.wait(self.collective("all-reduce", reduce.dim, packed, packed))
        self.events.append(Unweigh(packed.live.number, most.live.number, pair))

    def scattered(self, x: Tile, reduce: Reduce) -> Region:
        """What a rank keeps of a partial result along the axis of a reduction."""
        places = _dealt(len(x.atoms(reduce.axis)), reduce.join, self.place[reduce.dim])
        kept = tuple(x.atoms(reduce.axis)[i] for i in places)
        index = x.tensor.axes.index(reduce.axis)
        return (*x.region[:index], kept, *x.region[index + 1 :])

    def exchange(self, mine: Named, reduce: Reduce) -> Named:
        """Partial results to the ranks that keep them, merged there in rank order."""
        size, received = self.mesh.extent(reduce.dim), {}
        for name, x in mine.items():
            if reduce.axis is None:
                parts = x._replace(
                    live=self.empty(f"{name} from {reduce.dim}", self.nbytes(x) * size)
                )
                self.wait(self.collective("all-gather", reduce.dim, x, parts))
                received[name] = (parts, x.region)
                continue
            packed = self.like(f"{name} in parts", x)
            self.events.append(Pack(x.live.number, packed.live.number, reduce.axis, reduce.join))
            parts = self.like(f"{name} from {reduce.dim}", x)
            self.wait(self.collective("all-to-all", reduce.dim, packed, parts))
            received[name] = (parts, self.scattered(x, reduce))
            del packed
        results = {
            name: self.tile(name, parts.tensor, region, parts.dtype)
            for name, (parts, region) in received.items()
        }
        self.fill(results)
        first = results[reduce.tensors[0]]
        scratch = self.merge_scratch(first) if reduce.kind == "softmax" else 0
        sources = tuple(parts.live.number for parts, _ in received.values())
        targets = tuple(x.live.number for x in results.values())
        for part in range(size):
            self.events.append(Merge(sources, targets, (), part, scratch))
        return results


def named(tiles: Tiles) -> Named:
    """Tiles by their tensors' names."""
    return {x.tensor.name: x for x in tiles}


@lru_cache(maxsize=65536)
def _aligned(operands: tuple, limits: tuple) -> tuple[tuple, tuple[Cuts, ...]]:
    """The atoms that operands have in common along every axis, and each one's cuts to them."""
    common: dict[str, tuple[int, ...]] = dict(limits)
    for axes, region in operands:
        for axis, atoms in zip(axes, region, strict=True):
            held = common.get(axis)
            if held is None or held == atoms:
                common[axis] = atoms
            elif len(held) <= len(atoms):
                common[axis] = tuple(a for a in held if a in set(atoms))
            else:
                common[axis] = tuple(a for a in atoms if a in set(held))
    held = {
        axis: atoms for axes, region in operands for axis, atoms in zip(axes, region, strict=True)
    }
    for axis, atoms in common.items():
        if not atoms and held.get(axis):
            raise NotARun(axis)  # one is of other tiles than another
    cuts = tuple(
        cuts_of(axes, region, tuple(common[axis] for axis in axes)) for axes, region in operands
    )
    return tuple(common.items()), cuts


@lru_cache(maxsize=4096)
def _dealt(length: int, join, index: int) -> tuple[int, ...]:
    """Places of a joined list that one rank owns."""
    order = join.pieces()
    size, rest = divmod(length, len(order))
    if rest:
        raise InternalError(f"{length} atoms cannot be dealt in {len(order)} pieces")
    runs = {run: place for place, (rank, run) in enumerate(order) if rank == index}
    return tuple(runs[run] * size + i for run in sorted(runs) for i in range(size))
