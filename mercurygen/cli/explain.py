"""`mercurygen explain`: a schedule in words, every figure from its plan."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from mercurygen.check.traffic import measure
from mercurygen.cli.explain_steps import step_lines
from mercurygen.cli.words import mib, plural, table
from mercurygen.emit.words import plural as several
from mercurygen.ir.mesh import cover
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Alloc, Event, Free, Kernel, Trace
from mercurygen.lower.plan import Plan, Swap
from mercurygen.lower.sizes import extent_of, local_heads
from mercurygen.lower.trace import trace
from mercurygen.schedule.schedule import Schedule

WIDTH = 100
MOST_RANKS = 128  # that are all played; of larger meshes a sample is
SHOWN_BUFFERS = 6


def explain(schedule: Schedule, plan: Plan) -> str:
    """The schedule in words, for a reviewer.

    Args:
        schedule: that the plan is of.
        plan: lowered from it.

    Returns:
        Who holds what, what moves, the steps of the nest, work, bytes and memory; at most some
        60 lines for 16 ranks. The figures are those of the call without the log-sum-exp.
    """
    size = plan.program.mesh.size
    ranks = range(size) if size <= MOST_RANKS else sample(size)
    traces = tuple(trace(plan, rank) for rank in ranks)
    sections = [
        _title(schedule, plan),
        _tokens(plan),
        _border(schedule, plan, plan.before, "Border, before the body"),
        ["The body", *_indented(step_lines(plan, _wires(schedule), sample(size)))],
        _border(schedule, plan, plan.after, "Border, after the body"),
        _work(plan),
        _traffic(schedule, plan, traces),
        _memory(plan, traces),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def sample(size: int) -> tuple[int, ...]:
    """The first, a middle and the last rank."""
    return tuple(sorted({0, size // 2, size - 1}))


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _wrapped(text: str) -> list[str]:
    return _indented(wrap(text, WIDTH - 2, break_on_hyphens=False))


def _wires(schedule: Schedule) -> dict[str, str]:
    """Which links a mesh dimension runs over."""
    links = schedule.links
    return {
        dim: " and ".join(links[i].name for i in levels)
        for dim, levels in cover(schedule.mesh, links).items()
    }


def _title(schedule: Schedule, plan: Plan) -> list[str]:
    program = plan.program
    wires = _wires(schedule)
    dims = ", ".join(f"{dim.name}={dim.size} over {wires[dim.name]}" for dim in program.mesh.dims)
    return wrap(
        f"{program.operator}, {program.mask}, on {plural(program.mesh.size, 'rank')}"
        + (f": {dims}" if dims else ""),
        WIDTH,
    )


# --- who holds what -------------------------------------------------------------------------


def _tokens(plan: Plan) -> list[str]:
    program = plan.program
    order, mesh = program.order, program.mesh
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for tensor in program.tensors:
        alike.setdefault(_layout(plan, tensor), []).append(tensor.name)
    lines = [f"{', '.join(names)}: {_layout_words(plan, pin)}" for pin, names in alike.items()]
    chunks = order.chunks(mesh)
    rule = {"zigzag": f"r and {chunks - 1} - r", "contiguous": "r"}.get(order.kind, order.kind)
    lines.append(
        f"{order.kind} over {', '.join(order.dims) or 'one rank'}: "
        f"{plural(chunks, 'chunk')} of {plural(plan.chunk, 'token')}"
        + (f", number r of {order.ranks(mesh)} owns {rule}" if order.dims else "")
    )
    rows = next(t for t in program.inputs if t.carries(program.mask_axes[0]))
    shown = sorted({0, 1, *sample(mesh.size)} & set(range(mesh.size)))
    cells = [(f"rank {r}", _place(plan, r), f"tokens {_held(plan, rows, r)}") for r in shown]
    return ["Who holds which tokens", *_indented(lines), *_indented(table(cells))]


def _layout(plan: Plan, tensor: Tensor) -> tuple[str | None, ...]:
    """What splits a tensor over every dimension, its sequence called S."""
    sequence = plan.program.sequence(tensor)
    return tuple("S" if axis is not None and axis == sequence else axis for axis in tensor.pin)


def _layout_words(plan: Plan, pin: tuple[str | None, ...]) -> str:
    split: dict[str | None, list[str]] = {}
    for dim, axis in zip(plan.program.mesh.names, pin, strict=True):
        split.setdefault(axis, []).append(dim)
    words = [
        f"{axis} split over {', '.join(dims)}" if axis else f"the same along {', '.join(dims)}"
        for axis, dims in split.items()
    ]
    return "; ".join(words) or "whole"


def _place(plan: Plan, rank: int) -> str:
    coordinate = plan.program.mesh.coordinate(rank)
    return ", ".join(f"{dim} {index}" for dim, index in coordinate.items()) or "the only one"


def _held(plan: Plan, tensor: Tensor, rank: int) -> str:
    """Ranges of tokens that the caller of a rank holds."""
    program = plan.program
    sequence, here = program.sequence(tensor), program.mesh.coordinate(rank)
    held = {d: (i,) for d, i in here.items() if program.pinned(tensor, d) == sequence}
    spans: list[list[int]] = []
    for chunk in program.order.owned(program.mesh, held):
        if spans and spans[-1][1] == chunk:
            spans[-1][1] = chunk + 1
        else:
            spans.append([chunk, chunk + 1])
    words = [f"{a * plan.chunk}-{b * plan.chunk - 1}" for a, b in spans]
    return ", ".join(words if len(words) <= 6 else [*words[:5], f"… {len(words) - 5} more"])


# --- border ---------------------------------------------------------------------------------


def _border(schedule: Schedule, plan: Plan, swaps: tuple[Swap, ...], title: str) -> list[str]:
    wires, rows = _wires(schedule), []
    for swap in swaps:
        moved = (
            f"{x} {mib(plan.held_bytes(x) * (swap.join.n - 1) // swap.join.n)}"
            for x in swap.tensors
        )
        way = "tokens to heads" if swap.to_heads else "heads to tokens"
        asked = "  (only for the log-sum-exp)" if swap.optional else ""
        rows.append((f"along {swap.dim}", wires[swap.dim], way, ", ".join(moved) + asked))
    if not rows:
        return []
    return [f"{title}: all-to-alls, bytes sent by each rank", *_indented(table(rows))]


# --- figures --------------------------------------------------------------------------------


def work(plan: Plan) -> list[int]:
    """Live (query, key) pairs of every rank: all those of its rows, once for a query head."""
    program, chunk = plan.program, plan.chunk
    columns = program.order.chunks(program.mesh)
    pairs: dict[tuple[int, ...], int] = {}
    found = []
    for rank in range(program.mesh.size):
        rows = plan.rows(program.mesh.coordinate(rank))
        if rows not in pairs and program.mask == "causal":
            pairs[rows] = sum(row * chunk**2 + chunk * (chunk + 1) // 2 for row in rows)
        elif rows not in pairs:
            pairs[rows] = len(rows) * columns * chunk**2
        found.append(pairs[rows])
    return found


def _work(plan: Plan) -> list[str]:
    pairs, heads = work(plan), local_heads(plan)[0]
    mean = sum(pairs) / len(pairs)
    return [
        f"Work of a rank: live (query, key) pairs, for each of {plural(heads, 'query head')}",
        f"  least {min(pairs)}, mean {mean:.0f}, most {max(pairs)}"
        f" ({max(pairs) / mean:.2f} times the mean)",
    ]


def _traffic(schedule: Schedule, plan: Plan, traces: tuple[Trace, ...]) -> list[str]:
    """Along every dimension; between levels only if all ranks were played, which differ there."""
    mesh = plan.program.mesh
    if mesh.size == 1:
        return ["Nothing moves between ranks"]
    wires, played = _wires(schedule), [each.rank for each in traces]
    found = measure(plan, traces, schedule.links)
    rows = [("", "", "mean", "most", "")]
    for dim, spread in found.sent.items():
        sent = [spread.values[rank] for rank in played]
        steps = plural(found.steps[dim], "operation")
        rows.append((f"along {dim}", wires[dim], *_spread(sent), steps))
    for link in schedule.links:
        if link.size > 1 and len(played) == mesh.size:
            sent = list(found.crossing[link.level].values)
            rows.append((f"between {several(link.level)}", link.name, *_spread(sent), ""))
    some = "" if len(played) == mesh.size else f" (ranks {', '.join(map(str, played))})"
    return [f"Bytes that a rank sends in a call{some}", *_indented(table(rows, (2, 3)))]


def _spread(values: list[int]) -> tuple[str, str]:
    return mib(sum(values) / len(values)), mib(max(values))


# --- memory ---------------------------------------------------------------------------------


def _memory(plan: Plan, traces: tuple[Trace, ...]) -> list[str]:
    worst = max(traces, key=lambda each: (each.peak(), -each.rank))
    event, alive, scratch = _at_peak(worst)
    sizes: dict[str, int] = {}
    for buffer in alive:
        caller = " (the caller's)" if buffer in worst.inputs.values() else ""
        name = worst.buffers[buffer].label + caller
        sizes[name] = sizes.get(name, 0) + worst.buffers[buffer].nbytes
    if scratch:
        sizes["scratch of the kernel"] = scratch
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    rows = [(mib(nbytes), name) for name, nbytes in largest[:SHOWN_BUFFERS]]
    rest = sum(nbytes for _, nbytes in largest[SHOWN_BUFFERS:])
    if rest:
        rows.append((mib(rest), f"{len(largest) - SHOWN_BUFFERS} smaller"))
    some = "" if len(traces) == plan.program.mesh.size else " of those looked at"
    where = f"{mib(worst.peak())} on rank {worst.rank}{some}, {_moment(plan, worst, event)}"
    return [*wrap(f"Memory at the peak: {where}", WIDTH), *_indented(table(rows, (0,)))]


def _at_peak(played: Trace) -> tuple[Event, list[int], int]:
    """The first event with most bytes alive, the buffers alive then, and the kernel's scratch."""
    alive: dict[int, None] = {}
    total = most = 0
    found: tuple[Event, list[int], int] = played.events[0], [], 0
    for event in played.events:
        scratch = 0
        match event:
            case Alloc(buffer):
                alive[buffer] = None
                total += played.buffers[buffer].nbytes
            case Free(buffer):
                del alive[buffer]
                total -= played.buffers[buffer].nbytes
            case Kernel():
                scratch = event.scratch
        if total + scratch > most:
            most, found = total + scratch, (event, list(alive), scratch)
    return found


def _moment(plan: Plan, played: Trace, event: Event) -> str:
    if isinstance(event, Kernel):
        rows, columns = extent_of(event.block, plan)
        merged = ", and merged" if event.merge else ""
        return f"while a block of {rows} x {columns} tokens is computed{merged}"
    assert isinstance(event, Alloc)
    return f"when `{played.buffers[event.buffer].label}` has been made"
