"""Emitted text of the local kernel in Triton: fixed text, with the schedule's tile sizes in it.

The gradient takes `delta` where torch's kernel takes out, and adds into float32 results:
`_block_backward(grad_out, q, k, v, lse, delta, scale, grads, ahead)`.
"""

from __future__ import annotations

from mercurygen.emit.templates import render
from mercurygen.ir.kernel import BACKWARD, FORWARD, WIDTH, Options, completed

IMPORTS = ("import triton", "import triton.language as tl")


def forward(options: Options) -> str:
    """`_block_forward`, what it is where the kernels do not run, and the kernels."""
    values = completed(options, FORWARD)
    block = render("triton_block", width=WIDTH[FORWARD], **values)
    return "\n\n\n".join([block, render("triton_forward")])


def backward(options: Options) -> str:
    """`_block_backward` and `_delta`, alike; they call functions of `forward`'s text."""
    values = completed(options, BACKWARD)
    block = render("triton_block_backward", width=WIDTH[BACKWARD], **values)
    return "\n\n\n".join([block, render("triton_backward")])
