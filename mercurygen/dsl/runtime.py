"""One run of an operator on one device: tiles of inputs in, contributions to outputs out.

An operator that runs as written and one that is interpreted both act on a `Run`; they differ
only in who evaluates the lines in between. torch is imported by the first run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mercurygen.errors import UserError, closest
from mercurygen.ir.operator import AxisDecl, Domain, TensorDecl, domain

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_TILE = 128  # of a run, for an axis without a granularity
Merger: TypeAlias = Callable[..., "tuple[Any, ...]"]


@dataclass(frozen=True, slots=True)
class Tile:
    """The positions start..stop-1 of an axis."""

    axis: str
    start: int
    stop: int


Index: TypeAlias = "int | Tile | slice"  # a point, a tile, or `:`


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How contributions to some outputs are merged."""

    outputs: tuple[str, ...]
    identity: tuple[int | float, ...]
    merge: Merger


class Run:
    """The tensors, extents and accumulators of one run.

    Args:
        axes: declarations; their `tile` is the default size of a tile.
        tensors: declarations of inputs, derived tensors and outputs.
        given: the input tensors by name, and those derived ones that are known already.
        mask: a domain or its name, or None for an operator without a mask.
        mask_axes: rows and columns of the mask.
        tiles: sizes of tiles by axis, where not the default.
        positions: global positions of an axis' indices ([extent], integer), where not 0, 1, ...
        fold: as in `bind_extents`.
    """

    def __init__(
        self,
        axes: Sequence[AxisDecl],
        tensors: Sequence[TensorDecl],
        given: Mapping[str, Tensor],
        mask: Domain | str | None = None,
        mask_axes: tuple[str, str] | None = None,
        tiles: Mapping[str, int] | None = None,
        positions: Mapping[str, Tensor] | None = None,
        fold: bool = False,
    ) -> None:
        import torch

        self.declared = {t.name: t for t in tensors}
        inputs = [t for t in tensors if t.role == "input"]
        derived = [t for t in tensors if t.role == "derived"]
        _check_names({t.name for t in inputs}, {t.name for t in derived}, given)
        self.dtype = _input_dtype(inputs, given)
        self.accumulator = torch.promote_types(self.dtype, torch.float32)
        self.device = next(iter(given.values())).device if given else torch.device("cpu")
        shapes = {n: tuple(x.shape) for n, x in given.items()}
        self.extents = bind_extents(inputs, shapes, fold)
        self.tile_sizes = self._tile_sizes(axes, tiles or {})
        self.mask, self.mask_axes = _check_mask(mask, mask_axes), mask_axes
        self.positions = {n: self._checked(n, p) for n, p in (positions or {}).items()}
        self.groups: dict[str, Accumulation] = {}
        self.accumulators = {t.name: self._zeros(t, 0) for t in tensors if t.role == "output"}
        self.given = {t.name: self._derived(t, given) for t in derived} | dict(given)
        self.pending: dict[str, tuple[tuple[Index, ...], Tensor]] = {}

    def combine(self, how: Accumulation) -> None:
        """Merge contributions to these outputs so; the accumulators become the identities."""
        for name, identity in zip(how.outputs, how.identity, strict=True):
            self.groups[name] = how
            self.accumulators[name] = self._zeros(self.declared[name], identity)

    def scalar(self, value: float) -> Tensor:
        """A number as a tensor [] of the accumulators' dtype."""
        import torch

        return torch.tensor(value, dtype=self.accumulator, device=self.device)

    def points(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Every combination of single indices, the last axis fastest."""
        return itertools.product(*(range(self.extents[axis]) for axis in axes))

    def tiles(self, axes: Sequence[str]) -> Iterator[tuple[Tile, ...]]:
        """Every combination of tiles, the last axis fastest."""
        return itertools.product(*(self._tiles_of(axis) for axis in axes))

    def load(self, name: str, index: tuple[Index, ...]) -> Tensor:
        """A tile of an input or derived tensor, in the accumulators' dtype unless integer.

        Dimensions with a point are dropped, those not named are whole.
        """
        tile = self.given[name][_slices(index)]
        return tile if self.declared[name].dtype == "integer" else tile.to(self.accumulator)

    def position(self, axis: str, index: Index) -> Tensor:
        """Global positions of a tile ([tile]) or a point ([]), int64."""
        import torch

        if axis in self.positions:
            return self.positions[axis][_slices((index,))[0]]
        if isinstance(index, Tile):
            return torch.arange(index.start, index.stop, device=self.device)
        return torch.tensor(index, device=self.device)

    def live(self, rows: Index, columns: Index) -> Tensor:
        """Which pairs of positions are live: [rows, columns] bool."""
        import torch

        assert self.mask_axes is not None
        row = self.position(self.mask_axes[0], rows)[..., None]
        column = self.position(self.mask_axes[1], columns)
        lag = row - column + (self.mask.offset if self.mask is not None else 0)
        live = torch.ones_like(lag, dtype=torch.bool)
        match self.mask:
            case Domain("causal"):
                live = lag >= 0
            case Domain("window", width=width, ahead=ahead):
                live = (lag >= -ahead) & (lag < width)
        if self.mask is not None and self.mask.borders:
            borders = torch.tensor(self.mask.borders, device=self.device)
            rows, columns = (torch.bucketize(x, borders, right=True) for x in (row, column))
            live = live & (rows == columns)
        return live

    def contribute(self, name: str, index: tuple[Index, ...], value: Any) -> None:
        """Merge a contribution, as soon as all that are merged together are there.

        One to a derived tensor is kept as it is.
        """
        if self.declared[name].role == "derived":
            self.given[name][_slices(index)] = self._contribution(name, index, value)
            return
        self.pending[name] = (index, self._contribution(name, index, value))
        how = self.groups.get(name)
        group = how.outputs if how else (name,)
        if not all(output in self.pending for output in group):
            return
        parts = [self.pending.pop(output) for output in group]
        values = tuple(value for _, value in parts)
        if how:
            # copies: autograd may keep what the merge reads, and the accumulators are overwritten
            slices = [_slices(index) for index, _ in parts]
            states = [
                self.accumulators[output][s].clone()
                for output, s in zip(group, slices, strict=True)
            ]
            values = how.merge(*states, *values)
        for output, (index, _), value in zip(group, parts, values, strict=True):
            self.accumulators[output][_slices(index)] = value

    def results(self) -> dict[str, Tensor]:
        """The outputs, in their own dtypes."""
        if self.pending:
            names = ", ".join(f"`{name}`" for name in self.pending)
            raise UserError("dsl-output", f"{names} got a contribution without its partners")
        return {
            name: x.to(self.dtype) if self.declared[name].dtype == "inputs" else x
            for name, x in self.accumulators.items()
        }

    def _tile_sizes(self, axes: Sequence[AxisDecl], tiles: Mapping[str, int]) -> dict[str, int]:
        known = [axis.name for axis in axes]
        for name, size in tiles.items():
            if name not in known:
                raise UserError("dsl-axis", f"no axis `{name}`", help=closest(name, known))
            if not isinstance(size, int) or size < 1:
                raise UserError("dsl-axis", f"a tile of `{name}` cannot be {size!r} long")
        default = {a.name: a.tile if a.tile > 1 else DEFAULT_TILE for a in axes}
        return default | dict(tiles)

    def _checked(self, axis: str, positions: Tensor) -> Tensor:
        import torch

        if axis not in self.extents:
            raise UserError("dsl-axis", f"no axis `{axis}`", help=closest(axis, self.extents))
        if tuple(positions.shape) != (self.extents[axis],):
            message = f"positions of `{axis}` have shape {list(positions.shape)}"
            raise UserError("dsl-shape", f"{message}, its extent is {self.extents[axis]}")
        return positions.to(self.device, torch.int64)

    def _tiles_of(self, axis: str) -> list[Tile]:
        extent, size = self.extents[axis], self.tile_sizes[axis]
        return [Tile(axis, s, min(s + size, extent)) for s in range(0, extent, size)]

    def _shape(self, decl: TensorDecl) -> list[int]:
        return [_product(self.extents[axis] for axis in dim) for dim in decl.dims]

    def _zeros(self, decl: TensorDecl, value: int | float) -> Tensor:
        import torch

        dtype = torch.int64 if decl.dtype == "integer" else self.accumulator
        return torch.full(self._shape(decl), value, dtype=dtype, device=self.device)

    def _derived(self, decl: TensorDecl, given: Mapping[str, Tensor]) -> Tensor:
        """The caller's, or an empty one to be written, in its own dtype."""
        if decl.name not in given:
            zeros = self._zeros(decl, 0)
            return zeros.to(self.dtype) if decl.dtype == "inputs" else zeros
        shape = list(given[decl.name].shape)
        if shape != self._shape(decl):
            message = f"`{decl.name}` has shape {shape}, and from the inputs it is "
            raise UserError("dsl-shape", message + str(self._shape(decl)))
        return given[decl.name]

    def _contribution(self, name: str, index: tuple[Index, ...], value: Any) -> Tensor:
        import torch

        held = self.given if self.declared[name].role == "derived" else self.accumulators
        region, value = held[name][_slices(index)], torch.as_tensor(value)
        if value.shape != region.shape:
            raise UserError(
                "dsl-shape",
                f"a contribution to `{name}` has shape {list(value.shape)}, "
                f"and its tile {list(region.shape)}",
            )
        if value.is_floating_point() and not region.is_floating_point():
            raise UserError("dsl-dtype", f"`{name}` holds integers, got {value.dtype}")
        return value.to(region.dtype)


def bind_extents(
    inputs: Sequence[TensorDecl], shapes: Mapping[str, tuple[int, ...]], fold: bool = False
) -> dict[str, int]:
    """The extent of every axis, from the shapes of the inputs.

    A dimension that carries several axes gives the last one that no other dimension gives.

    Args:
        inputs: declarations.
        shapes: by name.
        fold: of axes that are known only as a product, the last gets all of it.
    """
    for decl in inputs:
        if len(shapes[decl.name]) != len(decl.dims):
            raise UserError(
                "dsl-shape",
                f"`{decl.name}` has {len(shapes[decl.name])} dimensions, "
                f"declared {len(decl.dims)}: {show_dims(decl.dims)}",
            )
    dims = [
        (t.name, n, dim, size)
        for t in inputs
        for n, (dim, size) in enumerate(zip(t.dims, shapes[t.name], strict=True), 1)
    ]
    extents: dict[str, int] = {}
    progress = True
    while progress:
        progress = False
        for _, _, dim, size in dims:
            unknown = [axis for axis in dim if axis not in extents]
            if len(unknown) == 1:
                known = _product(extents[axis] for axis in dim if axis in extents)
                extents[unknown[0]] = size // known if known else 0
                progress = True
        several = (a for _, _, dim, _ in dims if not set(dim) <= set(extents) for a in dim)
        first = next((axis for axis in several if axis not in extents), None)
        if fold and first and not progress:
            extents[first], progress = 1, True
    for name, n, dim, size in dims:
        wanted = _product(extents[axis] for axis in dim)
        if wanted != size:
            text = " * ".join(dim)
            raise UserError(
                "dsl-shape",
                f"dimension {n} of `{name}` is {size}, and {text} cannot be that",
                note=", ".join(f"{axis} is {extents[axis]}" for axis in dim),
            )
    return extents


def solvable(inputs: Sequence[TensorDecl]) -> set[str]:
    """The axes whose extents `bind_extents` will find."""
    found: set[str] = set()
    while True:
        unknown = ([a for a in dim if a not in found] for t in inputs for dim in t.dims)
        new = {rest[0] for rest in unknown if len(rest) == 1}
        if not new:
            return found
        found |= new


def show_dims(dims: Sequence[Sequence[str]]) -> str:
    """[B, S_q, H * G, D]"""
    return "[" + ", ".join(" * ".join(dim) for dim in dims) + "]"


def _product(numbers: Iterator[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _slices(index: tuple[Index, ...]) -> tuple[int | slice, ...]:
    return tuple(slice(i.start, i.stop) if isinstance(i, Tile) else i for i in index)


def _check_names(expected: set[str], allowed: set[str], given: Mapping[str, Any]) -> None:
    for name in sorted(expected - set(given)):
        raise UserError("dsl-argument", f"no tensor for input `{name}`")
    for name in sorted(set(given) - expected - allowed):
        raise UserError("dsl-argument", f"no input `{name}`", help=closest(name, expected))


def _check_mask(mask: Domain | str | None, axes: tuple[str, str] | None) -> Domain | None:
    if axes is None and mask is not None:
        raise UserError("dsl-mask", "the operator has no mask")
    return None if axes is None else domain(mask)


def _input_dtype(inputs: Sequence[TensorDecl], given: Mapping[str, Tensor]) -> Any:
    import torch

    kinds = {t.dtype for t in inputs}
    kind = "inputs" if "inputs" in kinds else "accumulator"  # which promotion leaves as it is
    dtypes = {t.name: given[t.name].dtype for t in inputs if t.dtype == kind}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {str(dtype)}" for name, dtype in dtypes.items())
        raise UserError("dsl-dtype", f"the inputs must have one dtype: {listed}")
    return next(iter(dtypes.values()), torch.float32)
