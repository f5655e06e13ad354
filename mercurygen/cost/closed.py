"""What a schedule costs, without playing every rank: exact bytes and memory, and a time.

All ranks do the same transfers with buffers of the same size; only the blocks of their kernels
differ. So one outline gives traffic and memory exactly, and a time in lock step: every step takes
as long as the slowest rank's kernels or the busiest link, whichever is longer, and the border is
exposed. The terms are those of the simulation (`kernels`, `links`).
"""

from __future__ import annotations

from collections import Counter

from mercurygen.cost.kernels import NOTHING, Kernels, added
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost, Times, Traffic
from mercurygen.cost.work import Work, outline, work
from mercurygen.lower.events import (
    Alloc,
    Batch,
    Cast,
    Collective,
    Fill,
    Free,
    Kernel,
    Pack,
    Trace,
    Unpack,
    Wait,
)
from mercurygen.lower.plan import Plan


def cost(plan: Plan, network: Network) -> Cost:
    """What a plan costs on the links of its group."""
    kernels = Kernels(plan, network.topology.gpu)
    played, steps = outline(plan), work(plan, kernels)
    clock = _Clock(plan, network, kernels)
    clock.play(played, steps)
    compute, copies, launch = added(clock.copied, steps.busiest)
    exposed = max(0.0, clock.now - compute - copies - launch)
    times = Times(clock.now, compute, copies, launch, exposed, clock.transfers)
    return Cost(
        times=times,
        links=clock.traffic.links(),
        dims=clock.traffic.dims(),
        operations=clock.operations,
        peak_memory=_peak(played, steps),
        imbalance=steps.imbalance,
    )


def _peak(played: Trace, steps: Work) -> int:
    """Most bytes alive on any rank: what all hold at a step, and the worst kernel there."""
    alive = most = step = 0
    for event in played.events:
        match event:
            case Alloc(buffer):
                alive += played.buffers[buffer].nbytes
            case Free(buffer):
                alive -= played.buffers[buffer].nbytes
            case Kernel():
                most = max(most, alive + steps.scratch[step])
                step += 1
        most = max(most, alive)
    return most


class Totals:
    """Bytes sent, exactly: counted in parts of one rank's buffer, of which there are whole ones."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.network, self.mesh = network, plan.program.mesh
        self.by_level: Counter[tuple[int, int]] = Counter()  # (level, rank)
        self.by_dim: Counter[tuple[str, int]] = Counter()  # (dimension, rank)

    def add(self, dim: str, sent: tuple[tuple[int, int, int], ...], nbytes: int) -> None:
        """Count an operation along a dimension, from a buffer of this size."""
        for rank, level, share in sent:
            self.by_level[level, rank] += share * nbytes
            self.by_dim[dim, rank] += share * nbytes

    def links(self) -> tuple[Traffic, ...]:
        """Per level that the group spans."""
        names = [level.name for level in self.network.topology.levels]
        used = [i for i, size in enumerate(self.network.group) if size > 1]
        return tuple(self._traffic(names[i], self.by_level, i, self.network.ports(i)) for i in used)

    def dims(self) -> tuple[Traffic, ...]:
        """Per mesh dimension."""
        each = [((rank,), 1.0) for rank in range(self.network.size)]
        return tuple(self._traffic(name, self.by_dim, name, each) for name in self.mesh.names)

    def _traffic(self, name: str, totals: Counter, key: object, ports: list) -> Traffic:
        size = self.network.size
        sent = [totals[key, rank] for rank in range(size)]
        port = max(sum(sent[rank] for rank in ranks) * times for ranks, times in ports)
        return Traffic(name, sum(sent) / (size * size), max(sent) / size, port / size)


class _Clock:
    """One rank in lock step with all others."""

    def __init__(self, plan: Plan, network: Network, kernels: Kernels) -> None:
        self.network, self.kernels = network, kernels
        self.mesh = plan.program.mesh
        self.now = self.transfers = 0.0
        self.copied = NOTHING
        self.operations = 0
        self.traffic = Totals(plan, network)
        self.done: dict[int, float] = {}  # per operation
        self.last: dict[str, float] = {}  # per communicator: one operation after the other
        self.free: dict[int, float] = {}  # per level

    def play(self, played: Trace, steps: Work) -> None:
        """Run the outline to its end."""
        longest = iter(steps.longest)
        for event in played.events:
            match event:
                case Kernel():
                    self.now += next(longest)
                case Pack() | Unpack() | Cast() | Fill():
                    spent = self.kernels.event(event, played.buffers)
                    self.copied = added(self.copied, spent)
                    self.now += sum(spent)
                case Batch(op, dim, sends):
                    nbytes = sum(played.buffers[message.buffer].nbytes for message in sends)
                    self.start(op, "shift", dim, nbytes)
                case Collective(op, dim, kind, source):
                    self.start(op, kind, dim, played.buffers[source].nbytes)
                case Wait(op):
                    self.now = max(self.now, self.done[op])

    def start(self, op: int, kind: str, dim: str, nbytes: int) -> None:
        """Begin a transfer: after the one before it on its communicator, when links are free."""
        price = self.network.price(kind, self.mesh, dim)
        self.operations += 1
        self.traffic.add(dim, price.sent, nbytes)
        ready = max(self.now, self.last.get(dim, 0.0)) + self.network.topology.gpu.launch_latency
        begin = max([ready, *(self.free.get(level, 0.0) for level, _ in price.seconds)])
        end = begin
        for level, per_byte in price.seconds:
            self.free[level] = begin + nbytes * per_byte
            end = max(end, self.free[level])
        self.done[op] = self.last[dim] = end + price.latency
        self.transfers += end + price.latency - begin
