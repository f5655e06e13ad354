"""How long the command line takes from a fresh process, and how much memory it needs.

    python benchmarks/startup.py

Prints `mercurygen --help` and `mercurygen emit attention --topo a100x16`: seconds (median and
slowest of the runs), peak resident memory, and whether torch was imported. Exits with 1 if one is
over its limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import NamedTuple

PROGRAM = "import sys; from mercurygen.cli.main import main; sys.exit(main())"
MIB = 2**20


class Case(NamedTuple):
    """A command, how often it is run, and its limits."""

    arguments: list[str]
    runs: int
    seconds: float
    memory: int


class Run(NamedTuple):
    """One run: wall time in seconds, and peak resident memory in bytes."""

    seconds: float
    memory: int


def cases(folder: str) -> list[Case]:
    """What is measured; the limits are those of the project's second issue."""
    emit = ["emit", "attention", "--topo", "a100x16", "-o", folder]
    return [Case(["--help"], 9, 0.5, 500 * MIB), Case(emit, 3, 10.0, 500 * MIB)]


def measure(arguments: list[str]) -> Run:
    """Run the command in a process of its own, its output thrown away."""
    started = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"mercurygen {' '.join(arguments)}: exit {process.returncode}")
    return Run(seconds, usage.ru_maxrss * 1024)  # Linux counts in KiB


def imports_torch(arguments: list[str]) -> bool:
    """Whether any module named torch is loaded on the way."""
    command = [sys.executable, "-X", "importtime", "-c", PROGRAM, *arguments]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    names = [line.rpartition("|")[2].strip() for line in report.splitlines()]
    return any(name.split(".")[0] == "torch" for name in names)


def main() -> None:
    """Measure every case and print a line for each."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(folder):
            runs = [measure(case.arguments) for _ in range(case.runs)]
            seconds = [run.seconds for run in runs]
            memory = max(run.memory for run in runs)
            torch = imports_torch(case.arguments)
            words = " ".join(["mercurygen", *case.arguments[:4]])
            print(f"{words}: {len(runs)} runs on {os.cpu_count()} CPUs")
            print(f"  seconds: median {median(seconds):.2f}, slowest {max(seconds):.2f}", end="")
            print(f" (limit {case.seconds:g})")
            print(f"  peak memory: {memory / MIB:.0f} MiB (limit {case.memory // MIB})")
            print(f"  torch imported: {'yes' if torch else 'no'}")
            failed |= torch or median(seconds) > case.seconds or memory > case.memory
    sys.exit(failed)


if __name__ == "__main__":
    main()
