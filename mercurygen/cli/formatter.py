"""black is part of the output format: another version than the pinned one is refused."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import mercurygen
from mercurygen.errors import UserError

_PIN = re.compile(r"black\s*==\s*([0-9][0-9A-Za-z.]*)")


def check_formatter() -> None:
    """Refuse to format with a black of another version than the pinned one.

    Raises:
        UserError: `formatter-version` (exit code 1).
    """
    have, want = installed(), pinned()
    if want is not None and have != want:
        raise UserError(
            "formatter-version",
            f"black {have or 'is not installed'}, but modules are formatted by black {want}",
            note="another version breaks lines elsewhere: every file would differ",
            help=f"pip install black=={want}",
            exit_code=1,
        )


@cache
def pinned() -> str | None:
    """The version that mercurygen's own requirements pin; None if they cannot be found."""
    project = Path(mercurygen.__file__).parent.parent / "pyproject.toml"
    if project.is_file():  # a checkout
        match = _PIN.search(project.read_text(encoding="utf-8"))
        return match[1] if match else None
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("mercurygen") or []
    except PackageNotFoundError:
        return None
    return next((match[1] for match in map(_PIN.match, requirements) if match), None)


def installed() -> str | None:
    """The version of black that is here; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("black")
    except PackageNotFoundError:
        return None
