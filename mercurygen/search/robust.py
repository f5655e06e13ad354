"""The schedule that loses least where links are not as planned, by simulating it there again.

What decides is regret: in each scenario, how much longer a schedule takes than the best one there,
as a part of that one's time; of a schedule the worst counts (minimax regret, Savage 1951). The
worst time itself would not do: it is that of the slowest scenario for every schedule, and says
nothing of the others. The planned machine is one of the scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from mercurygen.cost import closed
from mercurygen.cost.decide import decide
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost, together
from mercurygen.cost.scenario import Scenario, scenarios
from mercurygen.lower.plan import Plan
from mercurygen.search.candidate import RESOLUTION, Candidate, fastest, pareto

FIRST = 8  # of each scenario by the closed form, and as planned by the simulation
MEASURE = "worst regret: time over that of the best schedule in the same scenario, less 1"


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule in every scenario.

    Attributes:
        candidate: the schedule, with its cost as planned.
        times: s, per scenario.
        regrets: what keeping it loses in each, as a part of the best time there.
    """

    candidate: Candidate
    times: tuple[float, ...]
    regrets: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The greatest regret."""
        return max(self.regrets)


@dataclass(frozen=True)
class Robustness:
    """Schedules by scenarios.

    Attributes:
        scenarios: the planned machine first.
        rows: the schedule with the least worst regret first.
    """

    scenarios: tuple[Scenario, ...]
    rows: tuple[Row, ...]

    @cached_property
    def best(self) -> Row:
        """The least worst regret; of those that the model cannot tell apart, the simplest."""
        most = self.rows[0].worst + RESOLUTION
        near = [row for row in self.rows if row.worst <= most]
        return min(near, key=lambda row: (row.candidate.lines, *_order(row)))

    @cached_property
    def winners(self) -> tuple[Row, ...]:
        """The fastest schedule of each scenario."""
        columns = range(len(self.scenarios))
        return tuple(min(self.rows, key=lambda row: (row.times[i], *_order(row))) for i in columns)

    def row(self, candidate: Candidate) -> Row | None:
        """That of a schedule, if it was simulated in the scenarios."""
        text = candidate.text
        return next((row for row in self.rows if row.candidate.text == text), None)

    def worst_of(self, row: Row) -> Scenario:
        """Where a schedule loses most."""
        return self.scenarios[row.regrets.index(row.worst)]

    def to_dict(self) -> dict:
        """For `--json`: times in seconds, regrets as parts of the best time."""
        return {
            "measure": MEASURE,
            "scenarios": [{"name": x.name, "what": x.what} for x in self.scenarios],
            "rows": [
                {
                    "name": row.candidate.design,
                    "schedule": row.candidate.text,
                    "times": list(row.times),
                    "regrets": list(row.regrets),
                    "worst_regret": row.worst,
                }
                for row in self.rows
            ],
        }


def weigh(
    ranked: Iterable[Candidate],
    others: Iterable[Candidate],
    has_module: Callable[[Candidate], bool],
    network: Network,
    progress: Callable[[str, int, int], None] | None = None,
) -> Robustness:
    """Simulate schedules in every scenario: the best as planned, their Pareto set, and of all that
    were looked at those that the closed form prefers somewhere.

    Args:
        ranked: simulated as planned, the fastest first.
        others: priced by the closed form, those of `ranked` among them.
        has_module: whether a module is emitted for a schedule.
        network: as planned.
        progress: called with what is done, how many are, of how many.
    """
    ranked, others = list(ranked), sorted(others, key=lambda c: c.key("robust"))
    cases = scenarios(network.topology, network.group)
    networks = [network, *(Network(x.topology, network.group, network.tp) for x in cases[1:])]
    chosen = {c.schedule: c for c in (*ranked[:FIRST], fastest(ranked), *pareto(ranked))}
    for each in networks[1:]:
        for candidate in _first(others, each, has_module):
            chosen.setdefault(candidate.schedule, candidate)
    times: list[tuple[float, ...]] = []
    for done, candidate in enumerate(chosen.values(), 1):
        times.append(tuple(round(time_of(candidate, each), 12) for each in networks))
        if progress is not None:
            progress("schedules simulated in all scenarios", done, len(chosen))
    return table(cases, list(chosen.values()), times)


def table(
    cases: tuple[Scenario, ...], candidates: list[Candidate], times: list[tuple[float, ...]]
) -> Robustness:
    """The rows with their regrets, the least worst first.

    Args:
        cases: the scenarios.
        candidates: schedules.
        times: s, of each in every scenario.
    """
    least = [min(column) for column in zip(*times, strict=True)]
    rows = [
        Row(candidate, each, tuple(time / best - 1 for time, best in zip(each, least, strict=True)))
        for candidate, each in zip(candidates, times, strict=True)
    ]
    return Robustness(cases, tuple(sorted(rows, key=lambda row: (row.worst, *_order(row)))))


def _order(row: Row) -> tuple:
    return row.times[0], row.candidate.cost.peak_memory, row.candidate.number


def _first(
    others: list[Candidate], network: Network, has_module: Callable[[Candidate], bool]
) -> list[Candidate]:
    """The few with a module that the closed form prefers on a network.

    Args:
        others: the fastest as planned first. On links that are worse nothing is faster than it is
            as planned: once that is slower than enough others are here, no later one is looked at.
        network: of a scenario.
        has_module: whether a module is emitted for a schedule.
    """
    found: list[tuple[float, int, Candidate]] = []
    for place, candidate in enumerate(others):
        if len(found) == FIRST and candidate.closed.time > found[-1][0]:
            break
        time = time_of(candidate, network, closed.cost)
        if (len(found) < FIRST or time < found[-1][0]) and has_module(candidate):
            found = sorted([*found, (time, place, candidate)], key=lambda x: x[:2])[:FIRST]
    return [candidate for _, _, candidate in found]


def time_of(
    candidate: Candidate, network: Network, price: Callable[[Plan, Network], Cost] = decide
) -> float:
    """Seconds of a schedule on a network, forward and backward if it has both."""
    cost = price(candidate.plan, network)
    if candidate.gradient is not None:
        cost = together(cost, price(candidate.gradient, network))
    return cost.time
