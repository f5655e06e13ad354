"""A user's lines as text: as they were written, where that is sure to be what was parsed.

What is pasted is read again here, and compared with the expressions that the plan, the proofs and
the interpreter work from. Lines that do not read as those (positions of a parser can be wrong, as
after a backslash at the very start of a file) are printed anew, without their comments.
"""

from __future__ import annotations

import ast

from mercurygen.ir.expr import Expr, Mark, print_expr
from mercurygen.ir.operator import Assign, Contribute, Merge, Operator, Statement


def body_lines(operator: Operator) -> str:
    """The main nest's lines, not indented."""
    return "\n".join(
        line.source if _same(line.source, printed(line)) else printed(line)
        for line in operator.body
    )


def merge_lines(merge: Merge) -> str:
    """A merge function."""
    own = "\n".join(f"    {printed(line)}" for line in merge.body)
    result = ", ".join(print_expr(expr) for expr in merge.result)
    head = f"def {merge.name}({', '.join(merge.parameters)}):"
    doc = '    """Two states as one."""'
    again = "\n".join([head, doc, *([own] if own else []), f"    return {result}"])
    return merge.source if _same(_without_doc(merge.source), _without_doc(again)) else again


def printed(line: Statement) -> str:
    """A line, printed from what was parsed."""
    if isinstance(line, Assign):
        return f"{line.target} = {print_expr(line.value)}"
    assert isinstance(line, Contribute)
    return f"{line.output}[{_items(line.index)}] = {print_expr(line.value)}"


def _items(items: tuple[Expr | Mark, ...]) -> str:
    return ", ".join(print_expr(item) for item in items)


def _without_doc(source: str) -> str:
    """A function without its docstring, as Python itself prints it; nothing if it is not one."""
    tree = _parsed(source)
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return ""
    function = tree.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    return ast.unparse(tree)


def _same(one: str, other: str) -> bool:
    """Whether two texts are the same program."""
    trees = _parsed(one), _parsed(other)
    return None not in trees and bool(other) and ast.dump(trees[0]) == ast.dump(trees[1])


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
