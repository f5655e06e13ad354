"""Which tokens a rank holds, in chunks: the arithmetic that lowering, proofs and printing share.

The sequence is cut into equal chunks, numbered in global order. Over the P ranks of an `Order`,
rank r (row-major over its dimensions) owns chunk r of P when contiguous, and chunks r and
2P - 1 - r of 2P when zigzag. Whoever holds the tokens of several ranks holds their chunks in
ascending order: `owned` is that list, and `interleave` the way from the ranks' own lists to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from mercurygen.ir.mesh import Mesh

ORDERS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True, slots=True)
class Order:
    """Token order: how the sequence is dealt to the ranks over some dimensions.

    Attributes:
        kind: one of ORDERS.
        dims: the dimensions that rank it, outermost first.
    """

    kind: str
    dims: tuple[str, ...]

    @property
    def halves(self) -> int:
        """Chunks that one rank owns: an early and a late one under zigzag."""
        return 2 if self.kind == "zigzag" else 1

    def ranks(self, mesh: Mesh) -> int:
        """Number of ranks that the sequence is dealt to."""
        return prod(mesh.extent(name) for name in self.dims)

    def chunks(self, mesh: Mesh) -> int:
        """Number of chunks that the whole sequence is cut into."""
        return self.halves * self.ranks(mesh)

    def owned(self, mesh: Mesh, held: dict[str, Iterable[int]]) -> tuple[int, ...]:
        """Chunks of all ranks whose coordinates are held, ascending.

        Args:
            mesh: the mesh.
            held: per dimension of the order, the coordinates; a dimension left out is held whole.
        """
        return _owned(self, mesh, tuple((name, tuple(held[name])) for name in self.dims if name in held))


@lru_cache(maxsize=65536)
def _owned(
    order: Order, mesh: Mesh, held: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[int, ...]:
    places = dict(held)
    spans = [places.get(name, range(mesh.extent(name))) for name in order.dims]
    early = []
    for place in product(*spans):
        rank = 0
        for name, index in zip(order.dims, place, strict=True):
            rank = rank * mesh.extent(name) + index
        early.append(rank)
    early.sort()
    if order.kind == "zigzag":
        last = order.chunks(mesh) - 1
        return (*early, *(last - rank for rank in reversed(early)))
    return tuple(early)


@dataclass(frozen=True, slots=True)
class Interleaving:
    """How the lists of n ranks along a dimension join into one list in global order.

    Each rank's list is cut into `halves * outer` equal runs: `outer` counts the ranks along
    slower dimensions whose tokens it already holds. For every run the n ranks follow each other,
    forwards in the first half of a zigzag, backwards in the second. Tokens of a striped sequence
    that stay next to each other are those of `inner` ranks.

    Attributes:
        n: ranks along the dimension.
        outer: runs of one half.
        halves: 2 under zigzag, else 1.
        inner: under striped, ranks along faster dimensions whose tokens it already holds; else 1.
    """

    n: int
    outer: int
    halves: int
    inner: int = 1

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(rank, run) of every piece, in global order."""
        order = []
        for half in range(self.halves):
            for run in range(self.outer):
                ranks = reversed(range(self.n)) if half else range(self.n)
                order += [(rank, half * self.outer + run) for rank in ranks]
        return tuple(order)


def interleaving(order: Order, mesh: Mesh, dim: str, gathered: Iterable[str]) -> Interleaving:
    """How to join the sequences along `dim` when those along `gathered` are joined already."""
    at, gathered = order.dims.index(dim), tuple(gathered)
    outer = prod(mesh.extent(name) for name in order.dims[:at] if name in gathered)
    faster = prod(mesh.extent(name) for name in order.dims[at + 1 :] if name in gathered)
    inner = faster if order.kind == "striped" else 1
    return Interleaving(mesh.extent(dim), outer, order.halves, inner)
