"""A parsed operator: axes, tensors, a loop nest, a body, and how contributions are merged.

Nothing here runs anything. `mercurygen.dsl.parse` makes these from a file, and
`mercurygen.dsl.interpret` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from mercurygen.errors import InternalError, Span, UserError, closest, shorten
from mercurygen.ir.expr import Expr, Mark, names, place

# Which pairs of positions are live. To come, each with what it needs beside the positions:
# "causal-bottom-right" (the two extents), "documents" (an id per position), "predicate" (an
# expression on global positions).
DOMAINS = ("full", "causal", "window")
WIDEST = 2**40  # a window beyond any sequence is a slip

Role: TypeAlias = Literal["input", "derived", "output"]
# inputs: that of the inputs; accumulator: promote_types(that, float32); integer: int64.
DType: TypeAlias = Literal["inputs", "accumulator", "integer"]
CombineKind: TypeAlias = Literal["sum", "softmax", "user"]
LoopKind: TypeAlias = Literal["points", "tiles"]


@dataclass(frozen=True, slots=True)
class AxisDecl:
    """An axis of the iteration space; the problem gives its extent.

    Attributes:
        name: as the operator's author wrote it.
        doc: what one index along it is.
        tile: granularity: the smallest useful tile, 1 if the author gave none.
    """

    name: str
    doc: str
    tile: int = 1
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Domain:
    """Which pairs of global positions (i of a row, j of a column) are live.

    Attributes:
        kind: full; causal: j <= i; window: -ahead <= i - j < width, so that a row sees itself,
            the width - 1 columns before it and some after it.
        width: of a window, else None.
        ahead: of a window, how many columns after itself a row sees.
        borders: of packed documents, where each begins, and the end: only pairs of one are live.
        offset: of two sequences, the column that row 0 stands at: i is that much more.

    Raises:
        UserError: `dsl-mask`, for an unknown kind, or a width that does not go with it.
    """

    kind: str
    width: int | None = None
    ahead: int = 0
    borders: tuple[int, ...] = ()
    offset: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DOMAINS:
            help = closest(str(self.kind), DOMAINS)
            raise UserError("dsl-mask", f"unknown mask {shorten(repr(self.kind))}", help=help)
        if self.kind != "window" and (self.width is not None or self.ahead):
            raise UserError("dsl-mask", f"a {self.kind} mask has no width")
        whole = isinstance(self.width, int) and not isinstance(self.width, bool)
        if self.kind == "window" and not (whole and 0 < self.width <= WIDEST):
            given = "no width" if self.width is None else shorten(f"width {self.width!r}")
            help = f"`window(128)`: an integer from 1 to {WIDEST}, the row itself included"
            raise UserError("dsl-mask", f"a window cannot have {given}", help=help)

    def __str__(self) -> str:
        """As an operator's file has it: `causal`, `window(128)`."""
        more = f", {self.ahead}" if self.ahead else ""
        at = f", the first row at column {self.offset}" if self.offset else ""
        return (self.kind if self.width is None else f"{self.kind}({self.width}{more})") + at


def domain(mask: Domain | str) -> Domain:
    """A domain that needs no width may be named."""
    return mask if isinstance(mask, Domain) else Domain(mask)


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """A tensor and the axes that each dimension carries.

    Attributes:
        name: parameter name.
        role: input; output; or derived, which a loop nest before the main one computes from
            inputs, and the main nest reads.
        dims: for each dimension its axes, the most significant first:
            (("B",), ("S_q",), ("H", "G"), ("D",)).
        dtype: relative to that of the inputs.
    """

    name: str
    role: Role
    dims: tuple[tuple[str, ...], ...]
    dtype: DType = "inputs"
    span: Span | None = place()

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that the tensor carries, in the order of its dimensions."""
        return tuple(axis for dim in self.dims for axis in dim)


@dataclass(frozen=True, slots=True)
class ScalarDecl:
    """A number that the caller may give; the default may use axis extents (`D**-0.5`)."""

    name: str
    default: Expr | None = None
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class MaskDecl:
    """Which pairs of positions are live.

    Attributes:
        name: parameter name.
        axes: the axis of queries (rows) and the axis of keys (columns).
        default: None if the caller must say.
    """

    name: str
    axes: tuple[str, str]
    default: Domain | None = None
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Loop:
    """One `for`: its variables run over axes, as single indices or as ranges of positions.

    Attributes:
        kind: points (each variable is one index) or tiles (each is a range).
        variables: as written.
        axes: the axis of each variable.
    """

    kind: LoopKind
    variables: tuple[str, ...]
    axes: tuple[str, ...]
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Assign:
    """`target = value`; `source` are the lines as written, with the comments above them."""

    target: str
    value: Expr
    source: str = field(default="", compare=False, repr=False)
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Contribute:
    """`output[index] = value`: a contribution to one tile of an output or derived tensor."""

    output: str
    index: tuple[Expr | Mark, ...]
    value: Expr
    source: str = field(default="", compare=False, repr=False)
    span: Span | None = place()


Statement: TypeAlias = Assign | Contribute


@dataclass(frozen=True, slots=True)
class Merge:
    """A user's combine: a function of two partial states, element by element.

    Attributes:
        name: of the function.
        parameters: one state (a tile of each output), then the other.
        body: assignments only.
        result: the merged state.
        source: the function as written, from `def` on.
    """

    name: str
    parameters: tuple[str, ...]
    body: tuple[Assign, ...]
    result: tuple[Expr, ...]
    source: str = field(default="", compare=False, repr=False)
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Combine:
    """How contributions to some outputs are merged along the axes that they do not carry.

    Attributes:
        outputs: merged together (each by itself for `sum`).
        kind: sum, softmax (of (out, lse)) or user.
        identity: for each output the value that merges to nothing.
        merge: of kind user only.
    """

    outputs: tuple[str, ...]
    kind: CombineKind
    identity: tuple[int | float, ...]
    merge: Merge | None = None
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a derived tensor is computed: a loop nest that writes each of its elements once.

    Attributes:
        name: of the tensor.
        loops: perfectly nested, outermost first; over axes that the tensor carries.
        body: of the innermost loop; its last effect is one contribution to the tensor.
        reads: the tensors that it reads: inputs, and derived ones of earlier derivations.
    """

    name: str
    loops: tuple[Loop, ...]
    body: tuple[Statement, ...]
    reads: tuple[str, ...]
    span: Span | None = place()

    @property
    def source(self) -> str:
        """The compute lines as the user wrote them, comments included, not indented."""
        return _source(self.body)


