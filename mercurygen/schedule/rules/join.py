"""`join H, G`: one axis of several, the first major, to be tiled as `H_G`.

before: joins
after:  joins H, G
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Join
from mercurygen.schedule.rules.common import unknown_axis


def refuse(program: Program, d: Join) -> Refusal | None:
    """Unknown axes, fewer than two, an axis that is joined or tiled already."""
    for axis in d.axes:
        found = unknown_axis(program, axis)
        if found:
            return found
        taken = any(axis in axes for axes in program.joins)
        if taken or any(axis in loop.axes for loop in program.tiles):
            word = "joined" if taken else "tiled"
            return Refusal(
                "joined-twice",
                lambda axis=axis, word=word: (
                    f"{axis} is {word} already",
                    "an axis is joined once, before it is tiled",
                ),
            )
    if len(d.axes) < 2:
        return Refusal("join-one", lambda: ("a join is of two axes or more", "`join H, G`"))
    return None


def rewrite(program: Program, d: Join) -> Program:
    """The program with the axes as one."""
    return program.changed(joins=(*program.joins, d.axes))
