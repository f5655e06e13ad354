"""From a schedule to a complete program, one directive after another."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.errors import Refusal, Span, UserError, closest, shorten
from mercurygen.ir.mesh import Mesh, cover
from mercurygen.ir.operator import Combine as OperatorCombine
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.ir.program import Axis, Combine, Program, Tensor
from mercurygen.schedule.complete import complete
from mercurygen.schedule.directives import Directive, Pin
from mercurygen.schedule.rules import RULES
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.stories import Fault


def start(operator: Operator, problem: Problem | Sizes, mesh: Mesh) -> Program:
    """The operator on a mesh, nothing distributed yet.

    Raises:
        UserError: `operator-not-bound`, `unknown-axis`, `operator-without-mask`.
    """
    extents = problem.axes
    if isinstance(problem, Sizes):
        _refuse_unused(operator, problem)
    unbound = [axis.name for axis in operator.axes if axis.name not in extents]
    if unbound:
        raise UserError(
            "operator-not-bound",
            f"the problem gives no extent to {', '.join(unbound)} of {operator.name}",
            help="it gives: " + ", ".join(extents),
        )
    pin = (None,) * len(mesh.dims)
    reads = {each.name: each.reads for each in operator.derivations}
    ordered = (*operator.inputs, *operator.derived, *operator.outputs)
    tensors = (Tensor(t.name, t.role, t.dims, t.dtype, pin, reads.get(t.name, ())) for t in ordered)
    return Program(
        operator=operator.name,
        dtype=problem.dtype,
        mask=problem.mask if operator.mask else "full",
        mask_axes=operator.mask.axes if operator.mask else (),
        mesh=mesh,
        axes=tuple(Axis(axis.name, extents[axis.name]) for axis in operator.axes),
        tensors=tuple(tensors),
        together=operator.together,
        parallel=pin,
        combines=tuple(Combine(c.outputs, c.kind) for c in _combines(operator)),
        window=problem.window,
        loops=operator.loop_axes,
        body=operator.body_reads,
    )


def _refuse_unused(operator: Operator, problem: Sizes) -> None:
    """Extents of axes that the operator does not have, a mask of one that has none."""
    known = [axis.name for axis in operator.axes]
    for name in problem.axes:
        if name not in known:
            message = f"{operator.name} has no axis {shorten(name)!r}"
            raise UserError("unknown-axis", message, help=closest(name, known))
    if operator.mask is None and problem.mask != "full":
        raise UserError(
            "operator-without-mask",
            f"{operator.name} has no mask: the problem's {problem.mask} one would do nothing",
            help="leave it out",
        )


def _combines(operator: Operator) -> Iterator[OperatorCombine]:
    """Of outputs in the signature's order; sums one by one, and what needs none as a sum."""
    met: set[str] = set()
    for tensor in operator.outputs:
        if tensor.name in met:
            continue
        combine = operator.combine_of(tensor.name)
        if combine is None or combine.kind == "sum":
            yield OperatorCombine((tensor.name,), "sum", (0,))
        else:
            yield combine
            met |= set(combine.outputs)


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
        raise _error(schedule, spans, fault)
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
    """The complete program of some directives, or the first refusal; formats nothing.

    A search tries many schedules that begin alike: what a program becomes by a directive is kept
    beside it.
    """
    program.shared  # noqa: B018 - made before any program that shares it
    for directive in directives:
        following = program.__dict__.setdefault("following", {})
        after = following.get(directive)
        if after is None:
            after = following[directive] = _after(program, directive)
        if isinstance(after, Refusal):
            return after
        program = after
    settled, fault = complete(program)
    return settled if fault is None else fault.refusal


def _after(program: Program, directive: Directive) -> Program | Refusal:
    rule = RULES[type(directive)]
    return rule.refuse(program, directive) or rule.rewrite(program, directive)


def _error(schedule: Schedule, spans: tuple[Span, ...], fault: Fault) -> UserError:
    """A fault of several lines, at one of them, with a note that shows the other."""
    error = fault.refusal.error(_place(schedule, spans, fault.word, fault.mention))
    other = fault.rival and _place(schedule, spans, *fault.rival)
    if not other or (error.span and other.line == error.span.line):
        return error
    note = f"it conflicts with line {other.line}: `{other.text.strip()}`"
    return UserError(error.slug, error.message, span=error.span, note=note, help=error.help)


def _place(
    schedule: Schedule, spans: tuple[Span, ...], word: str | None, mention: str
) -> Span | None:
    """The last line with a word, if possible with what it names."""
    found, named = None, False
    for directive, span in zip(schedule.directives, spans, strict=False):
        words = str(directive).replace(",", " ").replace(":", " ").split()
        if words[0] != word:
            continue
        if mention in words or not mention or not found or not named:
            found, named = span, mention in words or named
    return found
