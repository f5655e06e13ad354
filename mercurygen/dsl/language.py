"""What an operator's file is written with; each word here runs, on one device, with torch.

mercurygen itself never calls these: it parses the file. They are for the operator's author.
"""

from __future__ import annotations

import inspect
import operator as python
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from mercurygen.dsl.functions import FUNCTIONS, softmax_merge, sum_merge
from mercurygen.dsl.runtime import Accumulation, Index, Run
from mercurygen.errors import UserError
from mercurygen.ir.operator import AxisDecl, Domain, DType, MaskDecl, Role, TensorDecl, domain

_run: ContextVar[Run] = ContextVar("mercurygen_run")


class Later:
    """A number that is known once the extents are: `D**-0.5` in a signature."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute


class Axis:
    """An axis of an operator, declared at the top of its file.

    Args:
        doc: what one index along it is.
        tile: granularity, the smallest useful tile.
    """

    name: str

    def __init__(self, doc: str, tile: int = 1) -> None:
        self.doc, self.tile = doc, tile

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Axis) and _run.get(None) is None:
            return Product((self, other))
        return _arithmetic(python.mul, self, other)

    @property
    def extent(self) -> int:
        """Its extent in the run that is going on."""
        return _run.get().extents[self.name]


class Product:
    """Axes that share a dimension, the most significant first: `H * G`."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self.axes = axes

    def __mul__(self, other: Axis) -> Product:
        return Product((*self.axes, other))


def _arithmetic(op: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    def compute() -> Any:
        return op(_number(left), _number(right))

    return Later(compute) if _run.get(None) is None else compute()


def _number(x: Any) -> Any:
    if isinstance(x, Later):
        return x.compute()
    return x.extent if isinstance(x, Axis) else x


def _add_arithmetic() -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        op = getattr(python, name)
        for kind in (Axis, Later):
            if f"__{name}__" not in vars(kind):
                setattr(kind, f"__{name}__", lambda a, b, op=op: _arithmetic(op, a, b))
            setattr(kind, f"__r{name}__", lambda a, b, op=op: _arithmetic(op, b, a))
    for kind in (Axis, Later):
        kind.__neg__ = lambda a: _arithmetic(python.mul, -1, a)


_add_arithmetic()


class Word:
    """A word of the language that stands for itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


accumulator, integer = Word("accumulator"), Word("integer")  # dtypes, last in a subscript
full, causal = Domain("full"), Domain("causal")  # masks
softmax = Word("softmax")  # the merge of (out, lse)
inf = float("inf")


class Annotation:
    """What an annotation of a parameter became."""

    def __init__(self, kind: str, items: tuple[Any, ...] = ()) -> None:
        self.kind, self.items = kind, items

    def __getitem__(self, items: Any) -> Annotation:
        return Annotation(self.kind, items if isinstance(items, tuple) else (items,))


Input = Annotation("input")
Derived = Annotation("derived")
Output = Annotation("output")
Mask = Annotation("mask")
Scalar = Annotation("scalar")


def window(width: int) -> Domain:
    """The causal mask that leaves a row `width` columns at most, its own included."""
    return Domain("window", width)


def points(*axes: Axis) -> Iterator[Any]:
    """Loop over single indices of the axes."""
    run = _run.get()
    for indices in run.points([axis.name for axis in axes]):
        found = tuple(Point(axis.name, i) for axis, i in zip(axes, indices, strict=True))
        yield found if len(axes) > 1 else found[0]


def tiles(*axes: Axis) -> Iterator[Any]:
    """Loop over tiles of the axes: ranges of positions."""
    for found in _run.get().tiles([axis.name for axis in axes]):
        yield found if len(axes) > 1 else found[0]


class Point(int):
    """A single index of an axis."""

    def __new__(cls, axis: str, value: int) -> Point:
        """An int that knows its axis."""
        self = super().__new__(cls, value)
        self.axis = axis
        return self


def position(index: Any) -> Any:
    """The global positions of a tile ([tile]) or a point ([]), integers."""
    return _run.get().position(index.axis, index)


def together(*tensors: _Tensor) -> None:
    """The tensors always move as one; on one device nothing moves."""


def combine(*outputs: _Tensor, by: Any, identity: Any = None) -> None:
    """Say how contributions to outputs are merged along the axes that they do not carry.

    Args:
        outputs: merged together (each by itself for `sum`).
        by: `sum`, `softmax` for (out, lse), or a function of two partial states.
        identity: of a function: for each output the value that merges to nothing.
    """
    names = tuple(output.name for output in outputs)
    states = identity if isinstance(identity, tuple) else (identity,)
    if by is FUNCTIONS["sum"]:
        how = Accumulation(names, (0,) * len(names), sum_merge)
    elif by is softmax:
        how = Accumulation(names, (0, -inf), softmax_merge)
    elif identity is None or len(states) != len(names):
        message = f"combine of {', '.join(names)} needs {len(names)} identities"
        help = "`identity=`, for each output the value that merges to nothing"
        raise UserError("dsl-combine", message, help=help)
    elif len(names) == 1:
        how = Accumulation(names, states, lambda a, b: (by(a, b),))
    else:
        how = Accumulation(names, states, by)
    _run.get().combine(how)


class _Tensor:
    """A tensor parameter inside a run: subscripts load tiles or contribute to them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, items: Any) -> Any:
        return _run.get().load(self.name, _tuple(items))

    def __setitem__(self, items: Any, value: Any) -> None:
        _run.get().contribute(self.name, _tuple(items), value)


