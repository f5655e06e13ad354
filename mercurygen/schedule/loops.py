"""What only holds of all directives together: tile loops, and what moves inside them."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Tensor, TileLoop
from mercurygen.schedule.fault import Fault


def faults_of_loops(program: Program) -> Iterator[Fault]:
    """Tile loops: parts that divide, transfers that are not repeated, results that are complete."""
    inner: list[str] = []
    for loop in program.tiles:
        for axis in loop.axes:
            yield from _tiled_stages(program, axis, loop)
            carried = [t for t in program.outputs if t.carries(axis)]
            yield from _partly_complete(program, axis, carried)
            if carried and inner:
                explain = (
                    f"{', '.join(t.name for t in carried)} would be complete only after the loop "
                    f"over {inner[-1]}, which is outside that over {axis}",
                    f"`reorder`: {axis} outside {inner[-1]}",
                )
                yield Fault(
                    Refusal("reorder-breaks", lambda e=explain: e),
                    "tile",
                    axis,
                    ("reorder" if _reordered(program) else "tile", inner[-1]),
                )
        inner += [axis for axis in loop.axes if not all(t.carries(axis) for t in program.outputs)]


def _partly_complete(program: Program, axis: str, carried: list[Tensor]) -> Iterator[Fault]:
    """An axis of some outputs only: these are complete after each part, the others at the end."""
    others = [t.name for t in program.outputs if t not in carried]
    if carried and others:
        explain = (
            f"after a part of {axis} {carried[0].name} is complete, but {', '.join(others)} not",
            "tile an axis that all outputs carry, or none",
        )
        yield Fault(Refusal("tile-of-some", lambda: explain), "tile", axis)


def _reordered(program: Program) -> bool:
    return len(program.tiles) > 1


def _tiled_stages(program: Program, axis: str, loop: TileLoop) -> Iterator[Fault]:
    """What moves inside a tile loop must be cut by it."""
    for stage in program.stages:
        cut = program.tensor(stage.tensors[0]).carries(axis)
        if stage.kind == "walk" and (not cut or stage.axis == axis):
            explain = (
                f"{', '.join(stage.tensors)} come by along {stage.dim} for every part of {axis}, "
                "whole",
                f"tile an axis that {', '.join(stage.tensors)} carry, other than {stage.axis}",
            )
            yield Fault(
                Refusal("tile-repeats-shift", lambda e=explain: e),
                "tile",
                axis,
                ("shift", stage.dim),
            )
        if (
            stage.kind == "gather"
            and stage.axis == axis
            and loop.parts % program.mesh.extent(stage.dim)
        ):
            size = program.mesh.extent(stage.dim)
            explain = (
                f"{loop.parts} parts of {axis} do not come from {size} ranks along {stage.dim}",
                f"a multiple of {size} parts",
            )
            yield Fault(
                Refusal("tile-parts", lambda e=explain: e), "tile", axis, ("shard", stage.dim)
            )
        if stage.kind == "scatter" and stage.axis == axis:
            explain = (
                f"{', '.join(stage.tensors)} are scattered along {axis}, which is looped over",
                "tile another axis",
            )
            yield Fault(
                Refusal("tile-of-scattered", lambda e=explain: e),
                "tile",
                axis,
                ("shard", stage.dim),
            )
