"""What tells one schedule from another, figure by figure: time and where it goes, bytes, memory."""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.search.candidate import RESOLUTION, Candidate
from mercurygen.search.changes import identity
from mercurygen.search.result import Result
from mercurygen.search.why import PARTS, gib, label, mib, ms

NOTED = 0.002  # of the choice's time: what is less is not told
_SHORT = {
    "compute": "computing",
    "exposed": "waiting",
    "copies": "copies and merges",
    "launch": "launches",
}


@dataclass(frozen=True, slots=True)
class Against:
    """Another schedule beside the choice.

    Attributes:
        name: what it is to the reader: "runner-up", or its design.
        choice: the one.
        other: the other; None if nothing of the name is legal.
        slug: what refuses it then.
        message: the same in words.
    """

    name: str
    choice: Candidate
    other: Candidate | None
    slug: str | None = None
    message: str | None = None

    def words(self) -> str:
        """The other's figures as differences from the choice's, in a sentence."""
        if self.other is None:
            return f"{self.name}: refused, {self.slug}: {self.message}"
        name = "" if self.name == self.other.design else f"{self.name}, "
        return f"{name}{label(self.other)}: {differences(self.choice, self.other)}"

    def to_dict(self) -> dict:
        """For `--json`: seconds and bytes, the other's minus the choice's."""
        if self.other is None:
            return {"name": self.name, "refused": self.slug, "message": self.message}
        a, b = self.choice.cost, self.other.cost
        return {
            "name": self.name,
            "schedule": self.other.text,
            "time": b.time - a.time,
            "time_parts": {part: _part(b, part) - _part(a, part) for part in PARTS},
            "bytes_per_link": {
                ours.name: {
                    "mean": theirs.mean - ours.mean,
                    "max": theirs.most - ours.most,
                    "port": theirs.port - ours.port,
                }
                for ours, theirs in zip(a.links, b.links, strict=True)
            },
            "imbalance": b.imbalance - a.imbalance,
            "peak_memory": b.peak_memory - a.peak_memory,
        }


def others(result: Result) -> tuple[Against, ...]:
    """The runner-up, then every named design that is neither it nor the choice."""
    best, found = result.best, []
    told = [identity(best.schedule)]
    for second in result.others[:1]:
        found.append(Against("runner-up", best, second))
        told.append(identity(second.schedule))
    for named in result.named:
        if named.best is None:
            found.append(Against(named.name, best, None, named.slug, named.message))
        elif identity(named.best.schedule) not in told:
            found.append(Against(named.name, best, named.best))
    return tuple(found)


def differences(choice: Candidate, other: Candidate) -> str:
    """How another schedule differs from the choice: all of it that a person would notice."""
    a, b = choice.cost, other.cost
    slower, more = b.time - a.time, b.peak_memory - a.peak_memory
    words = ["takes as long"]
    if round(slower, 12):
        words = [f"takes {percent(abs(slower) / a.time)} {_change(slower)}"]
    if more:
        words.append(f"needs {gib(abs(more))} {_change(more)}")
    if slower <= RESOLUTION * a.time and other.lines > choice.lines:
        words.append("has more to read")
    moved = {part: _part(b, part) - _part(a, part) for part in PARTS}
    where = [
        f"{ms(abs(moved[part]))} {_change(moved[part])} {_SHORT[part]}"
        for part in sorted(moved, key=lambda part: -abs(moved[part]))
        if abs(moved[part]) >= NOTED * a.time
    ]
    sent = [
        f"{mib(theirs.port)} over {ours.name}, not {mib(ours.port)}"
        for ours, theirs in zip(a.links, b.links, strict=True)
        if ours.port != theirs.port
    ]
    if f"{a.imbalance:.3g}" != f"{b.imbalance:.3g}":
        where.append(f"{b.imbalance:.3g} times the mean work on a rank, not {a.imbalance:.3g}")
    return "; ".join(", ".join(part) for part in (words, where, sent) if part)


def percent(share: float) -> str:
    """Two digits behind the point; of a multiple none."""
    return f"{share:.2%}" if share < 1 else f"{share:.0%}"


def _change(amount: float) -> str:
    return "more" if amount > 0 else "less"


def _part(cost, part: str) -> float:
    return getattr(cost.times, part)
