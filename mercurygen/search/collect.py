"""The collector of cycles, seldom run while thousands of schedules are priced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 1_000_000  # objects more than before, until the collector looks at the young ones


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let Python look for cycles seldom; as often as before at the end.

    A search keeps what it has worked out and makes no cycles: to look through all of it after
    every few hundred new objects finds nothing, and takes a sixth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(SELDOM, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
