"""Options of a walk along a mesh dimension, in schedules and in programs alike."""

from __future__ import annotations

from mercurygen.ir.lexer import Line

WALK_OPTIONS = ("direct", "both", "reverse", "skewed", "prefetch")


def read_options(line: Line) -> tuple[str, ...]:
    """What stands between a dimension and the next `,` or `as`: words, each once; sorted.

    Raises:
        UserError: `syntax`, with the nearest option; `named-twice`.
    """
    found: dict[str, str] = {}
    while not line.done() and not line.ahead(",", "as"):
        word = line.word(*WALK_OPTIONS)
        if word in found:
            raise line.error("named-twice", f"the option {word!r} is given twice")
        number = f" {line.number_('a number of tiles')}" if word == "prefetch" else ""
        found[word] = word + number
    return tuple(sorted(found.values()))
