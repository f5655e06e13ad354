"""The layout in which a caller holds attention's tensors; inside, a module has [B, S, H, D]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mercurygen.errors import UserError, closest, shorten

Each = TypeVar("Each")

INSIDE = "bshd"
LAYOUTS = (INSIDE, "bhsd", "sbhd")
PACKED = "thd"
_EXCHANGED: dict[str, tuple[int, int] | None] = {
    **{"bshd": None, "bhsd": (1, 2), "sbhd": (0, 1)},
    PACKED: None,
}


def check_layout(layout: str) -> None:
    """Refuse a layout that there is not.

    Raises:
        UserError: `unknown-layout`, with the closest that there is.
    """
    if layout in LAYOUTS:
        return
    help = closest(layout, LAYOUTS)
    if layout == PACKED:
        known = ", ".join(LAYOUTS)
        help = f"[T, H, D] is for packed documents: --packed, and no --layout; known: {known}"
    raise UserError("unknown-layout", f"layout {shorten(layout)!r} is not supported", help=help)


def exchanged(layout: str) -> tuple[int, int] | None:
    """The two dimensions in which a layout differs from [B, S, H, D]: it is its own inverse."""
    return _EXCHANGED[layout]


def arranged(layout: str, each: Sequence[Each]) -> list[Each]:
    """What belongs to B, S, H and D, in the caller's order; the same back. Of lse: as it is.

    Packed tensors have no B, nor has their lse.
    """
    found = list(each)
    if layout == PACKED:
        return found[1:]
    if (pair := exchanged(layout)) and len(found) == 4:
        one, other = pair
        found[one], found[other] = found[other], found[one]
    return found
