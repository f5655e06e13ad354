"""`reshard q, k, v: S to H along gpu`: one collective at the border, made explicit.

before: border
after:  border q S_q to H along gpu, k S_kv to H along gpu, ...

A schedule without these lines gets those that its pins need (`mercurygen.schedule.complete`);
with them, they must lead from the pins to what the schedule works from.
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import BorderStep, Program
from mercurygen.schedule.directives import Reshard
from mercurygen.schedule.rules.common import unknown_dim, unknown_tensor


def refuse(program: Program, d: Reshard) -> Refusal | None:
    """Unknown names, an axis that a tensor does not carry, from an axis to itself."""
    found = unknown_tensor(program, d.tensors) or unknown_dim(program, (d.dim,))
    if found:
        return found
    for name in d.tensors:
        tensor = program.tensor(name)
        for axis in (d.source, d.target):
            if axis is not None and program.named_axis(tensor, axis) is None:
                return Refusal(
                    "reshard-axis",
                    lambda name=name, axis=axis: (f"{name} carries no axis {axis}", None),
                )
    if d.source == d.target:
        return Refusal("reshard-axis", lambda: ("a reshard goes from one axis to another", None))
    return None


def rewrite(program: Program, d: Reshard) -> Program:
    """The program with the steps at the end of its border."""
    steps = []
    for name in d.tensors:
        tensor = program.tensor(name)
        source, target = (
            axis and program.named_axis(tensor, axis) for axis in (d.source, d.target)
        )
        steps.append(BorderStep(name, source, target, d.dim))
    return program.changed(border=(*program.border, *steps))
