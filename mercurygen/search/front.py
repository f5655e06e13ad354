"""The Pareto set of time and memory: what each point gives up to the points beside it."""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.search.candidate import RESOLUTION, Candidate


@dataclass(frozen=True, slots=True)
class Trade:
    """A point of the set, and its neighbours.

    Attributes:
        point: a schedule that nothing beats in both time and memory.
        faster: the next faster one, which needs more memory; None: it is the fastest.
        leaner: the next leaner one, which takes longer; None: it is the leanest.
    """

    point: Candidate
    faster: Candidate | None
    leaner: Candidate | None

    @property
    def time(self) -> float:
        """Seconds given up to the faster one; 0 if it is the fastest."""
        return self.point.cost.time - self.faster.cost.time if self.faster else 0.0

    @property
    def memory(self) -> int:
        """Bytes given up to the leaner one; 0 if it is the leanest."""
        return self.point.cost.peak_memory - self.leaner.cost.peak_memory if self.leaner else 0

    @property
    def words(self) -> str:
        """`gives up 5.25 ms (2.78%) to the next faster, 50 MiB (10.00%) to the next leaner`."""
        parts = []
        if self.faster:
            share = self.time / self.faster.cost.time
            close = ", which the model cannot tell" if share < RESOLUTION else ""
            parts.append(f"{self.time * 1e3:.3g} ms ({share:.2%}{close}) to the next faster")
        if self.leaner:
            share = self.memory / self.leaner.cost.peak_memory
            parts.append(f"{self.memory / 2**20:.4g} MiB ({share:.2%}) to the next leaner")
        return f"gives up {', '.join(parts)}" if parts else "gives up nothing"

    def to_dict(self) -> dict:
        """For `--json`: seconds, bytes and the words."""
        return {"time": self.time, "memory": self.memory, "words": self.words}


def trades(front: tuple[Candidate, ...]) -> tuple[Trade, ...]:
    """Every point of a Pareto set, fastest first, beside its neighbours."""
    beside = (None, *front, None)
    return tuple(Trade(point, beside[i], beside[i + 2]) for i, point in enumerate(front))
