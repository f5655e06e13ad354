"""Emitted text of results that go home to the owners of the tiles that they are of."""

from __future__ import annotations

from mercurygen.emit.operator_words import Words


def not_home(words: Words) -> str | None:
    """What of results that go home has no text yet."""
    return "results that go home tile by tile"


def home(nest, loop) -> list[str]:
    """The loop whose results go home."""
    raise AssertionError
