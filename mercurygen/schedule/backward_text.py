"""The section `backward` of a schedule, read."""

from __future__ import annotations

from typing import Literal

from mercurygen.errors import Span, UserError
from mercurygen.ir.lexer import Line
from mercurygen.ir.problem import ATTENTION
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import OrderTokens, Pin, listed
from mercurygen.schedule.schedule import Backward

BACKWARD = "backward"  # the line that begins the section
SAVED = ("q", "k", "v", "out", "lse")  # what gradients are made of, beside that of out


def parse_backward(lines: list[Line], operator: str) -> tuple[Backward, tuple[Span, ...]]:
    """The section, and where its lines stand.

    Args:
        lines: from `backward` on.
        operator: of the header.

    Raises:
        UserError: `no-gradient`, `backward-shares`, `saves-all`, `named-twice`, `syntax`, ...
    """
    head, *body = lines
    head.word(BACKWARD)
    head.end()
    if operator != ATTENTION[0]:
        message = f"{operator} has no gradient: only attention is differentiable"
        raise UserError("no-gradient", message, span=head.span(), help="leave the section out")
    directives, spans, save = [], [head.span()], None
    for line in body:
        if not line.ahead("save"):
            directive = parse_directive(line)
            if isinstance(directive, OrderTokens | Pin):
                raise UserError(
                    "backward-shares",
                    f"`{directive}` in the section backward",
                    span=line.span(),
                    help="order and pins are the forward's: write them above, or leave them out",
                )
            directives.append(directive)
            spans.append(line.span())
        elif save is not None:
            raise UserError("named-twice", "what is saved is said twice", span=line.span())
        else:
            save = _parse_save(line)
    return Backward(tuple(directives), save), tuple(spans)


def _parse_save(line: Line) -> Literal["inner", "outer"]:
    """`save q, k, v, out, lse: inner`."""
    line.word("save")
    start = line.place
    names = line.names("tensor")
    if set(names) != set(SAVED):
        message = f"save {listed(names)}: the backward reads {listed(SAVED)}"
        help = f"write `save {listed(SAVED)}: inner` (after the border), or `outer`"
        raise UserError("saves-all", message, span=line.span(start), help=help)
    line.mark(":")
    found = line.word("inner", "outer")
    line.end()
    return "inner" if found == "inner" else "outer"
