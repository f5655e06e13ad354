"""Bytes of what one kernel call makes: the emitted `_block_forward` and `_merge`."""

from __future__ import annotations

from math import prod

from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Block

HEAD_MULTIPLE = 8  # the kernel wants heads of a multiple of 8; others are padded with zeros


def padded_width(plan: Plan) -> int:
    """Head size that the kernel runs with: that of keys and values alike, padded."""
    widest = max(plan.program.extent("D"), plan.program.extent("D_v"))
    return -(-widest // HEAD_MULTIPLE) * HEAD_MULTIPLE


def local_heads(plan: Plan) -> tuple[int, int]:
    """Query heads and key/value heads of a rank while the body runs."""
    split = prod(plan.program.mesh.extent(dim) for dim in plan.head_dims)
    kv_heads = plan.program.extent("H") // split
    return kv_heads * plan.program.extent("G"), kv_heads


def extent_of(block: Block, plan: Plan) -> tuple[int, int]:
    """Rows and columns of a block, in tokens."""
    return (
        (block.rows[1] - block.rows[0]) * plan.chunk,
        (block.cols[1] - block.cols[0]) * plan.chunk,
    )


def share_bytes(plan: Plan, block: Block) -> tuple[int, int]:
    """A block's own out, in the inputs' dtype and as wide as the kernel makes it, and its lse."""
    height, _ = extent_of(block, plan)
    rows = plan.program.extent("B") * height * local_heads(plan)[0]
    return (
        rows * padded_width(plan) * plan.itemsize("inputs"),
        rows * plan.itemsize("accumulator"),
    )


def scratch_bytes(plan: Plan, block: Block, merge: bool) -> int:
    """Most bytes alive in the call beside what it leaves behind.

    The padded copies live while the kernel runs; a merge holds the share, two vectors the size
    of its lse (their difference, and the weight), then one of them and the share widened.
    """
    height, width = extent_of(block, plan)
    heads, kv_heads = local_heads(plan)
    batch, padded = plan.program.extent("B"), padded_width(plan)
    element = padded * plan.itemsize("inputs")
    pads = 0
    if plan.program.extent("D") != padded:
        pads += batch * (height * heads + width * kv_heads) * element
    if plan.program.extent("D_v") != padded:
        pads += batch * width * kv_heads * element
    if not merge:
        return pads
    out, lse = share_bytes(plan, block)
    widened = 0
    if plan.itemsize("inputs") < plan.itemsize("accumulator"):
        rows = batch * height * heads
        widened = rows * plan.program.extent("D_v") * plan.itemsize("accumulator")
    return out + lse + max(pads, 2 * lse, lse + widened)
