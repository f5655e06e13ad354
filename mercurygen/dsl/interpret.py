"""Run a parsed operator on one device. No text is executed: every node has its meaning here."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

from mercurygen.dsl.functions import FUNCTIONS, softmax_merge, sum_merge
from mercurygen.dsl.runtime import Accumulation, Merger, Run, Tile
from mercurygen.errors import InternalError, UserError, closest
from mercurygen.ir.expr import (
    Binary,
    Call,
    Expr,
    Index,
    Mark,
    Name,
    Number,
    Transpose,
    Unary,
    names,
)
from mercurygen.ir.operator import (
    Assign,
    Combine,
    Derivation,
    Domain,
    Loop,
    Merge,
    Operator,
    ScalarDecl,
    Statement,
)

if TYPE_CHECKING:
    from torch import Tensor

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": python.add,
    "-": python.sub,
    "*": python.mul,
    "/": python.truediv,
    "//": python.floordiv,
    "%": python.mod,
    "@": python.matmul,
    "&": python.and_,
    "|": python.or_,
    "^": python.xor,
    "<": python.lt,
    "<=": python.le,
    ">": python.gt,
    ">=": python.ge,
    "==": python.eq,
    "!=": python.ne,
}
_MARKS = {":": slice(None), "None": None, "...": ...}
_EVALUATION_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError)


def interpret(
    op: Operator,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float | None] | None = None,
    mask: Domain | str | None = None,
    tiles: Mapping[str, int] | None = None,
    positions: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run an operator on one device.

    Args:
        op: parsed.
        tensors: the inputs by name, shaped as declared; derived tensors too, where they are known
            (`derive`), else they are computed.
        scalars: by name; their defaults for those that are missing or None.
        mask: a domain, or the name of one that needs no width; default: the operator's own.
        tiles: sizes of tiles by axis.
        positions: for an axis the global position of each index ([extent], integer): a block of
            a longer sequence, in any order. Default 0, 1, ...

    Returns:
        The outputs by name, shaped as declared; the dtype of the inputs, or of accumulators
        (promote_types(that, float32)), or int64.
    """
    declared = op.mask
    mask = mask if mask is not None else (declared.default if declared else None)
    axes = declared.axes if declared else None
    run = Run(op.axes, op.tensors, tensors, mask, axes, tiles, positions)
    for combine in op.combines:
        run.combine(Accumulation(combine.outputs, combine.identity, merger_of(combine)))
    base = _numbers(op, op.scalars, scalars or {}, run)
    for derivation in op.derivations:
        if derivation.name not in tensors:
            _derive(derivation, run, base)
    _loop(op.loops, op.body, Evaluator(run, base, op.loops, declared.name if declared else None))
    return run.results()


def derive(
    op: Operator,
    name: str,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float | None] | None = None,
) -> Tensor:
    """Compute one derived tensor alone, from all of what it is derived from or from a part.

    Args:
        op: parsed.
        name: of the derived tensor.
        tensors: at least the inputs among `op.derivation(name).reads`; they give the extents. A
            derived one among the reads is computed first if it is missing.
        scalars: by name; their defaults for those that are missing or None.

    Returns:
        The tensor as declared, of the extents that `tensors` gives.
    """
    if name not in [tensor.name for tensor in op.derived]:
        known = closest(name, [tensor.name for tensor in op.derived])
        raise UserError("dsl-argument", f"no derived tensor `{name}`", help=known)
    derivation = op.derivation(name)
    given = {}
    for read in derivation.reads:
        if read in tensors:
            given[read] = tensors[read]
        elif op.tensor(read).role == "derived":
            given[read] = derive(op, read, tensors, scalars)
    reads = [replace(op.tensor(read), role="input") for read in derivation.reads]
    run = Run(op.axes, [*reads, op.tensor(name)], given, fold=True)
    read_names = {n for s in derivation.body for n in names(s.value)}
    wanted = [scalar for scalar in op.scalars if scalar.name in read_names]
    _derive(derivation, run, _numbers(op, wanted, scalars or {}, run))
    return run.given[name]


