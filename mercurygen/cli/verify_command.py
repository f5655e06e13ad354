"""`mercurygen verify`: the proof of the plan, the text of the file, virtual and real ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mercurygen.errors import UserError

if TYPE_CHECKING:
    from mercurygen.cli.build import Built, Proved
    from mercurygen.cli.read import Loaded

TIMEOUT, TIMEOUT_A_RANK = 60.0, 10.0  # seconds


@click.command(short_help="Prove a file's plan, compare its text, run it.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--run/--no-run", default=True, help="Also on real gloo processes.  [default: run]")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    help=f"For each run of a file.  [default: {TIMEOUT:g}, and {TIMEOUT_A_RANK:g} a rank]",
)
def verify(files: tuple[str, ...], run: bool, timeout: float | None) -> None:
    """Verify emitted modules, edited or not, or schedules.

    The plan is proved for every rank without running anything, and the file's communication call
    sites are compared with it. Then the file is executed, in processes of its own: first all ranks
    in one, on a torch.distributed that watches every buffer and call, with small sizes; then one
    process for each rank. Results are compared with one device.
    """
    failed = 0
    for file in files:
        click.echo(file)
        try:
            _verify(Path(file), run, timeout)
        except UserError as error:
            if len(files) == 1:
                raise
            click.echo(error.render(), err=True)
            failed = max(failed, error.exit_code)
    if failed:
        click.get_current_context().exit(failed)


def _verify(path: Path, run: bool, timeout: float | None) -> None:
    from mercurygen.cli import names, words
    from mercurygen.cli.build import build, check_call_sites
    from mercurygen.cli.read import load

    if path.suffix == ".py" and (schedules := _set(path)):
        for schedule in schedules:
            module = schedule.with_suffix(".py")
            click.echo(str(module))
            _verify(module, run, timeout)
        return
    loaded = load(path)
    name = names.check_name(loaded.name, "call it {}" + path.suffix)
    built = build(loaded.schedule, name, spans=loaded.spans)
    for proved, title in ((built.proved, ""), (built.proved.backward, "of the backward, ")):
        if proved is not None:
            _say("plan", f"{title}proved: " + words.proof(proved.report))
            _say("bytes", title + _bytes(proved))
            _say("memory", f"{title}{words.mib(proved.report.peak.most)} a GPU at the peak")
    if loaded.module is None:
        _say("text", "as it would be emitted: " + words.call_sites(built.summary))
    else:
        _say("text", _text(loaded, built))
        backward = built.proved.backward and built.proved.backward.plan
        summary = check_call_sites(loaded.module, built.proved, backward)
        _say("calls", words.call_sites(summary))
    _play(loaded, built, timeout, needed=run)
    if not run:
        _say("ranks", "not run")
        return
    _run(loaded, built, timeout)


def _set(path: Path) -> list[Path]:
    """The schedules among which a module chooses, if it does: its text must be as emitted.

    Raises:
        UserError: `text-mismatch` (exit code 1), `not-an-envelope`, what refuses a schedule.
    """
    from mercurygen.cli import envelope, words
    from mercurygen.cli.files import read_text, shown

    schedules = envelope.members(path)
    if not schedules:
        return []
    if envelope.again(path) != read_text(path):
        raise UserError(
            "text-mismatch",
            f"{shown(path)} is not what its schedules make",
            help="it is compared, not run: `mercurygen check` says how to mend it",
            exit_code=1,
        )
    said = words.plural(len(schedules), "schedule")
    _say("text", f"as this version emits it; it chooses among {said}, verified one by one:")
    return schedules


def _bytes(proved: Proved) -> str:
    """What crosses each link, as the proof counted it."""
    from mercurygen.cli import words

    names = {link.level: link.name for link in proved.schedule.links}
    crossing = proved.report.traffic.crossing
    sent = [
        f"{level} {names[level]} {words.mib(spread.mean)} (busiest rank {words.mib(spread.most)})"
        for level, spread in crossing.items()
    ]
    return "sent by a rank: " + (", ".join(sent) or "nothing")


def _text(loaded: Loaded, built: Built) -> str:
    """How the file relates to what mercurygen emits."""
    from mercurygen.cli.files import state

    assert loaded.module is not None
    if loaded.module == built.module_text:
        return "as this version emits it"
    if state(loaded.module) == "ours":
        return "as another version emitted it; its digest is right"
    return "edited by hand since it was emitted: its digest does not match"


def _play(loaded: Loaded, built: Built, timeout: float | None, *, needed: bool) -> None:
    """On virtual ranks, where torch is there or the real ranks need it too."""
    from mercurygen import operators
    from mercurygen.cli import ranks, virtual
    from mercurygen.virtual.run import MOST_RANKS

    schedule, count = built.proved.schedule, built.proved.report.ranks
    if count > MOST_RANKS:
        _say("virtual", f"not run: {count} ranks are more than {MOST_RANKS}")
        return
    try:
        ranks.need_torch()
    except UserError as error:
        if needed:
            raise
        _say("virtual", f"not run: {error.message}")
        return
    begun = time.monotonic()
    text, operator = loaded.module or built.module_text, operators.load(schedule.operator)
    task = virtual.Task(text, schedule, operator, str(loaded.path))
    played = virtual.run(task, timeout or TIMEOUT + TIMEOUT_A_RANK * count)
    took, calls = time.monotonic() - begun, f"{played.calls} calls"
    if schedule.backward is not None:
        calls += " with their gradients"
    _say(
        "virtual",
        f"{count} virtual {'ranks' if count > 1 else 'rank'}: {calls}, "
        f"{played.operations} operations, each the plan's; buffers untouched in flight, results "
        f"right; largest error {played.error:.1e} (float64) [{took:.1f} s]",
    )


def _run(loaded: Loaded, built: Built, timeout: float | None) -> None:
    from mercurygen.cli import ranks

    count = built.proved.report.ranks
    if count > ranks.MOST_RANKS:
        _say("ranks", f"not run: {count} processes are more than {ranks.MOST_RANKS}")
        return
    begun = time.monotonic()
    text = loaded.module or built.module_text
    timeout = timeout or TIMEOUT + TIMEOUT_A_RANK * count
    passed = ranks.run(text, built.module_text, str(loaded.path), count, timeout)
    took = time.monotonic() - begun
    where = f"{count} gloo processes" if count > 1 else "1 process"
    _say(
        "ranks",
        f"{passed.checks} checks on each of {where}, all right; "
        f"largest error {passed.error:.1e} (float32) [{took:.1f} s]",
    )


def _say(what: str, text: str) -> None:
    click.echo(f"  {what:8}{text}")
