"""Emitted text of a differentiable module: one autograd function around forward and backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mercurygen.emit import border, gradients, held, kernels, nest, outside, tiles, windows
from mercurygen.emit.loops import part_counts
from mercurygen.emit.templates import render
from mercurygen.emit.words import called, variable
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.kept import SAVED, is_outer, outer
from mercurygen.lower.plan import Plan, Swap

NAME = "_Attention"
KEPT = ", ".join(SAVED)
BY_ROW = ("lse", "delta")  # [B, H, S]


@dataclass(frozen=True)
class Both:
    """A differentiable module's plans.

    Attributes:
        plan: of the forward.
        backward: of the gradients.
    """

    plan: Plan
    backward: Plan

    @property
    def save(self) -> Literal["inner", "outer"]:
        """What is kept for the backward: as the body has it, or as the caller does."""
        return "outer" if is_outer(self.plan, self.backward) else "inner"

    @property
    def asks(self) -> bool:
        """Whether the forward does more if lse is wanted."""
        return self.save == "inner" and any(swap.optional for swap in self.plan.after)

    @property
    def borders(self) -> list[str]:
        """What the function is given of packed documents."""
        return ["borders"] if self.plan.program.documents else []

    @property
    def groups(self) -> list[str]:
        """Variables of the groups that the function is given."""
        return [variable(name) for name in self.plan.program.mesh.names]


def apply(both: Both, layout: str) -> list[str]:
    """Lines of the public function that call it; layout: of the caller's tensors."""
    more = ["return_lse"] if both.asks else []
    window = ["window"] if both.plan.program.banded else []
    given = ", ".join(["q, k, v", *both.borders, *both.groups, "scale", *window, *more])
    return [
        f"out, lse = {NAME}.apply({given})",
        *outside.back(layout),
        f"return (out, {outside.lse(layout)}) if return_lse else out",
    ]


def function(both: Both, backward: list[str]) -> str:
    """The class, with the lines of its backward."""
    groups = [f"{name}: list[int]" for name in both.borders]
    groups += [f"{name}: dist.ProcessGroup" for name in both.groups]
    more = ["return_lse: bool"] if both.asks else []
    window = windows.parameter(both.plan).removeprefix(", ")
    scale = ["scale: float", *([window] if window else [])]
    given = ", ".join(["ctx: Any", "q: Tensor", "k: Tensor", "v: Tensor", *groups, *scale, *more])
    q, out, lse = (held.length(both.plan, name) for name in ("q", "out", "lse"))
    k = held.length(both.plan, "k")
    inputs = f"q [B, {q}, H, D], k [B, {k}, K, D], v [B, {k}, K, E]"
    result = "tuple[Tensor | None, ...]"
    lines = [
        "@staticmethod",
        f"def forward({given}) -> tuple[Tensor, Tensor]:",
        f'    """{inputs} -> out [B, {out}, H, E], lse [B, H, {lse}]"""',
        *(f"    {line}" if line else "" for line in _forward(both)),
        "",
        "@staticmethod",
        "@once_differentiable",
        f"def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> {result}:",
        f'    """grad_out [B, {out}, H, E] -> gradients of q, k and v, in their shapes."""',
        *(f"    {line}" for line in backward),
    ]
    return "\n".join(
        [
            f"class {NAME}(torch.autograd.Function):",
            '    """Attention and its gradients; lse has none."""',
            "",
            *(f"    {line}" if line else "" for line in lines),
        ]
    )


def _forward(both: Both) -> list[str]:
    """The forward's lines, and what is kept."""
    plan, inner = both.plan, both.save == "inner"
    if part_counts(plan):
        lines, lse = tiles.body(plan, both=True), []
    else:
        lines = [*border.before(plan), f"out, lse = {nest.attend_call(plan, 'q, k, v')}"]
        out, lse = border.home(plan)
        if lse:
            lse.append("lse = lse.squeeze(3).transpose(1, 2)")
    save = f"ctx.save_for_backward({KEPT})"
    if inner:
        lines += [*out, save] if "out" in outer(plan, both.backward) else [save, *out]
        lines += ["if return_lse:", *(f"    {line}" for line in lse)] if lse else []
    else:
        if any(re.match(r"[qkv](, [qkv])* = ", line) for line in lines):
            lines = ["given = q, k, v", *lines]
            save = "ctx.save_for_backward(*given, out, lse)"
        lines += [*([] if part_counts(plan) else out), *lse, save]
    window = windows.argument(both.plan)
    attributes, names = "ctx.scale" + (", ctx.window" * bool(window)), f"scale{window}"
    if groups := _used(both):
        grouped = f"({', '.join(groups)})" if len(groups) > 1 else groups[0]
        attributes, names = (
            f"ctx.group{'s' if len(groups) > 1 else ''}, {attributes}",
            f"{grouped}, scale{window}",
        )
    if both.borders:
        attributes, names = f"ctx.borders, {attributes}", f"borders, {names}"
    lines += [f"{attributes} = {names}", "ctx.mark_non_differentiable(lse)", "return out, lse"]
    return lines


def _used(both: Both) -> list[str]:
    """Variables of the groups that the backward uses."""
    code = "\n".join(_work(both))
    return [name for name in both.groups if re.search(rf"\b{name}\b", code)]


