"""The operations of the stand-in: what each sends, and what comes out of it on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mercurygen.virtual.network import Communicator, Message, Op
from mercurygen.virtual.objects import P2POp, ProcessGroup, Work
from mercurygen.virtual.rank import Rank, messages

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("SUM", "MAX", "MIN", "AVG", "PRODUCT")


def batch(rank: Rank, ops: Sequence[P2POp], group: ProcessGroup, *, split: bool) -> list[Work]:
    """Start messages together.

    Args:
        rank: whose.
        ops: the messages, their `op` the word "send" or "receive".
        group: of all of them.
        split: a handle for each message, not one for all.
    """
    comm, made = group.comm, []
    with rank.silence():
        for one in ops:
            way = "send" if one.op == "send" else "receive"
            name = rank.buffer(one.tensor, f"a {way}")
            made.append((one, way, name, _message(rank, comm, one, name)))
        sends = tuple(m for _, way, _, m in made if way == "send")
        recvs = tuple(m for _, way, _, m in made if way == "receive")
        op = rank.begin(comm, "batch", sends=sends, recvs=recvs)
        ways = [
            [(one.tensor, name) for one, way, name, _ in made if way == wanted]
            for wanted in ("send", "receive")
        ]
        for (tensor, _), message in zip(ways[0], sends, strict=True):
            message.data = tensor.detach().clone()
        rank.record(op, (0, 0))
        flights = dict(zip(map(id, messages(op)), rank.start(op, *ways), strict=True))
    parts = [(flights[id(m)], _arrival(m, way)) for _, way, _, m in made]
    if not split:
        return [Work(rank, op, parts, [1])]
    left = [len(parts)]
    return [Work(rank, op, [part], left) for part in parts]


def _message(rank: Rank, comm: Communicator, one: P2POp, name: str) -> Message:
    peer = one.peer
    if (peer is None) == (one.group_peer is None):
        raise rank.fail("misuse", "a message needs a peer: its rank or that in the group, not both")
    if one.group_peer is not None:
        if not 0 <= one.group_peer < len(comm.ranks):
            raise rank.fail("misuse", f"peer {one.group_peer} of {len(comm.ranks)} ranks")
        peer = comm.ranks[one.group_peer]
    if peer not in comm.ranks:
        raise rank.fail("misuse", f"rank {peer} is not in {rank.network.named(comm)}")
    if peer == rank.number:
        raise rank.fail("order", f"`{name}` goes from this rank to itself")
    return Message(peer, (one.tensor.nbytes, str(one.tensor.dtype).removeprefix("torch.")), name)


def _arrival(message: Message, way: str) -> Callable[[], Tensor | None]:
    return (lambda: None) if way == "send" else (lambda: message.partner.data)


def collective(
    rank: Rank,
    group: ProcessGroup,
    kind: str,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    result: Callable[[list[Any], int], list[Tensor]],
    *,
    how: str = "",
    shared: bool = False,
    extra: Any = None,
) -> Work:
    """Start a collective.

    Args:
        rank: whose.
        group: of all members.
        kind: what it does.
        sources: what this rank gives.
        targets: where it goes; where a source is a target, the transfer is in place.
        result: makes this rank's targets from what all members gave, and its index.
        how: what must be the same on all ranks, beside the kind: the reduction, or the root.
        shared: bytes in and out may differ between ranks (uneven splits).
        extra: what `result` needs to know of every member, beside the sources.
    """
    comm = group.comm
    with rank.silence():
        names = [rank.buffer(x, f"the {kind}") for x in (*sources, *targets)]
        sizes = sum(x.nbytes for x in sources), sum(x.nbytes for x in targets)
        dtypes = {str(x.dtype).removeprefix("torch.") for x in (*sources, *targets)}
        if len(dtypes) > 1:
            raise rank.fail("misuse", f"the {kind} has {' and '.join(sorted(dtypes))}: must be one")
        words = f"{sizes[0]} bytes in, {sizes[1]} out, " if not shared else ""
        op = rank.begin(comm, kind, facts=f"{words}{''.join(dtypes)}{how and f', {how}'}")
        op.data = [x.detach().clone() for x in sources] + ([] if extra is None else [extra])
        rank.record(op, sizes, how)
        sent = [] if _in_place(kind, sources, targets, comm.ranks.index(rank.number)) else sources
        sent = list(zip(sent, names, strict=False))
        flights = rank.start(op, sent, list(zip(targets, names[len(sources) :], strict=True)))
    return Work(rank, op, _parts(op, flights, len(sent), result), [1])


def _parts(op: Op, flights: list, sends: int, result: Callable) -> list[tuple[Any, Any]]:
    """The buffers, each with what it will hold."""
    made: list[Tensor] = []

    def arrived(number: int) -> Tensor:
        """One of the targets, all made at the first wait."""
        if not made:
            me = op.comm.ranks.index(op.rank)
            made.extend(result([member.data for member in op.members], me))
        return made[number]

    parts = [(flight, lambda: None) for flight in flights[:sends]]
    received = flights[sends:]
    return parts + [(f, lambda i=i: arrived(i).contiguous()) for i, f in enumerate(received)]


def _in_place(kind: str, sources: Sequence[Tensor], targets: Sequence[Tensor], me: int) -> bool:
    """Whether source and target are one buffer in the way that the libraries allow.

    An all-reduce or broadcast of a tensor; an all-gather from, or a reduce-scatter to, the own
    part of the other tensor.
    """
    if len(sources) != 1 or len(targets) != 1:
        return False
    source, target = sources[0], targets[0]
    match kind:
        case "all-reduce" | "broadcast":
            return True
        case "all-gather":
            return source.data_ptr() == target.data_ptr() + me * source.nbytes
        case "reduce-scatter":
            return target.data_ptr() == source.data_ptr() + me * target.nbytes
    return False


def reduced(values: list[Tensor], op: Any) -> Tensor:
    """All ranks' tensors as one, in the order of the ranks."""
    import torch

    name = operation(op)
    total = values[0].clone()
    for value in values[1:]:
        match name:
            case "MAX":
                total = torch.maximum(total, value)
            case "MIN":
                total = torch.minimum(total, value)
            case "PRODUCT":
                total = total * value
            case _:
                total = total + value
    return total / len(values) if name == "AVG" else total


def operation(op: Any) -> str:
    """The name of a ReduceOp: `SUM`."""
    return str(op).rpartition(".")[2].rstrip(">").split(":")[0]


def check_reduction(rank: Rank, op: Any) -> str:
    """The name of a reduction that the stand-in does: `sum`."""
    if op is None:
        return "sum"
    if operation(op) not in REDUCTIONS:
        raise rank.fail("not-doubled", f"the reduction {op} has no stand-in on virtual ranks")
    return operation(op).lower()


def barrier(rank: Rank, group: ProcessGroup) -> Work:
    """Start a barrier."""
    with rank.silence():
        op = rank.begin(group.comm, "barrier")
        rank.record(op, (0, 0))
        rank.network.issue(op)
    return Work(rank, op, [], [1])
