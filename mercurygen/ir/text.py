"""The text of CommIR: printer and parser.

`parse(show(program)) == program`, and `show(parse(text)) == text` for formatted text, at every
stage of a schedule. The words are the schedule's own. After what the operator, the problem and the
mesh are, the lines stand in the order in which things happen: reshards of inputs, the nest
(indented, outermost first) around the body, reshards of outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from mercurygen.errors import Span, UserError
from mercurygen.ir.lexer import Line
from mercurygen.ir.program import SEQUENCE, Axis, BorderStep, Program, Tensor
from mercurygen.ir.text_reader import MOVES, Reader

LARGEST_TEXT = 64 * 1024


# --- printing -------------------------------------------------------------------------------


def show(program: Program) -> str:
    """The program as text."""
    mesh = " ".join(f"{dim.name}={dim.size}" for dim in program.mesh.dims)
    lines = [
        f"program {program.operator}",
        f"mesh {mesh}".rstrip(),
        f"dtype {program.dtype}",
        *(_show_axis(program, axis) for axis in program.axes),
        f"mask {program.mask} over {_listed(program.mask_axes)}",
        *(_show_tensor(program, tensor) for tensor in program.tensors),
        *(f"together {_listed(group)}" for group in program.together),
    ]
    if program.order is not None:
        lines.append(f"order {SEQUENCE}: {program.order.kind}{_over(program.order.dims)}")
    lines += [f"replicated {name}{_over(dims)}" for name, dims in _runs(program.replicated)]
    before, after = _around(program)
    lines += [*_show_border(before), *_show_nest(program), *_show_border(after)]
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _over(dims: tuple[str, ...]) -> str:
    return f" over {_listed(dims)}" if dims else ""


def _show_axis(program: Program, axis: Axis) -> str:
    return f"axis {axis.name} = {axis.extent}{_over(program.parallel_dims(axis.name))}"


def _show_tensor(program: Program, tensor: Tensor) -> str:
    words = [tensor.role, tensor.name, f"[{_listed(map(' * '.join, tensor.dims))}]"]
    if tensor.dtype != "inputs":
        words.append(tensor.dtype)
    split: dict[str, list[str]] = {}
    for dim, axis in zip(program.mesh.names, tensor.pin, strict=True):
        if axis is not None:
            split.setdefault(axis, []).append(dim)
    if split:
        pins = (f"{axis}{_over(tuple(dims))}" for axis, dims in split.items())
        words += ["pinned", " and ".join(pins)]
    return " ".join(words)


def _runs(pairs: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Adjacent pairs of one tensor as one line each, which names no dimension twice."""
    for name, run in groupby(pairs, key=lambda pair: pair[0]):
        dims: list[str] = []
        for _, dim in run:
            if dim in dims:
                yield name, tuple(dims)
                dims = []
            dims.append(dim)
        yield name, tuple(dims)


def _around(program: Program) -> tuple[tuple[BorderStep, ...], tuple[BorderStep, ...]]:
    """The border before the nest, and what follows it: the outputs' steps at the end."""
    outputs = {tensor.name for tensor in program.outputs}
    count = len(program.border)
    while count and program.border[count - 1].tensor in outputs:
        count -= 1
    return program.border[:count], program.border[count:]


def _show_border(steps: tuple[BorderStep, ...]) -> Iterator[str]:
    for (source, target, dim), run in groupby(steps, key=lambda s: (s.source, s.target, s.dim)):
        names: list[str] = []
        for step in run:
            if step.tensor in names:
                yield f"reshard {_listed(names)}: {source} to {target} along {dim}"
                names = []
            names.append(step.tensor)
        yield f"reshard {_listed(names)}: {source} to {target} along {dim}"


def _show_nest(program: Program) -> Iterator[str]:
    indent = ""
    for stage in program.stages:
        way = MOVES[stage.kind]
        yield f"{indent}{stage.kind} {_listed(stage.tensors)}: {stage.axis} {way} {stage.dim}"
        indent += "  "
    yield f"{indent}body" + (f" with {program.kernel}" if program.kernel is not None else "")


# --- parsing --------------------------------------------------------------------------------


def parse(text: str, file: str = "<program>") -> Program:
    """Read a program.

    Args:
        text: as `show` writes it; blank lines, indents and `#` comments do not matter.
        file: its name, for errors.

    Raises:
        UserError: with the place; `commir-syntax`, `commir-unknown-name`, `commir-incomplete`, ...
    """
    try:
        _check_text(text, file)
        lines = [
            Line(file, number, code)
            for number, line in enumerate(text.split("\n"), 1)
            if (code := line.split("#", 1)[0].rstrip())
        ]
        return Reader(file, lines).program()
    except UserError as error:
        slug = f"commir-{error.slug}"
        raise UserError(slug, error.message, span=error.span, help=error.help) from None


def _check_text(text: str, file: str) -> None:
    if len(text) > LARGEST_TEXT:
        raise UserError(
            "too-large",
            f"{file}: {len(text)} characters are no program",
            help=f"at most {LARGEST_TEXT}",
        )
    for number, line in enumerate(text.split("\n"), 1):
        for column, character in enumerate(line, 1):
            if not character.isprintable() and character != "\t":
                message = f"control character {ascii(character)} in a program"
                raise UserError("not-text", message, span=Span(file, number, column, line))
