"""`pin q, k: S over node, gpu`: the layout that the caller has and wants.

before: q [B, S_q, H * G, D]
after:  q [B, S_q, H * G, D] pinned S_q over node, gpu
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Pin
from mercurygen.schedule.rules.common import unknown_dim, unknown_tensor


def refuse(program: Program, d: Pin) -> Refusal | None:
    """Unknown names, an axis that a tensor does not carry, a dimension pinned twice."""
    found = unknown_tensor(program, d.tensors) or unknown_dim(program, d.dims)
    if found or d.axis is None:
        return found
    for name in d.tensors:
        tensor = program.tensor(name)
        axis = program.named_axis(tensor, d.axis)
        if axis is None:
            carried = ", ".join(axis for dim in tensor.dims for axis in dim)
            return Refusal(
                "pin-axis",
                lambda name=name, carried=carried: (
                    f"{name} carries no axis {d.axis}",
                    f"{name} carries {carried}; S stands for its sequence",
                ),
            )
        for dim in d.dims:
            if program.pinned(tensor, dim) is not None:
                return Refusal(
                    "pinned-twice",
                    lambda name=name, dim=dim: (
                        f"{name} is pinned twice over {dim}",
                        "a dimension splits one axis of a tensor",
                    ),
                )
    return None


def rewrite(program: Program, d: Pin) -> Program:
    """The program with the pin in its tensors."""

    def pinned(tensor):
        if tensor.name not in d.tensors or d.axis is None:
            return tensor
        axis = program.named_axis(tensor, d.axis)
        pin = tuple(
            axis if dim in d.dims else old
            for dim, old in zip(program.mesh.names, tensor.pin, strict=True)
        )
        return tensor.pinned_as(pin)

    return program.changed(tensors=tuple(map(pinned, program.tensors)))
