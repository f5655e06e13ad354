"""What a schedule costs: the numbers that closed form and simulation both give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call.

    Attributes:
        total: until the last rank is done.
        compute: of the attention kernels on the busiest rank, which is the one whose kernels and
            copies take longest (closed form) or that is done last (simulation).
        copies: of its packing, unpacking, casts and merges.
        launch: what the least time of a kernel adds to both.
        exposed: what it waits, for transfers (their launch included), for other ranks and for its
            host, and what it computes slower while transfers keep SMs busy.
        transfers: what its links are busy, latencies included, hidden or not.
    """

    total: float
    compute: float
    copies: float
    launch: float
    exposed: float
    transfers: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank sends over one level or along one mesh dimension in a call.

    Attributes:
        name: of the level or dimension.
        mean: over all ranks.
        most: of the rank that sends most.
        port: out of the busiest port that GPUs share, what sibling groups send included; `most`
            where none is shared, and for dimensions.
    """

    name: str
    mean: float
    most: float
    port: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule costs.

    Attributes:
        times: in seconds.
        links: per level that the group spans, outermost first.
        dims: per mesh dimension, in its order.
        operations: batches and collectives of a rank.
        peak_memory: most bytes alive at one time on any rank, its inputs and result included.
        imbalance: most attention work of a rank over the mean; 1 is balanced.
    """

    times: Times
    links: tuple[Traffic, ...]
    dims: tuple[Traffic, ...]
    operations: int
    peak_memory: int
    imbalance: float

    @property
    def time(self) -> float:
        """Seconds until the last rank is done."""
        return self.times.total


def together(first: Cost, second: Cost) -> Cost:
    """What two calls on the same mesh cost, one after the other."""
    a, b = first.times, second.times
    times = Times(*(getattr(a, part) + getattr(b, part) for part in Times.__slots__))
    compute = a.compute + b.compute
    weighed = first.imbalance * a.compute + second.imbalance * b.compute
    return Cost(
        times,
        tuple(map(_added, first.links, second.links)),
        tuple(map(_added, first.dims, second.dims)),
        first.operations + second.operations,
        max(first.peak_memory, second.peak_memory),
        weighed / compute if compute else max(first.imbalance, second.imbalance),
    )


def _added(a: Traffic, b: Traffic) -> Traffic:
    """Of one level or dimension; the rank that sends most may be another: no less than that."""
    return Traffic(a.name, a.mean + b.mean, a.most + b.most, a.port + b.port)
