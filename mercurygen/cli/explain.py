"""`mercurygen explain`: a schedule in words, every figure from its plan."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import prod
from textwrap import wrap

from mercurygen.check.traffic import measure
from mercurygen.cli.explain_steps import step_lines
from mercurygen.cli.words import mib, plural, table
from mercurygen.cost.validated import outside
from mercurygen.emit.outside import shape
from mercurygen.emit.words import plural as several
from mercurygen.ir.caller import INSIDE
from mercurygen.ir.mesh import cover
from mercurygen.ir.program import SEQUENCE, Tensor
from mercurygen.lower.events import Alloc, Event, Free, Kernel, Merge, Trace
from mercurygen.lower.plan import Plan, Spread, Swap
from mercurygen.lower.sizes import local_extents
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
    shown = tuple(each for each in traces if each.rank in sample(size))
    sections = [
        _title(schedule, plan),
        _tokens(plan),
        _border(schedule, plan, plan.before, "Border, before the body"),
        ["The body", *_indented(step_lines(plan, _wires(schedule), shown))],
        _border(schedule, plan, plan.after, "Border, after the body"),
        _work(plan, traces),
        _traffic(schedule, plan, traces),
        _memory(plan, traces),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def sample(size: int) -> tuple[int, ...]:
    """The first, a middle and the last rank."""
    return tuple(sorted({0, size // 2, size - 1}))


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


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
    lines = wrap(
        f"{program.operator}, {program.domain or program.mask}, on "
        f"{plural(program.mesh.size, 'rank')}" + (f": {dims}" if dims else ""),
        WIDTH,
    )
    layout = schedule.problem.layout
    if layout != INSIDE:
        lines.append(f"the caller's q, k, v and out are {shape(layout, *'BSHD')}")
    unproven = outside(schedule.problem, None, program.mesh.size)
    return [*lines, *([f"the price of it is {unproven}"] if unproven else [])]


# --- who holds what -------------------------------------------------------------------------


def _tokens(plan: Plan) -> list[str]:
    program = plan.program
    order, mesh = program.order, program.mesh
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for tensor in program.tensors:
        if tensor.role != "derived":
            alike.setdefault(_layout(plan, tensor), []).append(tensor.name)
    lines = [f"{', '.join(names)}: {_layout_words(plan, pin)}" for pin, names in alike.items()]
    if not program.mask_axes:
        return ["Who holds what", *_indented(lines)]
    lengths = dict.fromkeys(map(program.extent, program.mask_axes))  # of one sequence, or two
    if order.kind == "striped":
        lines.append(
            f"striped over {', '.join(order.dims)}: number r of {order.ranks(mesh)} owns "
            f"every {order.ranks(mesh)}th token, from r on"
        )
    else:
        chunks = order.chunks(mesh)
        rule = {"zigzag": f"r and {chunks - 1} - r", "contiguous": "r"}[order.kind]
        lines.append(
            f"{order.kind} over {', '.join(order.dims) or 'one rank'}: "
            f"{plural(chunks, 'chunk')} of "
            + " and ".join(plural(n // chunks, "token") for n in lengths)
            + (f", number r of {order.ranks(mesh)} owns {rule}" if order.dims else "")
        )
    held = _sliced(plan)
    shown = sorted({0, 1, *sample(mesh.size)} & set(range(mesh.size)))
    cells = [
        (f"rank {r}", _place(plan, r), *(f"{what} {_held(plan, t, r)}" for what, t in held))
        for r in shown
    ]
    return ["Who holds which tokens", *_indented(lines), *_indented(table(cells))]


def _sliced(plan: Plan) -> list[tuple[str, Tensor]]:
    """A tensor that is cut, of every sequence, and what its tokens are called."""
    program = plan.program
    cut = [t for t in program.inputs if program.sequence(t) and any(t.pin)] or program.inputs
    if program.align is None:
        return [("tokens", cut[0])]
    found = {program.sequence(tensor): tensor for tensor in reversed(cut)}
    names = zip(program.mask_axes, ("queries", "keys"), strict=True)
    return [(name, found[axis]) for axis, name in names if axis in found]


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
    program, atoms = plan.program, plan.atoms
    sequence = program.sequence(tensor)
    region = atoms.pinned(tensor, program.mesh.coordinate(rank))
    owned = region[tensor.axes.index(sequence)]
    live, count = atoms.sequences[sequence], atoms.count[sequence]
    if live.striped:
        words = [f"{a}, {a + count}, …" if live.size > 1 else str(a) for a in owned]
        return "; ".join(words if len(words) <= 3 else [*words[:2], f"… {len(words) - 2} more"])
    words = [f"{first}-{first + length - 1}" for _, first, length in live.runs(owned)]
    return ", ".join(words if len(words) <= 6 else [*words[:5], f"… {len(words) - 5} more"])


# --- border ---------------------------------------------------------------------------------


def _border(
    schedule: Schedule, plan: Plan, steps: tuple[Swap | Spread, ...], title: str
) -> list[str]:
    wires, rows = _wires(schedule), []
    for step in steps:
        asked = "  (only for the log-sum-exp)" if step.optional else ""
        if isinstance(step, Swap):
            share, size = step.join.n - 1, step.join.n
            way = f"{_plural_axis(step.gathered)} to {_plural_axis(step.split)}"
        elif step.gathers:
            share, size, way = step.join.n - 1, 1, f"{_plural_axis(step.axis)} gathered"
        else:
            share, size, way = 0, 1, f"{_plural_axis(step.axis)} cut, no transfer"
        moved = (f"{x} {mib(plan.held_bytes(x) * share // size)}" for x in step.tensors)
        rows.append((f"along {step.dim}", wires[step.dim], way, ", ".join(moved) + asked))
    if not rows:
        return []
    kinds = "all-to-alls" if all(isinstance(step, Swap) for step in steps) else "reshards"
    often = ", part by part" if plan.tiles else ""
    return [f"{title}: {kinds}{often}, bytes sent by each rank", *_indented(table(rows))]


def _plural_axis(axis: str) -> str:
    """What a reshard splits or joins, for people."""
    names = {SEQUENCE: "tokens", "H": "heads", "G": "heads of a group", "B": "batch"}
    return names.get(axis, axis)


# --- figures --------------------------------------------------------------------------------


def work(plan: Plan, played: Trace) -> Fraction:
    """Live points that a rank computes: (query, key) pairs for each of its query heads."""
    program, total = plan.program, Fraction(0)
    others = [axis for axis in program.loops if axis not in program.mask_axes]
    for event in played.events:
        if isinstance(event, Kernel):
            extents = dict(zip((a.name for a in program.axes), event.extents, strict=True))
            points = prod(extents[axis] for axis in others)
            pairs = 1 if event.block is None else event.block.pairs
            total += pairs * points
    if program.operator != "attention":
        return total
    local = local_extents(plan)
    whole = prod(local[axis] * plan.atoms.parts(axis) for axis in others)
    return total / whole


def _work(plan: Plan, traces: tuple[Trace, ...]) -> list[str]:
    points = [work(plan, each) for each in traces]
    mean = sum(points) / len(points)
    some = "" if len(traces) == plan.program.mesh.size else " (of those looked at)"
    what = f"Work of a rank{some}: points that the body is given"
    if plan.program.operator == "attention":
        local, atoms = local_extents(plan), plan.atoms
        heads = prod(local[axis] * atoms.parts(axis) for axis in ("H", "G"))
        what = f"Work of a rank{some}: live (query, key) pairs, for each of " + plural(
            heads, "query head"
        )
    return [
        what,
        f"  least {int(min(points))}, mean {float(mean):.0f}, most {int(max(points))}"
        f" ({float(max(points) / mean):.2f} times the mean)",
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
            case Kernel() | Merge():
                scratch = event.scratch
        if total + scratch > most:
            most, found = total + scratch, (event, list(alive), scratch)
    return found


def _moment(plan: Plan, played: Trace, event: Event) -> str:
    merged = ", and merged" if isinstance(event, Kernel) and event.merge else ""
    match event:
        case Kernel(block=None):
            return f"while the body runs{merged}"
        case Kernel(block=block):
            size = f"{block.height} x {block.width}"
            return f"while a block of {size} tokens is computed{merged}"
        case Merge():
            return "while partial results are merged"
    assert isinstance(event, Alloc)
    return f"when `{played.buffers[event.buffer].label}` has been made"
