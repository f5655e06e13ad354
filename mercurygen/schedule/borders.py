"""The border of a complete program: the collectives between its pins and its nest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mercurygen.errors import Refusal
from mercurygen.ir.names import REPLICATED
from mercurygen.ir.program import BorderStep, Program
from mercurygen.schedule.directives import Reshard
from mercurygen.schedule.fault import Fault


def settle_border(program: Program) -> tuple[Program, None] | tuple[None, Fault]:
    """The program with its border, which the schedule's reshards must be if it has any."""
    needed = needed_border(program)
    if not program.border:
        return program.changed(border=needed), None
    if Counter(program.border) != Counter(needed):
        steps = (Reshard((s.tensor,), s.source, s.target, s.dim) for s in needed)
        lines = ", ".join(str(step).removeprefix("reshard ") for step in steps)
        odd = (*(_only(program.border, needed)), *(_only(needed, program.border)))[0]
        refusal = Refusal(
            "reshard-wrong",
            lambda: (
                "the reshards do not lead from the pins to what the schedule works from",
                f"needed: {lines or 'none'}",
            ),
        )
        return None, Fault(refusal, _reshard(odd), ("parallelize", odd.dim))
    if program.border != needed:
        late = next(i for i, step in enumerate(needed) if program.border[i] != step)
        refusal = Refusal(
            "reshard-order",
            lambda: (
                f"reshards in another order: that of {needed[late].tensor} along "
                f"{needed[late].dim} comes before that of {program.border[late].tensor} along "
                f"{program.border[late].dim}",
                "inputs from the outermost dimension in, then outputs back; or leave the reshard "
                "lines out: they are then written for you",
            ),
        )
        places = (_reshard(needed[late]), _reshard(program.border[late]))
        return None, Fault(refusal, *places)
    return program, None


def _only(steps: tuple[BorderStep, ...], others: tuple[BorderStep, ...]) -> Iterator[BorderStep]:
    """Steps that are not among the others, as often as they are there."""
    return iter((Counter(steps) - Counter(others)).elements())


def _reshard(step: BorderStep) -> tuple[str, ...]:
    return ("reshard", step.tensor, step.source or REPLICATED, step.target or REPLICATED, step.dim)


def needed_border(program: Program) -> tuple[BorderStep, ...]:
    """The collectives from the pins to the schedule and back.

    An all-to-all along one dimension moves the same bytes in whatever order they come: inputs
    go outermost first, and outputs leave the way the inputs came.
    """
    ways = {
        tensor.name: tuple(zip(tensor.pin, program.storage(tensor), strict=True))
        for tensor in program.tensors
    }
    steps = []
    for index, dim in enumerate(program.mesh.names):
        for tensor in program.read:
            pinned, stored = ways[tensor.name][index]
            if pinned != stored:
                steps.append(BorderStep(tensor.name, pinned, stored, dim))
    for index, dim in reversed(tuple(enumerate(program.mesh.names))):
        for tensor in program.outputs:
            pinned, stored = ways[tensor.name][index]
            if pinned != stored:
                steps.append(BorderStep(tensor.name, stored, pinned, dim))
    return tuple(steps)
