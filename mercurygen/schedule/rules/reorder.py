"""`reorder H, S_kv`: the order of the tile loops, outermost first.

before: tiles S_kv by 2, H by 4
after:  tiles H by 4, S_kv by 2
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Reorder
from mercurygen.schedule.rules.common import joined_axes


def refuse(program: Program, d: Reorder) -> Refusal | None:
    """Other loops than there are."""
    named = [joined_axes(program, axis) for axis in d.axes]
    have = [loop.axes for loop in program.tiles]
    if sorted(named) != sorted(have):
        words = ", ".join("_".join(axes) for axes in have) or "none"
        return Refusal(
            "reorder-loops",
            lambda: (
                f"reorder names {', '.join(d.axes)}, but the tile loops are over {words}",
                "name every tiled axis once, after the `tile` lines",
            ),
        )
    return None


def rewrite(program: Program, d: Reorder) -> Program:
    """The program with its tile loops in this order."""
    by_axes = {loop.axes: loop for loop in program.tiles}
    return program.changed(tiles=tuple(by_axes[joined_axes(program, axis)] for axis in d.axes))
