"""`mercurygen search`: the ranked table, the Pareto set, the named designs, the refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from mercurygen.cli.options import problem_options, split

if TYPE_CHECKING:
    from mercurygen.cli.request import Request
    from mercurygen.search.result import Candidate, Result

SHOWN = 10


@click.command(short_help="Rank the schedules of OP; write nothing.")
@click.argument("op", metavar="OP")
@problem_options
@click.option("--schedule", "design", metavar="NAME", help="Instances of this design only.")
@click.option("--why", "wants_why", is_flag=True, help="What speaks for the choice, what against.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for a program.")
@click.option("--no-cache", is_flag=True, help="Work it out anew, and keep nothing.")
def search(
    op: str,
    topo: str | None,
    design: str | None,
    wants_why: bool,
    as_json: bool,
    no_cache: bool,
    **options,
) -> None:
    """Rank the schedules of OP on a topology; write nothing but a kept answer of a long search."""
    from mercurygen.cli import request, store
    from mercurygen.cli.list_command import warn

    options = {**split(options), "design": design}
    wanted = request.make(op, topo, options)
    warn(wanted.topology)

    def work() -> str:
        return _answer(wanted, wants_why, as_json)

    asked = "search", wanted, (wants_why, as_json)
    click.echo(work() if no_cache else store.answer(*asked, work))


def _answer(wanted: Request, wants_why: bool, as_json: bool) -> str:
    """What is printed."""
    from mercurygen.cli import request, why
    from mercurygen.cli.progress import Progress

    with Progress() as progress:
        result = request.run(wanted, progress)
        reasons = why.find(wanted, result, progress) if wants_why else None
    if as_json:
        found = {"operator": wanted.operator, "outside_validated_range": _outside(result)}
        found |= result.to_dict()
        if reasons is not None:
            found["why"] = reasons.to_dict()
        return json.dumps(found, indent=2, allow_nan=False)
    return "\n".join(why.lines(reasons) if reasons is not None else _lines(result))


def _outside(result: Result) -> str:
    """What of it the model has not been held against; nothing if it has of all."""
    from math import prod

    from mercurygen.cost.validated import outside

    return outside(result.problem, result.topology.gpu.name, prod(result.group))


def _lines(result: Result) -> list[str]:
    from mercurygen.cli import choice, words
    from mercurygen.search.place import links

    where = words.place(links(result.topology, result.group))
    tp = f", tp {result.tp}" if result.tp > 1 else ""
    shown = result.ranked[:SHOWN]
    best = "smallest" if result.objective == "memory" else "fastest"
    front = [(chr(ord("a") + i % 26), candidate) for i, candidate in enumerate(result.pareto)]
    return [
        words.problem(result.problem),
        f"{result.topology.name}: {where}{tp}; {choice.counts(result)}",
        "",
        f"the {len(shown)} {best} of {result.counts.legal} ({_decided(result)}); "
        "times by the model, not yet measured; bytes sent by the busiest rank",
        *filter(None, [_outside(result)]),
        *_table(result, [(str(i), candidate) for i, candidate in enumerate(shown, 1)]),
        "",
        "pareto: nothing is better in both time and memory",
        *_table(result, front),
        *_trades(result),
        "",
        *_robustness(result),
        "named designs",
        *_designs(result),
    ]


def _decided(result: Result) -> str:
    """By what the best were ranked."""
    if result.best.simulated is None:
        return "by the closed form: as many ranks are not simulated"
    return f"the best {len(result.ranked)} simulated"


def _table(result: Result, candidates: list[tuple[str, Candidate]]) -> list[str]:
    """A line for each candidate: figures, then the schedule in a few words."""
    from mercurygen.cli import words
    from mercurygen.search.why import what

    spanned = [link.name for link in result.best.cost.links]
    rows = [["", "ms", "compute", "waiting", "memory", *spanned, "work", "order", "mesh", "what"]]
    for name, candidate in candidates:
        cost = candidate.cost
        sent = {link.name: link for link in cost.links}
        row = [name, *(words.ms(x) for x in (cost.time, cost.times.compute, cost.times.exposed))]
        row.append(words.mib(cost.peak_memory))
        row += [words.mib(sent[name].most) if name in sent else "0" for name in spanned]
        row += [f"{cost.imbalance:.3g}", candidate.plan.program.order.kind]
        row += [words.mesh(candidate.schedule.mesh), candidate.design or what(candidate)]
        rows.append(row)
    return ["  " + line for line in words.table(rows, right=range(1, len(rows[0]) - 3))]


def _trades(result: Result) -> list[str]:
    """What each point of the Pareto set gives up to its neighbours."""
    from mercurygen.search.front import trades

    made = enumerate(trades(result.pareto))
    return [f"  {chr(ord('a') + i % 26)} {trade.words}" for i, trade in made]


def _robustness(result: Result) -> list[str]:
    """The best schedules on machines that are not as planned, if those were asked for."""
    from mercurygen.cli import robustness

    found = result.robustness
    if found is None:
        return []
    title = (
        f"robust: {len(found.rows)} schedules in {len(found.scenarios)} scenarios; `loses`: time "
        "over the best there; A has the least worst of them, or is the simplest within 1% of it"
    )
    table = robustness.lines(found, robustness.shown(found, 4))
    told = [f"  {line}".rstrip() for line in (*table, "", *robustness.changed(found))]
    return [title, *told, ""]


def _designs(result: Result) -> list[str]:
    """Every named design: its best instance, or what refuses it, in words."""
    from textwrap import wrap

    from mercurygen.cli.choice import WIDTH

    legal = [(entry.name, entry.best) for entry in result.named if entry.best]
    lines = _table(result, legal) if legal else []
    width = max(len(entry.name) for entry in result.named)
    for entry in result.named:
        if entry.best is None:
            text = f"refused, {entry.slug}: {entry.message}"
            first, *more = wrap(text, WIDTH - width - 4)
            lines.append(f"  {entry.name:{width}}  {first}")
            lines += [f"  {'':{width}}  {line}" for line in more]
    return lines
