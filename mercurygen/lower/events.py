"""What one rank does, event by event. Buffers are numbers; `Trace.buffers` says what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercurygen.ir.layout import Interleaving
from mercurygen.lower.visible import Block


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory.

    Attributes:
        label: what it holds, for people.
        nbytes: its size.
    """

    label: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Alloc:
    """A buffer comes to life."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Free:
    """A buffer's last reference is gone."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Message:
    """One operation of a batch: the peer's index along the dimension, and the buffer."""

    peer: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Point-to-point operations that start together, on the communicator of `dim`."""

    op: int
    dim: str
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of all ranks along `dim`.

    Attributes:
        op: number, for `Wait`.
        dim: the mesh dimension.
        kind: what it does; an all-to-all sends part i of `source` to rank i, an all-gather all
            of it to everyone. `target` has one part from each rank, in their order.
    """

    op: int
    dim: str
    kind: Literal["all-to-all", "all-gather"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The operation is over: received buffers may be read, sent ones written."""

    op: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A copy into one part per rank along a dimension: by heads, or by the tokens they own."""

    source: int
    target: int
    by: Literal["heads", "sequence"]
    join: Interleaving


@dataclass(frozen=True, slots=True)
class Unpack:
    """A copy of the parts from the ranks into one tensor: tokens interleaved, or heads in a row."""

    source: int
    target: int
    by: Literal["heads", "sequence"]
    join: Interleaving


@dataclass(frozen=True, slots=True)
class Kernel:
    """The body on one block.

    Attributes:
        inputs: buffers of the rows' tensor and of the tile's, in the operator's order.
        outputs: buffers that the block's share goes to.
        block: which part of the tile.
        merge: whether the share is merged into the outputs, or is them.
        scratch: bytes alive beside the outputs at its worst moment.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    block: Block
    merge: bool
    scratch: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Outputs become what merges to nothing: zeros, and -inf."""

    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A copy in another dtype."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Return:
    """The result, by name."""

    name: str
    buffer: int


Event = Alloc | Free | Batch | Collective | Wait | Pack | Unpack | Kernel | Fill | Cast | Return


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank does, in order.

    Attributes:
        rank: whose.
        events: in program order.
        buffers: by number.
        inputs: name of the tensor of every buffer that the caller gives.
    """

    rank: int
    events: tuple[Event, ...]
    buffers: tuple[Buffer, ...]
    inputs: dict[str, int]

    def peak(self) -> int:
        """Most bytes alive at one time, the caller's inputs and the results included."""
        alive = most = 0
        for event in self.events:
            match event:
                case Alloc(buffer):
                    alive += self.buffers[buffer].nbytes
                case Free(buffer):
                    alive -= self.buffers[buffer].nbytes
                case Kernel(scratch=scratch):
                    most = max(most, alive + scratch)
            most = max(most, alive)
        return most
