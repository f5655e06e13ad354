"""Where the operator's ranks sit on a topology, and what a schedule's header says of it."""

from __future__ import annotations

from math import prod

from mercurygen.cost.links import Network
from mercurygen.cost.topology import Topology
from mercurygen.errors import UserError
from mercurygen.ir.mesh import Link
from mercurygen.schedule.expected import Expected, rounded
from mercurygen.schedule.schedule import Schedule, Target
from mercurygen.schedule.text import check_group

HOST = "node"  # the level that shipped topologies call so
MOST_IN_A_HOST = 16  # GPUs; DGX-2


def target(topology: Topology) -> Target:
    """The topology as a schedule's header names it; bandwidths to the digits that it prints."""
    return Target(
        topology.name, topology.digest, _links(topology, [x.size for x in topology.levels])
    )


def links(topology: Topology, group: tuple[int, ...]) -> tuple[Link, ...]:
    """The levels as a group occupies them, outermost first."""
    return _links(topology, list(group))


def place(topology: Topology, group: tuple[int, ...] | None, tp: int) -> tuple[int, ...]:
    """Ranks of the group per level; by default all that tensor parallelism leaves.

    The `tp` siblings of a rank sit beside it on the innermost level, and siblings of the group
    fill the rest: its size times tp divides that level.

    Raises:
        UserError: `tp-does-not-fit`, `group-not-of-topology`.
    """
    inner = topology.levels[-1]
    fitting = [n for n in range(1, inner.size + 1) if inner.size % n == 0]
    if tp not in fitting:
        raise UserError(
            "tp-does-not-fit",
            f"tp={tp} does not divide the innermost level {inner.name}={inner.size}",
            help="legal: " + ", ".join(map(str, fitting)),
        )
    if group is None:
        return (*(level.size for level in topology.levels[:-1]), inner.size // tp)
    names = " ".join(f"{level.name}={level.size}" for level in topology.levels)
    if len(group) != len(topology.levels):
        raise UserError(
            "group-not-of-topology",
            f"a group of {len(group)} levels, the topology {topology.name} has {names}",
            help="give every level, outermost first",
        )
    for size, level in zip(group, topology.levels, strict=True):
        check_group(level.name, size, level.size)
    if inner.size % (group[-1] * tp):
        legal = [n for n in fitting if inner.size % (n * tp) == 0]
        raise UserError(
            "group-not-of-topology",
            f"{inner.name}={group[-1]} times tp={tp} does not divide {inner.name}={inner.size}",
            help=f"with tp={tp}, legal {inner.name}: " + ", ".join(map(str, legal)),
        )
    return group


def expected(topology: Topology, schedule: Schedule) -> Expected | None:
    """What the ranks should find: machines, and the speeds that the cost model takes.

    A level called `node` is a machine; a topology without one, of at most 16 GPUs, is one machine.
    Of others (an NVLink domain over many trays) it is not known. One rank expects nothing.
    """
    group, mesh = schedule.group, schedule.mesh
    if not mesh.dims:
        return None
    names = [level.name for level in topology.levels]
    hosts = prod(group[: names.index(HOST) + 1]) if HOST in names else 1
    known = HOST in names or topology.size <= MOST_IN_A_HOST
    network = Network(topology, group, schedule.tp)
    seconds = {
        dim.name: max(each for _, each in network.price("shift", mesh, dim.name).seconds)
        for dim in mesh.dims
    }
    speeds = tuple((name, rounded(1 / each)) for name, each in seconds.items())
    return Expected(hosts if known else None, speeds)


def _links(topology: Topology, sizes: list[int]) -> tuple[Link, ...]:
    return tuple(
        Link(level.name, size, level.link, float(f"{level.bandwidth / 1e9:g}") * 1e9)
        for level, size in zip(topology.levels, sizes, strict=True)
    )
