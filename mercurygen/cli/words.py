"""Figures in words, the same in every command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mercurygen.check.report import Report
from mercurygen.ir.caller import INSIDE
from mercurygen.ir.mesh import Link, Mesh
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.schedule.directives import OrderTokens, Parallelize, Patch, Pin, Reshard
from mercurygen.schedule.problem_text import show_problem
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import body_lines

if TYPE_CHECKING:
    from mercurygen.emit.callsites import Summary


def ms(seconds: float) -> str:
    """Milliseconds with four digits; less than a picosecond is a rounding error."""
    return f"{seconds * 1e3 if abs(seconds) >= 1e-12 else 0:.4g}"


def mib(nbytes: float) -> str:
    """Mebibytes with four digits; what is smaller in KiB or bytes."""
    if 0 < nbytes < 2**20:
        return f"{nbytes / 2**10:.4g} KiB" if nbytes >= 2**10 else f"{nbytes:.4g} B"
    return f"{nbytes / 2**20:.5g} MiB" if nbytes < 100 * 2**30 else f"{nbytes / 2**30:.4g} GiB"


def plural(count: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {what}" + ("s" if count != 1 else "")


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows in columns, those of `right` aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def problem(problem: Problem | Sizes) -> str:
    """Heads, mask, dtype and sizes; of another operator as its schedule has them."""
    if isinstance(problem, Sizes):
        return show_problem(problem)
    same = problem.head_dim == problem.v_head_dim
    size = f"{problem.head_dim}" if same else f"{problem.head_dim} (v {problem.v_head_dim})"
    layout = "" if problem.layout == INSIDE else f", layout {problem.layout}"
    if problem.documents:
        count, longest = plural(len(problem.documents), "document"), max(problem.documents)
        layout = f" in {count}, the longest of {longest}"
    return (
        f"{mask(problem)}, {plural(problem.heads, 'query head')}, {problem.kv_heads} key/value, "
        f"head size {size}, {problem.dtype}, batch {problem.batch}, {_tokens(problem)}"
        f"{layout}"
    )


def _tokens(problem: Problem) -> str:
    """How long the sequence is, or the two are."""
    if problem.seq_kv is None:
        return f"{problem.seq} tokens"
    return f"{problem.seq} queries, {problem.seq_kv} keys"


def mask(problem: Problem) -> str:
    """The mask: what a query sees."""
    align = f" ({problem.align})" if problem.align else ""
    if problem.mask != "window":
        return problem.mask + align
    ahead = f" and {problem.ahead} after it" if problem.ahead else ""
    return f"window of {problem.window} keys up to a query{ahead}{align}"


def place(links: Sequence[Link]) -> str:
    """The levels of a group with their links."""
    return ", ".join(f"{link.level}={link.size} {link.name}" for link in links)


def mesh(mesh: Mesh) -> str:
    """The dimensions and their sizes."""
    return " ".join(f"{dim.name}={dim.size}" for dim in mesh.dims) or "one rank"


def communication(schedule: Schedule) -> list[str]:
    """The directives that say what is split and what moves: no order, pins or kernel."""
    frame = (OrderTokens, Pin, Patch)
    core = [d for d in schedule.directives if not isinstance(d, frame)]
    core.sort(key=lambda d: 0 if isinstance(d, Parallelize) else 2 - isinstance(d, Reshard))
    lines = [str(directive) for directive in core]
    if schedule.backward is not None:
        below = body_lines(replace(schedule, directives=()))
        lines += [below[0], *(f"  {line}" for line in below[1:])]
    return lines


def proof(report: Report) -> str:
    """What a proof counted."""
    counted = f"{report.contributions} contributions, each exactly once"
    sent = f"{plural(report.messages, 'message')} and {plural(report.collectives, 'collective')}"
    if report.parts:
        meshes = ", ".join("x".join(map(str, part.sizes)) for part in report.parts)
        played = sum(part.report.ranks for part in report.parts)
        return (
            f"level by level, on meshes of {meshes} ({plural(played, 'rank')} played): {counted}, "
            f"and no deadlock; of all {report.ranks} ranks buffers, memory and bytes exact, {sent}"
        )
    return (
        f"{plural(report.ranks, 'rank')} played: {counted}; {sent} matched, no deadlock; buffers, "
        "memory and bytes exact"
    )


def call_sites(summary: Summary) -> str:
    """What a comparison of a module's text with its plan counted."""
    count = sum(len(names) for names in summary.sites.values())
    where = f"{plural(count, 'call site')} in {plural(len(summary.sites), 'function')}"
    if not summary.ranks:
        return f"{where}; not compared with the plan: the module's self-check runs them"
    ranks = plural(len(summary.ranks), "rank")
    if len(summary.ranks) < summary.of:
        ranks += f" of {summary.of}"
    return f"{where}; {plural(summary.events, 'event')} on {ranks}, each the plan's"
