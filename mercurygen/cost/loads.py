"""What a transfer occupies and how long it waits: of two ranks, of one group, of all groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Path:
    """From one rank to another.

    Attributes:
        level: index of the outermost level where they differ: the one they cross.
        latency: s.
        small: s, by the protocol for little data.
        seconds: (resource, s per byte) of each on the way.
        share: part of a GPU's SMs that the transfer keeps busy.
    """

    level: int
    latency: float
    small: float
    seconds: tuple[tuple[int, float], ...]
    share: float


@dataclass(frozen=True, slots=True)
class Load:
    """One collective of one group.

    Attributes:
        latency: s, beside what the bytes take.
        small: s, by the protocol for little data.
        seconds: (resource, s per byte of one rank's source buffer).
        sent: (rank, level, share): what a rank sends over a level, in units of its source
            buffer divided by the square of the number of ranks of the whole mesh.
        share: part of a GPU's SMs that it keeps busy.
    """

    latency: float
    small: float
    seconds: tuple[tuple[int, float], ...]
    sent: tuple[tuple[int, int, int], ...]
    share: float


@dataclass(frozen=True, slots=True)
class Price:
    """One operation along a mesh dimension, by all its groups at the same time.

    Attributes:
        latency: s.
        small: s, by the protocol for little data.
        seconds: per level, s per byte on its busiest resource.
        sent: the same shares as of Load, of all groups.
        share: part of a GPU's SMs that it keeps busy.
    """

    latency: float
    small: float
    seconds: tuple[tuple[int, float], ...]
    sent: tuple[tuple[int, int, int], ...]
    share: float
