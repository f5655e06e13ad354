"""What a schedule can say: one immutable record per directive, each with its text.

`str(directive)` is the line of a `.sched` file; `mercurygen.schedule.directive_text` reads it
back.
"""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.ir.kernel import Options, shown
from mercurygen.ir.names import REPLICATED


def listed(names: tuple[str, ...]) -> str:
    """Names as a schedule lists them."""
    return ", ".join(names)


@dataclass(frozen=True, slots=True)
class OrderTokens:
    """`order S: zigzag over node, gpu`: which tokens a rank owns."""

    axis: str
    kind: str
    dims: tuple[str, ...]

    def __str__(self) -> str:
        over = f" over {listed(self.dims)}" if self.dims else ""
        return f"order {self.axis}: {self.kind}{over}"


@dataclass(frozen=True, slots=True)
class Pin:
    """`pin q, k: S over node` or `pin q: replicated`: the layout that the caller has and wants.

    Over no dimension, or along no axis, it is `replicated`, and equal to that.
    """

    tensors: tuple[str, ...]
    axis: str | None
    dims: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.axis is None or not self.dims:
            object.__setattr__(self, "axis", None)
            object.__setattr__(self, "dims", ())

    def __str__(self) -> str:
        where = f"{self.axis} over {listed(self.dims)}" if self.axis else REPLICATED
        return f"pin {listed(self.tensors)}: {where}"


@dataclass(frozen=True, slots=True)
class Reshard:
    """`reshard q, k, v: S to H along gpu`: one collective at the border.

    From or to None, which is written `replicated`: every rank along `dim` has all of it.
    """

    tensors: tuple[str, ...]
    source: str | None
    target: str | None
    dim: str

    def __str__(self) -> str:
        source, target = (axis or REPLICATED for axis in (self.source, self.target))
        return f"reshard {listed(self.tensors)}: {source} to {target} along {self.dim}"


@dataclass(frozen=True, slots=True)
class Parallelize:
    """`parallelize H over gpu`: the iterations of an axis are split over dimensions."""

    axis: str
    dims: tuple[str, ...]

    def __str__(self) -> str:
        return f"parallelize {self.axis} over {listed(self.dims)}"


def _as(dtype: str | None) -> str:
    return f" as {dtype}" if dtype else ""


@dataclass(frozen=True, slots=True)
class Shard:
    """`shard k, v: S_kv over gpu`: stored split, gathered where all of it is needed.

    Of an output: partial results are reduce-scattered, crossing links in `dtype` (None: at least
    float32).
    """

    tensors: tuple[str, ...]
    axis: str
    dims: tuple[str, ...]
    dtype: str | None = None

    def __str__(self) -> str:
        over = f"{self.axis} over {listed(self.dims)}{_as(self.dtype)}"
        return f"shard {listed(self.tensors)}: {over}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """`replicate k, v over gpu`: every rank is given all of it; of an output: all-reduced."""

    tensors: tuple[str, ...]
    dims: tuple[str, ...]
    dtype: str | None = None

    def __str__(self) -> str:
        return f"replicate {listed(self.tensors)} over {listed(self.dims)}{_as(self.dtype)}"


@dataclass(frozen=True, slots=True)
class Along:
    """One dimension of a shift, with its options.

    Attributes:
        dim: the mesh dimension.
        options: words that follow it, sorted: "direct", "reverse", "both", "skewed",
            "prefetch n".
    """

    dim: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.dim, *self.options))


@dataclass(frozen=True, slots=True)
class Shift:
    """`shift k, v: S_kv along node, gpu`: stored split, and comes by tile by tile."""

    tensors: tuple[str, ...]
    axis: str
    along: tuple[Along, ...]
    dtype: str | None = None

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions, outermost loop first."""
        return tuple(along.dim for along in self.along)

    def __str__(self) -> str:
        along = ", ".join(map(str, self.along))
        return f"shift {listed(self.tensors)}: {self.axis} along {along}{_as(self.dtype)}"


@dataclass(frozen=True, slots=True)
class Tile:
    """`tile H by 4`: equal parts of what a rank sees of an axis, looped over."""

    axis: str
    parts: int

    def __str__(self) -> str:
        return f"tile {self.axis} by {self.parts}"


@dataclass(frozen=True, slots=True)
class Join:
    """`join H, G`: one axis of several, the first major."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"join {listed(self.axes)}"


@dataclass(frozen=True, slots=True)
class Reorder:
    """`reorder H, S_kv`: the order of the tile loops, outermost first."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"reorder {listed(self.axes)}"


@dataclass(frozen=True, slots=True)
class Patch:
    """`patch body with triton(rows=64)`: which local kernel runs the body, with its options."""

    body: str
    kernel: str
    options: Options = ()

    def __str__(self) -> str:
        return f"patch {self.body} with {shown(self.kernel, self.options)}"


Directive = (
    OrderTokens
    | Pin
    | Reshard
    | Parallelize
    | Shard
    | Replicate
    | Shift
    | Tile
    | Join
    | Reorder
    | Patch
)
