"""`patch body with triton(rows=64)`: which local kernel runs the body, with its options.

before: body
after:  body with triton(rows=64)
"""

from __future__ import annotations

from mercurygen.errors import Refusal, closest
from mercurygen.ir.kernel import OPERATORS, TRITON
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Patch

KERNELS = tuple(OPERATORS)


def refuse(program: Program, d: Patch) -> Refusal | None:
    """Another body, an unknown kernel, a second patch."""
    if d.body != "body":
        return Refusal(
            "unknown-body",
            lambda: (
                f"{program.operator} has no part {d.body!r} to patch",
                f"its only part is `body`: `patch body with {KERNELS[0]}`",
            ),
        )
    if d.kernel == TRITON and program.operator not in OPERATORS[TRITON]:
        return Refusal(
            "kernel-of-attention",
            lambda: (
                f"the kernel {TRITON!r} is attention's, not that of {program.operator}",
                "leave the line out",
            ),
        )
    if d.kernel not in KERNELS:
        return Refusal(
            "unknown-kernel",
            lambda: (f"no kernel {d.kernel!r} for {program.operator}", closest(d.kernel, KERNELS)),
        )
    if d.options and d.kernel != TRITON:
        return Refusal(
            "kernel-takes-no-options",
            lambda: (
                f"the kernel {d.kernel!r} takes no options",
                f"`patch body with {d.kernel}`, or `patch body with {TRITON}(...)`",
            ),
        )
    if program.kernel is not None:
        return Refusal(
            "patched-twice",
            lambda: ("the body is patched twice", "keep one of the two lines"),
            ("patch",),
        )
    return None


def rewrite(program: Program, d: Patch) -> Program:
    """The program with its kernel."""
    return program.changed(kernel=d.kernel, kernel_options=d.options)
