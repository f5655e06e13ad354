"""Fixed text of emitted modules: the files of `templates/`, beside the package or inside it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import jinja2

import mercurygen


def folder() -> Path:
    """The templates: inside the package when installed, at the repository's root otherwise."""
    package = Path(mercurygen.__file__).parent
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The one environment: an undefined name is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(name: str, **values) -> str:
    """The text of a template, without blank lines around it."""
    return environment().get_template(f"{name}.py.j2").render(**values).strip("\n")
