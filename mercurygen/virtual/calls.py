"""What a rank called, beside what the plan's trace says that it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mercurygen.lower.events import Batch, Collective, Kernel, Trace
from mercurygen.lower.events import Wait as Waits
from mercurygen.virtual.report import VirtualError, Where

KERNEL = "kernel"  # a block was computed


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that was started.

    Attributes:
        kind: "batch", or that of a collective.
        dim: the mesh dimension.
        sends: of a batch, per message the peer's index along the dimension, and bytes.
        recvs: likewise.
        source: bytes that go into a collective.
        target: bytes that come out of it.
    """

    kind: str
    dim: str
    sends: tuple[tuple[int, int], ...] = ()
    recvs: tuple[tuple[int, int], ...] = ()
    source: int = 0
    target: int = 0

    def __str__(self) -> str:
        if self.kind != "batch":
            return f"{self.kind} along {self.dim}, {self.source} bytes in, {self.target} out"
        ways = (("to", self.sends), ("from", self.recvs))
        words = [f"{size} bytes {way} {peer}" for way, each in ways for peer, size in each]
        return f"batch along {self.dim}: {', '.join(words) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation, by its number, that was waited for."""

    op: int

    def __str__(self) -> str:
        return f"wait for operation {self.op}"


Step = Call | Wait | str


def planned(trace: Trace) -> tuple[Step, ...]:
    """What a trace starts, waits for and computes, operations numbered from 1."""
    steps: list[Step] = []
    numbers: dict[int, int] = {}
    size = [buffer.nbytes for buffer in trace.buffers]
    for event in trace.events:
        match event:
            case Batch(op, dim, sends, recvs):
                numbers[op] = len(numbers) + 1
                ways = (tuple((m.peer, size[m.buffer]) for m in way) for way in (sends, recvs))
                steps.append(Call("batch", dim, *ways))
            case Collective(op, dim, kind, source, target):
                numbers[op] = len(numbers) + 1
                steps.append(Call(kind, dim, source=size[source], target=size[target]))
            case Waits(op):
                steps.append(Wait(numbers[op]))
            case Kernel():
                steps.append(KERNEL)
    return tuple(steps)


def compare(rank: int, called: Sequence[tuple[Step, Where]], trace: Trace, *, waits: bool) -> None:
    """Compare what a rank called with its trace.

    Args:
        rank: the rank.
        called: in order, with the places.
        trace: of the plan for the same sizes.
        waits: also where it waits and computes, not only what it starts.

    Raises:
        VirtualError: "calls", at the first difference.
    """
    wanted, where = planned(trace), Where()
    if not waits:
        called = [each for each in called if isinstance(each[0], Call)]
        wanted = tuple(step for step in wanted if isinstance(step, Call))
    elif not any(step == KERNEL for step, _ in called):  # `_block_forward` has another name
        wanted = tuple(step for step in wanted if step != KERNEL)
    started = 0
    for (step, where), want in zip(called, wanted, strict=False):
        started += isinstance(step, Call)
        if step != want:
            number = f"operation {started}: " if isinstance(step, Call) else ""
            raise VirtualError("calls", rank, f"{number}{step}; the plan has: {want}", where)
    if len(called) > len(wanted):
        step, where = called[len(wanted)]
        raise VirtualError("calls", rank, f"{step}; the plan has ended there", where)
    if len(called) < len(wanted):
        message = f"it ends where the plan goes on with: {wanted[len(called)]}"
        raise VirtualError("calls", rank, message, where)
