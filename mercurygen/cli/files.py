"""The files of a module: read with care, written both or not at all.

A module is mercurygen's to overwrite only as it wrote it: what a person has edited, or what is
somebody else's, stays unless they say `--force`.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mercurygen.cli.docstring import schedule_lines
from mercurygen.emit.header import WHY
from mercurygen.emit.module import FIRST_LINE, digest, split_digest
from mercurygen.errors import UserError, printable, shorten

LARGEST_SCHEDULE = 256 * 1024  # bytes; as schedule.text, which counts characters
LARGEST_MODULE = 1024 * 1024

State = Literal["ours", "edited", "foreign"]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a file.

    Attributes:
        path: of the file.
        changed: False if it was the same already and was left alone.
    """

    path: Path
    changed: bool


def shown(path: Path | str) -> str:
    """A path fit to print on one line."""
    return printable(str(path)).replace("\n", "\\n")


def read_text(path: Path, limit: int = LARGEST_MODULE) -> str:
    """The text of a regular file.

    Args:
        path: of the file.
        limit: bytes that are read at most.

    Raises:
        UserError: `no-such-file`, `not-a-file`, `file-too-large`, `not-text`, `cannot-read`.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError("not-a-file", f"{shown(path)} is not a regular file")
        if status.st_size > limit:
            raise UserError(
                "file-too-large",
                f"{shown(path)} has {status.st_size} bytes",
                help=f"at most {limit}",
            )
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise UserError("no-such-file", f"no file {shown(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError("cannot-read", f"cannot read {shown(path)}: {_reason(error)}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError("not-text", f"{shown(path)} is not UTF-8 text") from None
    if "\0" in text:
        raise UserError("not-text", f"{shown(path)} has a NUL byte in it")
    return text


def state(module: str) -> State:
    """Whether a module is as mercurygen wrote it, edited since, or somebody else's."""
    if not module.startswith(FIRST_LINE + "\n"):
        return "foreign"
    claimed, body = split_digest(module)
    return "ours" if claimed == digest(body) else "edited"


def write_pair(
    folder: Path, texts: dict[str, str], *, force: bool = False, source: Path | None = None
) -> list[Written]:
    """Write a schedule and its module into a folder: both, or none; see `write_set`."""
    return write_set(folder, [texts], force=force, source=source)


def write_set(
    folder: Path, sets: list[dict[str, str]], *, force: bool = False, source: Path | None = None
) -> list[Written]:
    """Write schedules and modules into a folder: all of them, or none.

    Args:
        folder: made if there is none.
        sets: name of a file -> its text, of each module: `NAME.sched` and `NAME.py`, or one.
        force: overwrite what a person has edited.
        source: the schedule that the user gave, which may be overwritten by its normal form.

    Raises:
        UserError: `edited-by-hand`, or `cannot-write` and the system's reason.
    """
    made: list[Path] = []
    try:
        made = _make_folder(folder)
        changed: dict[str, str] = {}
        for texts in sets:
            new = {name: x for name, x in texts.items() if _old_text(folder / name) != x}
            if not force:
                _protect(folder, new, source)
            changed |= new
        _replace(folder, changed)
    except (OSError, ValueError) as error:
        _remove_folders(made)
        raise UserError(
            "cannot-write",
            f"cannot write to {shown(folder)}: {_reason(error)}",
            help="nothing was written; -o DIR writes elsewhere",
        ) from None
    except UserError:
        _remove_folders(made)
        raise
    return [Written(folder / name, name in changed) for texts in sets for name in texts]


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that were made, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    made = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
    except OSError:
        _remove_folders(made)
        raise
    return made


def _remove_folders(made: list[Path]) -> None:
    for path in reversed(made):
        with suppress(OSError):
            path.rmdir()


def _old_text(path: Path) -> str | None:
    """The text that stands there, or None if there is no file; bytes that are no text differ."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        if path.is_symlink() and not path.exists():
            return ""
        raise UserError("not-a-file", f"{shown(path)} is in the way: not a regular file")
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _protect(folder: Path, changed: dict[str, str], source: Path | None) -> None:
    """Refuse to overwrite what a person wrote."""
    stem = Path(next(iter(changed), "")).stem
    schedule, module = folder / f"{stem}.sched", folder / f"{stem}.py"
    old = _old_text(module) if stem else None
    found = state(old) if old is not None else None
    if module.name in changed and found in ("edited", "foreign"):
        was = "was edited by hand" if found == "edited" else "was not written by mercurygen"
        raise UserError(
            "edited-by-hand",
            f"{shown(module)} {was}: it is not overwritten",
            help="move it away, choose another --name, or give --force",
        )
    if schedule.name not in changed:
        return
    text = _old_text(schedule)
    if text is not None and (lost := _comments(text) - _comments(changed[schedule.name])):
        raise UserError(
            "edited-by-hand",
            f"{shown(schedule)} has comments that would be lost: it is not overwritten",
            note=f"the first: {shorten('# ' + min(lost, key=text.index), 80)}",
            help="choose another --name, or give --force",
        )
    if source is not None and _same(schedule, source):
        return
    if text is not None and (found != "ours" or not _made_from(old or "", text)):
        raise UserError(
            "edited-by-hand",
            f"{shown(schedule)} was edited since its module was emitted: it is not overwritten",
            help=f"emit from it with `mercurygen emit --schedule {shown(schedule)}`, "
            "choose another --name, or give --force",
        )


def _same(a: Path, b: Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(a, b)
    return False


def _comments(schedule: str) -> set[str]:
    """What a person wrote behind `#`; the command line and the reason are mercurygen's own."""
    bodies = (line.partition("#")[2].strip() for line in schedule.splitlines())
    ours = ("mercurygen ", WHY)
    return {body for body in bodies if body and not body.startswith(ours)}


def _made_from(module: str, schedule: str) -> bool:
    """Whether a module says that it was made from this schedule, comments aside."""
    lines = [line.split("#", 1)[0] for line in schedule.splitlines()]
    said = [line for _, line in schedule_lines(module)]
    return "".join("\n".join(lines).split()) == "".join("\n".join(said).split())


def _replace(folder: Path, texts: dict[str, str]) -> None:
    """Write to temporary files, then rename them; on failure all is as it was."""
    temporary: dict[str, Path] = {}
    done: list[tuple[Path, bytes | None]] = []
    try:
        for name, text in texts.items():
            temporary[name] = folder / f".{name}.{secrets.token_hex(4)}.tmp"
            _write(temporary[name], text.encode("utf-8"))
        for name in texts:
            target = folder / name
            old = target.read_bytes() if target.is_file() else None
            os.replace(temporary[name], target)
            done.append((target, old))
    except BaseException:
        for target, old in done:
            with suppress(OSError):
                target.unlink() if old is None else target.write_bytes(old)
        raise
    finally:
        for path in temporary.values():
            with suppress(OSError):
                path.unlink()


def _write(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or printable(str(error))
