"""The gradient of attention from its out, on tiles of queries and keys."""

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
    operator,
    points,
    sum,
    tiles,
    together,
    where,
)

B, H = Axis("batch"), Axis("key/value head")
G = Axis("query head among those of its key/value head")
S_q, S_kv = Axis("position of a query", tile=128), Axis("position of a key", tile=128)
D, D_v = Axis("component of a query or key"), Axis("component of a value")


@operator
def attention_backward_out(
    q: Input[B, S_q, H * G, D],
    k: Input[B, S_kv, H, D],
    v: Input[B, S_kv, H, D_v],
    out: Input[B, S_q, H * G, D_v],
    lse: Input[B, H * G, S_q, accumulator],
    do: Input[B, S_q, H * G, D_v],
    dq: Output[B, S_q, H * G, D],
    dk: Output[B, S_kv, H, D],
    dv: Output[B, S_kv, H, D_v],
    scale: Scalar = D**-0.5,
    mask: Mask[S_q, S_kv] = causal,
):
    """Gradients of attention's q, k and v, for kernels that make `delta` of out themselves.

    As `attention_backward`, in which `delta` is made once and then takes the place of out.
    """
    together(k, v)
    together(dk, dv)
    combine(dq, by=sum)
    combine(dk, dv, by=sum)

    for b, h, g in points(B, H, G):
        for i, j in tiles(S_q, S_kv):
            scores = scale * (q[b, i, h * G + g] @ k[b, j, h].T)  # [i, j]
            # those of the whole row, since lse is over every key that it sees
            weights = exp(where(mask[i, j], scores - lse[b, h * G + g, i][:, None], -inf))
            dv[b, j, h] = weights.T @ do[b, i, h * G + g]  # [j, D_v]
            delta = sum(do[b, i, h * G + g] * out[b, i, h * G + g], dim=-1)  # [i]
            dweights = do[b, i, h * G + g] @ v[b, j, h].T  # [i, j]
            dscores = weights * (dweights - delta[:, None])
            dq[b, i, h * G + g] = scale * dscores @ k[b, j, h]  # [i, D]
            dk[b, j, h] = scale * dscores.T @ q[b, i, h * G + g]  # [j, D]
