"""The grid of the paper's evaluation, predicted: our choice beside four hand-written designs.

    python benchmarks/paper_grid.py [--shapes 1x8,2x4,4x8] [--seqs 4k,32k,256k,2m] [--processes 2]

Mercury (SOSP 2025) has attention, multi-head and grouped, causal or not said; batch 1 and 16; 4K to
2M tokens; 1 to 4 nodes of H100, A100 and L4, with 50 to 100 Gb/s between nodes. Here: 32 heads of
128, causal, zigzag tokens, one node of 8 GPUs, two of 4 and four of 8. Ring, Ulysses, unified (of
all degrees) and all-gather KV are computed in `by_hand.py`, apart from the search: bytes must be
those of the search's instance, and no design may be faster than the choice by more than SLACK.
Then the paper's case of memory: 2M tokens on two nodes of 4 H100. Exits with 1 if something is off.
All times are predictions of the model; the paper's are measurements.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import exp, log

import by_hand
import machines

from mercurygen.cost import topology
from mercurygen.cost.topology import Topology
from mercurygen.emit.module import refuse
from mercurygen.errors import UserError
from mercurygen.ir.problem import Problem
from mercurygen.schedule.directives import Parallelize
from mercurygen.search.candidate import Candidate
from mercurygen.search.result import Result
from mercurygen.search.search import search
from mercurygen.search.why import label

BOXES = {"H100": "net-100", "A100": "net-100", "L4": "net-50"}
KV_HEADS = {"MHA": 32, "GQA": 8}
BATCHES = (1, 16)
DESIGNS = ("ring", "ulysses", "unified", "allgather-kv")
SLACK = 0.10  # by-hand times are in lock step: up to so much too short where ranks are not even
ALIKE = 1.01  # of times that the model cannot tell apart the simplest schedule is chosen
M2 = 2 * 2**20


@dataclass(frozen=True)
class Cell:
    """One problem on one machine.

    Attributes:
        box, nodes, each: the machine.
        heads: a key of KV_HEADS.
        batch, seq: sizes.
    """

    box: str
    nodes: int
    each: int
    heads: str
    batch: int
    seq: int

    @property
    def problem(self) -> Problem:
        """Of attention."""
        return Problem(batch=self.batch, seq=self.seq, kv_heads=KV_HEADS[self.heads])

    def __str__(self) -> str:
        size = f"{self.seq // 1024}K" if self.seq < 2**20 else f"{self.seq // 2**20}M"
        machine = f"{self.nodes}x{self.each} {self.box}"
        return f"{machine} {self.heads} batch {self.batch} {size}"


@dataclass(frozen=True)
class Found:
    """What is predicted for a cell.

    Attributes:
        choice: in words; what refuses everything, if nothing is legal.
        design: the name of the choice, if it has one.
        seconds: of it; None if nothing is legal.
        waiting: the part of them that it waits.
        faster: per design, its time by hand over ours; designs that fit into memory.
        off: what by-hand formulas and search do not agree on.
        cpu: seconds of processor time to find it.
    """

    choice: str
    design: str | None
    seconds: float | None
    waiting: float
    faster: dict[str, float]
    off: tuple[str, ...]
    cpu: float


@cache
def machine(box: str, nodes: int, each: int) -> Topology:
    """Nodes of so many GPUs, which share the paper's network."""
    levels, left = [], each
    for name, size, link, port in reversed(machines.parts()["box"][box]["levels"]):
        here = min(size, left)
        left //= here
        if here > 1:
            levels.insert(0, (name, here, link, min(port, each)))
    if nodes > 1:
        levels.insert(0, ("node", nodes, BOXES[box], each))
    text = machines.text_of("grid", f"{nodes} nodes of {each} {box}", box, levels)
    return topology.read("grid.toml", text)


