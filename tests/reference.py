"""What the emitted attention must compute, and which tokens a rank owns, the slow plain way.

Nothing here comes from mercurygen: the two must agree without having copied from each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mask = Callable[[Tensor, Tensor], Tensor]  # (positions of q [Q, 1], of k [1, K]) -> bool [Q, K]


def full(q: Tensor, k: Tensor) -> Tensor:
    """Every query sees every key."""
    return (q >= 0) & (k >= 0)


def causal(q: Tensor, k: Tensor) -> Tensor:
    """A query sees the keys up to its own position."""
    return k <= q


def window(before: int, after: int) -> Mask:
    """A query sees so many keys before and after its own position, and that."""
    return lambda q, k: (k >= q - before) & (k <= q + after)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = full,
    *,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention on one device in float64; differentiable in q, k and v.

    Args:
        q: [B, Q, H, D].
        k: [B, K, G, D], where G divides H; query head h reads key/value head h // (H / G).
        v: [B, K, G, Dv].
        mask: which keys a query sees, by global position.
        scale: softmax scale; 1 / sqrt(D) if None.
        q_positions: global positions of q's tokens, int64 [Q]; 0, 1, ... if None.
        k_positions: likewise of k's and v's.

    Returns:
        out [B, Q, H, Dv] and lse [B, H, Q]; 0 and -inf where a query sees no key.
    """
    q_positions = torch.arange(q.shape[1]) if q_positions is None else q_positions
    k_positions = torch.arange(k.shape[1]) if k_positions is None else k_positions
    visible = mask(q_positions[:, None], k_positions[None, :])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    share = q.shape[2] // k.shape[2]
    q, k, v = q.double(), *(x.double().repeat_interleave(share, 2) for x in (k, v))

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0)
    weights = (scores - top).exp()  # exp(-inf) is 0
    total = weights.sum(-1)
    probabilities = weights / total.masked_fill(total == 0, 1)[..., None]
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), top[..., 0] + total.log()


def tokens_of(order: str, rank: int, world: int, seq: int) -> Tensor:
    """Global positions of a rank's tokens, in the order in which it stores them: int64."""
    every = list(range(seq))
    if order == "contiguous":
        size, rest = divmod(seq, world)
        mine = every[rank * size : (rank + 1) * size]
    elif order == "zigzag":
        size, rest = divmod(seq, 2 * world)
        late = 2 * world - 1 - rank
        mine = every[rank * size : (rank + 1) * size] + every[late * size : (late + 1) * size]
    elif order == "striped":
        rest = seq % world
        mine = every[rank::world]
    else:
        raise ValueError(f"no order {order!r}")
    if rest:
        raise ValueError(f"{seq} tokens do not go evenly into {order} order on {world} ranks")
    return torch.tensor(mine)
