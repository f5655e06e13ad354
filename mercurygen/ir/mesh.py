"""Meshes: how the ranks of a group are arranged, and over which levels a dimension runs.

A group occupies the levels of a topology, outermost (slowest link) first. A mesh covers the same
ranks with dimensions of its own: each is a part of one level, a whole level, or several whole
adjacent levels. Rank and coordinate are row-major, everywhere, by `Mesh.coordinate`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mercurygen.errors import UserError, printable, shorten

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,19}")


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the topology, as far as a schedule knows it.

    Attributes:
        level: name of the level.
        size: how many of it the group occupies in the level above.
        name: what the wire is called, for people ("NVLink").
        bandwidth: bytes per second, per GPU and direction.
    """

    level: str
    size: int
    name: str
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Dim:
    """A mesh dimension: a name and a number of ranks, more than one."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Named dimensions, outermost (slowest link) first."""

    dims: tuple[Dim, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.dims)

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(dim.size for dim in self.dims)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions, outermost first."""
        return tuple(dim.name for dim in self.dims)

    def extent(self, name: str) -> int:
        """Number of ranks along a dimension."""
        return self._extents[name]

    def index(self, name: str) -> int:
        """Place of a dimension among all, from the outermost."""
        return self._index[name]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {dim.name: i for i, dim in enumerate(self.dims)}

    @cached_property
    def _extents(self) -> dict[str, int]:
        return {dim.name: dim.size for dim in self.dims}

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the dimensions that are named, in mesh order."""
        named = set(names)
        return tuple(name for name in self.names if name in named)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Place of a rank along every dimension: row-major, the last varies fastest."""
        place = {}
        for dim in reversed(self.dims):
            rank, place[dim.name] = divmod(rank, dim.size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at a coordinate; the inverse of `coordinate`."""
        rank = 0
        for dim in self.dims:
            rank = rank * dim.size + coordinate[dim.name]
        return rank

    def peer(self, rank: int, name: str, index: int) -> int:
        """The rank that differs from this one only in having `index` along a dimension."""
        return self.rank({**self.coordinate(rank), name: index})

    def group(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks along a dimension through this rank, in their order."""
        return tuple(self.peer(rank, name, i) for i in range(self.extent(name)))


def cover(mesh: Mesh, levels: tuple[Link, ...]) -> dict[str, tuple[int, ...]]:
    """Which levels every dimension runs over, outermost first.

    Args:
        mesh: the dimensions.
        levels: what the group occupies of each level.

    Returns:
        Per dimension the indices of its levels: one, or several adjacent whole ones.

    Raises:
        UserError: `mesh-not-of-topology`, with the levels that there are.
    """
    covered: dict[str, tuple[int, ...]] = {}
    index, rest = 0, levels[0].size if levels else 1
    for dim in mesh.dims:
        while rest == 1 and index + 1 < len(levels):
            index += 1
            rest = levels[index].size
        start, whole = index, rest == levels[index].size if levels else True
        size = dim.size
        while size > rest and whole and size % rest == 0 and index + 1 < len(levels):
            size //= rest
            index += 1
            rest = levels[index].size
        merged = index > start
        if size > rest or rest % size or (merged and size != rest):
            raise _not_of_topology(mesh, levels, dim)
        rest //= size
        used = (i for i in range(start, index + 1) if levels[i].size > 1)
        covered[dim.name] = tuple(used)
    if mesh.size != prod(level.size for level in levels):
        raise _not_of_topology(mesh, levels, mesh.dims[-1] if mesh.dims else None)
    return covered


def _not_of_topology(mesh: Mesh, levels: tuple[Link, ...], dim: Dim | None) -> UserError:
    """The refusal of a mesh that does not cover the group, level by level."""
    have = " ".join(f"{level.level}={level.size}" for level in levels)
    want = " ".join(f"{d.name}={d.size}" for d in mesh.dims) or "no dimension"
    where = f" ({dim.name}={dim.size} does not fit)" if dim else ""
    return UserError(
        "mesh-not-of-topology",
        f"mesh {shorten(want)} does not cover the group {have}{where}",
        help="a dimension is a part of one level or several whole adjacent levels, outermost "
        f"first; nearest: `mesh {' '.join(f'{x.level}={x.size}' for x in levels if x.size > 1)}`",
    )


def check_name(name: str, what: str) -> None:
    """Refuse a name that is not a plain identifier: it reaches emitted code.

    Raises:
        UserError: `not-a-name`.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UserError(
            "not-a-name",
            f"{what} {shorten(printable(name))!r} is not a name",
            help="letters, digits and _, beginning with a letter, at most 20, no Python keyword",
        )
