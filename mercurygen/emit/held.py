"""What the caller of a module holds of every tensor: a slice of the sequence, or all of it."""

from __future__ import annotations

from mercurygen.ir.program import Program
from mercurygen.lower.plan import Plan


def whole(program: Program, name: str) -> bool:
    """Whether every rank holds all of a tensor that has a sequence."""
    return bool(program.mesh.dims) and not any(program.tensor(name).pin)


def all_whole(plan: Plan) -> tuple[str, ...]:
    """The tensors that every rank holds all of."""
    return tuple(t.name for t in plan.program.tensors if whole(plan.program, t.name))


def length(plan: Plan, name: str) -> str:
    """The letter for the tokens of a tensor on a rank: S, or N of the whole sequence."""
    return "N" if whole(plan.program, name) else "S"


def listed(names: tuple[str, ...], last: str = "and") -> str:
    """`q, out and lse`."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
