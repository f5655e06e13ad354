"""A line on a terminal for what takes longer than a second."""

from __future__ import annotations

import sys
import time

PATIENCE = 1.0  # seconds without a word
PAUSE = 0.1  # seconds between two


class Progress:
    """Called now and then with what is done, how many are, of how many; a context manager."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.last = 0.0
        self.shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say so, if somebody watches and it takes long."""
        now = time.monotonic()
        if now - self.begun < PATIENCE or now - self.last < PAUSE or not sys.stderr.isatty():
            return
        self.last, self.shown = now, True
        print(f"\r{done} of {total} {what}\033[K", end="", file=sys.stderr, flush=True)
