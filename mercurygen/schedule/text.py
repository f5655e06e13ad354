"""The text of a schedule: printer and parser of `.sched` files.

`parse(show(schedule)) == schedule`, and `show(parse(text)) == text` for formatted text. A file
from somebody else is data: every name in it is checked before anything is made from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from mercurygen.errors import Span, UserError, printable, shorten
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Dim, Link, Mesh, check_name
from mercurygen.ir.problem import ATTENTION
from mercurygen.schedule.backward_text import BACKWARD, SAVED, parse_backward
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import listed
from mercurygen.schedule.expected import EXPECT, parse_expected, show_expected
from mercurygen.schedule.problem_text import parse_extents, parse_problem, show_problem
from mercurygen.schedule.schedule import Schedule, Target

LARGEST_FILE = 256 * 1024
MOST_LEVELS = 6  # as of a topology
HEADER = ("operator", "problem", "topology", "group", "tp", "mesh")
_LEVEL = re.compile(r"\s*([A-Za-z]\w*)=(\d{1,7}) ([A-Za-z0-9][A-Za-z0-9 .+/_-]*?) (\S+)GB/s(?= |$)")
_TARGET = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]{0,40}) (sha256:[0-9a-f]{16})(?= )")
_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,400})?", re.ASCII)
OPERATOR = re.compile(r"[A-Za-z0-9_./-]+(\.py::[A-Za-z_]\w*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed schedule, and where each directive stands.

    Attributes:
        schedule: what it says.
        spans: of the directives; then of the line `backward` and the directives below it.
    """

    schedule: Schedule
    spans: tuple[Span, ...]


# --- printing -------------------------------------------------------------------------------


def show(schedule: Schedule) -> str:
    """The schedule as a `.sched` file."""
    lines = [f"# {comment}".rstrip() for comment in schedule.comments]
    lines += header_lines(schedule)
    lines += body_lines(schedule)
    return "\n".join(lines) + "\n"


def body_lines(schedule: Schedule) -> list[str]:
    """The directives, and those of the section `backward`."""
    lines = [str(directive) for directive in schedule.directives]
    if schedule.backward is not None:
        lines += [BACKWARD, *(str(directive) for directive in schedule.backward.directives)]
        if schedule.backward.save is not None:
            lines.append(f"save {listed(SAVED)}: {schedule.backward.save}")
    return lines


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
        *([show_expected(schedule.expected)] if schedule.expected else []),
    ]


def show_levels(levels: tuple[Link, ...]) -> str:
    """Every level with its link and bandwidth."""
    return " ".join(
        f"{level.level}={level.size} {level.name} {show_speed(level.bandwidth)}GB/s"
        for level in levels
    )


def show_speed(bandwidth: float) -> str:
    """Bytes per second in GB/s, all digits, as a plain decimal number."""
    text = f"{Decimal(repr(float(bandwidth))).scaleb(-9):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
    rest, expected = bodies[len(HEADER) :], None
    if rest and rest[0].ahead(EXPECT):
        expected, rest = parse_expected(rest[0], header[-1]), rest[1:]
    at = next((i for i, line in enumerate(rest) if line.ahead(BACKWARD)), len(rest))
    backward, more = parse_backward(rest[at:], header[0]) if rest[at:] else (None, ())
    directives = tuple(map(parse_directive, rest[:at]))
    spans = (*(line.span() for line in rest[:at]), *more)
    schedule = Schedule(*header, directives, tuple(comments), backward, expected)
    return Source(schedule, spans)


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
    problem = (parse_problem if _is_attention(operator) else parse_extents)(lines[1])
    target = _parse_target(lines[2])
    group = _parse_group(lines[3], target)
    tp = lines[4].number_("the number of tensor-parallel ranks")
    lines[4].end()
    if tp < 1:
        message = f"tp {tp}: must be at least 1"
        raise UserError("size-out-of-range", message, span=lines[4].span())
    return operator, problem, target, group, tp, _parse_mesh(lines[5])


def _is_attention(operator: str) -> bool:
    """Whether the problem is attention's; a copy of its file, `path.py::attention`, too."""
    return operator.rpartition("::")[2] in ATTENTION


def _parse_operator(line: Line) -> str:
    start = line.place
    name = line.rest()
    if not OPERATOR.fullmatch(name):
        raise UserError(
            "not-a-name",
            f"operator {shorten(printable(name))!r} is not a name or path.py::function",
            span=line.span(start),
        )
    return name


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
        _named(line, name, "level")
        speed = float(f"{bandwidth}e9") if _DECIMAL.fullmatch(bandwidth) else 0.0
        if not 0 < speed < 1e15 or int(size) < 1 or len(link) > 60:
            raise UserError(
                "size-out-of-range",
                f"level {name}={size} {link} {bandwidth}GB/s is not a level",
                span=line.span(found.start()),
            )
        levels.append(Link(name, int(size), link, speed))
    if len(levels) > MOST_LEVELS:
        message = f"{len(levels)} levels: a topology has at most {MOST_LEVELS}"
        raise UserError("topology-levels", message, span=line.span())
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
        _named(line, name, "mesh dimension")
        if not 2 <= size <= 2**20 or name in {dim.name for dim in dims}:
            raise UserError(
                "mesh-dimension",
                f"mesh dimension {name}={size}: each is named once and has 2 ranks or more",
                span=line.span(),
            )
        dims.append(Dim(name, size))
    return Mesh(tuple(dims))


def _named(line: Line, name: str, what: str) -> None:
    try:
        check_name(name, what)
    except UserError as error:
        raise error.at(line.span()) from None
