"""The steps of a nest in words: whose tile, what is in flight, which blocks the mask leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product
from textwrap import wrap

from mercurygen.check.traffic import operation_bytes
from mercurygen.cli.words import mib, plural, table
from mercurygen.lower.events import Batch, Collective, Kernel, Trace, Wait
from mercurygen.lower.plan import Gather, Plan, Walk
from mercurygen.lower.sizes import extent_of, local_heads
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import visible

WIDTH, WIDEST = 98, 118
SHOWN_STEPS = 16  # of more, the first and the last few
LAST_STEPS = 2
SHOWN_BLOCKS = 3  # of one tile


def step_lines(plan: Plan, wires: dict[str, str], ranks: tuple[int, ...]) -> list[str]:
    """What runs and what moves, step by step; the blocks of some ranks."""
    names, columns = ", ".join(plan.nest.tensors), plan.columns(dict.fromkeys(plan.nest.walks, 0))
    heads, kv_heads = local_heads(plan)
    rows = plan.rows(plan.program.mesh.coordinate(0))
    text = (
        f"A rank works on {plural(len(rows) * plan.chunk, 'token')} of the queries with "
        f"{plural(heads, 'query head')} and {plural(kv_heads, 'key/value head')}, "
        f"a tile of {plural(len(columns) * plan.chunk, 'token')} of {names} at a time."
    )
    # Under a full mask each step has one kernel, and what moves is the same under every mask.
    played = trace(replace(plan, program=replace(plan.program, mask="full")), 0)
    sentences = [text, *_stages(plan, wires, played)]
    return [
        *wrap(" ".join(sentences), WIDTH, break_on_hyphens=False),
        *_tables(plan, played, ranks),
    ]


def _tables(plan: Plan, played: Trace, ranks: tuple[int, ...]) -> list[str]:
    """One table of tiles, transfers and blocks; two shorter ones if it were too wide."""
    offsets = list(product(*(range(plan.program.mesh.extent(dim)) for dim in plan.nest.walks)))
    flights, left = _flights(played), ["step", "tile of", "meanwhile"]
    right = [f"rank {rank}" for rank in ranks]
    note = "Under a rank: the blocks that the mask leaves, in tokens; d: the diagonal cuts it"
    for most in (SHOWN_STEPS, SHOWN_STEPS * 5 // 8):
        steps, moves, blocks = [], [], []
        for step in _shown(len(offsets), most):
            offset = None if step is None else offsets[step]
            steps.append("…" if step is None else str(step + 1))
            moves.append(["", ""] if offset is None else [_whose(plan, offset), flights[step]])
            blocks.append(["" if offset is None else _blocks(plan, r, offset) for r in ranks])
        rows = [[n, *a, *b] for n, a, b in zip(steps, moves, blocks, strict=True)]
        whole = _indented(table([[*left, *right], *rows]))
        if max(map(len, whole)) <= WIDEST:
            return [note, *whole]
    first = table([left, *([n, *a] for n, a in zip(steps, moves, strict=True))])
    second = table([["step", *right], *_once(steps, blocks)])
    return [*_indented(first), note, *_indented(second)]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _once(steps: list[str], cells: list[list[str]]) -> Iterator[list[str]]:
    """Rows, those alike that follow each other as one."""
    for found, run in groupby(zip(steps, cells, strict=True), key=lambda row: row[1]):
        numbers = [step for step, _ in run]
        yield [numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", *found]


def _stages(plan: Plan, wires: dict[str, str], played: Trace) -> Iterator[str]:
    """How the tiles come, outermost first, and what one rank sends for that."""
    names, walked = ", ".join(plan.nest.tensors), False
    for stage in plan.nest.stages:
        where = f"along {stage.dim} ({wires[stage.dim]})"
        sent = mib(_sent(plan, played, stage.dim))
        match stage:
            case Walk(dim):
                subject = "Each tile that comes then goes" if walked else "Tiles go"
                steps = plural(plan.program.mesh.extent(dim) - 1, "shift")
                yield f"{subject} {where} in {steps} of {sent}."
                walked = True
            case Gather() if walked:
                yield f"The parts of each tile are gathered {where}, {sent}, one tile ahead."
            case Gather():
                yield f"First the parts of {names} are gathered {where}, {sent}."


def _sent(plan: Plan, played: Trace, dim: str) -> int:
    """Bytes that a rank sends for one tile along a dimension of the nest."""
    size = plan.program.mesh.extent(dim)
    found = [
        operation_bytes(played, event, size)
        for event in played.events
        if isinstance(event, Batch | Collective) and event.dim == dim
    ]
    together = any(isinstance(event, Batch) and event.dim == dim for event in played.events)
    return sum(found[: 1 if together else len(plan.nest.tensors)])


def _shown(count: int, most: int) -> list[int | None]:
    """Steps to show; None stands for those left out."""
    if count <= most:
        return list(range(count))
    first = most - LAST_STEPS - 1
    return [*range(first), None, *range(count - LAST_STEPS, count)]


def _whose(plan: Plan, offset: tuple[int, ...]) -> str:
    """The owner of a step's tile, seen from the rank that works on it."""
    back = [f"{dim} - {n}" for dim, n in zip(plan.nest.walks, offset, strict=True) if n]
    return ", ".join(back) or "its own"


def _blocks(plan: Plan, rank: int, offset: tuple[int, ...]) -> str:
    """What the mask leaves of a step's tile."""
    mesh = plan.program.mesh
    place = mesh.coordinate(rank)
    owner = {
        dim: (place[dim] - n) % mesh.extent(dim)
        for dim, n in zip(plan.nest.walks, offset, strict=True)
    }
    words = []
    for block in visible(plan.program.mask, plan.rows(place), plan.columns(owner)):
        rows, columns = extent_of(block, plan)
        words.append(f"{rows}x{columns}" + ("d" if block.causal else ""))
    if len(words) > SHOWN_BLOCKS:
        words[SHOWN_BLOCKS - 1 :] = [f"{len(words) - SHOWN_BLOCKS + 1} more"]
    return " + ".join(words) or "-"


def _flights(played: Trace) -> list[str]:
    """Per step what is on its way while the body runs."""
    flying: dict[int, Batch | Collective] = {}
    found = []
    for event in played.events:
        match event:
            case Batch() | Collective():
                flying[event.op] = event
            case Wait(op):
                del flying[op]
            case Kernel():
                words = (
                    f"{'shift' if isinstance(e, Batch) else 'gather'} {e.dim}"
                    for e in flying.values()
                )
                found.append(", ".join(dict.fromkeys(words)) or "nothing")
    return found
