"""The gradients of a call on virtual ranks, compared with those of the operator on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mercurygen import operators
from mercurygen.check.tensors import held_by_caller
from mercurygen.dsl.interpret import interpret
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.virtual.calls import compare
from mercurygen.virtual.rank import Rank
from mercurygen.virtual.results import largest_error
from mercurygen.virtual.trial import Trial, domain, viewed

if TYPE_CHECKING:
    from torch import Tensor

Play = Callable[..., None]


def gradients(
    play: Play,
    ranks: Sequence[Rank],
    plan: Plan,
    trial: Trial,
    seed: int,
    calls: Mapping[int, tuple[Tensor, list[Tensor]]],
    known: Mapping[str, Tensor],
    lies: Callable[[Tensor], Tensor],
) -> float:
    """The backward of a call on all ranks; the largest error.

    Args:
        play: runs something on every rank.
        ranks: all of them.
        plan: of the gradients.
        trial: of the call.
        seed: of the gradient of out.
        calls: out and the inputs, of every rank.
        known: whole inputs and outputs of the forward, by name.
        lies: a tensor as declared, as the caller has it.
    """
    import torch

    exact = {name: x.double() for name, x in known.items()}
    dtype = getattr(torch, trial.dtype)
    whole = _gradient_of_out(exact["out"], seed).to(dtype)
    want = interpret(
        operators.load(plan.program.operator),
        {**exact, "do": whole.double()},
        {} if trial.scale is None else {"scale": trial.scale},
        mask=domain(plan),
    )
    results: dict[int, tuple[Tensor, ...]] = {}

    def act(rank: Rank) -> None:
        """One rank."""
        out, inputs = calls[rank.number]
        with rank.silence():
            own = held_by_caller(plan, plan.program.tensor("do"), rank.number, whole)
            own = viewed(lies(own), trial.views)
        results[rank.number] = torch.autograd.grad(out, inputs, own)

    low = torch.finfo(dtype).bits == 16
    play(act, low=low, split_handles=trial.split_handles)
    traces = [trace(plan, rank.number) for rank in ranks]
    for rank in ranks:
        compare(rank.number, rank.calls, traces[rank.number], waits=False)
    told, outputs = f"backward, {trial}; seed {seed}", plan.program.outputs
    error = max(
        largest_error(plan, outputs, n, results[n], want, trial.dtype, told, lies) for n in results
    )
    for rank in ranks:
        compare(rank.number, rank.calls, traces[rank.number], waits=True)
    return error


def _gradient_of_out(out: Tensor, seed: int) -> Tensor:
    """A whole gradient of out, in float64."""
    import torch

    random = torch.Generator().manual_seed(seed + 1)
    return torch.randn(out.shape, generator=random, dtype=torch.float64)
