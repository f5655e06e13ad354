"""`shard k, v: S_kv over gpu`: an input is stored split and gathered where all of it is needed;
partial results of an output are reduce-scattered.

before: stages
after:  stages gather k, v: S_kv over gpu

Several dimensions nest in the order written: the first gathers what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage
from mercurygen.schedule.directives import Shard
from mercurygen.schedule.rules.common import by_role, in_order, not_brought, unfit_line


def refuse(program: Program, d: Shard) -> Refusal | None:
    """See `not_brought`."""
    return not_brought(program, d, _unfit)


def _unfit(program: Program, d: Shard) -> Refusal | None:
    return unfit_line(program, d, "shard")


def rewrite(program: Program, d: Shard) -> Program:
    """The program with one more gather, or reduce-scatter, per dimension."""
    key = "gathers", d
    stages = program.shared.get(key)
    if stages is None:
        stages = program.shared[key] = tuple(_stages(program, d))
    return program.changed(stages=(*program.stages, *stages))


def _stages(program: Program, d: Shard) -> Iterator[Stage]:
    for one in by_role(program, d):
        names = in_order(program, one.tensors)
        kind = "scatter" if program.tensor(names[0]).role == "output" else "gather"
        for dim in one.dims:
            yield Stage(names, kind, one.axis, dim, dtype=one.dtype)
