"""Proof that no buffer is touched at a wrong time: one rank alone, in program order.

A transfer is in flight from its start to its wait. Until then what it receives into must not be
touched at all, and what it sends may only be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.check.report import ProofError, label, place
from mercurygen.lower.events import (
    Alloc,
    Batch,
    Cast,
    Collective,
    Cut,
    Derive,
    Fill,
    Free,
    Kernel,
    Merge,
    Pack,
    Put,
    Return,
    Trace,
    Unpack,
    Unweigh,
    Wait,
    Weigh,
)


@dataclass(slots=True)
class _State:
    """Of one buffer; `sends` and `arriving` are operations in flight."""

    life: str = "not allocated yet"
    written: bool = False
    sends: int = 0
    arriving: int | None = None


def check_buffers(trace: Trace) -> None:
    """Prove one rank's use of its buffers.

    Raises:
        ProofError: of check "buffers".
    """
    _Watch(trace).run()


class _Watch:
    """One rank's buffers while its events go by."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.states = [_State() for _ in trace.buffers]
        self.flights: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.given = set(trace.inputs.values())
        self.returned: set[int] = set()
        self.index = 0

    def run(self) -> None:
        """All events."""
        for index, event in enumerate(self.trace.events):
            self.index = index
            match event:
                case Alloc(buffer):
                    self.alloc(buffer)
                case Free(buffer):
                    self.free(buffer)
                case Batch(op, _, sends, recvs):
                    self.start(op, [m.buffer for m in sends], [m.buffer for m in recvs])
                case Collective(op, _, kind, source, target):
                    in_place = source == target and kind in ("all-reduce", "broadcast")
                    if kind == "broadcast":  # who is not the root only receives
                        self.start(op, [], [target])
                    else:
                        self.start(op, [] if in_place else [source], [target], in_place)
                case Wait(op):
                    self.wait(op)
                case Pack(source, target) | Cast(source, target) | Cut(source, target):
                    self.read(source)
                    self.write(target)
                case Unpack(source, target) | Put(source, target):
                    self.read(source)
                    self.write(target)
                case Merge(sources, targets):
                    self.update(sources, targets)
                case Weigh(sources, most, target):
                    self.update((*sources, most), (target,), merge=False)
                case Unweigh(source, most, targets):
                    self.update((source, most), targets, merge=False)
                case Derive(inputs, output):
                    self.update(inputs, (output,), merge=False)
                case Kernel():
                    self.kernel(event)
                case Fill(outputs):
                    for buffer in outputs:
                        self.write(buffer)
                case Return(_, buffer):
                    self.read(buffer)
                    self.returned.add(buffer)

    def kernel(self, event: Kernel) -> None:
        """Inputs are read; outputs are written, when merged into also read."""
        inputs = tuple(operand.buffer for operand in event.inputs)
        outputs = tuple(operand.buffer for operand in event.outputs)
        self.update(inputs, outputs, merge=event.merge)

    def update(self, sources: tuple[int, ...], targets: tuple[int, ...], merge: bool = True):
        """Sources are read; targets are written, when merged into also read."""
        for buffer in sources:
            self.read(buffer)
        for buffer in targets:
            if merge:
                self.read(buffer)
            if buffer in sources:
                self.fail(buffer, "is both read and written by one kernel")
            self.write(buffer)
        if len(set(targets)) < len(targets):
            self.fail(targets[0], "takes two outputs of one kernel")

    def fail(self, buffer: int, what: str) -> None:
        """Say what is wrong with a buffer."""
        where = place(self.trace, self.index)
        message = f"{where}: {label(self.trace, buffer)} {what}"
        raise ProofError("buffers", self.trace.rank, message)

    def state(self, buffer: int) -> _State:
        """Of a buffer that is alive."""
        if not 0 <= buffer < len(self.states):
            self.fail(buffer, "is used")
        state = self.states[buffer]
        if state.life != "alive":
            self.fail(buffer, f"is used, but is {state.life}")
        return state

    def alloc(self, buffer: int) -> None:
        """A buffer comes to life, once."""
        if not 0 <= buffer < len(self.states) or self.states[buffer].life != "not allocated yet":
            self.fail(buffer, "is allocated twice, or is unknown")
        self.states[buffer].life = "alive"
        self.states[buffer].written = buffer in self.given

    def free(self, buffer: int) -> None:
        """A buffer ends; nothing of it is in flight, and it is no result."""
        state = self.state(buffer)
        if state.sends or state.arriving is not None:
            self.fail(buffer, "is freed while a transfer of it is in flight")
        if buffer in self.returned:
            self.fail(buffer, "is freed, but is a result")
        state.life = "freed"

    def read(self, buffer: int) -> None:
        """A buffer that was written, and into which nothing is arriving."""
        state = self.state(buffer)
        if state.arriving is not None:
            self.fail(
                buffer, f"is read before operation {state.arriving}, which fills it, was waited for"
            )
        if not state.written:
            self.fail(buffer, "is read before anything was written to it")

    def writable(self, buffer: int) -> _State:
        """A buffer that no transfer is using, and that is not the caller's."""
        state = self.state(buffer)
        if state.arriving is not None:
            self.fail(buffer, f"is written while operation {state.arriving} is filling it")
        if state.sends:
            self.fail(buffer, "is written while a transfer that sends it is in flight")
        if buffer in self.given:
            self.fail(buffer, "is written, but is the caller's")
        if buffer in self.returned:
            self.fail(buffer, "is written after it was returned")
        return state

    def write(self, buffer: int) -> None:
        """A buffer is filled by something that runs here."""
        self.writable(buffer).written = True

    def start(self, op: int, sends: list[int], recvs: list[int], in_place: bool = False) -> None:
        """A transfer takes off; in place, what it receives into is also what it sends."""
        for buffer in recvs if in_place else ():
            self.read(buffer)
        if op in self.flights:
            where = place(self.trace, self.index)
            message = f"{where}: operation {op} is started while it is in flight"
            raise ProofError("buffers", self.trace.rank, message)
        for buffer in sends:
            self.read(buffer)
        for buffer in sends:
            self.states[buffer].sends += 1
        for buffer in recvs:
            self.writable(buffer).arriving = op
        self.flights[op] = (tuple(sends), tuple(recvs))

    def wait(self, op: int) -> None:
        """A transfer is over."""
        if op not in self.flights:
            where = place(self.trace, self.index)
            message = f"{where}: operation {op} is not in flight"
            raise ProofError("buffers", self.trace.rank, message)
        sends, recvs = self.flights.pop(op)
        for buffer in sends:
            self.states[buffer].sends -= 1
        for buffer in recvs:
            self.states[buffer].arriving = None
            self.states[buffer].written = True
