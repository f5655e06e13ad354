"""`tile H by 4`: equal parts of what a rank sees of an axis, looped over.

before: tiles
after:  tiles H by 4

Collectives of what carries the axis move into the loop; the next part's run under this one's body.
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, TileLoop
from mercurygen.schedule.directives import Tile
from mercurygen.schedule.rules.common import joined_axes, unknown_axis

MOST_PARTS = 64


def refuse(program: Program, d: Tile) -> Refusal | None:
    """An unknown axis, one that is tiled already, no parts or too many."""
    axes = joined_axes(program, d.axis)
    found = None if len(axes) > 1 else unknown_axis(program, d.axis)
    if found:
        return found
    for loop in program.tiles:
        if set(loop.axes) & set(axes):
            return Refusal(
                "tiled-twice",
                lambda: (f"{d.axis} is tiled twice", "keep one of the two lines"),
            )
    if not 2 <= d.parts <= MOST_PARTS:
        return Refusal(
            "tile-parts",
            lambda: (f"tile {d.axis} by {d.parts}", f"2 to {MOST_PARTS} parts"),
        )
    return None


def rewrite(program: Program, d: Tile) -> Program:
    """The program with one more tile loop, inside those before it."""
    loop = TileLoop(joined_axes(program, d.axis), d.parts)
    return program.changed(tiles=(*program.tiles, loop))
