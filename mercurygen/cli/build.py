"""From a schedule to the texts of its files: apply, lower, prove, emit, compare. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mercurygen import operators
from mercurygen.check.report import ProofError, Report
from mercurygen.cli.request import check_sizes, supported
from mercurygen.errors import InternalError, Refusal, Span, UserError
from mercurygen.ir.kernel import ATEN, OPERATORS, kernels_of
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Sizes
from mercurygen.ir.program import SEQUENCE, Program
from mercurygen.lower.kept import refuse
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.schedule.apply import Attempts, apply, start
from mercurygen.schedule.directives import Directive, OrderTokens, Patch
from mercurygen.schedule.gradient import gradient, section
from mercurygen.schedule.schedule import Backward, Schedule
from mercurygen.schedule.text import show
from mercurygen.search.space import Point, settle


class Lowered(NamedTuple):
    """A schedule in normal form, and what it is lowered to."""

    schedule: Schedule
    program: Program
    plan: Plan


@dataclass(frozen=True, slots=True)
class Proved:
    """A schedule in normal form, and what it is lowered to.

    Attributes:
        schedule: with its order, reshards and kernel written out.
        program: complete.
        plan: what it lowers to.
        report: of the proof.
        backward: the same of the section `backward`, as a schedule of its operator by itself.
    """

    schedule: Schedule
    program: Program
    plan: Plan
    report: Report
    backward: Proved | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of the forward, and of the backward if there is one."""
        return (self.plan,) if self.backward is None else (self.plan, self.backward.plan)


@dataclass(frozen=True, slots=True)
class Built:
    """Everything about a module, and the texts of its two files.

    Attributes:
        name: of the files, without extension.
        proved: the schedule, its plan and proof.
        summary: of the text's communication call sites, which are those of the plan.
        sched_text: of NAME.sched.
        module_text: of NAME.py.
    """

    name: str
    proved: Proved
    summary: Any
    sched_text: str
    module_text: str

    @property
    def texts(self) -> dict[str, str]:
        """Name of a file -> its text."""
        return {f"{self.name}.sched": self.sched_text, f"{self.name}.py": self.module_text}


def build(schedule: Schedule, name: str, *, spans: tuple[Span, ...] = ()) -> Built:
    """The files of a schedule, proved.

    Args:
        schedule: as written, reshards or not.
        name: of the files, a Python identifier.
        spans: of the directives, for errors.

    Raises:
        UserError: what refuses the schedule; `proof-failed` (exit code 1) if mercurygen is wrong.
    """
    from mercurygen.cli.formatter import check_formatter
    from mercurygen.emit.module import emit

    proved = prove_schedule(schedule, spans)
    check_formatter()
    backward = proved.backward and proved.backward.plan
    operator = operators.load(schedule.operator)
    module = emit(proved.schedule, proved.plan, name, operator, backward)
    _check_syntax(module, name)
    summary = check_call_sites(module, proved, backward)
    return Built(name, proved, summary, show(proved.schedule), module)


def prove_schedule(schedule: Schedule, spans: tuple[Span, ...] = ()) -> Proved:
    """A schedule in normal form, lowered and proved.

    Raises:
        UserError: what refuses the schedule; `proof-failed` (exit code 1) if mercurygen is wrong.
    """
    forward, backward = plans_of(schedule, spans)
    return _proved(forward, backward and _proved(backward))


def _proved(lowered: Lowered, backward: Proved | None = None) -> Proved:
    from mercurygen.check.levels import MOST_PLAYED, elsewhere, prove_by_levels
    from mercurygen.check.prove import prove

    schedule, program, plan = lowered
    try:
        if program.mesh.size > MOST_PLAYED:
            at = elsewhere(operators.load(schedule.operator), schedule)
            report = prove_by_levels(plan, schedule.links, at)
        else:
            report = prove(plan, schedule.links)
    except ProofError as error:
        raise _bug(f"the {error.check} of rank {error.rank}: {error.message}") from error
    return Proved(*lowered, report, backward)


def plans_of(schedule: Schedule, spans: tuple[Span, ...] = ()) -> tuple[Lowered, Lowered | None]:
    """The normal form of a schedule, its program and its plan, and those of its gradient.

    Not proved yet. The gradient is None without a section `backward`.

    Raises:
        UserError: what refuses the schedule.
    """
    settled, program, plan = plan_of(replace(schedule, backward=None), spans)
    if schedule.backward is None:
        return Lowered(settled, program, plan), None
    below = spans[len(schedule.directives) :]  # of the section, its first line first
    whole = replace(settled, backward=schedule.backward)
    _check_kernel(program, schedule.backward, below)
    alone = gradient(whole, program, below[0] if below else None)
    backward = Lowered(*plan_of(alone, _spans_of(alone, schedule.backward, below)))
    refusal = refuse(plan, backward.plan)
    if refusal is not None:
        raise refusal.error(below[0] if below else None)
    whole = replace(whole, backward=section(whole, program, backward.schedule))
    return Lowered(whole, program, plan), backward