def predict(cell: Cell) -> Found:
    """Search, and hold the four designs against it."""
    began, where = time.process_time(), machine(cell.box, cell.nodes, cell.each)
    hand = by_hand.Machine(where, tuple(level.size for level in where.levels))
    try:
        result = search("attention", cell.problem, where, emits=refuse)
    except UserError as error:
        return Found(error.slug, None, None, 0.0, {}, (), time.process_time() - began)
    best = result.best
    figures = by_hand.designs(hand, cell.problem)
    off, fitting = list(_bytes_off(result, figures)), _fitting(result)
    faster = {}
    for (name, _), one in figures.items():
        if name in fitting:
            ratio = one.seconds / best.cost.time
            faster[name] = min(ratio, faster.get(name, ratio))
    for name, ratio in faster.items():
        if ratio < 1 - SLACK:
            off.append(f"{name} by hand takes {ratio:.3f} of the choice's time")
    share = best.cost.times.exposed / best.cost.time
    cpu = time.process_time() - began
    return Found(label(best), best.design, best.cost.time, share, faster, tuple(off), cpu)


def _fitting(result: Result) -> set[str]:
    """Designs that fit into memory, by the search; a hybrid of other degrees if one does."""
    refused = {one.name for one in result.named if one.slug == "over-memory-limit"}
    return set(DESIGNS) - refused


def _bytes_off(result: Result, figures: dict[tuple[str, int], by_hand.Figures]) -> Iterable[str]:
    """Where a design's bytes are not those of the search's instance of the same degrees."""
    for one in result.named:
        hand = figures.get((one.name, _heads(one.best))) if one.best else None
        if one.name not in DESIGNS or hand is None:
            continue
        for link in one.best.cost.links:
            if abs(hand.sent.get(link.name, 0.0) - link.port) > 0.5:
                yield f"{one.name} over {link.name}: {hand.sent} by hand, {link.port} by the plan"


def _heads(candidate: Candidate) -> int:
    """Ranks that split the heads."""
    split = [d for d in candidate.schedule.directives if isinstance(d, Parallelize)]
    sizes = 1
    for d in split:
        if d.axis == "H":
            for dim in d.dims:
                sizes *= candidate.schedule.mesh.extent(dim)
    return sizes


# --- 2M tokens on two nodes of 4 H100 -------------------------------------------------------------


def memory_case(batch: int, heads: str) -> list[str]:
    """Which of the designs fit, and what is chosen; if no flat one fits, its place among others.

    Flat designs treat all ranks alike: a ring, an all-to-all or an all-gather of all of them.
    """
    cell, where = Cell("H100", 2, 4, heads, batch, M2), machine("H100", 2, 4)
    try:
        result = search("attention", cell.problem, where, emits=refuse)
    except UserError as error:
        return [f"{cell}: {error.slug}; {error.help}"]
    best, named = result.best, {one.name: one for one in result.named}
    fits = [name for name in DESIGNS if named[name].best]
    text = f"{cell}: fits {', '.join(fits) or 'none of the four'}; choice {label(best)}"
    lines = [f"{text}, {_figures(best)}"]
    if {"ring", "ulysses", "allgather-kv"} & set(fits):
        return lines
    hand = by_hand.designs(by_hand.Machine(where, (2, 4)), cell.problem)
    ports = ", ".join(f"{link.name} {link.port / 2**30:.4g} GiB" for link in best.cost.links)
    lines.append(f"  no flat design fits; out of the busiest port: {ports}; by hand:")
    for (name, split), one in hand.items():
        sent = ", ".join(f"{level} {n / 2**30:.4g} GiB" for level, n in one.sent.items())
        lines.append(f"    {name}{f' of {split}' if name == 'unified' else ''}: {sent}")
    lines.append("  the Pareto set, fastest first:")
    return lines + [f"    {label(point)}, {_figures(point)}" for point in result.pareto]


def _figures(one: Candidate) -> str:
    cost = one.cost
    return f"{cost.time:.4g} s, {cost.peak_memory / 2**30:.4g} GiB"


# --- printing -------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    """Geometric: half as fast and twice as fast are 1."""
    return exp(sum(map(log, values)) / len(values)) if values else float("nan")


