"""Machines that are not as planned, what schedules lose there, and what a Pareto set gives up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import SMALL, folder, run

from mercurygen.cost.links import Network
from mercurygen.cost.scenario import PLANNED, scenarios
from mercurygen.cost.simulate import simulate
from mercurygen.cost.topology import load
from mercurygen.ir.problem import Problem
from mercurygen.search import robust
from mercurygen.search.front import trades
from mercurygen.search.result import Result
from mercurygen.search.search import search


@pytest.fixture(scope="module")
def found() -> Result:
    """Two sockets of PCIe: what is fast as planned is not where the links are shared."""
    topology = load("h100-pcie-x8")
    return search("attention", Problem(), topology, group=(2, 2), objective="robust")


def names(topology: str, group: tuple[int, ...]) -> list[str]:
    """Of the scenarios."""
    return [scenario.name for scenario in scenarios(load(topology), group)]


# --- scenarios --------------------------------------------------------------------------------


def test_scenarios_of_what_is_spanned() -> None:
    """Every level that the group spans; a lost port where there is another; none twice."""
    node = ["node at half speed", "node jitters", "a node port lost"]
    gpu = ["gpu at half speed", "gpu jitters"]
    both = [PLANNED, node[0], gpu[0], node[1], gpu[1], node[2], "busy neighbour"]
    assert names("h100x16", (2, 8)) == both
    assert names("h100x16", (2, 1)) == [PLANNED, *node]
    assert names("h100x16", (1, 8)) == names("h100x8", (8,)) == [PLANNED, *gpu]
    assert names("h100x16", (1, 1)) == [PLANNED]
    assert "a node port lost" not in names("mercury-h100x32", (4, 8))  # eight GPUs share the one


def test_what_a_scenario_changes() -> None:
    """One level's numbers, and the planned machine stays as it is."""
    planned = load("h100x16")
    node, gpu = planned.levels
    by_name = {scenario.name: scenario.topology for scenario in scenarios(planned, (2, 8))}
    assert by_name[PLANNED] == planned == load("h100x16")
    slow = by_name["node at half speed"]
    assert slow == replace(
        planned, levels=(replace(node, bandwidth=25e9, port_bandwidth=25e9), gpu)
    )
    late = by_name["gpu jitters"].levels[1].latency - gpu.latency
    assert late == pytest.approx(gpu.latency * sum(1 / n for n in range(1, 17)))
    assert by_name["busy neighbour"].levels[0] == slow.levels[0]
    assert by_name["busy neighbour"].levels[1].bandwidth == gpu.bandwidth / 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_lost_port(tp: int) -> None:
    """Two GPUs leave by one port, whether both are ours or not; all others by their own."""
    planned, group = load("h100x16"), (2, 8 // tp)
    lost = scenarios(planned, group)[-2].topology
    before, after = (Network(each, group, tp) for each in (planned, lost))
    half = 8 // tp
    ways = [dict(after.path(rank, rank + half).seconds) for rank in range(half)]
    was = max(dict(before.path(0, half).seconds).values())
    shared = set(ways[0]) & set(ways[1])
    busiest = [sum(way.get(port, 0.0) for way in ways) for port in range(len(after.levels))]
    assert max(busiest) == pytest.approx(2 * was)
    assert len(shared) == (1 if tp == 1 else 0)  # else it is a sibling's
    assert max(ways[2].values()) == pytest.approx(was)
    assert sorted(len(ranks) * times for ranks, times in after.ports(0))[-2:] == [1, 2]


def test_siblings_take_their_part_of_a_link() -> None:
    """Beside another group, of data or tensor parallelism: as alone on ports of half the speed."""
    topology = load("l40x8")
    switch, gpu = topology.levels
    alone = replace(
        topology,
        levels=(
            replace(switch, port_gpus=2, port_bandwidth=switch.port_bandwidth / 2),
            replace(gpu, size=2),
        ),
    )
    unshared = replace(switch, port_gpus=1, port_bandwidth=switch.bandwidth)
    free = replace(topology, levels=(unshared, gpu))
    problem = Problem(seq=16384)
    for tp in (1, 2):
        best = search("attention", problem, topology, group=(2, 2), tp=tp, design="ring").best
        beside = simulate(best.plan, Network(topology, (2, 2), tp)).time
        assert beside == simulate(best.plan, Network(alone, (2, 2))).time
        assert beside > 1.2 * simulate(best.plan, Network(free, (2, 2), tp)).time


# --- the most robust schedule -----------------------------------------------------------------


def test_regrets_are_simulated_again(found: Result) -> None:
    """Each time is the plan's on that machine; each regret is against the best time there."""
    told = found.robustness
    machines = [Network(each.topology, found.group) for each in told.scenarios]
    for row in told.rows[::6]:
        times = tuple(simulate(row.candidate.plan, each).time for each in machines)
        assert row.times == pytest.approx(times, abs=1e-12)
    for i, column in enumerate(zip(*(row.times for row in told.rows), strict=True)):
        assert told.winners[i].times[i] == min(column)
        assert [r.regrets[i] for r in told.rows] == [time / min(column) - 1 for time in column]
    assert [row.worst for row in told.rows] == sorted(row.worst for row in told.rows)
    assert all(row.times[0] <= time for row in told.rows for time in row.times)


def test_the_choice_keeps_its_time(found: Result) -> None:
    """What is chosen for time loses an eighth where the link between the sockets is slow."""
    told = found.robustness
    fast = told.row(found.fastest)
    assert found.best.design == "ring" and told.best.worst < 0.01
    assert fast.worst > 0.12 and told.worst_of(fast).name == "socket at half speed"
    assert found.best in [row.candidate for row in told.rows] and found.best not in found.others


def test_what_cannot_win_is_not_priced(found: Result) -> None:
    """The closed form's best of a scenario are those of all that it could price."""
    others = [row.candidate for row in found.robustness.rows] + list(found.ranked)
    others = sorted({c.text: c for c in others}.values(), key=lambda c: c.key("time"))
    slow = Network(found.robustness.scenarios[1].topology, found.group)
    every = sorted(others, key=lambda c: robust.time_of(c, slow, robust.closed.cost))
    some = robust._first(others, slow, lambda c: c.number % 2 == 0)
    assert some and some == [c for c in every if c.number % 2 == 0][: robust.FIRST]


# --- what a Pareto set gives up ---------------------------------------------------------------


def test_a_pareto_set_gives_up(found: Result) -> None:
    """Time to the next faster, memory to the next leaner; in the order of the set."""
    told = trades(found.pareto)
    assert [trade.point for trade in told] == list(found.pareto) and len(told) > 2
    assert told[0].time == told[-1].memory == 0
    assert all(trade.time > 0 for trade in told[1:]) and all(t.memory > 0 for t in told[:-1])
    ends = [x.cost for x in (found.pareto[0], found.pareto[-1])]
    assert sum(trade.time for trade in told) == pytest.approx(ends[1].time - ends[0].time)
    assert sum(trade.memory for trade in told) == ends[0].peak_memory - ends[1].peak_memory
    assert "faster" not in told[0].words and "leaner" not in told[-1].words
    for trade in told[1:]:
        close = trade.time < 0.01 * trade.faster.cost.time
        assert close == ("which the model cannot tell" in trade.words)
    assert trades(found.pareto[:1])[0].words == "gives up nothing"


# --- the command line -------------------------------------------------------------------------


def test_objective_robust(tmp_path: Path) -> None:
    """The table is printed, and the whole of it with --json."""
    with folder(tmp_path):
        out = run("emit", *SMALL, "--objective", "robust").done()
        assert "as planned" in out and "loses at most" in out and "at most" in out
        (schedule,) = Path("generated").glob("*_robust_*.sched")
        assert "loses at most" in " ".join(schedule.read_text().splitlines()[1:3])
        told = json.loads(run("search", *SMALL, "--objective", "robust", "--json").done())
        text = run("search", *SMALL, "--objective", "robust").done()
    table = told["robustness"]
    assert all(len(row["times"]) == len(table["scenarios"]) for row in table["rows"])
    assert told["best"]["schedule"] in [row["schedule"] for row in table["rows"]]
    for point in told["pareto"]:
        assert point["gives_up"]["words"] in text
    assert all(scenario["name"] in text for scenario in table["scenarios"])
