"""Operations of all ranks as they are issued, and when they are over; `check.play`, live.

An operation starts when those before it on the same communicator of the same rank are over. A
batch is over when the counterpart of each of its messages has started (rendezvous), a collective
when all members have. Who uses a communicator for the first time waits there for all its members.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mercurygen.virtual.report import VirtualError, Where
from mercurygen.virtual.stage import Stage

Group = tuple[int, ...]


@dataclass(frozen=True)
class Communicator:
    """Ranks that talk to each other.

    Attributes:
        ranks: in the order of the group.
        key: tells it from others of the same ranks.
    """

    ranks: Group
    key: str


@dataclass(slots=True, eq=False)
class Message:
    """One send or receive.

    Attributes:
        peer: the other side's rank.
        facts: bytes and dtype: the same on both sides.
        name: of the buffer, for people.
        data: what is sent.
        partner: the other side, once it was posted.
        op: whose.
    """

    peer: int
    facts: tuple[int, str]
    name: str
    data: Any = None
    partner: Message | None = None
    op: Op | None = None


@dataclass(slots=True, eq=False)
class Op:
    """An operation of one rank: a batch of messages, or a collective.

    Attributes:
        rank: whose.
        number: of the rank's operations in this call, from 1.
        comm: its communicator.
        kind: "batch", "all-gather", ...
        where: it was called.
        sends: of a batch.
        recvs: of a batch.
        facts: of a collective: what must be the same on all ranks, in words.
        data: of a collective: what this rank gives.
        members: of a collective: the operations of all members.
        started: it is at the head of its queue, or was.
        done: it is over.
        waiting: its rank sleeps until it is over.
    """

    rank: int
    number: int
    comm: Communicator
    kind: str
    where: Where
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    facts: str = ""
    data: Any = None
    members: list[Op] = field(default_factory=list)
    started: bool = False
    done: bool = False
    waiting: bool = False


@dataclass(slots=True)
class _Pair:
    sends: deque[Message] = field(default_factory=deque)
    recvs: deque[Message] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class First:
    """A rank is at the first operation of a communicator, where all members must come."""

    comm: Communicator
    kind: str


class Network:
    """What all ranks have issued.

    Args:
        stage: that the ranks play on.

    Attributes:
        names: of communicators, for people: of which mesh dimension.
        meetings: who has come to make a group.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.names: dict[Communicator, str] = {}
        self.meetings: dict[str, set[int]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all operations: communicators are new again."""
        self.arrived: dict[Communicator, dict[int, str]] = {}
        self.queues: dict[tuple[int, Communicator], deque[Op]] = {}
        self.pairs: dict[tuple[Communicator, int, int], _Pair] = {}
        self.joint: dict[Communicator, list[list[Op]]] = {}
        self.issued: dict[tuple[int, Communicator], int] = {}
        self.count = 0

    def named(self, comm: Communicator) -> str:
        """A communicator, in words."""
        return self.names.get(comm) or f"the group of ranks {', '.join(map(str, comm.ranks))}"

    def issue(self, op: Op) -> None:
        """An operation enters its queue, once its communicator exists."""
        self._admit(op)
        self.count += 1
        queue = self.queues.setdefault((op.rank, op.comm), deque())
        queue.append(op)
        if op.kind == "batch":
            self._match(op)
        else:
            self._join(op)
        if queue[0] is op:
            op.started = True
            self._settle([op])

    def wait(self, op: Op) -> None:
        """Sleep until an operation is over."""
        op.waiting = True
        self.stage.wait(op.rank, op, lambda: op.done)

    def _admit(self, op: Op) -> None:
        """Wait for all members at the first operation of a communicator."""
        arrived = self.arrived.setdefault(op.comm, {})
        if op.rank in arrived:
            return
        arrived[op.rank] = op.kind
        if len(arrived) == len(op.comm.ranks):
            if len(set(arrived.values())) > 1:
                words = ", ".join(f"rank {r} a {kind}" for r, kind in sorted(arrived.items()))
                raise self.stage.fail(
                    "order",
                    op.rank,
                    f"the members begin the communicator of {self.named(op.comm)} unlike: {words}",
                )
            for member in op.comm.ranks:
                if member != op.rank:
                    self.stage.wake(member)
            return
        over = len(op.comm.ranks)
        self.stage.wait(op.rank, First(op.comm, op.kind), lambda: len(arrived) == over)

    def _match(self, op: Op) -> None:
        """Find the other side of every message, if it was posted: the oldest of the pair."""
        for message in op.sends + op.recvs:
            message.op = op
        for message in op.sends:
            pair = self.pairs.setdefault((op.comm, op.rank, message.peer), _Pair())
            self._meet(message, pair.sends, pair.recvs, "sends", "receives")
        for message in op.recvs:
            pair = self.pairs.setdefault((op.comm, message.peer, op.rank), _Pair())
            self._meet(message, pair.recvs, pair.sends, "receives", "sends")

    def _meet(self, mine: Message, here: deque, there: deque, verb: str, back: str) -> None:
        if not there:
            here.append(mine)
            return
        other = there.popleft()
        mine.partner, other.partner = other, mine
        if mine.facts != other.facts:
            raise self.stage.fail(
                "order",
                mine.op.rank,
                f"it {verb} {_bytes(mine.facts)} (`{mine.name}`) where rank {other.op.rank} "
                f"{back} {_bytes(other.facts)} (`{other.name}`, {other.op.where})",
            )

    def _join(self, op: Op) -> None:
        """Join the members of a group at their next collective; it must be the same."""
        number = self.issued.get((op.rank, op.comm), 0)
        self.issued[op.rank, op.comm] = number + 1
        rounds = self.joint.setdefault(op.comm, [])
        if number == len(rounds):
            rounds.append([])
        op.members = rounds[number]
        op.members.append(op)
        first = op.members[0]
        if (op.kind, op.facts) != (first.kind, first.facts):
            raise self.stage.fail(
                "order",
                op.rank,
                f"collective {number + 1} on {self.named(op.comm)} is here the {op.kind} of "
                f"{op.facts}, but on rank {first.rank} the {first.kind} of {first.facts} "
                f"({first.where})",
            )
        if len(op.members) == len(op.comm.ranks):
            op.members.sort(key=lambda member: op.comm.ranks.index(member.rank))

    # --- progress -----------------------------------------------------------------------------

    def _settle(self, fresh: list[Op]) -> None:
        """Finish what the newly started operations let finish, and start what comes after."""
        while fresh:
            op = fresh.pop()
            touched = op.members
            if op.kind == "batch":
                partners = (message.partner for message in op.sends + op.recvs)
                touched = [op, *(partner.op for partner in partners if partner)]
            for other in list(touched):
                if not other.done and self.over(other):
                    fresh += self._finish(other)

    def over(self, op: Op) -> bool:
        """Whether nothing keeps an operation from ending."""
        if op.kind != "batch":
            whole = len(op.members) == len(op.comm.ranks)
            return whole and all(member.started for member in op.members)
        return op.started and all(m.partner and m.partner.op.started for m in op.sends + op.recvs)

    def _finish(self, op: Op) -> list[Op]:
        op.done = True
        queue = self.queues[op.rank, op.comm]
        queue.popleft()
        if op.waiting:
            self.stage.wake(op.rank)
        if not queue:
            return []
        queue[0].started = True
        return [queue[0]]

    # --- what is wrong, in words --------------------------------------------------------------

    def explain(self) -> VirtualError:
        """Why nobody can go on: who waits for whom, until the circle closes."""
        stuck = next(actor for actor in self.stage.actors if not actor.done)
        words, met = [], set()
        node: int | Op | None = stuck.number
        while node is not None:
            if node in met:
                words.append("which closes the circle")
                break
            met.add(node)
            text, node = self._rank(node) if isinstance(node, int) else self._op(node)
            words.append(text)
        if len(words) > 12:
            words[6:-5] = [f"… {len(words) - 11} more …"]
        return VirtualError("deadlock", stuck.number, "; ".join(words), stuck.where)

    def _rank(self, rank: int) -> tuple[str, int | Op | None]:
        """Where a rank stands, and whom that is up to."""
        actor = self.stage.actors[rank]
        if actor.done:
            return f"rank {rank} is at its end and never does", None
        where = f"rank {rank} stands at line {actor.where.line}"
        match actor.needs:
            case Op():
                return where, actor.needs
            case First(comm, kind):
                arrived = self.arrived[comm]
                missing = next(member for member in comm.ranks if member not in arrived)
                return (
                    f"{where}, a {kind}, the first on the communicator of {self.named(comm)}, "
                    f"where all its members must come, rank {missing} too",
                    missing,
                )
            case (str(words), int(missing)):
                return f"{where}, {words}, rank {missing} too", missing
        return where, None

    def _op(self, op: Op) -> tuple[str, int | Op | None]:
        """What an operation needs, and whom that is up to."""
        where = (
            f"operation {op.number} of rank {op.rank}, the {op.kind} on {self.named(op.comm)} "
            f"(line {op.where.line}),"
        )
        head = self.queues[op.rank, op.comm][0]
        if head is not op:
            return f"{where} comes after operation {head.number} there", head
        if op.kind != "batch":
            members = {member.rank: member for member in op.members}
            for member in op.comm.ranks:
                if member not in members:
                    return f"{where} needs rank {member} to join", member
                if not members[member].started:
                    return f"{where} needs rank {member}'s to start", members[member]
        for message in op.sends + op.recvs:
            way = "send to" if message in op.sends else "receive from"
            if message.partner is None:
                words = f"{where} has a {way} rank {message.peer} of `{message.name}` that needs "
                return words + "the other side", message.peer
            other = message.partner.op
            if not other.started:
                return (
                    f"{where} needs operation {other.number} of rank {other.rank} to start",
                    other,
                )
        return f"{where} is ready", None


def _bytes(facts: tuple[int, str]) -> str:
    return f"{facts[0]} bytes of {facts[1]}"
