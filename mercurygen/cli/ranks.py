"""A module's own checks on real gloo processes, forked here, one for each rank."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from mercurygen.errors import UserError, printable, shorten

MOST_RANKS = 64
GRACE = 3.0  # seconds that the other ranks get once one has failed
_ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # errors of users' operators
_CHECKS = ("_reference", "_error", "_errors", "_blind", "_self_check")


@dataclass(frozen=True, slots=True)
class Passed:
    """What ran.

    Attributes:
        checks: on each rank.
        error: the largest of any rank, of any dtype that has a bound.
    """

    checks: int
    error: float


def need_torch() -> None:
    """Refuse to go on without torch.

    Raises:
        UserError: `no-torch` (exit code 1).
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
            import torch.distributed  # noqa: F401
    except ImportError as error:
        raise UserError(
            "no-torch",
            f"the module cannot run: {shorten(printable(str(error)), 120)}",
            help="pip install torch; or --no-run: proof, digest and call sites only",
            exit_code=1,
        ) from None


def run(module: str, emitted: str, file: str, ranks: int, timeout: float) -> Passed:
    """Run a module's checks on forked processes.

    Args:
        module: the text, edited or not.
        emitted: the text as mercurygen emits it: the checks are taken from there, so that an
            edit cannot weaken them.
        file: its name, for tracebacks.
        ranks: how many, at most MOST_RANKS.
        timeout: seconds for all of it.

    Raises:
        UserError: `ranks-failed` (exit code 1), with the rank and what went wrong there.
    """
    need_torch()
    sys.stdout.flush()
    sys.stderr.flush()
    fork = multiprocessing.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * ranks)
    processes, pipes = [], []
    try:
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            task = _Task(rank, ranks, module, emitted, file, timeout)
            process = fork.Process(target=_work, args=(task, theirs, listener), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(pipes, timeout)
    finally:
        listener.close()
        for process in processes:
            process.kill()
        for process, pipe in zip(processes, pipes, strict=True):
            process.join()
            pipe.close()


def _collect(pipes: list[Connection], timeout: float) -> Passed:
    """Every rank's answer; the first failure in full, else who did not finish."""
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    errors: dict[int, str] = {}
    counts, largest = [], 0.0
    deadline = time.monotonic() + timeout
    while waiting:
        answered = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not answered:
            break
        for pipe in answered:
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                answer = "the process died"
            if isinstance(answer, str):
                errors[rank] = answer
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                counts.append(answer[0])
                largest = max(largest, answer[1])
    stuck = list(waiting.values())
    if errors or stuck:
        raise _failure(len(pipes), errors, stuck, timeout)
    return Passed(max(counts, default=0), largest)


def _failure(ranks: int, errors: dict[int, str], stuck: list[int], timeout: float) -> UserError:
    which = ", ".join(map(str, sorted(errors)[:16]))
    hung = f"rank {', '.join(map(str, stuck[:16]))} did not finish"
    if not errors:
        message = f"{hung} within {timeout:g} s"
        return UserError("ranks-failed", message, help="--timeout SECONDS", exit_code=1)
    first = min(errors, key=lambda rank: ("Connection" in errors[rank], rank))
    return UserError(
        "ranks-failed",
        f"rank {which} of {ranks} failed; rank {first}: {errors[first]}",
        note=hung + " after that" if stuck else None,
        exit_code=1,
    )


# --- in the forked processes ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    rank: int
    ranks: int
    module: str
    emitted: str
    file: str
    timeout: float


def _work(task: _Task, pipe: Connection, listener: socket.socket) -> None:
    """Run the checks as this rank, and answer (checks, largest error) or what went wrong."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        answer: Any = _checked(task, listener)
    except BaseException as error:
        trace = traceback.extract_tb(error.__traceback__)
        last = next((f for f in reversed(trace) if f.filename == task.file), None)
        where = f" (line {last.lineno}, in {last.name})" if last else ""
        answer = f"{type(error).__name__}: {shorten(str(error), 400)}{where}"
    with contextlib.suppress(OSError):
        pipe.send(answer)


def _checked(task: _Task, listener: socket.socket) -> tuple[int, float] | str:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # before any work: a forked pool of threads hangs
    torch.cuda.is_available = lambda: False  # gloo ranks, and no CUDA in a fork
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group = _joining(dist.init_process_group, task, listener)
    space: dict[str, Any] = {"__name__": "mercurygen_verified", "__file__": task.file}
    exec(compile(task.module, task.file, "exec"), space)
    taken = _take_checks(task.emitted, space)
    checks = [name for name in taken if name in ("_error", "_errors", "_blind")]
    results: list[tuple[str, Any]] = []
    for name in checks:
        space[name] = _recording(space[name], results)
    code: Any = None
    try:
        space["_self_check"]()
    except SystemExit as exit:
        code = exit.code
    return _verdict(results, code)


def _joining(init: Callable, task: _Task, listener: socket.socket) -> Callable:
    """`init_process_group` on the socket that the parent opened, whatever is asked for."""
    import torch.distributed as dist

    def joined(*_: object, **__: object) -> None:
        """Form the process group."""
        port = listener.getsockname()[1]
        serve = {}
        if task.rank == 0:
            serve = {"is_master": True, "master_listen_fd": listener.detach()}
        limit = timedelta(seconds=task.timeout)
        store = dist.TCPStore(
            "127.0.0.1", port, task.ranks, timeout=limit, wait_for_workers=False, **serve
        )
        init("gloo", store=store, rank=task.rank, world_size=task.ranks, timeout=limit)

    return joined


def _take_checks(emitted: str, space: dict[str, Any]) -> list[str]:
    """Put the checks as mercurygen emits them into a module's namespace; their names."""
    tree = ast.parse(emitted)
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in _CHECKS)
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]
    exec(compile(tree, "<self-check>", "exec"), space)
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _recording(check: Callable, results: list[tuple[str, Any]]) -> Callable:
    def recorded(*arguments: object) -> Any:
        """Run the check and note its result."""
        result, what = check(*arguments), arguments[-1]
        if check.__name__ == "_errors":  # of a user's operator: per output, as parts of these
            allowed = _ALLOWED[str(what).removeprefix("torch.")]
            for number, part in enumerate(result):
                results.append((f"output {number} in {what}", (part * allowed, allowed)))
            return result
        label = f"k and v of rank {what}" if check.__name__ == "_blind" else str(what)
        results.append((label, result))
        return result

    return recorded


def _verdict(results: list[tuple[str, Any]], code: object) -> tuple[int, float] | str:
    """(checks, largest error of float32 and float64), or what is wrong on this rank."""
    wrong, largest = [], 0.0
    for label, result in results:
        if isinstance(result, tuple):
            error, allowed = result
            if not error <= allowed:
                wrong.append(f"{label}: error {error:.3g}, {allowed:.3g} is allowed")
            elif "bfloat16" not in label:
                largest = max(largest, error)
        elif result:
            wrong.append(f"{label} do not reach this rank as they should")
    if wrong:
        return "; ".join(wrong[:4])
    if code:
        return "right here, but another rank is wrong" if results else f"exit code {code}"
    return (len(results), largest)
