"""The sections of an emitted module's docstring, read back."""

from __future__ import annotations

from itertools import takewhile

_INDENT, _CONTINUED = " " * 4, " " * 19


def schedule_lines(module: str) -> list[tuple[int, str]]:
    """The lines of a module's schedule, each with its number; continued ones joined."""
    found: list[tuple[int, str]] = []
    for number, line in section(module, "Schedule"):
        if line.startswith(_CONTINUED) and found:
            before = found.pop()
            found.append((before[0], joined([before, (number, line)])))
        else:
            found.append((number, " ".join(line.split(None, 1)).strip()))
    return found


def section(module: str, heading: str) -> list[tuple[int, str]]:
    """The indented lines below a heading of a module's docstring, each with its number."""
    lines = module.split("\n")
    if heading not in lines:
        return []
    start = lines.index(heading) + 1
    numbered = enumerate(lines[start:], start + 1)
    return list(takewhile(lambda pair: pair[1].startswith(_INDENT), numbered))


def joined(lines: list[tuple[int, str]]) -> str:
    """One line again; where it was broken behind a hyphen, without a blank."""
    text = ""
    for _, line in lines:
        text += line.strip() if not text or text.endswith("-") else f" {line.strip()}"
    return text
