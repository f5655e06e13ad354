"""`shift k, v: S_kv along node, gpu`: stored split, and comes by tile by tile.

before: stages
after:  stages walk k, v: S_kv along node; walk k, v: S_kv along gpu

The first dimension is the outer loop; the inner ring goes once around for every tile of it.
"""

from __future__ import annotations

from dataclasses import replace

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage
from mercurygen.schedule.directives import Shift
from mercurygen.schedule.rules.common import in_order, not_brought


def refuse(program: Program, d: Shift) -> Refusal | None:
    """See `not_brought`; and the options that this version does not lower."""
    for along in d.along:
        for option in along.options:
            return Refusal(
                "not-supported",
                lambda dim=along.dim, option=option: (
                    f"shift along {dim}: {option} is not supported by this version",
                    f"write `along {dim}`: relayed, one tile ahead",
                ),
            )
    return not_brought(program, d.tensors, d.axis, d.dims, "shift")


def rewrite(program: Program, d: Shift) -> Program:
    """The program with one more walk per dimension, inside the stages before it."""
    stages = (Stage(in_order(program, d.tensors), "walk", d.axis, dim) for dim in d.dims)
    return replace(program, stages=(*program.stages, *stages))
