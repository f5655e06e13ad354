"""The loop of a nest by which k and v come, as the emitted text has it."""

from __future__ import annotations

from mercurygen.lower.plan import Gather, Plan, Stages, Walk, walk_levels

Levels = list[tuple[str, tuple[Gather, ...]]]


def leading(plan: Plan) -> tuple[Gather, ...]:
    """Gathers outside every walk of their tensors."""
    return tuple(stage for loop in plan.nest.loops for stage in loop.leading)


def walking(plan: Plan) -> Stages:
    """The outermost walk and what is inside it, of the first tensors that are walked."""
    return next((loop.walking for loop in plan.nest.loops if loop.tensors and loop.walks), ())


def levels(plan: Plan) -> Levels:
    """The dimensions that are walked, outermost first, each with the gathers of its tiles."""
    return [(walk.dim, gathers) for walk, gathers in walk_levels(walking(plan))]


def walked(plan: Plan) -> tuple[Walk, ...]:
    """The walks, outermost first."""
    return tuple(stage for stage in walking(plan) if isinstance(stage, Walk))
