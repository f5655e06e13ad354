"""What a search found: candidates with their costs, counts, the Pareto set, the named designs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mercurygen.cost.topology import Topology
from mercurygen.ir.problem import Problem
from mercurygen.search.candidate import Candidate, fastest
from mercurygen.search.front import trades
from mercurygen.search.robust import Robustness


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
        objective: "time", "memory" or "robust".
        memory_limit: bytes of a GPU.
        counts: of the space.
        ranked: every candidate among the best, in the order of the objective; by time for the
            robust.
        pareto: those that nothing beats in both time and memory, fastest first.
        named: the named designs.
        unemitted: what the objective prefers to all of these, but has no module yet, or None.
        robustness: how schedules do where links are not as planned, if that is the objective.
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
    robustness: Robustness | None = None

    @property
    def best(self) -> Candidate:
        """What the objective prefers; of what the model cannot tell apart, the simplest."""
        if self.robustness is not None:
            return self.robustness.best.candidate
        return self.ranked[0] if self.objective == "memory" else self.fastest

    @property
    def fastest(self) -> Candidate:
        """As planned; of times that the model cannot tell apart, the simplest."""
        return fastest(self.ranked)

    @property
    def others(self) -> tuple[Candidate, ...]:
        """All but the best, in the order of the objective."""
        best, ranked = self.best, self.ranked
        if self.robustness is not None:
            ranked = tuple(row.candidate for row in self.robustness.rows)
        return tuple(candidate for candidate in ranked if candidate is not best)

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
            "pareto": [
                {**trade.point.to_dict(), "gives_up": trade.to_dict()}
                for trade in trades(self.pareto)
            ],
            "named": [named.to_dict() for named in self.named],
            "unemitted": self.unemitted.to_dict() if self.unemitted else None,
            "robustness": self.robustness.to_dict() if self.robustness else None,
        }
