"""`replicate k, v over gpu`: every rank along gpu is given all of k and v.

before: replicated
after:  replicated k over gpu, v over gpu
"""

from __future__ import annotations

from dataclasses import replace

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Replicate
from mercurygen.schedule.rules.common import not_one_story, unknown_dim, unknown_tensor


def refuse(program: Program, d: Replicate) -> Refusal | None:
    """Unknown names, outputs; whether the pin gives it is checked once all pins are known."""
    found = (
        unknown_tensor(program, d.tensors)
        or unknown_dim(program, d.dims)
        or not_one_story(program, d.tensors, "replicate")
    )
    if found:
        return found
    for name in d.tensors:
        if program.tensor(name).role == "output":
            return Refusal(
                "output-moves",
                lambda name=name: (
                    f"{name} is an output: this version has no replicate of partial results",
                    f"parallelize an axis that {name} carries",
                ),
            )
        for dim in d.dims:
            if (name, dim) in program.replicated:
                return Refusal(
                    "two-stories",
                    lambda name=name, dim=dim: (
                        f"{name} is replicated twice over {dim}",
                        "each tensor has one story per dimension: keep one of the two lines",
                    ),
                )
    return None


def rewrite(program: Program, d: Replicate) -> Program:
    """The program with these tensors whole along these dimensions."""
    pairs = ((name, dim) for name in d.tensors for dim in d.dims)
    return replace(program, replicated=(*program.replicated, *pairs))
