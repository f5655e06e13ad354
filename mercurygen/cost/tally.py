"""Sums over a plan as it goes on: bytes alive, seconds, and bytes sent, of all ranks at once.

Ranks do the same with buffers of the same size, except where each gets only what it reads: then a
number for every class of ranks that do the same is kept beside what all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub

from mercurygen.cost.common import Common, Route, Wire
from mercurygen.cost.kernels import Spent
from mercurygen.cost.links import regime
from mercurygen.cost.report import Traffic

NEVER = -(2**62)  # bytes alive on ranks that are not there: no peak


class Tally:
    """The state of all ranks in lock step.

    Attributes:
        alive: bytes alive on every rank, beside `vary`.
        vary: bytes alive on each class beside that, or None where there are none.
        peak: most bytes alive so far on any rank.
        now: seconds so far.
        host: seconds until the host has launched all that has been.
        copies: seconds of these that were copies.
        launches: what the least time of a kernel adds to them.
    """

    def __init__(self, common: Common) -> None:
        self.common, self.kernels, self.launch = common, common.kernels, common.launch
        self.classes = 1
        self.alive = self.peak = 0
        self.vary: list[int] | None = None
        self.each = common.kernels.gpu.host_transfer
        self.now = self.host = self.transfers = self.copies = self.launches = 0.0
        self.slowing: dict[float, tuple[float, float]] = {}  # by end: begin, share of the SMs
        self.operations = 0
        self.batches: list[int] | None = None  # of each class, beside `operations`
        self.sent: dict[Wire, int] = {}
        self.sent_each: dict[tuple[Route, int], list[int]] = {}  # in units of so many bytes
        self.last = [0.0] * len(common.mesh.dims)  # one operation after the other
        self.free = [0.0] * len(common.network.group)  # per level

    def branch(self, classes: int) -> Tally:
        """The same state, to go on from, with so many classes; nothing varies yet."""
        made = object.__new__(Tally)
        made.__dict__.update(self.__dict__)
        made.classes = classes
        made.sent, made.last, made.free = dict(self.sent), [*self.last], [*self.free]
        made.sent_each, made.slowing = {}, dict(self.slowing)
        return made

    # --- memory -----------------------------------------------------------------------------

    def up(self, nbytes: int) -> None:
        """A buffer comes to life."""
        self.alive = height = self.alive + nbytes
        if self.vary is not None:
            height += max(self.vary)
        if height > self.peak:
            self.peak = height

    def down(self, nbytes: int) -> None:
        """A buffer is gone."""
        self.alive -= nbytes

    def top(self, more: int) -> None:
        """Look whether this is the most, with some more bytes for a moment."""
        height = self.alive + more
        if self.vary is not None:
            height += max(self.vary)
        if height > self.peak:
            self.peak = height

    def up_each(self, sizes: Sequence[int], look: bool = True) -> None:
        """A buffer of its own size on every class."""
        vary = self.vary
        self.vary = vary = list(sizes) if vary is None else list(map(add, vary, sizes))
        if look:
            height = self.alive + max(vary)
            if height > self.peak:
                self.peak = height

    def down_each(self, sizes: Sequence[int]) -> None:
        """It is gone."""
        self.vary = list(map(sub, self.vary, sizes))

    def top_each(self, more: Sequence[int]) -> None:
        """Look, with some more bytes for a moment on every class."""
        vary = self.vary
        height = self.alive + (max(more) if vary is None else max(map(add, vary, more)))
        if height > self.peak:
            self.peak = height

    # --- time -------------------------------------------------------------------------------

    def copy(self, nbytes: int) -> None:
        """An element-wise kernel."""
        self.spend(self.kernels.copy(nbytes))

    def spend(self, spent: Spent) -> None:
        """Copies of every rank."""
        _, copies, launches, host = spent
        self.copies += copies
        self.launches += launches
        self.run(copies + launches, host)

    def run(self, spent: float, host: float) -> None:
        """Kernels of every rank, which are over no sooner than the host has launched them."""
        self.host += host
        self.now += spent
        if self.host > self.now:
            self.now = self.host

    def start(self, wire: Wire, nbytes: int, messages: int = 1) -> float:
        """Begin a transfer of all ranks; when it will be over."""
        self.operations += 1
        sent = self.sent
        sent[wire] = sent.get(wire, 0) + nbytes
        return self.begin(wire, nbytes, messages)

    def count(self, wires: Sequence[Wire], nbytes: int) -> None:
        """Transfers of all ranks that are to begin."""
        self.operations += len(wires)
        sent = self.sent
        for wire in wires:
            sent[wire] = sent.get(wire, 0) + nbytes

    def begin(self, wire: Wire, nbytes: int, messages: int = 1) -> float:
        """When a transfer that begins now is over: after the one before it on its communicator.

        Args:
            wire: the transfer.
            nbytes: of all that a rank sends.
            messages: that the host starts for it; a collective is one.
        """
        self.host += messages * self.each
        free, place, begin = self.free, wire.place, self.now
        if self.host > begin:
            begin = self.host
        if self.last[place] > begin:
            begin = self.last[place]
        begin += self.launch
        for level, _ in wire.seconds:
            if free[level] > begin:
                begin = free[level]
        end = begin
        latency, slower = regime(wire, nbytes)
        nbytes *= slower
        for level, per_byte in wire.seconds:
            free[level] = over = begin + nbytes * per_byte
            if over > end:
                end = over
        end += latency
        self.last[place] = end
        self.transfers += end - begin
        if wire.share:
            self.slowing[end] = begin, wire.share
        return end

    def start_each(
        self, wire: Wire, sizes: list[int], takes: list[int], most: int, unit: int = 1
    ) -> float:
        """Begin a batch in which every class sends its own number of bytes, or nothing at all.

        Args:
            wire: the transfer.
            sizes: that each sends, in units.
            takes: 1 for each that sends or receives, else 0.
            most: of the sizes.
            unit: bytes of a unit.
        """
        key = wire.route, unit
        total = self.sent_each.get(key)
        self.sent_each[key] = sizes if total is None else list(map(add, total, sizes))
        self.batches = takes if self.batches is None else list(map(add, self.batches, takes))
        if most:
            return self.begin(wire, most * unit, 2)
        self.host += 2 * self.each
        return self.now

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
        common, parts = self.common, self.common.network.size**2
        levels, dims = [0] * len(self.free), [0] * len(self.last)  # what every rank sends
        more_levels: dict[int, list[int]] = {}  # and each beside that
        more_dims: dict[int, list[int]] = {}
        for wire, nbytes in self.sent.items():
            dims[wire.place] += nbytes * wire.even
            for level, even, shares in wire.sent:
                if even is None:
                    _add(more_levels, level, [nbytes * share for share in shares])
                else:
                    levels[level] += nbytes * even
        for (route, unit), each in self.sent_each.items():
            whole = [each[index] * unit * parts for index in class_of]
            _add(more_dims, route.place, whole)
            for level, sends in route.levels:
                sent = whole
                if sends is not None:
                    sent = [n if goes else 0 for n, goes in zip(whole, sends, strict=True)]
                _add(more_levels, level, sent)
        return (
            tuple(
                [
                    common.traffic(name, levels[level], more_levels.get(level), level)
                    for level, name in common.spanned
                ]
            ),
            tuple(
                [
                    common.traffic(name, dims[place], more_dims.get(place))
                    for place, name in enumerate(common.mesh.names)
                ]
            ),
        )


def _add(totals: dict[int, list[int]], key: int, more: list[int]) -> None:
    old = totals.get(key)
    totals[key] = more if old is None else list(map(add, old, more))
