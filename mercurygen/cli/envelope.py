"""`emit --envelope`: the fast, the robust and the lean schedule, and a module that chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from mercurygen.cli import choice, names, request
from mercurygen.cli.build import Built, Proved, build, prove_schedule
from mercurygen.cli.files import Written, read_text, shown, write_set
from mercurygen.cli.read import load
from mercurygen.cli.request import Request
from mercurygen.cost.links import Network
from mercurygen.cost.scenario import slow
from mercurygen.emit import envelope
from mercurygen.emit.checks import global_multiple, split_of
from mercurygen.emit.differentiable import Both
from mercurygen.emit.envelope import ROLES, Envelope, Facts, Member
from mercurygen.errors import UserError
from mercurygen.search.candidate import Candidate
from mercurygen.search.place import expected
from mercurygen.search.result import Result
from mercurygen.search.robust import time_of
from mercurygen.search.why import label


def emit(wanted: Request, name: str, folder: Path, progress, *, force: bool) -> str:
    """Search, build and write a set; what to print.

    Raises:
        UserError: `usage`, what refuses a search or a file.
    """
    _check(wanted)
    result = request.run(replace(wanted, objective="robust"), progress)
    lean = request.run(replace(wanted, objective="memory"), progress).best
    assert result.robustness is not None
    found = {"fast": result.fastest, "robust": result.robustness.best.candidate, "lean": lean}
    chosen: dict[str, Candidate] = {}
    same = []
    for role in ROLES:
        twin = next((x for x, c in chosen.items() if _alike(c, found[role])), None)
        if twin is None:
            chosen[role] = found[role]
        else:
            same.append((role, twin))
    command = names.command(wanted, name)
    members = tuple(_member(role, c, result) for role, c in chosen.items())
    told = Envelope(name, command, members, tuple(same))
    built = [_built(role, c, told, result) for role, c in chosen.items()]
    text = envelope.text(told, [_facts(each.proved) for each in built])
    written = write_set(folder, [*(x.texts for x in built), {f"{name}.py": text}], force=force)
    return "\n".join(_report(told, chosen, result, written))


def _check(wanted: Request) -> None:
    """Refuse what has no set of schedules."""
    if wanted.objective != "time":
        help = "the set has the best for time, for memory and for robustness"
        raise UserError("usage", "--objective beside --envelope", help=help)
    if wanted.probe:
        help = "the modules of a set look at their machine anyway"
        raise UserError("usage", "--probe beside --envelope", help=help)
    if wanted.problem.documents:
        help = "its module does not know documents yet: emit the schedule that you want"
        raise UserError("usage", "--envelope of packed documents", help=help)
    if wanted.problem.seq_kv is not None:
        help = "its module chooses by one length: emit the schedule that you want"
        raise UserError("usage", "--envelope beside --seq-kv", help=help)
    if prod(wanted.sizes) == 1:
        help = "one rank has no links to choose by: emit the schedule that you want"
        raise UserError("usage", "--envelope of one rank", help=help)
    if wanted.order == "any":
        help = "the caller's tokens lie alike for all of the set: name one order"
        raise UserError("usage", "--order any beside --envelope", help=help)


def _alike(a: Candidate, b: Candidate) -> bool:
    """Whether two searches found the same schedule."""
    return a.text == b.text


def _member(role: str, candidate: Candidate, result: Result) -> Member:
    """Its times: as planned, and with one level's links at half speed."""
    topology, spanned = result.topology, [i for i, n in enumerate(result.group) if n > 1]
    made = []
    for index in spanned:
        network = Network(slow(topology, index).topology, result.group, result.tp)
        made.append((topology.levels[index].name, time_of(candidate, network) * 1e3))
    return Member(
        role, _rounded(candidate.cost.time * 1e3), tuple((x, _rounded(t)) for x, t in made)
    )


def _rounded(ms: float) -> float:
    return float(f"{ms:.4f}")


def _built(role: str, candidate: Candidate, told: Envelope, result: Result) -> Built:
    """A member's files: its module looks at the machine."""
    schedule = candidate.schedule
    why = f"{label(candidate)} has {ROLES[role]} of {result.counts.legal} legal schedules."
    comments = (told.command, *choice.commented(why))
    looks = expected(result.topology, schedule)
    built = build(replace(schedule, comments=comments, expected=looks), f"{told.name}_{role}")
    choice.agree(built.proved, candidate.cost)
    return built


def _facts(proved: Proved) -> Facts:
    """What the choice goes by, from a member's schedule alone."""
    plans = [each for each in (proved, proved.backward) if each is not None]
    both = None if proved.backward is None else Both(proved.plan, proved.backward.plan)
    split = (split_of(proved.plan, axis, both) for axis in ("B", "H", "G"))
    peak = max(each.report.peak.most for each in plans)
    return Facts(proved.schedule, peak, (global_multiple(proved.plan), *split))


def _report(
    told: Envelope, chosen: dict[str, Candidate], result: Result, written: Sequence[Written]
) -> list[str]:
    """What the set is, and its files."""
    lines = []
    for member in told.members:
        candidate = chosen[member.role]
        figures = f"{member.ms:.4g} ms, {candidate.cost.peak_memory / 2**20:.5g} MiB"
        where = "".join(f"; {ms:.4g} with {level} slow" for level, ms in member.slow)
        lines += choice.field(member.role, [f"{label(candidate)}", f"{figures}{where}"])
    for role, other in told.same:
        lines += choice.field(role, [f"the same schedule as {other}: not written twice"])
    lines += choice.field("searched", [choice.counts(result)])
    states = [f"{shown(x.path)} ({'written' if x.changed else 'unchanged'})" for x in written]
    lines += ["", *choice.field("files", states)]
    use = f"from {told.name} import attention, choose, make_meshes, measure"
    return [*lines, *choice.field("run", [use])]


def again(path: Path) -> str | None:
    """The text that a module which chooses should have; None if it is no such module.

    Raises:
        UserError: `not-an-envelope`, or what is wrong with a member's schedule.
    """
    told = envelope.parse(path.stem, read_text(path))
    if told is None:
        return None
    return envelope.text(
        told, [_facts(prove_schedule(load(x).schedule)) for x in members(path, told)]
    )


def members(path: Path, told: Envelope | None = None) -> list[Path]:
    """The schedules of a set, beside the module that chooses; none if it is no such module."""
    told = told or envelope.parse(path.stem, read_text(path))
    if told is None:
        return []
    return [path.with_name(f"{path.stem}_{member.role}.sched") for member in told.members]
