"""Samples of a signal, smoothed over a window that ends at each position."""

from mercurygen.dsl import (
    Axis,
    Input,
    Mask,
    Output,
    combine,
    exp,
    inf,
    operator,
    position,
    sum,
    tiles,
    where,
    window,
)

T, S = Axis("position of a result", tile=64), Axis("position of a sample", tile=64)
C = Axis("channel")


@operator
def smooth(
    x: Input[S, C],
    rate: Input[T],
    out: Output[T, C],
    mask: Mask[T, S] = window(128),
):
    """Sum of the samples in a window, each weighted by exp(-rate * age).

    The window of a result holds the sample at its own position, of age 0, and those just before.
    Each result has a rate of its own.
    """
    combine(out, by=sum)

    for i, j in tiles(T, S):
        age = position(i)[:, None] - position(j)  # [i, j]
        # outside the window an age may be negative, and its weight too large for a float
        weights = exp(where(mask[i, j], -rate[i][:, None] * age, -inf))
        out[i] = weights @ x[j]  # [i, C]
