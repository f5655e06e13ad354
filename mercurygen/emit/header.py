"""Emitted text of the module's docstring: schedule, traffic, memory, order, shapes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import prod
from textwrap import wrap

from mercurygen.emit import apart, border, evenness, held, kept, moves, outside, pins
from mercurygen.emit.checks import global_multiple, split_of
from mercurygen.emit.differentiable import Both
from mercurygen.emit.needed import cut_outside, need_form
from mercurygen.emit.words import arrangement, called, mib, times
from mercurygen.ir.caller import INSIDE, PACKED
from mercurygen.ir.kernel import TRITON
from mercurygen.ir.mesh import cover
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Batch
from mercurygen.lower.plan import Gather, Loop, Plan, Swap, Walk
from mercurygen.lower.trace import trace
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import body_lines, header_lines

WIDTH = 98
_BE = (("is", "it is"), ("are", "they are"))
WHY = "why: "  # a comment of a schedule that says why it was chosen


def docstring(schedule: Schedule, plan: Plan, both: Both | None = None) -> str:
    """The text between the module's triple quotes; both: of a differentiable module."""
    ranks = plan.program.mesh.size
    over = f"{ranks} GPUs: {arrangement(schedule.links)}" if ranks > 1 else "1 GPU"
    holds = _holds(plan) if ranks > 1 else "The one rank holds the whole sequence."
    sections = [
        f"{_title(schedule)} over {over}.",
        "\n".join(wrap(holds, WIDTH)),
        "Schedule\n" + "\n".join(f"    {line}" for line in schedule_lines(schedule)),
        why(schedule),
        _traffic(schedule, plan, "What moves, sent by each rank in a call", both),
        _traffic(schedule, both.backward, "What moves in its backward") if both else "",
        _memory(plan, both),
        _order(plan),
        "\n".join(wrap(apart.stands(plan), WIDTH)),
        _shapes(plan),
        _outside(schedule.problem.layout, plan, both),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _title(schedule: Schedule) -> str:
    problem = schedule.problem
    kind = "multi-head" if problem.heads == problem.kv_heads else "grouped-query"
    kind = "multi-query" if problem.kv_heads == 1 < problem.heads else kind
    packed = " of packed documents" if problem.documents else ""
    kind += " cross" if problem.seq_kv is not None else ""
    if problem.mask != "window":
        return f"{'Causal' if problem.mask == 'causal' else 'Full'} {kind} attention{packed}"
    ahead = f", {problem.ahead} after it" if problem.ahead else ""
    seen = f"a query sees itself, {problem.window - 1} keys before{ahead}"
    if problem.seq_kv is not None:
        seen = f"{problem.window - 1} keys before, {problem.ahead} after"
    return f"Windowed {kind} attention ({seen})"


def _holds(plan: Plan) -> str:
    """What the caller has on a rank."""
    if not held.sliced(plan.program):
        return pins.holds(plan)
    if plan.program.align is not None:
        return apart.holds(plan)
    names = held.all_whole(plan)
    inputs = tuple(name for name in ("q", "k", "v") if name in names)
    if not names:
        return (
            "Every rank holds a slice of the sequence with all heads, and gets back the same slice "
            "of the output."
        )
    cut = tuple(name for name in ("q", "k", "v") if name not in names)
    has = [f"all of {held.listed(inputs)}"] if inputs else []
    has += [f"a slice of the sequence of {held.listed(cut)} with all heads"] if cut else []
    back = "all of the output" if "out" in names else "the same slice of the output"
    return f"Every rank holds {' and '.join(has)}, and gets back {back}."


def schedule_lines(schedule: Schedule) -> list[str]:
    """The schedule's own lines, the keyword in a column of its own; long ones continue."""
    lines = []
    for line in (*header_lines(schedule), *body_lines(schedule)):
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


def _traffic(schedule: Schedule, plan: Plan, heading: str, both: Both | None = None) -> str:
    always = both is not None and both.save == "outer"  # lse is kept as the caller has it
    before = (swap for swap in plan.before if not swap.optional)
    after = (swap for swap in plan.after if always or not swap.optional)
    rows = [*_swap_rows(plan, before), *_stage_rows(plan), *_swap_rows(plan, after)]
    if not rows:
        return ""
    links = _link_names(schedule)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "    "
        + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=True)), links[row[0]]])
        for row in rows
    ]
    optional = _swap_rows(plan, (swap for swap in plan.after if swap.optional and not always))
    lines += [f"    return_lse adds {row[2]} over {row[0]}" for row in optional]
    return f"{heading}\n" + "\n".join(lines)


