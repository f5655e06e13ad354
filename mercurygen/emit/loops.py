"""The loop of a nest by which k and v come, as the emitted text has it."""

from __future__ import annotations

from mercurygen.lower.plan import Gather, Plan, Stages, Walk, walk_levels

Levels = list[tuple[str, tuple[Gather, ...]]]


def leading(plan: Plan) -> tuple[Gather, ...]:
    """Gathers outside every walk."""
    return plan.nest.loops[0].leading if plan.nest.loops else ()


def walking(plan: Plan) -> Stages:
    """The outermost walk and what is inside it."""
    return plan.nest.loops[0].walking if plan.nest.loops else ()


def levels(plan: Plan) -> Levels:
    """The dimensions that are walked, outermost first, each with the gathers of its tiles."""
    return [(walk.dim, gathers) for walk, gathers in walk_levels(walking(plan))]


def walked(plan: Plan) -> tuple[Walk, ...]:
    """The walks, outermost first."""
    return tuple(stage for stage in walking(plan) if isinstance(stage, Walk))
