"""A plan's time, rank by rank: an event simulation of the traces of all ranks.

Every rank has one compute stream and one first-in-first-out queue of operations for each mesh
dimension (a communicator). An operation is ready when the stream has come to it and the one before
it is over; a collective starts when all members are ready, a message when both ends are. It then
takes every resource on its way as soon as all are free, in the order of being ready, and the SMs
that move it are missing to what is computed meanwhile. The host launches kernels and transfers in
order, without waiting for any; the stream is never ahead of it. Ranks that differ only along
dimensions on which nothing depends share a trace.
"""

from __future__ import annotations

from collections import Counter, deque
from heapq import heappop, heappush
from math import inf

from mercurygen.cost.kernels import NOTHING, Kernels, Spent, added, seconds
from mercurygen.cost.links import Network, regime
from mercurygen.cost.report import Cost, Times
from mercurygen.cost.traffic import Totals
from mercurygen.errors import InternalError
from mercurygen.ir.operator import Operator
from mercurygen.lower.events import (
    Alloc,
    Batch,
    Collective,
    Free,
    Kernel,
    Message,
    Return,
    Trace,
    Turn,
    Wait,
)
from mercurygen.lower.plan import Gather, Plan, Walk
from mercurygen.lower.trace import trace


class Run:
    """Runs of the stream, operations and waits of one trace.

    Attributes:
        items: seconds of the stream and when it is at the earliest that far, for the host launches
            one kernel after the other; a Batch or Collective; or the number of an operation to
            wait for.
        hosts: of every operation, when the host has started it.
        spent: seconds of all of the stream, by kind.
        peak: most bytes alive.
    """

    __slots__ = ("items", "hosts", "spent", "peak", "trace")

    def __init__(self, played: Trace, kernels: Kernels) -> None:
        self.items: list[tuple[float, float] | Batch | Collective | int] = []
        self.hosts: dict[int, float] = {}
        self.spent: Spent = NOTHING
        self.peak, self.trace = played.peak(), played
        stretch = earliest = host = 0.0
        each = kernels.gpu.host_transfer
        for event in played.events:
            match event:
                case Alloc() | Free() | Return() | Turn():
                    continue
                case Batch() | Collective() | Wait():
                    self.items.append((stretch, earliest))
                    stretch = earliest = 0.0
                    if isinstance(event, Wait):
                        self.items.append(event.op)
                        continue
                    host += _messages(event) * each
                    self.hosts[event.op] = host
                    self.items.append(event)
                    continue
                case Kernel():
                    spent = kernels.kernel(event)
                case _:
                    spent = kernels.event(event, played.buffers)
            self.spent = added(self.spent, spent)
            host += spent[3]
            stretch += seconds(spent)
            earliest = max(earliest + seconds(spent), host)
        self.items.append((stretch, earliest))


def _messages(event: Batch | Collective) -> int:
    """Calls of the host that start an operation."""
    return len(event.sends) + len(event.recvs) if isinstance(event, Batch) else 1


class _Operation:
    """A batch or collective of one rank."""

    __slots__ = ("rank", "event", "issued", "missing", "begin", "end", "share")

    def __init__(self, rank: int, event: Batch | Collective, issued: float) -> None:
        self.rank, self.event, self.issued = rank, event, issued
        self.missing, self.begin, self.end, self.share = 0, inf, 0.0, 0.0


