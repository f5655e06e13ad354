"""Tensors of virtual ranks, with the positions of their tokens: cut, packed, joined, merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from mercurygen.dsl.functions import softmax_merge, sum_merge
from mercurygen.errors import InternalError
from mercurygen.ir import program as ir
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.operator import Operator
from mercurygen.lower.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """What a buffer holds.

    Attributes:
        tensor: what it is a part of.
        data: in the tensor's dimensions.
        positions: of the tokens along its sequence: [tokens] int64.
    """

    tensor: ir.Tensor
    data: Tensor
    positions: Tensor


Parts: TypeAlias = tuple[Held, ...]  # one for, or from, every rank along a dimension


def tokens(plan: Plan, chunks: tuple[int, ...]) -> Tensor:
    """Global positions of some chunks, in their order: [tokens] int64."""
    import torch

    size = plan.chunk
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


def owned(plan: Plan, tensor: ir.Tensor, rank: int) -> Tensor:
    """Positions of the tokens that the caller holds, or wants, of a tensor on a rank."""
    program, sequence = plan.program, plan.program.sequence(tensor)
    here = program.mesh.coordinate(rank)
    held = {d: (i,) for d, i in here.items() if program.pinned(tensor, d) == sequence}
    return tokens(plan, program.order.owned(program.mesh, held))


def cut(plan: Plan, tensor: ir.Tensor, rank: int, whole: Tensor) -> Held:
    """What the caller holds of a whole tensor on a rank."""
    program = plan.program
    shape = [prod(map(program.extent, dim)) for dim in tensor.dims]
    if list(whole.shape) != shape:
        raise InternalError(f"{tensor.name} is {list(whole.shape)}, the program's is {shape}")
    positions = owned(plan, tensor, rank)
    data = whole.index_select(_sequence(program, tensor), positions.to(whole.device))
    here = program.mesh.coordinate(rank)
    for number, axes in enumerate(tensor.dims):
        for axis in axes:
            dims = [d for d in program.mesh.names if program.pinned(tensor, d) == axis]
            if dims and axis not in program.mask_axes:
                data = _part(program, data, number, axes, axis, dims, here)
    return Held(tensor, data.contiguous(), positions)


def _part(
    program: ir.Program,
    data: Tensor,
    number: int,
    axes: tuple[str, ...],
    axis: str,
    dims: list[str],
    here: dict[str, int],
) -> Tensor:
    """One rank's part of an axis, split over dimensions, of a dimension that may carry several."""
    if axis != axes[0]:
        raise InternalError(f"{axis} is split, but is not the most significant of {axes}")
    part = 0
    for dim in dims:
        part = part * program.mesh.extent(dim) + here[dim]
    ways = prod(map(program.mesh.extent, dims))
    return data.chunk(ways, number)[part]


def blank(plan: Plan, tensor: ir.Tensor, rank: int, value: float, dtype: torch.dtype) -> Held:
    """An output as it is while the body runs, filled with a value."""
    import torch

    program = plan.program
    here = program.mesh.coordinate(rank)
    shape = [
        prod(
            program.extent(axis) // prod(map(program.mesh.extent, program.parallel_dims(axis)))
            for axis in dim
        )
        for dim in tensor.dims
    ]
    return Held(tensor, torch.full(shape, value, dtype=dtype), tokens(plan, plan.rows(here)))


def _sequence(program: ir.Program, tensor: ir.Tensor) -> int:
    """Which dimension has the tokens."""
    axis = program.sequence(tensor)
    if axis is None:
        raise InternalError(f"{tensor.name} has no sequence")
    return tensor.dimension(axis)


def _heads(program: ir.Program, tensor: ir.Tensor) -> int:
    """Which dimension the border splits instead of the tokens."""
    for step in program.border:
        if step.tensor == tensor.name:
            axis = step.target if step.source in program.mask_axes else step.source
            number = tensor.dimension(axis)
            if tensor.dims[number][0] == axis:
                return number
    raise InternalError(f"nothing of {tensor.name} is swapped at the border")


