"""All ranks at once: who can go on when, with transfers that need both sides.

A rank runs until it waits for an operation that is not over. An operation starts when those
before it on the same communicator of the same rank are over (each communicator is one queue). A
batch is over when the counterpart of each of its messages has started (rendezvous), a collective
when all members have. Who uses a communicator for the first time waits there for all its members.
What can happen only enables more, so playing greedily finds the end if any order does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mercurygen.check.report import ProofError, label, place
from mercurygen.ir.mesh import Mesh
from mercurygen.lower.events import Batch, Collective, Message, Trace, Wait

Group = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Op:
    """An operation of one rank.

    Attributes:
        rank: whose.
        index: of its event.
        event: a batch or a collective.
        partners: of a batch, per message (sends, then receives) the other side and which of its
            messages it is; of a collective, all members' in the order of the group.
        started: it is at the head of its queue, or was.
        done: it is over.
    """

    rank: int
    index: int
    event: Batch | Collective
    partners: list[tuple[Op, int] | None] = field(default_factory=list)
    started: bool = False
    done: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """Of a batch: sends, then receives."""
        return self.event.sends + self.event.recvs


@dataclass(slots=True)
class _Pair:
    """Messages from one rank to another on one communicator, in order, not yet matched."""

    sends: deque[tuple[Op, int]] = field(default_factory=deque)
    recvs: deque[tuple[Op, int]] = field(default_factory=deque)


def bytes_of(trace: Trace, message: Message) -> int:
    """Bytes that a message moves."""
    whole = trace.buffers[message.buffer].nbytes
    return whole if message.nbytes is None else message.nbytes


class Play:
    """The ranks at play.

    Attributes:
        order: what ran, as (rank, first event, event after the last), each after what it needs.
        ops: per rank its operations by number.
        stop: per rank the event that it has come to.
        messages: matched so far.
        collectives: joined so far.
    """

    def __init__(self, mesh: Mesh, traces: tuple[Trace, ...]) -> None:
        self.traces = traces
        ranks = range(len(traces))
        self.groups = [{dim: mesh.group(rank, dim) for dim in mesh.names} for rank in ranks]
        self.order: list[tuple[int, int, int]] = []
        self.ops: list[dict[int, Op]] = [{} for _ in ranks]
        self.stop = [0 for _ in ranks]
        self.messages = self.collectives = 0
        self.queues: dict[tuple[int, str], deque[Op]] = {}
        self.pairs: dict[tuple[str, int, int], _Pair] = {}
        self.joint: dict[tuple[str, Group], list[list[Op]]] = {}
        self.issued: dict[tuple[int, str], int] = {}  # collectives of a rank on a communicator
        self.arrived: dict[tuple[str, Group], dict[int, str]] = {}
        self.ready = deque(ranks)
        self.sleeping: dict[Op, int] = {}

    def run(self) -> None:
        """Until nobody can go on."""
        while self.ready:
            rank = self.ready.popleft()
            start = self.stop[rank]
            self.advance(rank)
            self.order.append((rank, start, self.stop[rank]))

    def advance(self, rank: int) -> None:
        """One rank, until it waits."""
        events = self.traces[rank].events
        while self.stop[rank] < len(events):
            event = events[self.stop[rank]]
            if isinstance(event, Wait):
                op = self.ops[rank][event.op]
                if not op.done:
                    self.sleeping[op] = rank
                    return
            elif isinstance(event, Batch | Collective):
                if not self.admitted(rank, event):
                    return
                self.issue(Op(rank, self.stop[rank], event))
            self.stop[rank] += 1

    def admitted(self, rank: int, event: Batch | Collective) -> bool:
        """Whether all members are at the first operation of this communicator, or past it."""
        group = self.groups[rank][event.dim]
        arrived = self.arrived.setdefault((event.dim, group), {})
        if rank in arrived:
            return len(arrived) == len(group)
        arrived[rank] = "batch" if isinstance(event, Batch) else event.kind
        if len(arrived) < len(group):
            return False
        if len(set(arrived.values())) > 1:
            words = ", ".join(f"rank {r} a {kind}" for r, kind in sorted(arrived.items()))
            self.fail(rank, f"the members begin the communicator of {event.dim} unlike: {words}")
        self.ready.extend(member for member in group if member != rank)
        return True

    def fail(self, rank: int, what: str) -> None:
        """Say what is wrong at the event that a rank has come to."""
        where = place(self.traces[rank], self.stop[rank])
        raise ProofError("order", rank, f"{where}: {what}")

    def issue(self, op: Op) -> None:
        """An operation enters its queue."""
        self.ops[op.rank][op.event.op] = op
        queue = self.queues.setdefault((op.rank, op.event.dim), deque())
        queue.append(op)
        if isinstance(op.event, Batch):
            self.match(op)
        else:
            self.join(op)
        if queue[0] is op:
            op.started = True
            self.settle([op])

    def match(self, op: Op) -> None:
        """Find the other side of every message, if it was posted: the oldest of the pair."""
        group, dim = self.groups[op.rank][op.event.dim], op.event.dim
        op.partners = [None] * len(op.messages)
        for i, message in enumerate(op.messages):
            peer, sends = group[message.peer], i < len(op.event.sends)
            way = (dim, op.rank, peer) if sends else (dim, peer, op.rank)
            pair = self.pairs.setdefault(way, _Pair())
            here, there = (pair.sends, pair.recvs) if sends else (pair.recvs, pair.sends)
            if not there:
                here.append((op, i))
                continue
            other, j = there.popleft()
            op.partners[i], other.partners[j] = (other, j), (op, i)
            self.messages += 1
            self.same_bytes(op, message, other, other.messages[j], sends)

    def same_bytes(self, op: Op, mine: Message, other: Op, theirs: Message, sends: bool) -> None:
        """A message is as long on one side as on the other."""
        here, there = self.traces[op.rank], self.traces[other.rank]
        length, expected = bytes_of(here, mine), bytes_of(there, theirs)
        if length != expected:
            verb, back = ("sends", "receives") if sends else ("receives", "sends")
            self.fail(
                op.rank,
                f"it {verb} {length} bytes ({label(here, mine.buffer)}) where rank {other.rank} "
                f"{back} {expected} ({label(there, theirs.buffer)})",
            )

    def join(self, op: Op) -> None:
        """Join the members of a group at their next collective; it must be the same."""
        dim, group = op.event.dim, self.groups[op.rank][op.event.dim]
        number = self.issued.get((op.rank, dim), 0)
        self.issued[op.rank, dim] = number + 1
        rounds = self.joint.setdefault((dim, group), [])
        if number == len(rounds):
            rounds.append([])
        members = rounds[number]
        members.append(op)
        op.partners = members  # shared; put in the order of the group once all are here
        first = members[0]
        if self.shape(op) != self.shape(first):
            self.fail(
                op.rank,
                f"collective {number} along {dim} is of {self.shape(op)[1]} bytes in, "
                f"{self.shape(op)[2]} out here, but on rank {first.rank} it is the "
                f"{self.shape(first)[0]} of {self.shape(first)[1]} in, {self.shape(first)[2]} out",
            )
        if len(members) == len(group):
            members.sort(key=lambda member: group.index(member.rank))
            self.collectives += 1

    def shape(self, op: Op) -> tuple[str, int, int]:
        """Kind (with what it adds, and its root) and bytes of a collective."""
        buffers = self.traces[op.rank].buffers
        event = op.event
        kind = event.kind
        if kind == "broadcast":
            kind = f"broadcast from {event.root}"
        if kind == "all-reduce":
            kind = f"all-reduce ({event.reduce})"
        return kind, buffers[event.source].nbytes, buffers[event.target].nbytes

    # --- progress -----------------------------------------------------------------------------

    def settle(self, fresh: list[Op]) -> None:
        """Finish what the newly started operations let finish, and start what comes after."""
        while fresh:
            op = fresh.pop()
            for other in self.touched(op):
                if not other.done and self.over(other):
                    fresh += self.finish(other)

    def touched(self, op: Op) -> list[Op]:
        """Operations that may be over now that this one has started."""
        if isinstance(op.event, Collective):
            return op.partners if self.over(op) else []
        return [op, *(partner[0] for partner in op.partners if partner)]

    def over(self, op: Op) -> bool:
        """Whether nothing keeps an operation from ending."""
        if isinstance(op.event, Collective):
            size = len(self.groups[op.rank][op.event.dim])
            return len(op.partners) == size and all(member.started for member in op.partners)
        return op.started and all(p is not None and p[0].started for p in op.partners)

    def finish(self, op: Op) -> list[Op]:
        """End an operation; what starts next in its queue."""
        op.done = True
        queue = self.queues[op.rank, op.event.dim]
        queue.popleft()
        if op in self.sleeping:
            self.ready.append(self.sleeping.pop(op))
        if not queue:
            return []
        queue[0].started = True
        return [queue[0]]
