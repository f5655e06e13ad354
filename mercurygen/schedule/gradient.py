"""The section `backward` of a schedule, as a schedule of the gradient's operator by itself."""

from __future__ import annotations

from dataclasses import replace

from mercurygen.errors import Span, UserError
from mercurygen.ir.kernel import ATEN, OPERATORS, TRITON
from mercurygen.ir.problem import BACKWARD
from mercurygen.ir.program import SEQUENCE, Program
from mercurygen.schedule.backward_text import SAVED
from mercurygen.schedule.directives import (
    Directive,
    OrderTokens,
    Parallelize,
    Patch,
    Pin,
    Shard,
    Shift,
)
from mercurygen.schedule.schedule import Backward, Schedule

# By kernel, and in its gradient the tensor that takes the place of out: made of it, once.
OPERATOR = {kernel: next(x for x in BACKWARD if x in known) for kernel, known in OPERATORS.items()}
INSTEAD = {TRITON: "delta"}
OF = {"do": "out", "dq": "q", "dk": "k", "dv": "v"}  # gradients lie as what they are of


def save_of(schedule: Schedule, program: Program, span: Span | None = None) -> str:
    """What a module keeps for the gradients: "inner" or "outer".

    Args:
        schedule: with a section `backward`.
        program: of the forward, complete.
        span: of that section.

    Raises:
        UserError: `saves-parts`.
    """
    assert schedule.backward is not None
    save = schedule.backward.save
    if save == "inner" and program.tiles:
        axes = ", ".join(axis for loop in program.tiles for axis in loop.axes)
        raise UserError(
            "saves-parts",
            f"save inner, but the forward works on parts of {axes}: it never has all of them there",
            span=span,
            help=f"write `save {', '.join(SAVED)}: outer`",
        )
    same = all(program.storage(program.tensor(n)) == program.tensor(n).pin for n in SAVED)
    return save or ("outer" if same or program.tiles else "inner")


def gradient(schedule: Schedule, program: Program, span: Span | None = None) -> Schedule:
    """The schedule of the gradient's operator: same mesh and order, pins of what is saved.

    Args:
        schedule: with a section `backward`.
        program: of the forward, complete.
        span: of that section.

    Raises:
        UserError: `saves-parts`.
    """
    backward = schedule.backward
    assert backward is not None
    save = save_of(schedule, program, span)
    kernel = program.kernel or ATEN
    return replace(
        schedule,
        operator=OPERATOR[kernel],
        directives=(*_frame(program, save), *_body(schedule, backward, kernel)),
        backward=None,
        comments=(),
    )


def section(schedule: Schedule, program: Program, settled: Schedule) -> Backward:
    """The section `backward` in normal form.

    Args:
        schedule: with a section `backward`.
        program: of the forward, complete.
        settled: `gradient` of it in normal form.
    """
    split = tuple(d for d in settled.directives if isinstance(d, Parallelize))
    shared = OrderTokens | Pin
    if set(split) == {d for d in schedule.directives if isinstance(d, Parallelize)}:
        shared |= Parallelize
    usual = Patch("body", program.kernel or ATEN)
    own = tuple(d for d in settled.directives if not isinstance(d, shared) and d != usual)
    return Backward(own, save_of(schedule, program))


def moves(kernel: str, lines: tuple[Directive, ...]) -> tuple[Directive, ...]:
    """Lines of the section that say what moves, written for torch's kernel, as another's."""
    made = INSTEAD.get(kernel)
    if made is None:
        return lines
    return tuple(
        (
            replace(d, tensors=tuple(made if x == "out" else x for x in d.tensors))
            if isinstance(d, Shard | Shift)
            else d
        )
        for d in lines
    )


def _body(schedule: Schedule, backward: Backward, kernel: str) -> tuple[Directive, ...]:
    """The section's lines, and what it shares with the forward: not the sizes of its tiles."""
    split = tuple(d for d in schedule.directives if isinstance(d, Parallelize))
    patch: tuple[Directive, ...] = (Patch("body", kernel),)
    own = backward.directives
    if any(isinstance(d, Parallelize) for d in own):
        split = ()
    if any(isinstance(d, Patch) for d in own):
        patch = ()
    return (*split, *own, *patch)


def _frame(program: Program, save: str) -> tuple[Directive, ...]:
    """Order and pins: gradients lie as the caller has what they are of.

    So does out if something is made of it and of its gradient, where their rows lie.
    """
    order, mesh, made = program.order, program.mesh, INSTEAD.get(program.kernel or ATEN)
    assert order is not None
    pins: dict[tuple[str | None, tuple[str, ...]], list[str]] = {}
    for name in (*SAVED, *OF):
        tensor = program.tensor(OF.get(name, name))
        inner = save == "inner" and name in SAVED and (name != "out" or not made)
        where = program.storage(tensor) if inner else tensor.pin
        split = tuple(zip(mesh.names, where, strict=True))
        for axis in dict.fromkeys(where) if any(where) else (None,):
            if axis is not None or not any(where):
                dims = tuple(dim for dim, each in split if each == axis and axis is not None)
                called = SEQUENCE if axis in program.mask_axes else axis
                pins.setdefault((called, dims), []).append(name)
    tokens = OrderTokens(SEQUENCE, order.kind, order.dims)
    return (tokens, *(Pin(tuple(names), *where) for where, names in pins.items()))
