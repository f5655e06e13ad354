"""From the text of a file to an operator, without executing any of it."""

from __future__ import annotations

from mercurygen.dsl.source import Source
from mercurygen.ir.expr import Expr
from mercurygen.ir.operator import Operator


def parse_operator(text: str, file: str, name: str | None = None) -> Operator:
    """Parse one operator of a file.

    Args:
        text: of the whole file; it is never executed or imported.
        file: its name in errors.
        name: of the operator; None if the file holds just one.

    Raises:
        UserError: with a slug `dsl-...` and a place, for whatever is not in the language.
    """
    source = Source(text, file)
    source.check()
    from mercurygen.dsl.grammar import File  # libcst takes 0.15 s to import

    try:
        return File(source).operator(name)
    except RecursionError:
        raise source.fail("dsl-too-deep", "the file is nested too deeply", 1, 1) from None


def parse_expression(text: str) -> Expr:
    """Parse one expression, whatever the names in it; the inverse of `print_expr`."""
    source = Source(text, "expression")
    source.check()
    from mercurygen.dsl.grammar import parse_expression

    try:
        return parse_expression(source)
    except RecursionError:
        raise source.fail("dsl-too-deep", "the expression is nested too deeply", 1, 1) from None
