"""Tensors of virtual ranks, each with the part that it is of: cut, packed, joined, merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from mercurygen.check.content import place_part, positions, run_of
from mercurygen.dsl.interpret import merger
from mercurygen.errors import InternalError
from mercurygen.ir import program as ir
from mercurygen.ir.atoms import Atoms, Region
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.operator import Operator
from mercurygen.lower.events import Cuts
from mercurygen.lower.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """What a buffer holds.

    Attributes:
        tensor: what it is a part of.
        data: one dimension for every axis of the tensor, in their order.
        region: per axis its atoms, in storage order.
    """

    tensor: ir.Tensor
    data: Tensor
    region: Region

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the tensor."""
        return self.tensor.axes

    def atoms(self, axis: str) -> tuple[int, ...]:
        """Its atoms along an axis."""
        return self.region[self.axes.index(axis)]


Parts: TypeAlias = tuple[Held, ...]  # one for, or from, every rank along a dimension


def indices(atoms: Atoms, axis: str, owned: tuple[int, ...]) -> Tensor:
    """Global indices of some atoms of an axis, in storage order: [indices] int64."""
    import torch

    count = atoms.count[axis]
    if axis not in atoms.program.mask_axes:
        size = atoms.program.extent(axis) // count
        return torch.cat([torch.arange(a * size, (a + 1) * size) for a in owned])
    live = atoms.sequences[axis]
    if live.striped:
        found = torch.tensor(owned)[None, :] + count * torch.arange(live.size)[:, None]
        return found.flatten()  # in global order: the tokens of several stripes interleave
    return torch.cat([live.start(a) + torch.arange(live.width(a)) for a in owned])


def split_axes(tensor: ir.Tensor, data: Tensor, extent: Callable[[str], int]) -> Tensor:
    """A tensor as declared, with one dimension for every axis."""
    for number in reversed(range(len(tensor.dims))):
        axes = tensor.dims[number]
        if len(axes) > 1:
            data = data.unflatten(number, [extent(axis) for axis in axes])
    return data


def join_axes(tensor: ir.Tensor, data: Tensor) -> Tensor:
    """The inverse: as declared."""
    for number, axes in enumerate(tensor.dims):
        if len(axes) > 1:
            data = data.flatten(number, number + len(axes) - 1)
    return data


def cut_whole(atoms: Atoms, tensor: ir.Tensor, region: Region, whole: Tensor) -> Held:
    """A part of a whole tensor, given as declared."""
    program = atoms.program
    data = split_axes(tensor, whole, program.extent)
    shape = [program.extent(axis) for axis in tensor.axes]
    if list(data.shape) != shape:
        raise InternalError(f"{tensor.name} is {list(data.shape)}, the program's is {shape}")
    for number, (axis, owned) in enumerate(zip(tensor.axes, region, strict=True)):
        data = data.index_select(number, indices(atoms, axis, owned).to(data.device))
    return Held(tensor, data.contiguous(), region)


def held_by_caller(plan: Plan, tensor: ir.Tensor, rank: int, whole: Tensor) -> Tensor:
    """What the caller holds, or wants, of a whole tensor on a rank; both as declared."""
    region = plan.atoms.pinned(tensor, plan.program.mesh.coordinate(rank))
    return join_axes(tensor, cut_whole(plan.atoms, tensor, region, whole).data)


def blank(atoms: Atoms, tensor: ir.Tensor, region: Region, value: float, dtype) -> Held:
    """A part of an output, filled with a value."""
    import torch

    shape = [*map(atoms.length, tensor.axes, region)]
    return Held(tensor, torch.full(shape, value, dtype=dtype), region)


def view(cuts: Atoms, held: Held, places: tuple[tuple[int, ...], ...]) -> Held:
    """A view of a run along every axis; `cuts` says how many indices an atom has.

    Raises:
        InternalError: the places are no run.
    """
    data = held.data
    for number, (wanted, atoms) in enumerate(zip(places, held.region, strict=True)):
        if len(wanted) == len(atoms):
            continue
        start, axis = wanted[0], held.axes[number]
        if wanted != tuple(range(start, start + len(wanted))):
            raise InternalError(f"{held.tensor.name}: {wanted} is no run")
        kept = cuts.length(axis, atoms[start : start + len(wanted)])
        data = data.narrow(number, cuts.length(axis, atoms[:start]), kept)
    region = tuple(
        tuple(atoms[i] for i in wanted) for wanted, atoms in zip(places, held.region, strict=True)
    )
    return Held(held.tensor, data, region)


