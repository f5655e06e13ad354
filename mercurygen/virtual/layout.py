"""How a module's layout helpers are tried: what each must give, by the pins and the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any

from mercurygen.check.tensors import held_by_caller
from mercurygen.lower.plan import Plan, sliced
from mercurygen.lower.visible import POSITIONS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Use:
    """A call of a helper on one rank.

    Attributes:
        name: of the helper.
        what: it is called with, for people.
        args: before the mesh.
        expected: its result.
        options: by name.
    """

    name: str
    what: str
    args: tuple[Any, ...]
    expected: Tensor
    options: dict[str, Any] = field(default_factory=dict)


def uses(
    plan: Plan, rank: int, whole: Mapping[str, Tensor], lies: Callable[[Tensor], Tensor]
) -> Iterator[Use]:
    """Every helper, on every tensor, and on tokens.

    Args:
        plan: with the sizes of `whole`.
        rank: which one.
        whole: all inputs and outputs of the operator by name.
        lies: a tensor as declared, as the caller has it.
    """
    for tensor in plan.program.tensors:
        name, x = tensor.name, whole[tensor.name]
        part = held_by_caller(plan, tensor, rank, x)
        if plan.program.kernel == POSITIONS:  # an operator's own lines: any shapes, no tokens
            yield Use("shard", name, (name, x), part)
            yield Use("unshard", name, (name, part), x)
            continue
        if not set(plan.program.mask_axes) & set(tensor.dims[-1]):
            part, x = part[..., :1], x[..., :1]  # a head size is never cut: one is enough
        part, x = lies(part), lies(x)
        dims = (1, 2) if part.ndim > 2 else (0, 1)
        part = part.transpose(*dims).contiguous().transpose(*dims)  # a view, as kernels return
        yield Use("shard", name, (name, x), part)
        yield Use("unshard", name, (name, part), x)
    if plan.program.kernel == POSITIONS:
        return
    for named, tensor in _owners_of_tokens(plan).items():
        every, mine = _tokens(plan, rank, tensor)
        option = {"name": named} if named else {}
        of = f" of {named}" if named else ""
        yield Use("positions", f"the sequence{of}", (len(every),), mine, option)
        for name, x, expected in (("shard", every, mine), ("unshard", mine, every)):
            yield Use(f"{name}_sequence", f"tokens{of}", (x,), expected, {"dim": 0, **option})
            batch = f"a batch of tokens{of}"
            yield Use(f"{name}_sequence", batch, (x[None],), expected[None], option)


def _owners_of_tokens(plan: Plan) -> dict[str, Any]:
    """The tensors whose tokens helpers are asked for, by name; slices: one for all, by none."""
    sequences = [t for t in plan.program.tensors if plan.program.sequence(t)]
    if not sliced(plan.program):
        return {tensor.name: tensor for tensor in sequences}
    return {"": next((t for t in sequences if any(t.pin)), sequences[0])}  # others are whole


def _tokens(plan: Plan, rank: int, tensor: Any) -> tuple[Tensor, Tensor]:
    """A sequence and one rank's part: so long that a chunk more or less is another length."""
    import torch

    order, mesh = plan.program.order, plan.program.mesh
    count = order.chunks(mesh) if order else 1
    runs = lcm(*(plan.atoms.parts(axis) for axis in plan.program.mask_axes))  # parts are whole ones
    every = torch.arange(count * (count + 1) * runs)
    region = plan.atoms.pinned(tensor, mesh.coordinate(rank))
    owned = region[tensor.axes.index(plan.program.sequence(tensor))]
    size = plan.atoms.count[plan.program.sequence(tensor)] // count
    chunks = [atom // size for atom in owned[::size]]
    if order and order.kind == "striped":
        return every, every.view(-1, count)[:, chunks].flatten()
    return every, torch.cat([every.chunk(count)[chunk] for chunk in chunks])
