"""CommIR: an operator on a mesh, after some directives. Immutable; directives make new ones.

A program says, for every tensor and every mesh dimension, what the caller holds (`pins`), what
the schedule works from (`stored`), and how the rest of an input comes to the ranks (`stages`, the
outermost first). `mercurygen.lower` turns a complete one into a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercurygen.ir.layout import Order
from mercurygen.ir.mesh import Mesh

SEQUENCE = "S"  # in a schedule: the sequence axis of whichever tensor is meant


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the iteration space and its extent over all ranks of the group."""

    name: str
    extent: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the operator.

    Attributes:
        name: as in the operator's signature.
        role: input or output.
        dims: axes of every dimension, the most significant first.
        dtype: "inputs" (that of the inputs) or "accumulator" (at least float32).
        pin: per mesh dimension the axis that the caller holds split, or None.
    """

    name: str
    role: Literal["input", "output"]
    dims: tuple[tuple[str, ...], ...]
    dtype: str
    pin: tuple[str | None, ...]

    def carries(self, axis: str) -> bool:
        """Whether some dimension of the tensor runs over the axis."""
        return any(axis in dim for dim in self.dims)

    def dimension(self, axis: str) -> int:
        """Which dimension runs over the axis."""
        return next(i for i, dim in enumerate(self.dims) if axis in dim)


@dataclass(frozen=True, slots=True)
class Stage:
    """One level of the nest by which an input comes to the ranks.

    Attributes:
        tensors: that move together.
        kind: "gather" (all of the dimension at once) or "walk" (tile by tile, relayed).
        axis: along which they are stored split.
        dim: the mesh dimension.
    """

    tensors: tuple[str, ...]
    kind: Literal["gather", "walk"]
    axis: str
    dim: str


@dataclass(frozen=True, slots=True)
class BorderStep:
    """One collective at the border: a tensor goes from one split axis to another along `dim`."""

    tensor: str
    source: str
    target: str
    dim: str


@dataclass(frozen=True, slots=True)
class Program:
    """An operator, a problem and a mesh, with what the directives so far have settled.

    Attributes:
        operator: its name.
        dtype: of the inputs.
        mask: "causal" or "full".
        mask_axes: axis of the rows and of the columns of the mask.
        mesh: the mesh.
        axes: of the operator, with extents.
        tensors: inputs, then outputs.
        together: tensors that always move as one.
        order: token order, once given.
        parallel: per mesh dimension the axis whose iterations are split, or None.
        replicated: (tensor, dim) that every rank is given whole.
        stages: the nest, outermost first.
        border: reshards, in order: those of inputs run before the nest, of outputs after it.
        kernel: what runs the body, once given.
    """

    operator: str
    dtype: str
    mask: str
    mask_axes: tuple[str, str]
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

    def extent(self, axis: str) -> int:
        """Extent of an axis over all ranks of the group."""
        return next(a.extent for a in self.axes if a.name == axis)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        return next(t for t in self.tensors if t.name == name)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the operator reads."""
        return tuple(t for t in self.tensors if t.role == "input")

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that the operator makes."""
        return tuple(t for t in self.tensors if t.role == "output")

    def parallel_axis(self, dim: str) -> str | None:
        """The axis whose iterations are split over a mesh dimension."""
        return self.parallel[self.mesh.names.index(dim)]

    def parallel_dims(self, axis: str) -> tuple[str, ...]:
        """The mesh dimensions that split an axis, in mesh order."""
        return tuple(d for d in self.mesh.names if self.parallel_axis(d) == axis)

    def pinned(self, tensor: Tensor, dim: str) -> str | None:
        """The axis along which the caller holds a tensor split over a dimension."""
        return tensor.pin[self.mesh.names.index(dim)]

    def stored(self, tensor: Tensor, dim: str) -> str | None:
        """The axis along which the schedule works from a tensor split over a dimension."""
        axis = self.parallel_axis(dim)
        if axis is not None and tensor.carries(axis):
            return axis
        for stage in self.stages:
            if tensor.name in stage.tensors and stage.dim == dim:
                return stage.axis
        return None

    def sequence(self, tensor: Tensor) -> str | None:
        """The axis of the mask that a tensor carries: its sequence."""
        return next((axis for axis in self.mask_axes if tensor.carries(axis)), None)

    def named_axis(self, tensor: Tensor, name: str) -> str | None:
        """The axis of a tensor that a schedule calls `name`, S being its sequence."""
        axis = self.sequence(tensor) if name == SEQUENCE else name
        return axis if axis is not None and tensor.carries(axis) else None
