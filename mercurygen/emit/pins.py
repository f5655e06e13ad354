"""Words of a module's docstring where its caller holds other parts than slices of the sequence."""

from __future__ import annotations

from math import prod

from mercurygen.emit import held
from mercurygen.lower.plan import Plan


def holds(plan: Plan) -> str:
    """What the caller has on a rank."""
    words = {"B": "the batch", "H": "the heads"}
    alike: dict[str, list[str]] = {}
    for tensor in plan.program.tensors:
        split: dict[str, list[str]] = {}
        for dim, axis in zip(plan.program.mesh.names, tensor.pin, strict=True):
            if axis is not None:
                split.setdefault(words.get(axis, "the sequence"), []).append(dim)
        cuts = [f"{what} over {held.listed(tuple(dims))}" for what, dims in split.items()]
        alike.setdefault(f"split by {held.listed(tuple(cuts))}" if cuts else "whole", []).append(
            tensor.name
        )
    each = [f"{held.listed(tuple(names))} {how}" for how, names in alike.items()]
    return f"What a rank holds, and gets back: {'; '.join(each)}."


def order(plan: Plan) -> str:
    """Which tokens are whose."""
    tokens, places = plan.program.order, plan.program.order.ranks(plan.program.mesh)
    if not tokens.dims:
        return "Every rank has all tokens."
    owned = {
        "contiguous": f"cut into {places} chunks, of which place r owns chunk r",
        "zigzag": f"cut into {2 * places} chunks, of which place r owns chunks r and "
        f"{2 * places - 1} - r",
        "striped": f"dealt so that place r owns every {places}th token, from token r on",
    }
    return (
        f"{tokens.kind.capitalize()} over the {places} places of {held.listed(tokens.dims)}: the "
        f"sequence is {owned[tokens.kind]}. What is split over fewer dimensions has the tokens of "
        "all its places, in order."
    )


def sizes(plan: Plan) -> str:
    """What the letters stand for."""
    text = (
        "Sizes of the whole: B batch, N sequence, H heads, K key/value heads, D head size of q and "
        "k, E of v and out"
    )
    mesh, program = plan.program.mesh, plan.program
    batch, split, grouped, rows = (
        prod(mesh.extent(dim) for dim in program.parallel_dims(axis))
        for axis in ("B", "H", "G", program.mask_axes[0])
    )
    body = {"b = B": batch, "h = H": split * grouped, "k = K": split, "s = N": rows}
    inside = ", ".join(f"{x} / {n}" if n > 1 else x for x, n in body.items())
    return f"{text}; in the body {inside}."
