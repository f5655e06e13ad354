"""Emitted text of the self-check: the module on its ranks against one device."""

from __future__ import annotations

from math import lcm

from mercurygen.emit import checks, held, kernels, outside, packed
from mercurygen.emit.differentiable import Both
from mercurygen.emit.templates import render
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Plan


def section(plan: Plan, both: Both | None, layout: str, placed: bool) -> tuple[str, list[str]]:
    """What its heading says, and its texts."""
    mesh, causal = plan.program.mesh, plan.program.mask == "causal"
    window = plan.program.mask == "window"
    multiple = checks.global_multiple(plan)
    split, grouped, batch = (checks.split_of(plan, axis, both) for axis in ("H", "G", "B"))
    reference_text = "reference_gradients" if both else "reference"
    seq, heads = lcm(2 * multiple, 8), split * lcm(2, grouped)
    values = {"seq": seq, "heads": heads, "kv_heads": split, "batch": batch, "causal": causal}
    keys = seq if plan.program.align is None else 2 * seq  # no query is without any
    offset = keys - seq if plan.program.align == "bottom-right" else 0
    values |= {"window": window, "tried": _tried_window(plan, seq), "before": ""}
    if offset:  # keys before the one that the first query stands at
        values["before"] = f" - {offset}" if window else f" + {offset}"
    values |= {"keys": keys if plan.program.align else None, "banded": plan.program.banded}
    values["given"] = ", window=_TRIED" if window else ""
    tried = [render("tried", **values)] if plan.program.banded else []
    rows = batch if batch > 1 else 2
    values["mask"] = kernels.whole_mask(plan, offset)
    values["wide"] = plan.program.kernel == TRITON
    values["alone"] = kernels.alone(plan, offset)
    if not mesh.dims:
        values |= outside.reference(layout, rows, seq, heads, split, values["keys"])
        reference = render(
            reference_text,
            mesh_type="None",
            device='"cuda" if torch.cuda.is_available() else "cpu"',
            **values,
        )
        check = render("self_check_single", **values)
        return "self-check: python NAME.py", [*tried, reference, check]
    where = {"mesh_type": "DeviceMesh", "device": "mesh.device_type"}
    heading = f"self-check: torchrun on {mesh.size} ranks, with GPUs or without"
    if plan.program.documents:
        texts = packed.self_check(plan, seq, heads, split, train=both is not None)
        return heading, [*texts, render("self_check", blinds=True, placed=placed)]
    values |= outside.reference(layout, rows, seq, heads, split, values["keys"])
    reference = render(reference_text, **where, **values)
    blind = _blind(plan, layout, values)
    check = render("self_check", blinds=bool(blind), placed=placed)
    return heading, [*tried, reference, *blind, check]


def _blind(plan: Plan, layout: str, values: dict[str, object]) -> list[str]:
    """`_blind`, where a rank has keys of its own; values: of the self-check."""
    program, seq, batch = plan.program, values["seq"], values["batch"]
    if held.whole(program, "k"):
        return []
    sliced = held.sliced(program)
    parts = program.mesh.size if sliced else 1
    lengths = ("q", seq), ("k", values["keys"] or seq)
    local = {name: n if held.whole(program, name) else n // parts for name, n in lengths}
    kv_size = outside.sizes(layout, batch, local["k"], values["kv_heads"], 16)
    sizes = {"local": local["k"], "kv_size": kv_size}
    sizes["queries_size"] = outside.sizes(layout, batch, local["q"], values["heads"], 16)
    causal, told = values["causal"], program.banded
    sizes["sees"] = _sees(seq, told) if causal or told else ""
    sizes["all_seen"] = causal and not told and local["q"] > local["k"]
    return [render("blind" if sliced else "blind_pinned", **values, **sizes)]


def _sees(seq: int, told: bool) -> str:
    """Whether a rank sees any of another's tokens, of as many ranks as there are owners."""
    first = "(owner == other).nonzero()"
    if told:
        return f"bool(_sees(positions({seq}, mesh), {first}[:, 0]).any())"
    return f"bool(positions({seq}, mesh).max() >= {first}[0])"


def _tried_window(plan: Plan, seq: int) -> str:
    """A window that is short of a few tokens: it ends inside another rank's tile."""
    local, width = seq // plan.program.mesh.size, plan.program.window or 1
    before = min(seq - 2, local + local // 2) if width > 1 else 0
    return f"({before}, {min(plan.program.ahead, 1)})"
