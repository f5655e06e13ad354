"""Emitted text of the border: all-to-alls between split sequence and split heads, or batch."""

from __future__ import annotations

from math import prod

from mercurygen.emit import outside
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.ir.layout import Interleaving
from mercurygen.lower.plan import Gather, Plan, Swap

NAMES = {"H": "heads", "G": "query_heads", "B": "batch"}  # what is split, as functions are named


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


def dealt_axis(swap: Swap) -> str:
    """What a swap exchanges with the sequence: H, G or B."""
    return swap.split if swap.split in NAMES else swap.gathered


def heads_before(plan: Plan, dim: str) -> int:
    """Ways in which key/value heads are split already where a dimension is dealt."""
    mesh = plan.program.mesh
    outer = mesh.names[: mesh.names.index(dim)]
    return prod(mesh.extent(d) for d in outer if plan.program.parallel_axis(d) == "H")


def heads_after(plan: Plan, dim: str) -> int:
    """Ways in which they are split beyond that."""
    mesh = plan.program.mesh
    split = prod(mesh.extent(d) for d in plan.program.parallel_dims("H"))
    return split // heads_before(plan, dim)


def kv_heads_argument(plan: Plan, swap: Swap, after: bool) -> str:
    """`, k.shape[2]` where query heads are dealt: key/value heads that x is of, else nothing."""
    if dealt_axis(swap) != "G":
        return ""
    more = heads_after(plan, swap.dim) if after else 1
    return f", k.shape[2] * {more}" if more > 1 else ", k.shape[2]"


def before(plan: Plan) -> list[str]:
    """Lines of the public function before the body."""
    lines = []
    for swap in plan.before:
        lines += into_part(plan, swap, swap.tensors)
    return lines


def into_part(plan: Plan, swap: Swap, tensors: tuple[str, ...]) -> list[str]:
    """The line that takes some tensors from slices of the sequence to what a swap deals."""
    if not tensors:
        return []
    group = f"{variable(swap.dim)}{runs_argument(plan, swap.join)}"
    group += kv_heads_argument(plan, swap, after=False)
    call = f"_sequence_to_{NAMES[swap.split]}"
    if len(tensors) == 1:
        return [f"{tensors[0]} = {call}({tensors[0]}, {group})"]
    names = ", ".join(tensors)
    return [f"{names} = ({call}(x, {group}) for x in ({names}))"]


def after(plan: Plan, layout: str) -> list[str]:
    """Lines of the public function after the body; layout: of the caller's tensors."""
    lines, lse = home(plan)
    lines += outside.back(layout)
    if not lse:
        return [*lines, f"return (out, {outside.lse(layout)}) if return_lse else out"]
    lines += ["if return_lse:", *(f"    {line}" for line in lse)]
    turned = outside.lse(layout).replace("lse", "lse.squeeze(3).transpose(1, 2)")
    return [*lines, f"    return out, {turned}", "return out"]


def home(plan: Plan) -> tuple[list[str], list[str]]:
    """Lines that take out to the caller's layout; and those for lse, which they leave 4-dim."""
    lines, lse = [], []
    for swap in plan.after:
        call, group = from_part(plan, swap)
        if not swap.optional:
            lines.append(f"out = {call}(out, {group})")
        else:
            lse.append(f"lse = {call}(lse, {group})")
    if lse:
        first = lse[0].replace("(lse, ", "(lse.transpose(1, 2).unsqueeze(3), ")
        lse[0] = f"{first}  # [B, S, H, 1]"
    return lines, lse


def from_part(plan: Plan, swap: Swap) -> tuple[str, str]:
    """The function that takes what a swap gathers to slices of the sequence; and its arguments."""
    group = f"{variable(swap.dim)}{runs_argument(plan, swap.deal)}"
    group += kv_heads_argument(plan, swap, after=True)
    return f"_{NAMES[swap.gathered]}_to_sequence", group


def variant(plan: Plan) -> str:
    """Which of the fixed texts fits the order and what joins."""
    order = plan.program.order.kind
    return f"{order}_runs" if needs_runs(plan) else order


def join_function(plan: Plan) -> str:
    """`_join`: slices from the ranks of a group into global order."""
    return render(f"join_{variant(plan)}")


def parameters(plan: Plan) -> dict[str, object]:
    """What the fixed texts of swaps need to know."""
    name, takes = runs_name(plan), needs_runs(plan)
    return {
        "runs": in_runs(plan),
        "split": variant(plan) != "contiguous",
        "parameter": f", {name}: int" if takes else "",
        "argument": f", {name}" if takes else "",
    }


def in_runs(plan: Plan) -> bool:
    """Whether `_split` gives runs of tokens, as [n, runs, ...], not slices, as [n, ...]."""
    return variant(plan) != "contiguous" and not is_striped(plan)


def split_function(plan: Plan) -> list[str]:
    """`_split`, where what a rank owns is no one run of tokens."""
    texts = variant(plan) != "contiguous"
    return [render(f"split_{variant(plan)}")] if texts else []


def swap_functions(plan: Plan) -> list[str]:
    """`_sequence_to_heads`, its reverse, and what they call; for all that is dealt."""
    dealt = dict.fromkeys(map(dealt_axis, plan.before))
    texts = [render(f"swap_{NAMES[axis]}", **parameters(plan)) for axis in dealt]
    return [*texts, *split_function(plan), render("all_to_all")]


def dealt_words(plan: Plan) -> list[str]:
    """What is exchanged with the sequence, in words."""
    return [NAMES[axis].replace("_", " ") for axis in dict.fromkeys(map(dealt_axis, plan.before))]
