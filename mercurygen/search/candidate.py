"""A schedule that the search looked at, what it costs, and what nothing beats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

from mercurygen.cost.report import Cost, Traffic
from mercurygen.lower.plan import Plan
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import show

OBJECTIVES = ("time", "memory", "robust")
RESOLUTION = 0.01  # times closer than that are alike: the model itself is not so exact


@dataclass(frozen=True)
class Candidate:
    """A legal schedule and what it costs.

    Attributes:
        schedule: complete, header included.
        plan: what it lowers to.
        design: the named design that it is an instance of, or None.
        number: its place in the space.
        closed: its cost in lock step.
        simulated: its cost by the event simulation, if it was among the best, and of no more
            ranks than are simulated.
        gradient: the plan of the backward, if both were searched: the costs are then of both.
    """

    schedule: Schedule
    plan: Plan
    design: str | None
    number: int
    closed: Cost
    simulated: Cost | None = None
    gradient: Plan | None = None

    @property
    def cost(self) -> Cost:
        """The better estimate that there is."""
        return self.simulated or self.closed

    @cached_property
    def text(self) -> str:
        """The schedule as a `.sched` file."""
        return show(self.schedule)

    @property
    def lines(self) -> tuple[int, int]:
        """How much there is to read: dimensions of the mesh, then directives."""
        below = self.schedule.backward
        more = len(below.directives) if below is not None else 0
        return len(self.schedule.mesh.dims), len(self.schedule.directives) + more

    def key(self, objective: str) -> tuple:
        """What the search sorts by: the objective, the other one, dimensions, the place.

        The robust schedule is looked for among the fast ones. Times are compared to a picosecond:
        sums in another order are not faster.
        """
        time, memory = round(self.cost.time, 12), self.cost.peak_memory
        first = (memory, time) if objective == "memory" else (time, memory)
        return (*first, len(self.schedule.mesh.dims), self.number)

    def to_dict(self) -> dict:
        """For `--json`: times in seconds, sizes in bytes."""
        cost = self.cost
        return {
            "name": self.design,
            "mesh": {dim.name: dim.size for dim in self.schedule.mesh.dims},
            "schedule": self.text,
            "time": cost.time,
            "time_parts": {k: v for k, v in asdict(cost.times).items() if k != "total"},
            "time_closed": self.closed.time,
            "bytes_per_link": _traffic(cost.links),
            "bytes_per_dim": _traffic(cost.dims),
            "operations": cost.operations,
            "imbalance": cost.imbalance,
            "peak_memory": cost.peak_memory,
        }


def fastest(ranked: Iterable[Candidate]) -> Candidate:
    """The fastest; of times that the model cannot tell apart, the simplest schedule."""
    ranked = list(ranked)
    most = min(candidate.cost.time for candidate in ranked) * (1 + RESOLUTION)
    near = [candidate for candidate in ranked if candidate.cost.time <= most]
    return min(near, key=lambda c: (c.lines, c.key("time")))


def pareto(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in time or memory without losing in the other; fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: c.key("time")):
        if not front or candidate.cost.peak_memory < front[-1].cost.peak_memory:
            front.append(candidate)
    return tuple(front)


def _traffic(traffic: tuple[Traffic, ...]) -> dict[str, dict[str, float]]:
    return {one.name: {"mean": one.mean, "max": one.most, "port": one.port} for one in traffic}
