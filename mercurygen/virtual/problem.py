"""A schedule for a problem so small that many ranks fit into one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import lcm
from typing import NamedTuple

from mercurygen import operators
from mercurygen.errors import InternalError, Refusal, UserError
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import DTYPES, Problem, Sizes
from mercurygen.ir.program import Program
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.schedule.apply import apply
from mercurygen.schedule.gradient import gradient
from mercurygen.schedule.schedule import Schedule

# No two sizes alike, so that mixed up dimensions fail.
BATCH, CHUNK = 2, 3
HEAD_DIMS = {8: (18, 10), 2: (24, 16)}  # by bytes of an element: kernels pad the first two


class Tiny(NamedTuple):
    """The plans of a schedule for one small problem: of the forward, and of its gradients."""

    forward: Plan
    backward: Plan | None = None


@lru_cache(maxsize=8)
def tiny(operator: Operator, schedule: Schedule, dtype: str) -> Tiny:
    """The plans of the same schedule for the smallest problem that it takes.

    They are kept: one schedule is often run with several texts.

    Raises:
        InternalError: it takes none of those tried.
    """
    program = apply(operator, schedule)
    if isinstance(schedule.problem, Sizes):
        return Tiny(_few(operator, schedule, program))
    own = _both(operator, schedule)
    every = [x for x in own if x is not None]
    parts = [x.atoms.equal_parts for x in every]
    count = {axis: lcm(*(each(axis) for each in parts)) for axis in every[0].atoms.count}
    refusal: Exception | None = None
    sizes = dict(zip(("head_dim", "v_head_dim"), HEAD_DIMS[DTYPES[dtype]], strict=True))
    for problem in _problems(program, schedule.problem, count):
        small = replace(schedule, problem=replace(problem, dtype=dtype, **sizes), tp=1)
        try:
            found = _both(operator, small)
        except UserError as error:
            refusal = error
            continue
        if all(map(_cut_alike, found, own)):
            return found
    raise InternalError(f"no small problem fits the schedule: {refusal}")


def _cut_alike(one: Plan | None, other: Plan | None) -> bool:
    """Whether tile loops cut every axis into as many parts: it depends on sizes where axes are
    joined, and the module has the numbers of the schedule's own."""
    if one is None or other is None:
        return one is other
    return all(
        one.atoms.parts(axis.name) == other.atoms.parts(axis.name) for axis in one.program.axes
    )


def _both(operator: Operator, schedule: Schedule) -> Tiny:
    """The plans of a schedule.

    Raises:
        UserError: what refuses it.
    """
    program = apply(operator, schedule)
    forward = _legal(program)
    if schedule.backward is None:
        return Tiny(forward)
    alone = gradient(schedule, program)
    return Tiny(forward, _legal(apply(operators.load(alone.operator), alone)))


def _legal(program: Program) -> Plan:
    plan = lower(program)
    if isinstance(plan, Refusal):
        raise plan.error()
    return plan


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


def _window(problem: Problem, seq: int) -> int | None:
    """A window of a short sequence: about as much of it, and not of two tokens only."""
    if problem.window is None or problem.window == 1:
        return problem.window
    return min(seq - 1, max(3, problem.window * seq // problem.seq))


def _keys(problem: Problem, seq: int, step: int) -> int:
    """Keys of a short sequence of queries: fewer than these, or more, as of the problem."""
    return max(step, seq - step) if problem.keys < problem.seq else seq + step


def _plan(program: Program) -> Plan:
    plan = lower(program)
    if isinstance(plan, Refusal):
        raise InternalError(f"the schedule has no plan: {plan.error()}")
    return plan


def _lengths(tokens: int) -> tuple[int, ...]:
    """Documents of some tokens: nearly half in one, then one, two, three, ..., and the rest."""
    found = [tokens // 2 - 1]
    while sum(found) + len(found) < tokens:
        found.append(len(found))
    return (*found, tokens - sum(found)) if sum(found) < tokens else tuple(found)


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
    for chunk, more in product((CHUNK, 4, 8, 16, 32), (2, 4, 8, 1)):
        kv_heads = count["H"] * more  # rather more than one on a rank: views of one are contiguous
        packed, seq = bool(problem.documents), rows * chunk
        yield replace(
            problem,
            batch=1 if packed else count["B"] * BATCH,
            seq=seq,
            seq_kv=None if problem.seq_kv is None else _keys(problem, seq, rows),
            documents=_lengths(seq) if packed else (),
            window=_window(problem, seq),
            ahead=min(problem.ahead, 1),
            kv_heads=kv_heads,
            heads=kv_heads * (1 if alike else max(2, count["G"])),
        )
