"""Bytes that ranks send, per level and per mesh dimension, exactly."""

from __future__ import annotations

from collections import Counter

from mercurygen.cost.links import Network
from mercurygen.cost.report import Traffic
from mercurygen.lower.plan import Plan


class Totals:
    """Bytes sent, exactly: counted in parts of one rank's buffer, of which there are whole ones."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.network, self.mesh = network, plan.program.mesh
        self.by_level: Counter[tuple[int, int]] = Counter()  # (level, rank)
        self.by_dim: Counter[tuple[str, int]] = Counter()  # (dimension, rank)

    def add(self, dim: str, sent: tuple[tuple[int, int, int], ...], nbytes: int) -> None:
        """Count an operation along a dimension, from a buffer of this size."""
        for rank, level, share in sent:
            self.by_level[level, rank] += share * nbytes
            self.by_dim[dim, rank] += share * nbytes

    def links(self) -> tuple[Traffic, ...]:
        """Per level that the group spans."""
        names = [level.name for level in self.network.topology.levels]
        used = [i for i, size in enumerate(self.network.group) if size > 1]
        return tuple(self._traffic(names[i], self.by_level, i, self.network.ports(i)) for i in used)

    def dims(self) -> tuple[Traffic, ...]:
        """Per mesh dimension."""
        each = [((rank,), 1.0) for rank in range(self.network.size)]
        return tuple(self._traffic(name, self.by_dim, name, each) for name in self.mesh.names)

    def _traffic(self, name: str, totals: Counter, key: object, ports: list) -> Traffic:
        size = self.network.size
        sent = [totals[key, rank] for rank in range(size)]
        port = max(sum(sent[rank] for rank in ranks) * times for ranks, times in ports)
        parts = size * size
        return Traffic(name, sum(sent) / (size * parts), max(sent) / parts, port / parts)
