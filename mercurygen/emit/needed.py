"""How much of a tile is sent where tiles come straight from their owners.

Under a causal mask the columns that some rows see are always the first ones of a tile: how many
tokens, from the front, is all there is to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from mercurygen.lower.plan import Loop, Plan, Walk
from mercurygen.lower.rings import Owners, Rings

Need = Literal["whole", "before", "halves", "chunks"]


class Asked(NamedTuple):
    """What one rank reads of a tile.

    Attributes:
        earlier: whether its owner comes before the reader, along the walks so far.
        tokens: how many.
        of: how many the tile has.
    """

    earlier: bool
    tokens: int
    of: int


@lru_cache(maxsize=256)
def need_form(plan: Plan) -> Need | None:
    """How the module says how many tokens a rank reads of another's tile.

    "whole": all. "before": all of an earlier owner's, none of a later one's. "halves": the early
    half of an earlier owner's, all of a later one's. "chunks": by the numbers of its chunks. None:
    it has no words for it.
    """
    asked = {x for loop in plan.nest.loops for x in _asked(plan, loop)}
    if all(x.tokens == x.of for x in asked):
        return "whole"
    if all(x.tokens == (x.of if x.earlier else 0) for x in asked):
        return "before"
    if all(x.tokens == (x.of // 2 if x.earlier else x.of) for x in asked):
        return "halves"
    alone = all(len(loop.walks) == 1 for loop in plan.nest.loops)
    return "chunks" if alone else None


def _asked(plan: Plan, loop: Loop) -> Iterator[Asked]:
    """Of every tile that comes straight from its owner."""
    for depth, walk, place, outer in _steps(plan, loop):
        if not walk.direct:
            continue
        whole = _tokens(plan, loop, {**outer, walk.dim: place[walk.dim]}, len(loop.leading), place)
        dims = [*outer, walk.dim]
        for index in range(plan.program.mesh.extent(walk.dim)):
            owner = {**outer, walk.dim: index}
            if index != place[walk.dim]:
                earlier = [owner[dim] for dim in dims] < [place[dim] for dim in dims]
                yield Asked(earlier, _tokens(plan, loop, owner, depth + 1, place), whole)


def _steps(plan: Plan, loop: Loop) -> Iterator[tuple[int, Walk, Owners, Owners]]:
    """Every walk of a loop, for every rank and for all tiles of the walks around it."""
    mesh = plan.program.mesh
    for depth, walk in enumerate(loop.stages):
        if isinstance(walk, Walk):
            around = [each.dim for each in loop.stages[:depth] if isinstance(each, Walk)]
            for rank, at in product(
                range(mesh.size), product(*(range(mesh.extent(dim)) for dim in around))
            ):
                yield depth, walk, mesh.coordinate(rank), dict(zip(around, at, strict=True))


def _tokens(plan: Plan, loop: Loop, owner: Owners, depth: int, place: Owners) -> int:
    """Tokens that a rank has of a tile after some stages."""
    tensor = plan.program.tensor(loop.tensors[0])
    region = _rings(plan).tile_region(loop, tensor, owner, depth, place)
    return len(region[tensor.axes.index(loop.axis)]) * plan.chunk


@lru_cache(maxsize=1)
def _rings(plan: Plan) -> Rings:
    return Rings(plan, 0)


def uneven(plan: Plan) -> str | None:
    """A dimension along which tiles are passed on of which different fronts were sent."""
    for loop in plan.nest.loops:
        for depth, walk, place, outer in _steps(plan, loop):
            lengths = {
                _tokens(plan, loop, {**outer, walk.dim: index}, depth + 1, place)
                for index in range(plan.program.mesh.extent(walk.dim))
            }
            if not walk.direct and len(lengths) > 1:
                return walk.dim
    return None


def cut_outside(plan: Plan, dim: str) -> bool:
    """Whether the tiles of a ring are fronts that a direct ring around it has brought."""
    if need_form(plan) == "whole":
        return False
    for loop in plan.nest.loops:
        for index, walk in enumerate(loop.walks):
            if walk.dim == dim:
                return any(outer.direct for outer in loop.walks[:index])
    return False
