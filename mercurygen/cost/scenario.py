"""What may go wrong with a machine's links, as topologies: pure functions of the planned one.

Each scenario is a topology of the same levels, so that any plan is simulated on it as on its own.
None is a forecast: they are stated stresses, alike for every schedule, and say how its time moves.
The groups beside ours are in all of them, the planned one too: they do what ours does at the same
time and share its ports (`mercurygen.cost.links`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import fsum, prod

from mercurygen.cost.topology import Level, Topology

PLANNED = "as planned"
SLOWED = 0.5  # of the bandwidth that is left of a slow link: a ring cut to half its channels


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine that is not as planned.

    Attributes:
        name: a few words.
        what: what was changed, in words.
        topology: the machine as it then is.
    """

    name: str
    what: str
    topology: Topology


def scenarios(topology: Topology, group: tuple[int, ...]) -> tuple[Scenario, ...]:
    """The planned machine first, then what may go wrong with the levels that a group spans.

    No two are the same machine.

    Args:
        topology: as planned.
        group: ranks per level, outermost first.
    """
    spanned = [i for i, size in enumerate(group) if size > 1]
    found = [Scenario(PLANNED, "the topology as its file says", topology)]
    found += [slow(topology, index) for index in spanned]
    found += [jitter(topology, index, prod(group)) for index in spanned]
    found += [lost for index in spanned if (lost := lost_port(topology, index)) is not None]
    found += [busy(topology, spanned)] if spanned else []
    distinct: dict[Topology, Scenario] = {}
    for scenario in found:
        distinct.setdefault(scenario.topology, scenario)
    return tuple(distinct.values())


def slow(topology: Topology, index: int) -> Scenario:
    """One level's links at half their bandwidth, the ports that GPUs share too."""
    name = topology.levels[index].name
    what = f"every {topology.levels[index].link} link of {name} has half its bandwidth"
    return Scenario(f"{name} at half speed", what, _with(topology, [index], _slowed))


def jitter(topology: Topology, index: int, ranks: int) -> Scenario:
    """One level's transfers delayed at random, as a constant.

    The model: a transfer is late by a time that is exponentially distributed, its mean as long as
    the level's latency, and a step is over when the latest of all ranks' transfers is. The
    greatest of n such times is n's harmonic number of means on average (Renyi 1953): that much is
    added to each transfer and each step of a collective, so that a simulation stays exact.

    Args:
        topology: as planned.
        index: of the level.
        ranks: that send at the same time.
    """
    level = topology.levels[index]
    late = level.latency * fsum(1 / n for n in range(1, ranks + 1))
    small = None if level.small_latency is None else level.small_latency + late
    made = _with(
        topology, [index], lambda x: replace(x, latency=x.latency + late, small_latency=small)
    )
    what = (
        f"every step over {level.name} is {late * 1e6:.3g} us late: the last of {ranks} transfers "
        f"that are late by {level.latency * 1e6:.3g} us on average"
    )
    return Scenario(f"{level.name} jitters", what, made)


def lost_port(topology: Topology, index: int) -> Scenario | None:
    """One port (a NIC) of a level lost, in one group: its GPUs send through the next port there.

    That is the first port of the first group. None where a group has no other port, and on the
    innermost level, where a GPU without its links is a lost GPU.
    """
    level, inner = topology.levels[index], topology.levels[index + 1 :]
    if prod(x.size for x in inner) // level.port_gpus < 2:
        return None
    one = f"GPU 0 of {level.name} 0 sends" if level.port_gpus == 1 else "the GPUs behind it send"
    what = f"the first {level.link} port of {level.name} 0 is gone: {one} through the next one"
    made = _with(topology, [index], lambda x: replace(x, lost_port=True))
    return Scenario(f"a {level.name} port lost", what, made)


def busy(topology: Topology, indices: Iterable[int]) -> Scenario:
    """Somebody else's traffic on all links at the same time, as much as ours: half is left."""
    what = "others (FSDP's gathers, another job) send as much as we do over every link at once"
    return Scenario("busy neighbour", what, _with(topology, indices, _slowed))


def _slowed(level: Level) -> Level:
    bandwidth, port = level.bandwidth * SLOWED, level.port_bandwidth * SLOWED
    return replace(level, bandwidth=bandwidth, port_bandwidth=port)


def _with(topology: Topology, indices: Iterable[int], change) -> Topology:
    """The topology with some of its levels changed."""
    chosen = set(indices)
    levels = (change(x) if i in chosen else x for i, x in enumerate(topology.levels))
    return replace(topology, levels=tuple(levels))
