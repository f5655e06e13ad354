"""Emitted text of the local kernel: its calls, and in Triton its text with the schedule's tiles.

The Triton kernel merges a block as it writes it; after torch's own a merge follows. Its gradient
takes `delta` where torch's kernel takes out, and adds into float32 results:
`_block_backward(grad_out, q, k, v, lse, delta, scale, grads, ahead)`.
"""

from __future__ import annotations

from mercurygen.emit.templates import render
from mercurygen.ir.kernel import BACKWARD, FORWARD, TRITON, WIDTH, Options, completed
from mercurygen.lower.plan import Plan

IMPORTS = ("import triton", "import triton.language as tl")
CUT = "cut"  # a block of which the loop around it says whether the mask cuts it


def mask_word(plan: Plan) -> str:
    """What says of a block how the mask cuts it: the last argument of its call."""
    if plan.program.banded:
        return "band"
    return "ahead" if plan.program.kernel == TRITON else "causal"


def mask_argument(plan: Plan, causal: bool | str) -> str:
    """That argument of a full block, of our own tile's (whose diagonal is the tile's own), or of
    what an expression says."""
    word = mask_word(plan)
    if causal == CUT:
        return word
    if word == "band":
        step = plan.atoms.domain.rows.count // len(plan.rows(plan.program.mesh.coordinate(0)))
        own = "(-window[0], window[1])"
        if plan.atoms.striped and step > 1:  # tokens from one to the next of a rank
            own = f"(-(window[0] // {step}), window[1] // {step})"
        return f"{word}={own}" if causal else f"{word}=(None, None)"
    if plan.program.kernel == TRITON:
        told = isinstance(causal, str)
        return f"{word}=0 if {causal} else None" if told else f"{word}={0 if causal else None}"
    return f"{word}={causal}"


def call(plan: Plan, tensors: str, causal: bool | str) -> str:
    """A block's own out and lse.

    Args:
        plan: of the module.
        tensors: q, k and v.
        causal: whether it is a causal square; `CUT`: the loop says how the mask cuts it.
    """
    return f"_block_forward({tensors}, scale, {mask_argument(plan, causal)})"


def merged(plan: Plan, results: str, tensors: str, causal: bool | str) -> str:
    """A block merged into results; arguments as of `call`."""
    if plan.program.kernel == TRITON:
        mask = mask_argument(plan, causal)
        return f"_block_forward({tensors}, scale, {mask}, into=({results}))"
    return f"_merge({results}, *{call(plan, tensors, causal)})"


def widened(plan: Plan) -> list[str]:
    """A line that makes a first block what others are merged into; Triton's is that already."""
    return [] if plan.program.kernel == TRITON else ["    out = out.to(lse.dtype)"]


def returned(plan: Plan, tiles: str) -> list[str]:
    """Lines of a body that is one block; tiles as of `rounded`."""
    block = call(plan, "q, k, v", plan.program.mask != "full")
    if plan.program.kernel == TRITON:
        return [f"    out, lse = {block}", *rounded(plan, tiles)]
    return [f"    return {block}"]


def rounded(plan: Plan, tiles: str) -> list[str]:
    """The last lines of a body: out in the dtype of the inputs.

    Args:
        plan: of the module.
        tiles: variables of keys and values that only the body holds; or nothing. Torch's merge has
            needed more room than the copy does.
    """
    held = tiles and plan.program.kernel == TRITON
    released = [f"    del {tiles}  # before out is copied"] if held else []
    return [*released, "    return out.to(q.dtype), lse"]


def given(plan: Plan) -> tuple[str, ...]:
    """What a block's gradients are made of, as the gradient's kernel is given it."""
    made = [tensor.name for tensor in plan.program.derived]
    return ("grad_out", "q", "k", "v", *(["lse", *made] if made else ["out", "lse"]))


def added(
    plan: Plan, tensors: str, into: str, causal: bool | str, apart: bool = False
) -> list[str]:
    """Lines that add a block's gradients to others.

    Args:
        plan: of gradients.
        tensors: as `given` names them.
        into: dq, dk and dv.
        causal: as of `call`, or an expression that says it.
        apart: a line for the block, and one for the sums, where they are not the kernel's own.
    """
    mask = mask_argument(plan, causal)
    if plan.program.kernel == TRITON:
        return [f"_block_backward({tensors}, scale, ({into}), {mask})"]
    block = f"_block_backward({tensors}, scale, {mask})"
    return [f"share = {block}", f"_add(({into}), share)"] if apart else [f"_add(({into}), {block})"]


def whole_mask(plan: Plan, offset: int) -> str:
    """That argument in the self-check, of all queries and keys on one device.

    Args:
        plan: of the module.
        offset: the key that the first query stands at.
    """
    if not plan.program.banded:
        return mask_argument(plan, plan.program.mask != "full")
    low, high = "None", str(offset)
    if plan.program.mask == "window":
        low, high = "-_TRIED[0]", "_TRIED[1]"
        if offset:
            low, high = f"{offset} - _TRIED[0]", f"{offset} + _TRIED[1]"
    return f"band=({low}, {high})"


def alone(plan: Plan, offset: int) -> str:
    """Lines of the self-check: out and gradients of one block, in the dtype of the inputs."""
    causal = plan.program.mask != "full"
    if mask_word(plan) == "band":
        band = whole_mask(plan, offset).removeprefix("band=")
        lines = [
            f"scale, band = q.shape[3] ** -0.5, {band}",
            "alone, lse = _block_forward(q, k, v, scale, band)",
            "grads = _block_backward(grad_out, q, k, v, alone, lse, scale, band)",
        ]
    elif plan.program.kernel != TRITON:
        lines = [
            f"scale, causal = q.shape[3] ** -0.5, {causal}",
            "alone, lse = _block_forward(q, k, v, scale, causal)",
            "grads = _block_backward(grad_out, q, k, v, alone, lse, scale, causal)",
        ]
    else:
        mask = mask_argument(plan, causal)
        lines = [
            "scale = q.shape[3] ** -0.5",
            f"alone, lse = _block_forward(q, k, v, scale, {mask})",
            "alone, delta = alone.to(dtype), _delta(grad_out, alone)",
            "grads = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))",
            f"_block_backward(grad_out, q, k, v, lse, delta, scale, grads, {mask})",
            "grads = (x.to(dtype) for x in grads)",
        ]
    return "\n    ".join(lines)


def block(plan: Plan) -> str:
    """`_block_forward` around torch's kernel."""
    if plan.program.banded:
        return "\n\n\n".join([render("window_block"), render("window_band")])
    return render("block")


def forward(options: Options) -> str:
    """`_block_forward`, what it does where the kernels do not run, and the kernels."""
    values = completed(options, FORWARD)
    block = render("triton_block", width=WIDTH[FORWARD], **values)
    return "\n\n\n".join([block, render("triton_forward")])


def backward(options: Options) -> str:
    """`_block_backward` and `_delta`, alike; they call functions of `forward`'s text."""
    values = completed(options, BACKWARD)
    block = render("triton_block_backward", width=WIDTH[BACKWARD], **values)
    return "\n\n\n".join([block, render("triton_backward")])