class Evaluator:
    """Values of expressions.

    Args:
        run: None where no tensor is in reach (a merge function, a scalar's default).
        values: of the names; loops and assignments add to them.
        loops: around what is evaluated.
        mask: the mask's name, if there is one.
    """

    def __init__(
        self,
        run: Run | None,
        values: dict[str, Any],
        loops: tuple[Loop, ...] = (),
        mask: str | None = None,
    ) -> None:
        self.run, self.values, self.mask = run, values, mask
        self.axis_of = {v: a for x in loops for v, a in zip(x.variables, x.axes, strict=True)}

    def assign(self, statement: Assign) -> None:
        """Evaluate and keep a local."""
        self.values[statement.target] = self.value(statement.value)

    def value(self, expr: Expr) -> Any:
        """The tensor or number that an expression stands for."""
        match expr:
            case Name(id=id):
                return self.values[id]
            case Number(value=value):
                return value
            case Unary(op="-", operand=operand):
                return _apply(expr, python.neg, self.value(operand))
            case Unary(op="~", operand=operand):
                return _apply(expr, python.invert, self.value(operand))
            case Binary(op="**", left=left, right=right):
                return _apply(expr, _power, self.value(left), self.value(right))
            case Binary(op=op, left=left, right=right):
                return _apply(expr, _BINARY[op], self.value(left), self.value(right))
            case Transpose(base=base):
                return _apply(expr, lambda x: x.T, self.value(base))
            case Call():
                return self._call(expr)
            case Index():
                return self._index(expr)
            case Unary():
                raise InternalError(f"unknown operation {expr.op}")
            case _:
                assert_never(expr)

    def index(self, items: tuple[Expr | Mark, ...]) -> tuple[Any, ...]:
        """Points, tiles and marks of a subscript."""
        return tuple(
            _MARKS[item.text] if isinstance(item, Mark) else self.value(item) for item in items
        )

    def _call(self, expr: Call) -> Any:
        if expr.function == "position":
            assert self.run and isinstance(expr.args[0], Name)
            variable = expr.args[0].id
            return self.run.position(self.axis_of[variable], self.values[variable])
        args = [self.value(arg) for arg in expr.args]
        keywords = {name: self.value(value) for name, value in expr.keywords}
        return _apply(expr, FUNCTIONS[expr.function], *args, **keywords)

    def _index(self, expr: Index) -> Any:
        if self.run and isinstance(expr.base, Name):
            if expr.base.id in self.run.given:
                return self.run.load(expr.base.id, self.index(expr.items))
            if expr.base.id == self.mask:
                return self.run.live(*self.index(expr.items))
        return _apply(expr, python.getitem, self.value(expr.base), self.index(expr.items))


def _derive(derivation: Derivation, run: Run, base: dict[str, Any]) -> None:
    loops = derivation.loops
    _loop(loops, derivation.body, Evaluator(run, dict(base), loops))


def _loop(loops: tuple[Loop, ...], body: tuple[Statement, ...], evaluator: Evaluator) -> None:
    """Run the loops, the outermost first."""
    run = evaluator.run
    assert run is not None
    if not loops:
        _body(body, evaluator)
        return
    loop, *inner = loops
    for indices in run.points(loop.axes) if loop.kind == "points" else run.tiles(loop.axes):
        evaluator.values.update(zip(loop.variables, indices, strict=True))
        _loop(tuple(inner), body, evaluator)


def _body(body: tuple[Statement, ...], evaluator: Evaluator) -> None:
    assert evaluator.run is not None
    for statement in body:
        if isinstance(statement, Assign):
            evaluator.assign(statement)
            continue
        value = evaluator.value(statement.value)
        try:
            evaluator.run.contribute(statement.output, evaluator.index(statement.index), value)
        except UserError as error:
            raise error.at(statement.span) from None


def merger(op: Operator, outputs: tuple[str, ...]) -> Merger:
    """The function that merges two partial states of some outputs; what has none is added."""
    combine = op.combine_of(outputs[0])
    return sum_merge if combine is None else merger_of(combine)


def merger_of(combine: Combine) -> Merger:
    """The function that merges two partial states."""
    if combine.kind == "sum":
        return sum_merge
    if combine.kind == "softmax":
        return softmax_merge
    assert combine.merge is not None
    return _user_merger(combine.merge)


def _user_merger(merge: Merge) -> Merger:
    def merger(*states: Any) -> tuple[Any, ...]:
        values = dict(zip(merge.parameters, states, strict=True))
        evaluator = Evaluator(None, {"inf": math.inf} | values)
        for statement in merge.body:
            evaluator.assign(statement)
        return tuple(evaluator.value(expr) for expr in merge.result)

    return merger


def _numbers(
    op: Operator, wanted: Iterable[ScalarDecl], given: Mapping[str, float | None], run: Run
) -> dict[str, Any]:
    """Extents, `inf`, and the scalars that are wanted."""
    known = [s.name for s in op.scalars]
    for name in given:
        if name not in known:
            raise UserError("dsl-argument", f"no scalar `{name}`", help=closest(name, known))
    found: dict[str, Any] = {**run.extents, "inf": math.inf}
    for scalar in wanted:
        value, default = given.get(scalar.name), scalar.default
        if value is None:
            if default is None or not set(names(default)) <= set(run.extents):
                raise UserError("dsl-argument", f"no value for scalar `{scalar.name}`")
            value = Evaluator(None, dict(run.extents)).value(default)
        try:
            found[scalar.name] = run.scalar(float(value))
        except (TypeError, ValueError, OverflowError):
            message = f"`{scalar.name}` is no number that a tensor can hold"
            raise UserError("dsl-argument", message, span=scalar.span) from None
    return found


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        if abs(exponent) > 64 or abs(base) > 2**64:  # 9**9**9**9 would never end
            raise OverflowError("the power is too large")
    return base**exponent


def _apply(expr: Expr, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    if any(isinstance(arg, Tile) for arg in args):
        raise InternalError("a tile as a value")
    try:
        return function(*args, **keywords)
    except _EVALUATION_ERRORS as error:
        message = str(error).split("\n")[0] or type(error).__name__
        raise UserError("dsl-run", message, span=expr.span) from None
