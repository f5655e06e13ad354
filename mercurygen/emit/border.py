"""Emitted text of the border: all-to-alls between split sequence and split heads."""

from __future__ import annotations

from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.ir.layout import Interleaving
from mercurygen.lower.plan import Gather, Plan


def joins(plan: Plan) -> tuple[Interleaving, ...]:
    """Every interleaving of the sequence that the plan uses, in order of use."""
    swaps = [*(swap.join for swap in plan.before), *(swap.deal for swap in plan.after)]
    return (*swaps, *(s.join for s in plan.nest.stages if isinstance(s, Gather)))


def is_striped(plan: Plan) -> bool:
    """Whether tokens are dealt one by one."""
    return plan.program.order.kind == "striped"


def runs(plan: Plan, join: Interleaving) -> int:
    """Runs of a slice, or, where tokens are dealt one by one, how many of them stay together."""
    return join.inner if is_striped(plan) else join.outer


def needs_runs(plan: Plan) -> bool:
    """Whether tokens of other dimensions are held already when some join."""
    return any(runs(plan, join) > 1 for join in joins(plan))


def runs_name(plan: Plan) -> str:
    """What the module's functions call that number."""
    return "inner" if is_striped(plan) else "outer"


def runs_argument(plan: Plan, join: Interleaving) -> str:
    """`, 2` where the module's functions take that number, else nothing."""
    return f", {runs(plan, join)}" if needs_runs(plan) else ""


def before(plan: Plan) -> list[str]:
    """Lines of the public function before the body."""
    lines = []
    for swap in plan.before:
        group = f"{variable(swap.dim)}{runs_argument(plan, swap.join)}"
        if len(swap.tensors) == 1:
            name = swap.tensors[0]
            lines.append(f"{name} = _sequence_to_heads({name}, {group})")
            continue
        names = ", ".join(swap.tensors)
        lines.append(f"{names} = (_sequence_to_heads(x, {group}) for x in ({names}))")
    return lines


def after(plan: Plan) -> list[str]:
    """Lines of the public function after the body, up to its return."""
    lines, lse = [], []
    for swap in plan.after:
        group = f"{variable(swap.dim)}{runs_argument(plan, swap.deal)}"
        if not swap.optional:
            lines.append(f"out = _heads_to_sequence(out, {group})")
        else:
            lse.append(f"lse = _heads_to_sequence(lse, {group})")
    if not lse:
        return [*lines, "return (out, lse) if return_lse else out"]
    first, *more = lse
    first = first.replace("(lse, ", "(lse.transpose(1, 2).unsqueeze(3), ") + "  # [B, S, H, 1]"
    lines += ["if return_lse:", f"    {first}", *(f"    {line}" for line in more)]
    return [*lines, "    return out, lse.squeeze(3).transpose(1, 2)", "return out"]


def _variant(plan: Plan) -> str:
    """Which of the fixed texts fits the order and what joins."""
    order = plan.program.order.kind
    return f"{order}_runs" if needs_runs(plan) else order


def join_function(plan: Plan) -> str:
    """`_join`: slices from the ranks of a group into global order."""
    return render(f"join_{_variant(plan)}")


def swap_functions(plan: Plan) -> list[str]:
    """`_sequence_to_heads`, its reverse, and what they call."""
    variant, name, takes = _variant(plan), runs_name(plan), needs_runs(plan)
    values = {"parameter": f", {name}: int", "argument": f", {name}"}
    values = values if takes else dict.fromkeys(values, "")
    dealt = {"contiguous": "chunks", "striped": "tokens", "striped_runs": "tokens"}
    kind = dealt.get(variant, "runs")
    split = [render(f"split_{variant}")] if kind != "chunks" else []
    return [render("swap", dealt=kind, **values), *split, render("all_to_all")]