def _link_names(schedule: Schedule) -> dict[str, str]:
    links = schedule.links
    return {
        dim: " and ".join(links[i].name for i in levels)
        for dim, levels in cover(schedule.mesh, links).items()
    }


def _collective(step: border.Step) -> str:
    return "all-to-all" if isinstance(step, Swap) else "all-gather"


def _swap_rows(plan: Plan, steps: Iterable[border.Step]) -> list[tuple[str, str, str]]:
    """Reshards, three tensors a row; those over the same ranks side by side."""
    rows = []
    moving = [x for x in steps if isinstance(x, Swap) or x.gathers]  # not what is only cut
    for (dim, how), run in groupby(moving, lambda step: (step.dim, _collective(step))):
        moved, parts, size = [], 1, plan.program.mesh.extent(dim)
        for step, name in [(each, name) for each in run for name in each.tensors]:
            share, parts = _parts_of(plan, name)
            sent = border.nbytes(plan, step, name) * (size - 1)
            sent = sent / size if how == "all-to-all" else sent
            moved.append(f"{called(name)} {mib(sent * parts / share)}")
        often = f", in {parts} parts" if parts > 1 else ""
        for i in range(0, len(moved), 3):
            rows.append((dim, how, ", ".join(moved[i : i + 3]) + often))
    return rows


def _parts_of(plan: Plan, name: str) -> tuple[int, int]:
    """Parts that the tile loops cut a tensor into, and how often such a part is moved."""
    axes = [axis for loop in plan.tiles for axis in loop.axes]
    share = prod(plan.atoms.parts(a) for a in axes if plan.program.tensor(name).carries(a))
    return share, prod(plan.atoms.parts(axis) for axis in axes) if share > 1 else 1


def _stage_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """How the tiles come, stage by stage; inner stages run once for every tile of the outer."""
    rows = []
    nest = plan.nest
    rounds, gathered = 1, set()
    if plan.tiles and nest.stages:
        _, rounds = _parts_of(plan, nest.tensors[0])
    for loop in nest.loops:
        rounds = _loop_rows(plan, loop, rounds, gathered, rows)
        if loop.outputs:
            rows.append(moves.home_row(plan, loop))
    return rows + moves.reduce_rows(plan)


def _loop_rows(
    plan: Plan,
    loop: Loop,
    rounds: int,
    gathered: set[tuple[str, str]],
    rows: list[tuple[str, str, str]],
) -> int:
    """Add the rows of a loop that runs so many times; return how often its tiles come by."""
    mesh = plan.program.mesh
    tensors = " and ".join(map(called, loop.tensors))
    for stage in loop.stages:
        size = mesh.extent(stage.dim)
        tile = 0
        for name in loop.tensors:
            stored = [d for d in mesh.names if plan.program.stored(plan.program.tensor(name), d)]
            whole = plan.nbytes(name, tuple(d for d in stored if (name, d) not in gathered))
            tile += whole // _parts_of(plan, name)[0]
        match stage:
            case Walk():
                words = _walk_cells(plan, stage, f"{tensors} {mib(tile)}", rounds)
                rows += [(stage.dim, *words)] if loop.tensors else []
                rounds *= 1 + len(stage.coming(size))
            case Gather():
                sent = mib(tile * (size - 1))
                often = f", {times(rounds, 'time')}" if rounds > 1 else ""
                rows.append((stage.dim, "all-gather", f"{tensors} {sent}{often}"))
                gathered |= {(name, stage.dim) for name in loop.tensors}
    return rounds


