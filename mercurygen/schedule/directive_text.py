"""The directives' text, read: one parser each. Their printers are the records' own `str`."""

from __future__ import annotations

from mercurygen.errors import UserError, closest, shorten
from mercurygen.ir.kernel import read_kernel
from mercurygen.ir.layout import ORDERS
from mercurygen.ir.lexer import Line
from mercurygen.ir.names import REPLICATED
from mercurygen.ir.options import read_options
from mercurygen.ir.problem import DTYPES
from mercurygen.schedule.directives import (
    Along,
    Directive,
    Join,
    OrderTokens,
    Parallelize,
    Patch,
    Pin,
    Reorder,
    Replicate,
    Reshard,
    Shard,
    Shift,
    Tile,
)


def parse_directive(line: Line) -> Directive:
    """One line of a schedule after its header.

    Raises:
        UserError: with the place; `unknown-directive`, `syntax`, `named-twice`.
    """
    word = line.name("a directive")
    parser = _PARSERS.get(word)
    if parser is None:
        line.place = 0
        raise UserError(
            "unknown-directive",
            f"unknown directive {shorten(word)!r}",
            span=line.span(),
            help=closest(word, _PARSERS),
        )
    directive = parser(line)
    line.end()
    return directive


def _parse_order(line: Line) -> OrderTokens:
    axis = line.name("an axis")
    line.mark(":")
    kind = line.word(*ORDERS)
    dims = line.names("mesh dimension") if line.take("over") else ()
    return OrderTokens(axis, kind, dims)


def _parse_pin(line: Line) -> Pin:
    tensors = line.names("tensor")
    line.mark(":")
    if line.take(REPLICATED):
        return Pin(tensors, None, ())
    axis = line.name("an axis, or `replicated`")
    line.word("over")
    return Pin(tensors, axis, line.names("mesh dimension"))


def _parse_reshard(line: Line) -> Reshard:
    tensors = line.names("tensor")
    line.mark(":")
    source = _parse_split(line)
    line.word("to")
    target = _parse_split(line)
    line.word("along")
    return Reshard(tensors, source, target, line.name("a mesh dimension"))


def _parse_split(line: Line) -> str | None:
    return None if line.take(REPLICATED) else line.name("an axis, or `replicated`")


def _parse_parallelize(line: Line) -> Parallelize:
    axis = line.name("an axis")
    line.word("over")
    return Parallelize(axis, line.names("mesh dimension"))


def _parse_shard(line: Line) -> Shard:
    tensors = line.names("tensor")
    line.mark(":")
    axis = line.name("an axis")
    line.word("over")
    return Shard(tensors, axis, line.names("mesh dimension"), _parse_as(line))


def _parse_replicate(line: Line) -> Replicate:
    tensors = line.names("tensor")
    line.word("over")
    return Replicate(tensors, line.names("mesh dimension"), _parse_as(line))


def _parse_as(line: Line) -> str | None:
    return line.word(*DTYPES) if line.take("as") else None


def _parse_shift(line: Line) -> Shift:
    tensors = line.names("tensor")
    line.mark(":")
    axis = line.name("an axis")
    line.word("along")
    along = [_parse_along(line)]
    while line.take(","):
        start = line.place
        along.append(_parse_along(line))
        if along[-1].dim in {one.dim for one in along[:-1]}:
            message = f"mesh dimension {along[-1].dim!r} is named twice"
            raise UserError("named-twice", message, span=line.span(start))
    return Shift(tensors, axis, tuple(along), _parse_as(line))


def _parse_along(line: Line) -> Along:
    dim = line.name("a mesh dimension")
    return Along(dim, read_options(line))


def _parse_tile(line: Line) -> Tile:
    axis = line.name("an axis")
    line.word("by")
    return Tile(axis, line.number_("a number of parts"))


def _parse_patch(line: Line) -> Patch:
    body = line.name("a body")
    line.word("with")
    return Patch(body, *read_kernel(line))


_PARSERS = {
    "order": _parse_order,
    "pin": _parse_pin,
    "reshard": _parse_reshard,
    "parallelize": _parse_parallelize,
    "shard": _parse_shard,
    "replicate": _parse_replicate,
    "shift": _parse_shift,
    "tile": _parse_tile,
    "join": lambda line: Join(line.names("an axis")),
    "reorder": lambda line: Reorder(line.names("an axis")),
    "patch": _parse_patch,
}
