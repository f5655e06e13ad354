"""`shard k, v: S_kv over gpu`: stored split, gathered where all of it is needed.

before: stages
after:  stages gather k, v: S_kv over gpu

Several dimensions nest in the order written: the first gathers what is stored.
"""

from __future__ import annotations

from dataclasses import replace

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage
from mercurygen.schedule.directives import Shard
from mercurygen.schedule.rules.common import in_order, not_brought


def refuse(program: Program, d: Shard) -> Refusal | None:
    """See `not_brought`."""
    return not_brought(program, d.tensors, d.axis, d.dims, "shard")


def rewrite(program: Program, d: Shard) -> Program:
    """The program with one more gather per dimension, inside the stages before it."""
    stages = (Stage(in_order(program, d.tensors), "gather", d.axis, dim) for dim in d.dims)
    return replace(program, stages=(*program.stages, *stages))
