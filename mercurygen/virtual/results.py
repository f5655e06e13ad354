"""What a rank returned, beside its part of what the operator computes on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mercurygen.check.tensors import held_by_caller
from mercurygen.ir import program as ir
from mercurygen.lower.plan import Plan
from mercurygen.virtual.report import VirtualError

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"float64": 1e-12, "bfloat16": 3e-2}  # relative to the largest value


def largest_error(
    plan: Plan,
    outputs: Sequence[ir.Tensor],
    rank: int,
    got: Sequence[Tensor],
    want: Mapping[str, Tensor],
    dtype: str,
    trial: str,
    lies: Callable[[Tensor], Tensor],
) -> float:
    """Compare a rank's results with its part of the operator's.

    Args:
        plan: that they are of.
        outputs: of it, those that are returned.
        rank: whose.
        got: what it returned.
        want: whole outputs by name, in float64.
        dtype: of the inputs.
        trial: for people.
        lies: a tensor as declared, as the caller has it.

    Raises:
        VirtualError: "result", at the first tensor that is not right.
    """
    import torch

    def wrong(what: str) -> VirtualError:
        """A result that is not right."""
        return VirtualError("result", rank, f"{what} ({trial})")

    if len(got) != len(outputs):
        raise wrong(f"{len(got)} results, must be {len(outputs)}")
    of_inputs, worst = getattr(torch, dtype), 0.0
    for tensor, x in zip(outputs, got, strict=True):
        if not isinstance(x, torch.Tensor):
            raise wrong(f"{tensor.name} is a {type(x).__name__}, must be a tensor")
        own = lies(held_by_caller(plan, tensor, rank, want[tensor.name]))
        kinds = {"inputs": of_inputs, "integer": torch.int64}
        kind = kinds.get(tensor.dtype, torch.promote_types(of_inputs, torch.float32))
        facts = f"{tensor.name} is {x.dtype} {list(x.shape)}"
        if x.dtype != kind or x.shape != own.shape:
            raise wrong(f"{facts}, must be {kind} {list(own.shape)}")
        if x.isnan().any():
            raise wrong(f"{tensor.name} has {int(x.isnan().sum())} NaN of {x.numel()}")
        same = x.double() == own  # also -inf and -inf
        scale = max(1.0, own[own.isfinite()].abs().max().item())
        error = (x.double() - own).abs().masked_fill(same, 0).max().item() / scale
        if not error <= TOLERANCE[dtype]:
            raise wrong(f"{tensor.name} is off by {error:.3g}, {TOLERANCE[dtype]:.1g} is allowed")
        worst = max(worst, error)
    return worst
