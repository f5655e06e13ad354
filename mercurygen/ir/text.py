"""The text of CommIR: printer and parser.

`parse(show(program)) == program`, and `show(parse(text)) == text` for formatted text, at every
stage of a schedule. The words are the schedule's own. After what the operator, the problem and the
mesh are, the lines stand in the order in which things happen: the tile loops, reshards of inputs,
the nest (indented, outermost first) around the body, reshards of outputs. What is not said is as in
attention: a body without `reads` reads every input and derived tensor, an operator without a line
`mask` has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from mercurygen.errors import Span, UserError
from mercurygen.ir import documents
from mercurygen.ir.kernel import shown
from mercurygen.ir.lexer import Line
from mercurygen.ir.names import REPLICATED
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
        *_show_mask(program),
        *(_show_tensor(program, tensor) for tensor in program.tensors),
        *(f"together {_listed(group)}" for group in program.together),
        *(f"combine {_listed(each.outputs)} by {each.kind}" for each in program.combines),
    ]
    if program.loops:
        lines.append(f"loops {_listed(program.loops)}")
    if program.order is not None:
        lines.append(f"order {SEQUENCE}: {program.order.kind}{_over(program.order.dims)}")
    lines += _show_replicated(program)
    lines += [f"join {_listed(axes)}" for axes in program.joins]
    lines += [f"tile {' * '.join(loop.axes)} by {loop.parts}" for loop in program.tiles]
    before, after = _around(program)
    lines += [*_show_border(before), *_show_nest(program), *_show_border(after)]
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _over(dims: tuple[str, ...]) -> str:
    return f" over {_listed(dims)}" if dims else ""


def _as(dtype: str | None) -> str:
    return f" as {dtype}" if dtype is not None else ""


def _show_axis(program: Program, axis: Axis) -> str:
    return f"axis {axis.name} = {axis.extent}{_over(program.parallel_dims(axis.name))}"


def _show_mask(program: Program) -> Iterator[str]:
    if program.mask_axes:
        width = "" if program.window is None else f" {program.window}"
        width += f" ahead {program.ahead}" if program.ahead else ""
        width += f" {program.align.replace('-', '_')}" if program.align else ""
        yield f"mask {program.mask}{width} over {_listed(program.mask_axes)}"
    if program.documents:
        yield f"documents {documents.show(program.documents)}"


def _show_tensor(program: Program, tensor: Tensor) -> str:
    words = [tensor.role, tensor.name, f"[{_listed(map(' * '.join, tensor.dims))}]"]
    if tensor.dtype != "inputs":
        words.append(tensor.dtype)
    if tensor.role == "derived":
        words += ["from", _listed(tensor.reads)]
    split: dict[str, list[str]] = {}
    for dim, axis in zip(program.mesh.names, tensor.pin, strict=True):
        if axis is not None:
            split.setdefault(axis, []).append(dim)
    if split:
        pins = (f"{axis}{_over(tuple(dims))}" for axis, dims in split.items())
        words += ["pinned", " and ".join(pins)]
    return " ".join(words)


def _show_replicated(program: Program) -> Iterator[str]:
    """Adjacent pairs of one tensor, and of one dtype on the links, as one line each."""
    asked = {(name, dim): dtype for name, dim, dtype in program.reduce_dtype}
    pairs = ((name, asked.get((name, dim)), dim) for name, dim in program.replicated)
    for (name, dtype), run in groupby(pairs, key=lambda pair: pair[:2]):
        dims = tuple(dim for _, _, dim in run)
        yield f"replicated {name}{_over(dims)}{_as(dtype)}"


def _around(program: Program) -> tuple[tuple[BorderStep, ...], tuple[BorderStep, ...]]:
    """The border before the nest, and what follows it: the outputs' steps at the end."""
    outputs = {tensor.name for tensor in program.outputs}
    count = len(program.border)
    while count and program.border[count - 1].tensor in outputs:
        count -= 1
    return program.border[:count], program.border[count:]


def _show_border(steps: tuple[BorderStep, ...]) -> Iterator[str]:
    for (source, target, dim), run in groupby(steps, key=lambda s: (s.source, s.target, s.dim)):
        way = f"{source or REPLICATED} to {target or REPLICATED} along {dim}"
        names: list[str] = []
        for step in run:
            if step.tensor in names:
                yield f"reshard {_listed(names)}: {way}"
                names = []
            names.append(step.tensor)
        yield f"reshard {_listed(names)}: {way}"


def _show_nest(program: Program) -> Iterator[str]:
    indent = ""
    for stage in program.stages:
        words = [f"{stage.kind} {_listed(stage.tensors)}: {stage.axis}", MOVES[stage.kind]]
        words += [stage.dim, *stage.options]
        yield indent + " ".join(words) + _as(stage.dtype)
        indent += "  "
    whole = tuple(tensor.name for tensor in (*program.inputs, *program.derived))
    reads = "" if program.body == whole else f" reads {_listed(program.body)}".rstrip()
    if program.kernel is None:
        yield f"{indent}body{reads}"
    else:
        yield f"{indent}body{reads} with {shown(program.kernel, program.kernel_options)}"


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
