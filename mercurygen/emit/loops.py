"""The loop of a nest by which tiles come in rings inside rings, as the emitted text has it."""

from __future__ import annotations

from math import lcm

from mercurygen.lower.plan import Gather, Loop, Plan, Stages, Walk, walk_levels

Levels = list[tuple[str, tuple[Gather, ...]]]


def leading(plan: Plan) -> tuple[Gather, ...]:
    """Gathers outside every walk of their tensors."""
    return tuple(stage for loop in plan.nest.loops for stage in loop.leading)


def bringing(plan: Plan) -> Loop | None:
    """The loop of inputs that come by: of several the one of rings inside rings, if one is."""
    loops = (loop for loop in plan.nest.loops if loop.tensors and loop.walks)
    return max(loops, key=lambda loop: len(loop.walks), default=None)


def walking(plan: Plan) -> Stages:
    """The outermost walk of that loop, and what is inside it."""
    loop = bringing(plan)
    return loop.walking if loop else ()


def levels(plan: Plan) -> Levels:
    """The dimensions that are walked, outermost first, each with the gathers of its tiles."""
    return [(walk.dim, gathers) for walk, gathers in walk_levels(walking(plan))]


def walked(plan: Plan) -> tuple[Walk, ...]:
    """The walks, outermost first."""
    return tuple(stage for stage in walking(plan) if isinstance(stage, Walk))


def part_counts(plan: Plan) -> dict[str, int]:
    """Per axis of the tile loops that outputs carry, into how many parts it is cut."""
    counts = {axis: plan.atoms.parts(axis) for loop in plan.tiles for axis in loop.axes}
    return {axis: n for axis, n in counts.items() if n > 1 and axis != "S_kv"}


def column_parts(plan: Plan) -> int:
    """Parts of the keys and values that lie here, one after the other."""
    return plan.atoms.parts("S_kv")


def every_chunk(plan: Plan) -> str:
    """The numbers of all chunks, where one rank has them."""
    runs = runs_of_chunk(plan)
    return f"list(range({runs}))" if runs > 1 else "[0]"


def runs_of_chunk(plan: Plan) -> int:
    """Equal runs that a chunk of the token order is cut into, so that parts are whole ones."""
    return lcm(*(plan.atoms.parts(axis) for axis in plan.program.mask_axes))
