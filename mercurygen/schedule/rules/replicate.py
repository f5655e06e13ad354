"""`replicate k, v over gpu`: every rank along gpu is given all of an input, or gets all of an
output: its partial results are all-reduced.

before: replicated
after:  replicated k over gpu, v over gpu
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Replicate
from mercurygen.schedule.rules.common import (
    fault_of_dtype,
    mixed_roles,
    not_one_story,
    unknown_dim,
    unknown_tensor,
)


def refuse(program: Program, d: Replicate) -> Refusal | None:
    """Unknown names, two lines for one; whether the pin gives it is checked once all are known."""
    found = (
        unknown_tensor(program, d.tensors)
        or unknown_dim(program, d.dims)
        or mixed_roles(program, d.tensors, "replicate")
        or not_one_story(program, d.tensors, "replicate")
        or fault_of_dtype(program, d.tensors, d.dtype)
    )
    if found:
        return found
    for name in d.tensors:
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
    pairs = tuple((name, dim) for name in d.tensors for dim in d.dims)
    less = tuple((*pair, d.dtype) for pair in pairs) if d.dtype else ()
    return program.changed(
        replicated=(*program.replicated, *pairs),
        reduce_dtype=(*program.reduce_dtype, *less),
    )
