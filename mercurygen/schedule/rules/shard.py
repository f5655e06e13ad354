"""`shard k, v: S_kv over gpu`: an input is stored split and gathered where all of it is needed;
partial results of an output are reduce-scattered.

before: stages
after:  stages gather k, v: S_kv over gpu

Several dimensions nest in the order written: the first gathers what is stored.
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage
from mercurygen.schedule.directives import Shard
from mercurygen.schedule.rules.common import by_role, in_order, not_brought


def refuse(program: Program, d: Shard) -> Refusal | None:
    """See `not_brought`."""
    lines = by_role(program, d)
    found = (not_brought(program, x.tensors, x.axis, x.dims, "shard", x.dtype) for x in lines)
    return next(filter(None, found), None)


def rewrite(program: Program, d: Shard) -> Program:
    """The program with one more gather, or reduce-scatter, per dimension."""
    stages = []
    for one in by_role(program, d):
        names = in_order(program, one.tensors)
        kind = "scatter" if program.tensor(names[0]).role == "output" else "gather"
        stages += [Stage(names, kind, one.axis, dim, dtype=one.dtype) for dim in one.dims]
    return program.changed(stages=(*program.stages, *stages))
