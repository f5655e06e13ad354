"""What `emit` prints: enough for a person to decide, and no more than a screen."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from textwrap import wrap

from mercurygen.cli import robustness, words
from mercurygen.cli.build import Built, Proved
from mercurygen.cli.files import Written, shown
from mercurygen.cost.report import Cost
from mercurygen.cost.topology import Topology
from mercurygen.cost.validated import outside
from mercurygen.emit.header import WHY
from mercurygen.errors import InternalError
from mercurygen.ir.documents import busiest
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.search.candidate import Candidate
from mercurygen.search.result import Result
from mercurygen.search.why import label, why

WIDTH = 100
_COLUMN = 11


def found(result: Result, built: Built, written: Sequence[Written]) -> str:
    """The report on a schedule that was searched for."""
    best = result.best
    lines = [
        *head(built),
        *field("chosen", [f"{label(best)}, the best of {result.counts.legal}"]),
        *field("", _directives(built)),
        *_balance(built),
        *_cost(best.cost, result.topology, result.memory_limit, _calls(built)),
        *_range(result.problem, result.topology, prod(result.group)),
        *_proof(built),
        "",
        *_others(result),
        *_robust(result),
        *field("why", wrap(why(result), WIDTH - _COLUMN)),
        *field("searched", wrap(counts(result), WIDTH - _COLUMN)),
        "",
        *foot(built, written),
    ]
    return "\n".join(lines)


def because(result: Result) -> list[str]:
    """Why, as comments of the schedule, which the module's docstring repeats."""
    return commented(why(result, brief=True))


def commented(text: str) -> list[str]:
    """A reason as comments of a schedule."""
    return [WHY + line for line in wrap(text, WIDTH - len(f"# {WHY}"), break_on_hyphens=False)]


def given(built: Built, priced: tuple[Cost, Topology] | None, written: Sequence[Written]) -> str:
    """The report on a schedule that came from a file."""
    lines = [*head(built), *field("schedule", _directives(built)), *_balance(built)]
    if priced is not None:
        cost, topology = priced
        lines += _cost(cost, topology, topology.gpu.memory_bytes, _calls(built))
        schedule = built.proved.schedule
        lines += _range(schedule.problem, topology, prod(schedule.group))
    else:
        lines += field("memory", [f"{words.mib(built.proved.report.peak.most)} a GPU at the peak"])
        lines += field("time", [f"not priced: {_unpriced(built)}"])
    lines += _proof(built)
    return "\n".join([*lines, "", *foot(built, written)])


def _balance(built: Built) -> list[str]:
    """Of packed documents how even the ranks' work is, in one order of tokens or the other."""
    program = built.proved.program
    ranks, tokens = program.mesh.size, sum(program.documents)
    found = []
    for zigzag, name in ((False, "contiguous"), (True, "zigzag")):
        if ranks > 1 and tokens and tokens % (2 * ranks if zigzag else ranks) == 0:
            most, mean = busiest(program.documents, ranks, zigzag, program.mask == "causal")
            found.append(f"{name} {most / mean:.3g}")
    text = f"pairs of the busiest rank's own queries over the mean: {', '.join(found)}"
    return field("documents", [text]) if found else []


def _calls(built: Built) -> str:
    return "a call" if built.proved.backward is None else "forward and backward"


def _proof(built: Built) -> list[str]:
    """What was proved of both passes, and compared with the text."""
    proved = built.proved
    lines = wrap(words.proof(proved.report), WIDTH - _COLUMN)
    if proved.backward is not None:
        lines += wrap(f"backward: {words.proof(proved.backward.report)}", WIDTH - _COLUMN)
    return field("proof", [*lines, _text(built)])


def _unpriced(built: Built) -> str:
    """Why a schedule has no price."""
    target = built.proved.schedule.target
    if isinstance(built.proved.schedule.problem, Sizes):
        return "the model knows no kernel but attention's"
    return f"no shipped topology is {target.name} {target.digest}"


def head(built: Built) -> list[str]:
    """What it is for, on two lines."""
    schedule = built.proved.schedule
    placed = f"{words.place(schedule.links)} of {schedule.target.name}"
    if schedule.tp > 1:
        placed += f", beside {schedule.tp - 1} tensor-parallel siblings each"
    return [
        *field(schedule.operator.rpartition("::")[2], [words.problem(schedule.problem)]),
        *field("on", [placed]),
    ]


def field(name: str, lines: Sequence[str]) -> list[str]:
    """Lines with a word in the margin."""
    return [f"{name if not i else '':{_COLUMN}}{line}".rstrip() for i, line in enumerate(lines)]


def foot(built: Built, written: Sequence[Written]) -> list[str]:
    """The files, and how the module is run."""
    ranks = built.proved.report.ranks
    module = shown(written[-1].path)
    states = [f"{shown(one.path)} ({'written' if one.changed else 'unchanged'})" for one in written]
    lines = built.module_text.count("\n")
    run = f"torchrun --nproc-per-node {ranks} {module}" if ranks > 1 else f"python {module}"
    entry = built.proved.program.operator
    names = f"{entry}, make_mesh, shard" if ranks > 1 else entry
    return [
        *field("files", [states[0], f"{states[1]}, {lines} lines"]),
        *field("run", [f"from {built.name} import {names}", f"{run}   # checks itself"]),
    ]