@dataclass(frozen=True, slots=True)
class Operator:
    """A parsed operator.

    Attributes:
        name: of the function.
        doc: its docstring, cleaned as by inspect.cleandoc.
        axes: those that it uses, in the order of their declarations.
        tensors: in the order of the signature.
        loops: of the main nest, perfectly nested, outermost first.
        body: of the innermost loop.
        derivations: the nests before the main one, in order, one per derived tensor.
        file: as the user named it; not compared.
    """

    name: str
    doc: str
    axes: tuple[AxisDecl, ...]
    tensors: tuple[TensorDecl, ...]
    scalars: tuple[ScalarDecl, ...]
    mask: MaskDecl | None
    together: tuple[tuple[str, ...], ...]
    combines: tuple[Combine, ...]
    loops: tuple[Loop, ...]
    body: tuple[Statement, ...]
    derivations: tuple[Derivation, ...] = ()
    file: str = field(default="", compare=False)
    span: Span | None = place()

    @property
    def inputs(self) -> tuple[TensorDecl, ...]:
        """The input tensors, in the order of the signature."""
        return tuple(t for t in self.tensors if t.role == "input")

    @property
    def derived(self) -> tuple[TensorDecl, ...]:
        """The derived tensors, in the order of the signature."""
        return tuple(t for t in self.tensors if t.role == "derived")

    @property
    def outputs(self) -> tuple[TensorDecl, ...]:
        """The output tensors, in the order of the signature."""
        return tuple(t for t in self.tensors if t.role == "output")

    @property
    def loop_axes(self) -> tuple[str, ...]:
        """The axes that are looped over, outermost first."""
        return tuple(axis for loop in self.loops for axis in loop.axes)

    @property
    def source(self) -> str:
        """The main nest's lines as the user wrote them, comments included, not indented."""
        return _source(self.body)

    @property
    def body_reads(self) -> tuple[str, ...]:
        """Inputs and derived tensors that the main nest reads, in the order of the signature."""
        read = {name for statement in self.body for name in names(statement.value)}
        return tuple(t.name for t in self.tensors if t.name in read and t.role != "output")

    @property
    def body_alone(self) -> Operator:
        """The main nest by itself: what it reads are its inputs."""
        read = self.body_reads
        tensors = (
            replace(t, role="input") if t.name in read else t
            for t in self.tensors
            if t.name in read or t.role == "output"
        )
        return replace(self, tensors=tuple(tensors), derivations=())

    def derivation(self, name: str) -> Derivation:
        """How a derived tensor is computed."""
        return _named(self.derivations, name, "derived tensor")

    def axis(self, name: str) -> AxisDecl:
        """The declaration of an axis."""
        return _named(self.axes, name, "axis")

    def tensor(self, name: str) -> TensorDecl:
        """The declaration of a tensor."""
        return _named(self.tensors, name, "tensor")

    def axes_of(self, tensor: str) -> tuple[str, ...]:
        """Every axis that a tensor carries, in the order of its dimensions."""
        return self.tensor(tensor).axes

    def reduced_axes(self, output: str) -> tuple[str, ...]:
        """The loop axes that an output does not carry: its contributions are merged there."""
        carried = self.axes_of(output)
        return tuple(axis for axis in self.loop_axes if axis not in carried)

    def combine_of(self, output: str) -> Combine | None:
        """How contributions to an output are merged; None if it gets just one."""
        return next((c for c in self.combines if output in c.outputs), None)


def _source(body: tuple[Statement, ...]) -> str:
    return "\n".join(statement.source for statement in body)


def _named(declarations: tuple, name: str, what: str):
    for declaration in declarations:
        if declaration.name == name:
            return declaration
    raise InternalError(f"no {what} `{name}`")
