"""What a module is called with on virtual ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mercurygen.ir.caller import PACKED, exchanged
from mercurygen.ir.operator import Domain
from mercurygen.lower.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of the operator on all ranks.

    Attributes:
        dtype: of the inputs.
        with_lse: all outputs are asked for.
        scale: of the softmax; None: the default.
        split_handles: a batch has a handle for each message, as with gloo; else one, as with NCCL.
        views: inputs are not contiguous.
    """

    dtype: str
    with_lse: bool
    scale: float | None
    split_handles: bool
    views: bool

    def __str__(self) -> str:
        lse = ", with return_lse" if self.with_lse else ""
        views = ", inputs not contiguous" if self.views else ""
        return f"{self.dtype}{lse}{views}"


TRIALS = (
    Trial("float64", False, None, False, False),
    Trial("float64", True, 0.3, True, True),
    Trial("bfloat16", True, None, True, False),
)
OWN_TRIALS = (  # of an operator's own lines
    Trial("float64", True, None, False, False),
    Trial("float64", True, None, True, True),
)


def domain(plan: Plan) -> Domain | None:
    """The mask, as the operator takes it."""
    return plan.program.domain


def turned(layout: str, x: Tensor) -> Tensor:
    """A view of q, k, v or out as a caller of this layout holds it; lse as it is, if not packed."""
    if layout == PACKED:
        return x.squeeze(0)
    pair = exchanged(layout)
    return x.transpose(*pair) if pair and x.ndim == 4 else x


def viewed(x: Tensor, view: bool) -> Tensor:
    """The same values, in memory in another order of the dimensions if asked for."""
    if not view or x.ndim < 2:
        return x.contiguous()
    dims = (1, 2) if x.ndim == 4 else (0, 1)
    return x.transpose(*dims).contiguous().transpose(*dims)
