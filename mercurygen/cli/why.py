"""What `--why` prints: the choice beside every other that has a name, and what would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from textwrap import wrap

from mercurygen import operators
from mercurygen.cli import request, words
from mercurygen.cli.request import Request
from mercurygen.cost import topology as topologies
from mercurygen.cost.decide import decide
from mercurygen.cost.links import Network
from mercurygen.cost.report import together
from mercurygen.designs import patterns
from mercurygen.errors import UserError
from mercurygen.lower.plan import Plan
from mercurygen.schedule.directives import Reshard
from mercurygen.schedule.schedule import Schedule
from mercurygen.search.against import Against, differences, others
from mercurygen.search.candidate import RESOLUTION, Candidate
from mercurygen.search.changes import Change, changes, identity
from mercurygen.search.knobs import Case
from mercurygen.search.place import links
from mercurygen.search.result import Result
from mercurygen.search.why import figures, label

WIDTH = 100
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Why:
    """Everything that speaks for a choice.

    Attributes:
        result: of the search.
        against: the runner-up and the named designs.
        changes: what would change it, in either direction of every quantity.
    """

    result: Result
    against: tuple[Against, ...]
    changes: tuple[Change, ...]

    def to_dict(self) -> dict:
        """For `--json`."""
        return {
            "against": [one.to_dict() for one in self.against],
            "changes": [_change(one) for one in self.changes],
        }


def find(wanted: Request, result: Result, progress: Progress | None = None) -> Why:
    """Search again and again, with every quantity otherwise.

    Args:
        wanted: what was searched.
        result: that it gave.
        progress: called with what is done, how many are, of how many.
    """

    def ask(case: Case) -> Result:
        asked = replace(wanted, problem=case.problem, topology=case.topology)
        return request.run(replace(asked, memory_limit=case.limit))

    return Why(result, others(result), changes(result, ask, progress))


def of_file(schedule: Schedule, plans: tuple[Plan, ...], topo: str | None) -> Request:
    """The search whose answer a schedule is, or should be.

    Args:
        schedule: complete.
        plans: its forward, and its backward if it has one.
        topo: of `--topo`: where the machine is, if not among those that are shipped.

    Raises:
        UserError: `another-topology`, or what a request may be refused for.
    """
    target, problem = schedule.target, schedule.problem
    request.supported(operators.load(schedule.operator), schedule.operator)
    topology = topologies.load(topo or target.name)
    if topology.digest != target.digest:
        raise UserError(
            "another-topology",
            f"the schedule is of {target.name} {target.digest}, and {topology.name} is now "
            f"{topology.digest}",
            help="emit it again; or name its own file with --topo",
        )
    program = plans[0].program
    wanted = Request(schedule.operator, topology, topo or target.name, problem, schedule.group)
    return replace(
        wanted,
        tp=schedule.tp,
        order=program.order.kind,
        kernel=program.kernel,
        passes="train" if schedule.backward is not None else "fwd",
    )


def of_another(result: Result, schedule: Schedule, plans: tuple[Plan, ...]) -> list[str]:
    """A line on a schedule that is not what the search chooses; nothing of its choice."""
    if identity(schedule) == identity(result.best.schedule):
        return []
    network = Network(result.topology, result.group, result.tp)
    cost = reduce(together, (decide(plan, network) for plan in plans))
    lines = tuple(d for d in schedule.directives if not isinstance(d, Reshard))
    design = patterns.name_of(schedule.mesh, lines) if schedule.backward is None else None
    this = Candidate(schedule, plans[0], design, 0, cost, cost, *plans[1:])
    text = f"this schedule is not what is chosen: {label(this)} {differences(result.best, this)}"
    return [*_hanging(text), ""]


def lines(why: Why) -> list[str]:
    """For people."""
    result, best = why.result, why.result.best
    tp = f", tp {result.tp}" if result.tp > 1 else ""
    chosen = f"{label(best)}, {_rule(result)} of {result.counts.legal} schedules: "
    found = [
        words.problem(result.problem),
        f"{result.topology.name}: {words.place(links(result.topology, result.group))}{tp}",
        "",
        *_hanging(f"choice: {chosen}{figures(best, result.objective)}"),
        "",
        "beside it, by the model; bytes out of the busiest port",
    ]
    for one in why.against:
        found += _hanging(one.words())
    found += ["", "what would change it; the whole search was run at every value"]
    for knob in dict.fromkeys(change.knob for change in why.changes):
        found.append(f"  {knob.words}, now {knob.shown(knob.now)}")
        for change in why.changes:
            if change.knob == knob:
                found += _hanging(sentence(change, result.objective), 4)
    return found


def _rule(result: Result) -> str:
    """What the choice is among the schedules."""
    if result.robustness is not None:
        return "the least regretted on machines that are not as planned"
    if result.objective == "memory":
        return "the one with the least memory"
    if result.best is result.ranked[0]:
        return "the fastest"
    return f"the simplest within {RESOLUTION:.0%} of the fastest"


def sentence(change: Change, objective: str) -> str:
    """What happens in one direction."""
    knob = change.knob
    kept = f"still chosen at {knob.shown(change.kept)}"
    if change.value is None:
        return kept
    if change.result is None:
        assert change.error is not None
        what = f"nothing is legal, {change.error.slug}"
    else:
        new = change.result.best
        what = f"{label(new)}, {figures(new, objective)}; {_old(new, change.old, objective)}"
    at = f"at {knob.shown(change.value)}: {what}"
    return f"{kept}; {at}" if change.kept != knob.now else at


_RULES = {  # why a slower schedule may be the choice
    "time": f"; of those within {RESOLUTION:.0%} of the fastest the simplest is chosen",
    "memory": "",
    "robust": "; the one that is least regretted on other machines is chosen",
}


def _old(new: Candidate, old: Candidate | None, objective: str) -> str:
    """What the choice would be worth where it is none."""
    if old is None:
        return "this one is not legal there"
    rule = _RULES[objective] if new.cost.time > old.cost.time else ""
    return f"this one {differences(new, old)}{rule}"


def _change(change: Change) -> dict:
    knob, new = change.knob, change.result.best if change.result else None
    return {
        "what": knob.name,
        "level": knob.level,
        "unit": knob.unit or None,
        "now": knob.now,
        "up": change.up,
        "kept": change.kept,
        "value": change.value,
        "choice": new.to_dict() if new else None,
        "refused": change.error.slug if change.error else None,
        "time_of_this": change.old.cost.time if change.old else None,
    }


def _hanging(text: str, indent: int = 2) -> list[str]:
    pad = " " * indent
    return wrap(text, WIDTH, initial_indent=pad, subsequent_indent=pad + "  ")
