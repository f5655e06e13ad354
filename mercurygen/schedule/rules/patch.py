"""`patch body with aten`: which local kernel runs the body.

before: body
after:  body with aten
"""

from __future__ import annotations

from mercurygen.errors import Refusal, closest
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Patch

KERNELS = ("aten",)


def refuse(program: Program, d: Patch) -> Refusal | None:
    """Another body, an unknown kernel, a second patch."""
    if d.body != "body":
        return Refusal("unknown-body", lambda: (f"no body {d.body!r}", "write `patch body with …`"))
    if d.kernel not in KERNELS:
        return Refusal(
            "unknown-kernel",
            lambda: (f"no kernel {d.kernel!r} for {program.operator}", closest(d.kernel, KERNELS)),
        )
    if program.kernel is not None:
        return Refusal("patched-twice", lambda: ("the body is patched twice", "keep one line"))
    return None


def rewrite(program: Program, d: Patch) -> Program:
    """The program with its kernel."""
    return program.changed(kernel=d.kernel)
