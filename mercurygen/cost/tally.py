"""Sums over a plan as it goes on: bytes alive, seconds, and bytes sent, of all ranks at once.

Ranks do the same with buffers of the same size, except where each gets only what it reads: then a
number for every class of ranks that do the same is kept beside what all have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import add, sub

from mercurygen.cost.kernels import NOTHING, Kernels, Spent, added, seconds
from mercurygen.cost.links import Network, regime
from mercurygen.cost.report import Traffic
from mercurygen.ir.mesh import Mesh

NEVER = -(2**62)  # bytes alive on ranks that are not there: no peak


class Tally:
    """The state of all ranks in lock step.

    Attributes:
        alive: bytes alive on every rank, beside `vary`.
        vary: bytes alive on each class beside that, or None where there are none.
        peak: most bytes alive so far on any rank.
        now: seconds so far.
        host: seconds until the host has launched all that has been.
    """

    def __init__(self, network: Network, mesh: Mesh, kernels: Kernels, classes: int) -> None:
        self.network, self.mesh, self.kernels, self.classes = network, mesh, kernels, classes
        self.launch = network.topology.gpu.launch_latency
        self.alive = self.peak = 0
        self.vary: list[int] | None = None
        self.gpu = network.topology.gpu
        self.now = self.host = self.transfers = 0.0
        self.slowing: dict[float, tuple[float, float]] = {}  # by end: begin, share of the SMs
        self.copied: Spent = NOTHING
        self.operations = 0
        self.batches: list[int] | None = None  # of each class, beside `operations`
        self.sent: Counter[tuple[str, str, int]] = Counter()  # (kind, dimension, distance)
        self.sent_each: dict[tuple[str, int], list[int]] = {}  # (dimension, distance): classes
        self.last: dict[str, float] = {}  # per communicator: one operation after the other
        self.free: dict[int, float] = {}  # per level

    # --- memory -----------------------------------------------------------------------------

    def up(self, nbytes: int) -> None:
        """A buffer comes to life."""
        self.alive += nbytes
        self.top()

    def down(self, nbytes: int) -> None:
        """A buffer is gone."""
        self.alive -= nbytes

    def top(self, more: int = 0) -> None:
        """Look whether this is the most, with some more bytes for a moment."""
        height = self.alive + more
        if self.vary is not None:
            height += max(self.vary)
        if height > self.peak:
            self.peak = height

    def up_each(self, sizes: Sequence[int], look: bool = True) -> None:
        """A buffer of its own size on every class."""
        vary = self.vary
        if vary is None:
            vary = [0] * self.classes
        self.vary = list(map(add, vary, sizes))
        if look:
            self.top()

    def down_each(self, sizes: Sequence[int]) -> None:
        """It is gone."""
        self.vary = list(map(sub, self.vary, sizes))

    def top_each(self, more: Sequence[int]) -> None:
        """Look, with some more bytes for a moment on every class."""
        vary = self.vary
        most = max(more) if vary is None else max(map(add, vary, more))
        if self.alive + most > self.peak:
            self.peak = self.alive + most

    # --- time -------------------------------------------------------------------------------

    def copy(self, nbytes: int) -> None:
        """An element-wise kernel."""
        self.spend(self.kernels.copy(nbytes))

    def spend(self, spent: Spent) -> None:
        """Copies of every rank."""
        self.copied = added(self.copied, spent)
        self.run(seconds(spent), spent[3])

    def run(self, spent: float, host: float) -> None:
        """Kernels of every rank, which are over no sooner than the host has launched them."""
        self.host += host
        self.now = max(self.now + spent, self.host)

    def start(
        self, kind: str, dim: str, nbytes: int, distance: int = 1, messages: int = 1
    ) -> float:
        """Begin a transfer of all ranks; when it will be over."""
        self.operations += 1
        self.host += messages * self.gpu.host_transfer
        self.sent[kind, dim, distance] += nbytes
        return self.begin(kind, dim, nbytes, distance)

    def begin(self, kind: str, dim: str, nbytes: int, distance: int = 1) -> float:
        """When a transfer that begins now is over: after the one before it on its communicator."""
        price = self.network.price(kind, self.mesh, dim, distance)
        begin = max(self.now, self.host, self.last.get(dim, 0.0)) + self.launch
        free = self.free
        for level, _ in price.seconds:
            if free.get(level, 0.0) > begin:
                begin = free[level]
        end = begin
        latency, slower = regime(price, nbytes)
        nbytes *= slower
        for level, per_byte in price.seconds:
            free[level] = over = begin + nbytes * per_byte
            if over > end:
                end = over
        end += latency
        self.last[dim] = end
        self.transfers += end - begin
        if price.share:
            self.slowing[end] = begin, price.share
        return end

    def start_each(self, dim: str, sizes: Sequence[int], into: Sequence[int], distance: int):
        """Begin a batch in which every class sends its own number of bytes, or nothing at all."""
        total = self.sent_each.get((dim, distance))
        if total is None:
            total = [0] * self.classes
        self.sent_each[dim, distance] = [a + b for a, b in zip(total, sizes, strict=True)]
        if self.batches is None:
            self.batches = [0] * self.classes
        for index, pair in enumerate(zip(sizes, into, strict=True)):
            if pair != (0, 0):
                self.batches[index] += 1
        most = max(sizes)
        self.host += 2 * self.gpu.host_transfer
        return self.begin("shift", dim, most, distance) if most else self.now

    def wait(self, end: float) -> None:
        """A transfer must be over; it has slowed what was computed meanwhile."""
        slowing = self.slowing.pop(end, None)
        if slowing is not None:
            begin, share = slowing
            self.now += share * max(0.0, min(end, self.now) - begin)
        if end > self.now:
            self.now = end

    # --- bytes sent -------------------------------------------------------------------------

    def most_operations(self) -> int:
        """Batches and collectives of the rank that has most."""
        return self.operations + (max(self.batches) if self.batches else 0)

    def traffic(self, class_of: Sequence[int]) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
        """Per level that the group spans, and per dimension; by the class of every rank."""
        network = self.network
        size = network.size
        levels: dict[int, list[int]] = {}
        dims: dict[str, list[int]] = {}
        for (kind, dim, distance), nbytes in self.sent.items():
            for level, shares in network.spread(kind, self.mesh, dim, distance):
                more = [nbytes * share for share in shares]
                _add(levels, level, more)
                _add(dims, dim, more)
        for (dim, distance), each in self.sent_each.items():
            whole = [each[index] * size * size for index in class_of]
            for level, shares in network.spread("shift", self.mesh, dim, distance):
                more = [n if share else 0 for n, share in zip(whole, shares, strict=True)]
                _add(levels, level, more)
                _add(dims, dim, more)
        return (
            tuple(
                _traffic(name, levels.get(index), size, network.ports(index))
                for index, name in network.spanned
            ),
            tuple(_traffic(name, dims.get(name), size, None) for name in self.mesh.names),
        )


def _add(totals: dict, key: object, more: list[int]) -> None:
    old = totals.get(key)
    totals[key] = more if old is None else list(map(add, old, more))


def _traffic(name: str, sent: list[int] | None, size: int, ports: list | None) -> Traffic:
    if sent is None:
        return Traffic(name, 0.0, 0.0, 0.0)
    parts = size * size
    most = max(sent)
    port = most * 1.0
    if ports is not None:
        port = max(sum(sent[rank] for rank in ranks) * times for ranks, times in ports)
    return Traffic(name, sum(sent) / (size * parts), most / parts, port / parts)
