"""What one rank does, event by event. Buffers are numbers; `Trace.buffers` says what they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mercurygen.ir.atoms import Region
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


Cuts: TypeAlias = tuple[tuple[str, int, int], ...]  # (axis, start, stop), in atoms of a buffer


@dataclass(frozen=True, slots=True)
class Message:
    """One operation of a batch.

    Attributes:
        peer: its index along the dimension.
        buffer: that is sent, or received into.
        nbytes: that move; None: the whole buffer. Fewer: what stands at its front.
    """

    peer: int
    buffer: int
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Point-to-point operations that start together, on the communicator of `dim`."""

    op: int
    dim: str
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


CollectiveKind: TypeAlias = Literal[
    "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "broadcast"
]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of all ranks along `dim`.

    Attributes:
        op: number, for `Wait`.
        dim: the mesh dimension.
        kind: what it does; an all-to-all sends part i of `source` to rank i, an all-gather all
            of it to everyone: `target` then has one part from each rank, in their order. An
            all-reduce leaves the sum (or the maximum) of all sources in every target, a
            reduce-scatter the sum of parts i on rank i, a broadcast the root's source.
    """

    op: int
    dim: str
    kind: CollectiveKind
    source: int
    target: int
    root: int = 0
    reduce: Literal["sum", "max"] = "sum"


@dataclass(frozen=True, slots=True)
class Wait:
    """The operation is over: received buffers may be read, sent ones written."""

    op: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A copy into one part per rank along a dimension: what that rank owns of an axis.

    Attributes:
        source: the buffer.
        target: with one part after the other.
        axis: that is dealt.
        join: how the ranks' parts interleave along it.
        part: (i, n): only the i-th of n equal runs of every rank's part.
    """

    source: int
    target: int
    axis: str
    join: Interleaving
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Unpack:
    """A copy of the parts from the ranks into one tensor, interleaved along an axis.

    Attributes:
        source: with one part after the other.
        target: the buffer.
        axis: along which they join.
        join: how the ranks' parts interleave along it.
        part: (i, n): they are the i-th of n equal runs of every rank's part.
        into: the target is an output that is put together part by part: what it has elsewhere,
            along this axis or others, stays.
    """

    source: int
    target: int
    axis: str
    join: Interleaving
    part: tuple[int, int] = (0, 1)
    into: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """A copy of a part of a buffer, dense.

    Attributes:
        source, target: buffers.
        cuts: the part, in atoms of the source; of an axis left out, all.
        indices: the same in indices, of a part of a tile.
    """

    source: int
    target: int
    cuts: Cuts
    indices: Cuts = ()


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer that the body reads or writes.

    Attributes:
        buffer: its number.
        cuts: the part that is meant, in atoms of the buffer; of an axis left out, all.
    """

    buffer: int
    cuts: Cuts = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """The body on one block.

    Attributes:
        inputs: in the operator's order.
        outputs: that the block's share goes to.
        block: which part of the operands, along the axes of the mask; None: all of them.
        merge: whether the share is merged into the outputs, or is them.
        scratch: bytes alive beside the outputs at its worst moment.
        extents: per axis of the program, how many indices the body is given.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    block: Block | None
    merge: bool
    scratch: int
    extents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Partial results are merged into others, in place.

    Attributes:
        sources: of outputs that belong together.
        targets: likewise; what the sources hold is merged in, along the first's axes.
        cuts: the part of the targets that the sources are of.
        part: of sources that hold one part from every rank, which of them.
        scratch: bytes alive beside both.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    cuts: Cuts = ()
    part: int | None = None
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class Weigh:
    """A softmax's partial results in the scale of the largest lse: they can then be added.

    Attributes:
        sources: out and lse.
        most: the largest lse of all ranks.
        target: out * w and w side by side, with w = exp(lse - most).
    """

    sources: tuple[int, int]
    most: int
    target: int


@dataclass(frozen=True, slots=True)
class Unweigh:
    """What `Weigh` made, added over the ranks, as out and lse again."""

    source: int
    most: int
    targets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Put:
    """A copy into a part of a buffer."""

    source: int
    target: int
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class Derive:
    """A derived tensor is made of inputs, where their rows live."""

    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The body comes to the next tile; nothing happens yet.

    Attributes:
        owner: coordinates of the tile's owner along what is walked.
        part: of the tile loops, (axis, which part, of how many).
    """

    owner: tuple[tuple[str, int], ...]
    part: tuple[tuple[str, int, int], ...]


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


Event = (
    Alloc
    | Free
    | Batch
    | Collective
    | Wait
    | Pack
    | Unpack
    | Cut
    | Put
    | Kernel
    | Merge
    | Weigh
    | Unweigh
    | Derive
    | Turn
    | Fill
    | Cast
    | Return
)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank does, in order.

    Attributes:
        rank: whose.
        events: in program order.
        buffers: by number.
        inputs: name of the tensor of every buffer that the caller gives.
        regions: of the buffers that are filled with what merges to nothing, what they are of.
    """

    rank: int
    events: tuple[Event, ...]
    buffers: tuple[Buffer, ...]
    inputs: dict[str, int]
    regions: dict[int, Region] = field(default_factory=dict)

    def peak(self) -> int:
        """Most bytes alive at one time, the caller's inputs and the results included."""
        alive = most = 0
        for event in self.events:
            match event:
                case Alloc(buffer):
                    alive += self.buffers[buffer].nbytes
                case Free(buffer):
                    alive -= self.buffers[buffer].nbytes
                case Kernel(scratch=scratch) | Merge(scratch=scratch):
                    most = max(most, alive + scratch)
            most = max(most, alive)
        return most
