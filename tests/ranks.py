"""Run functions on real gloo processes, forked from this one, which imported torch already.

    run_ranks(4, fn, 1, 2)                      # [fn(0, 4, 1, 2), fn(1, 4, 1, 2), ...]

Many cases on the same ranks share one fork, made when the first result is asked for:

    RING = Ranks(4)
    RING.add("float32", check_forward, TEXT, PROBLEM, "float32")

    @pytest.mark.parametrize("case", RING.ids)
    def test_ring(case):
        RING.result(case)                       # every rank's value; AssertionError if it failed

What a case needs and takes long to make is given as a functools.partial: it is called here, just
before the fork, so that nothing is made while tests are collected, nor on every rank again.

This process paces the ranks: a case starts when all of them have answered the one before.
A case that failed or hung leaves unmatched messages behind, so the next one gets a fresh fork.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

torch.set_num_threads(1)  # a fork of a process with a pool of OpenMP threads can hang

FORK = multiprocessing.get_context("fork")
GRACE = 2.0  # seconds that the other ranks get once one has failed
JOIN = 60.0  # seconds to form the process group


class Case(NamedTuple):
    """Run fn(rank, world, *args) on every rank; what it returns must pickle."""

    id: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What every rank returned, in rank order, or why the case failed."""

    values: list[Any]
    error: str = ""

    def get(self) -> list[Any]:
        """The values; AssertionError if the case failed."""
        if self.error:
            raise AssertionError(self.error)
        return self.values


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Return fn(rank, world, *args) of every rank, in rank order."""
    case = Case(getattr(fn, "__name__", "case"), fn, args)
    return run_cases(world, [case], timeout=timeout)[case.id].get()


def run_cases(world: int, cases: Sequence[Case], timeout: float = 60) -> dict[str, Outcome]:
    """Run all cases, in order, each within `timeout` seconds; in one fork as long as they pass."""
    outcomes: dict[str, Outcome] = {}
    if len({case.id for case in cases}) < len(cases):
        raise ValueError("two cases have the same id")
    left = [case for case in (_made(case, outcomes) for case in cases) if case]
    while left:
        with _forked(world, left, timeout) as ranks:
            _answers(ranks, "forming the process group", JOIN).get()
            failed = False
            while left and not failed:
                case = left.pop(0)
                outcomes[case.id] = _answers(ranks, case.id, timeout)
                failed = bool(outcomes[case.id].error)
    return outcomes


class Ranks:
    """Cases for one number of ranks, all run when the first result is asked for."""

    def __init__(self, world: int, timeout: float = 60) -> None:
        self.world, self.timeout = world, timeout
        self._cases: list[Case] = []
        self._outcomes: dict[str, Outcome] | None = None

    def add(self, id: str, fn: Callable[..., Any], *args: Any) -> None:
        """Add a case; not after the first result."""
        assert self._outcomes is None, "the cases have run already"
        self._cases.append(Case(id, fn, args))

    @property
    def ids(self) -> list[str]:
        """The cases' names, for pytest.mark.parametrize."""
        return [case.id for case in self._cases]

    def result(self, id: str) -> list[Any]:
        """What every rank returned; AssertionError if the case failed."""
        if self._outcomes is None:
            self._outcomes = run_cases(self.world, self._cases, self.timeout)
        return self._outcomes[id].get()


# --- in this process ------------------------------------------------------------------------


def _made(case: Case, outcomes: dict[str, Outcome]) -> Case | None:
    """The case with its partials called; None, and its outcome, if one of them fails."""
    try:
        made = [x() if isinstance(x, functools.partial) else x for x in case.args]
    except Exception:
        outcomes[case.id] = Outcome([], f"{case.id} was not started\n{traceback.format_exc()}")
        return None
    return case._replace(args=tuple(made))


class _Rank(NamedTuple):
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stacks: IO[bytes]  # where the process writes its stack when it gets SIGUSR1


