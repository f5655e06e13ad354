"""Modules whose backward was changed: the text checker must see each of these."""

from __future__ import annotations

import pytest
from differentiable import SAVE, Trained
from numeric_cases import Problem

from mercurygen.emit.callsites import check_text
from mercurygen.emit.python_subset import TextMismatch

SMALL = Problem(seq=48, heads=12, kv_heads=4, head_dim=10, value_dim=6)
ROWS, HEADS = "parallelize S_q over", "parallelize H over"
MADE = {
    "ring": Trained(
        "m=4",
        f"{ROWS} m;shift k, v: S_kv along m",
        "shift k, v, dk, dv: S_kv along m",
        SMALL,
    ),
    "unified": Trained(
        "n=2 m=2",
        f"{ROWS} n;{HEADS} m;shift k, v: S_kv along n",
        "shift k, v, dk, dv: S_kv along n",
        SMALL,
    ),
    "outer": Trained("m=4", f"{HEADS} m", f"{SAVE} outer", SMALL),
    "gather": Trained(
        "m=4", f"{ROWS} m;shard k, v: S_kv over m", "shard k, v, dk, dv: S_kv over m", SMALL
    ),
    "rings": Trained(
        "n=2 m=2",
        f"{ROWS} n, m;shift k, v: S_kv along n, m",
        "shift k, v, dk, dv: S_kv along n, m",
        SMALL,
    ),
}
KEEP = "ctx.save_for_backward(q, k, v, out, lse)"
HOME = "out = _heads_to_sequence(out, m_group)"
CARRY = "            _wait(works)\n            _add(share, arriving)\n"
CHANGES = {  # of which module, what, into what
    "nothing saved": ("ring", f"        {KEEP}\n", ""),
    "saved in another order": (
        "ring",
        "backward(q, k, v, out, lse)",
        "backward(q, v, k, out, lse)",
    ),
    "found in another order": (
        "unified",
        "q, k, v, out, lse = ctx.saved",
        "q, v, k, out, lse = ctx.saved",
    ),
    "saved after the border": ("unified", f"{KEEP}\n        {HOME}", f"{HOME}\n        {KEEP}"),
    "saved before the border": ("outer", "(*given, out, lse)", "(q, k, v, out, lse)"),
    "kept otherwise": ("ring", "ctx.group, ctx.scale =", "ctx.q, ctx.group, ctx.scale = q,"),
    "lse with a gradient": ("ring", "        ctx.mark_non_differentiable(lse)\n", ""),
    "out without a gradient": ("ring", "non_differentiable(lse)", "non_differentiable(out)"),
    "twice differentiable": ("ring", "    @once_differentiable\n", ""),
    "other groups": (
        "unified",
        "(n_group, m_group), scale = ctx",
        "(m_group, n_group), scale = ctx",
    ),
    "another scale": (
        "ring",
        "m_group, scale = ctx.group, ctx.scale",
        "m_group, scale = ctx.group, 1.0",
    ),
    "gradients exchanged": ("ring", "return dq, dk, dv, None", "return dq, dv, dk, None"),
    "gradient of a group": ("ring", "return dq, dk, dv, None, None", "return dq, dk, dv, dq, None"),
    "one gradient too few": ("ring", "return dq, dk, dv, None, None", "return dq, dk, dv, None"),
    "grad_out not resharded": (
        "unified",
        "        grad_out = _sequence_to_heads(grad_out, m_group)\n",
        "",
    ),
    "dk not sent home": ("unified", "        dk = _heads_to_sequence(dk, m_group)\n", ""),
    "sent home in another order": (
        "unified",
        "dq = _heads_to_sequence(dq, m_group)\n        dk = _heads_to_sequence(dk, m_group)",
        "dk = _heads_to_sequence(dk, m_group)\n        dq = _heads_to_sequence(dq, m_group)",
    ),
    "not waited for": ("ring", CARRY, CARRY.partition("\n")[2]),
    "not added": ("ring", CARRY, CARRY.partition("\n")[0] + "\n"),
    "added to what arrives": ("ring", "_add(share, arriving)", "_add(arriving, share)"),
    "own sum kept": ("ring", "    return arriving\n", "    return share\n"),
    "all rows": ("ring", "_add((dq[:, rows],", "_add((dq,"),
    "other columns": ("ring", "v[:, cols],\n", "v[:, rows],\n"),
    "rows of lse": ("ring", "lse[:, :, rows],\n        scale", "lse,\n        scale"),
    "rows of out": ("ring", "out[:, rows],\n        lse", "out,\n        lse"),
    "mask of the forward": ("ring", "_visible_backward(m_group", "_visible(m_group"),
    "always causal": (
        "ring",
        "        scale,\n        causal,\n",
        "        scale,\n        True,\n",
    ),
    "halves exchanged": (
        "ring",
        "slice(None), slice(0, tokens // 2), False",
        "slice(tokens // 2, None), slice(None), False",
    ),
    "gradient of another tile": ("rings", "keys, values, out, lse, n, ", "k, v, out, lse, n, "),
    "another owner": ("rings", "n * m_group.size() + m\n", "m * m_group.size() + n\n"),
    "not summed": ("gather", "    dk = _sum_of_part(dk, m_group)\n", ""),
    "summed twice": (
        "gather",
        "dk = _sum_of_part(dk, m_group)",
        "dk = _sum_of_part(_sum_of_part(dk, m_group), m_group)",
    ),
    "dealt otherwise": ("gather", "_deal(x, 1, group.size())", "_deal(x, 2, group.size())"),
    "in the inputs' dtype": (
        "ring",
        "q.new_zeros(q.shape, dtype=lse.dtype)",
        "q.new_zeros(q.shape)",
    ),
    "communicates beside": (
        "ring",
        "    for total, share in zip(totals, shares, strict=True):\n        total.add_(share)",
        "    dist.barrier()\n    for total, share in zip(totals, shares, strict=True):\n"
        "        total.add_(share)",
    ),
    "communicates in apply": (
        "ring",
        "        q, k, v, out, lse = ctx",
        "        dist.barrier()\n        q, k, v, out, lse = ctx",
    ),
    "a method more": (
        "ring",
        "    @staticmethod\n    @once",
        "    @staticmethod\n    def setup_context(ctx, inputs, output):\n        pass\n\n"
        "    @staticmethod\n    @once",
    ),
    "a base more": ("ring", "(torch.autograd.Function):", "(torch.autograd.Function, dict):"),
    "no call": ("ring", "_Attention.apply(q, k, v,", "_Attention.forward(None, q, k, v,"),
}


@pytest.mark.parametrize("name", MADE)
def test_unchanged(name: str) -> None:
    """As emitted."""
    forward, backward = MADE[name].plans
    check_text(MADE[name].text, forward.plan, backward=backward.plan)


@pytest.mark.parametrize("name", CHANGES)
def test_changed(name: str) -> None:
    """Seen, with a line."""
    of, old, new = CHANGES[name]
    forward, backward = MADE[of].plans
    text = MADE[of].text
    assert old in text, old
    with pytest.raises(TextMismatch):
        check_text(text.replace(old, new, 1), forward.plan, backward=backward.plan)


def test_one_plan_too_few() -> None:
    """A differentiable module is not checked by its forward's plan alone."""
    made = MADE["ring"]
    with pytest.raises(TextMismatch, match="no section backward"):
        check_text(made.text, made.plans[0].plan)
