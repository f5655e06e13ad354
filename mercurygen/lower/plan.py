"""The plan: what one rank does, the same for all ranks.

A small tree of statements. Verifier, interpreter, cost model and emitter all read it: the
emitter prints it, `mercurygen.lower.trace` plays it for one rank, event by event, and the rest
read that trace. Levels of the mesh stay recognisable: a nest is a list of stages, each a walk
around one dimension or a gather over one, and the border wraps the nest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from mercurygen.errors import Refusal
from mercurygen.ir.layout import Interleaving, interleaving
from mercurygen.ir.problem import DTYPES
from mercurygen.ir.program import BorderStep, Program, Stage
from mercurygen.lower.visible import MOST_BLOCKS, visible


@dataclass(frozen=True, slots=True)
class Swap:
    """Border: an all-to-all along a dimension; one axis is split, another gathered.

    Attributes:
        tensors: in the order in which they go, one collective each.
        dim: the mesh dimension.
        to_heads: from a split sequence to split heads, or back.
        join: how the ranks' tokens interleave in global order.
        optional: only if the caller asks for the log-sum-exp.
    """

    tensors: tuple[str, ...]
    dim: str
    to_heads: bool
    join: Interleaving
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """A stage: all parts along a dimension at once, joined in global order."""

    dim: str
    join: Interleaving


@dataclass(frozen=True, slots=True)
class Walk:
    """A stage: a ring along a dimension; at step t rank r has the tile of rank r - t."""

    dim: str


@dataclass(frozen=True, slots=True)
class Nest:
    """The tiles of some inputs come by; the body runs on each.

    Attributes:
        tensors: that come by.
        stages: outermost first.
        begin: "only" (one tile, one block: its result is the output), "first" (the first tile is
            one block, whose result the others are merged into) or "empty" (all are merged into
            zeros and -inf).
    """

    tensors: tuple[str, ...]
    stages: tuple[Gather | Walk, ...]
    begin: Literal["only", "first", "empty"]

    @property
    def leading(self) -> tuple[Gather, ...]:
        """Gathers outside every walk: nothing runs beside them."""
        index = next((i for i, s in enumerate(self.stages) if isinstance(s, Walk)), None)
        return self.stages[:index]

    @property
    def walking(self) -> tuple[Gather | Walk, ...]:
        """The outermost walk and what is inside it."""
        return self.stages[len(self.leading) :]

    @property
    def walks(self) -> tuple[str, ...]:
        """Dimensions that are walked, outermost first."""
        return tuple(stage.dim for stage in self.stages if isinstance(stage, Walk))


def walk_levels(
    stages: tuple[Gather | Walk, ...],
) -> list[tuple[str, tuple[Gather, ...]]]:
    """The walks of a nest, outermost first, each with the gathers of its tiles."""
    levels: list[tuple[str, tuple[Gather, ...]]] = []
    for stage in stages:
        match stage:
            case Walk(dim):
                levels.append((dim, ()))
            case Gather():
                dim, gathers = levels[-1]
                levels[-1] = (dim, (*gathers, stage))
    return levels


@dataclass(frozen=True)
class Plan:
    """What one rank does: border, nest, border.

    Attributes:
        program: what it was lowered from.
        before: swaps of the inputs.
        nest: the tiles and the body.
        after: swaps of the outputs.
    """

    program: Program
    before: tuple[Swap, ...]
    nest: Nest
    after: tuple[Swap, ...]

    @cached_property
    def chunk(self) -> int:
        """Tokens of one chunk of the sequence."""
        rows = self.program.mask_axes[0]
        return self.program.extent(rows) // self.program.order.chunks(self.program.mesh)

    @cached_property
    def head_dims(self) -> tuple[str, ...]:
        """Dimensions that split heads while the body runs."""
        rows = self.program.mask_axes[0]
        return tuple(d for d in self.program.mesh.names if self.program.parallel_axis(d) != rows)

    @cached_property
    def row_dims(self) -> tuple[str, ...]:
        """Dimensions that split the queries while the body runs."""
        return self.program.parallel_dims(self.program.mask_axes[0])

    def rows(self, coordinate: dict[str, int]) -> tuple[int, ...]:
        """Chunks of the queries of a rank while the body runs."""
        held = {dim: (coordinate[dim],) for dim in self.row_dims}
        return self.program.order.owned(self.program.mesh, held)

    def columns(self, owner: dict[str, int]) -> tuple[int, ...]:
        """Chunks of the tile of an owner, which has a coordinate along every walk."""
        held = {dim: (owner[dim],) for dim in self.nest.walks}
        return self.program.order.owned(self.program.mesh, held)

    def nbytes(self, name: str, split: tuple[str, ...]) -> int:
        """Bytes of one rank's part of a tensor that is split over these dimensions."""
        tensor, program = self.program.tensor(name), self.program
        elements = prod(program.extent(axis) for dim in tensor.dims for axis in dim)
        share = prod(program.mesh.extent(dim) for dim in split)
        return elements // share * self.itemsize(tensor.dtype)

    def held_bytes(self, name: str) -> int:
        """Bytes of what a rank's caller holds of a tensor; a swap at the border keeps them."""
        program, tensor = self.program, self.program.tensor(name)
        return self.nbytes(name, tuple(d for d in program.mesh.names if program.pinned(tensor, d)))

    def itemsize(self, dtype: str) -> int:
        """Bytes of an element: of the inputs' dtype, or of what is accumulated in."""
        size = DTYPES[self.program.dtype]
        return max(4, size) if dtype == "accumulator" else size


