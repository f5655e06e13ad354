"""How the time and memory of a search grow with the ranks and with the levels of a machine.

    python benchmarks/scale.py [--least 8] [--most 4096] [--prove 4096] [--plot FILE.svg]

For groups of 8 ranks and more of two levels (h100x1024), and of 256 and more of three
(pods-h100x4096), searches attention as `mercurygen search` does, 1024 tokens a rank, each in a
process of its own: schedules looked at, seconds of processor time, schedules a second, and the
memory of the process at its peak.
The best is proved up to --prove ranks: by the traces of all of them, or, of more than 1024, level
by level. `model` says what decided: the simulation, or, of more ranks than
`mercurygen.cost.decide.LARGE`, the closed form.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterator
from math import log2, prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from mercurygen.check.levels import MOST_PLAYED, elsewhere, prove_by_levels
from mercurygen.check.prove import prove
from mercurygen.cost.topology import load
from mercurygen.ir.problem import Problem
from mercurygen.operators import load as load_operator
from mercurygen.search.search import search

TWO, THREE = "h100x1024", "pods-h100x4096"
TOKENS = 1024  # of a rank
EACH = 8  # GPUs of a node
HEAD = "levels  ranks schedules  seconds  a second    MiB   proved  model"
WIDTH, HEIGHT, MARGIN = 480, 320, 48  # of the plot
COLOURS = {2: "#1f77b4", 3: "#d62728"}


class Row(NamedTuple):
    """One search.

    Attributes:
        levels: of the machine.
        ranks: of the group.
        schedules: looked at.
        seconds: of the search.
        mib: of the process at its peak.
        simulated: whether the best were simulated.
        proved: seconds of the proof of the best, or None.
    """

    levels: int
    ranks: int
    schedules: int
    seconds: float
    mib: float
    simulated: bool
    proved: float | None


def groups(most: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Topologies and parts of them, from 8 ranks on."""
    ranks = EACH
    while ranks <= min(most, 1024):
        yield TWO, (ranks // EACH, EACH)
        ranks *= 2
    ranks = 32 * EACH
    while ranks <= most:
        pods = max(2, ranks // (32 * EACH))  # of 32 nodes at most
        yield THREE, (pods, ranks // EACH // pods, EACH)
        ranks *= 2


def measured(name: str, group: tuple[int, ...], proved: int) -> Row:
    """A search, in a process of its own."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_search, args=(name, group, proved, theirs))
    process.start()
    theirs.close()
    row = ours.recv()
    process.join()
    return row


def _search(name: str, group: tuple[int, ...], proved: int, pipe: Connection) -> None:
    ranks = prod(group)
    began = time.process_time()
    result = search("attention", Problem(seq=TOKENS * ranks), load(name), group=group)
    seconds = time.process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    best, spent = result.best, None
    if ranks <= proved:
        began = time.process_time()
        if ranks <= MOST_PLAYED:
            prove(best.plan, best.schedule.links)
        else:
            at = elsewhere(load_operator("attention"), best.schedule)
            prove_by_levels(best.plan, best.schedule.links, at)
        spent = time.process_time() - began
    simulated = best.simulated is not None
    pipe.send(Row(len(group), ranks, result.counts.candidates, seconds, mib, simulated, spent))


def show(row: Row) -> str:
    """A line of the table."""
    rate = row.schedules / row.seconds
    proved = "" if row.proved is None else f"{row.proved:.2f}"
    model = "simulation" if row.simulated else "closed form"
    return (
        f"{row.levels:6} {row.ranks:6} {row.schedules:9} {row.seconds:8.2f} {rate:9.0f} "
        f"{row.mib:6.0f} {proved:>8}  {model}"
    )


def plot(rows: list[Row]) -> str:
    """Seconds over ranks as SVG, both by powers of two; a line for each number of levels."""
    times = [log2(row.seconds) for row in rows]
    ranks = [log2(row.ranks) for row in rows]
    low, high = int(min(times)) - 1, int(max(times)) + 1
    first, last = min(ranks), max(ranks)

    def across(value: float) -> float:
        """Of a number of ranks."""
        return MARGIN + (value - first) / max(1, last - first) * (WIDTH - 2 * MARGIN)

    def down(value: float) -> float:
        """Of a time."""
        return HEIGHT - MARGIN - (value - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{MARGIN}" y="20">seconds of a search, by ranks</text>',
    ]
    for n in range(int(first), int(last) + 1):
        lines.append(f'<text x="{across(n):.0f}" y="{HEIGHT - MARGIN + 16}">{2**n}</text>')
    for n in range(low, high + 1):
        lines.append(f'<text x="8" y="{down(n):.0f}">{2.0**n:g}</text>')
    for levels, colour in COLOURS.items():
        points = [
            f"{across(log2(row.ranks)):.1f},{down(log2(row.seconds)):.1f}"
            for row in rows
            if row.levels == levels
        ]
        if points:
            path = " ".join(points)
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            x, y = points[-1].split(",")
            lines.append(f'<text x="{x}" y="{y}" fill="{colour}">{levels} levels</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Print the table, and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--least", type=int, default=EACH, help="ranks of a group")
    parser.add_argument("--most", type=int, default=4096, help="ranks of a group")
    parser.add_argument("--prove", type=int, default=4096, help="ranks, up to which the best is")
    parser.add_argument("--plot", type=Path, help="an SVG")
    options = parser.parse_args()
    print(HEAD)
    rows = []
    for name, group in groups(options.most):
        if prod(group) < options.least:
            continue
        rows.append(measured(name, group, options.prove))
        print(show(rows[-1]), flush=True)
    if options.plot:
        options.plot.write_text(plot(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
