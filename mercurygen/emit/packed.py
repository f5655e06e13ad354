"""Emitted text of packed documents: what of a tile they leave, as lists that the kernel takes.

A document is one run of positions, so that it is one run of the tokens that a rank holds, in their
order. Among our own tokens the kernel does all documents in one call. Of another owner's tile one
document is left at most: the one that goes on from its tokens to ours.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Literal

from mercurygen.emit import kernels, outside
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Block, visible

Form = Literal["whole", "gathered", "before", "halves", "around"]


def form(plan: Plan) -> Form | None:
    """How the module says what a tile leaves; None: it cannot yet.

    "whole": all tokens are here. "gathered": all columns are here. Of tiles that come by, with
    their owner: "before": of earlier ones; "halves": of an earlier owner's early half, or by our
    late half; "around": of any other, under a full mask.
    """
    if not plan.row_dims:
        return "whole"
    stages = plan.nest.stages
    if plan.tiles or any(
        len(loop.leading) not in (0, len(loop.stages)) for loop in plan.nest.loops
    ):
        return None
    if not plan.nest.walks:
        return "gathered"
    if set(plan.nest.walks) != set(plan.row_dims) or len(plan.nest.walks) != len(stages):
        return None
    for kind in ("around", "before", "halves"):
        if _holds(plan, kind):
            return kind
    return None


def _holds(plan: Plan, kind: str) -> bool:
    """Whether a form is what is left of every tile but our own, without documents."""
    ranks = prod(plan.program.mesh.extent(dim) for dim in plan.row_dims)
    slots = [plan.rows(_place(plan, slot)) for slot in range(ranks)]
    domain = replace(plan.atoms.domain, borders=())
    return all(
        visible(domain, plan.program.kernel, rows, cols)
        == _left(kind, me, owner, domain.rows.tokens(rows))
        for me, rows in enumerate(slots)
        for owner, cols in enumerate(slots)
        if me != owner
    )


def _left(kind: str, me: int, owner: int, size: int) -> tuple[Block, ...]:
    whole, half = (0, size), size // 2
    if kind == "around" or kind == "before" and owner < me:
        return (Block(whole, whole),)
    if kind == "before":
        return ()
    if owner < me:
        return (Block(whole, (0, half)),)
    return (Block((half, size), whole),)


def _place(plan: Plan, slot: int) -> dict[str, int]:
    """Coordinates of a number, row-major over the dimensions that split the rows."""
    place = {}
    for dim in reversed(plan.row_dims):
        slot, place[dim] = divmod(slot, plan.program.mesh.extent(dim))
    return place


def ours(plan: Plan) -> str:
    """Our number among the ranks that split the rows, row-major."""
    number = ""
    for dim in plan.row_dims:
        if number:
            number = f"({number})" if " " in number else number
            number = f"{number} * {variable(dim)}.size() + "
        number += f"{variable(dim)}.rank()"
    return number


def whole_call(plan: Plan, tensors: str) -> str:
    """The kernel on all tokens."""
    return f"_block_forward({tensors}, scale, {_how(plan)}, documents=(borders, borders))"


def _how(plan: Plan) -> str:
    """Whether the diagonal cuts documents."""
    return f"causal={plan.program.mask == 'causal'}"


def first(plan: Plan) -> list[str]:
    """Our own tile: all documents in one call, into whose result the others are merged."""
    tile = "q, keys, values"
    return [
        "",
        "    me, (keys, values) = next(tiles)  # our own",
        "    own = _among(borders, me, q.shape[1])",
        f"    out, lse = _block_forward({tile}, scale, {_how(plan)}, documents=(own, own))",
        *kernels.widened(plan),
    ]


def merges(plan: Plan) -> list[str]:
    """The loop over the other tiles."""
    tensors = "q[:, rows], keys[:, cols], values[:, cols]"
    block = "_merge(out[:, rows], lse[:, :, rows], *_block_forward("
    return [
        "    for owner, (keys, values) in tiles:",
        "        # Of one document, or of none.",
        "        for rows, cols in _visible(borders, me, owner, q.shape[1]):",
        f"            {block}{tensors}, scale, causal=False))",
    ]


def gathered(plan: Plan, empty: list[str]) -> list[str]:
    """The body on all columns: of every run of our rows one call."""
    tensors = "q, k[:, cols], v[:, cols]"
    if plan.nest.begin == "only":
        return [
            "",
            f"    start = {ours(plan)} * q.shape[1]",
            "    cols, documents = _seen(borders, start, start + q.shape[1])",
            f"    return _block_forward({tensors}, scale, {_how(plan)}, documents=documents)",
        ]
    tensors, how = "q[:, rows], k[:, cols], v[:, cols]", f"{_how(plan)}, documents=documents"
    block = f"_block_forward({tensors}, scale, {how})"
    return [
        *empty,
        f"    for rows, first, stop in _runs({ours(plan)}, q.shape[1]):",
        "        cols, documents = _seen(borders, first, stop)",
        f"        _merge(out[:, rows], lse[:, :, rows], *{block})",
    ]


def gradients(plan: Plan, me: str, owner: str) -> list[str]:
    """Lines that add a tile's gradients to others; me, owner: numbers of the ranks."""
    every = [tensor.name for tensor in plan.program.outputs]
    parts = ", ".join(f"{x}[:, {'rows' if x == 'dq' else 'cols'}]" for x in every)
    sliced = "grad_out[:, rows], q[:, rows], k[:, cols], v[:, cols], out[:, rows], lse[:, :, rows]"
    block = f"_block_backward({sliced}, scale"
    if form(plan) == "gathered":
        return [
            *_runs_of(plan),
            "    cols, documents = _seen(borders, first, stop)",
            f"    share = {block}, {_how(plan)}, documents=documents)",
            f"    _add(({parts}), share)",
        ]
    whole = f"_block_backward(grad_out, q, k, v, out, lse, scale, {_how(plan)}"
    return [
        f"if {owner} == {me}:",
        f"    own = _among(borders, {me}, q.shape[1])",
        f"    _add(({', '.join(every)}), {whole}, documents=(own, own)))",
        "else:",
        f"    for rows, cols in _visible(borders, {me}, {owner}, q.shape[1]):",
        f"        share = {block}, causal=False)",
        f"        _add(({parts}), share)",
    ]


