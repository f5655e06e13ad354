"""How partial results begin: as what merges to nothing, or as the result of a first tile."""

from __future__ import annotations

from itertools import product

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Loop, Plan
from mercurygen.lower.visible import MOST_BLOCKS, Block, visible


def beginning(plan: Plan) -> str | Refusal:
    """How the innermost results begin; or why the mask leaves too many blocks of a tile."""
    program, loops = plan.program, plan.nest.loops
    walks = any(loop.walks and not loop.outputs for loop in loops)
    moving = sum(bool(loop.outputs) for loop in loops)
    partly = any(
        not tensor.carries(axis)
        for tile in program.tiles
        for axis in tile.axes
        for tensor in program.outputs
    )
    if not program.mask_axes:
        return "empty" if walks or partly else "only"
    # most blocks of a tile; whether a first tile is one block, of all cells of the results
    trimmed = _trimmed_beside(loops)
    worst, alike = 0, not come_by(plan)
    for rows, cols, first in _tiles(plan):
        blocks = visible(plan.atoms.domain, program.kernel, rows, cols)
        worst = max(worst, len(blocks))
        if not blocks and trimmed:
            return _skipped(trimmed)
        if first and not (len(blocks) == 1 and _covers(program, blocks[0], rows, cols)):
            alike = False
    if worst > MOST_BLOCKS:
        return _fragmented(worst)
    spread = any(  # results of all tiles, of which the first is a part
        loop.walks and not loop.outputs and any(t.carries(loop.axis) for t in program.outputs)
        for loop in loops
    )
    if partly or spread or not alike:
        return "empty"
    if not moving:
        return "first" if walks else "only"
    last = max(i for i, loop in enumerate(loops) if loop.outputs)
    if any(loop.walks for loop in loops[last:] if not loop.outputs):
        return "empty"  # what goes home is merged from several tiles
    trims = not walks and moving == 1 and all(loop.home != "relayed" for loop in loops)
    return "only" if program.mask == "full" or (trims and worst <= 1) else "empty"


def come_by(plan: Plan) -> bool:
    """Whether results that stay are of more than one tile: an output carries what is walked."""
    return any(
        tensor.carries(loop.axis)
        for loop in plan.nest.loops
        if loop.walks and not loop.outputs
        for tensor in plan.program.outputs
    )


def _trimmed_beside(loops: tuple[Loop, ...]) -> tuple[str, str] | None:
    """A dimension of a direct walk, and one of a walk of another loop, inside or outside."""
    for i, loop in enumerate(loops):
        direct = next((walk.dim for walk in loop.walks if walk.direct), None)
        for j, other in enumerate(loops):
            if direct and i != j and other.walks:
                return direct, other.walks[0].dim
    return None


def _skipped(dims: tuple[str, str]) -> Refusal:
    direct, other = dims
    return Refusal(
        "direct-skips-tiles",
        lambda: (
            f"the shift along {direct} is `direct`, and of some tiles a rank reads nothing: it "
            f"would skip the shift along {other}, which the other ranks wait for",
            f"leave `direct` out, gather over {other}, or use `order S: zigzag`",
        ),
    )


def _covers(program: Program, block: Block, rows: tuple, cols: tuple) -> bool:
    """Whether a block has all cells of the outputs that the tiles have."""
    spans = zip(program.mask_axes, (block.rows, block.cols), (rows, cols), strict=True)
    return not block.below and all(
        span == (0, len(atoms))
        for axis, span, atoms in spans
        if any(tensor.carries(axis) for tensor in program.outputs)
    )


def _fragmented(worst: int) -> Refusal:
    return Refusal(
        "mask-too-fragmented",
        lambda: (
            f"the mask cuts a tile into {worst} blocks; at most {MOST_BLOCKS} are worth it",
            "split heads over the inner dimensions and the sequence over the outer ones",
        ),
    )


def _tiles(plan: Plan):
    """(rows, columns, whether it is the first of its results) of all tiles of all ranks."""
    program, mesh = plan.program, plan.program.mesh
    row_axis, column_axis = program.mask_axes
    rows = _places(plan, row_axis)
    columns = _places(plan, column_axis)
    for held_rows in product(*(range(mesh.extent(dim)) for dim in rows)):
        place = dict(zip(rows, held_rows, strict=True))
        mine = plan.atoms.owned(program.order, row_axis, {d: (i,) for d, i in place.items()})
        for held in product(*(range(mesh.extent(dim)) for dim in columns)):
            there = dict(zip(columns, held, strict=True))
            first = all(place.get(dim, i) == i for dim, i in there.items())
            held_columns = {d: (i,) for d, i in there.items()}
            theirs = plan.atoms.owned(program.order, column_axis, held_columns)
            for part in _runs(mine, plan.atoms.parts(row_axis)):
                for tile in _runs(theirs, plan.atoms.parts(column_axis)):
                    yield part, tile, first


def _runs(atoms: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Equal runs of a list."""
    size = len(atoms) // parts
    return [atoms[i * size : (i + 1) * size] for i in range(parts)]


def _places(plan: Plan, axis: str) -> tuple[str, ...]:
    """Dimensions along which different tiles of an axis come to a rank, or stay on it."""
    walks = [w.dim for loop in plan.nest.loops if loop.axis == axis for w in loop.walks]
    return plan.program.mesh.in_order((*walks, *plan.program.parallel_dims(axis)))
