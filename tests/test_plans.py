"""Plans of every kind: proved, and run on virtual ranks against the operator on one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plans import SCHEDULES, links_of, plan_of, problem_of, run_and_compare, traces_of

from mercurygen.check.prove import prove
from mercurygen.ir.problem import Problem, Sizes


def problems(name: str, number: int) -> Iterator[Problem | Sizes]:
    """The sizes that a schedule is tried with on its mesh of some number: every mask in turn."""
    operator, _, _, changes = SCHEDULES[name]
    if operator == "smooth":
        for window in (1, 7, 48) if number else (5, 24):
            yield problem_of(operator, window=window)
        yield problem_of(operator, ("causal", "full")[number])
    elif operator in ("matmul", "nearest"):
        yield problem_of(operator, **changes)
    else:
        yield problem_of(operator, ("causal", "full")[number % 2], **changes)


EACH = [(name, i) for name, each in SCHEDULES.items() for i in range(len(each.meshes))]


@pytest.mark.parametrize(("name", "number"), EACH)
def test_named_schedules(name: str, number: int) -> None:
    operator, meshes, body, _ = SCHEDULES[name]
    for problem in problems(name, number):
        plan = plan_of(operator, problem, meshes[number], body)
        prove(plan, links_of(plan.program.mesh))
        run_and_compare(plan, traces_of(plan))
