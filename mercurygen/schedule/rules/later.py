"""`tile`, `join`, `reorder`: read and printed, not lowered by this version."""

from __future__ import annotations

from mercurygen.errors import InternalError, Refusal
from mercurygen.ir.program import Program


def refuse(program: Program, d) -> Refusal:
    """Always."""
    word = str(d).split()[0]
    return Refusal(
        "not-supported",
        lambda: (f"{word} is not supported by this version", "leave the line out"),
    )


def rewrite(program: Program, d) -> Program:
    """Never reached: `refuse` lets nothing pass."""
    raise InternalError(f"{d} was not refused")
