"""The rings of a plan: in what different ways tiles come by along one dimension."""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.emit import windows
from mercurygen.emit.levels import with_owner
from mercurygen.emit.loops import levels, walked
from mercurygen.emit.needed import cut_outside, tile_tokens, uneven
from mercurygen.lower.plan import Gather, Loop, Plan, Walk

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
        short: of a window, that not all ranks' tiles come by.
        wide: of a short ring that passes tiles on, tiles of an owner's run of the sequence.
    """

    direct: bool
    both: str
    reverse: bool
    ahead: int
    cut: bool
    uneven: bool
    short: bool = False
    wide: int = 1

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
    ahead = min(walk.ahead, len(walk.coming(size)))
    short = plan.program.banded and (walk.direct or walk.steps is not None)
    wide = _wide(plan, walk) or 1 if short and not walk.direct else 1
    lengths = walk.dim in uneven(plan)
    return Ring(walk.direct, both, walk.reverse, ahead, cut, lengths, short, wide)


def _wide(plan: Plan, walk: Walk) -> int | None:
    """Tiles, as they come by, of an owner's run of the sequence along a walk."""
    loop = next(loop for loop in plan.nest.loops if walk in loop.stages)
    tokens = tile_tokens(plan, loop, loop.stages.index(walk))
    return windows.slab(plan.program, loop, walk, tokens)


def not_emitted(plan: Plan) -> str | None:
    """Which ring of a window has no text yet."""
    if not plan.program.banded:
        return None
    mask = windows.word(plan)
    for loop in plan.nest.loops:
        for walk in loop.walks if loop.tensors else ():
            ring = ring_of(plan, walk)
            if not ring.short:
                continue
            if walk.steps == ():
                return f"a ring of {mask} in which no rank reads anything of another's"
            if walk.direct and (len(loop.walks) > 1 or ring.ahead > 1):
                return f"{mask} where direct rings are nested, or fetch several tiles ahead"
            if walk.direct and any(isinstance(stage, Gather) for stage in loop.walking):
                return f"{mask} where what a direct ring brings is gathered"
            if not walk.direct and not _counted(plan, loop, walk):
                return f"{mask} where a ring is short otherwise than by slabs of the sequence"
    return None


def _counted(plan: Plan, loop: Loop, walk: Walk) -> bool:
    """Whether a short ring has as many hops as its text counts."""
    wide, size = _wide(plan, walk), plan.program.mesh.extent(walk.dim)
    if wide is None:
        return False
    tokens = wide * tile_tokens(plan, loop, loop.stages.index(walk))
    return windows.hops(plan.program, walk, tokens) == len(walk.coming(size))


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


def short(plan: Plan, dim: str) -> bool:
    """Whether the ring along a dimension is short, by a window."""
    return rings(plan)[ring_name(plan, dim)].short


def any_short(plan: Plan) -> bool:
    """Whether some ring is."""
    return any(ring.short for ring in rings(plan).values())
