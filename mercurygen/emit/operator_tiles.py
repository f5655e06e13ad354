"""Emitted text of what brings the tiles of a user's operator."""

from __future__ import annotations

from mercurygen.emit import operator_home
from mercurygen.emit.operator_nest import Nest
from mercurygen.emit.operator_words import Words
from mercurygen.emit.templates import render
from mercurygen.lower.plan import Gather

_FORWARD = ("next", "previous", "+", "-")  # to whom a ring sends, from whom it receives


def movers(words: Words) -> list[str]:
    """What brings tiles, callers first."""
    loops = words.plan.nest.loops
    texts = []
    rings = [w for x in loops if x.tensors for w in x.walks if not w.direct]
    if rings:
        both, reverse = any(w.both for w in rings), any(w.reverse for w in rings)
        texts.append(render("operator_spare", most=4 if both else 2))
        if not all(w.both for w in rings):
            texts.append(render("operator_ring", reverse=reverse))
        if both:
            texts.append(render("operator_both_ways"))
    texts += _direct(words)
    if rings or any(x.home == "relayed" for x in loops):
        reverse = any(w.reverse for w in words.walks)
        to, source, on, back = ("previous", "next", "-", "+") if reverse else _FORWARD
        texts.append(render("operator_shift", to=to, source=source, on=on, back=back))
        if any(w.both for w in rings):
            texts.append(render("shift_both", some="", unless=""))
    texts += _gathering(words)
    if words.plan.nest.stages:
        texts.append(render("wait"))
    return texts


def _direct(words: Words) -> list[str]:
    """What brings tiles straight from their owners."""
    direct = [w for x in words.plan.nest.loops if x.tensors for w in x.walks if w.direct]
    trimmed, texts = trimmed_axis(words), []
    if direct:
        back, on = ("+", "-") if direct[0].reverse else ("-", "+")
        chunks = words.count(trimmed, words.here(trimmed)) if trimmed else 1
        if trimmed:
            divided = f" // {chunks}" if chunks > 1 else ""
            values = {"chunks": chunks, "divided": divided, "back": back, "on": on}
            texts += [render("operator_direct_trimmed", **values), render("operator_trim")]
        else:
            texts.append(render("operator_direct", back=back, on=on))
    home = operator_home.trimmed_axis(words)
    if trimmed or home:
        texts.append(read(words, trimmed or home))
    return texts


def trimmed_axis(words: Words) -> str | None:
    """The axis along which only what is read of a tile comes."""
    maker = Nest(words)
    return next((x.axis for x in maker.walked if maker.trimmed(x)), None)


def _gathering(words: Words) -> list[str]:
    """What gathers tiles."""
    gathers, loops = words.gathers, words.plan.nest.loops
    if not gathers:
        return []
    runs = any(g.join.outer > 1 for g in gathers)
    values = {"parameter": ", outer: int" if runs else "", "argument": ", outer" if runs else ""}
    ahead = any(isinstance(s, Gather) for x in loops for s in x.walking)
    return [
        *([render("operator_gather_ahead", **values)] if ahead else []),
        render("operator_gather", lead=any(x.leading for x in loops), **values),
        render("operator_join", runs=runs, **_joined_kind(words), **values),
    ]


def _joined_kind(words: Words) -> dict[str, bool]:
    """Which order what gathers join has."""
    axes = {x.axis for x in words.plan.nest.loops if any(isinstance(s, Gather) for s in x.stages)}
    ordered, kind = bool(axes & set(words.program.mask_axes)), words.program.order.kind
    return {"zigzag": ordered and kind == "zigzag", "striped": ordered and kind == "striped"}


def read(words: Words, axis: str) -> str:
    """`_read`: the run of an owner's tile that a rank reads."""
    rows, cols = words.program.mask_axes
    own, other = ("rows", "cols") if axis == rows else ("cols", "rows")
    each, others = own[:-1], other[:-1]
    held = {
        own: words.chunks(axis, {d: who and "owner" for d, who in words.here(axis).items()}),
        other: words.chunks(
            cols if axis == rows else rows,
            {d: who and "reader" for d, who in words.here(cols if axis == rows else rows).items()},
        ),
    }
    return "\n".join(
        [
            "def _read(reader: int, owner: int, length: int) -> slice:",
            '    """The run of chunks, of `length` each, that a rank reads of an owner\'s tile."""',
            f"    rows, cols = {held['rows']}, {held['cols']}",
            f"    read = [i for i, {each} in enumerate({own}) "
            f"if any(_live(row, col, length) for {others} in {other})]",
            "    return slice(read[0], read[-1] + 1) if read else slice(0, 0)",
        ]
    )
