"""The section `backward` of a schedule, as a schedule of the gradient's operator by itself."""

from __future__ import annotations

from dataclasses import replace

from mercurygen.errors import Span, UserError
from mercurygen.ir.problem import BACKWARD
from mercurygen.ir.program import SEQUENCE, Program
from mercurygen.schedule.backward_text import SAVED
from mercurygen.schedule.directives import Directive, OrderTokens, Parallelize, Patch, Pin
from mercurygen.schedule.schedule import Backward, Schedule

OPERATOR = {"aten": BACKWARD[1]}  # by kernel: torch's makes delta of out itself
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
        UserError: `saves-parts`, `kernel-without-gradient`.
    """
    backward = schedule.backward
    assert backward is not None
    save = save_of(schedule, program, span)
    if program.kernel not in (None, *OPERATOR):
        raise UserError(
            "kernel-without-gradient",
            f"no module is emitted yet with the gradient of the kernel {program.kernel!r}",
            span=span,
            help="write `patch body with aten`, or leave the section `backward` out",
        )
    return replace(
        schedule,
        operator=OPERATOR[program.kernel or "aten"],
        directives=(*_frame(program, save), *_body(schedule, backward)),
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
    shared = OrderTokens | Pin | Patch
    if set(split) == {d for d in schedule.directives if isinstance(d, Parallelize)}:
        shared |= Parallelize
    own = tuple(d for d in settled.directives if not isinstance(d, shared))
    return Backward(own, save_of(schedule, program))


def _body(schedule: Schedule, backward: Backward) -> tuple[Directive, ...]:
    """The section's lines, and those that it shares with the forward."""
    split = tuple(d for d in schedule.directives if isinstance(d, Parallelize))
    patch = tuple(d for d in schedule.directives if isinstance(d, Patch))
    own = backward.directives
    if any(isinstance(d, Parallelize) for d in own):
        split = ()
    if any(isinstance(d, Patch) for d in own):
        patch = ()
    return (*split, *own, *patch)


def _frame(program: Program, save: str) -> tuple[Directive, ...]:
    """Order and pins: gradients lie as the caller has what they are of."""
    order, mesh = program.order, program.mesh
    assert order is not None
    pins: dict[tuple[str | None, tuple[str, ...]], list[str]] = {}
    for name in (*SAVED, *OF):
        tensor = program.tensor(OF.get(name, name))
        where = program.storage(tensor) if save == "inner" and name in SAVED else tensor.pin
        split = tuple(zip(mesh.names, where, strict=True))
        for axis in dict.fromkeys(where) if any(where) else (None,):
            if axis is not None or not any(where):
                dims = tuple(dim for dim, each in split if each == axis and axis is not None)
                called = SEQUENCE if axis in program.mask_axes else axis
                pins.setdefault((called, dims), []).append(name)
    tokens = OrderTokens(SEQUENCE, order.kind, order.dims)
    return (tokens, *(Pin(tuple(names), *where) for where, names in pins.items()))
