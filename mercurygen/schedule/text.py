"""The text of a schedule: printer and parser of `.sched` files.

`parse(show(schedule)) == schedule`, and `show(parse(text)) == text` for formatted text. A file
from somebody else is data: every name in it is checked before anything is made from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from mercurygen.errors import Span, UserError, closest, printable, shorten
from mercurygen.ir.layout import ORDERS
from mercurygen.ir.mesh import Dim, Link, Mesh, check_name
from mercurygen.ir.problem import DTYPES, MASKS, SIZES, Problem
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
from mercurygen.schedule.lexer import Line
from mercurygen.schedule.schedule import Schedule, Target

LARGEST_FILE = 256 * 1024
HEADER = ("operator", "problem", "topology", "group", "tp", "mesh")
SHIFT_OPTIONS = ("direct", "both", "reverse", "skewed", "prefetch")
_LEVEL = re.compile(r"\s*([A-Za-z]\w*)=(\d{1,7}) ([A-Za-z0-9][A-Za-z0-9 .+/_-]*?) (\S+)GB/s(?= |$)")
_TARGET = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]{0,40}) (sha256:[0-9a-f]{16})(?= )")
_OPERATOR = re.compile(r"[A-Za-z0-9_./-]+(\.py::[A-Za-z_]\w*)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed schedule, and where each directive stands."""

    schedule: Schedule
    spans: tuple[Span, ...]


# --- printing -------------------------------------------------------------------------------


def show(schedule: Schedule) -> str:
    """The schedule as a `.sched` file."""
    lines = [f"# {comment}".rstrip() for comment in schedule.comments]
    lines += header_lines(schedule)
    lines += [str(directive) for directive in schedule.directives]
    return "\n".join(lines) + "\n"


def header_lines(schedule: Schedule) -> list[str]:
    """The header: what the schedule is for."""
    target = schedule.target
    group = zip(target.levels, schedule.group, strict=True)
    return [
        f"operator {schedule.operator}",
        f"problem {show_problem(schedule.problem)}",
        f"topology {target.name} {target.digest} {show_levels(target.levels)}",
        "group " + " ".join(f"{level.level}={size}" for level, size in group),
        f"tp {schedule.tp}",
        f"mesh {show_mesh(schedule.mesh)}".rstrip(),
    ]


def show_problem(problem: Problem) -> str:
    """Sizes, dtype and mask on one line; the value head size only where it differs."""
    same = problem.v_head_dim == problem.head_dim
    sizes = [f"{name}={getattr(problem, name)}" for name in SIZES if name != "v_head_dim" or not same]
    return " ".join([*sizes, problem.dtype, problem.mask])


def show_levels(levels: tuple[Link, ...]) -> str:
    """Every level with its link and bandwidth."""
    return " ".join(
        f"{level.level}={level.size} {level.name} {level.bandwidth / 1e9:g}GB/s" for level in levels
    )


def show_mesh(mesh: Mesh) -> str:
    """The dimensions and their sizes."""
    return " ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)


# --- parsing --------------------------------------------------------------------------------


def parse(text: str, file: str = "<schedule>") -> Source:
    """Read a schedule.

    Args:
        text: of the file.
        file: its name, for errors.

    Raises:
        UserError: with the place; `syntax`, `unknown-directive`, `not-a-name`, ...
    """
    _check_text(text, file)
    lines = [Line(file, i, line) for i, line in enumerate(text.split("\n"), 1)]
    comments = []
    for line in lines:
        if not line.text.startswith("#"):
            break
        comments.append(line.text[1:].removeprefix(" ").rstrip())
    bodies = []
    for line in lines:
        code = line.text.split("#", 1)[0]
        if code.strip():
            bodies.append(Line(file, line.number, code.rstrip()))
    header = _parse_header(bodies, file)
    directives, spans = [], []
    for line in bodies[len(HEADER) :]:
        directives.append(_parse_directive(line))
        spans.append(line.span())
    schedule = Schedule(*header, tuple(directives), tuple(comments))
    return Source(schedule, tuple(spans))


