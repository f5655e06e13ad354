"""Emitted text of results that go home to the owners of the tiles that they are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mercurygen.emit.operator_body import results_type
from mercurygen.emit.operator_results import nothing
from mercurygen.emit.operator_words import Words
from mercurygen.emit.templates import render
from mercurygen.lower.plan import Loop

if TYPE_CHECKING:
    from mercurygen.emit.operator_nest import Nest


def moving(words: Words) -> Loop | None:
    """The loop whose results go home."""
    return next((loop for loop in words.plan.nest.loops if loop.outputs), None)


def not_emitted(words: Words) -> str | None:
    """What of results that go home has no text yet."""
    plan, loop = words.plan, moving(words)
    if sum(bool(each.walks) for each in plan.nest.loops) > 1:
        return "results that go home beside other tiles that come by"
    if loop.outputs != words.outputs:
        return "results of which only some go home"
    if plan.nest.reduces:
        return "results that go home and are reduced"
    masked = words.program.mask_axes and words.program.mask != "full"
    ordered = loop.axis in words.program.mask_axes
    if masked and not ordered:
        return f"results that go home along {loop.axis} under a mask"
    if ordered and len(words.program.order.dims) > 1:
        return "results that go home along a sequence that several dimensions split"
    if masked and loop.home == "direct" and loop.tensors and loop.walks[0].direct:
        return "direct tiles whose results go home directly under a mask"
    if masked and loop.home == "direct" and words.program.order.kind == "striped":
        return "results that go home directly in a striped order"
    if loop.walks[0].both:
        return "results that go home from both sides"
    return None


def trimmed_axis(words: Words) -> str | None:
    """The axis along which only what a rank has results for goes home."""
    loop = moving(words)
    if loop is None or loop.home != "direct":
        return None
    return loop.axis if words.program.mask_axes and words.program.mask != "full" else None


def shares(nest: Nest, lines: list[str]) -> str:
    """`_results` and `_shares`: every owner's tile, and what becomes of its results."""
    words, loop = nest.words, moving(nest.words)
    dim = loop.walks[-1].dim
    group, owner = words.group(dim), words.owner(dim)
    if loop.tensors:
        before, headers = nest.headers(loop)
        header = headers[0]
    else:
        before, header = [], _owners(words, loop, owner)
    inner = [line for axis in words.placed for line in nest.place(axis, True)]
    made = ", ".join(words.outputs) + ("," if len(words.outputs) == 1 else "")
    if nest.plan.nest.begin == "only" and nest.masked:
        seen = words.free("seen")
        inner += [
            f"{seen} = {nest.visible()}",
            f"if {seen} is None:",
            f"    yield {owner}, ()",
            "else:",
            f"    {', '.join(nest.block_names())} = {seen}",
            f"    yield {owner}, {_packed(words, nest.call())}",
        ]
    elif nest.plan.nest.begin == "only":
        inner.append(f"yield {owner}, {_packed(words, nest.call())}")
    else:
        inner = [*nothing(words), *nest.block(), f"yield {owner}, ({made})"]
    body = [*lines, *before, f"{header}:", *(f"    {line}" for line in inner)]
    kind = "Iterator[tuple[int, tuple[Tensor, ...]]]"
    arguments = ", ".join(nest.arguments())
    first = "" if loop.tensors or loop.home == "direct" else "; ours last"
    first = first or ", ours first"
    return "\n".join(
        [
            f"def _results({', '.join(nest.parameters())}) -> {results_type(words)}:",
            '    """The results of all tiles, merged, in the dtypes that they are merged in."""',
            f"    {_targets(words)} = {_call(nest, loop, group, arguments)}",
            f"    return {', '.join(words.outputs)}",
            "",
            "",
            f"def _shares({', '.join(nest.parameters())}) -> {kind}:",
            f'    """Yield (owner, results for its tile) of every rank{first}."""',
            *(f"    {line}" if line else "" for line in body),
        ]
    )


def _targets(words: Words) -> str:
    return ", ".join(words.outputs) if len(words.outputs) > 1 else f"({words.outputs[0]},)"


def _packed(words: Words, call: str) -> str:
    return call if len(words.outputs) > 1 else f"({call},)"


def _call(nest: Nest, loop: Loop, group: str, arguments: str) -> str:
    if loop.home == "relayed":
        return f"_passed_on(_shares({arguments}), {group})"
    if not trimmed_axis(nest.words):
        return f"_sent_home(_shares({arguments}), {group})"
    return f"_sent_home(_shares({arguments}), {nest.dims(loop.outputs, loop.axis)}, {group})"


def _owners(words: Words, loop: Loop, owner: str) -> str:
    """The owners in the order in which their tiles are worked on, where no input comes by."""
    walk = loop.walks[-1]
    group, on = words.group(walk.dim), "+" if walk.reverse else "-"
    step, first = words.free("step"), 1 if loop.home == "relayed" else 0
    steps = f"range({first}, {group}.size(){' + 1' if first else ''})"
    steps = steps if first else f"range({group}.size())"
    return f"for {owner} in (({group}.rank() {on} {step}) % {group}.size() for {step} in {steps})"


def functions(words: Words) -> list[str]:
    """What sends results home."""
    loop = moving(words)
    if loop is None:
        return []
    back, on = ("+", "-") if loop.walks[-1].reverse else ("-", "+")
    chunks = 1
    axis = trimmed_axis(words)
    if axis:
        chunks = words.count(axis, words.here(axis))
    if loop.home == "relayed":
        return [render("operator_passed_on", alone=not loop.tensors)]
    values = {"trimmed": axis is not None, "chunks": chunks}
    home = render("operator_sent_home", on=on, back=back, **values)
    return [home, render("operator_land", **values)]
