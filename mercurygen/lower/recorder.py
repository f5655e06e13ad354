"""Events of one rank, and the buffers that they are about.

A buffer lives as long as a Python variable refers to it, as in the emitted module, so that what
is alive at any moment, and with it the peak, is what a run of the module shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import (
    Alloc,
    Batch,
    Buffer,
    Cast,
    Collective,
    CollectiveKind,
    Cut,
    Cuts,
    Event,
    Free,
    Message,
    Wait,
)
from mercurygen.lower.plan import Plan

Limits = dict[str, tuple[int, ...]]  # per axis the atoms that are worked on


class Live:
    """A buffer while something refers to it."""

    __slots__ = ("number", "nbytes", "_events")

    def __init__(self, number: int, nbytes: int, events: list[Event]) -> None:
        self.number, self.nbytes, self._events = number, nbytes, events

    def __del__(self) -> None:
        self._events.append(Free(self.number))


class Tile(NamedTuple):
    """A part of a tensor, in a buffer.

    Attributes:
        live: the buffer.
        tensor: whose part.
        region: which part.
        dtype: "inputs", "accumulator", "integer", or a dtype by name.
    """

    live: Live
    tensor: Tensor
    region: Region
    dtype: str

    def atoms(self, axis: str) -> tuple[int, ...]:
        """Its atoms along an axis."""
        return self.region[self.tensor.axes.index(axis)]


Tiles = tuple[Tile, ...]


class Works(NamedTuple):
    """Transfers on their way: as torch's do, they hold on to their buffers."""

    ops: tuple[int, ...]
    buffers: Tiles


class Recorder:
    """One rank's events so far."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.program, self.atoms, self.rank = plan, plan.program, plan.atoms, rank
        self.mesh = plan.program.mesh
        self.place = self.mesh.coordinate(rank)
        self.striped = self.atoms.striped
        self.events: list[Event] = []
        self.buffers: list[Buffer] = []
        self.regions: dict[int, Region] = {}  # of what is filled
        self.staying: dict[str, Tile] = {}  # results that those of the next tiles are merged into
        self.ops = 0

    def empty(self, label: str, nbytes: int) -> Live:
        """A new buffer."""
        number = len(self.buffers)
        self.buffers.append(Buffer(label, nbytes))
        self.events.append(Alloc(number))
        return Live(number, nbytes, self.events)

    def tile(self, label: str, tensor: Tensor, region: Region, dtype: str | None = None) -> Tile:
        """A new buffer for a part of a tensor."""
        dtype = dtype or tensor.dtype
        live = self.empty(label, self.plan.region_bytes(tensor, region, dtype))
        return Tile(live, tensor, region, dtype)

    def like(self, label: str, tile: Tile) -> Tile:
        """A new buffer for a part of the same size."""
        return tile._replace(live=self.empty(label, self.nbytes(tile)))

    def nbytes(self, tile: Tile) -> int:
        """Bytes of the part; its buffer may be longer."""
        return self.plan.region_bytes(tile.tensor, tile.region, tile.dtype)

    def next_op(self) -> int:
        """A number for a transfer."""
        self.ops += 1
        return self.ops

    # --- transfers ----------------------------------------------------------------------------

    def batch(
        self, dim: str, sends: Iterable[tuple[int, Tile]], recvs: Iterable[tuple[int, Tile]]
    ) -> Works:
        """Start point-to-point transfers together; nothing if there are none."""
        sends, recvs = list(sends), list(recvs)
        if not sends and not recvs:
            return Works((), ())
        op = self.next_op()
        out, into = (tuple(self.message(*pair) for pair in pairs) for pairs in (sends, recvs))
        self.events.append(Batch(op, dim, out, into))
        return Works((op,), tuple(tile for _, tile in (*recvs, *sends)))

    def message(self, peer: int, tile: Tile) -> Message:
        """One of them."""
        nbytes = self.nbytes(tile)
        return Message(peer, tile.live.number, None if nbytes == tile.live.nbytes else nbytes)

    def collective(
        self, kind: CollectiveKind, dim: str, source: Tile, target: Tile, **more: object
    ) -> Works:
        """Start a collective."""
        op = self.next_op()
        numbers = source.live.number, target.live.number
        self.events.append(Collective(op, dim, kind, *numbers, **more))
        return Works((op,), (source, target))

    def wait(self, works: Works) -> None:
        """Wait for transfers."""
        self.events += [Wait(op) for op in works.ops]

    # --- copies -------------------------------------------------------------------------------

    def cast(self, tile: Tile, dtype: str) -> Tile:
        """In another dtype; the same buffer if an element is as long."""
        if self.plan.itemsize(tile.dtype) == self.plan.itemsize(dtype):
            return tile._replace(dtype=dtype)
        other = self.tile(tile.tensor.name, tile.tensor, tile.region, dtype)
        self.events.append(Cast(tile.live.number, other.live.number))
        return other

    def dense(self, tile: Tile, region: Region | None = None) -> Tile:
        """A dense copy of a part; the tile itself if it is all of its buffer."""
        if region in (None, tile.region):
            if tile.live.nbytes == self.nbytes(tile):
                return tile
            region = tile.region
        part = self.tile(f"a part of {tile.tensor.name}", tile.tensor, region, tile.dtype)
        cuts = self.cuts_of(tile.tensor, tile.region, region)
        atoms, length = dict(zip(tile.tensor.axes, tile.region, strict=True)), self.atoms.length
        found = tuple(
            (axis, length(axis, atoms[axis][:start]), length(axis, atoms[axis][:stop]))
            for axis, start, stop in cuts
        )
        self.events.append(Cut(tile.live.number, part.live.number, cuts, found))
        return part

    def cuts_of(self, tensor: Tensor, region: Region, part: Region) -> Cuts:
        """Where a part of a tensor lies in a region of it; raises as the function below."""
        return cuts_of(tensor.axes, region, part, self.striped)


@lru_cache(maxsize=65536)
def cuts_of(axes: tuple[str, ...], region: Region, part: Region, striped: tuple[str, ...]) -> Cuts:
    """Where a part lies in a region, along every axis of which it is not all.

    Of several stripes the tokens interleave: along those axes there are no parts in one piece.

    Raises:
        NotARun: the part is no run of the region along some axis.
    """
    cuts = []
    for axis, have, want in zip(axes, region, part, strict=True):
        if have != want:
            start = have.index(want[0]) if want and want[0] in have else 0
            if axis in striped or have[start : start + len(want)] != want:
                raise NotARun(axis)
            cuts.append((axis, start, start + len(want)))
    return tuple(cuts)


class NotARun(Exception):
    """A part that does not lie in one piece in what it is to be cut from."""
