"""CommIR: an operator on a mesh, after some directives. Immutable; directives make new ones.

A program says, for every tensor and every mesh dimension, what the caller holds (`pins`), what
the schedule works from (`stored`), and how the rest of an input comes to the ranks (`stages`, the
outermost first). `mercurygen.lower` turns a complete one into a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, TypeAlias

from mercurygen.ir.kernel import Options
from mercurygen.ir.layout import Order
from mercurygen.ir.masked import Masked
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.shared import Layout, Routes, Shared

SEQUENCE = "S"  # in a schedule: the sequence axis of whichever tensor is meant

CombineKind: TypeAlias = Literal["sum", "softmax", "user"]
COMBINES: tuple[CombineKind, ...] = ("sum", "softmax", "user")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the iteration space and its extent over all ranks of the group."""

    name: str
    extent: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the operator.

    Attributes:
        name: as in the operator's signature.
        role: input, output, or derived: made of inputs where their rows live.
        dims: axes of every dimension, the most significant first.
        dtype: "inputs" (that of the inputs), "accumulator" (at least float32) or "integer".
        pin: per mesh dimension the axis that the caller holds split, or None.
        reads: of a derived tensor, the inputs that it is made of.
    """

    name: str
    role: Literal["input", "output", "derived"]
    dims: tuple[tuple[str, ...], ...]
    dtype: str
    pin: tuple[str | None, ...]
    reads: tuple[str, ...] = ()

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis that the tensor carries, in the order of its dimensions."""
        return tuple(axis for dim in self.dims for axis in dim)

    def carries(self, axis: str) -> bool:
        """Whether some dimension of the tensor runs over the axis."""
        return axis in self.axes

    @cached_property
    def _pinned(self) -> dict[tuple[str | None, ...], Tensor]:
        return {}

    def pinned_as(self, pin: tuple[str | None, ...]) -> Tensor:
        """The tensor with another pin; the same one for the same pin."""
        found = self._pinned.get(pin)
        if found is None:
            found = self._pinned[pin] = replace(self, pin=pin)
        return found

    def dimension(self, axis: str) -> int:
        """Which dimension runs over the axis."""
        return next(i for i, dim in enumerate(self.dims) if axis in dim)


@dataclass(frozen=True, slots=True)
class Combine:
    """Outputs that are merged together, along the axes that they do not carry, and how."""

    outputs: tuple[str, ...]
    kind: CombineKind


@dataclass(frozen=True)
class Stage:
    """How tensors move along one dimension.

    Attributes:
        tensors: that move together: inputs, or outputs.
        kind: "gather" (input: all of the dimension at once), "walk" (tile by tile; an output's
            partial results go home) or "scatter" (output: partial results are reduce-scattered).
        axis: along which they are stored split.
        dim: the mesh dimension.
        options: of a walk, see `schedule.directives.Along`.
        dtype: that partial results cross links in, if not at least float32.
    """

    tensors: tuple[str, ...]
    kind: Literal["gather", "walk", "scatter"]
    axis: str
    dim: str
    options: tuple[str, ...] = ()
    dtype: str | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.kind, self.axis, self.dim, self.options, self.dtype))

    @cached_property
    def route(self) -> tuple[tuple[str, ...], str, str]:
        """What moves along which axis over which dimension, in whatever way."""
        return self.tensors, self.axis, self.dim


@dataclass(frozen=True, slots=True)
class TileLoop:
    """A loop over equal parts of what a rank sees of some axes, the first of them major."""

    axes: tuple[str, ...]
    parts: int


@dataclass(frozen=True, slots=True)
class BorderStep:
    """One step at the border: a tensor goes from one split axis to another along `dim`.

    From None (every rank has all of it) it is cut; to None it is gathered.
    """

    tensor: str
    source: str | None
    target: str | None
    dim: str


