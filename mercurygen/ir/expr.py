"""Expressions of the operator language: nodes, and the one function that prints them.

A node is immutable and compares by structure; where it stands in its file is not compared.
There is one table of precedences and one printer, so that `x[5 * (i % 2)]` cannot be printed as
`x[5 * i % 2]` anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from mercurygen.errors import Span


def place() -> Span | None:
    """The field of a node that says where it stands; not compared, not shown."""
    return field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Name:
    """A local value, a scalar, a loop variable, an axis (its extent) or `inf`."""

    id: str
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Number:
    """A literal: not negative, finite."""

    value: int | float
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Unary:
    """`-x` or `~x`."""

    op: str
    operand: Expr
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right`: arithmetic, `@`, `&`, `|`, `^`, or one comparison."""

    op: str
    left: Expr
    right: Expr
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `mercurygen.dsl`, with its arguments by position and by name."""

    function: str
    args: tuple[Expr, ...]
    keywords: tuple[tuple[str, Expr], ...] = ()
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Index:
    """`base[items]`: a tile of a tensor or mask, or a value with new axes (`x[:, None]`)."""

    base: Expr
    items: tuple[Expr | Mark, ...]
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Mark:
    """An item of a subscript that is no number: `:` (whole), `None` (a new axis) or `...`."""

    text: str
    span: Span | None = place()


@dataclass(frozen=True, slots=True)
class Transpose:
    """`base.T` of a matrix."""

    base: Expr
    span: Span | None = place()


Expr: TypeAlias = Name | Number | Unary | Binary | Call | Index | Transpose

MARKS = (":", "None", "...")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
UNARY = ("-", "~")
_UNARY, _POWER, _POSTFIX, _ATOM = 7, 8, 9, 10
PRECEDENCE = {
    **{op: 1 for op in COMPARISONS},
    **{"|": 2, "^": 3, "&": 4, "+": 5, "-": 5},
    **{op: 6 for op in ("*", "/", "//", "%", "@")},
    "**": _POWER,
}


def print_expr(expr: Expr | Mark) -> str:
    """The expression as Python text, with the fewest parentheses that keep its structure."""
    return _print(expr)[0]


def walk(expr: Expr | Mark) -> Iterator[Expr | Mark]:
    """The node and every node below it, in the order of the text."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def children(expr: Expr | Mark) -> tuple[Expr | Mark, ...]:
    """The nodes directly below a node, in the order of the text."""
    match expr:
        case Name() | Number() | Mark():
            return ()
        case Unary(operand=operand):
            return (operand,)
        case Binary(left=left, right=right):
            return (left, right)
        case Call(args=args, keywords=keywords):
            return (*args, *(value for _, value in keywords))
        case Index(base=base, items=items):
            return (base, *items)
        case Transpose(base=base):
            return (base,)
        case _:
            assert_never(expr)


def names(expr: Expr) -> tuple[str, ...]:
    """The names that an expression reads, each once, in the order of the text."""
    return tuple(dict.fromkeys(node.id for node in walk(expr) if isinstance(node, Name)))


def _print(expr: Expr | Mark) -> tuple[str, int]:
    """(text, precedence of its outermost operation)."""
    match expr:
        case Name(id=id):
            return id, _ATOM
        case Mark(text=text):
            return text, _ATOM
        case Number(value=value):
            return repr(value), _ATOM
        case Unary(op=op, operand=operand):
            return op + _inside(operand, _UNARY), _UNARY
        case Binary(op=op, left=left, right=right):
            own = PRECEDENCE[op]
            # Comparisons do not chain here; `**` groups to the right and takes `-x` there bare.
            least_left = own + 1 if op == "**" or op in COMPARISONS else own
            least_right = _UNARY if op == "**" else own + 1
            return f"{_inside(left, least_left)} {op} {_inside(right, least_right)}", own
        case Call(function=function, args=args, keywords=keywords):
            words = [print_expr(a) for a in args]
            words += [f"{name}={print_expr(value)}" for name, value in keywords]
            return f"{function}({', '.join(words)})", _POSTFIX
        case Index(base=base, items=items):
            return f"{_base(base)}[{', '.join(print_expr(item) for item in items)}]", _POSTFIX
        case Transpose(base=base):
            return f"{_base(base)}.T", _POSTFIX
        case _:
            assert_never(expr)


def _inside(expr: Expr, least: int) -> str:
    text, precedence = _print(expr)
    return text if precedence >= least else f"({text})"


def _base(expr: Expr) -> str:
    """What stands before `[` or `.T`; `1.T` would be read as the number `1.`."""
    return f"({print_expr(expr)})" if isinstance(expr, Number) else _inside(expr, _POSTFIX)
