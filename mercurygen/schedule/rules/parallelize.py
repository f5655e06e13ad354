"""`parallelize H over gpu`: the iterations of an axis are split over mesh dimensions.

before: axis H = 8
after:  axis H = 8 over gpu
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Parallelize
from mercurygen.schedule.rules.common import unknown_axis, unknown_dim


def refuse(program: Program, d: Parallelize) -> Refusal | None:
    """Unknown names, a dimension used twice, an axis that the operator takes whole."""
    found = unknown_axis(program, d.axis) or unknown_dim(program, d.dims)
    if found:
        return found
    for dim in d.dims:
        taken = program.parallel_axis(dim)
        if taken is not None:
            return Refusal(
                "parallelized-twice",
                lambda dim=dim, taken=taken: (
                    f"{dim} already splits {taken}",
                    f"every dimension has exactly one parallelize: drop one, or split {dim} "
                    "into two dimensions in `mesh`",
                ),
                ("parallelize", taken, dim),
            )
    if d.axis not in splittable(program):
        return Refusal(
            "axis-not-parallel",
            lambda: (
                f"{d.axis} cannot be split over {', '.join(d.dims)}: {program.operator} takes all "
                "of it at once",
                "axes that can be split: " + ", ".join(splittable(program)),
            ),
        )
    return None


def splittable(program: Program) -> tuple[str, ...]:
    """Axes that are looped over, and whose iterations may be split.

    Not an axis that the body takes whole, as attention the components of a head.
    """
    return program.loops


def rewrite(program: Program, d: Parallelize) -> Program:
    """The program with the axis on these dimensions."""
    parallel = tuple(
        d.axis if dim in d.dims else old
        for dim, old in zip(program.mesh.names, program.parallel, strict=True)
    )
    return program.changed(parallel=parallel)
