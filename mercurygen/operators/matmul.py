"""The product of two matrices, on tiles of rows, columns and what is summed over."""

from mercurygen.dsl import Axis, Input, Output, combine, operator, sum, tiles

M, N = Axis("row of a and c", tile=128), Axis("column of b and c", tile=128)
K = Axis("column of a, row of b: summed over", tile=128)


@operator
def matmul(a: Input[M, K], b: Input[K, N], c: Output[M, N]):
    """Matrix product, c = a b."""
    combine(c, by=sum)

    for m, n, k in tiles(M, N, K):
        c[m, n] = a[m, k] @ b[k, n]