class _Simulation:
    """All ranks at once."""

    def __init__(self, network: Network, mesh, runs: list[Run]) -> None:
        self.network, self.mesh, self.runs = network, mesh, runs
        self.launch = network.topology.gpu.launch_latency
        size = mesh.size
        self.groups = [{dim: mesh.group(rank, dim) for dim in mesh.names} for rank in range(size)]
        self.now = [0.0] * size
        self.place = [0] * size
        self.waits: list[int | None] = [None] * size
        self.transfers = [0.0] * size
        self.done: list[dict[int, float]] = [{} for _ in range(size)]
        self.busy: list[dict[int, tuple[float, float]]] = [{} for _ in range(size)]
        self.queues = [{dim: deque() for dim in mesh.names} for _ in range(size)]
        self.counts: list[Counter[tuple]] = [Counter() for _ in range(size)]
        self.half: dict[tuple, list[_Operation]] = {}  # who is ready, until all are
        self.ready: list[tuple] = []  # (time, key, latency, seconds, bytes, operations)
        self.free: dict[int, float] = {}
        self.sent: list[tuple] = []  # (dimension, rank and level shares, bytes)

    def play(self) -> None:
        """Run every rank to its end."""
        for rank in range(self.mesh.size):
            self.advance(rank)
        while self.ready:
            self.transfer(*heappop(self.ready))
        for rank, run in enumerate(self.runs):
            if self.place[rank] < len(run.items):
                raise InternalError(f"rank {rank} waits for ever")

    def advance(self, rank: int) -> None:
        """Let a rank's stream run until it waits for a transfer that is not over."""
        items = self.runs[rank].items
        while self.place[rank] < len(items):
            item = items[self.place[rank]]
            if isinstance(item, tuple):
                stretch, earliest = item
                self.now[rank] = max(self.now[rank] + stretch, earliest)
            elif isinstance(item, int):
                end = self.done[rank].get(item)
                if end is None:
                    self.waits[rank] = item
                    return
                begin, share = self.busy[rank].pop(item)
                lost = share * max(0.0, min(end, self.now[rank]) - begin)
                self.now[rank] = max(self.now[rank] + lost, end)
            else:
                queue = self.queues[rank][item.dim]
                issued = max(self.now[rank], self.runs[rank].hosts[item.op])
                queue.append(_Operation(rank, item, issued))
                if len(queue) == 1:
                    self.activate(queue[0], issued)
            self.place[rank] += 1

    def activate(self, operation: _Operation, now: float) -> None:
        """The operation is at the head of its queue."""
        rank, event = operation.rank, operation.event
        members = self.groups[rank][event.dim]
        played = self.runs[rank].trace
        operation.issued = now
        if isinstance(event, Collective):
            operation.missing = 1
            number, waiting = self.joined(operation, members)
            if len(waiting) == len(members):
                load = self.network.load(event.kind, members)
                nbytes = played.buffers[event.source].nbytes
                self.push(event.dim, number, members, load, nbytes, waiting)
            return
        sizes: dict[tuple[int, int], int] = {}
        for message in event.sends:
            pair = (rank, members[message.peer])
            sizes[pair] = sizes.get(pair, 0) + message_bytes(played, message)
        for message in event.recvs:
            pair = (members[message.peer], rank)
            sizes[pair] = sizes.get(pair, 0) + message_bytes(played, message)
        operation.missing = len(sizes)
        for pair, nbytes in sizes.items():
            number, waiting = self.joined(operation, pair)
            if len(waiting) == 2:
                self.push(event.dim, number, pair, self.network.path(*pair), nbytes, waiting)

    def joined(
        self, operation: _Operation, members: tuple[int, ...]
    ) -> tuple[int, list[_Operation]]:
        """Which operation of these ranks it is, and who of them is ready for it."""
        counts, key = self.counts[operation.rank], (operation.event.dim, members)
        counts[key] += 1
        waiting = self.half.setdefault((key[0], counts[key], members), [])
        waiting.append(operation)
        return counts[key], waiting

    def push(self, dim, number, members, load, nbytes, operations) -> None:
        """All are ready: the transfer can start once its kernels are launched."""
        del self.half[dim, number, members]
        ready = max(operation.issued for operation in operations) + self.launch
        heappush(self.ready, (ready, dim, number, members, load, nbytes, operations))

    def transfer(self, ready, dim, number, members, load, nbytes, operations) -> None:
        """Take the resources, and tell who waits for it."""
        begin = ready
        for resource, _ in load.seconds:
            begin = max(begin, self.free.get(resource, 0.0))
        end = begin
        latency, slower = regime(load, nbytes)
        for resource, per_byte in load.seconds:
            self.free[resource] = begin + nbytes * per_byte * slower
            end = max(end, self.free[resource])
        end += latency
        shift = not hasattr(load, "sent")
        whole = self.network.size**2
        sent = ((members[0], load.level, whole),) if shift else load.sent
        self.sent.append((dim, sent, nbytes))
        for operation in operations:
            operation.missing -= 1
            operation.end = max(operation.end, end)
            operation.begin, operation.share = min(operation.begin, begin), load.share
            if not shift or operation.rank == members[0]:
                self.transfers[operation.rank] += end - begin
            if not operation.missing:
                self.finish(operation)

    def finish(self, operation: _Operation) -> None:
        """The operation is over on its rank: the next of its queue, and the stream, go on."""
        rank, event = operation.rank, operation.event
        self.done[rank][event.op] = operation.end
        self.busy[rank][event.op] = operation.begin, operation.share
        queue = self.queues[rank][event.dim]
        queue.popleft()
        if queue:
            self.activate(queue[0], max(queue[0].issued, operation.end))
        if self.waits[rank] == event.op:
            self.waits[rank] = None
            self.advance(rank)