def _check_text(text: str, file: str) -> None:
    if len(text) > LARGEST_FILE:
        raise UserError(
            "file-too-large",
            f"{file}: {len(text)} characters are no schedule",
            help=f"at most {LARGEST_FILE}; a schedule has one directive a line",
        )
    for number, line in enumerate(text.split("\n"), 1):
        for column, character in enumerate(line, 1):
            if not character.isprintable() and character != "\t":
                raise UserError(
                    "not-text",
                    f"control character {ascii(character)} in a schedule",
                    span=Span(file, number, column, line),
                )


def _parse_header(lines: list[Line], file: str) -> tuple:
    for index, keyword in enumerate(HEADER):
        if index >= len(lines):
            raise UserError(
                "header-incomplete",
                f"{file}: the header has no line `{keyword} …`",
                help="a schedule begins with " + ", ".join(HEADER),
            )
        line = lines[index]
        if line.name(f"`{keyword}`") != keyword:
            line.place = 0
            raise line.error(
                "header-incomplete",
                f"expected the header's line `{keyword} …`",
                "a schedule begins with " + ", ".join(HEADER),
            )
    operator = _parse_operator(lines[0])
    problem = _parse_problem(lines[1])
    target = _parse_target(lines[2])
    group = _parse_group(lines[3], target)
    tp = lines[4].number_("the number of tensor-parallel ranks")
    lines[4].end()
    if tp < 1:
        raise lines[4].error("size-out-of-range", f"tp {tp}: must be at least 1")
    return operator, problem, target, group, tp, _parse_mesh(lines[5])


def _parse_operator(line: Line) -> str:
    start = line.place
    name = line.rest()
    if not _OPERATOR.fullmatch(name):
        raise UserError(
            "not-a-name",
            f"operator {shorten(printable(name))!r} is not a name or path.py::function",
            span=line.span(start),
        )
    return name


def _parse_problem(line: Line) -> Problem:
    values: dict[str, int | str] = {}
    while not line.done():
        start = line.place
        name = line.name("a size, a dtype or a mask")
        key = "dtype" if name in DTYPES else "mask" if name in MASKS else name
        if key in values:
            raise UserError("named-twice", f"{key} is given twice", span=line.span(start))
        if key in SIZES:
            line.mark("=")
            values[key] = line.number_(f"the size {key}")
        elif key == name:
            help = closest(name, [*SIZES, *DTYPES, *MASKS])
            raise UserError(
                "unknown-option", f"problem has no {name!r}", span=line.span(start), help=help
            )
        else:
            values[key] = name
    missing = [x for x in (*SIZES, "dtype", "mask") if x not in values and x != "v_head_dim"]
    if missing:
        raise line.error("header-incomplete", "the problem lacks " + ", ".join(missing))
    values.setdefault("v_head_dim", values["head_dim"])
    try:
        return Problem(**values)
    except UserError as error:
        raise error.at(line.span()) from None


def _parse_target(line: Line) -> Target:
    match = _TARGET.match(line.text, line.place)
    if not match:
        raise line.error("syntax", "expected a topology's name and `sha256:` with 16 hex digits")
    line.place = match.end()
    levels = []
    while not line.done():
        found = _LEVEL.match(line.text, line.place)
        if not found:
            raise line.error("syntax", "expected a level, as in `gpu=8 NVLink 300GB/s`")
        line.place = found.end()
        name, size, link, bandwidth = found.groups()
        check_name(name, "level")
        try:
            speed = float(bandwidth) * 1e9
        except ValueError:
            speed = 0.0
        if not (isfinite(speed) and 0 < speed < 1e15) or int(size) < 1 or len(link) > 60:
            raise UserError(
                "size-out-of-range",
                f"level {name}={size} {link} {bandwidth}GB/s is not a level",
                span=line.span(found.start()),
            )
        levels.append(Link(name, int(size), link, speed))
    if not levels or len({x.level for x in levels}) < len(levels):
        raise UserError("syntax", "a topology needs levels, each once", span=line.span())
    return Target(match.group(1), match.group(2), tuple(levels))


