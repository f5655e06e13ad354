"""Expressions: from libcst's nodes to ours. What is not listed here is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import libcst as cst

from mercurygen.dsl.source import Source
from mercurygen.errors import Span
from mercurygen.ir.expr import Binary, Call, Expr, Index, Mark, Name, Number, Transpose, Unary

MAX_DEPTH = 100

BINARY = {
    cst.Add: "+",
    cst.Subtract: "-",
    cst.Multiply: "*",
    cst.Divide: "/",
    cst.FloorDivide: "//",
    cst.Modulo: "%",
    cst.Power: "**",
    cst.MatrixMultiply: "@",
    cst.BitAnd: "&",
    cst.BitOr: "|",
    cst.BitXor: "^",
    cst.LessThan: "<",
    cst.LessThanEqual: "<=",
    cst.GreaterThan: ">",
    cst.GreaterThanEqual: ">=",
    cst.Equal: "==",
    cst.NotEqual: "!=",
}
UNARY = {cst.Minus: "-", cst.BitInvert: "~"}
HELP = {
    cst.BooleanOperation: "write `&` and `|`, which work element by element",
    cst.UnaryOperation: "`-x` and `~x` are the unary operations",
    cst.IfExp: "write `where(condition, x, y)`",
    cst.Lambda: "name each value with an assignment",
    cst.NamedExpr: "name each value with an assignment of its own",
    cst.ListComp: "write functions of whole tiles",
    cst.GeneratorExp: "write functions of whole tiles",
    cst.Attribute: "`.T` is the only attribute",
    cst.Comparison: "compare two values at a time and join with `&`",
}


class Places:
    """Errors and spans at libcst's nodes.

    Args:
        source: the file.
        positions: libcst's position of each node.
    """

    def __init__(self, source: Source, positions: Mapping[cst.CSTNode, Any]) -> None:
        self.source, self.positions = source, positions

    def span(self, node: cst.CSTNode) -> Span:
        """Where a node stands: its first line."""
        place = self.positions[node]
        start, end = place.start, place.end
        length = end.column - start.column if end.line == start.line else 10**6
        span = self.source.span(start.line, start.column + 1)
        length = min(length, len(span.text) - start.column)
        return self.source.span(start.line, start.column + 1, length)

    def fail(self, slug: str, message: str, node: cst.CSTNode, help: str | None = None) -> NoReturn:
        """Refuse a node."""
        span = self.span(node)
        raise self.source.fail(slug, message, span.line, span.column, span.length, help or "")

    def parts(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The elements of a tuple, or what stands alone."""
        if not isinstance(node, cst.Tuple):
            return [node]
        for element in node.elements:
            if isinstance(element, cst.StarredElement):
                self.fail("dsl-expression", "`*` is not part of the operator language", element)
        return [element.value for element in node.elements]

    def text(self, node: cst.SimpleString) -> str:
        """The characters of a text, which has no escapes: what is read is what it says."""
        if "b" in node.prefix:
            self.fail("dsl-text", "bytes are not part of the operator language", node)
        if "\\" in node.raw_value and "r" not in node.prefix:
            help = 'in a raw text, r"...", it is itself'
            self.fail("dsl-text", "the text holds a backslash, which would escape", node, help)
        return node.raw_value


