"""What a plan moves: bytes that each rank sends, per mesh dimension and per topology level.

A transfer crosses the link of the outermost level in which the two ranks differ. An all-to-all
goes directly, a part to each. An all-gather goes around a ring, everything n - 1 times over each of
its edges; NCCL lays several rings, which leave a node through different GPUs, so that what crosses
a level is spread evenly over the ranks (as the cost model has it, `mercurygen.cost.links`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction

from mercurygen.check.play import bytes_of
from mercurygen.check.report import Spread, Traffic
from mercurygen.ir.mesh import Link, cover
from mercurygen.lower.events import Batch, Collective, Trace
from mercurygen.lower.plan import Plan


def measure(plan: Plan, traces: Iterable[Trace], links: tuple[Link, ...]) -> Traffic:
    """Bytes and steps of one call, exact for every rank."""
    mesh = plan.program.mesh
    cover(mesh, links)  # the mesh and the levels number the same ranks in the same order
    sent = {dim: [0] * mesh.size for dim in mesh.names}
    crossing = {link.level: [0] * mesh.size for link in links}
    steps = dict.fromkeys(mesh.names, 0)
    for trace in traces:
        started = dict.fromkeys(mesh.names, 0)
        groups = {dim: mesh.group(trace.rank, dim) for dim in mesh.names}
        for event in trace.events:
            if not isinstance(event, Batch | Collective):
                continue
            started[event.dim] += 1
            for index, nbytes in transfers(links, groups[event.dim], trace, event):
                sent[event.dim][trace.rank] += nbytes
                crossing[links[index].level][trace.rank] += nbytes
        steps = {dim: max(steps[dim], started[dim]) for dim in mesh.names}
    return Traffic(
        {dim: Spread(tuple(values)) for dim, values in sent.items()},
        {level: Spread(tuple(values)) for level, values in crossing.items()},
        steps,
    )


def transfers(
    links: tuple[Link, ...], group: tuple[int, ...], trace: Trace, event: Batch | Collective
) -> Iterator[tuple[int, int | Fraction]]:
    """(level crossed, bytes) of everything that one operation of a group makes this rank send."""
    if isinstance(event, Batch):
        for message in event.sends:
            peer = group[message.peer]
            yield outermost(links, trace.rank, peer), bytes_of(trace, message)
        return
    nbytes, size = trace.buffers[event.source].nbytes, len(group)
    if event.kind == "all-to-all":
        for peer in group:
            if peer != trace.rank:
                yield outermost(links, trace.rank, peer), nbytes // size
        return
    following = (*group[1:], group[0])
    edges = Counter(outermost(links, a, b) for a, b in zip(group, following, strict=True))
    each = Fraction(operation_bytes(trace, event, size), size)
    for index, count in sorted(edges.items()):
        share = each * count
        yield index, int(share) if share.denominator == 1 else share


def operation_bytes(trace: Trace, event: Batch | Collective, size: int) -> int | Fraction:
    """Bytes that one operation of `size` ranks makes this rank send: rings for collectives.

    Of n bytes: an all-gather n (size - 1), a reduce-scatter n (size - 1) / size, an all-reduce
    both; a broadcast's chain all but its last rank n, on average n (size - 1) / size.
    """
    if isinstance(event, Batch):
        return sum(bytes_of(trace, message) for message in event.sends)
    nbytes = trace.buffers[event.source].nbytes
    times = {"all-gather": size, "all-reduce": 2}.get(event.kind, 1)
    return _whole(Fraction(nbytes * (size - 1) * times, size))


def _whole(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number


def outermost(links: tuple[Link, ...], one: int, other: int) -> int:
    """Index of the outermost level in which two different ranks differ; row-major."""
    found = 0
    for index in reversed(range(len(links))):
        one, here = divmod(one, links[index].size)
        other, there = divmod(other, links[index].size)
        if here != there:
            found = index
    return found