def _parse_sizes(line: Line, what: str) -> list[tuple[str, int]]:
    sizes = []
    while not line.done():
        name = line.name(what)
        line.mark("=")
        sizes.append((name, line.number_(f"the size of {name}")))
    return sizes


def _parse_group(line: Line, target: Target) -> tuple[int, ...]:
    sizes = _parse_sizes(line, "a level")
    levels = [level.level for level in target.levels]
    if [name for name, _ in sizes] != levels:
        raise UserError(
            "group-not-of-topology",
            "the group must give every level of the topology, in its order",
            span=line.span(),
            help="levels: " + ", ".join(levels),
        )
    for (name, size), level in zip(sizes, target.levels, strict=True):
        check_group(name, size, level.size, line.span())
    return tuple(size for _, size in sizes)


def check_group(name: str, size: int, have: int, span: Span | None = None) -> None:
    """Refuse a group that a level does not hold, or that cannot be laid beside others of it.

    Raises:
        UserError: `group-not-of-topology`.
    """
    if size < 1 or have % size:
        legal = [str(n) for n in range(1, min(have, 4096) + 1) if have % n == 0]
        raise UserError(
            "group-not-of-topology",
            f"a group of {name}={size} does not divide the level {name}={have}",
            span=span,
            help="legal: " + ", ".join(legal),
        )


def _parse_mesh(line: Line) -> Mesh:
    dims = []
    for name, size in _parse_sizes(line, "a dimension"):
        try:
            check_name(name, "mesh dimension")
        except UserError as error:
            raise error.at(line.span()) from None
        if not 2 <= size <= 2**20 or name in {dim.name for dim in dims}:
            raise UserError(
                "mesh-dimension",
                f"mesh dimension {name}={size}: each is named once and has 2 ranks or more",
                span=line.span(),
            )
        dims.append(Dim(name, size))
    return Mesh(tuple(dims))


# --- directives -----------------------------------------------------------------------------


def _parse_directive(line: Line) -> Directive:
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
    if line.take("replicated"):
        return Pin(tensors, None, ())
    axis = line.name("an axis, or `replicated`")
    line.word("over")
    return Pin(tensors, axis, line.names("mesh dimension"))


def _parse_reshard(line: Line) -> Reshard:
    tensors = line.names("tensor")
    line.mark(":")
    source = line.name("an axis")
    line.word("to")
    target = line.name("an axis")
    line.word("along")
    return Reshard(tensors, source, target, line.name("a mesh dimension"))


def _parse_parallelize(line: Line) -> Parallelize:
    axis = line.name("an axis")
    line.word("over")
    return Parallelize(axis, line.names("mesh dimension"))


def _parse_shard(line: Line) -> Shard:
    tensors = line.names("tensor")
    line.mark(":")
    axis = line.name("an axis")
    line.word("over")
    return Shard(tensors, axis, line.names("mesh dimension"))


def _parse_replicate(line: Line) -> Replicate:
    tensors = line.names("tensor")
    line.word("over")
    return Replicate(tensors, line.names("mesh dimension"))


def _parse_shift(line: Line) -> Shift:
    tensors = line.names("tensor")
    line.mark(":")
    axis = line.name("an axis")
    line.word("along")
    along = [_parse_along(line)]
    while line.take(","):
        along.append(_parse_along(line))
    return Shift(tensors, axis, tuple(along))


def _parse_along(line: Line) -> Along:
    dim = line.name("a mesh dimension")
    options = []
    while not line.done() and not line.text[line.place :].lstrip().startswith(","):
        option = line.word(*SHIFT_OPTIONS)
        if option == "prefetch":
            option = f"prefetch {line.number_('a number of tiles')}"
        options.append(option)
    return Along(dim, tuple(sorted(set(options))))


def _parse_tile(line: Line) -> Tile:
    axis = line.name("an axis")
    line.word("by")
    return Tile(axis, line.number_("a number of parts"))


def _parse_patch(line: Line) -> Patch:
    body = line.name("a body")
    line.word("with")
    return Patch(body, line.name("a kernel"))


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
