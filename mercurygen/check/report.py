"""What a proof says: its failure, in words, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercurygen.lower.events import (
    Alloc,
    Batch,
    Cast,
    Collective,
    Cut,
    Event,
    Fill,
    Free,
    Kernel,
    Merge,
    Pack,
    Put,
    Return,
    Trace,
    Unpack,
    Wait,
)

Check = Literal["lineage", "order", "buffers", "memory"]


class ProofError(Exception):
    """A plan that is not right: a bug of mercurygen, not of its user.

    Args:
        check: which of the proofs fails.
        rank: where.
        message: what is wrong, with the event and the buffer.
    """

    def __init__(self, check: Check, rank: int, message: str) -> None:
        super().__init__(f"{check}: rank {rank}: {message}")
        self.check, self.rank, self.message = check, rank, message


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of every rank."""

    values: tuple[int, ...]

    @property
    def mean(self) -> float:
        """The mean over the ranks."""
        return sum(self.values) / len(self.values)

    @property
    def most(self) -> int:
        """The largest: the busiest rank's."""
        return max(self.values)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves in one call.

    Attributes:
        sent: per mesh dimension the bytes that each rank sends along it.
        crossing: per topology level the bytes that each rank sends over its link.
        steps: per mesh dimension the operations that a rank starts: batches and collectives.
    """

    sent: dict[str, Spread]
    crossing: dict[str, Spread]
    steps: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """What was proved of a plan, and its exact figures.

    Attributes:
        ranks: that were played.
        tiles: of the outputs (chunk of rows and of heads), each complete.
        contributions: pairs of row and column chunks, once for each chunk of heads.
        messages: point to point, each sent and received.
        collectives: each joined by all its members.
        peak: most bytes alive at one time.
        traffic: what moves.
        with_lse: the same of the call that hands out the log-sum-exp; None in itself.
        parts: of a proof level by level, the smaller meshes that were played: tiles and
            contributions are theirs; none if all ranks were played.
    """

    ranks: int
    tiles: int
    contributions: int
    messages: int
    collectives: int
    peak: Spread
    traffic: Traffic
    with_lse: Report | None = None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The proof on a smaller mesh.

    Attributes:
        sizes: its extents, outermost first.
        report: of the proof.
    """

    sizes: tuple[int, ...]
    report: Report


def label(trace: Trace, buffer: int) -> str:
    """A buffer, in words."""
    if 0 <= buffer < len(trace.buffers):
        return f"buffer {buffer} `{trace.buffers[buffer].label}`"
    return f"buffer {buffer} (there is none)"


def span(bounds: tuple[int, int]) -> str:
    """A half-open range, in words."""
    return f"{bounds[0]} to {bounds[1] - 1}"


def place(trace: Trace, index: int) -> str:
    """An event and its number, in words."""
    return f"event {index} ({_words(trace, trace.events[index])})"


def _words(trace: Trace, event: Event) -> str:
    match event:
        case Alloc(buffer):
            return f"a new {label(trace, buffer)}"
        case Free(buffer):
            return f"the end of {label(trace, buffer)}"
        case Batch(op, dim):
            return f"batch {op} along {dim}"
        case Collective(op, dim, kind, source):
            return f"{kind} {op} along {dim} of {label(trace, source)}"
        case Wait(op):
            return f"wait for operation {op}"
        case Pack(source) | Unpack(source) | Cast(source) | Cut(source) | Put(source):
            return f"{type(event).__name__.lower()} of {label(trace, source)}"
        case Kernel(block=None, merge=merge):
            return "the body" + (", merged" if merge else "")
        case Kernel(block=block, merge=merge):
            kind = "masked block" if block.masked else "block"
            words = f"{kind} of rows {span(block.rows)}, columns {span(block.cols)}"
            return words + (", merged" if merge else "")
        case Merge(sources):
            return f"merge of {label(trace, sources[0])}"
        case Fill():
            return "fill"
        case Return(name):
            return f"return of {name}"
    return type(event).__name__