def _check_kernel(program: Program, backward: Backward, spans: tuple[Span, ...]) -> None:
    """Refuse a section with another kernel than the forward's: a module has one."""
    places: tuple[Span | None, ...] = spans[1:] or (None,) * len(backward.directives)
    for directive, span in zip(backward.directives, places, strict=True):
        if isinstance(directive, Patch) and directive.kernel != program.kernel:
            raise UserError(
                "kernel-of-both",
                f"`{directive}` in the section backward, but the forward's kernel is "
                f"{program.kernel}",
                span=span,
                help=f"write `patch body with {program.kernel}` there, or leave the line out",
            )


def _spans_of(alone: Schedule, backward: Backward, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Where the directives of a gradient's schedule stand; those of the forward: at `backward`."""
    if not spans:
        return ()
    head, *own = spans
    places = dict(zip(backward.directives, own, strict=True))
    return tuple(places.get(directive, head) for directive in alone.directives)


def plan_of(schedule: Schedule, spans: tuple[Span, ...] = ()) -> tuple[Schedule, Program, Plan]:
    """The normal form of a schedule without its section `backward`, its program and its plan.

    Raises:
        UserError: what refuses the schedule.
    """
    check_sizes(schedule.problem, schedule.group)
    _check_tp(schedule)
    operator = operators.load(schedule.operator)
    kernel = next((d.kernel for d in schedule.directives if isinstance(d, Patch)), ATEN)
    if not isinstance(schedule.problem, Sizes) or kernels_of(operator.name):
        supported(operator, schedule.operator, OPERATORS.get(kernel, ()))
    program = apply(operator, schedule, spans)
    settled = replace(schedule, directives=_normal(operator, schedule, program))
    if apply(operator, settled) != program:
        raise InternalError(f"the normal form of a schedule is another one:\n{show(settled)}")
    plan = lower(program)
    if isinstance(plan, Refusal):
        raise plan.error()
    return settled, program, plan


def _check_syntax(module: str, name: str) -> None:
    """Compile an emitted text, which runs nothing, before anything of it is written."""
    try:
        compile(module, f"{name}.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise InternalError(f"the emitted module is not Python: {error}") from error


def check_call_sites(text: str, proved: Proved, backward: Plan | None = None):
    """Compare a module's communication call sites with the plan, and with that of its gradients.

    Returns:
        What was found, for people.

    Raises:
        UserError: `proof-failed` (exit code 1).
    """
    from mercurygen.emit.callsites import TextMismatch, check_text

    try:
        layout = proved.schedule.problem.layout
        return check_text(text, proved.plan, backward=backward, layout=layout)
    except TextMismatch as error:
        raise UserError("text-mismatch", f"not what the plan says: {error}", exit_code=1) from error


def _normal(operator: Operator, schedule: Schedule, program: Program) -> tuple[Directive, ...]:
    """The directives with order, reshards and kernel written out, as the search writes them."""
    directives = schedule.directives
    if isinstance(schedule.problem, Sizes):
        return _normal_of_operator(directives, program)
    if program.order is not None and not any(isinstance(d, OrderTokens) for d in directives):
        order = program.order
        directives = (OrderTokens(SEQUENCE, order.kind, order.dims), *directives)
    if not any(isinstance(d, Patch) for d in directives):
        directives = (*directives, Patch("body", program.kernel or ATEN))
    begin = start(operator, schedule.local_problem, schedule.mesh)
    found = settle(Point(Attempts(begin), _without_reshards(directives), None))
    if isinstance(found, Refusal):
        raise InternalError(f"refused only in normal form: {found.slug}")
    return found[1]


def _normal_of_operator(
    directives: tuple[Directive, ...], program: Program
) -> tuple[Directive, ...]:
    """The directives of a user's operator with the order of its mask's axes written out."""
    given = any(isinstance(d, OrderTokens) for d in directives)
    if given or not program.mask_axes or not program.order.dims:
        return directives
    return (OrderTokens(SEQUENCE, program.order.kind, program.order.dims), *directives)


def _without_reshards(directives: tuple[Directive, ...]) -> tuple[Directive, ...]:
    from mercurygen.schedule.directives import Reshard

    return tuple(d for d in directives if not isinstance(d, Reshard))


def _check_tp(schedule: Schedule) -> None:
    """Refuse siblings for which the innermost level has no room."""
    level, size = schedule.target.levels[-1], schedule.group[-1]
    if level.size % (size * schedule.tp):
        raise UserError(
            "tp-does-not-fit",
            f"{level.level}={size} times tp={schedule.tp} does not divide "
            f"{level.level}={level.size}",
            help="the tensor-parallel ranks sit beside those of the group on that level",
        )


def _bug(message: str) -> UserError:
    return UserError(
        "proof-failed",
        f"the plan is not proved: {message}",
        note="a bug in mercurygen; nothing was written",
        help="please report it with the schedule",
        exit_code=1,
    )
