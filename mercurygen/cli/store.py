"""What long searches printed, kept on disk: the same question has the same answer.

An answer is kept under the hash of everything that it depends on: the command with its options, the
operator's source, the topology's numbers, and all files of this package. It is text, and read as
text. A file that is cut short, or not ours, is as good as none, and is written again; a new one
takes its name when it is complete, so that several processes may write and read at a time. Nothing
here is ever an error: without a place to write, everything is worked out again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import mercurygen
from mercurygen import operators
from mercurygen.cli.request import Request

KEPT_FROM = 2.0  # s of processor time: what is worked out sooner is not worth a file
LARGEST = 16 * 2**20  # bytes of an answer
MOST = 64 * 2**20  # bytes of all; the oldest go first
VARIABLE = "MERCURYGEN_CACHE"  # a folder; empty: nothing is kept


def folder() -> Path | None:
    """Where answers are kept, or None."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # by the specification others do not count
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return Path(base) / "mercurygen"


def answer(command: str, wanted: Request, extra: tuple, work: Callable[[], str]) -> str:
    """What a command prints: as it was kept, or worked out, and kept if that takes long.

    Args:
        command: its name.
        wanted: what it searches.
        extra: whatever else the text depends on.
        work: makes the text.
    """
    where = folder()
    if where is None:
        return work()
    name = key(command, wanted, extra)
    found = get(where, name)
    if found is not None:
        return found
    began = time.process_time()
    text = work()
    if time.process_time() - began >= KEPT_FROM:
        put(where, name, text)
    return text


def key(command: str, wanted: Request, extra: tuple) -> str:
    """The hash of everything that an answer depends on."""
    parts = {
        "command": command,
        "request": asdict(wanted),
        "extra": extra,
        "operator": operators.source_of(wanted.operator)[1],
        "package": package(),
        "python": platform.python_version(),
    }
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@cache
def package() -> str:
    """The hash of every file of this package, by its place in it."""
    root, seen = Path(mercurygen.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix != ".pyc" and path.is_file():
            data = path.read_bytes()
            seen.update(f"{path.relative_to(root)}\0{len(data)}\0".encode())
            seen.update(data)
    return seen.hexdigest()


def get(where: Path, name: str) -> str | None:
    """An answer, if it is there and whole."""
    path = where / f"{name}.json"
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(kept, dict) or kept.get("key") != name:
        return None
    text = kept.get("text")
    if not isinstance(text, str) or kept.get("sha256") != _hash(text):
        return None
    return text


def put(where: Path, name: str, text: str) -> None:
    """Keep an answer; the oldest go if there are too many."""
    try:
        data = json.dumps({"key": name, "sha256": _hash(text), "text": text})
        if len(data) > LARGEST:
            return
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(prefix=".new-", dir=where)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(data)
            os.replace(written, where / f"{name}.json")
        except BaseException:
            os.unlink(written)
            raise
        _prune(where)
    except (OSError, ValueError):  # no place, no permission, text that is none
        return


def _prune(where: Path) -> None:
    """Delete the oldest until the rest is small enough; what a dead process left counts too."""
    every = []
    for path in (*where.glob("*.json"), *where.glob(".new-*")):
        try:
            state = path.stat()
        except OSError:  # another process deleted it
            continue
        every.append((state.st_mtime_ns, state.st_size, path))
    total = sum(size for _, size, _ in every)
    for _, size, path in sorted(every):
        if total <= MOST:
            return
        path.unlink(missing_ok=True)
        total -= size


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
