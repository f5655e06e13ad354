"""The one family of errors that a user can cause.

A user's mistake is a `UserError` with a stable slug; the command line renders it and exits
with 2. Anything else that escapes is a bug in mercurygen. A `Refusal` is the same thing not yet
put into words: the search refuses thousands of schedules and formats none of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a text: one line, and the columns on it that are meant.

    Attributes:
        file: name as the user gave it.
        line: 1-based.
        column: 1-based.
        text: the whole line, without its line end.
        length: number of characters that the carets underline, at least 1.
    """

    file: str
    line: int
    column: int
    text: str
    length: int = 1


class UserError(Exception):
    """A mistake that the user can mend.

    Args:
        slug: stable name of the mistake; tests and documentation refer to it.
        message: one sentence that names the thing and its value.
        span: where it stands, if it stands in a file.
        note: a further fact (the other line of a conflict).
        help: what to do, with the nearest legal value.
        exit_code: 2 for bad use; 1 where the use was fine and nothing fits.
    """

    def __init__(
        self,
        slug: str,
        message: str,
        *,
        span: Span | None = None,
        note: str | None = None,
        help: str | None = None,
        exit_code: int = 2,
    ) -> None:
        super().__init__(f"{slug}: {message}")
        self.slug, self.message = slug, message
        self.span, self.note, self.help = span, note, help
        self.exit_code = exit_code

    def at(self, span: Span | None) -> UserError:
        """The same error, with a place if it has none."""
        return UserError(
            self.slug,
            self.message,
            span=self.span or span,
            note=self.note,
            help=self.help,
            exit_code=self.exit_code,
        )

    def render(self) -> str:
        """The error as the command line prints it; control characters are escaped."""
        lines = [f"error[{self.slug}]: {printable(self.message)}"]
        if self.span is not None:
            lines += _excerpt(self.span)
        if self.note:
            lines.append(f"note: {printable(self.note)}")
        if self.help:
            lines.append("help: " + printable(self.help).replace("\n", "\n      "))
        return "\n".join(lines)


class InternalError(Exception):
    """A broken promise of mercurygen's own: a plan that fails its proof, an unknown node."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a schedule is not legal, not yet in words.

    Attributes:
        slug: counted by the search.
        explain: makes (message, help); called only when somebody reads it.
        rival: the words by which to find an earlier line that it conflicts with, if one does:
            a directive's own word, then what that line names.
    """

    slug: str
    explain: Callable[[], tuple[str, str | None]]
    rival: tuple[str, ...] = ()

    def error(self, span: Span | None = None) -> UserError:
        """The refusal in words."""
        message, help = self.explain()
        return UserError(self.slug, message, span=span, help=help)


def printable(text: str) -> str:
    """The text with every control character but the newline escaped."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shorten(text: str, limit: int = 60) -> str:
    """The text, cut in the middle of nowhere if it is absurdly long."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def closest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A help text: the known name that is nearest, and all of them.

    Args:
        name: what the user wrote.
        known: the legal names.
        otherwise: what to say if no name is near; default: the list alone.
    """
    names = list(known)
    near = difflib.get_close_matches(name[:80], names, n=1)
    listed = "known: " + ", ".join(names)
    if near:
        return f"did you mean `{near[0]}`? {listed}"
    return otherwise or listed


def _excerpt(span: Span) -> list[str]:
    number = str(span.line)
    text, column = printable(span.text), len(printable(span.text[: span.column - 1]))
    if len(text) > 100:  # keep the place in sight
        start = max(0, column - 40)
        text, column = text[start : start + 100], column - start
    carets = "^" * max(1, min(span.length, len(text) - column))
    margin = " " * len(number)
    return [
        f"{margin} --> {printable(span.file)}:{span.line}:{span.column}",
        f" {number} | {text}",
        f" {margin} | {' ' * column}{carets}",
    ]
