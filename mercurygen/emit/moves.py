"""How partial results move, in rows of the module's docstring."""

from __future__ import annotations

from mercurygen.emit.words import mib, times
from mercurygen.lower.events import Batch
from mercurygen.lower.plan import Loop, Plan, Reduce
from mercurygen.lower.trace import trace

Row = tuple[str, str, str]  # mesh dimension, how, what


def home_row(plan: Plan, loop: Loop) -> Row:
    """Of results that go to the owners of a loop's tiles, on the rank that sends most."""
    dim = loop.walks[-1].dim
    totals, steps = [], 0
    for rank in range(plan.program.mesh.size):
        played = trace(plan, rank)
        sent = [
            message.nbytes or played.buffers[message.buffer].nbytes
            for event in played.events
            if isinstance(event, Batch) and event.dim == dim
            for message in event.sends
            if played.buffers[message.buffer].label.split()[0] in loop.outputs
        ]
        totals.append(sum(sent))
        steps = max(steps, len(sent) // len(loop.outputs))
    most = "" if len(set(totals)) == 1 else "up to "
    how = "to owners" if loop.home == "direct" else "ring"
    named = " and ".join(loop.outputs)
    return dim, how, f"{named} {most}{mib(max(totals))} in {times(steps, 'step')}"


def reduce_rows(plan: Plan) -> list[Row]:
    """Of all reductions; sums over the same ranks in one row."""
    rows: list[Row] = []
    for reduce in plan.nest.reduces:
        row = reduce_row(plan, reduce)
        if rows and rows[-1][:2] == row[:2] and reduce.kind == "sum":
            row = (*row[:2], f"{rows.pop()[2]}, {row[2]}")
        rows.append(row)
    return rows


def reduce_row(plan: Plan, reduce: Reduce) -> Row:
    """Of a reduction, counted as rings."""
    program, size = plan.program, plan.program.mesh.extent(reduce.dim)
    later = plan.nest.reduces[plan.nest.reduces.index(reduce) :]
    whole = {each.dim for each in later}
    sizes = {}
    for name in reduce.tensors:
        tensor = program.tensor(name)
        split = [d for d in program.mesh.names if program.stored(tensor, d) and d not in whole]
        elements = plan.nbytes(name, tuple(split)) // plan.itemsize(tensor.dtype)
        sizes[name] = elements * plan.itemsize(plan.partial(tensor)) * (size - 1) / size
    if reduce.kind == "sum":
        ways, how = (1, "reduce-scatter") if reduce.axis else (2, "all-reduce")
        return reduce.dim, how, ", ".join(f"{x} {mib(ways * n)}" for x, n in sizes.items())
    if reduce.axis is not None:
        return reduce.dim, "all-to-all", ", ".join(f"{x} {mib(n)}" for x, n in sizes.items())
    out, lse = reduce.tensors
    both = f"{lse} {mib(2 * sizes[lse])}, {out} and weights {mib(2 * sum(sizes.values()))}"
    return reduce.dim, "all-reduce", both
