"""A stand-in for the package flash_attn on CPUs, for peers that import it: torch's own CPU kernel.

It has what ring-flash-attn 0.1.8 and yunchang 0.6.4 call, in flash-attn 2.8's convention:
tensors [B, S, H, D], lse [B, H, S] in float32, a causal mask aligned at the end of both.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"


def install() -> bool:
    """Make `flash_attn` importable; False if the real one is installed, which is then used."""
    if find_spec("flash_attn") is not None:
        return False
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
        vars(module).update({f.__name__: f for f in CALLS}, __version__=VERSION)
    package.flash_attn_interface = interface
    sys.modules.update({module.__name__: module for module in (package, interface)})
    return True


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Tensor, None, None]:
    """q [B, S, H, D], k and v [B, T, K, D] -> out [B, S, H, D], lse [B, H, S]"""
    _refuse(dropout_p, rest, more)
    bias = _bias(q, k, causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_heads_first, (q, k, v)),
        is_causal=causal and bias is None,
        attn_mask=bias,
        scale=softmax_scale,
    )
    return _heads_first(out), lse.contiguous(), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *rest: Any,
    **more: Any,
) -> None:
    """Write the gradients into dq, dk and dv."""
    _refuse(dropout_p, rest, more)
    bias = _bias(q, k, causal)
    kept = torch.float64 if q.dtype == torch.float64 else torch.float32
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_heads_first, (dout, q, k, v, out)),
        softmax_lse.to(kept),
        0.0,
        causal and bias is None,
        attn_mask=bias,
        scale=softmax_scale,
    )
    for into, gradient in zip((dq, dk, dv), gradients, strict=True):
        into.copy_(_heads_first(gradient))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *rest: Any,
    **more: Any,
) -> tuple[Tensor, Tensor, None, None]:
    """q [T, H, D], k and v [U, K, D] -> out [T, H, D], lse [H, T]"""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for rows, cols in _documents(cu_seqlens_q, cu_seqlens_k):
        given = q[None, rows], k[None, cols], v[None, cols]
        found = _flash_attn_forward(*given, dropout_p, softmax_scale, causal, *rest, **more)
        out[rows], lse[:, rows] = found[0][0], found[1][0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    *rest: Any,
    **more: Any,
) -> None:
    """Write the gradients of every document into dq, dk and dv."""
    for rows, cols in _documents(cu_seqlens_q, cu_seqlens_k):
        given = dout[None, rows], q[None, rows], k[None, cols], v[None, cols], out[None, rows]
        into = dq[None, rows], dk[None, cols], dv[None, cols]
        lse = softmax_lse[None, :, rows].contiguous()
        _flash_attn_backward(*given, lse, *into, dropout_p, softmax_scale, causal, *rest, **more)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **more: Any,
) -> Tensor:
    """q [B, S, H, D], k and v [B, S, K, D] -> out [B, S, H, D], differentiable."""
    _refuse(dropout_p, (), more)
    out = torch.nn.functional.scaled_dot_product_attention(
        *map(_heads_first, (q, k, v)), is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return _heads_first(out)


CALLS = (
    _flash_attn_forward,
    _flash_attn_backward,
    _flash_attn_varlen_forward,
    _flash_attn_varlen_backward,
    flash_attn_func,
)
# What a peer may pass after `causal`, in flash-attn's order, and the only values done here.
NEUTRAL = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "window_size": (-1, -1),
}


def _refuse(dropout_p: float, rest: tuple[Any, ...], more: dict[str, Any]) -> None:
    """Stop a peer that asks for more than the stand-in does."""
    given = {**dict(zip(NEUTRAL, rest[:4], strict=False)), **more}
    asked = {name: x for name, x in given.items() if name in NEUTRAL and x != NEUTRAL[name]}
    if dropout_p or asked:
        raise NotImplementedError(f"the stand-in for flash_attn has no {asked or 'dropout'}")


def _bias(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    """The mask of a causal call of unequal lengths, which torch aligns at the beginning."""
    rows, cols = q.shape[1], k.shape[1]
    if not causal or rows == cols:
        return None
    seen = torch.ones(rows, cols, dtype=torch.bool).tril(cols - rows)
    return torch.zeros(rows, cols, dtype=q.dtype).masked_fill(~seen, float("-inf"))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _documents(of_rows: Tensor, of_cols: Tensor) -> list[tuple[slice, slice]]:
    rows, cols = of_rows.tolist(), of_cols.tolist()
    return [
        (slice(*rows[i : i + 2]), slice(*cols[i : i + 2]))
        for i in range(len(rows) - 1)
        if rows[i] < rows[i + 1]
    ]
