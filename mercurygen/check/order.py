"""Proof that all ranks come to the end: peers, bounds, matching, no deadlock, nothing left over."""

from __future__ import annotations

from mercurygen.check.play import Op, Play
from mercurygen.check.report import ProofError, label, place
from mercurygen.ir.mesh import Mesh
from mercurygen.lower.events import Batch, Collective, Trace, Wait
from mercurygen.lower.plan import Plan

MOST_EACH_WAY = 2  # messages of a batch per tensor that moves: one to, or from, either side


def check_order(plan: Plan, traces: tuple[Trace, ...]) -> Play:
    """Prove that the ranks' operations fit together; how they were played.

    Raises:
        ProofError: of check "order".
    """
    mesh = plan.program.mesh
    most = max([1, *(len(x.tensors) + len(x.outputs) for x in plan.nest.loops)])
    for trace in traces:
        _check_alone(mesh, trace, MOST_EACH_WAY * most)
    play = Play(mesh, traces)
    play.run()
    for rank, trace in enumerate(traces):
        if play.stop[rank] < len(trace.events):
            raise ProofError("order", rank, explain(play, rank))
    for pair in play.pairs.values():
        for op, i in (*pair.sends, *pair.recvs):
            where = place(traces[op.rank], op.index)
            raise ProofError("order", op.rank, f"{where}: {_message(play, op, i)}: no match")
    return play


def _check_alone(mesh: Mesh, trace: Trace, most: int) -> None:
    """What one rank shows by itself: dimensions, peers, bounds, and a wait for everything."""
    flying: dict[int, int] = {}
    used: set[int] = set()

    def fail(index: int, what: str) -> None:
        """Say what is wrong at an event."""
        raise ProofError("order", trace.rank, f"{place(trace, index)}: {what}")

    for index, event in enumerate(trace.events):
        if isinstance(event, Wait) and flying.pop(event.op, None) is None:
            fail(index, f"operation {event.op} is not in flight")
        if not isinstance(event, Batch | Collective):
            continue
        if event.op in used:
            fail(index, f"operation {event.op} has the number of another")
        if event.dim not in mesh.names:
            fail(index, f"the mesh has no dimension {event.dim}")
        used.add(event.op)
        flying[event.op] = index
        fault = (_fault_of_batch if isinstance(event, Batch) else _fault_of_collective)(
            mesh, trace, event, most
        )
        if fault:
            fail(index, fault)
    for index in flying.values():
        fail(index, "nobody waits for it")


def _fault_of_batch(mesh: Mesh, trace: Trace, event: Batch, most: int) -> str | None:
    size, me = mesh.extent(event.dim), mesh.coordinate(trace.rank)[event.dim]
    if not event.sends and not event.recvs:
        return "the batch is empty"
    if max(len(event.sends), len(event.recvs)) > most:
        return f"{len(event.sends)} sends and {len(event.recvs)} receives: at most {most} each"
    for message in event.sends + event.recvs:
        if not 0 <= message.peer < size:
            return f"peer {message.peer} of {size} ranks"
        if message.peer == me:
            return f"{label(trace, message.buffer)} goes from this rank to itself"
    return None


def _fault_of_collective(mesh: Mesh, trace: Trace, event: Collective, most: int) -> str | None:
    size = mesh.extent(event.dim)
    source, target = (trace.buffers[b].nbytes for b in (event.source, event.target))
    if event.kind == "all-to-all" and (source != target or source % size):
        return f"{source} bytes in, {target} out cannot be {size} parts each"
    if event.kind == "all-gather" and source * size != target:
        return f"{size} times {source} bytes do not fill {target}"
    if event.kind == "reduce-scatter" and target * size != source:
        return f"{source} bytes in are not {size} times the {target} out"
    if event.kind in ("all-reduce", "broadcast") and source != target:
        return f"{source} bytes in, {target} out"
    if not 0 <= event.root < size:
        return f"root {event.root} of {size} ranks"
    return None


# --- what is wrong, in words ------------------------------------------------------------------


def explain(play: Play, rank: int) -> str:
    """Why a rank never ends: who waits for whom, until the circle closes or somebody is missing."""
    words, met = [], set()
    node: int | Op | None = rank
    while node is not None:
        if node in met:
            return "; ".join([*words, "which closes the circle"])
        met.add(node)
        text, node = _rank(play, node) if isinstance(node, int) else _op(play, node)
        words.append(text)
    return "; ".join(words)


def _rank(play: Play, rank: int) -> tuple[str, int | Op | None]:
    """What a rank stands at, and whom that is up to."""
    trace, index = play.traces[rank], play.stop[rank]
    if index == len(trace.events):
        return f"rank {rank} is at its end and never does", None
    event, where = trace.events[index], f"rank {rank} stands at {place(trace, index)}"
    if isinstance(event, Wait):
        return where, play.ops[rank][event.op]
    group = play.groups[rank][event.dim]
    arrived = play.arrived[event.dim, group]
    missing = next(member for member in group if member not in arrived)
    return (
        f"{where}, the first on the communicator of {event.dim}, where all its members must "
        f"come, rank {missing} too",
        missing,
    )


def _op(play: Play, op: Op) -> tuple[str, int | Op | None]:
    """What an operation needs, and whom that is up to."""
    where = f"operation {op.event.op} of rank {op.rank} along {op.event.dim}"
    head = play.queues[op.rank, op.event.dim][0]
    if head is not op:
        return f"{where} comes after operation {head.event.op} there", head
    if isinstance(op.event, Collective):
        members = {member.rank: member for member in op.partners}
        for member in play.groups[op.rank][op.event.dim]:
            if member not in members:
                return f"{where} needs rank {member} to join", member
            if not members[member].started:
                return f"{where} needs rank {member}'s to start", members[member]
    for i, partner in enumerate(op.partners):
        if partner is None:
            peer = play.groups[op.rank][op.event.dim][op.messages[i].peer]
            return f"{where} has a {_message(play, op, i)} that needs rank {peer}'s side", peer
        if not partner[0].started:
            other = partner[0]
            return f"{where} needs operation {other.event.op} of rank {other.rank} to start", other
    return f"{where} is ready", None


def _message(play: Play, op: Op, i: int) -> str:
    """A message of a batch, in words."""
    message, sends = op.messages[i], i < len(op.event.sends)
    peer = play.groups[op.rank][op.event.dim][message.peer]
    way = f"send to rank {peer}" if sends else f"receive from rank {peer}"
    return f"{way} of {label(play.traces[op.rank], message.buffer)}"