class _Mask:
    def __getitem__(self, items: Any) -> Any:
        return _run.get().live(*items)


def _tuple(items: Any) -> tuple[Index, ...]:
    items = items if isinstance(items, tuple) else (items,)
    return tuple(int(i) if isinstance(i, int) else i for i in items)


class operator:  # noqa: N801 (a decorator)
    """Make a function of the language runnable on one device.

    Calling it takes the inputs, then scalars and mask (by position or name), and `tiles`, sizes
    of tiles by axis name: the result does not depend on them but for rounding. It returns the
    outputs, in the order of the signature.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.__doc__ = function, function.__doc__
        self.__name__, self.__module__ = function.__name__, function.__module__
        found = {n: a for n, a in function.__globals__.items() if isinstance(a, Axis)}
        for name, axis in found.items():
            axis.name = name
        self.axes = [AxisDecl(name, axis.doc, axis.tile) for name, axis in found.items()]
        self.parameters = inspect.signature(function).parameters
        kinds = {name: _kind(name, p.annotation) for name, p in self.parameters.items()}
        self.tensors = [
            _tensor(name, kinds[name], self.parameters[name].annotation.items)
            for name in self.parameters
            if kinds[name] in ("input", "derived", "output")
        ]
        self.scalars = [name for name in kinds if kinds[name] == "scalar"]
        masks = [name for name in kinds if kinds[name] == "mask"]
        self.mask = _mask(masks[0], self.parameters[masks[0]]) if masks else None
        self.call = inspect.Signature(
            [
                inspect.Parameter(name, p.kind, default=p.default)
                for name, p in self.parameters.items()
                if kinds[name] not in ("derived", "output")
            ]
        )

    def __call__(self, *args: Any, tiles: dict[str, int] | None = None, **keywords: Any) -> Any:
        """Run on one device."""
        bound = self.call.bind(*args, **keywords)
        bound.apply_defaults()
        values = bound.arguments
        inputs = {t.name: values[t.name] for t in self.tensors if t.role == "input"}
        mask = values[self.mask.name] if self.mask else None
        if self.mask and mask is None:
            mask = self.mask.default
        run = Run(
            self.axes,
            self.tensors,
            inputs,
            mask,
            self.mask.axes if self.mask else None,
            tiles,
        )
        token = _run.set(run)
        try:
            arguments: dict[str, Any] = {t.name: _Tensor(t.name) for t in self.tensors}
            for name in self.scalars:
                arguments[name] = run.scalar(self._scalar(name, values[name]))
            if self.mask:
                arguments[self.mask.name] = _Mask()
            self.function(**arguments)
        finally:
            _run.reset(token)
        results = tuple(run.results().values())
        return results if len(results) > 1 else results[0]

    def _scalar(self, name: str, value: Any) -> float:
        value = self.parameters[name].default if value is None else value
        if value is inspect.Parameter.empty:
            raise UserError("dsl-argument", f"no value for scalar `{name}`")
        return _number(value)


def _kind(name: str, annotation: Any) -> str:
    if not isinstance(annotation, Annotation):
        help = "annotations are evaluated: no `from __future__ import annotations` in this file"
        help = help if isinstance(annotation, str) else "`Input[...]`, `Output[...]`, ..."
        raise UserError("dsl-parameter", f"`{name}` needs an annotation", help=help)
    return annotation.kind


def _tensor(name: str, role: Role, items: tuple[Any, ...]) -> TensorDecl:
    dtype: DType = "inputs"
    if items and isinstance(items[-1], Word):
        dtype, items = items[-1].name, items[:-1]
    dims = tuple(
        tuple(axis.name for axis in (item.axes if isinstance(item, Product) else (item,)))
        for item in items
    )
    return TensorDecl(name, role, dims, dtype)


def _mask(name: str, parameter: inspect.Parameter) -> MaskDecl:
    rows, columns = parameter.annotation.items
    given = parameter.default is not inspect.Parameter.empty
    return MaskDecl(name, (rows.name, columns.name), domain(parameter.default) if given else None)