@contextmanager
def _forked(world: int, cases: list[Case], timeout: float) -> Iterator[list[_Rank]]:
    """Fork the ranks; afterwards none of them is left, nor any file."""
    ranks: list[_Rank] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * world)
    try:
        for rank in range(world):
            ours, theirs = FORK.Pipe()
            stacks = tempfile.TemporaryFile("a+b")
            args = (rank, world, cases, theirs, listener, stacks, timeout)
            process = FORK.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, stacks))
        yield ranks
    finally:
        listener.close()
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
            rank.stacks.close()


def _answers(ranks: list[_Rank], name: str, timeout: float) -> Outcome:
    """Start the next case on all ranks and collect their answers."""
    values: list[Any] = [None] * len(ranks)
    errors: dict[int, str] = {}
    waiting = {rank.pipe: number for number, rank in enumerate(ranks)}
    for pipe in waiting:
        with suppress(OSError):  # a dead rank is found below
            pipe.send_bytes(b"go")
    deadline = time.monotonic() + timeout
    while waiting:
        answered = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not answered:
            break
        for pipe in answered:
            number = waiting.pop(pipe)
            ok, value = _receive(ranks[number])
            if ok:
                values[number] = value
            else:
                errors[number] = value
                deadline = min(deadline, time.monotonic() + GRACE)
    if not errors and not waiting:
        return Outcome(values)
    return Outcome([], _explain(ranks, name, timeout, errors, list(waiting.values())))


def _receive(rank: _Rank) -> tuple[bool, Any]:
    """Whether the rank did its case, and its value or what went wrong."""
    try:
        return pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, OSError):
        rank.process.join()
        return False, f"the process died, exit code {rank.process.exitcode}"
    except Exception as error:
        return False, f"its value does not unpickle: {error!r}"


def _explain(
    ranks: list[_Rank], name: str, timeout: float, errors: dict[int, str], stuck: list[int]
) -> str:
    """The report of a failed case: the first error in full, else where the stuck ranks are."""
    report = [f"{name} on {len(ranks)} ranks failed"]
    for number, error in errors.items():
        first = len(report) == 1
        report.append(f"rank {number}: {error if first else error.strip().splitlines()[-1]}")
    for number in stuck:
        if errors:
            report.append(f"rank {number} did not finish within {GRACE} s of that")
        else:
            report.append(
                f"rank {number} did not finish within {timeout} s:\n{_stack(ranks[number])}"
            )
    return "\n".join(report)


def _stack(rank: _Rank) -> str:
    """Where a process is now, as far as it still answers signals."""
    with suppress(OSError):
        os.kill(rank.process.pid or 0, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.01)
        rank.stacks.seek(0)
        text = rank.stacks.read().decode(errors="replace")
        if text.endswith("\n"):
            return text.partition(f'  File "{__file__}"')[0]
    return "(no stack)"


# --- in the forked processes ----------------------------------------------------------------


def _serve(
    rank: int,
    world: int,
    cases: list[Case],
    pipe: Connection,
    listener: socket.socket,
    stacks: IO[bytes],
    timeout: float,
) -> None:
    """Join the process group, then run the cases, one whenever the parent says so."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    join = Case("join", _join, (listener, timeout))
    for case in [join, *cases]:
        try:
            pipe.recv_bytes()
        except EOFError:  # the parent is gone
            return
        try:
            answer = pickle.dumps((True, case.fn(rank, world, *case.args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(answer)
    pipe.recv_bytes()  # never comes: the parent kills us


def _join(rank: int, world: int, listener: socket.socket, timeout: float) -> None:
    """Form the process group; rank 0 serves the store on the socket that the parent opened."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port = listener.getsockname()[1]
    serve = {"is_master": True, "master_listen_fd": listener.detach()} if rank == 0 else {}
    limit = timedelta(seconds=JOIN)
    store = dist.TCPStore("127.0.0.1", port, world, timeout=limit, wait_for_workers=False, **serve)
    limit = timedelta(seconds=timeout + GRACE)  # the parent is first, and says who hangs
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
