"""What keeps tile loops from cutting a program: parts, transfers, and what is complete when."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mercurygen.errors import Refusal
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.problem import nearest_multiples
from mercurygen.ir.program import Program, Stage, TileLoop
from mercurygen.schedule.borders import needed_border
from mercurygen.schedule.fault import Fault, word_of
from mercurygen.schedule.rules.tile import MOST_PARTS


def faults_of_loops(program: Program) -> Iterator[Fault]:
    """Tile loops: parts that divide, transfers that are not repeated, results that are complete."""
    inner: list[tuple[str, str]] = []  # (axis, name of its loop)
    for loop in program.tiles:
        name = "_".join(loop.axes)
        for axis in loop.axes:
            yield from _tiled_stages(program, axis, loop)
            carried = [t.name for t in program.outputs if t.carries(axis)]
            yield from _partly_complete(program, axis, carried, name)
            if carried and inner:
                outer, outer_name = inner[-1]
                explain = (
                    f"{', '.join(carried)} would be complete only after the loop over {outer}, "
                    f"which is outside that over {axis}",
                    f"the loop over {axis} goes outside: `reorder {name}, {outer_name}`",
                )
                yield Fault(
                    Refusal("reorder-breaks", lambda e=explain: e),
                    ("reorder", name),
                    ("tile", outer_name),
                    ("tile", name),
                )
        held = (axis for axis in loop.axes if not all(t.carries(axis) for t in program.outputs))
        inner += [(axis, name) for axis in held]


def _partly_complete(program: Program, axis: str, carried: list[str], name: str) -> Iterator[Fault]:
    """An axis of some outputs only: these are complete after each part, the others at the end."""
    others = [t.name for t in program.outputs if t.name not in carried]
    if carried and others:
        explain = (
            f"{axis} cannot be tiled: {', '.join(carried)} would be complete after each part of "
            f"it, but {', '.join(others)} only after the last",
            "tile an axis that all outputs carry, or none of them",
        )
        yield Fault(Refusal("tile-of-some", lambda: explain), ("tile", name))


def _tiled_stages(program: Program, axis: str, loop: TileLoop) -> Iterator[Fault]:
    """What moves inside a tile loop must be cut by it."""
    place = ("tile", "_".join(loop.axes))
    for stage in program.stages:
        names = ", ".join(stage.tensors)
        cut = program.tensor(stage.tensors[0]).carries(axis)
        rival = (word_of(stage), *stage.tensors, stage.axis, stage.dim)
        size = program.mesh.extent(stage.dim)
        if stage.kind == "walk" and (not cut or stage.axis == axis):
            explain = (
                f"the shift of {names} along {stage.dim} would bring the same tiles for every "
                f"part of {axis}",
                f"tile an axis of {names}, not {stage.axis}: {_tileable(program, stage)}",
            )
            yield Fault(Refusal("tile-repeats-shift", lambda e=explain: e), place, rival)
        if stage.kind == "gather" and stage.axis == axis and loop.parts % size:
            explain = (
                f"{loop.parts} parts of {axis} cannot be gathered from {size} ranks along "
                f"{stage.dim}",
                f"nearest legal: {nearest_multiples(loop.parts, size)} parts",
            )
            yield Fault(Refusal("tile-parts", lambda e=explain: e), place, rival)
        if stage.kind == "scatter" and stage.axis == axis:
            explain = (
                f"{axis} cannot be tiled: the `shard` of {names} scatters results by it over "
                f"{stage.dim}",
                "tile another axis",
            )
            yield Fault(Refusal("tile-of-scattered", lambda e=explain: e), place, rival)


def _tileable(program: Program, stage: Stage) -> str:
    """Axes whose parts cut a stage's tensors, and not by the axis by which they move."""
    carried = [program.tensor(name) for name in stage.tensors]
    axes = [a for a in program.loops if a != stage.axis and all(t.carries(a) for t in carried)]
    return ", ".join(axes) or "there is none"


