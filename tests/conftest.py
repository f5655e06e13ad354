"""Python's garbage collector is kept away from what lives as long as the process.

With torch and every test's cases there are so many objects that going through them takes a
quarter of the tests' time; in forked ranks it also copies the pages that they lie on.
"""

from __future__ import annotations

import gc

gc.disable()  # nothing that is imported or collected goes away again


def pytest_collection_finish() -> None:
    """From here on only what tests make is looked at, and more of it at once."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    """At the end everything is let go, as libraries expect it: some report what is not."""
    gc.unfreeze()
