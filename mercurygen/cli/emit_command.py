"""`mercurygen emit`: search or read a schedule, prove it, write its two files, say why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mercurygen.cli.options import problem_options, split
from mercurygen.errors import UserError

if TYPE_CHECKING:
    from mercurygen.cost.report import Cost
    from mercurygen.cost.topology import Topology
    from mercurygen.lower.plan import Plan
    from mercurygen.schedule.schedule import Schedule

FOLDER = "generated"


@click.command(short_help="Search, prove and write NAME.sched and NAME.py.")
@click.argument("op", metavar="[OP]", required=False)
@problem_options
@click.option("--size", multiple=True, metavar="AXIS=N", help="Of an axis of your own operator.")
@click.option(
    "--schedule",
    metavar="NAME|FILE",
    help="Search among the instances of a design only; or take a .sched file as it is.",
)
@click.option("--name", help="Of the files.  [default: from the problem]")
@click.option("-o", "--output", metavar="DIR", help=f"Where to write.  [default: {FOLDER}]")
@click.option("--force", is_flag=True, help="Overwrite what was edited by hand.")
@click.option(
    "--probe",
    is_flag=True,
    default=None,
    help="The module checks on which machines its ranks are, and can time its links.",
)
@click.option(
    "--envelope",
    is_flag=True,
    default=None,
    help="The fast, the robust and the lean schedule, and a module that chooses among them.",
)
def emit(
    op: str | None,
    topo: str | None,
    size: tuple[str, ...],
    schedule: str | None,
    name: str | None,
    output: str | None,
    force: bool,
    **options,
) -> None:
    """Write NAME.sched and NAME.py: the best schedule of OP on a topology, proved.

    OP is a shipped operator (see `mercurygen ops`) or path.py::function. With --schedule FILE
    nothing is searched: the file says everything. A pair that was emitted is written where it is.
    """
    from mercurygen.cli.read import is_file

    if schedule is not None and is_file(schedule):
        given = {"OP": op, "--topo": topo, "--size": size or None}
        given |= _given(options)
        for option, value in given.items():
            if value is not None:
                raise UserError(
                    "usage",
                    f"{option} beside --schedule FILE",
                    help="a schedule file says everything itself: edit it there",
                )
        _emit_file(Path(schedule), name, output, force)
        return
    if op is None:
        raise UserError("usage", "emit what? give OP", help="see `mercurygen ops`: attention")
    from mercurygen.cli.operator_emit import emit_operator, is_attention

    if not is_attention(op):
        others = {**options, "schedule": schedule}
        emit_operator(op, topo, size, others, name, output, force)
        return
    if size:
        help = "sizes of attention have options of their own: --seq, --heads, ..."
        raise UserError("usage", "--size is an option of your own operators", help=help)
    asked = {**split(options), "design": schedule}
    asked |= {key: options[key] for key in ("probe", "envelope")}
    _emit_search(op, topo, asked, name, output, force)


def _given(options: dict) -> dict:
    return {f"--{name.replace('_', '-')}": value for name, value in options.items()}


def _emit_search(
    op: str, topo: str | None, options: dict, name: str | None, output: str | None, force: bool
) -> None:
    from dataclasses import replace
    from math import prod

    from mercurygen.cli import choice, names, request
    from mercurygen.cli.build import build
    from mercurygen.cli.files import write_pair
    from mercurygen.cli.list_command import warn
    from mercurygen.cli.progress import Progress
    from mercurygen.search.place import expected

    if name is not None:
        names.check_name(name)
    wanted = request.make(op, topo, options)
    warn(wanted.topology)
    name = name or names.default_name(wanted)
    if wanted.probe and prod(wanted.sizes) == 1:
        help = "one rank has no links, and is where it is: leave the option out"
        raise UserError("usage", "--probe of one rank", help=help)
    if wanted.envelope:
        from mercurygen.cli import envelope

        with Progress() as progress:
            said = envelope.emit(wanted, name, Path(output or FOLDER), progress, force=force)
        click.echo(said)
        return
    with Progress() as progress:
        result = request.run(wanted, progress)
    comments = (names.command(wanted, name), *choice.because(result))
    best = replace(result.best.schedule, comments=comments)
    if wanted.probe:
        best = replace(best, expected=expected(wanted.topology, best))
    built = build(best, name)
    choice.agree(built.proved, result.best.cost)
    written = write_pair(Path(output or FOLDER), built.texts, force=force)
    click.echo(choice.found(result, built, written))


def _emit_file(path: Path, name: str | None, output: str | None, force: bool) -> None:
    from mercurygen.cli import choice, names
    from mercurygen.cli.build import build
    from mercurygen.cli.files import write_pair
    from mercurygen.cli.read import load

    if name is not None:
        names.check_name(name)
    loaded = load(path)
    name = name or names.check_name(loaded.name)
    built = build(loaded.schedule, name, spans=loaded.spans)
    priced = price(built.proved.schedule, *built.proved.plans)
    if priced is not None:
        choice.agree(built.proved, priced[0])
    folder = Path(output) if output else _folder_of(path, name)
    written = write_pair(folder, built.texts, force=force, source=path)
    click.echo(choice.given(built, priced, written))


def _folder_of(path: Path, name: str) -> Path:
    """Where a pair that was emitted stands; `generated` for a schedule without a module."""
    from mercurygen.cli.files import read_text, state

    beside = path.parent / f"{name}.py"
    if beside.is_file() and state(read_text(beside)) != "foreign":
        return path.parent
    return Path(FOLDER)


def price(schedule: Schedule, *plans: Plan) -> tuple[Cost, Topology] | None:
    """What a schedule costs on its topology, if that is shipped and still the same.

    Args:
        schedule: with its header.
        plans: of the forward, and of the backward if there is one.
    """
    from functools import reduce

    from mercurygen.cost import topology as topologies
    from mercurygen.cost.decide import decide
    from mercurygen.cost.links import Network
    from mercurygen.cost.report import together
    from mercurygen.ir.problem import Sizes

    target = schedule.target
    if isinstance(schedule.problem, Sizes):
        return None
    if target.name not in topologies.shipped():
        return None
    topology = topologies.load(target.name)
    if topology.digest != target.digest or topology_levels(topology) != levels(schedule):
        return None
    network = Network(topology, schedule.group, schedule.tp)
    return reduce(together, (decide(plan, network) for plan in plans)), topology


def topology_levels(topology: Topology) -> list[tuple[str, int]]:
    """Names and sizes of a topology's levels."""
    return [(level.name, level.size) for level in topology.levels]


def levels(schedule: Schedule) -> list[tuple[str, int]]:
    """The same as a schedule's header has them."""
    return [(level.level, level.size) for level in schedule.target.levels]
