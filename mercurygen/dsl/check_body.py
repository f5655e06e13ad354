"""The lines of a body: which names, functions and subscripts each may use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, assert_never

from mercurygen.dsl.functions import FUNCTIONS
from mercurygen.dsl.runtime import show_dims
from mercurygen.errors import Span, UserError, closest
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
    print_expr,
)
from mercurygen.ir.names import reserved
from mercurygen.ir.operator import Assign, Contribute, Derivation, Operator, TensorDecl


class Body:
    """Checks the lines of a body one after the other.

    Args:
        imported: words of the language that the file imported.
        taken: every name of the file's top level.
        op: the operator, or None inside a merge function.
        derivation: whose body it is, or None for that of the main nest.
    """

    def __init__(
        self,
        imported: frozenset[str],
        taken: frozenset[str],
        op: Operator | None,
        derivation: Derivation | None = None,
    ) -> None:
        self.imported, self.taken, self.op, self.derivation = imported, taken, op, derivation
        nest = derivation or op
        loops = nest.loops if nest else ()
        pairs = [(v, a) for loop in loops for v, a in zip(loop.variables, loop.axes, strict=True)]
        self.axis_of = dict(pairs)
        self.variable_of = {axis: variable for variable, axis in pairs}
        self.points = {v for loop in loops if loop.kind == "points" for v in loop.variables}
        self.tensors = {t.name: t for t in op.tensors} if op else {}
        self.mask = op.mask.name if op and op.mask else None
        self.numbers = {s.name for s in op.scalars} | {a.name for a in op.axes} if op else set()
        self.local: set[str] = set()
        self.used: set[str] = set()

    def define(self, name: str, span: Span | None) -> None:
        """A local gets a value."""
        refuse_reserved(name, span)
        fixed = self.taken | set(self.axis_of) | set(self.tensors) | self.numbers | {self.mask}
        if name in fixed:
            fail("dsl-duplicate-name", f"`{name}` is not a local: choose another name", span)
        self.local.add(name)

    def statement(self, statement: Assign | Contribute) -> None:
        """One line."""
        self.value(statement.value)
        if isinstance(statement, Assign):
            self.define(statement.target, statement.span)
            return
        name, tensor = statement.output, self.tensors.get(statement.output)
        if self.derivation:
            if tensor is None or tensor.role != "derived":
                help = "outputs are written in the last nest"
                fail("dsl-derived", f"`{name}` is not a derived tensor", statement.span, help)
        elif tensor is None or tensor.role != "output":
            help = closest(name, [t.name for t in self.tensors.values() if t.role == "output"])
            if tensor and tensor.role == "derived":
                help = "derived tensors are written in nests of their own, before the last one"
            fail("dsl-output", f"`{name}` is not an output", statement.span, help)
        self._tile(tensor, statement.index, statement.span)

    def value(self, expr: Expr) -> None:
        """An expression that stands for a tensor or a number."""
        match expr:
            case Name():
                self._name(expr)
            case Number():
                pass
            case Unary(operand=operand):
                self.value(operand)
            case Binary(left=left, right=right):
                self.value(left)
                self.value(right)
            case Transpose(base=base):
                self.value(base)
            case Call():
                self._call(expr)
            case Index(base=Name(id=id)) if id in self.tensors:
                self._load(expr, self.tensors[id])
            case Index(base=Name(id=id)) if id == self.mask:
                self._mask(expr)
            case Index(base=base, items=items):
                self.value(base)
                if not all(isinstance(item, Mark) for item in items):
                    help = "values take `:`, `None` and `...`; to pick by index use `take`"
                    fail("dsl-index", "a value cannot be indexed so", expr.span, help)
            case _:
                assert_never(expr)

    def _name(self, expr: Name) -> None:
        name, span = expr.id, expr.span
        self.used.add(name)
        if name in self.local or name in self.numbers or (name == "inf" and "inf" in self.imported):
            return
        if name in self.axis_of:
            help = f"its global positions are `position({name})`"
            fail("dsl-index", f"`{name}` stands only in subscripts", span, help)
        if name in self.tensors or name == self.mask:
            fail("dsl-index", f"`{name}` needs a subscript: `{name}[...]`", span)
        if name in FUNCTIONS:
            fail("dsl-call", f"`{name}` is a function: call it", span)
        self._unknown(name, span, [*self.local, *self.numbers, *self.axis_of, *self.tensors])

    def _unknown(self, name: str, span: Span | None, known: Iterable[str]) -> NoReturn:
        if name in FUNCTIONS or name in ("inf", "position"):
            help = f"write `from mercurygen.dsl import {name}`"
            fail("dsl-unknown-name", f"`{name}` is not imported", span, help)
        fail("dsl-unknown-name", f"no `{name}` here", span, closest(name, sorted(known)))

    def _call(self, expr: Call) -> None:
        name = expr.function
        if name == "position" and name in self.imported:
            self._no_derivation("positions", expr.span)
            match expr:
                case Call(args=[Name(id=id)], keywords=()) if id in self.axis_of:
                    return
            fail("dsl-argument", "`position` takes one loop variable", expr.span)
        if name not in FUNCTIONS or name not in self.imported:
            self._unknown(name, expr.span, [*FUNCTIONS, "position"])
        parameters = FUNCTIONS[name].parameters
        given = [*parameters[: len(expr.args)], *(word for word, _ in expr.keywords)]
        if len(expr.args) > len(parameters) or sorted(given) != sorted(parameters):
            message = f"write `{name}({', '.join(parameters)})`"
            fail("dsl-argument", f"`{name}` takes {len(parameters)} arguments", expr.span, message)
        values = [*expr.args, *(value for _, value in expr.keywords)]
        for parameter, value in zip(given, values, strict=True):
            if parameter == "dim":
                self._dim(value)
            else:
                self.value(value)

    def _dim(self, expr: Expr) -> None:
        match expr:
            case Number(value=int()) | Unary(op="-", operand=Number(value=int())):
                return
        fail("dsl-argument", "`dim` is an integer, such as -1", expr.span)

    def _load(self, expr: Index, tensor: TensorDecl) -> None:
        self.used.add(tensor.name)
        if tensor.role == "output":
            help = "an output only takes contributions; `combine` merges them"
            fail("dsl-output", f"output `{tensor.name}` cannot be read", expr.span, help)
        if tensor.role == "derived" and self.derivation:
            assert self.op
            order = [derivation.name for derivation in self.op.derivations]
            if tensor.name not in order[: order.index(self.derivation.name)]:
                help = "a nest before this one must write it"
                fail("dsl-derived", f"`{tensor.name}` is not written yet", expr.span, help)
        self._tile(tensor, expr.items, expr.span)

    def _no_derivation(self, what: str, span: Span | None) -> None:
        if self.derivation:
            help = "it is computed from parts of inputs, wherever they are"
            message = f"derived `{self.derivation.name}` cannot depend on {what}"
            fail("dsl-derived", message, span, help)

    def _mask(self, expr: Index) -> None:
        assert self.op and self.op.mask
        self._no_derivation("the mask", expr.span)
        self.used.add(self.op.mask.name)
        axes = self.op.mask.axes
        missing = next((axis for axis in axes if axis not in self.variable_of), None)
        if missing:
            fail("dsl-index", f"mask axis `{missing}` is not looped over", expr.span)
        wanted = ", ".join(self.variable_of[axis] for axis in axes)
        if ", ".join(print_expr(item) for item in expr.items) != wanted:
            fail("dsl-index", f"write `{self.op.mask.name}[{wanted}]`", expr.span)

    def _tile(self, tensor: TensorDecl, items: tuple[Expr | Mark, ...], span: Span | None) -> None:
        """A subscript names the looped axes of each dimension, in their order."""
        wanted = [self._wanted(tensor, dim, span) for dim in tensor.dims]
        least = max((n for n, text in enumerate(wanted, 1) if text != ":"), default=0)
        help = f"`{tensor.name}{show_dims(tensor.dims)}`: write "
        help += f"`{tensor.name}[{', '.join(wanted[: max(least, 1)])}]`"
        if not least <= len(items) <= len(wanted):
            count = f"{least}" if least == len(wanted) else f"{least} to {len(wanted)}"
            message = f"`{tensor.name}` takes {count} indices here, got {len(items)}"
            fail("dsl-index", message, span, help)
        for number, (item, text) in enumerate(zip(items, wanted, strict=False), 1):
            if print_expr(item) != text:
                message = f"index {number} of `{tensor.name}` must be `{text}`"
                fail("dsl-index", message, item.span or span, help)

    def _wanted(self, tensor: TensorDecl, dim: tuple[str, ...], span: Span | None) -> str:
        """`i`, `h * G + g`, or `:` for a dimension of which no axis is looped over."""
        looped = [axis for axis in dim if axis in self.variable_of]
        if not looped:
            return ":"
        if len(dim) == 1:
            return self.variable_of[dim[0]]
        if len(looped) < len(dim) or any(self.variable_of[a] not in self.points for a in dim):
            text = " * ".join(dim)
            help = "loop over each of its axes with `points`"
            fail("dsl-index", f"`{tensor.name}` has a dimension `{text}`", span, help)
        text = self.variable_of[dim[0]]
        for n, axis in enumerate(dim[1:], 1):
            text = f"({text})" if n > 1 else text
            text = f"{text} * {axis} + {self.variable_of[axis]}"
        return text


def refuse_reserved(name: str, span: Span | None) -> None:
    """Refuse a name that an emitted module needs for something else."""
    what = reserved(name)
    if what:
        fail("dsl-reserved-name", f"`{name}` {what}", span, "choose another name")


def fail(slug: str, message: str, span: Span | None, help: str | None = None) -> NoReturn:
    """Refuse."""
    raise UserError(slug, message, span=span, help=help)