def report(done: dict[Cell, Found]) -> int:
    """Print tables; how many cells are off."""
    print(f"{'machine':10} {'heads':5} {'cells':>5} {'fit':>4}", *(f"{d:>18}" for d in DESIGNS),
          f"{'best of them':>18}")  # fmt: skip
    groups: dict[tuple, list[Found]] = defaultdict(list)
    for cell, found in done.items():
        for key in ((f"{cell.nodes}x{cell.each} {cell.box}", cell.heads), ("all", "")):
            groups[key].append(found)
    for (name, heads), cells in groups.items():
        if name != "all":
            _row(name, heads, cells)
    _row("all", "", groups["all", ""])
    _ones(done)
    bad = [(cell, text) for cell, found in done.items() for text in found.off]
    below = [(min(f.faster.values()), c) for c, f in done.items() if f.faster]
    least, where = min(below)
    print(f"least of a design's time by hand over ours: {least:.3f} ({where})")
    for cell, text in bad:
        print(f"OFF {cell}: {text}")
    return len(bad)


def _row(name: str, heads: str, cells: list[Found]) -> None:
    """Mean and most of what each design takes over our choice."""
    columns = [[f.faster[d] for f in cells if d in f.faster] for d in DESIGNS]
    columns.append([min(f.faster.values()) for f in cells if f.faster])
    words = (f"{mean(c):.2f} to {max(c):.2f} ({len(c)})" if c else "none" for c in columns)
    fit = sum(f.seconds is not None for f in cells)
    print(f"{name:10} {heads:5} {len(cells):5} {fit:4}", *(f"{w:>18}" for w in words))


def _ones(done: dict[Cell, Found]) -> None:
    """Where the choice gains nothing over the best of the four, and why."""
    fit = {cell: f for cell, f in done.items() if f.faster}
    ones = {cell: f for cell, f in fit.items() if min(f.faster.values()) < ALIKE}
    itself = [f for f in ones.values() if f.design in DESIGNS]
    bound = [f for f in ones.values() if f.design not in DESIGNS and f.waiting < 0.05]
    print(
        f"no faster than the best of the four, or by 1 %: {len(ones)} of {len(fit)} cells; "
        f"in {len(itself)} the choice is that design, in {len(bound)} others it waits for less "
        "than 5 % of its time: kernels are all there is"
    )
    chosen = Counter(f.design or "no name" for f in fit.values())
    print("chosen:", ", ".join(f"{name} {count}" for name, count in chosen.most_common()))
    top = sorted(fit, key=lambda cell: -min(fit[cell].faster.values()))[:5]
    for cell in top:
        found = fit[cell]
        print(f"  {min(found.faster.values()):.2f} {cell}: {found.choice}")


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1x8,2x4,4x8", help="nodes x GPUs of each")
    parser.add_argument("--seqs", default="4k,32k,256k,2m", help="tokens")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seqs = [int(s[:-1]) * (2**10 if s[-1] == "k" else 2**20) for s in options.seqs.split(",")]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    cells = [
        Cell(box, *shape, heads, batch, seq)
        for box, shape, heads, batch, seq in product(BOXES, shapes, KV_HEADS, BATCHES, seqs)
    ]
    began, done = time.monotonic(), {}
    cases = [(batch, heads) for heads in KV_HEADS for batch in range(1, 9)]
    with ProcessPoolExecutor(options.processes) as pool:
        for cell, found in zip(cells, pool.map(predict, cells), strict=True):
            done[cell] = found
            print(f"{len(done)} of {len(cells)}: {cell}", file=sys.stderr)
        memory = list(pool.map(memory_case, *zip(*cases, strict=True)))
    off = report(done)
    print("2M tokens on 2x4 H100:")
    print("\n".join(line for lines in memory for line in lines))
    print("AG+GEMM and GEMM+RS: not searched, their modules are not emitted yet")
    cpu, wall = sum(found.cpu for found in done.values()), time.monotonic() - began
    print(
        f"{len(done)} cells in {cpu:.0f} s of processor time, {len(memory)} cases of memory; "
        f"{wall:.0f} s with {options.processes} processes; {off} off"
    )
    sys.exit(bool(off))


if __name__ == "__main__":
    main()