def counts(result: Result) -> str:
    """How many schedules were looked at, and what refused the others."""
    c = result.counts
    text = f"{words.plural(c.candidates, 'schedule')}, {c.legal} legal, "
    if c.not_emitted:
        text += f"{c.not_emitted} of the best without a module yet, "
    text += f"{c.candidates - c.legal} refused"
    if c.refused:
        text += f" ({', '.join(f'{slug} {count}' for slug, count in c.refused)})"
    if c.skipped:
        text += f"; {c.skipped} variants of others (tile loops, rings both ways) not looked at"
    return text


def _directives(built: Built) -> list[str]:
    return words.communication(built.proved.schedule)


def _text(built: Built) -> str:
    return f"text parsed again: {words.call_sites(built.summary)}"


def _cost(cost: Cost, topology: Topology, limit: int, calls: str = "a call") -> list[str]:
    t = cost.times
    even = round(cost.imbalance, 3) == 1
    work = (
        "the same work on every rank"
        if even
        else (f"the busiest rank has {cost.imbalance:.3g} times the mean work")
    )
    time = [
        f"{words.ms(t.total)} ms {calls} by the model: compute {words.ms(t.compute)}, "
        f"copies and merges {words.ms(t.copies)}, launches {words.ms(t.launch)}, "
        f"waiting {words.ms(t.exposed)}",
        f"links busy {words.ms(t.transfers)} ms, hidden or not; {work}; not yet measured",
    ]
    memory = f"{words.mib(cost.peak_memory)} a GPU at the peak, of {limit / 2**30:.4g} GiB"
    if cost.peak_memory > limit:
        memory += ": MORE THAN IT HAS"
    return [
        *field("time", [line for text in time for line in wrap(text, WIDTH - _COLUMN)]),
        *field("links", links(cost, topology)),
        *field("memory", [memory]),
    ]


def _range(problem: Problem | Sizes, topology: Topology, ranks: int) -> list[str]:
    """A line if the price is of what the model has not been held against."""
    text = outside(problem, topology.gpu.name, ranks)
    return field("", [text]) if text else []


def links(cost: Cost, topology: Topology) -> list[str]:
    """Bytes per link: of the mean rank, the busiest, and the port that GPUs share."""
    if not cost.links:
        return ["nothing is sent"]
    levels = {level.name: level for level in topology.levels}
    rows = []
    for link in cost.links:
        row = [
            f"{link.name} ({levels[link.name].link})",
            f"sent by a GPU: mean {words.mib(link.mean)}",
            f"busiest {words.mib(link.most)}",
        ]
        shared = levels[link.name].port_gpus > 1
        row.append(f"by the busiest port {words.mib(link.port)}" if shared else "")
        rows.append(row)
    return words.table(rows)


def _others(result: Result) -> list[str]:
    """The runner-up, and the best named design if that is another one."""
    best, lines = result.best, []
    for second in result.others[:1]:
        lines += field("runner-up", wrap(_other(second), WIDTH - _COLUMN))
    named = [entry.best for entry in result.named if entry.best is not None]
    named.sort(key=lambda candidate: candidate.key(result.objective))
    if named and named[0].text == best.text:
        other = f"; next {_other(named[1])}" if named[1:] else ""
        text = f"{named[0].design}, the choice itself{other}"
    else:
        text = _other(named[0]) if named else "none is legal here"
    return [*lines, *field("designs", wrap(f"best named: {text}", WIDTH - _COLUMN))]


def _robust(result: Result) -> list[str]:
    """The choice where links are not as planned, beside the choice for time and the next best."""
    found = result.robustness
    if found is None:
        return []
    fast = found.row(result.fastest)
    beside = [row for row in (fast, *robustness.shown(found, 3)) if row not in (None, found.best)]
    rows = [found.best, *beside[:1]]
    return field("robust", robustness.lines(found, rows))


def _other(candidate: Candidate) -> str:
    cost = candidate.cost
    sent = ", ".join(f"{link.name} {words.mib(link.mean)}" for link in cost.links)
    figures = f"{words.ms(cost.time)} ms, {words.mib(cost.peak_memory)}, sends {sent or 'nothing'}"
    return f"{label(candidate)}: {figures}"


def agree(proved: Proved, cost: Cost) -> None:
    """Hold the price to the proof: the same bytes at the peak and on every link, in both passes.

    Raises:
        InternalError: they differ.
    """
    reports = [each.report for each in (proved, proved.backward) if each is not None]
    peak = max(report.peak.most for report in reports)
    if peak != cost.peak_memory:
        raise InternalError(f"peak memory: proved {peak}, priced {cost.peak_memory} bytes")
    for link in cost.links:
        crossing = [report.traffic.crossing[link.name] for report in reports]
        most, mean = sum(x.most for x in crossing), sum(x.mean for x in crossing)
        if most != link.most or abs(mean - link.mean) > 0.5:
            raise InternalError(
                f"{link.name}: proved {mean} and {most} bytes, "
                f"priced {link.mean} and {link.most}"
            )
