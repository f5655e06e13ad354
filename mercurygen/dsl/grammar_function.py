"""The inside of a function: signature, directives, loop nest, body; and of a merge function.

operator  = docstring? (together | combine)* nest* nest
together  = "together(" TENSOR, ... ")"
combine   = "combine(" OUTPUT, ... "by=" RULE ["," "identity=" NUMBERS] ")"
nest      = of a derived tensor, and at last the main one:
            "for" NAME, ... "in" ("points" | "tiles") "(" AXIS, ... "):" (nest | line+)
line      = NAME "=" expression, or OUTPUT "[" index "] =" expression (in a nest before the main
            one the derived tensor stands for OUTPUT)
merge     = docstring? (NAME "=" expression)* "return" expression, ...
"""

from __future__ import annotations

import inspect
import math
from itertools import takewhile
from typing import NoReturn

import libcst as cst

from mercurygen.dsl.grammar_expr import Expressions, Places
from mercurygen.dsl.grammar_signature import SignatureReader
from mercurygen.errors import closest
from mercurygen.ir.expr import Expr, Index, Name, Number, Unary, walk
from mercurygen.ir.operator import (
    Assign,
    AxisDecl,
    Combine,
    Contribute,
    Derivation,
    Loop,
    Merge,
    Operator,
    Statement,
    TensorDecl,
)


