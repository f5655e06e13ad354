"""Attention, grouped heads included, on tiles of queries and keys."""

from mercurygen.dsl import (
    Axis,
    Input,
    Mask,
    Output,
    Scalar,
    accumulator,
    causal,
    combine,
    exp,
    inf,
    logsumexp,
    operator,
    points,
    softmax,
    tiles,
    together,
    where,
)

B, H = Axis("batch"), Axis("key/value head")
G = Axis("query head among those of its key/value head")
S_q, S_kv = Axis("position of a query", tile=128), Axis("position of a key", tile=128)
D, D_v = Axis("component of a query or key"), Axis("component of a value")


@operator
def attention(
    q: Input[B, S_q, H * G, D],
    k: Input[B, S_kv, H, D],
    v: Input[B, S_kv, H, D_v],
    out: Output[B, S_q, H * G, D_v],
    lse: Output[B, H * G, S_q, accumulator],
    scale: Scalar = D**-0.5,
    mask: Mask[S_q, S_kv] = causal,
):
    """Softmax-weighted average of the values whose keys a query can see.

    `lse` is the log of the sum of exp(score) over those keys. A query that sees none gets 0 and
    -inf.
    """
    together(k, v)
    together(out, lse)
    combine(out, lse, by=softmax)

    for b, h, g in points(B, H, G):
        for i, j in tiles(S_q, S_kv):
            scores = scale * (q[b, i, h * G + g] @ k[b, j, h].T)  # [i, j]
            total = logsumexp(where(mask[i, j], scores, -inf), dim=-1)  # [i]
            # each row sums to 1, or to 0 where no key of this tile is visible
            weights = exp(where(mask[i, j], scores - total[:, None], -inf))  # [i, j]
            out[b, i, h * G + g] = weights @ v[b, j, h]  # [i, D_v]
            lse[b, h * G + g, i] = total
