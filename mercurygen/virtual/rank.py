"""One virtual rank: its operations, its buffers in flight, and what it has called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mercurygen.virtual.calls import KERNEL, Call, Wait
from mercurygen.virtual.memory import Flight, extent, poison, raw, touches
from mercurygen.virtual.network import Communicator, Message, Network, Op
from mercurygen.virtual.report import Check, Where
from mercurygen.virtual.stage import COMPREHENSIONS, Stage, Stop

if TYPE_CHECKING:
    from torch import Tensor

MOST_STEPS, STEPS_A_RANK = 20_000, 4_000  # operations of torch in one call


class Rank:
    """What one rank does and holds.

    Args:
        number: the rank.
        stage: that it plays on.
        network: that it talks on.

    Attributes:
        flights: its buffers in flight.
        calls: what it has started and waited for, in order.
        quiet: above 0 while the double itself uses tensors.
        low: whether to report what is accumulated in 16 bits.
        split_handles: whether a batch has a handle for each message (gloo), not one (NCCL).
    """

    def __init__(self, number: int, stage: Stage, network: Network) -> None:
        self.number, self.stage, self.network = number, stage, network
        self.split_handles = False
        self.reset()

    def reset(self, *, low: bool = False, split_handles: bool = False) -> None:
        """Forget what was called."""
        self.flights: list[Flight] = []
        self.calls: list[tuple[Call | Wait | str, Where]] = []
        self.quiet = self.steps = self.started = 0
        self.low, self.split_handles = low, split_handles

    def tick(self) -> None:
        """Count a step: a rank that makes too many never ends."""
        self.stage.check()
        self.steps += 1
        if self.steps > MOST_STEPS + STEPS_A_RANK * self.stage.count:
            raise self.fail("endless", f"it does not end: {self.steps} operations in one call")

    def fail(self, check: Check, message: str, where: Where | None = None) -> Stop:
        """Note what is wrong here; the caller raises what this returns."""
        if self.started and where is None:
            message += f"; operations so far: {self.started}"
        return self.stage.fail(check, self.number, message, where)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """The double's own use of tensors is no use by the module."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    # --- transfers ----------------------------------------------------------------------------

    def buffer(self, tensor: Any, what: str) -> str:
        """The name of a buffer, which must be contiguous."""
        if not hasattr(tensor, "data_ptr"):
            raise self.fail("misuse", f"{what}: {type(tensor).__name__} is no tensor")
        name = self.named(tensor)
        if not tensor.is_contiguous():
            raise self.fail(
                "not-contiguous",
                f"the buffer `{name}` of {what} is not contiguous: {list(tensor.shape)} with "
                f"strides {list(tensor.stride())}",
            )
        return name

    def named(self, tensor: Tensor) -> str:
        """The variable of the module that holds a tensor, or a part of one."""
        place = tensor.data_ptr(), tensor.nbytes
        for frame in self.stage.frames():
            if frame.f_code.co_name in COMPREHENSIONS:
                continue  # its variable says less than that of the function around it
            for name, value in frame.f_locals.items():
                if isinstance(value, list | tuple):
                    for i, each in enumerate(value):
                        if each is tensor or _same(each, place):
                            return f"{name}[{i}]"
                elif _same(value, place):
                    return name
        return f"a tensor {list(tensor.shape)}"

    def start(self, op: Op, sent: Sequence[tuple], received: Sequence[tuple]) -> list[Flight]:
        """Issue an operation on (tensor, name) pairs.

        Returns:
            The buffers in flight: those sent, then those received.
        """
        flights = [self._depart("send", tensor, name, op.where) for tensor, name in sent]
        self.flights += flights
        for tensor, name in received:
            flight = self._depart("receive", tensor, name, op.where)
            flights.append(flight)
            self.flights.append(flight)
            poison(tensor)
            flight.copy = tensor.clone()
        self.network.issue(op)
        return flights

    def _depart(self, way: Any, tensor: Tensor, name: str, where: Where) -> Flight:
        for other in self.flights:
            if (way == "receive" or other.way == "receive") and touches(tensor, other):
                busy = "being received" if other.way == "receive" else "being sent"
                check, verb = "in-flight-read", "is sent"
                if way == "receive":
                    check, verb = "in-flight-write", "is to receive"
                raise self.fail(
                    check,
                    f"`{name}` {verb}, but the buffer `{other.name}` there is {busy} (since "
                    f"{other.where}) and was not waited for",
                )
        return Flight(way, *extent(tensor), tensor, tensor.clone(), name, where)

    def land(self, flight: Flight, data: Tensor | None) -> None:
        """A wait: what was sent is unchanged, and what was received is there."""
        if flight not in self.flights:
            return
        self.flights.remove(flight)
        if not bool((raw(flight.tensor) == raw(flight.copy)).all()):
            raise self.fail(
                "in-flight-write",
                f"the buffer `{flight.name}` was written while it was being "
                f"{'received' if flight.way == 'receive' else 'sent'} (from {flight.where} on)",
            )
        if data is not None:
            raw(flight.tensor).copy_(raw(data))

    def begin(self, comm: Communicator, kind: str, **facts: Any) -> Op:
        """A new operation, counted."""
        if self.number not in comm.ranks:
            raise self.fail("misuse", f"a {kind} on {self.network.named(comm)}, not a member of it")
        self.tick()
        self.started += 1
        return Op(self.number, self.started, comm, kind, self.stage.place(), **facts)

    def record(self, op: Op, sizes: tuple[int, int], how: str = "") -> None:
        """Note what was started, bytes in and out and how, for the comparison with the plan."""
        index, dim = op.comm.ranks.index, self.network.named(op.comm)
        sends, recvs = (
            tuple((index(m.peer), m.facts[0]) for m in messages)
            for messages in (op.sends, op.recvs)
        )
        self.calls.append((Call(op.kind, dim, sends, recvs, *sizes, how), op.where))

    def waited(self, op: Op) -> None:
        """Note a wait that finished an operation."""
        self.calls.append((Wait(op.number), self.stage.place()))

    def kernel(self) -> None:
        """Note a block."""
        self.calls.append((KERNEL, self.stage.place()))

    def close(self) -> None:
        """The end of a call: nothing is in flight any more."""
        if self.flights:
            flight = self.flights[0]
            way = "receive into" if flight.way == "receive" else "send of"
            raise self.fail(
                "not-waited",
                f"the call ends, and nobody waited for the {way} `{flight.name}` that started at "
                f"{flight.where}; {len(self.flights)} buffers in flight",
                flight.where,
            )


def messages(op: Op) -> tuple[Message, ...]:
    """Of a batch: sends, then receives."""
    return op.sends + op.recvs


def _same(value: Any, place: tuple[int, int]) -> bool:
    return hasattr(value, "data_ptr") and (value.data_ptr(), value.nbytes) == place
