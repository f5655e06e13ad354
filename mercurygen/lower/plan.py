"""The plan: what one rank does, the same for all ranks.

A small tree. Verifier, interpreter, cost model and emitter all read it: the emitter prints it,
`mercurygen.lower.trace` plays it for one rank, event by event, and the rest read that trace. Levels
of the mesh stay recognisable: a nest is a list of loops, each of stages that walk around one
dimension or gather over one; reductions follow the nest, and the border wraps both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from mercurygen.ir.atoms import Atoms, Region, atoms_of
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.problem import DTYPES
from mercurygen.ir.program import CombineKind, Program, Tensor, TileLoop


@dataclass(frozen=True, slots=True)
class Swap:
    """Border: an all-to-all along a dimension; one axis is gathered, another split.

    Attributes:
        tensors: in the order in which they go, one collective each.
        dim: the mesh dimension.
        gathered: the axis whose parts join, one from each rank; S: the tensor's sequence.
        split: the axis that is cut, one part to each rank; or S.
        join: how the ranks' parts of `gathered` interleave in global order.
        deal: how those of `split` do.
        optional: only if the caller asks for it.
    """

    tensors: tuple[str, ...]
    dim: str
    gathered: str
    split: str
    join: Interleaving
    deal: Interleaving
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """Border: tensors that every rank has whole along a dimension are cut there (no transfer), or
    cut ones are gathered.

    Attributes:
        tensors: in the order in which they go.
        dim: the mesh dimension.
        axis: that is cut, or whose parts join; S: the tensor's sequence.
        join: how the ranks' parts interleave.
        gathers: whether parts are gathered.
    """

    tensors: tuple[str, ...]
    dim: str
    axis: str
    join: Interleaving
    gathers: bool
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """A stage: all parts along a dimension at once, joined in global order.

    Attributes:
        dim: the mesh dimension.
        join: how the parts interleave.
        broadcast: of a tile loop, whose part is one rank's: that rank sends it to all.
    """

    dim: str
    join: Interleaving
    broadcast: bool = False


@dataclass(frozen=True, slots=True)
class Walk:
    """A stage: at step t rank r has the tile of rank r - t.

    Attributes:
        dim: the mesh dimension.
        direct: every tile straight from its owner, only what is read of it.
        reverse: r + t instead.
        both: at step t the tiles of r - t and of r + t.
        ahead: tiles that are on their way while one is used; 0: none.
        skew: the other dimension of a skewed pair, by whose coordinate the tiles are ahead.
        steps: those at which some rank reads something, but step 0; None: all.
    """

    dim: str
    direct: bool = False
    reverse: bool = False
    both: bool = False
    ahead: int = 1
    skew: str | None = None
    steps: tuple[int, ...] | None = None

    def coming(self, size: int) -> tuple[int, ...]:
        """The steps after our own tile's, of a dimension of this size."""
        return tuple(range(1, size)) if self.steps is None else self.steps


Stages = tuple["Gather | Walk", ...]


@dataclass(frozen=True)
class Loop:
    """The tiles of some inputs come by; what is inside runs on each.

    Attributes:
        tensors: that come by; none: only outputs move.
        axis: along which they are stored split.
        stages: outermost first. A loop whose outputs move has one walk.
        outputs: whose partial results for a tile go to its owner.
        home: how: they travel with the tiles, or go straight to the owner.
        partner: of a skewed loop, the tensors and the axis that come along `skew` in step.
    """

    tensors: tuple[str, ...]
    axis: str
    stages: Stages
    outputs: tuple[str, ...] = ()
    home: Literal["relayed", "direct"] | None = None
    partner: tuple[tuple[str, ...], str] | None = None

    @cached_property
    def leading(self) -> tuple[Gather, ...]:
        """Gathers outside every walk: nothing runs beside them."""
        index = next((i for i, s in enumerate(self.stages) if isinstance(s, Walk)), None)
        return self.stages[:index]

    @cached_property
    def walking(self) -> Stages:
        """The outermost walk and what is inside it."""
        return self.stages[len(self.leading) :]

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """The walks, outermost first."""
        return tuple(stage for stage in self.stages if isinstance(stage, Walk))

    @cached_property
    def direct(self) -> bool:
        """Whether some walk is direct."""
        return any(walk.direct for walk in self.walks)

    @cached_property
    def both(self) -> bool:
        """Whether some walk is both ways."""
        return any(walk.both for walk in self.walks)

    @cached_property
    def course(self) -> tuple:
        """What moves along which dimensions, gathered or walked, in whatever way."""
        dims = tuple((stage.dim, isinstance(stage, Walk)) for stage in self.stages)
        return self.tensors, self.axis, self.outputs, self.partner, dims

    @cached_property
    def reach(self) -> tuple[tuple, ...]:
        """Per stage its dimension, whether it walks, is direct and goes in reverse, and its steps:
        what it depends on which rank gets what of a tile."""
        return tuple(
            (
                (s.dim, True, s.direct, s.reverse, s.steps)
                if isinstance(s, Walk)
                else (s.dim, *(False,) * 3, None)
            )
            for s in self.stages
        )

    @cached_property
    def paces(self) -> tuple[tuple, ...]:
        """Per walk its dimension, the axis whose tiles come by, how the owner moves from step to
        step (+1 or -1), the step that the first tile is of: results alone that go home begin one
        ahead; and the steps, if they are not all."""
        first = 1 if not self.tensors and self.home == "relayed" else 0
        return tuple((w.dim, self.axis, 1 if w.reverse else -1, first, w.steps) for w in self.walks)

    @cached_property
    def levels(self) -> tuple[tuple[Walk, tuple[Gather, ...]], ...]:
        """The walks, outermost first, each with the gathers of its tiles."""
        return tuple(walk_levels(self.walking))


