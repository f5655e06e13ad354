"""A plan played for one rank: the emitted module's own shape, on buffers that hold nothing.

The functions below are those of an emitted module, statement for statement. A buffer lives as
long as a Python variable refers to it, here as there, so that what is alive at any moment, and
with it the peak, is what a run of the module shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mercurygen.lower.events import (
    Alloc,
    Batch,
    Buffer,
    Cast,
    Collective,
    Event,
    Fill,
    Free,
    Kernel,
    Message,
    Pack,
    Return,
    Trace,
    Unpack,
    Wait,
)
from mercurygen.lower.plan import Gather, Plan, Swap, walk_levels
from mercurygen.lower.sizes import scratch_bytes, share_bytes
from mercurygen.lower.visible import Block, visible

Tiles = tuple["_Live", ...]
Owners = dict[str, int]
Levels = list[tuple[str, tuple[Gather, ...]]]


def trace(plan: Plan, rank: int, *, with_lse: bool = False) -> Trace:
    """What a rank does in one call, with or without handing out the log-sum-exp."""
    return _Player(plan, rank).play(with_lse)


class _Live:
    """A buffer while something refers to it."""

    __slots__ = ("number", "nbytes", "_events")

    def __init__(self, number: int, nbytes: int, events: list[Event]) -> None:
        self.number, self.nbytes, self._events = number, nbytes, events

    def __del__(self) -> None:
        self._events.append(Free(self.number))


class _Works(NamedTuple):
    """Transfers on their way: as torch's do, they hold on to their buffers."""

    ops: tuple[int, ...]
    buffers: Tiles


