"""What of a problem and a machine may turn out otherwise: quantities, and values to try for them.

Values are round, nearest first, and go as far as a factor of FURTHEST; memory to less than the
choice needs. What is printed of them is what was searched: no number is rounded afterwards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import prod

from mercurygen.cost.topology import Level, Topology
from mercurygen.errors import UserError
from mercurygen.ir.problem import Problem

FURTHEST = 4  # times as much, or as little
MANTISSAS = (10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 25, 28, 30, 35, 40, 45, 50, 60, 70, 80, 90)
QUARTERS = (4, 5, 6, 7)  # of sizes: an octave in steps of a quarter of its first


@dataclass(frozen=True, slots=True)
class Case:
    """What a search is of, as far as it may be otherwise.

    Attributes:
        problem: over all tensor-parallel ranks.
        topology: the machine.
        limit: bytes of a GPU.
    """

    problem: Problem
    topology: Topology
    limit: int


@dataclass(frozen=True, slots=True)
class Knob:
    """A quantity that may be otherwise.

    Attributes:
        name: "bandwidth", "host", "memory", "seq", "batch" or "kv_heads".
        level: of links, or None.
        unit: of the values; "" of numbers of things.
        now: what it is.
        ends: the least and the most that is tried.
    """

    name: str
    level: str | None
    unit: str
    now: float
    ends: tuple[float, float]

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"bandwidth of {self.level}" if self.level else _WORDS[self.name]

    def shown(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:.15g} {self.unit}".rstrip()

    def on(self, case: Case, value: float) -> Case:
        """The case with another value.

        Raises:
            UserError: the problem cannot have it.
        """
        if self.name == "memory":
            return replace(case, limit=int(value * 2**30))
        if self.unit:
            return replace(case, topology=self._machine(case.topology, value))
        return replace(case, problem=replace(case.problem, **{self.name: int(value)}))

    def _machine(self, topology: Topology, value: float) -> Topology:
        """The machine with another value; its digest is of what was changed, too."""
        seed = f"{topology.digest} {self.name} {self.level} {value!r}".encode()
        digest = f"sha256:{hashlib.sha256(seed).hexdigest()[:16]}"
        if self.name == "host":
            gpu = replace(topology.gpu, host_transfer=value * 1e-6)
            return replace(topology, gpu=gpu, digest=digest)
        levels = tuple(
            level if level.name != self.level else _with_bandwidth(level, value * 1e9)
            for level in topology.levels
        )
        return replace(topology, levels=levels, digest=digest)

    def values(self, case: Case, group: tuple[int, ...], up: bool) -> tuple[float, ...]:
        """What to try upwards or downwards, nearest first; sizes that no schedule has are left out.

        Args:
            case: as it is.
            group: ranks per level.
            up: more of it, or less.
        """
        least, most = self.ends
        if self.name == "kv_heads":
            heads = case.problem.heads
            found = [n for n in range(1, heads + 1) if heads % n == 0]
        elif self.unit:
            found = _round()
        else:
            found = _sizes(int(self.now))
            if self.name == "seq":  # whole tiles, in two parts each as zigzag has them
                found = [n for n in found if n % (2 * prod(group)) == 0]
        side = [n for n in found if (self.now < n <= most if up else self.now > n >= least)]
        return tuple(n for n in (side if up else reversed(side)) if self._legal(case, n))

    def _legal(self, case: Case, value: float) -> bool:
        """Whether the problem can have a value: the lengths of documents fix that of the whole."""
        try:
            self.on(case, value)
        except UserError:
            return False
        return True


_WORDS = {
    "host": "the host's time for a message",
    "memory": "memory limit",
    "seq": "tokens",
    "batch": "batch",
    "kv_heads": "key/value heads",
}


def knobs(case: Case, group: tuple[int, ...], peak: int) -> tuple[Knob, ...]:
    """What may be otherwise: links that the group uses, the host, memory, and sizes.

    Args:
        case: as it is.
        group: ranks per level.
        peak: bytes that the choice needs: with less it must be another one.
    """

    def knob(name: str, level: str | None, unit: str, now: float) -> Knob:
        return Knob(name, level, unit, now, (now / FURTHEST, now * FURTHEST))

    problem, gpu, gib = case.problem, case.topology.gpu, case.limit / 2**30
    spanned = [x for x, n in zip(case.topology.levels, group, strict=True) if n > 1]
    found = [knob("bandwidth", x.name, "GB/s", _plain(x.bandwidth / 1e9)) for x in spanned]
    if spanned:
        found.append(knob("host", None, "us", _plain(gpu.host_transfer * 1e6)))
    found.append(Knob("memory", None, "GiB", gib, (min(gib, peak / 2**30) * 0.8, gib)))
    found += [knob(n, None, "", getattr(problem, n)) for n in ("seq", "batch", "kv_heads")]
    return tuple(found)


def _with_bandwidth(level: Level, bandwidth: float) -> Level:
    """A port that several GPUs share is as much faster or slower as the link of each."""
    port = level.port_bandwidth * (bandwidth / level.bandwidth)
    return replace(level, bandwidth=bandwidth, port_bandwidth=port)


def _plain(value: float) -> float:
    """A number of a topology file as it stands there: units leave their rounding behind."""
    return float(f"{value:.12g}")


def _round() -> list[float]:
    """Round numbers, ascending: a mantissa of two digits and a power of ten."""
    return [float(f"{mantissa}e{power}") for power in range(-7, 7) for mantissa in MANTISSAS]


def _sizes(now: int) -> list[int]:
    """Sizes around one, ascending: a quarter of an octave apart, and whole."""
    found = set()
    for power in range(-4, 5):
        for quarter in QUARTERS:
            value, rest = divmod(now * quarter * 2 ** (power + 4), 4 * 16)
            if not rest and value:
                found.add(value)
    return sorted(found)
