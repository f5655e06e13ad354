"""The operator language: everything that an operator's file may import.

See `mercurygen/operators/attention.py` for an operator, and docs for the rules. Importing this
does not import torch; running an operator does.
"""

from mercurygen.dsl.functions import FUNCTIONS as _functions
from mercurygen.dsl.language import (
    Axis,
    Derived,
    Input,
    Mask,
    Output,
    Scalar,
    accumulator,
    causal,
    combine,
    full,
    inf,
    integer,
    operator,
    points,
    position,
    softmax,
    tiles,
    together,
    window,
)

abs = _functions["abs"]
amax = _functions["amax"]
amin = _functions["amin"]
argmax = _functions["argmax"]
argmin = _functions["argmin"]
exp = _functions["exp"]
log = _functions["log"]
logaddexp = _functions["logaddexp"]
logsumexp = _functions["logsumexp"]
matmul = _functions["matmul"]
maximum = _functions["maximum"]
minimum = _functions["minimum"]
sqrt = _functions["sqrt"]
sum = _functions["sum"]
take = _functions["take"]
tanh = _functions["tanh"]
where = _functions["where"]

__all__ = [
    "Axis",
    "Derived",
    "Input",
    "Mask",
    "Output",
    "Scalar",
    "abs",
    "accumulator",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "causal",
    "combine",
    "exp",
    "full",
    "inf",
    "integer",
    "log",
    "logaddexp",
    "logsumexp",
    "matmul",
    "maximum",
    "minimum",
    "operator",
    "points",
    "position",
    "softmax",
    "sqrt",
    "sum",
    "take",
    "tanh",
    "tiles",
    "together",
    "where",
    "window",
]
