"""The rings of a plan: in what different ways tiles come by along one dimension."""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.emit.levels import with_owner
from mercurygen.emit.loops import levels, walked
from mercurygen.emit.needed import cut_outside, uneven
from mercurygen.lower.plan import Plan, Walk

TILES = "tuple[Tensor, ...]"


@dataclass(frozen=True, slots=True)
class Ring:
    """What makes the text of a ring.

    Attributes:
        direct: every tile straight from its owner.
        both: "odd" or "even" numbers of ranks, passed on both ways; "": one way.
        reverse: from the next rank, not from the previous one.
        ahead: tiles that are here, or on their way, while one is used.
        cut: its tiles are fronts of the buffers.
        uneven: of different lengths.
    """

    direct: bool
    both: str
    reverse: bool
    ahead: int
    cut: bool
    uneven: bool

    @property
    def buffers(self) -> int:
        """Sets of receive buffers that are used in turn, if there are as many transfers."""
        if self.both:
            return 4
        return self.ahead + 1 if self.direct else max(self.ahead, 1) + 1


def ring_of(plan: Plan, walk: Walk) -> Ring:
    """The ring of a walk, as simple as its number of ranks allows."""
    size = plan.program.mesh.extent(walk.dim)
    both = ("even", "odd")[size % 2] if walk.both and size > 2 else ""
    cut = cut_outside(plan, walk.dim) and not walk.direct
    ahead = min(walk.ahead, size - 1)
    return Ring(walk.direct, both, walk.reverse, ahead, cut, walk.dim in uneven(plan))


def rings(plan: Plan) -> dict[str, Ring]:
    """The different rings of a plan by the name of their function, outermost first."""
    found: dict[str, Ring] = {}
    for walk in (walk for loop in plan.nest.loops if loop.tensors for walk in loop.walks):
        ring = ring_of(plan, walk)
        if ring in found.values():
            continue
        name = f"_walk_{'direct' if ring.direct else 'both' if ring.both else 'ring'}"
        found[name if name not in found else f"{name}_{walk.dim}"] = ring
    return found


def ring_name(plan: Plan, dim: str) -> str:
    """The function of the ring along a dimension."""
    return name_of(plan, next(walk for walk in walked(plan) if walk.dim == dim))


def name_of(plan: Plan, walk: Walk) -> str:
    """The function of a walk's ring."""
    ring = ring_of(plan, walk)
    return next(name for name, each in rings(plan).items() if each == ring)


def nested(plan: Plan) -> bool:
    """Whether rings are inside rings: buffers are kept outside of them then, and used again."""
    return len(levels(plan)) > 1


def yields(plan: Plan, owner: str) -> str:
    """What rings yield."""
    return f"tuple[{owner}, {TILES}]" if with_owner(plan) else TILES
