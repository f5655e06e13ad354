"""The line `problem` of a schedule's header: printed, and read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mercurygen.errors import UserError, closest
from mercurygen.ir import documents
from mercurygen.ir.caller import INSIDE, LAYOUTS, PACKED
from mercurygen.ir.lexer import Line
from mercurygen.ir.problem import DTYPES, MASKS, SIZES, Problem, Sizes

# --- printing -------------------------------------------------------------------------------


def show_problem(problem: Problem | Sizes) -> str:
    """Sizes, dtype, mask and layout on one line; not what is as usual, as the value head size."""
    if isinstance(problem, Sizes):
        return " ".join([*_assigned(problem.extents), problem.dtype, *show_mask(problem)])
    same = problem.v_head_dim == problem.head_dim
    names = [name for name in SIZES if name != "v_head_dim" or not same]
    sizes = _assigned((name, getattr(problem, name)) for name in names)
    layout = [problem.layout] if problem.layout not in (INSIDE, PACKED) else []
    packed = [f"documents={documents.show(problem.documents)}"] if problem.documents else []
    keys = [] if problem.seq_kv is None else [f"seq_kv={problem.seq_kv}"]
    align = [f"align={problem.align}"] if problem.align else []
    words = [*sizes[:2], *keys, *sizes[2:], problem.dtype, *show_mask(problem), *align]
    return " ".join([*words, *layout, *packed])


def _assigned(sizes: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{name}={size}" for name, size in sizes]


def show_mask(problem: Problem | Sizes) -> list[str]:
    """The mask as a header says it."""
    if problem.mask == "window":
        return [f"window={problem.window}", *([f"ahead={problem.ahead}"] * bool(problem.ahead))]
    unsaid = isinstance(problem, Sizes) and problem.mask == "full"
    return [] if unsaid else [problem.mask]


# --- parsing --------------------------------------------------------------------------------

WIDTHS = ("window", "ahead", "seq_kv")  # keys up to a query, and after it; keys of their own
_ALIGN = re.compile(r"[a-z-]*", re.ASCII)
_KINDS = {
    **dict.fromkeys(DTYPES, "dtype"),
    **dict.fromkeys(MASKS, "mask"),
    **dict.fromkeys((*LAYOUTS, PACKED), "layout"),
}


def parse_problem(line: Line) -> Problem:
    """The problem of attention, from behind the line's first word.

    Raises:
        UserError: with the place; `unknown-option`, `header-incomplete`, what a `Problem` refuses.
    """
    values: dict[str, int | str] = {}
    while not line.done():
        start = line.place
        name = line.name("a size, a dtype, a mask or a layout")
        key = _KINDS.get(name, name)
        if key in values:
            raise UserError("named-twice", f"{key} is given twice", span=line.span(start))
        if key in SIZES or key in WIDTHS:
            line.mark("=")
            values[key] = line.number_(f"the size {key}")
        elif key == "documents":
            line.mark("=")
            values |= {key: _parse_documents(line), "layout": PACKED}
        elif key == "align":
            line.mark("=")
            found = _ALIGN.match(line.text, line.place)
            values[key], line.place = found.group(), found.end()
        elif key == name:
            known = [*SIZES, *DTYPES, *MASKS, *WIDTHS, "align", *LAYOUTS, "documents"]
            help = closest(name, known)
            raise UserError(
                "unknown-option", f"problem has no {name!r}", span=line.span(start), help=help
            )
        else:
            values[key] = name
    if "window" in values:
        values.setdefault("mask", "window")  # beside another it is refused
    missing = [x for x in (*SIZES, "dtype", "mask") if x not in values and x != "v_head_dim"]
    if missing:
        raise line.error("header-incomplete", "the problem lacks " + ", ".join(missing))
    values.setdefault("v_head_dim", values["head_dim"])
    try:
        return Problem(**values)
    except UserError as error:
        raise error.at(line.span()) from None


def _parse_documents(line: Line) -> tuple[int, ...]:
    """`4096,128x3`: lengths of packed documents."""
    start = line.place
    found = documents.LENGTHS.match(line.text, start)
    line.place = found.end() if found else start
    lengths = documents.read(line.text[start : line.place])
    if lengths is None:
        help = f"at most {documents.MOST}, as in `documents=4096,128x3`"
        message = "expected lengths of documents"
        raise UserError("syntax", message, span=line.span(start), help=help)
    return lengths


def parse_extents(line: Line) -> Sizes:
    """`M=1024 N=1024 float32`, and `causal` or `window=128` where the operator has a mask.

    Which axes there are, and whether it has a mask, shows when the operator is loaded.
    """
    extents: dict[str, int] = {}
    while not line.done():
        start = line.place
        name = line.name("an axis or a dtype")
        if name in DTYPES and not line.ahead("="):
            return _parse_mask_of_sizes(line, extents, name)
        line.mark("=")
        if name in extents:
            raise UserError("named-twice", f"{name} is given twice", span=line.span(start))
        extents[name] = line.number_(f"the extent of {name}")
    raise line.error("header-incomplete", "the problem lacks a dtype", ", ".join(DTYPES))


def _parse_mask_of_sizes(line: Line, extents: dict[str, int], dtype: str) -> Sizes:
    mask, window = "full", None
    if not line.done():
        mask = line.word(*MASKS, "window")
    if mask == "window":
        line.mark("=")
        window = line.number_("the width of the window")
    line.end()
    try:
        return Sizes(tuple(extents.items()), dtype, mask, window)
    except UserError as error:
        raise error.at(line.span()) from None
