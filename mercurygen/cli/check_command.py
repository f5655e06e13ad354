"""`mercurygen check`: every schedule of a folder emitted again, in memory, and compared."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import click

from mercurygen.errors import UserError, shorten

FOLDER = "generated"
_SHOWN = 40  # lines of a diff


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a file.

    Attributes:
        file: which.
        what: in words.
        fix: the command that mends it.
        diff: from what is there to what would be emitted.
    """

    file: Path
    what: str
    fix: str
    diff: tuple[str, ...] = ()


@click.command(short_help="Emit every schedule of DIR again and compare.")
@click.argument("folder", metavar="[DIR]", default=FOLDER)
@click.option("--diff", "with_diff", is_flag=True, help="Show what would change.")
def check(folder: str, with_diff: bool) -> None:
    """Emit every schedule of DIR again, in memory, and compare; exit with 1 if a file differs.

    It never searches and never writes.
    """
    from mercurygen.cli.files import shown
    from mercurygen.cli.formatter import check_formatter

    place = Path(folder)
    try:
        if not place.is_dir():
            raise UserError("no-such-folder", f"no folder {shown(place)}", help="check [DIR]")
        check_formatter()
        schedules = sorted(path for path in place.iterdir() if path.suffix == ".sched")
    except OSError as error:  # too long a name, no permission
        message = f"cannot read {shorten(shown(place), 200)}: {error.strerror}"
        raise UserError("cannot-read", message) from None
    findings = [finding for path in schedules for finding in _schedule(path)]
    findings += _orphans(place, {path.stem for path in schedules})
    for finding in findings:
        click.echo(f"{shown(finding.file)}: {finding.what}\n  fix: {finding.fix}")
        if with_diff and finding.diff:
            click.echo("\n".join(f"  {line}" for line in finding.diff))
    count = len(schedules)
    if findings:
        wrong = len({finding.file for finding in findings})
        click.echo(f"{wrong} of the files of {count} schedules need attention")
        click.get_current_context().exit(1)
    click.echo(f"{count} schedules and their modules are as this version emits them")


def _schedule(path: Path) -> list[Finding]:
    """What is wrong with a schedule or its module."""
    from mercurygen.cli import names
    from mercurygen.cli.build import build
    from mercurygen.cli.files import shown
    from mercurygen.cli.read import load

    try:
        names.check_name(path.stem, "call it {}.sched")
        loaded = load(path)
        built = build(loaded.schedule, path.stem, spans=loaded.spans)
        there = _texts(path)
    except UserError as error:
        if error.slug == "proof-failed":
            raise
        return [Finding(path, error.render(), f"edit {shown(path)}")]
    again = f"mercurygen emit --schedule {shown(path)} -o {shown(path.parent)}"
    found = []
    if there[".sched"] != built.sched_text:
        what = "not in normal form, as emission writes it"
        diff = _diff(there[".sched"] or "", built.sched_text)
        found.append(Finding(path, what, again, diff))
    finding = _module(path.with_suffix(".py"), there[".py"], built.module_text, again)
    return [*found, *([finding] if finding else [])]


def _texts(path: Path) -> dict[str, str | None]:
    """Extension -> text, None where there is no file."""
    from mercurygen.cli.files import read_text

    files = {suffix: path.with_suffix(suffix) for suffix in (".sched", ".py")}
    return {x: read_text(file) if file.exists() else None for x, file in files.items()}


def _module(path: Path, text: str | None, want: str, again: str) -> Finding | None:
    from mercurygen.cli.files import state

    if text == want:
        return None
    if text is None:
        return Finding(path, "missing: its schedule is there", again)
    diff = _diff(text, want)
    found = state(text)
    if found == "edited":
        what = "edited by hand: its digest does not match its body"
        return Finding(path, what, f"keep the edit elsewhere, then {again} --force", diff)
    if found == "foreign":
        what = "not written by mercurygen, but in the place of a module"
        return Finding(path, what, f"move it away, then {again}", diff)
    what = "out of date: its schedule or the generator changed"
    return Finding(path, what, again, diff)


def _diff(old: str, new: str) -> tuple[str, ...]:
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "there", "emitted", lineterm="", n=1
    )
    found = list(lines)
    more = len(found) - _SHOWN
    return (*found[:_SHOWN], *([f"... {more} more lines"] if more > 0 else []))


def _orphans(folder: Path, schedules: set[str]) -> list[Finding]:
    """Modules of mercurygen without their schedule."""
    from mercurygen.cli.files import read_text, shown, state
    from mercurygen.emit.envelope import HEADING

    found = []
    for path in sorted(folder.glob("*.py")):
        if path.stem in schedules or not path.is_file():
            continue
        try:
            text = read_text(path)
        except UserError:
            continue
        if state(text) == "foreign":
            continue
        if HEADING in text:
            found += _chooser(path, text)
        else:
            fix = f"rm {shown(path)}, or bring back {shown(path.with_suffix('.sched'))}"
            found.append(Finding(path, "orphaned: its schedule is not there", fix))
    return found


def _chooser(path: Path, text: str) -> list[Finding]:
    """What is wrong with a module that chooses among the schedules of a set."""
    from mercurygen.cli import envelope
    from mercurygen.cli.files import shown

    again = f"{text.split(chr(10))[1].removeprefix('#').strip()} -o {shown(path.parent)}"
    try:
        want = envelope.again(path)
    except UserError as error:
        if error.slug == "proof-failed":
            raise
        return [Finding(path, error.render(), again)]
    finding = _module(path, text, want or "", again)
    return [finding] if finding else []
