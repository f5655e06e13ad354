"""CommIR along a schedule: before its directives, after each, and completed."""

from __future__ import annotations

from mercurygen.errors import Span, UserError, closest, printable, shorten
from mercurygen.ir.operator import Operator
from mercurygen.ir.program import Program
from mercurygen.schedule.apply import steps
from mercurygen.schedule.schedule import Schedule

BEFORE, COMPLETED = "before", "completed"
History = tuple[tuple[str, Program], ...]


def history(operator: Operator, schedule: Schedule, spans: tuple[Span, ...] = ()) -> History:
    """The program at every point of a schedule.

    Args:
        operator: that the schedule is of.
        schedule: legal.
        spans: where its directives stand, for errors.

    Returns:
        (label, program): "before", then each directive's text, then "completed".

    Raises:
        UserError: the slug of what refuses a directive, at its span.
    """
    first, *middle, last = steps(operator, schedule, spans)
    after = ((str(directive), program) for directive, program in middle)
    return ((BEFORE, first[1]), *after, (COMPLETED, last[1]))


def after(history: History, spans: tuple[Span, ...], wanted: str) -> tuple[str, Program]:
    """The point after one directive.

    Args:
        history: of the schedule.
        spans: where its directives stand.
        wanted: the beginning of a directive's text (the last that fits: nothing is left out), a
            line number of the file, "before" or "completed".

    Raises:
        UserError: `unknown-directive`.
    """
    wanted = " ".join(wanted.split())
    lines = {str(span.line): index for index, span in enumerate(spans, 1)}
    if wanted in lines:
        return history[lines[wanted]]
    for label, program in reversed(history):
        if wanted and label.startswith(wanted):
            return label, program
    labels = [label for label, _ in history]
    if wanted.isdigit():
        message = f"no directive stands on line {shorten(wanted)}"
        help = "lines: " + ", ".join(lines)
    else:
        message = f"the schedule has no directive {shorten(printable(wanted))!r}"
        help = closest(wanted, labels)
    raise UserError("unknown-directive", message, help=help)