class Expressions:
    """Converts expressions of one file.

    Args:
        places: for errors and spans.
    """

    def __init__(self, places: Places) -> None:
        self.at = places

    def convert(self, node: cst.BaseExpression, depth: int = 0) -> Expr:
        """The expression as our node; names are not looked up."""
        if depth > MAX_DEPTH:
            self.at.fail("dsl-too-deep", "the expression is nested too deeply", node)
        span, deeper = self.at.span(node), depth + 1
        match node:
            case cst.Name(value=id) if id not in ("None", "True", "False"):
                return Name(id, span)
            case cst.Integer() | cst.Float():
                return self._number(node, span)
            case cst.UnaryOperation(operator=op) if type(op) in UNARY:
                return Unary(UNARY[type(op)], self.convert(node.expression, deeper), span)
            case cst.BinaryOperation(operator=op) if type(op) in BINARY:
                left, right = self.convert(node.left, deeper), self.convert(node.right, deeper)
                return Binary(BINARY[type(op)], left, right, span)
            case cst.Comparison(comparisons=[one]) if type(one.operator) in BINARY:
                left, right = self.convert(node.left, deeper), self.convert(one.comparator, deeper)
                return Binary(BINARY[type(one.operator)], left, right, span)
            case cst.Attribute(attr=cst.Name(value="T")):
                return Transpose(self.convert(node.value, deeper), span)
            case cst.Subscript():
                return self._subscript(node, span, deeper)
            case cst.Call():
                return self._call(node, span, deeper)
        kind = _words(type(node).__name__)
        message = f"{kind} is not part of the operator language"
        self.at.fail("dsl-expression", message, node, HELP.get(type(node)))

    def items(self, node: cst.Subscript, depth: int = 0) -> tuple[Expr | Mark, ...]:
        """What stands between the brackets of a subscript."""
        return tuple(self._item(element.slice, depth) for element in node.slice)

    def _item(self, node: cst.BaseSlice, depth: int) -> Expr | Mark:
        match node:
            case cst.Index(star=None, value=cst.Name(value="None")):
                return Mark("None", self.at.span(node))
            case cst.Index(star=None, value=cst.Ellipsis()):
                return Mark("...", self.at.span(node))
            case cst.Index(star=None, value=value):
                return self.convert(value, depth)
            case cst.Slice(lower=None, upper=None, step=None):
                return Mark(":", self.at.span(node))
        self.at.fail(
            "dsl-expression",
            "this index is not part of the operator language",
            node,
            "a tile is named by its loop variable; a value takes `:`, `None` and `...`",
        )

    def _subscript(self, node: cst.Subscript, span: Span, depth: int) -> Index:
        return Index(self.convert(node.value, depth), self.items(node, depth), span)

    def _call(self, node: cst.Call, span: Span, depth: int) -> Call:
        if not isinstance(node.func, cst.Name):
            self.at.fail(
                "dsl-call",
                "only the functions of mercurygen.dsl can be called, by their names",
                node,
            )
        args: list[Expr] = []
        keywords: list[tuple[str, Expr]] = []
        for arg in node.args:
            if arg.star:
                message = f"`{arg.star}` arguments are not part of the operator language"
                self.at.fail("dsl-expression", message, arg)
            value = self.convert(arg.value, depth)
            if arg.keyword is None:
                args.append(value)
            else:
                keywords.append((arg.keyword.value, value))
        return Call(node.func.value, tuple(args), tuple(keywords), span)

    def _number(self, node: cst.Integer | cst.Float, span: Span) -> Number:
        try:
            text = node.value
            value = int(text, 0) if isinstance(node, cst.Integer) else float(text)
        except ValueError:
            value = math.inf
        if isinstance(value, float) and not math.isfinite(value):
            self.at.fail("dsl-number", "the number is too large", node, "infinity is `inf`")
        return Number(value, span)


def _words(name: str) -> str:
    """NamedExpr -> `a named expr`."""
    spoken = {
        "NamedExpr": "an assignment inside an expression",
        "ListComp": "a comprehension",
        "SetComp": "a comprehension",
        "DictComp": "a comprehension",
        "GeneratorExp": "a comprehension",
        "Lambda": "a lambda",
        "Attribute": "an attribute",
        "BooleanOperation": "`and` or `or`",
        "IfExp": "`if` ... `else`",
        "SimpleString": "a text",
        "ConcatenatedString": "a text",
        "FormattedString": "an f-string",
        "Tuple": "a tuple",
        "Name": "a constant like this",
        "Comparison": "a comparison like this",
        "UnaryOperation": "this operation",
        "BinaryOperation": "this operation",
    }
    return spoken.get(name, "this (" + name + ")")