class FunctionReader:
    """Reads functions of one file.

    Args:
        at: for errors and spans.
        imported: words of the language that the file imported.
        axes: declared in the file.
        functions: plain functions of the file.
    """

    def __init__(
        self,
        at: Places,
        imported: set[str],
        axes: dict[str, AxisDecl],
        functions: dict[str, cst.FunctionDef],
    ) -> None:
        self.at, self.imported, self.axes, self.functions = at, imported, axes, functions
        self.expressions = Expressions(at)

    def operator(self, node: cst.FunctionDef) -> Operator:
        """An operator, not yet checked beyond the grammar."""
        reader = SignatureReader(self.at, self.imported, self.axes)
        tensors, scalars, mask = reader.read(node)
        statements, doc = self._body(node)
        together: list[tuple[str, ...]] = []
        combines: list[Combine] = []
        heads = list(takewhile(lambda s: not isinstance(s, cst.For), statements[:-1]))
        for statement in heads:
            call = self._directive(statement)
            if call.func.value == "together":
                together.append(self._names(call.args))
            else:
                combines.append(self._combine(call))
        *before, main = statements[len(heads) :]
        derivations = tuple(self._derivation(nest, tensors) for nest in before)
        loops, body = self._nest(main)
        used = {axis for tensor in tensors for axis in tensor.axes}
        used |= {axis for loop in loops for axis in loop.axes} | set(mask.axes if mask else ())
        return Operator(
            node.name.value,
            doc,
            tuple(axis for axis in self.axes.values() if axis.name in used),
            tensors,
            scalars,
            mask,
            tuple(together),
            tuple(combines),
            loops,
            body,
            derivations,
            self.at.source.file,
            self.at.span(node.name),
        )

    def _derivation(self, node: cst.CSTNode, tensors: tuple[TensorDecl, ...]) -> Derivation:
        """A nest before the main one."""
        loops, body = self._nest(node)
        written = next((line.output for line in body if isinstance(line, Contribute)), None)
        if written is None:
            self.at.fail("dsl-derived", "this nest writes no derived tensor", node.iter)
        nodes = [node for line in body for node in walk(line.value)]
        bases = {n.base.id for n in nodes if isinstance(n, Index) and isinstance(n.base, Name)}
        reads = tuple(tensor.name for tensor in tensors if tensor.name in bases)
        return Derivation(written, loops, body, reads, loops[0].span)

    def _body(self, node: cst.FunctionDef) -> tuple[list[cst.CSTNode], str]:
        """(statements behind the docstring, docstring)."""
        statements = self._block(node.body, node)
        doc = ""
        match statements[0]:
            case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() as text)]):
                doc, statements = inspect.cleandoc(self.at.text(text)), statements[1:]
        if not statements:
            self.at.fail("dsl-statement", f"`{node.name.value}` has no body", node.name)
        return statements, doc

    def _block(self, suite: cst.BaseSuite, owner: cst.CSTNode) -> list[cst.CSTNode]:
        if not isinstance(suite, cst.IndentedBlock):
            self.at.fail("dsl-statement", "the body goes on lines of its own", owner)
        return list(suite.body)

    def _statement_error(self, node: cst.CSTNode, help: str) -> NoReturn:
        message = "this statement is not part of the operator language"
        self.at.fail("dsl-statement", message, node, help)

    def _directive(self, node: cst.CSTNode) -> cst.Call:
        match node:
            case cst.SimpleStatementLine(
                body=[cst.Expr(value=cst.Call(func=cst.Name(value=word)) as call)]
            ) if word in ("together", "combine"):
                self._need(word, call)
                return call
        help = "an operator is `together(...)` and `combine(...)` lines, then nests of loops"
        self._statement_error(node, help)

    def _need(self, word: str, node: cst.CSTNode) -> None:
        if word not in self.imported:
            help = f"write `from mercurygen.dsl import {word}`"
            self.at.fail("dsl-unknown-name", f"`{word}` is not imported", node, help)

    def _names(self, args: tuple[cst.Arg, ...] | list[cst.Arg]) -> tuple[str, ...]:
        found = []
        for arg in args:
            if arg.star or arg.keyword or not isinstance(arg.value, cst.Name):
                self.at.fail("dsl-argument", "names go here", arg)
            found.append(arg.value.value)
        return tuple(found)

    def _combine(self, call: cst.Call) -> Combine:
        outputs = self._names([arg for arg in call.args if arg.keyword is None])
        words = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
        for word, arg in words.items():
            if word not in ("by", "identity"):
                help = closest(word, ("by", "identity"))
                self.at.fail("dsl-argument", f"`combine` has no `{word}`", arg, help)
        if "by" not in words or not isinstance(words["by"].value, cst.Name):
            help = "`by=sum`, `by=softmax`, or `by=` a function of this file"
            self.at.fail("dsl-combine", "`combine` needs a rule", call, help)
        rule, span = words["by"].value.value, self.at.span(call)
        if rule in ("sum", "softmax"):
            self._need(rule, words["by"])
            if "identity" in words:
                self.at.fail("dsl-combine", f"`{rule}` has its own identity", words["identity"])
            identity = (0,) * len(outputs) if rule == "sum" else (0, -math.inf)
            return Combine(outputs, rule, identity, None, span)
        if rule not in self.functions:
            help = closest(rule, ["sum", "softmax", *self.functions])
            self.at.fail("dsl-unknown-name", f"no function `{rule}` here", words["by"], help)
        if "identity" not in words:
            help = "add `identity=`, for each output the value that merges to nothing"
            self.at.fail("dsl-combine", f"`{rule}` needs an identity", call, help)
        merge = self._merge(self.functions[rule])
        identity = self._identity(words["identity"].value)
        return Combine(outputs, "user", identity, merge, span)

    def _identity(self, node: cst.CSTNode) -> tuple[int | float, ...]:
        return tuple(self._constant(part) for part in self.at.parts(node))

    def _constant(self, node: cst.CSTNode) -> int | float:
        match self.expressions.convert(node):
            case Number(value=value):
                return value
            case Name(id="inf"):
                self._need("inf", node)
                return math.inf
            case Unary(op="-", operand=Number(value=value)):
                return -value
            case Unary(op="-", operand=Name(id="inf")):
                self._need("inf", node)
                return -math.inf
        self.at.fail("dsl-combine", "an identity is a number, `inf` or `-inf`", node)

    def _nest(self, node: cst.CSTNode) -> tuple[tuple[Loop, ...], tuple[Statement, ...]]:
        loops: list[Loop] = []
        while True:
            if not isinstance(node, cst.For):
                help = "an operator ends with `for ... in points(...)` or `in tiles(...)`; before "
                help += "that nest stand only those of derived tensors"
                self._statement_error(node, help)
            loops.append(self._loop(node))
            inside = self._block(node.body, node.target)
            if not any(isinstance(statement, cst.For) for statement in inside):
                return tuple(loops), self._lines(inside, self.at.positions[node.iter].end.line)
            if len(inside) > 1:
                other = next(s for s in inside if not isinstance(s, cst.For) or s is not inside[0])
                self._statement_error(other, "loops nest perfectly: all lines in the innermost")
            node = inside[0]

    def _loop(self, node: cst.For) -> Loop:
        target, iterated = node.target, node.iter
        if node.orelse or node.asynchronous:
            self._statement_error(node.orelse or node.target, "a loop is a plain `for`")
        variables = self.at.parts(target)
        match iterated:
            case cst.Call(func=cst.Name(value=("points" | "tiles") as kind)):
                self._need(kind, iterated)
                axes = self._names(iterated.args)
            case _:
                message = "loops run over `points(...)` or `tiles(...)` of axes"
                self.at.fail("dsl-loop", message, iterated)
        for variable in variables:
            if not isinstance(variable, cst.Name):
                self.at.fail("dsl-loop", "a loop variable is a name", variable)
        for axis, arg in zip(axes, iterated.args, strict=True):
            if axis not in self.axes:
                help = closest(axis, self.axes)
                self.at.fail("dsl-loop", f"no axis `{axis}`", arg, help)
        if len(variables) != len(axes) or (isinstance(target, cst.Tuple) and len(axes) == 1):
            message = f"{len(variables)} variables for {len(axes)} axes"
            self.at.fail("dsl-loop", message, target, "one variable an axis; one alone is bare")
        names = tuple(variable.value for variable in variables)
        return Loop(kind, names, axes, self.at.span(iterated))

    def _lines(self, nodes: list[cst.CSTNode], above: int) -> tuple[Statement, ...]:
        found = []
        for node in nodes:
            source = self._source(node, above, last=node is nodes[-1])
            source = source.lstrip("\n") if node is nodes[0] else source
            found.append(self._line(node, source))
            above = self.at.positions[node].end.line
        return tuple(found)

    def _line(self, node: cst.CSTNode, source: str) -> Statement:
        match node:
            case cst.SimpleStatementLine(body=[cst.Assign(targets=[one]) as small]):
                span = self.at.span(one.target)
                match one.target:
                    case cst.Name(value=name):
                        return Assign(name, self._value(small.value), source, span)
                    case cst.Subscript(value=cst.Name(value=name)):
                        index = self.expressions.items(one.target)
                        value = self._value(small.value)
                        return Contribute(name, index, value, source, span)
            case cst.SimpleStatementLine(body=[cst.AugAssign()]):
                help = "an assignment to an output is a contribution already: write `=`"
                self._statement_error(node, help)
        self._statement_error(node, "a line is `name = expression` or `output[index] = expression`")

    def _value(self, node: cst.BaseExpression) -> Expr:
        return self.expressions.convert(node)

    def _source(self, node: cst.CSTNode, above: int, last: bool) -> str:
        """Lines of a statement and the comments above it (behind the last one, below it)."""
        lines, place = self.at.source.lines, self.at.positions[node]
        first, end, indent = place.start.line, place.end.line, place.start.column
        while first - 1 > above and lines[first - 2].strip()[:1] in ("", "#"):
            first -= 1
        while last and end < len(lines) and lines[end].startswith(" " * indent + "#"):
            end += 1
        own = [x[indent:] if x[:indent].isspace() else x.lstrip() for x in lines[first - 1 : end]]
        return "\n".join(own)

    def _merge(self, node: cst.FunctionDef) -> Merge:
        parameters = SignatureReader(self.at, self.imported, self.axes).plain(node)
        statements, _ = self._body(node)
        match statements[-1]:
            case cst.SimpleStatementLine(body=[cst.Return(value=cst.BaseExpression() as value)]):
                parts = self.at.parts(value)
            case other:
                self._statement_error(other, "a merge ends with `return`, a value per output")
        body = self._lines(statements[:-1], self.at.positions[node].start.line)
        for line in body:
            if isinstance(line, Contribute):
                raise self.at.source.fail(
                    "dsl-statement", "a merge has no outputs", line.span.line, line.span.column
                )
        place = self.at.positions[node]
        return Merge(
            node.name.value,
            parameters,
            body,
            tuple(self._value(part) for part in parts),
            "\n".join(self.at.source.lines[place.start.line - 1 : place.end.line]),
            self.at.span(node.name),
        )
