"""How far away the owners are of the tiles that any rank reads: a window makes rings short.

A ring that passes tiles on ends after the farthest; one that brings each from its owner leaves out
the distances at which nobody reads anything.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.problem import ATTENTION
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Loop, Walk


def shortened(program: Program, loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
    """The loops, with short walks where the mask is a window."""
    if not program.banded or program.operator not in ATTENTION:
        return loops  # modules of other operators go around all ranks
    return tuple([_short(program, loops, loop) if loop.walks else loop for loop in loops])


def _short(program: Program, loops: tuple[Loop, ...], loop: Loop) -> Loop:
    """One loop; programs of one layout share it."""
    others = tuple([(each.axis, each.course) for each in loops])
    key = "short", program.layout, loop.tensors, loop.axis, loop.stages, loop.home, others
    found = program.shared.get(key)
    if found is None:
        stages = tuple([_stage(program, loops, loop, stage) for stage in loop.stages])
        same = stages == loop.stages
        found = program.shared[key] = loop if same else replace(loop, stages=stages)
    return found


def _stage(program: Program, loops: tuple[Loop, ...], loop: Loop, stage):
    if not isinstance(stage, Walk) or stage.both or stage.skew or not loop.tensors:
        return stage
    if program.align is not None:
        return stage  # how far away the tiles are that a rank reads is not the same for all
    if loop.home == "relayed" or loop.axis not in program.mask_axes:
        return stage  # what travels with the tiles comes home at the end of the whole ring
    found = _distances(program, loops, loop, stage.dim)
    if found is None:
        return stage
    size = program.mesh.extent(stage.dim)
    steps = sorted({-n % size if stage.reverse else n for n in found} - {0})
    if not stage.direct:
        steps = range(1, steps[-1] + 1) if steps else ()
    return stage if len(steps) == size - 1 else replace(stage, steps=tuple(steps))


def _distances(
    program: Program, loops: tuple[Loop, ...], loop: Loop, dim: str
) -> frozenset[int] | None:
    """How many places back along a dimension the owners are of tiles that are read.

    None if the rank that works on a tile can be anywhere along it.
    """
    rows, columns = program.mask_axes
    other = columns if loop.axis == rows else rows
    own, theirs = (places(program, loops, axis) for axis in (loop.axis, other))
    if dim not in own or dim not in theirs or _walked(loops, other, dim):
        return None
    key = "distances", program.order, atoms_of(program).domain, loop.axis, own, theirs, dim
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = frozenset(_read(program, loop.axis, own, theirs, dim))
    return found


def _read(program: Program, axis: str, own: tuple, theirs: tuple, dim: str):
    """The distances; tiles of the axis differ along `own`, those of the other along `theirs`."""
    rows, columns = program.mask_axes
    live, size = atoms_of(program).domain, program.mesh.extent(dim)
    other = columns if axis == rows else rows
    tiles, readers = _tiles(program, axis, own), _tiles(program, other, theirs)
    for (at, tile), (place, atoms) in product(tiles, readers):
        pairs = product(atoms, tile) if axis == columns else product(tile, atoms)
        if any(live.live(row, col) for row, col in pairs):
            yield (place[dim] - at[dim]) % size


def _tiles(program: Program, axis: str, dims: tuple[str, ...]) -> list[tuple[dict, tuple]]:
    """Every tile of an axis that some dimensions tell apart: where, and its atoms."""
    atoms, found = atoms_of(program), []
    for held in product(*(range(program.mesh.extent(dim)) for dim in dims)):
        place = dict(zip(dims, held, strict=True))
        owned = atoms.owned(program.order, axis, {dim: (i,) for dim, i in place.items()})
        found.append((place, owned))
    return found


def _walked(loops: tuple[Loop, ...], axis: str, dim: str) -> bool:
    """Whether tiles of an axis come by along a dimension."""
    return any(loop.axis == axis and dim in [w.dim for w in loop.walks] for loop in loops)


def places(program: Program, loops: tuple[Loop, ...], axis: str) -> tuple[str, ...]:
    """Dimensions along which different tiles of an axis come to a rank, or stay on it."""
    walks = [w.dim for loop in loops if loop.axis == axis for w in loop.walks]
    return program.mesh.in_order((*walks, *program.parallel_dims(axis)))
