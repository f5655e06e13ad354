"""What an operator's own lines cost: their matrix products, and passes over what else they make."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mercurygen.ir.expr import Binary, Call, Expr, Index, Mark, Name, Number, Transpose, Unary
from mercurygen.ir.operator import Assign, Operator

Shape = tuple[str | None, ...]  # axis of every dimension; None: of one element
REDUCTIONS = ("sum", "max", "min", "mean", "logsumexp")


@dataclass(frozen=True, slots=True)
class Body:
    """The lines of an operator's innermost loop.

    Attributes:
        points: axes of which a pass of the lines has one index: they run that often.
        products: of every `@` the axes that it runs over; 2 FLOP for each combination.
        passes: of everything else the shapes that it reads and writes.
    """

    points: tuple[str, ...]
    products: tuple[tuple[str, ...], ...]
    passes: tuple[Shape, ...]


@lru_cache(maxsize=64)
def body_of(operator: Operator) -> Body:
    """The products and passes of an operator's body."""
    return _Reader(operator).read()


class _Reader:
    """Shapes of all values of the lines, in order."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.ranges: dict[str, str] = {}  # variable of a range of positions: its axis
        points: list[str] = []
        for loop in operator.loops:
            if loop.kind == "tiles":
                self.ranges |= dict(zip(loop.variables, loop.axes, strict=True))
            else:
                points += loop.axes
        self.points = tuple(points)
        self.values: dict[str, Shape] = {}
        self.products: list[tuple[str, ...]] = []
        self.passes: list[Shape] = []

    def read(self) -> Body:
        """All of it."""
        for statement in self.operator.body:
            shape = self.shape(statement.value)
            if isinstance(statement, Assign):
                self.values[statement.target] = shape
        return Body(self.points, tuple(self.products), tuple(self.passes))

    def shape(self, expr: Expr) -> Shape:
        """The shape of a value; what makes it is counted."""
        match expr:
            case Name(id=name):
                return self.values.get(name, ())
            case Number():
                return ()
            case Transpose(base=base):
                return tuple(reversed(self.shape(base)))
            case Index(base=base, items=items):
                return self.indexed(base, items)
            case Binary(op="@", left=left, right=right):
                return self.product(self.shape(left), self.shape(right))
            case Call(function=function, args=args, keywords=keywords):
                return self.called(function, [self.shape(arg) for arg in args], dict(keywords))
            case Binary(left=left, right=right):
                return self.passed([self.shape(left), self.shape(right)])
            case Unary(operand=operand):
                return self.passed([self.shape(operand)])
            case _:
                return ()

    def indexed(self, base: Expr, items: tuple[Expr | Mark, ...]) -> Shape:
        """A tile: a range keeps its axis, one index drops the dimension."""
        mask, known = self.operator.mask, {t.name: t for t in self.operator.tensors}
        name = base.id if isinstance(base, Name) else ""
        if name in known:
            dims = known[name].dims
            kept = [self.ranges.get(getattr(item, "id", "")) for item in items]
            rest = (dim[0] for dim in dims[len(items) :])
            return (*(axis for axis in kept if axis), *rest)
        if mask is not None and name == mask.name:
            return mask.axes
        left = iter(self.shape(base))
        marks = [getattr(item, "text", "") for item in items]
        return tuple(None if mark == "None" else next(left, None) for mark in marks)

    def product(self, left: Shape, right: Shape) -> Shape:
        """A matrix product: rows of one, columns of the other, summed over what is between."""
        axes = (*left, *right[1:])
        self.products.append(tuple(axis for axis in axes if axis))
        return (*left[:-1], *right[1:])

    def called(self, function: str, shapes: list[Shape], keywords: dict[str, Expr]) -> Shape:
        """A function of elements, or one that reduces the last dimension (or all)."""
        if function not in REDUCTIONS:
            return self.passed(shapes)
        self.passes.append(shapes[0])
        return shapes[0][:-1] if "dim" in keywords else ()

    def passed(self, shapes: list[Shape]) -> Shape:
        """An element-wise function: every operand is read, the result written."""
        widest = max(shapes, key=len, default=())
        dims = []
        for index in range(1, len(widest) + 1):
            here = [shape[-index] for shape in shapes if len(shape) >= index]
            dims.append(next((axis for axis in here if axis), None))
        result = tuple(reversed(dims))
        if result:
            self.passes += [*(shape for shape in shapes if shape), result]
        return result
