"""How much of a tile is sent where tiles come straight from their owners.

Under a causal mask the columns that some rows see are always the first ones of a tile, and the rows
that see some columns its last ones: how many tokens, from that end, is all there is to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from mercurygen.lower.plan import Loop, Plan, Walk
from mercurygen.lower.rings import Owners, Rings

Need = Literal["whole", "before", "halves", "after", "late halves", "chunks", "stripes"]


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
def need_form(plan: Plan) -> Need:
    """How the module says how many tokens a rank reads of another's tile.

    "whole": all. "before": all of an earlier owner's, none of a later one's. "halves": the early
    half of an earlier owner's, all of a later one's. Of rows: "after", all of a later owner's, none
    of an earlier one's, and "late halves". "chunks": by the numbers of its chunks. "stripes": of a
    window, all of a stripe or none.
    """
    asked = _all_asked(plan)
    if plan.program.banded:
        if not any(loop.direct for loop in plan.nest.loops):
            return "whole"
        return "stripes" if plan.atoms.striped else "chunks"
    if all(x.tokens == x.of for x in asked):
        return "whole"
    if uneven(plan):
        return "chunks"
    rows = rows_are_cut(plan)
    if all(x.tokens == (x.of if x.earlier != rows else 0) for x in asked):
        return "after" if rows else "before"
    if all(x.tokens == (x.of // 2 if x.earlier else x.of) for x in asked):
        return "late halves" if rows else "halves"
    return "chunks"


@lru_cache(maxsize=256)
def cut_loop(plan: Plan) -> Loop | None:
    """The loop of which direct rings bring only what the mask leaves: there is one at most."""
    if plan.program.banded:  # how much that is, the window says when it is run
        return next((loop for loop in plan.nest.loops if loop.direct), None)
    cut = (loop for loop in plan.nest.loops if any(x.tokens != x.of for x in _asked(plan, loop)))
    return next(cut, None)


def rows_are_cut(plan: Plan) -> bool:
    """Whether those are tiles of the mask's rows."""
    loop = cut_loop(plan)
    return loop is not None and loop.axis == plan.program.mask_axes[0]


def may_be_empty(plan: Plan) -> bool:
    """Whether nothing at all may be read of a tile."""
    return plan.program.banded or any(not x.tokens for x in _all_asked(plan))


@lru_cache(maxsize=256)
def _all_asked(plan: Plan) -> frozenset[Asked]:
    return frozenset(x for loop in plan.nest.loops for x in _asked(plan, loop))


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
    for depth, walk in enumerate(loop.stages if loop.tensors else ()):
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
    return plan.atoms.length(loop.axis, region[tensor.axes.index(loop.axis)])


def tile_tokens(plan: Plan, loop: Loop, depth: int) -> int:
    """Tokens of a whole tile of a loop, after so many of its stages."""
    return _tokens(plan, loop, {}, depth, plan.program.mesh.coordinate(0))


@lru_cache(maxsize=1)
def _rings(plan: Plan) -> Rings:
    return Rings(plan, 0)


@lru_cache(maxsize=256)
def uneven(plan: Plan) -> frozenset[str]:
    """The dimensions along which tiles are passed on of which different fronts were sent."""
    found = set()
    for loop in plan.nest.loops:
        for depth, walk, place, outer in _steps(plan, loop) if loop.direct else ():
            lengths = {
                _tokens(plan, loop, {**outer, walk.dim: index}, depth + 1, place)
                for index in range(plan.program.mesh.extent(walk.dim))
            }
            if not walk.direct and len(lengths) > 1:
                found.add(walk.dim)
    return frozenset(found)


@lru_cache(maxsize=256)
def own_are_longer(plan: Plan, dim: str) -> bool:
    """Whether, of the tiles of an uneven ring, those that are ours along a direct ring around it
    are longer than what is read of them."""
    (loop,) = (loop for loop in plan.nest.loops if any(walk.dim == dim for walk in loop.walks))
    tensor = plan.program.tensor(loop.tensors[0])
    index = tensor.axes.index(loop.axis)
    for depth, walk, place, outer in _steps(plan, loop):
        around = [i for i, s in enumerate(loop.stages[:depth]) if isinstance(s, Walk) and s.direct]
        if walk.dim != dim or not around:
            continue
        inner = [s.dim for s in loop.stages[around[-1] + 1 :] if isinstance(s, Walk)]
        for number in range(plan.program.mesh.extent(dim)):
            owner = {**outer, dim: number}
            whole = _rings(plan).tile_region(loop, tensor, owner, depth + 1, {**place, **owner})
            seen = _rings(plan).read_of(loop.axis, tensor, whole, place, inner)
            read = plan.atoms.length(loop.axis, seen[index])
            if read != _tokens(plan, loop, owner, depth + 1, place):
                return True
    return False


def cut_outside(plan: Plan, dim: str) -> bool:
    """Whether the tiles of a ring are fronts that a direct ring around it has brought."""
    if need_form(plan) == "whole":
        return False
    for loop in plan.nest.loops:
        for index, walk in enumerate(loop.walks):
            if walk.dim == dim:
                return any(outer.direct for outer in loop.walks[:index])
    return False