def picked(cuts: Atoms, held: Held, axis: str, wanted: tuple[int, ...], interleaved: bool) -> Held:
    """A copy of some places along one axis."""
    import torch

    number = held.axes.index(axis)
    atoms = held.region[number]
    if interleaved:  # token i of place p stands at i * places + p
        within = torch.arange(held.data.shape[number] // len(atoms))
        index = (within[:, None] * len(atoms) + torch.tensor(wanted)[None, :]).flatten()
    else:
        ends = [0, *accumulate(cuts.length(axis, (atom,)) for atom in atoms)]
        index = torch.cat([torch.arange(ends[p], ends[p + 1]) for p in wanted])
    region = (*held.region[:number], tuple(atoms[i] for i in wanted), *held.region[number + 1 :])
    return Held(held.tensor, held.data.index_select(number, index), region)


def snapshot(holding: Held | Parts) -> Held | Parts:
    """A copy, as it is now."""
    if isinstance(holding, Held):
        return replace(holding, data=dense(holding.data, holding.data.dtype))
    return tuple(replace(part, data=dense(part.data, part.data.dtype)) for part in holding)


def dense(data: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, contiguous as what is sent and what arrives."""
    import torch

    return data.to(dtype, copy=True, memory_format=torch.contiguous_format)


def poison(holding: Held | Parts | None, tensor: ir.Tensor, dtype: torch.dtype) -> Held:
    """What a buffer holds while something arrives: NaN, in the shape of what it held before."""
    import torch

    if isinstance(holding, Held) and holding.data.dtype.is_floating_point:
        return replace(holding, data=torch.full_like(holding.data, torch.nan))
    nothing = torch.full([1] * len(tensor.axes), torch.nan, dtype=dtype)
    return Held(tensor, nothing, ((0,),) * len(tensor.axes))


def pack(
    cuts: Atoms, held: Held, axis: str, join: Interleaving, part: tuple[int, int], interleaved: bool
) -> Parts:
    """One part for every rank along a dimension: what it owns of an axis."""
    dealt = positions(len(held.atoms(axis)), join)
    return tuple(picked(cuts, held, axis, run_of(places, part), interleaved) for places in dealt)


def unpack(cuts: Atoms, parts: Parts, axis: str, join: Interleaving, interleaved: bool) -> Held:
    """The parts from the ranks as one, interleaved along an axis."""
    import torch

    number, first = parts[0].axes.index(axis), parts[0]
    row = tuple(a for part in parts for a in part.region[number])
    held = Held(
        first.tensor,
        torch.cat([part.data for part in parts], number),
        (*first.region[:number], row, *first.region[number + 1 :]),
    )
    length = len(first.region[number])
    places = positions(length * join.n, join)
    where = {p: rank * length + i for rank, own in enumerate(places) for i, p in enumerate(own)}
    wanted = tuple(where[i] for i in range(length * join.n))
    if not interleaved:
        return picked(cuts, held, axis, wanted, False)
    return _striped_rows(held, number, join.n, wanted)


def _striped_rows(held: Held, number: int, ranks: int, wanted: tuple[int, ...]) -> Held:
    """Parts in a row whose tokens are to interleave: token i of every part, then i + 1."""
    import torch

    atoms = held.region[number]
    length, size = len(atoms) // ranks, held.data.shape[number] // len(atoms)
    index = [
        rank * length * size + i * length + j
        for i in range(size)
        for rank, j in (divmod(place, length) for place in wanted)
    ]
    region = (*held.region[:number], tuple(atoms[i] for i in wanted), *held.region[number + 1 :])
    return Held(held.tensor, held.data.index_select(number, torch.tensor(index)), region)


def put_part(
    cuts: Atoms,
    whole: Held,
    part: Held,
    axis: str,
    join: Interleaving,
    rank: int,
    run: tuple[int, int],
) -> None:
    """Copy one rank's part of a run into its place in the whole."""
    places = place_part(whole, part, axis, join, rank, run)
    view(cuts, whole, places).data.copy_(part.data)


def cut_places(held: Held, cuts: Cuts) -> tuple[tuple[int, ...], ...]:
    """The places that some cuts leave along every axis."""
    ranges = {axis: range(start, stop) for axis, start, stop in cuts}
    return tuple(
        tuple(ranges.get(axis, range(len(atoms))))
        for axis, atoms in zip(held.axes, held.region, strict=True)
    )


def merge(
    operator: Operator, program: ir.Program, states: Mapping[str, Held], shares: dict[str, Tensor]
) -> None:
    """Merge shares into views of outputs, by the operator's combines.

    Args:
        operator: whose combines they are.
        program: the same outputs, combined likewise.
        states: per output a view, one dimension for every axis.
        shares: per output what is merged in, of the same shape.
    """
    for combine in program.combines:
        names = [name for name in combine.outputs if name in states]
        if not names:
            continue
        first = states[names[0]].tensor
        old = [aligned(first, states[name].tensor, states[name].data) for name in names]
        new = [
            aligned(first, states[name].tensor, shares[name].to(states[name].data.dtype))
            for name in names
        ]
        for state, value in zip(old, merger(operator, combine.outputs)(*old, *new), strict=True):
            state.copy_(value)


def aligned(first: ir.Tensor, tensor: ir.Tensor, data: Tensor) -> Tensor:
    """A view with the axes that are also the first output's in that one's order."""
    common = [axis for axis in first.axes if axis in tensor.axes]
    rest = [axis for axis in tensor.axes if axis not in common]
    return data.permute([tensor.axes.index(axis) for axis in (*common, *rest)])