@dataclass(frozen=True, slots=True)
class Reduce:
    """After the nest: partial results of a dimension's ranks become one.

    Attributes:
        tensors: that are merged together.
        kind: how.
        dim: the mesh dimension.
        axis: along which every rank keeps its part; None: every rank keeps all.
        join: how the ranks' parts interleave along it.
        dtype: that the partial results cross links in; None: at least float32.
    """

    tensors: tuple[str, ...]
    kind: CombineKind
    dim: str
    axis: str | None
    join: Interleaving | None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Nest:
    """The body on every tile that comes by, and what becomes of its results.

    Attributes:
        loops: outermost first; those that only gather come first.
        begin: of the innermost results: "only" (one tile, one block at most: its result is the
            output), "first" (the first tile is one block, whose result the others are merged
            into) or "empty" (all are merged into what merges to nothing).
        reduces: in order.
    """

    loops: tuple[Loop, ...]
    begin: Literal["only", "first", "empty"]
    reduces: tuple[Reduce, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Everything that comes by."""
        return tuple(name for loop in self.loops for name in loop.tensors)

    @property
    def stages(self) -> Stages:
        """The stages of all loops, outermost first."""
        return tuple(stage for loop in self.loops for stage in loop.stages)

    @property
    def walks(self) -> tuple[str, ...]:
        """Dimensions that are walked, outermost first."""
        return tuple(walk.dim for loop in self.loops for walk in loop.walks)


def walk_levels(stages: Stages) -> list[tuple[Walk, tuple[Gather, ...]]]:
    """The walks of a loop, outermost first, each with the gathers of its tiles."""
    levels: list[tuple[Walk, tuple[Gather, ...]]] = []
    for stage in stages:
        match stage:
            case Walk():
                levels.append((stage, ()))
            case Gather():
                walk, gathers = levels[-1]
                levels[-1] = (walk, (*gathers, stage))
    return levels


def sliced(program: Program) -> bool:
    """Whether every tensor is pinned by its sequence over the whole mesh, or not at all."""
    return all(
        len(set(tensor.pin)) < 2 and {*tensor.pin} <= {program.sequence(tensor), None}
        for tensor in program.tensors
    )


@dataclass(frozen=True)
class Plan:
    """What one rank does: border, nest, border; within the tile loops, if there are any.

    Attributes:
        program: what it was lowered from.
        before: reshards of the inputs.
        nest: the tiles and the body.
        after: reshards of the outputs.
        tiles: loops around all that carries their axes, outermost first.
    """

    program: Program
    before: tuple[Swap | Spread, ...]
    nest: Nest
    after: tuple[Swap | Spread, ...]
    tiles: tuple[TileLoop, ...] = ()

    @cached_property
    def atoms(self) -> Atoms:
        """How the axes are cut."""
        return atoms_of(self.program)

    @cached_property
    def head_dims(self) -> tuple[str, ...]:
        """Dimensions that split what is no sequence while the body runs."""
        axes = self.program.mask_axes
        return tuple(
            d for d in self.program.mesh.names if self.program.parallel_axis(d) not in axes
        )

    @cached_property
    def row_dims(self) -> tuple[str, ...]:
        """Dimensions that split the rows of the mask while the body runs."""
        axes = self.program.mask_axes
        return self.program.parallel_dims(axes[0]) if axes else ()

    def rows(self, coordinate: dict[str, int]) -> tuple[int, ...]:
        """Atoms of the rows of a rank while the body runs."""
        return self.atoms.iterations(self.program.mask_axes[0], coordinate)

    def columns(self, owner: dict[str, int]) -> tuple[int, ...]:
        """Atoms of the columns of an owner's tile, which has a coordinate along every walk."""
        axis = self.program.mask_axes[1]
        walks = [w.dim for loop in self.nest.loops if loop.axis == axis for w in loop.walks]
        held = {dim: (owner[dim],) for dim in walks}
        held |= {dim: (owner[dim],) for dim in self.program.parallel_dims(axis)}
        return self.atoms.owned(self.atoms.order(None, axis), axis, held)

    def nbytes(self, name: str, split: tuple[str, ...]) -> int:
        """Bytes of one rank's part of a tensor that is split over these dimensions."""
        tensor, program = self.program.tensor(name), self.program
        elements = prod(program.extent(axis) for axis in tensor.axes)
        share = prod(program.mesh.extent(dim) for dim in split)
        return elements // share * self.itemsize(tensor.dtype)

    def held_bytes(self, name: str) -> int:
        """Bytes of what a rank's caller holds of a tensor; a swap at the border keeps them."""
        program, tensor = self.program, self.program.tensor(name)
        return self.nbytes(name, tuple(d for d in program.mesh.names if program.pinned(tensor, d)))

    def region_bytes(self, tensor: Tensor, region: Region, dtype: str | None = None) -> int:
        """Bytes of a part of a tensor, in its own dtype or another."""
        return self.atoms.elements(tensor, region) * self.itemsize(dtype or tensor.dtype)

    def itemsize(self, dtype: str) -> int:
        """Bytes of an element: "inputs", "accumulator", "integer", or a dtype by name."""
        size = DTYPES[self.program.dtype]
        named = {"inputs": size, "accumulator": max(4, size), "integer": 8}
        return named[dtype] if dtype in named else DTYPES[dtype]

    def partial(self, tensor: Tensor) -> str:
        """The dtype that contributions to an output are merged in."""
        return "integer" if tensor.dtype == "integer" else "accumulator"
