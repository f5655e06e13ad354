"""A schedule from a file: a `.sched`, or what a module's docstring says that it was made from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from mercurygen.cli.docstring import joined, schedule_lines, section
from mercurygen.cli.files import LARGEST_MODULE, LARGEST_SCHEDULE, read_text, shown
from mercurygen.emit.header import WHY
from mercurygen.emit.module import FIRST_LINE
from mercurygen.errors import Span, UserError
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse

_COMMAND = re.compile(r"#   mercurygen emit --schedule ([A-Za-z_][A-Za-z0-9_]{0,99})\.sched")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A schedule and where it stands.

    Attributes:
        path: of the file.
        name: of the module: what its second line says, else the file's stem.
        schedule: with all comments at its head.
        spans: of the directives.
        module: the text, if the file is a module.
    """

    path: Path
    name: str
    schedule: Schedule
    spans: tuple[Span, ...]
    module: str | None = None


def is_file(reference: str) -> bool:
    """Whether `--schedule` names a file, not a design."""
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return reference.endswith(".sched") or any(one in reference for one in separators)


def load(path: Path) -> Loaded:
    """Read a `.sched` file, or the schedule of a module.

    Raises:
        UserError: with the place.
    """
    if path.suffix == ".py":
        return _load_module(path)
    text = read_text(path, LARGEST_SCHEDULE).replace("\r\n", "\n")
    if text.startswith("\ufeff"):
        raise UserError(
            "not-text",
            f"{shown(path)} begins with a byte order mark",
            help="save it as UTF-8 without BOM (signature)",
        )
    source = parse(text, shown(path))
    schedule = replace(source.schedule, comments=_comments(text))
    return Loaded(path, path.stem, schedule, source.spans)


def _comments(text: str) -> tuple[str, ...]:
    """Every comment line; those further down move to the head, where the printer has them.

    A comment behind a directive is moved too.
    """
    marked = (line.partition("#") for line in text.split("\n"))
    return tuple(body.removeprefix(" ").rstrip() for _, mark, body in marked if mark)


def _load_module(path: Path) -> Loaded:
    text = read_text(path, LARGEST_MODULE)
    lines = schedule_lines(text)
    if not text.startswith(FIRST_LINE + "\n") or not lines:
        raise UserError(
            "not-a-module",
            f"{shown(path)} is not a module that mercurygen emitted",
            help="its first line and the section `Schedule` of its docstring say what it is",
        )
    padded, at = [], dict(lines)
    for number in range(1, max(at) + 1):  # each line where it stands, for errors
        padded.append(at.get(number, ""))
    source = parse("\n".join(padded), shown(path))
    said = joined(section(text, "Why this schedule"))
    schedule = replace(source.schedule, comments=(WHY + said,) if said else ())
    match = _COMMAND.fullmatch(text.split("\n", 2)[1])
    return Loaded(path, match[1] if match else path.stem, schedule, source.spans, text)
