"""What a search found: candidates with their costs, counts, the Pareto set, the named designs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from mercurygen.cost.report import Cost, Traffic
from mercurygen.cost.topology import Topology
from mercurygen.ir.problem import Problem
from mercurygen.lower.plan import Plan
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import show

OBJECTIVES = ("time", "memory")
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
        simulated: its cost by the event simulation, if it was among the best.
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

        Times are compared to a picosecond: sums in another order are not faster.
        """
        time, memory = round(self.cost.time, 12), self.cost.peak_memory
        first = (time, memory) if objective == "time" else (memory, time)
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


@dataclass(frozen=True, slots=True)
class Named:
    """A named design: its best instance, or why there is none.

    Attributes:
        name: of the design.
        best: the instance that the objective prefers, or None.
        slug: what refuses it.
        message: the same in words.
        help: what to do about it.
    """

    name: str
    best: Candidate | None
    slug: str | None = None
    message: str | None = None
    help: str | None = None

    def to_dict(self) -> dict:
        """For `--json`."""
        if self.best is not None:
            return {**self.best.to_dict(), "name": self.name}
        return {"name": self.name, "refused": self.slug, "message": self.message, "help": self.help}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many schedules the search looked at.

    Attributes:
        candidates: points of the space.
        legal: of them, those that lower to a plan within the memory limit.
        not_emitted: of these, those that ranked high enough to be asked and have no module yet.
        refused: per slug, the rest; sorted by slug.
        skipped: variants (tile loops, rings both ways) of schedules that are not among the best:
            they are not looked at.
    """

    candidates: int
    legal: int
    not_emitted: int
    refused: tuple[tuple[str, int], ...]
    skipped: int = 0

    def to_dict(self) -> dict:
        """For `--json`."""
        return {**asdict(self), "refused": dict(self.refused)}


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found.

    Attributes:
        problem: over all tensor-parallel ranks.
        topology: the machine.
        group: ranks per level, outermost first.
        tp: tensor-parallel ranks.
        objective: "time" or "memory".
        memory_limit: bytes of a GPU.
        counts: of the space.
        ranked: every simulated candidate, in the order of the objective.
        pareto: those that nothing beats in both time and memory, fastest first.
        named: the named designs.
        unemitted: what the objective prefers to all of these, but has no module yet, or None.
    """

    problem: Problem
    topology: Topology
    group: tuple[int, ...]
    tp: int
    objective: str
    memory_limit: int
    counts: Counts
    ranked: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    named: tuple[Named, ...]
    unemitted: Candidate | None = None

    @property
    def best(self) -> Candidate:
        """What the objective prefers; of times that the model cannot tell apart, the simplest."""
        if self.objective != "time":
            return self.ranked[0]
        most = self.ranked[0].cost.time * (1 + RESOLUTION)
        near = [c for c in self.ranked if c.cost.time <= most]
        return min(near, key=lambda c: (c.lines, c.key("time")))

    @property
    def others(self) -> tuple[Candidate, ...]:
        """All but the best, in their order."""
        return tuple(candidate for candidate in self.ranked if candidate is not self.best)

    def to_dict(self) -> dict:
        """For `--json`: plain data, in a fixed order."""
        group = {x.name: n for x, n in zip(self.topology.levels, self.group, strict=True)}
        return {
            "problem": asdict(self.problem),
            "topology": {"name": self.topology.name, "digest": self.topology.digest},
            "group": group,
            "tp": self.tp,
            "objective": self.objective,
            "memory_limit": self.memory_limit,
            "counts": self.counts.to_dict(),
            "best": self.best.to_dict(),
            "ranked": [candidate.to_dict() for candidate in self.ranked],
            "pareto": [candidate.to_dict() for candidate in self.pareto],
            "named": [named.to_dict() for named in self.named],
            "unemitted": self.unemitted.to_dict() if self.unemitted else None,
        }


def pareto(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in time or memory without losing in the other; fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: c.key("time")):
        if not front or candidate.cost.peak_memory < front[-1].cost.peak_memory:
            front.append(candidate)
    return tuple(front)


def _traffic(traffic: tuple[Traffic, ...]) -> dict[str, dict[str, float]]:
    return {one.name: {"mean": one.mean, "max": one.most, "port": one.port} for one in traffic}
