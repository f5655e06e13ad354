"""Emitted text of the border: all-to-alls between split sequence and split heads."""

from __future__ import annotations

from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.ir.layout import Interleaving
from mercurygen.lower.plan import Gather, Plan


def joins(plan: Plan) -> tuple[Interleaving, ...]:
    """Every interleaving that the plan uses, in order of use."""
    swaps = [swap.join for swap in (*plan.before, *plan.after)]
    return (*swaps, *(s.join for s in plan.nest.stages if isinstance(s, Gather)))


def needs_outer(plan: Plan) -> bool:
    """Whether tokens of slower dimensions are held already when others join."""
    return any(join.outer > 1 for join in joins(plan))


def outer_argument(plan: Plan, join: Interleaving) -> str:
    """`, 2` where the module's functions take the number of runs, else nothing."""
    return f", {join.outer}" if needs_outer(plan) else ""


def before(plan: Plan) -> list[str]:
    """Lines of the public function before the body."""
    lines = []
    for swap in plan.before:
        group = f"{variable(swap.dim)}{outer_argument(plan, swap.join)}"
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
        group = f"{variable(swap.dim)}{outer_argument(plan, swap.join)}"
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
    order = "zigzag" if plan.program.order.halves == 2 else "contiguous"
    return f"{order}_runs" if needs_outer(plan) else order


def join_function(plan: Plan) -> str:
    """`_join`: slices from the ranks of a group into global order."""
    return render(f"join_{_variant(plan)}")


def swap_functions(plan: Plan) -> list[str]:
    """`_sequence_to_heads`, its reverse, and what they call."""
    variant, outer = _variant(plan), needs_outer(plan)
    runs = variant != "contiguous"
    values = {"parameter": ", outer: int" if outer else "", "argument": ", outer" if outer else ""}
    split = [render(f"split_{variant}")] if runs else []
    return [render("swap", runs=runs, **values), *split, render("all_to_all")]