class _Player:
    """One rank at work."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.mesh = plan.program.mesh
        self.place = self.mesh.coordinate(rank)
        self.events: list[Event] = []
        self.buffers: list[Buffer] = []
        self.ops = 0

    def empty(self, label: str, nbytes: int) -> _Live:
        """A new buffer."""
        number = len(self.buffers)
        self.buffers.append(Buffer(label, nbytes))
        self.events.append(Alloc(number))
        return _Live(number, nbytes, self.events)

    def play(self, with_lse: bool) -> Trace:
        """The public function: border, nest, border."""
        plan, program = self.plan, self.plan.program
        caller = {t.name: self.empty(t.name, plan.held_bytes(t.name)) for t in program.inputs}
        inputs = {name: live.number for name, live in caller.items()}
        tensors = dict(caller)
        for swap in plan.before:
            swapped = [self.to_heads(tensors[name], swap, name) for name in swap.tensors]
            tensors.update(zip(swap.tensors, swapped, strict=True))
            del swapped
        rows = [t.name for t in program.inputs if t.name not in plan.nest.tensors]
        tiles = tuple(tensors[name] for name in plan.nest.tensors)
        out, lse = self.attend([tensors[name] for name in rows], tiles)
        del tiles
        for swap in plan.after:
            if not swap.optional:
                out = self.to_sequence(out, swap, "out")
        self.events.append(Return("out", out.number))
        if with_lse:
            for swap in plan.after:
                if swap.optional:
                    lse = self.to_sequence(lse, swap, "lse")
            self.events.append(Return("lse", lse.number))
        events = tuple(self.events)
        return Trace(self.rank, events, tuple(self.buffers), inputs)

    # --- border -------------------------------------------------------------------------------

    def to_heads(self, x: _Live, swap: Swap, label: str) -> _Live:
        """Heads are split along the dimension, and its tokens joined."""
        received = self.all_to_all(self.pack(x, swap, "heads", label), swap.dim, label)
        joined = self.empty(f"{label} by heads", received.nbytes)
        self.events.append(Unpack(received.number, joined.number, "sequence", swap.join))
        return joined

    def to_sequence(self, x: _Live, swap: Swap, label: str) -> _Live:
        """Tokens go to the ranks along the dimension that own them, and heads are joined."""
        received = self.all_to_all(self.pack(x, swap, "sequence", label), swap.dim, label)
        joined = self.empty(f"{label} by sequence", received.nbytes)
        self.events.append(Unpack(received.number, joined.number, "heads", swap.join))
        return joined

    def pack(self, x: _Live, swap: Swap, by: str, label: str) -> _Live:
        """A copy with one part for every rank along the dimension, without any padding."""
        parts = self.empty(f"{label} in parts", self.plan.held_bytes(label))
        self.events.append(Pack(x.number, parts.number, by, swap.join))
        return parts

    def all_to_all(self, parts: _Live, dim: str, label: str) -> _Live:
        """Part i to rank i, one part from each."""
        received = self.empty(f"{label} from {dim}", parts.nbytes)
        op = self.next_op()
        self.events.append(Collective(op, dim, "all-to-all", parts.number, received.number))
        self.events.append(Wait(op))
        return received

    def next_op(self) -> int:
        """A number for a transfer."""
        self.ops += 1
        return self.ops

    # --- nest ---------------------------------------------------------------------------------

    def attend(self, rows: list[_Live], tiles: Tiles) -> tuple[_Live, _Live]:
        """The body on every tile that comes by."""
        nest = self.plan.nest
        if nest.begin == "empty":
            return self.attend_empty(rows, tiles)
        if nest.begin == "only":
            return self.share(rows, self.lead(tiles), {})
        walk = self.walk(self.lead(tiles))
        owner, tile = next(walk)
        out, lse = self.share(rows, tile, owner)
        out = self.widen(out)
        for owner, tile in walk:
            for block in self.blocks(owner):
                self.kernel(rows, tile, (out, lse), block, merge=True)
        return self.narrow(out), lse

    def attend_empty(self, rows: list[_Live], tiles: Tiles) -> tuple[_Live, _Live]:
        """The same, from nothing: no tile covers all rows at once."""
        if not self.plan.nest.walking:
            tiles = self.lead(tiles)
            out, lse = self.nothing()
            for block in self.blocks({}):
                self.kernel(rows, tiles, (out, lse), block, merge=True)
            return self.narrow(out), lse
        walk = self.walk(self.lead(tiles))
        out, lse = self.nothing()
        for owner, tile in walk:
            for block in self.blocks(owner):
                self.kernel(rows, tile, (out, lse), block, merge=True)
        return self.narrow(out), lse

    def nothing(self) -> tuple[_Live, _Live]:
        """What merges to nothing: zeros and -inf."""
        elements = self.plan.nbytes("out", self.mesh.names) // self.plan.itemsize("inputs")
        out = self.empty("out", elements * self.plan.itemsize("accumulator"))
        lse = self.empty("lse", self.plan.nbytes("lse", self.mesh.names))
        self.events.append(Fill((out.number, lse.number)))
        return out, lse

    def lead(self, tiles: Tiles) -> Tiles:
        """The gathers outside every walk."""
        for stage in self.plan.nest.leading:
            tiles = self.gather(tiles, stage)
        return tiles

    def blocks(self, owner: Owners) -> tuple[Block, ...]:
        """What the mask leaves of an owner's tile."""
        program = self.plan.program
        return visible(program.mask, self.plan.rows(self.place), self.plan.columns(owner))

    def walk(self, tiles: Tiles) -> Iterator[tuple[Owners, Tiles]]:
        """Yield (owner, tiles) for every tile of the nest."""
        levels = walk_levels(self.plan.nest.walking)
        if len(levels) > 1:
            return self.walk_tiles(tiles, levels)
        dim, gathers = levels[0]
        return self.gathered(self.ring(tiles, dim, None), gathers)

    def gathered(self, walk: Iterator, gathers: tuple[Gather, ...]) -> Iterator:
        """A walk with every tile gathered over some dimensions."""
        for stage in gathers:
            walk = self.gather_ahead(walk, stage)
        return walk

    def walk_tiles(self, tiles: Tiles, levels: Levels) -> Iterator[tuple[Owners, Tiles]]:
        """Rings inside rings; their buffers are kept from tile to tile."""
        spares, longer = [], 1
        for dim, gathers in levels:
            spares.append(self.spare(dim, tiles, longer))
            for stage in gathers:
                longer *= self.mesh.extent(stage.dim)
        held: list[Tiles | None] = [None] * len(levels)  # the loop variables of the nest
        yield from self.level(levels, spares, held, tiles, {})

    def level(
        self,
        levels: Levels,
        spares: list[list[Tiles]],
        held: list[Tiles | None],
        tiles: Tiles,
        owner: Owners,
    ) -> Iterator[tuple[Owners, Tiles]]:
        """The loops of a nest from one level inwards; `owner` says where the outer ones are."""
        index = len(owner)
        dim, gathers = levels[index]
        for part, tile in self.gathered(self.ring(tiles, dim, spares[index]), gathers):
            held[index] = tile
            if index + 1 == len(levels):
                yield {**owner, **part}, tile
            else:
                yield from self.level(levels, spares, held, tile, {**owner, **part})

    def spare(self, dim: str, tiles: Tiles, longer: int) -> list[Tiles]:
        """Two sets of receive buffers for a ring, or the one that a ring of two needs."""
        count = min(2, self.mesh.extent(dim) - 1)
        names = self.plan.nest.tensors
        return [
            tuple(
                self.empty(f"{name} arriving along {dim}", x.nbytes * longer)
                for name, x in zip(names, tiles, strict=True)
            )
            for _ in range(count)
        ]

    def ring(self, tiles: Tiles, dim: str, spare: list[Tiles] | None) -> Iterator:
        """Yield (owner, tiles) for every rank, ours first; the next arrive while one is used."""
        size, me = self.mesh.extent(dim), self.place[dim]
        spare = self.spare(dim, tiles, 1) if spare is None else spare
        for step in range(size - 1):
            arriving = spare[step % 2]
            works = self.shift(tiles, arriving, dim)
            yield {dim: (me - step) % size}, tiles
            self.wait(works)
            tiles = arriving
        yield {dim: (me + 1) % size}, tiles

    def shift(self, tiles: Tiles, into: Tiles, dim: str) -> _Works:
        """Start sending tiles to the next rank of the ring and receiving the previous rank's."""
        size, me = self.mesh.extent(dim), self.place[dim]
        op = self.next_op()
        recvs = tuple(Message((me - 1) % size, x.number) for x in into)
        sends = tuple(Message((me + 1) % size, x.number) for x in tiles)
        self.events.append(Batch(op, dim, sends, recvs))
        return _Works((op,), (*into, *tiles))

    def wait(self, works: _Works) -> None:
        """Wait for transfers."""
        self.events += [Wait(op) for op in works.ops]

    def gather(self, tiles: Tiles, stage: Gather) -> Tiles:
        """All tiles along a dimension, joined in global order."""
        parts = self.parts(tiles, stage)
        return self.finish_gather(parts, self.start_gather(tiles, parts, stage), stage)

    def gather_ahead(self, walk: Iterator, stage: Gather) -> Iterator:
        """Gather every tile of a walk; the next one's gather runs while one is used."""
        owner, tiles = next(walk)
        parts = self.parts(tiles, stage)
        works = self.start_gather(tiles, parts, stage)
        gathered = self.finish_gather(parts, works, stage)
        for following, tiles in walk:  # noqa: B020 - as in the module: the name is bound anew
            works = self.start_gather(tiles, parts, stage)
            yield owner, gathered
            owner, gathered = following, self.finish_gather(parts, works, stage)
        yield owner, gathered

    def parts(self, tiles: Tiles, stage: Gather) -> Tiles:
        """Buffers for the parts of all ranks along a dimension."""
        names, size = self.plan.nest.tensors, self.mesh.extent(stage.dim)
        return tuple(
            self.empty(f"{name} from {stage.dim}", x.nbytes * size)
            for name, x in zip(names, tiles, strict=True)
        )

    def start_gather(self, tiles: Tiles, parts: Tiles, stage: Gather) -> _Works:
        """Start one all-gather per tensor."""
        ops = []
        for x, into in zip(tiles, parts, strict=True):
            ops.append(self.next_op())
            self.events.append(Collective(ops[-1], stage.dim, "all-gather", x.number, into.number))
        return _Works(tuple(ops), (*tiles, *parts))

    def finish_gather(self, parts: Tiles, works: _Works, stage: Gather) -> Tiles:
        """Wait for the parts, and copy them into global order."""
        self.wait(works)
        joined = []
        for name, x in zip(self.plan.nest.tensors, parts, strict=True):
            joined.append(self.empty(f"{name} gathered over {stage.dim}", x.nbytes))
            self.events.append(Unpack(x.number, joined[-1].number, "sequence", stage.join))
        return tuple(joined)

    # --- one block ----------------------------------------------------------------------------

    def kernel(
        self, rows: list[_Live], tiles: Tiles, outputs: tuple[_Live, ...], block: Block, merge: bool
    ) -> None:
        """The body on one block; its share is merged into the outputs, or is them."""
        inputs = tuple(x.number for x in (*rows, *tiles))
        numbers = tuple(x.number for x in outputs)
        scratch = scratch_bytes(self.plan, block, merge)
        self.events.append(Kernel(inputs, numbers, block, merge, scratch))

    def share(self, rows: list[_Live], tiles: Tiles, owner: Owners) -> tuple[_Live, _Live]:
        """The result of a tile that is one block of all rows."""
        (block,) = self.blocks(owner)
        out, lse = (
            self.empty(name, nbytes)
            for name, nbytes in zip(("out", "lse"), share_bytes(self.plan, block), strict=True)
        )
        self.kernel(rows, tiles, (out, lse), block, merge=False)
        return out, lse

    def widen(self, out: _Live) -> _Live:
        """In the accumulator's dtype; the same buffer if it is that already."""
        if self.plan.itemsize("inputs") == self.plan.itemsize("accumulator"):
            return out
        return self.cast(out, self.plan.itemsize("accumulator"))

    def narrow(self, out: _Live) -> _Live:
        """In the inputs' dtype; the same buffer if it is that already."""
        if self.plan.itemsize("inputs") == self.plan.itemsize("accumulator"):
            return out
        return self.cast(out, self.plan.itemsize("inputs"))

    def cast(self, out: _Live, itemsize: int) -> _Live:
        """A copy with elements of another size."""
        elements = self.plan.nbytes("out", self.mesh.names) // self.plan.itemsize("inputs")
        other = self.empty("out", elements * itemsize)
        self.events.append(Cast(out.number, other.number))
        return other