@dataclass(frozen=True)
class Program(Masked):
    """An operator, a problem and a mesh, with what the directives so far have settled.

    Attributes:
        operator: its name.
        dtype: of the inputs.
        mask: "causal", "full" or "window"; "full" of an operator that has none.
        mask_axes: axis of the rows and of the columns of the mask; none of an operator that has
            no mask.
        mesh: the mesh.
        axes: of the operator, with extents.
        tensors: inputs, derived, then outputs.
        together: tensors that always move as one.
        order: token order, once given.
        parallel: per mesh dimension the axis whose iterations are split, or None.
        replicated: (tensor, dim): an input that every rank is given whole, an output whose
            partial results are all-reduced.
        stages: how the rest moves, the outermost first.
        border: reshards, in order: those of inputs run before the nest, of outputs after it.
        kernel: what runs the body, once given.
        kernel_options: its tile sizes, where the schedule gives any.
        combines: how contributions to outputs are merged.
        window: width of a window mask: a row sees itself and the window - 1 before it.
        ahead: of a window mask, how many columns after itself a row sees.
        align: None where queries and keys are one sequence, of which each has one position; else
            where rows stand among the columns, as `problem.ALIGNS` says, or "apart": the mask
            compares no positions.
        documents: lengths of packed documents; none: every sequence is one.
        loops: axes that are looped over; of the others a body takes all.
        body: inputs and derived tensors that the body reads.
        joins: axes that are tiled as one.
        tiles: the tile loops, outermost first.
        reduce_dtype: (tensor, dim, dtype): all-reduces in less than float32.
    """

    operator: str
    dtype: str
    mask: str
    mask_axes: tuple[str, ...]
    mesh: Mesh
    axes: tuple[Axis, ...]
    tensors: tuple[Tensor, ...]
    together: tuple[tuple[str, ...], ...]
    order: Order | None = None
    parallel: tuple[str | None, ...] = ()
    replicated: tuple[tuple[str, str], ...] = ()
    stages: tuple[Stage, ...] = ()
    border: tuple[BorderStep, ...] = ()
    kernel: str | None = None
    kernel_options: Options = ()
    combines: tuple[Combine, ...] = ()
    window: int | None = None
    ahead: int = 0
    align: str | None = None
    documents: tuple[int, ...] = ()
    loops: tuple[str, ...] = ()
    body: tuple[str, ...] = ()
    joins: tuple[tuple[str, ...], ...] = ()
    tiles: tuple[TileLoop, ...] = ()
    reduce_dtype: tuple[tuple[str, str, str], ...] = ()

    @cached_property
    def extents(self) -> dict[str, int]:
        """Extent of every axis over all ranks of the group."""
        return {axis.name: axis.extent for axis in self.axes}

    def extent(self, axis: str) -> int:
        """Extent of an axis over all ranks of the group."""
        return self.extents[axis]

    def changed(self, **values: object) -> Program:
        """The program with other values of some fields: `replace`, for the many of a search.

        What was worked out from fields that stay is kept.
        """
        self._facts  # noqa: B018 - there, to be kept where it may
        made = object.__new__(Program)
        state = made.__dict__
        state.update(self.__dict__)
        for name in values:
            for worked_out in _MADE_OF[name]:
                state.pop(worked_out, None)
        state.update(values)
        return made

    @cached_property
    def _facts(self) -> tuple:
        """What the programs that are made of this one share, worked out before them."""
        tensors = self.inputs, self.derived, self.read, self.outputs, self.output_names
        more = self._by_name, self.optional, self.pinned_at_all
        return self.shared, self._routes, self._split_by, self.extents, tensors, more

    @cached_property
    def _by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self._by_name[name]

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the caller gives."""
        return tuple(t for t in self.tensors if t.role == "input")

    @cached_property
    def derived(self) -> tuple[Tensor, ...]:
        """Tensors that are made of inputs, once."""
        return tuple(t for t in self.tensors if t.role == "derived")

    @cached_property
    def read(self) -> tuple[Tensor, ...]:
        """Inputs and derived tensors that the body reads."""
        return tuple(t for t in self.tensors if t.name in self.body)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that the operator makes."""
        return tuple(t for t in self.tensors if t.role == "output")

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """Outputs that are handed out only if asked for: what a softmax merge needs beside."""
        return tuple(c.outputs[1] for c in self.combines if c.kind == "softmax")

    @cached_property
    def shared(self) -> Shared:
        """What was worked out for any program of this operator, problem and mesh, by its key."""
        return Shared()

    @cached_property
    def _routes(self) -> dict[tuple, Routes]:
        return {}

    @cached_property
    def routes(self) -> Routes:
        """Along what tensors move; programs that differ in the ways share it."""
        key = tuple([stage.route for stage in self.stages])
        found = self._routes.get(key)
        if found is None:
            axes: dict[tuple[str, str], str] = {}
            for stage in self.stages:
                for name in stage.tensors:
                    axes.setdefault((name, stage.dim), stage.axis)
            found = self._routes[key] = Routes(axes, self._layout(axes))
        return found

    def _layout(self, axes: dict[tuple[str, str], str]) -> Layout:
        split = tuple(zip(self.mesh.names, self.parallel, strict=True))
        stored = {
            tensor.name: tuple(
                axis if axis in tensor.axes else axes.get((tensor.name, dim)) for dim, axis in split
            )
            for tensor in self.tensors
        }
        tensors = tuple((t.pin, stored[t.name]) for t in self.tensors)
        key = "layout", self.order, self.parallel, tensors, self.tiles
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = Layout(stored)
        return found

    @property
    def layout(self) -> Layout:
        """Who has what of which tensor."""
        return self.routes.layout

    @cached_property
    def output_names(self) -> frozenset[str]:
        """Names of the tensors that the operator makes."""
        return frozenset(t.name for t in self.outputs)

    def parallel_axis(self, dim: str) -> str | None:
        """The axis whose iterations are split over a mesh dimension."""
        return self.parallel[self.mesh.index(dim)]

    @cached_property
    def _split_by(self) -> dict[str | None, tuple[str, ...]]:
        found: dict[str | None, tuple[str, ...]] = {}
        for dim, axis in zip(self.mesh.names, self.parallel, strict=True):
            found[axis] = (*found.get(axis, ()), dim)
        return found

    def parallel_dims(self, axis: str) -> tuple[str, ...]:
        """The mesh dimensions that split an axis, in mesh order."""
        return self._split_by.get(axis, ())

    @cached_property
    def pinned_at_all(self) -> bool:
        """Whether the caller holds any tensor split."""
        return any(any(tensor.pin) for tensor in self.tensors)

    def pinned(self, tensor: Tensor, dim: str) -> str | None:
        """The axis along which the caller holds a tensor split over a dimension."""
        return tensor.pin[self.mesh.index(dim)]

    def storage(self, tensor: Tensor) -> tuple[str | None, ...]:
        """Per mesh dimension the axis along which the schedule works from a tensor split."""
        return self.layout.stored[tensor.name]

    def stored(self, tensor: Tensor, dim: str) -> str | None:
        """The axis along which the schedule works from a tensor split over a dimension."""
        return self.layout.stored[tensor.name][self.mesh.index(dim)]

    def walks(self, tensor: Tensor, dim: str) -> bool:
        """Whether a tensor comes by, or goes home, tile by tile along a dimension."""
        return any(
            stage.kind == "walk" and stage.dim == dim and tensor.name in stage.tensors
            for stage in self.stages
        )

    def sequence(self, tensor: Tensor) -> str | None:
        """The axis of the mask that a tensor carries: its sequence."""
        for axis in self.mask_axes:
            if axis in tensor.axes:
                return axis
        return None

    def named_axis(self, tensor: Tensor, name: str) -> str | None:
        """The axis of a tensor that a schedule calls `name`, S being its sequence."""
        axis = self.sequence(tensor) if name == SEQUENCE else name
        return axis if axis is not None and tensor.carries(axis) else None


# What is worked out from which fields: it is kept while they stay.
_FIELDS = tuple(field.name for field in fields(Program))
_OF_TENSORS = ("_by_name", "inputs", "derived", "read", "outputs", "output_names", "pinned_at_all")
_LAID = ("_facts", "routes", "_routes", "atoms")
_MADE_OF = {
    **dict.fromkeys(_FIELDS, (*_LAID, "shared")),
    "axes": (*_LAID, "shared", "extents"),
    "mesh": (*_LAID, "shared", "_split_by"),
    "body": (*_LAID, "shared", "read"),
    "combines": (*_LAID, "shared", "optional"),
    "tensors": (*_LAID, *_OF_TENSORS),
    "parallel": (*_LAID, "_split_by"),
    "stages": ("routes", "atoms"),
    "order": _LAID,
    "tiles": _LAID,
    "replicated": (),
    "reduce_dtype": (),
    "joins": (),
    "kernel": (),
    "kernel_options": (),
    "border": (),
}