def message_bytes(played: Trace, message: Message) -> int:
    """Bytes of one operation of a batch."""
    return played.buffers[message.buffer].nbytes if message.nbytes is None else message.nbytes


def telling_dims(plan: Plan) -> tuple[str, ...]:
    """The dimensions by whose coordinate ranks differ in what they do, in mesh order.

    Those that split an axis of the mask (its blocks, what is read of a tile), those that tiles walk
    (who is the peer), and those over which a tile loop's part is one rank's.
    """
    program = plan.program
    telling = {dim for axis in program.mask_axes for dim in program.parallel_dims(axis)}
    for loop in plan.nest.loops:
        for stage in loop.stages:
            match stage:
                case Walk(dim, skew=skew):
                    telling |= {dim, skew or dim}
                case Gather(dim, broadcast=True):
                    telling.add(dim)
    return program.mesh.in_order(telling)


def distinct_ranks(plan: Plan) -> dict[tuple[int, ...], list[int]]:
    """The ranks that do the same, by their coordinate along the dimensions that tell."""
    telling, mesh = telling_dims(plan), plan.program.mesh
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        found.setdefault(tuple(place[dim] for dim in telling), []).append(rank)
    return found


Played = tuple[tuple[tuple[int, ...], Trace], ...]  # the ranks that do the same, and what


def play(plan: Plan) -> Played:
    """The traces of all ranks: they are the same on every machine."""
    return tuple((tuple(r), trace(plan, r[0])) for r in distinct_ranks(plan).values())


def simulate(
    plan: Plan, network: Network, operator: Operator | None = None, played: Played | None = None
) -> Cost:
    """What a plan costs, by the traces of all ranks.

    Args:
        plan: the plan.
        network: the links of its group.
        operator: whose lines the body is; torch's attention needs none.
        played: what `play` gave for the plan, if it is priced several times.
    """
    mesh, kernels = plan.program.mesh, Kernels(plan, network.topology.gpu, operator)
    distinct: list[Run] = []
    by_rank: dict[int, Run] = {}
    for ranks, events in played or play(plan):
        distinct.append(Run(events, kernels))
        by_rank |= dict.fromkeys(ranks, distinct[-1])
    runs = [by_rank[rank] for rank in range(mesh.size)]
    run = _Simulation(network, mesh, runs)
    run.play()
    traffic = Totals(plan, network)
    for dim, sent, nbytes in run.sent:
        traffic.add(dim, sent, nbytes)
    compute = [one.spent[0] for one in runs]
    slowest = max(range(mesh.size), key=lambda r: (run.now[r], compute[r], -r))
    total, spent = run.now[slowest], runs[slowest].spent
    exposed = max(0.0, total - seconds(spent))
    return Cost(
        times=Times(total, *spent[:3], exposed, run.transfers[slowest]),
        links=traffic.links(),
        dims=traffic.dims(),
        operations=max(sum(isinstance(x, Batch | Collective) for x in r.items) for r in distinct),
        peak_memory=max(one.peak for one in distinct),
        imbalance=max(compute) * len(compute) / sum(compute),
    )
