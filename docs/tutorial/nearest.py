"""For every query point the nearest of many other points."""

from mercurygen.dsl import (
    Axis,
    Input,
    Output,
    accumulator,
    amin,
    combine,
    inf,
    integer,
    operator,
    position,
    sum,
    tiles,
    where,
)

N, M = Axis("query point", tile=64), Axis("point to be found", tile=64)
C = Axis("coordinate")


def closer(distance, index, other_distance, other_index):
    """The nearer of two candidates; of equally near ones that with the smaller index."""
    tie = other_distance == distance
    better = (other_distance < distance) | tie & (other_index < index)
    return where(better, other_distance, distance), where(better, other_index, index)


@operator
def nearest(
    x: Input[N, C],
    y: Input[M, C],
    distance: Output[N, accumulator],
    index: Output[N, integer],
):
    """Squared distance from every point of x to the nearest point of y, and which that is.

    Of equally near points it is the one with the smallest index.
    """
    combine(distance, index, by=closer, identity=(inf, 9223372036854775807))

    for i, j in tiles(N, M):
        squares = sum((x[i][:, None] - y[j]) ** 2, dim=-1)  # [i, j]
        least = amin(squares, dim=-1)  # [i]
        # of the points at that distance, the smallest global index
        first = where(squares == least[:, None], position(j), 9223372036854775807)
        distance[i] = least
        index[i] = amin(first, dim=-1)
