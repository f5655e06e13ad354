"""Refusals that several directives share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mercurygen.errors import Refusal, closest
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Along, Shard, Shift


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
    colon = "" if word == "replicate" else ":"
    for group in program.together:
        named = [name for name in group if name in tensors]
        if named and len(named) < len(group):
            return Refusal(
                "together-split",
                lambda group=group, named=named: (
                    f"a `{word}` of {', '.join(named)} without "
                    + ", ".join(name for name in group if name not in named),
                    f"they always move as one: `{word} {', '.join(group)}{colon} …`",
                ),
            )
    return None


def by_role(program: Program, d: Shift | Shard) -> tuple[Shift | Shard, ...]:
    """A line of inputs and outputs as two: results follow the tiles that they are of.

    Only results cross links in another dtype, and only inputs are fetched ahead or both ways.
    """
    known = {tensor.name: tensor.role for tensor in program.tensors}
    outputs = tuple(name for name in d.tensors if known.get(name) == "output")
    if not outputs or len(outputs) == len(d.tensors):
        return (d,)
    inputs = tuple(name for name in d.tensors if name not in outputs)
    theirs = replace(d, tensors=outputs)
    if isinstance(d, Shift):
        along = tuple(Along(a.dim, tuple(o for o in a.options if o == "direct")) for a in d.along)
        theirs = replace(theirs, along=along)
    return replace(d, tensors=inputs, dtype=None), theirs


def mixed_roles(program: Program, tensors: tuple[str, ...], word: str) -> Refusal | None:
    """Inputs and outputs in one line: they move in different ways."""
    outputs = [name for name in tensors if program.tensor(name).role == "output"]
    if not outputs or len(outputs) == len(tensors):
        return None
    return Refusal(
        "roles-mixed",
        lambda: (
            f"one `{word}` of inputs and outputs: {', '.join(tensors)}",
            f"they move in different ways: write a line of its own for {', '.join(outputs)}",
        ),
    )


Unfit = Callable[[Program, Any], Refusal | None]

REDUCE_DTYPES = ("bfloat16", "float16", "float32")


def fault_of_dtype(program: Program, tensors: tuple[str, ...], dtype: str | None) -> Refusal | None:
    """`as bfloat16` of what is no partial result that the library adds up."""
    if dtype is None:
        return None
    if dtype not in REDUCE_DTYPES:
        return Refusal(
            "reduce-dtype",
            lambda: (
                f"partial results do not cross links as {dtype}",
                closest(dtype, REDUCE_DTYPES),
            ),
        )
    kinds = {c.kind for c in program.combines for name in c.outputs if name in tensors}
    if kinds == {"sum"}:
        return None
    return Refusal(
        "reduce-dtype",
        lambda: (
            f"{', '.join(tensors)} cannot cross links as {dtype}: only results that are summed up "
            "can",
            f"leave `as {dtype}` out",
        ),
    )


def joined_axes(program: Program, name: str) -> tuple[str, ...]:
    """The axes that a schedule calls by one name: one, or those of a join."""
    return next((axes for axes in program.joins if "_".join(axes) == name), (name,))


def not_brought(program: Program, d: Shard | Shift, unfit: Unfit) -> Refusal | None:
    """What keeps tensors from being gathered, shifted or reduced along an axis over dimensions.

    What the line alone tells is looked at once for all programs of an operator and mesh.

    Args:
        program: so far.
        d: the line.
        unfit: what keeps inputs, or outputs, from any program of the operator on the mesh.
    """
    key = "unfit", d
    found = program.shared.get(key)
    if found is None:
        refusals = (unfit(program, one) for one in by_role(program, d))
        found = program.shared[key] = (next(filter(None, refusals), None),)
    return found[0] or _moved_already(program, d)


def unfit_line(program: Program, d: Shard | Shift, word: str) -> Refusal | None:
    """Unknown names, tensors of two kinds or of a group's part, an axis that is not theirs."""
    found = (
        unknown_tensor(program, d.tensors)
        or unknown_axis(program, d.axis)
        or unknown_dim(program, d.dims)
        or not_one_story(program, d.tensors, word)
        or fault_of_dtype(program, d.tensors, d.dtype)
    )
    if found:
        return found
    for name in d.tensors:
        tensor = program.tensor(name)
        if not tensor.carries(d.axis):
            return Refusal(
                "not-its-axis",
                lambda tensor=tensor: (
                    f"{tensor.name} carries no axis {d.axis}",
                    f"it carries {', '.join(tensor.axes)}",
                ),
            )
    return None


def _moved_already(program: Program, d: Shard | Shift) -> Refusal | None:
    dims = d.dims
    for stage in program.stages:
        if stage.dim in dims:
            for name in d.tensors:
                if name in stage.tensors:
                    return Refusal(
                        "two-stories",
                        lambda name=name, dim=stage.dim: (
                            f"{name} already moves along {dim} by another line",
                            "a tensor moves in one way along a dimension: keep one of the two",
                        ),
                        ("shift" if stage.kind == "walk" else "shard", name, stage.dim),
                    )
    return None