def lower(program: Program) -> Plan | Refusal:
    """The plan of a complete program, or why the kernel cannot do it."""
    nest = _nest(program)
    after = []
    for tensor in program.outputs:  # what is only accumulated is handed out if asked for
        after += _swaps(program, (tensor.name,), tensor.dtype == "accumulator")
    before = _swaps(program, tuple(t.name for t in program.inputs), False)
    plan = Plan(program, before, nest, tuple(after))
    return _fragmented(plan) or plan


def _swaps(program: Program, tensors: tuple[str, ...], optional: bool) -> tuple[Swap, ...]:
    """The border steps of some tensors; those alike along one dimension together."""
    swaps: dict[tuple[str, Interleaving], Swap] = {}
    for step in program.border:
        if step.tensor not in tensors:
            continue
        join = interleaving(program.order, program.mesh, step.dim, _whole(program, step))
        key = step.dim, join
        before = swaps[key].tensors if key in swaps else ()
        to_heads = step.source in program.mask_axes
        swaps[key] = Swap((*before, step.tensor), step.dim, to_heads, join, optional)
    return tuple(swaps.values())


def _whole(program: Program, step: BorderStep) -> tuple[str, ...]:
    """Dimensions over which a tensor's sequence is not split, beside a border step."""
    steps = [s for s in program.border if s.tensor == step.tensor]
    index = steps.index(step)
    to_heads = step.source in program.mask_axes
    # towards heads, earlier steps have joined their dimension; back, later ones hold theirs joined
    joined = {s.dim for s in (steps[:index] if to_heads else steps[index + 1 :])}
    tensor = program.tensor(step.tensor)
    split = {d for d in program.mesh.names if program.pinned(tensor, d) in program.mask_axes}
    return tuple(d for d in program.order.dims if d in joined or d not in split)


def _nest(program: Program) -> Nest:
    stages: list[Gather | Walk] = []
    rows = program.mask_axes[0]
    held = [d for d in program.mesh.names if program.parallel_axis(d) != rows]
    held += [dim for _, dim in program.replicated]
    for stage in program.stages:
        if stage.kind == "walk":
            stages.append(Walk(stage.dim))
            continue
        stages.append(Gather(stage.dim, interleaving(program.order, program.mesh, stage.dim, held)))
        held.append(stage.dim)
    tensors = _brought(program.stages) or _not_rows(program)
    walks = any(isinstance(stage, Walk) for stage in stages)
    own = not program.replicated and not any(isinstance(stage, Gather) for stage in stages)
    whole = program.mask == "full" or own
    begin = ("first" if walks else "only") if whole else "empty"
    return Nest(tensors, tuple(stages), begin)


def _brought(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    return stages[0].tensors if stages else ()


def _not_rows(program: Program) -> tuple[str, ...]:
    rows = program.mask_axes[0]
    return tuple(t.name for t in program.inputs if not t.carries(rows))


def _fragmented(plan: Plan) -> Refusal | None:
    """Refuse a tile that the mask cuts into too many blocks."""
    program = plan.program
    if program.mask == "full":
        return None
    worst = 0
    places = [range(program.mesh.extent(dim)) for dim in plan.nest.walks]
    owners = [plan.columns(dict(zip(plan.nest.walks, p, strict=True))) for p in product(*places)]
    for place in product(*(range(program.mesh.extent(dim)) for dim in plan.row_dims)):
        rows = plan.rows(dict(zip(plan.row_dims, place, strict=True)))
        for cols in owners:
            worst = max(worst, len(visible(program.mask, rows, cols)))
    if worst <= MOST_BLOCKS:
        return None
    return Refusal(
        "mask-too-fragmented",
        lambda: (
            f"the causal mask cuts a tile into {worst} blocks; at most {MOST_BLOCKS} are worth it",
            "split heads over the inner dimensions and the sequence over the outer ones",
        ),
    )
