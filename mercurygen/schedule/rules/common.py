"""Refusals that several directives share."""

from __future__ import annotations

from mercurygen.errors import Refusal, closest
from mercurygen.ir.program import Program


def unknown_dim(program: Program, dims: tuple[str, ...]) -> Refusal | None:
    """A dimension that the mesh does not have."""
    for dim in dims:
        if dim not in program.mesh.names:
            return Refusal(
                "unknown-dimension",
                lambda dim=dim: (
                    f"the mesh has no dimension {dim!r}",
                    closest(dim, program.mesh.names),
                ),
            )
    return None


def unknown_tensor(program: Program, tensors: tuple[str, ...]) -> Refusal | None:
    """A tensor that the operator does not have."""
    known = [tensor.name for tensor in program.tensors]
    for name in tensors:
        if name not in known:
            return Refusal(
                "unknown-tensor",
                lambda name=name: (
                    f"{program.operator} has no tensor {name!r}",
                    closest(name, known),
                ),
            )
    return None


def unknown_axis(program: Program, axis: str) -> Refusal | None:
    """An axis that the operator does not have."""
    known = [a.name for a in program.axes]
    if axis in known:
        return None
    return Refusal(
        "unknown-axis",
        lambda: (f"{program.operator} has no axis {axis!r}", closest(axis, known)),
    )


def in_order(program: Program, tensors: tuple[str, ...]) -> tuple[str, ...]:
    """Tensors in the order of the operator's signature: they are sent in it."""
    return tuple(tensor.name for tensor in program.tensors if tensor.name in tensors)


def not_one_story(program: Program, tensors: tuple[str, ...], word: str) -> Refusal | None:
    """Tensors that belong together, of which only some are named."""
    for group in program.together:
        named = [name for name in group if name in tensors]
        if named and len(named) < len(group):
            return Refusal(
                "together-split",
                lambda group=group, named=named: (
                    f"{', '.join(named)} cannot {word} without "
                    + ", ".join(name for name in group if name not in named),
                    f"they always move as one: `{word} {', '.join(group)}: …`",
                ),
            )
    return None


def not_brought(
    program: Program, tensors: tuple[str, ...], axis: str, dims: tuple[str, ...], word: str
) -> Refusal | None:
    """What keeps tensors from being gathered, or shifted, along an axis over dimensions."""
    found = (
        unknown_tensor(program, tensors)
        or unknown_axis(program, axis)
        or unknown_dim(program, dims)
        or not_one_story(program, tensors, word)
    )
    if found:
        return found
    for name in tensors:
        tensor = program.tensor(name)
        if tensor.role == "output":
            return Refusal(
                "output-moves",
                lambda name=name: (
                    f"{name} is an output: this version has no {word} of partial results",
                    f"parallelize an axis that {name} carries, so that it is complete where it is",
                ),
            )
        if program.sequence(tensor) != axis:
            return Refusal(
                "not-its-sequence",
                lambda tensor=tensor: (
                    f"{tensor.name} cannot {word} along {axis}",
                    f"its ranks hold slices of the sequence: `{word} {', '.join(tensors)}: "
                    f"{program.sequence(tensor)} …`",
                ),
            )
        for dim in dims:
            for stage in program.stages:
                if stage.dim == dim and name in stage.tensors:
                    return Refusal(
                        "two-stories",
                        lambda name=name, dim=dim: (
                            f"{name} already comes along {dim} by another directive",
                            "each tensor has one story per dimension: keep one of the two lines",
                        ),
                    )
    return None