def _backward(both: Both) -> list[str]:
    """The backward's lines."""
    groups = _used(both)
    window = both.plan.program.banded
    given = ["ctx.scale", *(["ctx.window"] * window)]
    names = ["scale", *(["window"] * window)]
    if groups:
        given = ["ctx.groups" if len(groups) > 1 else "ctx.group", *given]
        names = [f"({', '.join(groups)})" if len(groups) > 1 else groups[0], *names]
    if both.borders:
        given, names = ["ctx.borders", *given], ["borders", *names]
    others = len(both.groups) + len(both.borders) + 1 + window + both.asks
    return [
        f"{KEPT} = ctx.saved_tensors",
        f"{', '.join(names)} = {', '.join(given)}",
        *_work(both),
        f"return dq, dk, dv, {', '.join(['None'] * others)}",
    ]


def _work(both: Both) -> list[str]:
    """From what is kept, and the gradient of out, to the gradients."""
    plan = both.backward
    lines = ["delta = _delta(grad_out, out)"] if plan.program.derived else []
    lines += [line for step in plan.before for line in _into_part(both, step)]
    lines += [f"{x} = {x}.contiguous()  # in rows again" for x in _turned(plan)]
    return [*lines, f"dq, dk, dv = {gradients.call(plan)}", *_home(plan)]


def _into_part(both: Both, swap: Swap) -> list[str]:
    """Tensors in the plan's order; those of a number a row have no dimension for components."""
    call, group = border.from_part(both.backward, swap)
    lines: list[str] = []
    run: list[str] = []
    for name in (*swap.tensors, None):
        if name is not None and name not in BY_ROW:
            run.append(called(name))
            continue
        if len(run) > 1:
            names = ", ".join(run)
            lines.append(f"{names} = ({call}(x, {group}) for x in ({names}))")
        elif run:
            lines.append(f"{run[0]} = {call}({run[0]}, {group})")
        run = []
        if name:
            lines += [
                f"{name} = {call}({name}.transpose(1, 2).unsqueeze(3), {group})",
                f"{name} = {name}.squeeze(3).transpose(1, 2)",
            ]
    return lines


def _turned(plan: Plan) -> list[str]:
    """What a border leaves in columns and the Triton kernel reads in rows."""
    if plan.program.kernel != TRITON:
        return []
    return [x for x in BY_ROW if any(x in swap.tensors for swap in plan.before)]


def _home(plan: Plan) -> list[str]:
    """Gradients to the caller's layout, one after the other."""
    lines = []
    for tensor in plan.program.outputs:
        for swap in plan.after:
            if tensor.name in swap.tensors:
                call, group = border.from_part(plan, swap)
                lines.append(f"{tensor.name} = {call}({tensor.name}, {group})")
    return lines


# --- the functions that both need ---------------------------------------------------------------


def functions(both: Both, forward: list[str]) -> tuple[str, list[str]]:
    """The class, and what its backward comes to beside some functions of the forward.

    The kernel and `_add` apart; callers first.
    """
    plan = both.backward
    texts = gradients.functions(plan)
    if plan.before or plan.after:
        texts += border.swap_functions(plan)
    if border.joins(plan):
        texts.append(border.join_function(plan))
    code, found = beside("\n".join(_backward(both)), forward, list(dict.fromkeys(texts)))
    return function(both, code.split("\n")), found


def kernel(plan: Plan) -> list[str]:
    """The kernel's one place, and what adds up results."""
    add = [render("add")]
    if plan.program.kernel == TRITON:
        moving = any(loop.outputs for loop in plan.nest.loops)
        return [kernels.backward(plan.program.kernel_options), *(add if moving else [])]
    block = "window_block_backward" if plan.program.banded else "block_backward"
    block = render("packed_block_backward" if plan.program.documents else block)
    return [block, *(add if plan.nest.begin != "only" else [])]


def beside(code: str, forward: list[str], backward: list[str]) -> tuple[str, list[str]]:
    """The backward's functions that the forward lacks, under names of their own.

    Where both have a function of one name and text it stands once. Where the texts differ, or
    what they call does, the backward's is called `..._backward`.

    Args:
        code: that calls the backward's functions.
        forward: texts of the module's functions.
        backward: texts of the backward's functions, callers first.

    Returns:
        The code with the new names, and the texts that are to be added.
    """
    known = {name: text for part in forward for name, text in _defined(part)}
    ours = [pair for part in backward for pair in _defined(part)]
    renamed = {name for name, text in ours if known.get(name, text) != text}
    while (
        more := {name for name, text in ours if name in known and renamed & _called(text) - {name}}
        - renamed
    ):
        renamed |= more
    found, todo = [], code
    for name, text in ours:
        if name in _called(todo) and (name in renamed or name not in known):
            found.append(_as_backward(text, renamed))
            todo += text
    return _as_backward(code, renamed), found


def _defined(part: str) -> list[tuple[str, str]]:
    """The functions of a text, by name."""
    texts = re.split(r"\n\n\n(?=def |class )", part)
    return [(re.split(r"[ (:]", text, maxsplit=2)[1], text) for text in texts]


def _called(text: str) -> set[str]:
    """Names of functions that a text mentions."""
    return set(re.findall(r"\b_[a-z]\w*", text))


def _as_backward(text: str, names: set[str]) -> str:
    """A text with other names."""
    return re.sub(r"\b_[a-z]\w*", lambda m: m[0] + "_backward" * (m[0] in names), text)