def _walk_cells(plan: Plan, walk: Walk, tile: str, rounds: int) -> tuple[str, str]:
    """How the tiles of a walk come, and how much each rank sends for it."""
    size, word = plan.program.mesh.extent(walk.dim), "direct" if walk.direct else "ring"
    if walk.both and size > 2:
        steps = times(rounds * (size // 2), "step")
        return "ring both ways", f"{tile} a step and way, {steps}"
    steps = times(rounds * len(walk.coming(size)), "step")
    if not walk.direct and not cut_outside(plan, walk.dim) or need_form(plan) == "whole":
        return word, f"{tile} a step, {steps}"
    sent = _sent(plan, walk.dim)
    least, most = mib(min(sent)), mib(max(sent))
    amount = most if least == most else f"{least} to {most} by rank"
    return f"{word}, masked", f"{' and '.join(plan.nest.tensors)} {amount}, {steps}"


def _sent(plan: Plan, dim: str) -> list[int]:
    """Bytes that every rank sends in batches along a dimension."""
    found = []
    for rank in range(plan.program.mesh.size):
        played = trace(plan, rank)
        batches = [event for event in played.events if isinstance(event, Batch)]
        sends = [message for batch in batches if batch.dim == dim for message in batch.sends]
        sizes = (played.buffers[m.buffer].nbytes if m.nbytes is None else m.nbytes for m in sends)
        found.append(sum(sizes))
    return found


# --- memory, order, shapes ------------------------------------------------------------------


def peak_bytes(plan: Plan) -> int:
    """Most bytes alive on any rank, the inputs included."""
    return max(trace(plan, rank).peak() for rank in range(plan.program.mesh.size))


def _memory(plan: Plan, both: Both | None = None) -> str:
    inputs = sum(plan.held_bytes(tensor.name) for tensor in plan.program.inputs)
    multiple = global_multiple(plan)
    split, grouped, batch = (split_of(plan, axis, both) for axis in ("H", "G", "B"))
    long = "the whole sequence" if plan.program.align is None else "each sequence"
    needs = [f"{long} a multiple of {multiple}"] if multiple > 1 else []
    needs += [f"B of {batch}"] if batch > 1 else []
    needs += [f"K of {split}"] if split > 1 else []
    needs.append(f"H of {grouped} K" if grouped > 1 else "H of K")
    if both:
        most = kept.backward_peak_bytes(plan, both.backward)
        saved = kept.nbytes(plan, both.backward)
        where = "the body has them" if both.save == "inner" else "the caller has them"
        text = (
            f"Memory at the peak: {mib(kept.peak_bytes(plan, both.backward))} a rank for this "
            f"problem, of which the inputs are {mib(inputs)}; {mib(most)} in the backward, of "
            f"which {mib(saved)} were kept for it: q, k, v, out and lse, as {where}."
        )
    else:
        text = (
            f"Memory at the peak: {mib(peak_bytes(plan))} a rank for this problem, of which the "
            f"inputs are {mib(inputs)}."
        )
    return "\n".join(wrap(f"{text} Other sizes run too: {', '.join(needs)}.", WIDTH))


def _order(plan: Plan) -> str:
    order, ranks = plan.program.order, plan.program.mesh.size
    if ranks == 1:
        return ""
    if not held.sliced(plan.program):
        return "\n".join(wrap(pins.order(plan), WIDTH))
    if plan.program.align is not None:
        return "\n".join(wrap(apart.order(order, ranks), WIDTH))
    if order.kind == "contiguous":
        text = f"Contiguous: the sequence is cut into {ranks} chunks and rank r owns chunk r."
        if plan.program.documents:
            text += evenness.of_documents(plan)
        elif plan.program.mask == "causal" and plan.row_dims:
            text += " Under the causal mask the last ranks have the most to do."
        if plan.program.mask == "window" and plan.row_dims:
            text += " Under the window the first rank has the least to do, the others all the same."
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
    if plan.program.documents:
        text += evenness.of_documents(plan)
    elif plan.program.mask == "causal" and plan.row_dims:
        text += (
            " What a rank works on then has an early and a late half, so that under the "
            "causal mask all do the same work."
        )
    return "\n".join(wrap(text, WIDTH))


def _shapes(plan: Plan) -> str:
    mesh = plan.program.mesh
    if not held.sliced(plan.program):
        return "\n".join(wrap(pins.sizes(plan), WIDTH))
    slice_ = "S its slice of the sequence" if mesh.dims else "S the sequence"
    slice_ += ", N the whole sequence" if held.all_whole(plan) else ""
    slice_ = slice_ if plan.program.align is None else apart.slices(plan)
    text = (
        f"Shapes on one rank: B batch, {slice_}, H heads, K key/value heads, "
        "D head size of q and k, E of v and out"
    )
    split, grouped, batch = (split_of(plan, axis) for axis in ("H", "G", "B"))
    longer = prod(mesh.extent(swap.dim) for swap in plan.before if "q" in swap.tensors)
    if split == longer > 1 and grouped == batch == 1:
        text += f"; after the all-to-all h = H / {split} and k = K / {split} heads"
        text += f" of s = {split} S tokens{apart.tokens(plan, split)}"
    elif split * grouped * batch > 1:
        heads = [f"b = B / {batch}"] if batch > 1 else []
        heads += [f"h = H / {split * grouped}"] if split * grouped > 1 else ["h = H"]
        heads += [f"k = K / {split}"] if split > 1 else ["k = K"]
        text += f"; in the body {', '.join(heads)}, s = {f'{longer} S' if longer > 1 else 'S'}"
        text += apart.tokens(plan, longer)
    elif plan.nest.stages:
        text += f"; in the body s = S{apart.tokens(plan, 1)}, h = H, k = K"
    return "\n".join(wrap(text + ".", WIDTH))


def _outside(layout: str, plan: Plan, both: Both | None) -> str:
    """The caller's layout, if it is not the one inside, and what copies it makes necessary."""
    if layout == INSIDE:
        return ""
    if layout == PACKED:
        text = "q, k, v and out are [S, H, D] for the caller, [1, S, H, D] inside: B is 1."
        return "\n".join(wrap(text, WIDTH))
    sent = outside.sent(plan)
    made = [_copies("a call", plan, sent, layout)]
    if both:
        again = _sent_again(both)
        made.append(_copies("its backward", both.backward, again, layout))
        sent += again
    copied = "; ".join(filter(None, made))
    if copied:
        copied = f"What is sent as it is has to be dense: {copied}, which the peak does not count."
    elif sent:
        names = tuple(dict.fromkeys(called(tensor.name) for tensor in sent))
        one, (be, they) = "sequence" if layout == "sbhd" else "head", _BE[len(names) > 1]
        copied = f"With one {one} {held.listed(names)} {be} dense both ways; with more {they}"
        copied += " copied to be sent."
    else:
        copied = "Nothing is copied for it: what is sent is packed first anyway."
    given, inside = outside.shape(layout, *"BSHD"), outside.shape(INSIDE, *"BSHD")
    text = f"q, k, v and out are {given} for the caller, {inside} inside, which are views. {copied}"
    return "\n".join(wrap(text, WIDTH))


def _sent_again(both: Both) -> tuple[Tensor, ...]:
    """What the backward sends as the caller holds it, or held it in the forward."""
    packed = {name for swap in both.plan.before for name in swap.tensors if both.save == "inner"}
    given = {"do", "q", "k", "v"} - packed
    if _lies_as_q(both.plan):
        given.add("out")
    return tuple(tensor for tensor in outside.sent(both.backward) if tensor.name in given)


def _lies_as_q(plan: Plan) -> bool:
    """Whether out has the strides of the caller's q: torch's kernel leaves it so, unpadded."""
    program = plan.program
    unpadded = program.extent("D") == program.extent("D_v") and program.extent("D") % 8 == 0
    whole = plan.nest.begin in ("first", "only") and not plan.before and not plan.tiles
    return program.kernel != TRITON and unpadded and whole


def _copies(what: str, plan: Plan, sent: tuple[Tensor, ...], layout: str) -> str:
    """`a call copies k and v once, 32 MiB a rank`; nothing if all of that is dense."""
    copied = [tensor for tensor in sent if not outside.stays_dense(plan, tensor, layout)]
    if not copied:
        return ""
    names = held.listed(tuple(called(tensor.name) for tensor in copied))
    nbytes = sum(plan.held_bytes(tensor.name) for tensor in copied)
    return f"{what} copies {names} once, {mib(nbytes)} a rank"
