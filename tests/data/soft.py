"""Of values that belong to points, the average for every query, near points weighing most."""

from mercurygen.dsl import (
    Axis,
    Input,
    Output,
    accumulator,
    combine,
    exp,
    logsumexp,
    operator,
    softmax,
    sum,
    tiles,
    together,
)

N, M = Axis("query", tile=8), Axis("point", tile=8)
C, E = Axis("coordinate"), Axis("component of a value")


@operator
def soft(
    x: Input[N, C],
    y: Input[M, C],
    z: Input[M, E],
    mean: Output[N, E],
    weight: Output[N, accumulator],
):
    """Averages by exp(-squared distance), and the log of what these weights add up to."""
    together(y, z)
    together(mean, weight)
    combine(mean, weight, by=softmax)

    for i, j in tiles(N, M):
        squares = sum((x[i][:, None] - y[j]) ** 2, dim=-1)  # [i, j]
        total = logsumexp(-squares, dim=-1)  # [i]
        mean[i] = exp(-squares - total[:, None]) @ z[j]
        weight[i] = total
