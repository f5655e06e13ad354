"""The steps of a body in words: whose tile, what is in flight, what is computed of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, zip_longest
from math import prod
from textwrap import wrap
from typing import NamedTuple

from mercurygen.check.traffic import operation_bytes
from mercurygen.cli.words import mib, plural, table
from mercurygen.lower.events import Batch, Collective, Kernel, Trace, Turn, Wait
from mercurygen.lower.plan import Gather, Loop, Plan, Walk
from mercurygen.lower.sizes import local_extents

WIDTH, WIDEST = 98, 118
SHOWN_STEPS = 16  # of more, the first and the last few
LAST_STEPS = 2
SHOWN_BLOCKS = 3  # of one tile
WAYS = {"all-to-all": "all-to-all", "all-gather": "gather", "broadcast": "broadcast"}


class Step(NamedTuple):
    """One turn of the body on one rank."""

    tile: str  # whose
    flying: str  # what is on its way while the body runs
    blocks: str  # that are computed


def step_lines(plan: Plan, wires: dict[str, str], traces: tuple[Trace, ...]) -> list[str]:
    """What runs and what moves, step by step, on some ranks."""
    sentences = [_work_of(plan), *_moves(plan, wires, traces[0]), *_results(plan, wires)]
    return [
        *wrap(" ".join(sentences), WIDTH, break_on_hyphens=False),
        *_tables(plan, traces),
    ]


# --- sentences ------------------------------------------------------------------------------


def _work_of(plan: Plan) -> str:
    """How much a rank works on, and how much of it at a time."""
    program, names = plan.program, ", ".join(plan.nest.tensors)
    extents = local_extents(plan)
    if program.operator == "attention":
        rows = extents[program.mask_axes[0]]
        heads = extents["H"] * extents["G"] * _parts(plan, "H") * _parts(plan, "G")
        kv_heads = extents["H"] * _parts(plan, "H")
        whole = (
            f"A rank works on {plural(rows, 'token')} of the queries with "
            f"{plural(heads, 'query head')} and {plural(kv_heads, 'key/value head')}"
        )
    else:
        sizes = ", ".join(f"{axis} {extents[axis]}" for axis in program.loops)
        whole = f"A rank works on {sizes}"
    loops = [f"{loop.parts} parts of {' and '.join(loop.axes)}" for loop in plan.tiles]
    if loops:
        whole += f", in {' times '.join(loops)}"
    walked = [loop for loop in plan.nest.loops if loop.walks and loop.tensors]
    tiles = [f"a tile of {_tile_size(plan, loop)} of {', '.join(loop.tensors)}" for loop in walked]
    if not tiles and names and program.operator == "attention":
        columns = extents[program.mask_axes[1]]
        tiles = [f"a tile of {plural(columns, 'token')} of {names}"]
    return whole + (f", {' and '.join(tiles)} at a time." if tiles else ".")


def _parts(plan: Plan, axis: str) -> int:
    return plan.atoms.parts(axis)


def _tile_size(plan: Plan, loop: Loop) -> str:
    """How much of its axis a tile of a loop has."""
    ways = prod(plan.program.mesh.extent(walk.dim) for walk in loop.walks)
    if loop.partner:
        ways = plan.program.mesh.extent(loop.walks[-1].dim)
    rest = local_extents(plan)[loop.axis] // ways
    if loop.axis in plan.program.mask_axes:
        return plural(rest, "token")
    return f"{rest} along {loop.axis}"


def _moves(plan: Plan, wires: dict[str, str], played: Trace) -> Iterator[str]:
    """How the tiles come, outermost first, and what one rank sends for that."""
    for loop in plan.nest.loops:
        walked = False
        for stage in loop.stages:
            where = f"along {stage.dim} ({wires[stage.dim]})"
            sent = mib(_sent(plan, played, stage.dim, loop))
            names = ", ".join(loop.tensors)
            match stage:
                case Walk() if loop.tensors:
                    yield _walk(plan, loop, stage, where, sent, walked)
                    walked = True
                case Gather() if walked:
                    yield f"The parts of each tile are gathered {where}, {sent}, one tile ahead."
                case Gather() if plan.tiles:
                    yield f"The parts of {names} are gathered {where} part by part, {sent} each."
                case Gather():
                    yield f"First the parts of {names} are gathered {where}, {sent}."


def _walk(plan: Plan, loop: Loop, walk: Walk, where: str, sent: str, walked: bool) -> str:
    """How tiles go around one dimension."""
    subject = "Each tile that comes then goes" if walked else "Tiles go"
    if len(plan.nest.loops) > 1 and not walked:
        subject = f"Tiles of {', '.join(loop.tensors)} go"
    size = plan.program.mesh.extent(walk.dim)
    steps = plural(len(walk.coming(size)), "shift")
    if walk.direct:
        kind = f"straight from their owners, what is read of them, {where} in {steps} of up to"
        return f"{subject} {kind} {sent}."
    if walk.both:
        return (
            f"{subject} {where} both ways, {size // 2} forward, {(size - 1) // 2} back, of {sent}."
        )
    if walk.skew:
        return f"{subject} {where} and {walk.skew} in step, {steps} of {sent}, aligned first."
    way = " backwards" if walk.reverse else ""
    return f"{subject} {where}{way} in {steps} of {sent}."


def _results(plan: Plan, wires: dict[str, str]) -> Iterator[str]:
    """What becomes of partial results."""
    for loop in plan.nest.loops:
        if loop.outputs:
            dim = loop.walks[-1].dim
            names, where = ", ".join(loop.outputs), f"along {dim} ({wires[dim]})"
            if loop.home == "direct":
                yield f"Results ({names}) go straight to the owners of the tiles {where}."
            else:
                yield f"Results ({names}) travel {where} and are added up on their way."
    for reduce in plan.nest.reduces:
        names, where = ", ".join(reduce.tensors), f"over {reduce.dim} ({wires[reduce.dim]})"
        if reduce.axis is None:
            yield f"At the end {names} are merged {where}, on every rank."
        else:
            yield f"At the end {names} are merged {where}, each rank its part of {reduce.axis}."


def _sent(plan: Plan, played: Trace, dim: str, loop: Loop) -> int:
    """Most bytes that a rank sends for one tile along a dimension of a loop."""
    size = plan.program.mesh.extent(dim)
    batches, gathers = [0], []
    for event in played.events:
        if isinstance(event, Batch) and event.dim == dim and not _homeward(played, event):
            batches.append(operation_bytes(played, event, size))
        if isinstance(event, Collective) and event.dim == dim:
            if event.kind in ("all-gather", "broadcast"):
                gathers.append(operation_bytes(played, event, size))
    return max(batches) or sum(gathers[: len(loop.tensors)])


def _homeward(played: Trace, event: Batch) -> bool:
    """Whether a batch brings results home."""
    labels = (played.buffers[m.buffer].label for m in (*event.sends, *event.recvs))
    return any(label.endswith(" home") for label in labels)


# --- tables ---------------------------------------------------------------------------------


def _tables(plan: Plan, traces: tuple[Trace, ...]) -> list[str]:
    """One table of tiles, transfers and blocks; two shorter ones if it were too wide."""
    played = [steps_of(plan, each) for each in traces]
    rows = [list(row) for row in zip_longest(*played)]
    left, right = ["step", "tile of", "meanwhile"], [f"rank {each.rank}" for each in traces]
    note = "Under a rank: what is computed of the tile, in tokens; d: the diagonal cuts it"
    if not plan.program.mask_axes:
        note = "Under a rank: how much is computed of the tile, along " + ", ".join(
            plan.program.loops
        )
    for most in (SHOWN_STEPS, SHOWN_STEPS // 2):
        steps, moves, blocks = [], [], []
        for step in _shown(len(rows), most):
            found = [] if step is None else rows[step]
            first = next((each for each in found if each), None)
            steps.append("…" if step is None else str(step + 1))
            moves.append([first.tile, _busiest(found)] if first else ["", ""])
            blocks.append([each.blocks if each else "" for each in found] or ["" for _ in right])
        whole = _indented(
            table(
                [
                    [*left, *right],
                    *([n, *a, *b] for n, a, b in zip(steps, moves, blocks, strict=True)),
                ]
            )
        )
        if max(map(len, whole)) <= WIDEST:
            return [note, *whole]
    first = table([left, *([n, *a] for n, a in zip(steps, moves, strict=True))])
    second = table([["step", *right], *_once(steps, blocks)])
    return [*_indented(first), note, *_indented(second)]


def _busiest(found: list[Step | None]) -> str:
    """What is in flight on most of the ranks that are shown."""
    words = [step.flying for step in found if step]
    return max(words, key=lambda word: (word != "nothing", words.count(word)))


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _once(steps: list[str], cells: list[list[str]]) -> Iterator[list[str]]:
    """Rows, those alike that follow each other as one."""
    for found, run in groupby(zip(steps, cells, strict=True), key=lambda row: row[1]):
        numbers = [step for step, _ in run]
        yield [numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", *found]


def _shown(count: int, most: int) -> list[int | None]:
    """Steps to show; None stands for those left out."""
    if count <= most:
        return list(range(count))
    first = most - LAST_STEPS - 1
    return [*range(first), None, *range(count - LAST_STEPS, count)]


def steps_of(plan: Plan, played: Trace) -> list[Step]:
    """The turns of a rank."""
    flying: dict[int, Batch | Collective] = {}
    found: list[Step] = []
    blocks: list[str] = []
    turn: Turn | None = None
    flights = "nothing"

    def close() -> None:
        if turn is not None:
            found.append(Step(_whose(plan, played.rank, turn), flights, _joined(blocks)))

    for event in played.events:
        match event:
            case Batch() | Collective():
                flying[event.op] = event
            case Wait(op):
                del flying[op]
            case Turn():
                close()
                turn, blocks = event, []
                flights = _flights(played, list(flying.values()))
            case Kernel():
                blocks.append(_block(plan, event))
    close()
    return found


def _whose(plan: Plan, rank: int, turn: Turn) -> str:
    """The owner of a tile, seen from the rank that works on it, and the part of the loops."""
    mesh = plan.program.mesh
    place, back = mesh.coordinate(rank), []
    for dim, owner in turn.owner:
        size = mesh.extent(dim)
        behind = (place[dim] - owner) % size
        ahead = any(
            walk.dim == dim and (walk.reverse or (walk.both and behind > size // 2))
            for loop in plan.nest.loops
            for walk in loop.walks
        )
        if behind:
            back.append(f"{dim} + {size - behind}" if ahead else f"{dim} - {behind}")
    whose = ", ".join(back) or "its own"
    parts = [f"{axis} {index + 1} of {of}" for axis, index, of in turn.part if of > 1]
    return f"{whose}; {', '.join(parts)}" if parts else whose


def _joined(blocks: list[str]) -> str:
    if len(blocks) > SHOWN_BLOCKS:
        blocks = [*blocks[: SHOWN_BLOCKS - 1], f"{len(blocks) - SHOWN_BLOCKS + 1} more"]
    return " + ".join(blocks) or "-"


def _block(plan: Plan, event: Kernel) -> str:
    """What one call computes."""
    program = plan.program
    extents = dict(zip((axis.name for axis in program.axes), event.extents, strict=True))
    if event.block is None:
        return "x".join(str(extents[axis]) for axis in program.loops)
    rows, columns = (extents[axis] for axis in program.mask_axes)
    return f"{rows}x{columns}" + ("d" if event.block.masked else "")


def _flights(played: Trace, flying: list[Batch | Collective]) -> str:
    """What is on its way."""
    words = []
    for event in flying:
        if isinstance(event, Batch):
            words.append(f"{'results' if _homeward(played, event) else 'shift'} {event.dim}")
        else:
            words.append(f"{WAYS.get(event.kind, event.kind)} {event.dim}")
    return ", ".join(dict.fromkeys(words)) or "nothing"
