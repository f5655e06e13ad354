"""Emitted text of what a module checks of the machine that it runs on: placement and links."""

from __future__ import annotations

from mercurygen.emit.templates import render
from mercurygen.schedule.expected import Expected, gigabytes


def placed(expected: Expected | None) -> bool:
    """Whether `make_mesh` looks where the ranks are."""
    return expected is not None and expected.hosts is not None


def constants(expected: Expected | None) -> list[str]:
    """HOSTS and SPEEDS."""
    if expected is None:
        return []
    speeds = ", ".join(f'"{dim}": {gigabytes(speed)}e9' for dim, speed in expected.speeds)
    lines = ["# What this schedule was made for: machines, and bytes/s that a rank sends."]
    if expected.hosts is not None:
        lines.append(f"HOSTS = {expected.hosts}")
    return ["\n".join([*lines, f"SPEEDS: dict[str, float] = {{{speeds}}}"])]


def sections(expected: Expected | None, ranks: int) -> list[tuple[str, list[str]]]:
    """The functions that look, under a heading."""
    if expected is None:
        return []
    texts = [render("probe")]
    if expected.hosts is not None:
        texts.insert(0, render("placement", each=ranks // expected.hosts))
    return [("the machine: what this schedule was made for", texts)]
