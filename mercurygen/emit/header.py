"""Emitted text of the module's docstring: schedule, traffic, memory, order, shapes."""

from __future__ import annotations

from textwrap import wrap

from mercurygen.emit.entry import global_multiple, head_split
from mercurygen.emit.words import arrangement, mib, times
from mercurygen.ir.mesh import cover
from mercurygen.lower.plan import Gather, Plan, Swap, Walk
from mercurygen.lower.trace import trace
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import header_lines

WIDTH = 98
WHY = "why: "  # a comment of a schedule that says why it was chosen


def docstring(schedule: Schedule, plan: Plan) -> str:
    """The text between the module's triple quotes."""
    ranks = plan.program.mesh.size
    over = f"{ranks} GPUs: {arrangement(schedule.links)}" if ranks > 1 else "1 GPU"
    held = (
        "Every rank holds a slice of the sequence with all heads, and gets back the same slice of "
        "the output."
        if ranks > 1
        else "The one rank holds the whole sequence."
    )
    sections = [
        f"{_title(schedule)} over {over}.",
        "\n".join(wrap(held, WIDTH)),
        "Schedule\n" + "\n".join(f"    {line}" for line in schedule_lines(schedule)),
        why(schedule),
        _traffic(schedule, plan),
        _memory(plan),
        _order(plan),
        _shapes(plan),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _title(schedule: Schedule) -> str:
    problem = schedule.problem
    kind = "multi-head" if problem.heads == problem.kv_heads else "grouped-query"
    kind = "multi-query" if problem.kv_heads == 1 < problem.heads else kind
    return f"{'Causal' if problem.mask == 'causal' else 'Full'} {kind} attention"


def schedule_lines(schedule: Schedule) -> list[str]:
    """The schedule's own lines, the keyword in a column of its own; long ones continue."""
    lines = []
    for line in (*header_lines(schedule), *map(str, schedule.directives)):
        word, _, rest = line.partition(" ")
        first, *more = wrap(rest, WIDTH - 17, break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
        lines.append(f"{word:<12} {first}".rstrip())
        lines += [f"{'':<12}   {part}" for part in more]
    return lines


def why(schedule: Schedule) -> str:
    """What the schedule's comments say of the choice: the lines `# why: ...`.

    They are somebody's text in a docstring: only ASCII, no quote that could end it, no escape.
    """
    said = " ".join(c.removeprefix(WHY) for c in schedule.comments if c.startswith(WHY))
    plain = "".join(c if c.isascii() and c.isprintable() else "?" for c in said)
    plain = plain.replace("\\", "/").replace('"', "'")
    if not plain.strip():
        return ""
    return "Why this schedule\n" + "\n".join(
        f"    {line}" for line in wrap(plain, WIDTH - 4, break_on_hyphens=False)
    )


# --- traffic --------------------------------------------------------------------------------


def _traffic(schedule: Schedule, plan: Plan) -> str:
    rows = [_swap_row(plan, swap) for swap in plan.before if not swap.optional]
    rows += _stage_rows(plan)
    rows += [_swap_row(plan, swap) for swap in plan.after if not swap.optional]
    if not rows:
        return ""
    links = _link_names(schedule)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "    "
        + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=True)), links[row[0]]])
        for row in rows
    ]
    optional = [_swap_row(plan, swap) for swap in plan.after if swap.optional]
    lines += [f"    return_lse adds {row[2]} over {row[0]}" for row in optional]
    return "What moves, sent by each rank in a call\n" + "\n".join(lines)


def _link_names(schedule: Schedule) -> dict[str, str]:
    links = schedule.links
    return {
        dim: " and ".join(links[i].name for i in levels)
        for dim, levels in cover(schedule.mesh, links).items()
    }


def _swap_row(plan: Plan, swap: Swap) -> tuple[str, str, str]:
    size = swap.join.n
    moved = (f"{x} {mib(plan.held_bytes(x) * (size - 1) / size)}" for x in swap.tensors)
    return swap.dim, "all-to-all", ", ".join(moved)


def _stage_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """How the tiles come, stage by stage; inner stages run once for every tile of the outer."""
    rows = []
    nest, mesh = plan.nest, plan.program.mesh
    split = [d for d in mesh.names if plan.program.stored(plan.program.tensor("k"), d)]
    rounds = 1
    for stage in nest.stages:
        size = mesh.extent(stage.dim)
        tile = sum(plan.nbytes(name, tuple(split)) for name in nest.tensors)
        tensors = " and ".join(nest.tensors)
        match stage:
            case Walk():
                steps = rounds * (size - 1)
                rows.append(
                    (stage.dim, "ring", f"{tensors} {mib(tile)} a step, {times(steps, 'step')}")
                )
                rounds *= size
            case Gather():
                sent = mib(tile * (size - 1))
                often = f", {times(rounds, 'time')}" if rounds > 1 else ""
                rows.append((stage.dim, "all-gather", f"{tensors} {sent}{often}"))
                split.remove(stage.dim)
    return rows


# --- memory, order, shapes ------------------------------------------------------------------


def peak_bytes(plan: Plan) -> int:
    """Most bytes alive on any rank, the inputs included."""
    return max(trace(plan, rank).peak() for rank in range(plan.program.mesh.size))


def _memory(plan: Plan) -> str:
    inputs = sum(plan.held_bytes(tensor.name) for tensor in plan.program.inputs)
    multiple, split = global_multiple(plan), head_split(plan)
    needs = [f"the whole sequence a multiple of {multiple}"] if multiple > 1 else []
    needs += [f"K of {split}"] if split > 1 else []
    needs.append("H of K")
    text = (
        f"Memory at the peak: {mib(peak_bytes(plan))} a rank for this problem, of which the inputs "
        f"are {mib(inputs)}. Other sizes run too: {', '.join(needs)}."
    )
    return "\n".join(wrap(text, WIDTH))


def _order(plan: Plan) -> str:
    order, ranks = plan.program.order, plan.program.mesh.size
    if ranks == 1:
        return ""
    if order.kind == "contiguous":
        text = f"Contiguous: the sequence is cut into {ranks} chunks and rank r owns chunk r."
        if plan.program.mask == "causal" and plan.row_dims:
            text += " Under the causal mask the last ranks have the most to do."
        return "\n".join(wrap(text, WIDTH))
    if order.kind == "striped":
        text = f"Striped: rank r owns every {ranks}th token, from token r on."
        if plan.program.mask == "causal" and plan.row_dims:
            text += " Under the causal mask all ranks do the same work."
        return "\n".join(wrap(text, WIDTH))
    text = (
        "Zigzag over all ranks (as Megatron and torchtitan shard): the sequence is cut into "
        f"{2 * ranks} chunks and rank r owns chunks r and {2 * ranks - 1} - r."
    )
    if plan.program.mask == "causal" and plan.row_dims:
        text += (
            " What a rank works on then has an early and a late half, so that under the "
            "causal mask all do the same work."
        )
    return "\n".join(wrap(text, WIDTH))


def _shapes(plan: Plan) -> str:
    mesh, split = plan.program.mesh, head_split(plan)
    slice_ = "its slice of the sequence" if mesh.dims else "the sequence"
    text = (
        f"Shapes on one rank: B batch, S {slice_}, H heads, K key/value heads, "
        "D head size of q and k, E of v and out"
    )
    if split > 1:
        text += f"; after the all-to-all h = H / {split} and k = K / {split} heads"
        text += f" of s = {split} S tokens"
    elif plan.nest.stages:
        text += "; in the body s = S, h = H, k = K"
    return "\n".join(wrap(text + ".", WIDTH))
