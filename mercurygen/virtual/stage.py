"""Virtual ranks as threads, of which one runs at a time: it goes on until it would block.

The order is the same every time: who can go on, goes on in the order in which it came to be able.
A failure stops everybody: whoever is called again finds `Stop` raised, and unwinds.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mercurygen.virtual.report import Check, VirtualError, Where

COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def taken() -> threading.Lock:
    """A lock that waits for its first release."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stop(BaseException):
    """Unwinds a rank: not an Exception, so that no handler of the module keeps it."""


@dataclass(eq=False)
class Actor:
    """A rank's thread.

    Attributes:
        number: of the rank.
        baton: free when the rank may run.
        done: it has come to its end.
        needs: whom or what it waits for, while it waits.
        where: it waits.
        handling: an exception that is on its way through the module while it waits.
    """

    number: int
    baton: threading.Lock = field(default_factory=taken)
    thread: threading.Thread | None = None
    done: bool = False
    needs: Any = None
    where: Where = field(default_factory=Where)
    handling: BaseException | None = None


class Stage:
    """All ranks.

    Args:
        count: of the ranks.
        file: of the module's code, as it was compiled: tells its frames from others.

    Attributes:
        actors: one for each rank.
        failure: the first, if any.
    """

    def __init__(self, count: int, file: str) -> None:
        self.count, self.file = count, file
        self.actors = [Actor(number) for number in range(count)]
        self.failure: VirtualError | None = None
        self.current = 0
        self._ready: deque[int] = deque()
        self._back = taken()

    def play(self, program: Callable[[int], None], explain: Callable[[], VirtualError]) -> None:
        """Run a program on every rank.

        Args:
            program: called with the rank's number, on its thread.
            explain: makes the error if nobody can go on.

        Raises:
            VirtualError: the first that some rank met.
        """
        self.actors = [Actor(number) for number in range(self.count)]
        for actor in self.actors:
            actor.thread = threading.Thread(target=self._act, args=(actor, program), daemon=True)
            actor.thread.start()
        self._ready = deque(range(self.count))
        while self._ready and self.failure is None:
            self._run(self._ready.popleft())
        if self.failure is None and not all(actor.done for actor in self.actors):
            self.failure = self._raised() or explain()
        for actor in self.actors:
            if not actor.done:  # only after a failure: it unwinds
                self._run(actor.number)
        if self.failure is not None:
            raise self.failure

    def _run(self, rank: int) -> None:
        self.current = rank
        self.actors[rank].baton.release()
        self._back.acquire()

    def _raised(self) -> VirtualError | None:
        """An exception of a rank that waits while it is on its way: what the others wait for."""
        for actor in self.actors:
            if isinstance(actor.handling, Exception):
                return self.of_exception(actor.number, actor.handling)
        return None

    def _act(self, actor: Actor, program: Callable[[int], None]) -> None:
        """A thread: the program, once the rank's turn has come."""
        actor.baton.acquire()
        try:
            if self.failure is None:
                program(actor.number)
        except Stop:
            pass
        except BaseException as error:
            self.failure = self.failure or self.of_exception(actor.number, error)
        actor.done = True
        self._back.release()

    # --- called by the rank that runs ---------------------------------------------------------

    def wait(self, rank: int, needs: Any, over: Callable[[], bool]) -> None:
        """Give the baton away until something is over; whoever brings that about wakes the rank."""
        actor = self.actors[rank]
        while not over():
            actor.needs, actor.where = needs, self.place()
            actor.handling = sys.exc_info()[1]
            self._give_away(actor)
        actor.needs = actor.handling = None

    def let_others(self, rank: int) -> None:
        """Give the baton away once, without waiting for anything."""
        self.wake(rank)
        self._give_away(self.actors[rank])

    def wake(self, rank: int) -> None:
        """A rank can go on."""
        if rank not in self._ready:
            self._ready.append(rank)

    def _give_away(self, actor: Actor) -> None:
        self.check()
        self._back.release()
        actor.baton.acquire()
        self.check()

    def unwinding(self, rank: int) -> bool:
        """Whether the caller runs only to clean up: after a failure, or where it does not belong.

        A generator that nobody needs any more is closed by whoever finds that out.
        """
        stopped = self.failure is not None and sys.exc_info()[1] is not None
        return stopped or threading.current_thread() is not self.actors[rank].thread

    def check(self) -> None:
        """Unwind if somebody has failed."""
        if self.failure is not None:
            raise Stop

    def fail(self, check: Check, rank: int, message: str, where: Where | None = None) -> Stop:
        """Note what is wrong; the caller raises what this returns."""
        where = self.place() if where is None else where
        self.failure = self.failure or VirtualError(check, rank, message, where)
        return Stop()

    def place(self) -> Where:
        """Where the module's code is that the caller was called from."""
        return Where(self._stack(sys._getframe(1)))

    def stands(self) -> Where:
        """Where the rank that runs is, seen from another thread."""
        thread = self.actors[self.current].thread
        frames = sys._current_frames()
        return Where(self._stack(frames.get(thread.ident) if thread and thread.ident else None))

    def frames(self) -> list[FrameType]:
        """The module's frames below the caller, the innermost first."""
        found, frame = [], sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                found.append(frame)
            frame = frame.f_back
        return found

    def _stack(self, frame: FrameType | None) -> tuple[tuple[int, str], ...]:
        stack = []
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                stack.append((frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return _plain(stack)

    def of_exception(self, rank: int, error: BaseException) -> VirtualError:
        """An exception that left the module, with the line that raised it."""
        stack, trace = [], error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                stack.append((trace.tb_lineno, trace.tb_frame.f_code.co_name))
            trace = trace.tb_next
        words = f"{type(error).__name__}: {error}"
        return VirtualError("module-error", rank, words, Where(_plain(stack[::-1])))


def _plain(stack: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Without comprehensions, which are on a line of the function that they stand in."""
    named = [(line, name) for line, name in stack if name not in COMPREHENSIONS]
    if named and stack[0][1] in COMPREHENSIONS:
        named[0] = (stack[0][0], named[0][1])  # the line itself, of many that it may span
    return tuple(named or stack)
