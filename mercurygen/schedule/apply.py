"""From a schedule to a complete program, one directive after another."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.errors import Refusal, Span, UserError
from mercurygen.ir.mesh import Mesh, cover
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem
from mercurygen.ir.program import Axis, Program, Tensor
from mercurygen.schedule.complete import Fault, complete
from mercurygen.schedule.directives import Directive, Pin
from mercurygen.schedule.rules import RULES
from mercurygen.schedule.schedule import Schedule


def start(operator: Operator, problem: Problem, mesh: Mesh) -> Program:
    """The operator on a mesh, nothing distributed yet."""
    extents = problem.axes
    unbound = [axis.name for axis in operator.axes if axis.name not in extents]
    if unbound or operator.mask is None:
        raise UserError(
            "operator-not-bound",
            f"the problem gives no extent to {', '.join(unbound) or 'a mask'} of {operator.name}",
            help="this version schedules attention: its axes are " + ", ".join(extents),
        )
    pin = (None,) * len(mesh.dims)
    tensors = (Tensor(t.name, t.role, t.dims, t.dtype, pin) for t in operator.tensors)
    return Program(
        operator=operator.name,
        dtype=problem.dtype,
        mask=problem.mask,
        mask_axes=operator.mask.axes,
        mesh=mesh,
        axes=tuple(Axis(axis.name, extents[axis.name]) for axis in operator.axes),
        tensors=tuple(tensors),
        together=operator.together,
        parallel=pin,
    )


def steps(
    operator: Operator, schedule: Schedule, spans: tuple[Span, ...] = ()
) -> Iterator[tuple[Directive | None, Program]]:
    """The program before any directive, after each, and last completed (directive None).

    Raises:
        UserError: the slug of what refuses a directive, at its span.
    """
    try:
        cover(schedule.mesh, schedule.links)
        program = start(operator, schedule.local_problem, schedule.mesh)
    except UserError as error:
        raise error.at(None) from None
    yield None, program
    _refuse_contradicting_pins(schedule, spans)
    for index, directive in enumerate(schedule.directives):
        rule = RULES[type(directive)]
        refusal = rule.refuse(program, directive)
        if refusal is not None:
            raise refusal.error(spans[index] if spans else None)
        program = rule.rewrite(program, directive)
        yield directive, program
    settled, fault = complete(program)
    if fault is not None:
        raise fault.refusal.error(_place(schedule, spans, fault))
    yield None, settled


def _refuse_contradicting_pins(schedule: Schedule, spans: tuple[Span, ...]) -> None:
    """`replicated` says that nothing splits a tensor: no other pin may name it."""
    pins = [(i, d) for i, d in enumerate(schedule.directives) if isinstance(d, Pin)]
    for index, pin in pins:
        for other, second in pins:
            both = [name for name in pin.tensors if name in second.tensors]
            if pin.axis is None and other != index and both:
                raise UserError(
                    "pinned-twice",
                    f"{both[0]} is pinned by two lines, one of which says replicated",
                    span=spans[max(index, other)] if spans else None,
                    help="keep one of the two lines",
                )


def apply(operator: Operator, schedule: Schedule, spans: tuple[Span, ...] = ()) -> Program:
    """The complete program of a schedule.

    Raises:
        UserError: the slug of what refuses a directive, at its span.
    """
    *_, (_, program) = steps(operator, schedule, spans)
    return program


def attempt(program: Program, directives: tuple[Directive, ...]) -> Program | Refusal:
    """The complete program of some directives, or the first refusal; formats nothing."""
    for directive in directives:
        rule = RULES[type(directive)]
        refusal = rule.refuse(program, directive)
        if refusal is not None:
            return refusal
        program = rule.rewrite(program, directive)
    settled, fault = complete(program)
    return settled if fault is None else fault.refusal


def _place(schedule: Schedule, spans: tuple[Span, ...], fault: Fault) -> Span | None:
    """The line that a fault is about: the last with its word, if possible with what it names."""
    found = None
    for directive, span in zip(schedule.directives, spans, strict=False):
        words = str(directive).replace(",", " ").replace(":", " ").split()
        if words[0] == fault.word and (fault.mention in words or not fault.mention or not found):
            found = span
    return found
