"""What a forward keeps for its backward: that both plans mean the same parts by it."""

from __future__ import annotations

from itertools import product
from math import lcm

from mercurygen.errors import Refusal
from mercurygen.lower.plan import Plan

SAVED = ("q", "k", "v", "out", "lse")  # in the order in which they are kept


def outer(plan: Plan, backward: Plan) -> tuple[str, ...]:
    """What of what is kept lies as the caller has it."""
    pins = {x: (plan.program.tensor(x).pin, backward.program.tensor(x).pin) for x in SAVED}
    return tuple(name for name, (caller, kept) in pins.items() if caller == kept)


def is_outer(plan: Plan, backward: Plan) -> bool:
    """Whether all of it does: then lse crosses the border in any case."""
    return outer(plan, backward) == SAVED


def refuse(plan: Plan, backward: Plan) -> Refusal | None:
    """Refuse a backward for which what is kept of the forward lies otherwise than its pins say."""
    axis = _numbered_otherwise(plan, backward)
    if axis is None:
        return None
    return Refusal(
        "kept-otherwise",
        lambda: (
            f"the backward splits {axis} over dimensions outside of those over which what is kept "
            f"is split: a rank would have other parts of {axis} than it takes them for",
            f"split {axis} over the same dimensions, or write `save {', '.join(SAVED)}: outer`",
        ),
    )


def _numbered_otherwise(plan: Plan, backward: Plan) -> str | None:
    """An axis of what is kept of which the backward takes a rank to have other parts.

    A dimension's parts of an axis are those of its place among all dimensions that split it:
    where the backward splits heads over an outer dimension too, they are others.
    """
    mesh, unmoved = plan.program.mesh, outer(plan, backward)
    for name, rank in product(SAVED, range(mesh.size)):
        tensor, place = plan.program.tensor(name), mesh.coordinate(rank)
        layout = plan.program.tensor(name).pin if name in unmoved else None
        split: dict[str, list[str]] = {}
        for dim, axis in zip(mesh.names, layout or plan.program.storage(tensor), strict=True):
            if axis is not None:
                split.setdefault(axis, []).append(dim)
        ours = plan.atoms.region(tensor, place, split)
        theirs = backward.atoms.pinned(backward.program.tensor(name), place)
        for axis, mine, other in zip(tensor.axes, ours, theirs, strict=True):
            if axis in plan.program.mask_axes and not plan.atoms.striped:
                pairs = ((plan, mine), (backward, other))
                alike = [list(each.atoms.sequences[axis].runs(atoms)) for each, atoms in pairs]
            else:
                counts = plan.atoms.count[axis], backward.atoms.count[axis]
                alike = [_fine(mine, *counts), _fine(other, *reversed(counts))]
            if alike[0] != alike[1]:
                return axis
    return None


def _fine(atoms: tuple[int, ...], count: int, other: int) -> list[int]:
    """Parts of an axis as parts of the least common number of them."""
    size = lcm(count, other) // count
    return [atom * size + i for atom in atoms for i in range(size)]