def fault_of_tiles(program: Program) -> Fault | None:
    """What is wrong with how many parts there are, or with what they cut."""
    atoms = atoms_of(program)
    for loop in program.tiles:
        parts = atoms.loop_parts(loop.axes)
        seen = [
            program.extent(axis)
            // prod(program.mesh.extent(dim) for dim in program.parallel_dims(axis))
            for axis in loop.axes
        ]
        if prod(parts.values()) != loop.parts or any(
            size % parts[axis] for axis, size in zip(loop.axes, seen, strict=True)
        ):
            name = "_".join(loop.axes)
            legal = ", ".join(str(parts) for parts in _equal_parts(seen) if parts > 1) or "none"
            return Fault(
                Refusal(
                    "tile-parts",
                    lambda name=name, loop=loop, legal=legal, seen=seen: (
                        f"{name} has {prod(seen)} on a rank, which is not {loop.parts} equal parts",
                        f"legal numbers of parts: {legal}",
                    ),
                ),
                ("tile", name),
                ("parallelize", *loop.axes),
            )
        for axis in loop.axes:
            fault = _fault_of_sequence_tile(program, axis) or _fault_of_pinned_tile(program, axis)
            if fault:
                return fault
    for axis in program.axes:
        count = atoms.equal_parts(axis.name)
        if axis.extent % count:
            legal = nearest_multiples(axis.extent, count)
            return Fault(
                Refusal(
                    "not-divisible",
                    lambda axis=axis, count=count, legal=legal: (
                        f"{axis.name}={axis.extent} is cut into {count} parts by this schedule",
                        f"nearest legal: {legal}",
                    ),
                ),
                ("tile", axis.name),
                ("parallelize", axis.name),
                ("parallelize", axis.name),
            )
    return None


def _equal_parts(seen: list[int]) -> list[int]:
    """In how many equal parts joined axes fall: of the first, or of all of it and of the rest."""
    first, *rest = seen
    found = [n for n in range(1, min(first, MOST_PARTS) + 1) if first % n == 0]
    if rest and first <= MOST_PARTS:
        found += [first * n for n in _equal_parts(rest) if 1 < n <= MOST_PARTS // first]
    return found


def _fault_of_sequence_tile(program: Program, axis: str) -> Fault | None:
    """Tiles of a sequence: not where its tokens interleave, nor where it moves."""
    if axis not in program.mask_axes:
        return None
    if program.order.kind == "striped":
        explain = (
            f"{axis} cannot be tiled: the order is striped, and that of a part would not be",
            "order the tokens zigzag or contiguous, or tile another axis",
        )
        return Fault(Refusal("tile-striped", lambda: explain), ("tile", axis), ("order",))
    moving = [
        ("shift" if s.kind == "walk" else "shard", *s.tensors, axis, s.dim)
        for s in program.stages
        if s.axis == axis
    ]
    border = [
        ("pin", tensor.name, dim)
        for tensor in program.tensors
        if tensor.carries(axis)
        for dim in program.mesh.names
        if program.pinned(tensor, dim) != program.stored(tensor, dim)
    ]
    if moving or border:
        rival = (*moving, *border)[0]
        others = [name for name in program.loops if name not in program.mask_axes]
        explain = (
            f"{axis} cannot be tiled: it is split over {rival[-1]}, and what a rank holds of it "
            "moves whole",
            f"tile another axis: {', '.join(others)}",
        )
        return Fault(Refusal("tile-of-moved", lambda: explain), ("tile", axis), rival)
    return None


def _fault_of_pinned_tile(program: Program, axis: str) -> Fault | None:
    """A tiled axis that the caller holds split, and the nest does not: its parts lie elsewhere.

    Or one that is dealt, or joined, in more than one reshard: its parts are no runs between them.
    """
    border = needed_border(program)
    for tensor in (*program.read, *program.outputs):
        steps = [step for step in border if step.tensor == tensor.name]
        moved = [step for step in steps if axis in (step.source, step.target)]
        if len(moved) > 1 or (moved and tensor.role == "output" and moved[0] != steps[-1]):
            explain = (
                f"{axis} cannot be tiled: {tensor.name} is resharded by it in {len(steps)} steps, "
                "which move it whole",
                f"tile another axis, or split {axis} over the outermost dimension only",
            )
            rival = ("parallelize", axis, *(step.dim for step in moved))
            return Fault(Refusal("tile-of-moved", lambda e=explain: e), ("tile", axis), rival)
        for dim in program.mesh.names:
            if program.pinned(tensor, dim) == axis != program.stored(tensor, dim):
                explain = (
                    f"{axis} cannot be tiled: the caller holds {tensor.name} in slices of it over "
                    f"{dim}, which the schedule joins",
                    f"tile another axis, or `parallelize {axis} over {dim}`",
                )
                places = (("tile", axis), ("pin", tensor.name, dim))
                return Fault(Refusal("tile-of-moved", lambda e=explain: e), *places)
    return None
