"""What a rank called, beside what the plan's trace says that it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mercurygen.lower.events import Batch, Collective, Kernel, Message, Trace
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
        how: what a reduction does, or a broadcast's root: "sum", "max", "from 0".
    """

    kind: str
    dim: str
    sends: tuple[tuple[int, int], ...] = ()
    recvs: tuple[tuple[int, int], ...] = ()
    source: int = 0
    target: int = 0
    how: str = ""

    def __str__(self) -> str:
        if self.kind != "batch":
            how = f" ({self.how})" if self.how else ""
            sizes = f"{self.source} bytes in, {self.target} out"
            return f"{self.kind}{how} along {self.dim}, {sizes}"
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

    def messages(way: tuple[Message, ...]) -> tuple[tuple[int, int], ...]:
        """Peers and bytes; of some messages only the front of a buffer moves."""
        return tuple((m.peer, size[m.buffer] if m.nbytes is None else m.nbytes) for m in way)

    for event in trace.events:
        match event:
            case Batch(op, dim, sends, recvs):
                numbers[op] = len(numbers) + 1
                steps.append(Call("batch", dim, messages(sends), messages(recvs)))
            case Collective(op, dim, kind, source, target):
                numbers[op] = len(numbers) + 1
                sizes = {"source": size[source], "target": size[target]}
                steps.append(Call(kind, dim, **sizes, how=_how(event)))
            case Waits(op):
                steps.append(Wait(numbers[op]))
            case Kernel():
                steps.append(KERNEL)
    return tuple(steps)


def _how(event: Collective) -> str:
    """What a collective does to what it moves, beside its kind."""
    if event.kind == "broadcast":
        return f"from {event.root}"
    return event.reduce if event.kind in ("all-reduce", "reduce-scatter") else ""


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