def region(program: ir.Program, held: Held, start: int, stop: int) -> Held:
    """A view of some of the tokens."""
    data = held.data.narrow(_sequence(program, held.tensor), start, stop - start)
    return Held(held.tensor, data, held.positions[start:stop])


def snapshot(holding: Held | Parts) -> Held | Parts:
    """A copy, as it is now."""
    if isinstance(holding, Held):
        return Held(holding.tensor, holding.data.clone(), holding.positions)
    return tuple(Held(part.tensor, part.data.clone(), part.positions) for part in holding)


def poison(holding: Held | Parts | None, tensor: ir.Tensor, dtype: torch.dtype) -> Held:
    """What a buffer holds while something arrives: NaN, in the shape of what it held before."""
    import torch

    if isinstance(holding, Held):
        data = torch.full_like(holding.data, torch.nan)
        return Held(holding.tensor, data, holding.positions)
    nothing = torch.full([1] * len(tensor.dims), torch.nan, dtype=dtype)
    return Held(tensor, nothing, torch.zeros(1, dtype=torch.int64))


def pack(program: ir.Program, held: Held, by: str, join: Interleaving) -> Parts:
    """One part for every rank along a dimension: by heads, or by the tokens that it owns."""
    import torch

    if by == "heads":
        parts = held.data.chunk(join.n, _heads(program, held.tensor))
        return tuple(Held(held.tensor, part.clone(), held.positions) for part in parts)
    dim, order = _sequence(program, held.tensor), join.pieces()
    runs = range(join.halves * join.outer)
    data, positions = held.data.chunk(len(order), dim), held.positions.chunk(len(order))
    found = []
    for rank in range(join.n):
        places = [order.index((rank, run)) for run in runs]
        mine = torch.cat([data[i] for i in places], dim)
        found.append(Held(held.tensor, mine, torch.cat([positions[i] for i in places])))
    return tuple(found)


def unpack(program: ir.Program, parts: Parts, by: str, join: Interleaving) -> Held:
    """The parts from the ranks as one: tokens interleaved, or heads in a row."""
    import torch

    tensor = parts[0].tensor
    if by == "heads":
        data = torch.cat([part.data for part in parts], _heads(program, tensor))
        return Held(tensor, data, parts[0].positions)
    dim, count = _sequence(program, tensor), join.halves * join.outer
    runs = [part.data.chunk(count, dim) for part in parts]
    where = [part.positions.chunk(count) for part in parts]
    data = torch.cat([runs[rank][run] for rank, run in join.pieces()], dim)
    return Held(tensor, data, torch.cat([where[rank][run] for rank, run in join.pieces()]))


def state_merge(operator: Operator, states: Mapping[str, Held], shares: dict[str, Tensor]) -> None:
    """Merge a block's shares into views of the outputs, by the operator's combines."""
    for combine in operator.combines:
        first, names = states[combine.outputs[0]].tensor, combine.outputs
        old = [_aligned(first, states[name].tensor, states[name].data) for name in names]
        new = [
            _aligned(first, states[name].tensor, shares[name].to(states[name].data))
            for name in names
        ]
        match combine.kind:
            case "softmax":
                merged = softmax_merge(*old, *new)
            case "sum":
                merged = sum_merge(*old, *new)
            case _:
                raise InternalError(f"no merge of kind {combine.kind}")
        for state, value in zip(old, merged, strict=True):
            state.copy_(value)


def _aligned(first: ir.Tensor, tensor: ir.Tensor, data: Tensor) -> Tensor:
    """A view with the dimensions that are also the first output's in that one's order."""
    common = [dim for dim in first.dims if dim in tensor.dims]
    rest = [dim for dim in tensor.dims if dim not in common]
    return data.permute([tensor.dims.index(dim) for dim in (*common, *rest)])