def _runs_of(plan: Plan) -> list[str]:
    """The loop over runs of our rows."""
    return [f"for rows, first, stop in _runs({ours(plan)}, q.shape[1]):"]


def functions(plan: Plan) -> list[str]:
    """What says which rows and columns documents have, callers first."""
    kind = form(plan)
    ranks = prod(plan.program.mesh.extent(dim) for dim in plan.row_dims)
    values = {"last": 2 * ranks - 1, "chunks": 2 * ranks}
    values |= {"zigzag": plan.program.order.halves == 2, "full": plan.program.mask == "full"}
    if kind == "whole":
        return []
    if kind == "gathered":
        runs = [render("packed_runs", **values)] if plan.nest.begin != "only" else []
        return [*runs, render("packed_seen", **values)]
    if kind == "around":
        return [render("packed_around"), render("packed_before", **values)]
    return [render("packed_visible", **values), render("packed_before", **values)]


def layout(plan: Plan) -> list[str]:
    """What the layout's helpers are beside those of any sequence."""
    order, world = plan.program.order, plan.program.mesh.size
    values = {"multiple": order.chunks(plan.program.mesh), "world": world, "chunks": 2 * world}
    values |= {"order": order.kind, "zigzag": order.kind == "zigzag"}
    imbalance = render("packed_imbalance", causal=plan.program.mask == "causal", **values)
    return [render("packed_layout", mesh="mesh: DeviceMesh", **values), imbalance]


def block() -> list[str]:
    """The kernel's one place."""
    return [render("packed_block"), render("packed_parts")]


def self_check(plan: Plan, seq: int, heads: int, kv_heads: int, train: bool) -> list[str]:
    """The reference, and what is compared with it, for inputs of these sizes."""
    local = seq // plan.program.mesh.size
    values: dict[str, object] = {"seq": seq, "local": local}
    values["causal"] = plan.program.mask == "causal"
    sized = {name: f"{seq}, {n}, {size}" for name, n, size in outside.each(heads, kv_heads)}
    values |= {f"{name}_size": size for name, size in sized.items()}
    values |= {"kv_size": f"{local}, {kv_heads}, 16", "queries_size": f"{local}, {heads}, 16"}
    values["out_size"] = f"{seq}, {heads}, {outside.each(heads, kv_heads)[2][2]}"
    reference, error = "packed_reference", "packed_error"
    if train:
        reference, error = "packed_reference_gradients", "packed_error_gradients"
    return [render(reference, **values), render(error, **values), render("packed_blind", **values)]


def not_emitted(plan: Plan) -> str | None:
    """What of a plan of packed documents has no text yet."""
    if not plan.program.documents:
        return None
    if not plan.program.mesh.dims:
        return "packed documents on one rank"
    return None if form(plan) else "tiles that are gathered and come by, of packed documents"
