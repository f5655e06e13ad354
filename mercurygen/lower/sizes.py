"""Bytes of what one kernel call makes: of torch's attention, as emitted, and of any other body."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from mercurygen.ir.atoms import Region
from mercurygen.ir.kernel import ATEN, TRITON
from mercurygen.ir.problem import BACKWARD
from mercurygen.ir.program import Tensor
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Block

HEAD_MULTIPLE = 8  # torch's kernel wants heads of a multiple of 8; others are padded with zeros

Extents = Mapping[str, int]  # of a call: how many indices along every axis it is given


def padded_width(plan: Plan) -> int:
    """Head size that torch's kernel runs with: that of keys and values alike, padded."""
    widest = max(plan.program.extent("D"), plan.program.extent("D_v"))
    return -(-widest // HEAD_MULTIPLE) * HEAD_MULTIPLE


def local_extents(plan: Plan) -> dict[str, int]:
    """Indices of every axis that a rank works on in one part of the tile loops."""
    program, atoms = plan.program, plan.atoms
    found = {}
    for axis in program.axes:
        split = prod(program.mesh.extent(dim) for dim in program.parallel_dims(axis.name))
        found[axis.name] = axis.extent // split // atoms.parts(axis.name)
    return found


def local_heads(plan: Plan) -> tuple[int, int]:
    """Query heads and key/value heads of a rank while the body runs."""
    extents = local_extents(plan)
    return extents["H"] * extents["G"], extents["H"]


def with_block(plan: Plan, extents: Extents, block: Block | None) -> dict[str, int]:
    """The extents of a call on a block, of those of a whole tile."""
    if block is None:
        return dict(extents)
    rows, cols = plan.program.mask_axes
    return {**extents, rows: block.height, cols: block.width}


def share_bytes(plan: Plan, extents: Extents) -> tuple[int, ...]:
    """Of a call's own share of every output.

    torch's attention makes out, and its gradient dq, dk and dv, in the dtype of the inputs and as
    wide as it is padded; any other body makes what its outputs are accumulated in.
    """
    if plan.program.kernel == ATEN and plan.program.operator in BACKWARD:
        queries, keys = _rows(extents)
        wide = padded_width(plan) * plan.itemsize("inputs")
        return queries * wide, keys * wide, keys * wide
    if plan.program.kernel == ATEN:
        rows = extents["B"] * extents["S_q"] * extents["H"] * extents["G"]
        wide = padded_width(plan) * plan.itemsize("inputs")
        return rows * wide, rows * plan.itemsize("accumulator")
    return tuple(
        prod(extents[axis] for axis in tensor.axes) * plan.itemsize(plan.partial(tensor))
        for tensor in plan.program.outputs
    )


def scratch_bytes(plan: Plan, extents: Extents, merge: bool) -> int:
    """Most bytes alive in the call beside what it leaves behind.

    torch's attention: the padded copies live while the kernel runs; a merge holds the share, two
    vectors the size of its lse (their difference, and the weight), then one of them and the share
    widened. Its gradient: see `_gradient_scratch`. The Triton kernel, which merges as it writes,
    needs nothing. Any other body: its share while it is merged, and beside a softmax merge the two
    vectors.
    """
    if plan.program.kernel == TRITON:
        return 0
    if plan.program.kernel != ATEN:
        return _share_and_merge(plan, extents) if merge else 0
    if plan.program.operator in BACKWARD:
        share = sum(share_bytes(plan, extents)) if merge else 0
        return share + _gradient_scratch(plan, extents)
    batch, padded = extents["B"], padded_width(plan)
    heads, kv_heads = extents["H"] * extents["G"], extents["H"]
    height, width = extents["S_q"], extents["S_kv"]
    element = padded * plan.itemsize("inputs")
    pads = 0
    if plan.program.extent("D") != padded:
        pads += batch * (height * heads + width * kv_heads) * element
    if plan.program.extent("D_v") != padded:
        pads += batch * width * kv_heads * element
    if not merge:
        return pads
    out, lse = share_bytes(plan, extents)
    return out + lse + max(pads, merge_bytes(plan, batch * height * heads))


def _share_and_merge(plan: Plan, extents: Extents) -> int:
    """Bytes of a share of a body that is the operator's own lines, and of its softmax merges."""
    names = (tensor.name for tensor in plan.program.outputs)
    share = dict(zip(names, share_bytes(plan, extents), strict=True))
    weighed = (c.outputs[1] for c in plan.program.combines if c.kind == "softmax")
    return sum(share.values()) + 2 * sum(share[name] for name in weighed)


def _rows(extents: Extents) -> tuple[int, int]:
    """Rows of a call, over batch and heads too: of the queries, and of the keys."""
    heads = extents["H"] * extents["G"]
    queries = extents["B"] * extents["S_q"] * heads
    return queries, extents["B"] * extents["S_kv"] * extents["H"]


def _gradient_scratch(plan: Plan, extents: Extents) -> int:
    """Bytes alive while the gradient's kernel runs, beside what it gives.

    Padded copies of q, k, v, out and its gradient; a dense lse; as flash-attention's mha_bwd
    (csrc/flash_attn/flash_api.cpp) allocates them, dq and delta in float32, and dk and dv of every
    query head where several share a key head. A sum into other results needs nothing more.
    """
    queries, keys = _rows(extents)
    padded, element = padded_width(plan), plan.itemsize("inputs")
    wide = plan.itemsize("accumulator")
    pads = 0
    if plan.program.extent("D") != padded:
        pads += (queries + keys) * padded * element
    if plan.program.extent("D_v") != padded:
        pads += (2 * queries + keys) * padded * element
    grouped = 2 * keys * extents["G"] * padded * element if extents["G"] > 1 else 0
    return pads + queries * (padded + 2) * wide + grouped


def merge_bytes(plan: Plan, rows: int) -> int:
    """Bytes that a softmax merge of a share in the inputs' dtype needs beside it.

    Args:
        rows: of out, over batch and heads too.
    """
    lse = rows * plan.itemsize("accumulator")
    widened = 0
    if plan.itemsize("inputs") < plan.itemsize("accumulator"):
        widened = rows * plan.program.extent("D_v") * plan.itemsize("accumulator")
    return max(2 * lse, lse + widened)


def softmax_scratch(plan: Plan, out: Tensor, region: Region) -> int:
    """Bytes beside a softmax merge of partial results in their own dtype: two vectors like lse.

    Args:
        plan: of the program.
        out: the first output of the merge.
        region: the part of it that is merged.
    """
    outputs = next(c.outputs for c in plan.program.combines if out.name in c.outputs)
    lse = plan.program.tensor(outputs[1])
    part = tuple(region[out.axes.index(axis)] for axis in lse.axes)
    return 2 * plan.region_bytes(lse, part, "accumulator")
