"""What must hold of an operator beyond the grammar: names, subscripts, outputs, combines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, assert_never

from mercurygen.dsl.functions import FUNCTIONS
from mercurygen.dsl.runtime import show_dims, solvable
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
from mercurygen.ir.operator import Assign, Combine, Contribute, Merge, Operator, TensorDecl


def check_operator(op: Operator, imported: frozenset[str], taken: frozenset[str]) -> None:
    """Refuse an operator that does not hold together.

    Args:
        op: as parsed.
        imported: words of the language that the file imported.
        taken: every name of the file's top level.
    """
    _check_names(op, taken)
    _check_tensors(op)
    _check_together(op)
    for combine in op.combines:
        _check_combine(op, combine)
        if combine.merge:
            check_merge(combine.merge, imported, taken)
    body = Body(imported, taken, op)
    for statement in op.body:
        body.statement(statement)
    _check_outputs(op)
    for name, span in [(t.name, t.span) for t in op.inputs] + [
        (s.name, s.span) for s in op.scalars
    ]:
        if name not in body.used:
            _fail("dsl-unused", f"`{name}` is never read", span)
    if op.mask and op.mask.name not in body.used:
        _fail("dsl-unused", f"mask `{op.mask.name}` is never read", op.mask.span)


def check_merge(merge: Merge, imported: frozenset[str], taken: frozenset[str]) -> None:
    """Refuse a merge function that reads what it has not got."""
    body = Body(imported, taken, None)
    for name in merge.parameters:
        body.define(name, merge.span)
    for statement in merge.body:
        body.statement(statement)
    for expr in merge.result:
        body.value(expr)


class Body:
    """Checks the lines of a body one after the other.

    Args:
        imported: words of the language that the file imported.
        taken: every name of the file's top level.
        op: the operator, or None inside a merge function.
    """

    def __init__(
        self, imported: frozenset[str], taken: frozenset[str], op: Operator | None
    ) -> None:
        self.imported, self.taken, self.op = imported, taken, op
        loops = op.loops if op else ()
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
        fixed = self.taken | set(self.axis_of) | set(self.tensors) | self.numbers | {self.mask}
        if name in fixed:
            _fail("dsl-duplicate-name", f"`{name}` is not a local: choose another name", span)
        self.local.add(name)

    def statement(self, statement: Assign | Contribute) -> None:
        """One line."""
        self.value(statement.value)
        if isinstance(statement, Assign):
            self.define(statement.target, statement.span)
            return
        tensor = self.tensors.get(statement.output)
        if tensor is None or tensor.role != "output":
            outputs = [t.name for t in self.tensors.values() if t.role == "output"]
            help = closest(statement.output, outputs)
            _fail("dsl-output", f"`{statement.output}` is not an output", statement.span, help)
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
                    _fail("dsl-index", "a value cannot be indexed so", expr.span, help)
            case _:
                assert_never(expr)

    def _name(self, expr: Name) -> None:
        name, span = expr.id, expr.span
        self.used.add(name)
        if name in self.local or name in self.numbers or (name == "inf" and "inf" in self.imported):
            return
        if name in self.axis_of:
            help = f"its global positions are `position({name})`"
            _fail("dsl-index", f"`{name}` stands only in subscripts", span, help)
        if name in self.tensors or name == self.mask:
            _fail("dsl-index", f"`{name}` needs a subscript: `{name}[...]`", span)
        if name in FUNCTIONS:
            _fail("dsl-call", f"`{name}` is a function: call it", span)
        self._unknown(name, span, [*self.local, *self.numbers, *self.axis_of, *self.tensors])

    def _unknown(self, name: str, span: Span | None, known: Iterable[str]) -> NoReturn:
        if name in FUNCTIONS or name in ("inf", "position"):
            help = f"write `from mercurygen.dsl import {name}`"
            _fail("dsl-unknown-name", f"`{name}` is not imported", span, help)
        _fail("dsl-unknown-name", f"no `{name}` here", span, closest(name, sorted(known)))

    def _call(self, expr: Call) -> None:
        name = expr.function
        if name == "position" and name in self.imported:
            match expr:
                case Call(args=[Name(id=id)], keywords=()) if id in self.axis_of:
                    return
            _fail("dsl-argument", "`position` takes one loop variable", expr.span)
        if name not in FUNCTIONS or name not in self.imported:
            self._unknown(name, expr.span, [*FUNCTIONS, "position"])
        parameters = FUNCTIONS[name].parameters
        given = [*parameters[: len(expr.args)], *(word for word, _ in expr.keywords)]
        if len(expr.args) > len(parameters) or sorted(given) != sorted(parameters):
            message = f"write `{name}({', '.join(parameters)})`"
            _fail("dsl-argument", f"`{name}` takes {len(parameters)} arguments", expr.span, message)
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
        _fail("dsl-argument", "`dim` is an integer, such as -1", expr.span)

    def _load(self, expr: Index, tensor: TensorDecl) -> None:
        self.used.add(tensor.name)
        if tensor.role == "output":
            help = "an output only takes contributions; `combine` merges them"
            _fail("dsl-output", f"output `{tensor.name}` cannot be read", expr.span, help)
        self._tile(tensor, expr.items, expr.span)

    def _mask(self, expr: Index) -> None:
        assert self.op and self.op.mask
        self.used.add(self.op.mask.name)
        axes = self.op.mask.axes
        missing = next((axis for axis in axes if axis not in self.variable_of), None)
        if missing:
            _fail("dsl-index", f"mask axis `{missing}` is not looped over", expr.span)
        wanted = ", ".join(self.variable_of[axis] for axis in axes)
        if ", ".join(print_expr(item) for item in expr.items) != wanted:
            _fail("dsl-index", f"write `{self.op.mask.name}[{wanted}]`", expr.span)

    def _tile(self, tensor: TensorDecl, items: tuple[Expr | Mark, ...], span: Span | None) -> None:
        """A subscript names the looped axes of each dimension, in their order."""
        wanted = [self._wanted(tensor, dim, span) for dim in tensor.dims]
        least = max((n for n, text in enumerate(wanted, 1) if text != ":"), default=0)
        help = f"`{tensor.name}{show_dims(tensor.dims)}`: write "
        help += f"`{tensor.name}[{', '.join(wanted[: max(least, 1)])}]`"
        if not least <= len(items) <= len(wanted):
            count = f"{least}" if least == len(wanted) else f"{least} to {len(wanted)}"
            message = f"`{tensor.name}` takes {count} indices here, got {len(items)}"
            _fail("dsl-index", message, span, help)
        for number, (item, text) in enumerate(zip(items, wanted, strict=False), 1):
            if print_expr(item) != text:
                message = f"index {number} of `{tensor.name}` must be `{text}`"
                _fail("dsl-index", message, item.span or span, help)

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
            _fail("dsl-index", f"`{tensor.name}` has a dimension `{text}`", span, help)
        text = self.variable_of[dim[0]]
        for n, axis in enumerate(dim[1:], 1):
            text = f"({text})" if n > 1 else text
            text = f"{text} * {axis} + {self.variable_of[axis]}"
        return text


def _check_names(op: Operator, taken: frozenset[str]) -> None:
    seen: set[str] = set()
    own = [(t.name, t.span) for t in op.tensors] + [(s.name, s.span) for s in op.scalars]
    own += [(op.mask.name, op.mask.span)] if op.mask else []
    own += [(variable, loop.span) for loop in op.loops for variable in loop.variables]
    for name, span in own:
        if name in taken or name in seen:
            _fail("dsl-duplicate-name", f"`{name}` is taken", span)
        seen.add(name)
    for axis in set(op.loop_axes):
        if op.loop_axes.count(axis) > 1:
            loop = [loop for loop in op.loops if axis in loop.axes][-1]
            _fail("dsl-loop", f"`{axis}` is looped over twice", loop.span)


def _check_tensors(op: Operator) -> None:
    for what, found in (("input", op.inputs), ("output", op.outputs)):
        if not found:
            _fail("dsl-parameter", f"`{op.name}` has no {what}", op.span)
    known = solvable(op.inputs)
    for axis in op.axes:
        if axis.name not in known:
            help = "an input must have a dimension from which it follows"
            _fail("dsl-unbound-axis", f"no input gives the extent of `{axis.name}`", op.span, help)


def _check_together(op: Operator) -> None:
    seen: set[str] = set()
    for group in op.together:
        for name in group:
            if name not in {t.name for t in op.tensors}:
                help = closest(name, [t.name for t in op.tensors])
                _fail("dsl-together", f"no tensor `{name}`", op.span, help)
            if name in seen:
                _fail("dsl-together", f"`{name}` stands in `together` twice", op.span)
            seen.add(name)
        if len(group) < 2 or len({op.tensor(name).role for name in group}) > 1:
            message = "`together` takes two or more inputs, or two or more outputs"
            _fail("dsl-together", message, op.span)


def _check_combine(op: Operator, combine: Combine) -> None:
    outputs = [t.name for t in op.outputs]
    for name in combine.outputs:
        if name not in outputs:
            help = closest(name, outputs)
            _fail("dsl-combine", f"`{name}` is not an output", combine.span, help)
        if sum(c.outputs.count(name) for c in op.combines) > 1:
            _fail("dsl-combine", f"`{name}` is combined twice", combine.span)
        if not op.reduced_axes(name):
            message = f"`{name}` carries every axis that is looped over: nothing to combine"
            _fail("dsl-combine", message, combine.span)
    if len({frozenset(op.reduced_axes(name)) for name in combine.outputs}) != 1:
        message = "outputs that are combined as one must carry the same looped axes"
        _fail("dsl-combine", message, combine.span)
    for name, value in zip(combine.outputs, combine.identity, strict=False):
        whole = isinstance(value, int) and abs(value) < 2**63
        if op.tensor(name).dtype == "integer" and not whole:
            _fail("dsl-combine", f"{value} is no identity of integers `{name}`", combine.span)
    if combine.kind == "softmax":
        _check_softmax(op, combine)
    elif combine.merge:
        n, merge = len(combine.outputs), combine.merge
        counts = (len(merge.parameters), len(merge.result), len(combine.identity))
        if counts != (2 * n, n, n):
            message = f"for {n} outputs `{merge.name}` takes {2 * n} parameters and returns {n}"
            help = f"it takes {counts[0]} and returns {counts[1]}; {counts[2]} identities"
            _fail("dsl-combine", message, combine.span, help)


def _check_softmax(op: Operator, combine: Combine) -> None:
    if len(combine.outputs) != 2:
        _fail("dsl-combine", "`softmax` combines (out, lse)", combine.span)
    out, lse = (op.tensor(name) for name in combine.outputs)
    single = {a for loop in op.loops if loop.kind == "points" for a in loop.axes}
    tiled = [[dim for dim in t.dims if not set(dim) <= single] for t in (out, lse)]
    if tiled[0][:-1] != tiled[1] or "integer" in (out.dtype, lse.dtype):
        message = f"`{lse.name}` must have the tiled dimensions of `{out.name}` but the last"
        _fail("dsl-combine", message, combine.span)


def _check_outputs(op: Operator) -> None:
    for tensor in op.outputs:
        written = [s for s in op.body if isinstance(s, Contribute) and s.output == tensor.name]
        if not written:
            _fail("dsl-output", f"output `{tensor.name}` is never written", tensor.span)
        if len(written) > 1:
            _fail("dsl-output", f"`{tensor.name}` is written twice in one tile", written[1].span)
        reduced = op.reduced_axes(tensor.name)
        if reduced and op.combine_of(tensor.name) is None:
            message = f"`{tensor.name}` does not carry {', '.join(reduced)}, and no combine merges"
            help = f"write `combine({tensor.name}, by=sum)`, or what merges two contributions"
            _fail("dsl-combine-missing", message, tensor.span, help)


def _fail(slug: str, message: str, span: Span | None, help: str | None = None) -> NoReturn:
    raise UserError(slug, message, span=span, help=help)
