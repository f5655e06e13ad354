"""Run a parsed operator on one device. No text is executed: every node has its meaning here."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable, Mapping
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
)
from mercurygen.ir.operator import Assign, Combine, Merge, Operator

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
    mask: str | None = None,
    tiles: Mapping[str, int] | None = None,
    positions: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run an operator on one device.

    Args:
        op: parsed.
        tensors: the inputs by name, shaped as declared.
        scalars: by name; their defaults for those that are missing or None.
        mask: one of ir.operator.DOMAINS; default: the operator's own.
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
        run.combine(Accumulation(combine.outputs, combine.identity, _merger(combine)))
    base: dict[str, Any] = {axis.name: run.extents[axis.name] for axis in op.axes}
    base |= {"inf": math.inf} | _scalars(op, base, scalars or {}, run)
    _loop(op, Evaluator(run, base, op), 0)
    return run.results()


class Evaluator:
    """Values of expressions.

    Args:
        run: None where no tensor is in reach (a merge function, a scalar's default).
        values: of the names; loops and assignments add to them.
        op: what is run.
    """

    def __init__(self, run: Run | None, values: dict[str, Any], op: Operator | None = None) -> None:
        self.run, self.values = run, values
        self.mask = op.mask.name if op and op.mask else None
        loops = op.loops if op else ()
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


def _loop(op: Operator, evaluator: Evaluator, depth: int) -> None:
    """Run the loops from this depth on."""
    run = evaluator.run
    assert run is not None
    if depth == len(op.loops):
        _body(op, evaluator)
        return
    loop = op.loops[depth]
    for indices in run.points(loop.axes) if loop.kind == "points" else run.tiles(loop.axes):
        evaluator.values.update(zip(loop.variables, indices, strict=True))
        _loop(op, evaluator, depth + 1)


def _body(op: Operator, evaluator: Evaluator) -> None:
    assert evaluator.run is not None
    for statement in op.body:
        if isinstance(statement, Assign):
            evaluator.assign(statement)
            continue
        value = evaluator.value(statement.value)
        try:
            evaluator.run.contribute(statement.output, evaluator.index(statement.index), value)
        except UserError as error:
            raise error.at(statement.span) from None


def _merger(combine: Combine) -> Merger:
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


def _scalars(
    op: Operator, extents: dict[str, int], given: Mapping[str, float | None], run: Run
) -> dict[str, Tensor]:
    known = [s.name for s in op.scalars]
    for name in given:
        if name not in known:
            raise UserError("dsl-argument", f"no scalar `{name}`", help=closest(name, known))
    found = {}
    for scalar in op.scalars:
        value = given.get(scalar.name)
        if value is None and scalar.default is None:
            raise UserError("dsl-argument", f"no value for scalar `{scalar.name}`")
        if value is None:
            value = Evaluator(None, extents).value(scalar.default)
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
