"""The operators: those that are shipped, and those in a user's file."""

from __future__ import annotations

import functools
from pathlib import Path

from mercurygen.dsl.parse import parse_operator
from mercurygen.dsl.source import MAX_CHARACTERS
from mercurygen.errors import Span, UserError, closest
from mercurygen.ir.operator import Operator

_SHIPPED = {
    name: f"{name}.py"
    for name in ("attention", "attention_backward", "attention_backward_out", "matmul")
}


def shipped() -> tuple[str, ...]:
    """The names of the operators that come with mercurygen, sorted."""
    return tuple(sorted(_SHIPPED))


def load(ref: str) -> Operator:
    """Parse an operator; its file is not executed.

    Args:
        ref: a shipped name, or `path.py::function`.
    """
    file, text = source_of(ref)
    name = ref.rpartition("::")[2]
    try:
        return _parse(text, file, name)
    except UserError as error:
        if error.slug != "dsl-no-operator":
            raise
        message = f"{error.message} in {file}"
        raise UserError("no-such-function", message, help=error.help) from None


def source_of(ref: str) -> tuple[str, str]:
    """(file, text) of an operator; a shipped file is named from the repository's root."""
    path, colons, _ = ref.rpartition("::")
    if not colons:
        if ref not in _SHIPPED:
            hint = closest(ref, shipped()) + "; or path.py::function"
            raise UserError("unknown-operator", f"no operator `{ref}`", help=hint)
        name = _SHIPPED[ref]
        return f"mercurygen/operators/{name}", _read(Path(__file__).with_name(name), name)
    return path, _read(Path(path), path)


@functools.lru_cache(maxsize=64)
def _parse(text: str, file: str, name: str) -> Operator:
    return parse_operator(text, file, name)


def _read(path: Path, file: str) -> str:
    try:
        if not path.is_file():
            raise UserError("no-such-file", f"no file {file}")
        if path.stat().st_size > 4 * MAX_CHARACTERS:  # UTF-8 has up to 4 bytes a character
            raise UserError("dsl-too-large", f"{file} is too large for an operator")
        data = path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace").split("\n")
        line = data.decode("utf-8", "replace").split("\n")[len(before) - 1]
        span = Span(file, len(before), len(before[-1]) + 1, line.rstrip("\r"))
        raise UserError("dsl-character", f"{file} is not UTF-8", span=span) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("no-such-file", f"cannot read {file}: {reason}") from None
