"""A schedule for a problem so small that many ranks fit into one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import lcm, prod

from mercurygen.errors import InternalError, Refusal, UserError
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import DTYPES, Problem, Sizes
from mercurygen.ir.program import Program
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.schedule.apply import apply
from mercurygen.schedule.directives import Parallelize
from mercurygen.schedule.schedule import Schedule

# No two sizes alike, so that mixed up dimensions fail.
BATCH, CHUNK = 2, 3
HEAD_DIMS = {8: (18, 10), 2: (24, 16)}  # by bytes of an element: kernels pad the first two


def tiny(operator: Operator, schedule: Schedule, dtype: str) -> Plan:
    """The plan of the same schedule for the smallest problem that it takes.

    Raises:
        InternalError: it takes none of those tried.
    """
    program = apply(operator, schedule)
    if isinstance(schedule.problem, Sizes):
        return _few(operator, schedule, program)
    count = _with_backward(schedule, _plan(program).atoms.count)
    refusal: Exception | None = None
    sizes = dict(zip(("head_dim", "v_head_dim"), HEAD_DIMS[DTYPES[dtype]], strict=True))
    for problem in _problems(program, schedule.problem, count):
        small = replace(schedule, problem=replace(problem, dtype=dtype, **sizes), tp=1)
        try:
            plan = lower(apply(operator, small))
        except UserError as error:
            refusal = error
            continue
        if not isinstance(plan, Refusal):
            return plan
        refusal = plan.error()
    raise InternalError(f"no small problem fits the schedule: {refusal}")


def _with_backward(schedule: Schedule, count: Mapping[str, int]) -> dict[str, int]:
    """Parts of every axis where the backward may split it over other ranks."""
    ways = dict.fromkeys(count, 1)
    for directive in schedule.backward.directives if schedule.backward else ():
        if isinstance(directive, Parallelize):
            ways[directive.axis] *= prod(schedule.mesh.extent(dim) for dim in directive.dims)
    return {axis: lcm(number, ways[axis]) for axis, number in count.items()}


def _few(operator: Operator, schedule: Schedule, program: Program) -> Plan:
    """The same for an operator of named axes: a few indices in every part of an axis."""
    count = _plan(program).atoms.count
    extents = {
        axis.name: count[axis.name] * (2 + number % 3) if count[axis.name] > 1 else 3 + number
        for number, axis in enumerate(program.axes)
    }
    extents |= {axis: 4 * count[axis] for axis in program.mask_axes}
    problem = replace(schedule.problem, extents=tuple(extents.items()), dtype="float64")
    small = lower(apply(operator, replace(schedule, problem=problem)))
    if isinstance(small, Refusal):
        raise InternalError(f"no small sizes fit the schedule: {small.error()}")
    return small


def _plan(program: Program) -> Plan:
    plan = lower(program)
    if isinstance(plan, Refusal):
        raise InternalError(f"the schedule has no plan: {plan.error()}")
    return plan


def _problems(program: Program, problem: Problem, count: Mapping[str, int]) -> Iterator[Problem]:
    """Small ones first, then such that more divides.

    Args:
        program: of the schedule as it is.
        problem: its sizes.
        count: the equal parts that the plan cuts every axis into.
    """
    chunks = program.order.chunks(program.mesh) if program.order else program.mesh.size
    rows = lcm(chunks, *(count[axis] for axis in program.mask_axes))
    alike = problem.heads == problem.kv_heads and count["G"] == 1
    for chunk, more in product((CHUNK, 4, 8, 16, 32), (2, 4, 8)):
        kv_heads = count["H"] * more  # more than one on a rank, or views of it are contiguous
        yield replace(
            problem,
            batch=count["B"] * BATCH,
            seq=rows * chunk,
            kv_heads=kv_heads,
            heads=kv_heads * (1 if alike else max(2, count["G"])),
        )
