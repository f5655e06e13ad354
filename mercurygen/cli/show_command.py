"""`mercurygen show` and `explain`: a schedule as CommIR, and in words."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mercurygen.errors import UserError, printable, shorten

if TYPE_CHECKING:
    from mercurygen.ir.program import Program
    from mercurygen.lower.plan import Plan
    from mercurygen.schedule.directives import Directive
    from mercurygen.schedule.schedule import Schedule

Step = tuple["Directive | None", "Program"]


@click.command(short_help="Print a schedule as CommIR.")
@click.argument("file", metavar="FILE")
@click.option(
    "--after",
    metavar="DIRECTIVE",
    help="After this directive: its number, its line or how it begins; `0` before any; `each`.",
)
def show(file: str, after: str | None) -> None:
    """Print the CommIR of a schedule: complete, or as it is after a directive."""
    from mercurygen import operators
    from mercurygen.cli.build import plan_of
    from mercurygen.cli.read import load
    from mercurygen.ir.text import show as text
    from mercurygen.schedule.apply import steps

    loaded = load(Path(file))
    plan_of(loaded.schedule, loaded.spans)  # all refusals, before anything is printed
    operator = operators.load(loaded.schedule.operator)
    every = list(steps(operator, loaded.schedule, loaded.spans))
    if after is None:
        click.echo(text(every[-1][1]).rstrip("\n"))
        return
    chosen = range(len(every)) if after == "each" else [_find(after, every)]
    blocks = [f"# {_title(i, every)}\n{text(every[i][1])}".rstrip("\n") for i in chosen]
    click.echo("\n\n".join(blocks))


def _title(index: int, every: list[Step]) -> str:
    directive = every[index][0]
    if directive is not None:
        return f"after {index}: {directive}"
    return "before any directive" if index == 0 else "complete"


def _find(after: str, every: list[Step]) -> int:
    """The step that `--after` means."""
    directives = {i: str(directive) for i, (directive, _) in enumerate(every) if directive}
    if after.isascii() and after.isdigit() and len(after) < 6:
        index = int(after)
        if index == 0 or index in directives:
            return index
    wanted = " ".join(after.split())
    found = [i for i, line in directives.items() if wanted and line.startswith(wanted)]
    exact = [i for i in found if directives[i] == wanted]
    if len(exact or found) == 1:
        return (exact or found)[0]
    near = difflib.get_close_matches(wanted[:200], directives.values(), n=1)
    problem = "which of them" if found else "no directive"
    listed = "\n".join(f"{i} {line}" for i, line in directives.items())
    raise UserError(
        "unknown-step",
        f"--after {shorten(printable(after))!r}: {problem}",
        help=(f"did you mean `{near[0]}`?\n" if near and not found else "") + listed,
    )


@click.command(short_help="Say in words what a schedule does, and why it is the choice.")
@click.argument("file", metavar="FILE")
@click.option(
    "--why", "wants_why", is_flag=True, help="Search again: why it is chosen, what would change it."
)
@click.option("--topo", metavar="T", help="With --why: the topology, if it is not shipped.")
@click.option("--json", "as_json", is_flag=True, help="With --why: for a program.")
@click.option("--no-cache", is_flag=True, help="With --why: work it out anew, keep nothing.")
def explain(file: str, wants_why: bool, topo: str | None, as_json: bool, no_cache: bool) -> None:
    """Say in words what a schedule does: who holds, computes and sends what, and when.

    With --why the search is run again, also with links, sizes and memory otherwise: what the choice
    is worth beside others, and what would change it.
    """
    from mercurygen.cli.build import plans_of
    from mercurygen.cli.explain import explain as words
    from mercurygen.cli.read import load

    loaded = load(Path(file))
    forward, backward = plans_of(loaded.schedule, loaded.spans)
    if wants_why:
        plans = tuple(x.plan for x in (forward, backward) if x)
        click.echo(_why(forward.schedule, plans, topo, as_json, no_cache))
        return
    given = {"--topo": topo, "--json": as_json, "--no-cache": no_cache}
    for option in (option for option, value in given.items() if value):
        raise UserError("usage", f"{option} without --why")
    click.echo(words(forward.schedule, forward.plan).rstrip("\n"))


def _why(
    schedule: Schedule, plans: tuple[Plan, ...], topo: str | None, as_json: bool, no_cache: bool
) -> str:
    """What `explain --why` prints."""
    import json

    from mercurygen.cli import request, store, why
    from mercurygen.cli.progress import Progress
    from mercurygen.schedule.text import show as text_of

    wanted = why.of_file(schedule, plans, topo)

    def work() -> str:
        with Progress() as progress:
            result = request.run(wanted, progress)
            reasons = why.find(wanted, result, progress)
        if as_json:
            found = {**result.to_dict(), "why": reasons.to_dict()}
            return json.dumps(found, indent=2, allow_nan=False)
        beside = why.of_another(result, schedule, plans)
        return "\n".join([*beside, *why.lines(reasons)])

    asked = "explain", wanted, (text_of(schedule), as_json)
    return work() if no_cache else store.answer(*asked, work)
