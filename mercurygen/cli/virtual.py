"""A module on virtual ranks, in one forked process that ends whatever the module does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mercurygen.cli.ranks import GRACE
from mercurygen.errors import InternalError, Span, UserError, shorten
from mercurygen.ir.operator import Operator
from mercurygen.schedule.schedule import Schedule
from mercurygen.virtual.report import Played, VirtualError, Where

LONGEST_MESSAGE = 1500


@dataclass(frozen=True, slots=True)
class Task:
    """What to run.

    Attributes:
        text: the module, edited or not.
        schedule: that it is of.
        operator: parsed.
        file: its name.
    """

    text: str
    schedule: Schedule
    operator: Operator
    file: str


def run(task: Task, timeout: float) -> Played:
    """Run a module on virtual ranks; needs torch.

    Args:
        task: the module.
        timeout: seconds for all of it.

    Raises:
        UserError: with the failing check as its slug (exit code 1), the rank and the line.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(task, theirs, timeout), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = _answer(ours, timeout)
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, Played):
        return answer
    if isinstance(answer, VirtualError):
        raise failure(answer, task)
    raise InternalError(f"virtual ranks: {answer}")


def _answer(pipe: Connection, timeout: float) -> Any:
    """What the process says, or that it died or does not answer."""
    if not pipe.poll(timeout + GRACE):
        return _late(timeout, Where())
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return VirtualError("module-error", -1, "the process died")


def _late(timeout: float, where: Where, rank: int = -1) -> VirtualError:
    return VirtualError("endless", rank, f"it did not end within {timeout:g} s", where)


def failure(error: VirtualError, task: Task) -> UserError:
    """A failed check as the command line shows it."""
    lines, line = task.text.splitlines(), error.where.line
    span = None
    if 0 < line <= len(lines):
        text = lines[line - 1]
        column = len(text) - len(text.lstrip()) + 1
        span = Span(task.file, line, column, text, max(1, len(text.strip())))
    whose = f"virtual rank {error.rank}: " if error.rank >= 0 else "virtual ranks: "
    return UserError(
        error.check,
        whose + shorten(error.message, LONGEST_MESSAGE),
        span=span,
        note=str(error.where) if span else None,
        help="--timeout SECONDS" if error.check == "endless" else None,
        exit_code=1,
    )


# --- in the forked process ------------------------------------------------------------------


def _work(task: Task, pipe: Connection, timeout: float) -> None:
    """Play, and answer what ran, what failed, or after the time where the ranks are."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    import torch

    from mercurygen.virtual.run import play

    torch.set_num_threads(1)  # before any work: a forked pool of threads hangs
    stages: list[Any] = []

    def late() -> None:
        """Answer for ranks that do not end."""
        stage = stages[0] if stages else None
        where, rank = (stage.stands(), stage.current) if stage else (Where(), -1)
        with contextlib.suppress(OSError):
            pipe.send(_late(timeout, where, rank))

    timer = threading.Timer(timeout, late)
    timer.daemon = True
    timer.start()
    try:
        answer: Any = play(task.text, task.schedule, task.operator, task.file, begun=stages.append)
    except VirtualError as error:
        answer = error
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        pipe.send(answer)
