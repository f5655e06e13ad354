"""Emitted text of the docstring of a user's operator: schedule, traffic, memory, shapes."""

from __future__ import annotations

from textwrap import wrap

from mercurygen.emit.header import WIDTH, peak_bytes, schedule_lines, why
from mercurygen.emit.operator_entry import plain, program_count
from mercurygen.emit.operator_words import Words
from mercurygen.emit.words import arrangement, mib
from mercurygen.ir.mesh import cover
from mercurygen.lower.events import Batch, Collective
from mercurygen.lower.trace import trace
from mercurygen.schedule.schedule import Schedule


def docstring(schedule: Schedule, words: Words) -> str:
    """The text between the module's triple quotes."""
    ranks = words.program.mesh.size
    over = f"{ranks} GPUs: {arrangement(schedule.links)}" if ranks > 1 else "1 GPU"
    sections = [
        f"{words.operator.name} over {over}.",
        "Schedule\n" + "\n".join(f"    {line}" for line in schedule_lines(schedule)),
        why(schedule),
        _traffic(schedule, words),
        _memory(words),
        _order(words),
        _axes(words),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _traffic(schedule: Schedule, words: Words) -> str:
    """What the busiest rank sends over every dimension, by the kind of transfer."""
    rows: dict[tuple[str, str], list[int]] = {}
    mesh = words.program.mesh
    for rank in range(mesh.size):
        here: dict[tuple[str, str], list[int]] = {}
        planned = trace(words.plan, rank)
        for event in planned.events:
            if isinstance(event, Batch):
                sent = [m.nbytes or planned.buffers[m.buffer].nbytes for m in event.sends]
                key = event.dim, "point-to-point"
            elif isinstance(event, Collective):
                size, source = mesh.extent(event.dim), planned.buffers[event.source].nbytes
                times = {"all-gather": size - 1, "all-reduce": 2 * (size - 1) / size}
                sent = [int(source * times.get(event.kind, (size - 1) / size))]
                key = event.dim, event.kind
            else:
                continue
            found = here.setdefault(key, [0, 0])
            found[0], found[1] = found[0] + sum(sent), found[1] + 1
        for key, (nbytes, count) in here.items():
            old = rows.get(key, [0, 0])
            rows[key] = [max(old[0], nbytes), max(old[1], count)]
    if not rows:
        return ""
    links = {
        dim: " and ".join(schedule.links[i].name for i in levels)
        for dim, levels in cover(schedule.mesh, schedule.links).items()
    }
    cells = [
        (dim, kind, f"{mib(nbytes)} in {count} {'call' if count == 1 else 'calls'}", links[dim])
        for (dim, kind), (nbytes, count) in rows.items()
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "What moves, sent by the busiest rank in a call\n" + "\n".join(
        "    " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]])
        for row in cells
    )


def _memory(words: Words) -> str:
    inputs = sum(words.plan.held_bytes(tensor.name) for tensor in words.program.inputs)
    text = (
        f"Memory at the peak: {mib(peak_bytes(words.plan))} a rank for this problem, of which the "
        f"inputs are {mib(inputs)}, beside what the operator's lines need for a tile."
    )
    return "\n".join(wrap(text, WIDTH))


def _order(words: Words) -> str:
    order, program = words.program.order, words.program
    if not order.dims:
        return ""
    rows, cols = program.mask_axes
    ranks = order.ranks(program.mesh)
    said = {
        "contiguous": f"{ranks} chunks, and rank r owns chunk r",
        "zigzag": f"{2 * ranks} chunks, and rank r owns chunks r and {2 * ranks - 1} - r",
        "striped": f"{ranks} stripes, and rank r owns positions r, r + {ranks}, ...",
    }[order.kind]
    over = " and ".join(order.dims)
    text = f"{rows} and {cols} are cut {order.kind} over {over}: into {said}."
    return "\n".join(wrap(text, WIDTH))


def _axes(words: Words) -> str:
    """What the letters of the shapes are, and what they must be a multiple of."""
    lines = ["Axes, by their extent over all ranks"]
    for axis in words.operator.axes:
        count = program_count(words, axis.name)
        needs = f"; a multiple of {count}" if count > 1 else ""
        lines += wrap(
            f"{axis.name}: {plain(axis.doc)}{needs}",
            WIDTH,
            initial_indent="    ",
            subsequent_indent=" " * 8,
        )
    return "\n".join(lines)
