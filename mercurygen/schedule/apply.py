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
from mercurygen.schedule.fault import Fault
from mercurygen.schedule.rules import RULES
from mercurygen.schedule.schedule import Schedule


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
        ahead=problem.ahead,
        align=problem.align or ("apart" if problem.seq_kv is not None else None),
        documents=problem.documents,
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
            error = refusal.error(spans[index] if spans else None)
            raise _beside(error, _place(schedule, spans[:index], refusal.rival))
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
                first, last = sorted((index, other))
                error = UserError(
                    "pinned-twice",
                    f"{both[0]} is pinned by two lines, one of which says replicated",
                    span=spans[last] if spans else None,
                    help="keep one of the two lines",
                )
                raise _beside(error, spans[first] if spans else None)


def apply(operator: Operator, schedule: Schedule, spans: tuple[Span, ...] = ()) -> Program:
    """The complete program of a schedule.

    Raises:
        UserError: the slug of what refuses a directive, at its span.
    """
    *_, (_, program) = steps(operator, schedule, spans)
    return program


def attempt(program: Program, directives: tuple[Directive, ...]) -> Program | Refusal:
    """The complete program of some directives, or the first refusal; formats nothing."""
    return Attempts(program).attempt(directives)


class Attempts:
    """Schedules of one operator on one mesh, tried one after the other.

    A search tries thousands that begin alike. The directives that a schedule begins with as the
    one before it did are applied once: only the programs of one schedule are kept.

    Attributes:
        start: the operator on the mesh, nothing distributed yet.
    """

    def __init__(self, start: Program) -> None:
        self.start = start
        self._directives: list[Directive] = []
        self._after: list[Program | Refusal] = [start]  # none of them, one, two, ...

    def attempt(self, directives: tuple[Directive, ...]) -> Program | Refusal:
        """The complete program of some directives, or the first refusal; formats nothing."""
        known, after = self._directives, self._after
        same = 0
        for one, other in zip(known, directives, strict=False):
            if one is not other and one != other:
                break
            same += 1
        del known[same:], after[same + 1 :]
        program = after[-1]
        for directive in directives[same:]:
            if isinstance(program, Refusal):
                return program
            rule = RULES[type(directive)]
            program = rule.refuse(program, directive) or rule.rewrite(program, directive)
            known.append(directive)
            after.append(program)
        if isinstance(program, Refusal):
            return program
        settled, fault = complete(program)
        return settled if fault is None else fault.refusal


def _error(schedule: Schedule, spans: tuple[Span, ...], fault: Fault) -> UserError:
    """A fault of several lines, at one of them, with a note that shows the other."""
    place = _place(schedule, spans, fault.place) or _place(schedule, spans, fault.instead)
    error = fault.refusal.error(place)
    rival = _place(schedule, spans, fault.rival)
    pinned = any(isinstance(directive, Pin) for directive in schedule.directives)
    if fault.rival[:1] == ("pin",) and rival is None and not pinned:
        return _noted(error, "no line pins anything: a sequence is then split over all dimensions")
    return _beside(error, rival)


def _beside(error: UserError, rival: Span | None) -> UserError:
    """An error with a note that shows the line that it conflicts with."""
    if rival is None or (error.span and rival.line == error.span.line):
        return error
    return _noted(error, f"it conflicts with line {rival.line}: `{rival.text.strip()}`")


def _noted(error: UserError, note: str) -> UserError:
    return UserError(error.slug, error.message, span=error.span, note=note, help=error.help)


def _place(schedule: Schedule, spans: tuple[Span, ...], place: tuple[str, ...]) -> Span | None:
    """Of a directive's lines that name what comes first, the last of those that name most."""
    found, most = None, -1
    for directive, span in zip(schedule.directives, spans, strict=False):
        word, *names = str(directive).replace(",", " ").replace(":", " ").split()
        count = len({*names} & {*place[1:]})
        meant = place[:1] == (word,) and {*place[1:2]} <= {*names}
        if meant and count >= most:
            found, most = span, count
    return found
