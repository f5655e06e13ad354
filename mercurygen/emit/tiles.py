"""Emitted text of tile loops: the public function's, and what brings a part."""

from __future__ import annotations

import re

from mercurygen.emit import border, part_results, walk
from mercurygen.emit.nest import attend_call
from mercurygen.emit.parts import FLIGHTS, INDEX, Parts, groups, signature
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Gather, Loop, Plan, Swap

# --- the public function ----------------------------------------------------------------------


def body(plan: Plan, both: bool = False) -> list[str]:
    """Lines of the public function from the groups to its return; both: with out and lse always."""
    parts = Parts(plan)
    lines = ["kv_heads = k.shape[2]"] if parts.grouped else []
    whole = [name for name in parts.tensors if not parts.tiled(name)]
    for step in plan.before:
        lines += border.into_part(plan, step, tuple(n for n in step.tensors if n in whole))
    for loop in plan.nest.loops:
        if all(name in whole for name in loop.tensors):
            lines += _gather_whole(plan, loop)
    lines.append("out = q.new_empty(*q.shape[:3], v.shape[3])")
    of_lse = [
        "dtype = torch.promote_types(q.dtype, torch.float32)",
        "lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype)",
        "whole = (out, lse.transpose(1, 2).unsqueeze(3))  # [B, S, H, 1]",
    ]
    if both:
        return [*lines, *of_lse, "", *_loop(plan, parts)]
    lines += ["whole = (out,)", "if return_lse:", *(f"    {line}" for line in of_lse), ""]
    return [*lines, *_loop(plan, parts), "return (out, lse) if return_lse else out"]


def _gather_whole(plan: Plan, loop: Loop) -> list[str]:
    """What the loops do not cut, gathered once."""
    names, lines = ", ".join(loop.tensors), []
    fresh = any(loop.tensors[0] in step.tensors for step in plan.before)  # dense already
    tiles = names if fresh else ", ".join(f"{name}.contiguous()" for name in loop.tensors)
    for gather in loop.leading:
        group = variable(gather.dim) + border.runs_argument(plan, gather.join)
        lines.append(f"{names} = _gather(({tiles}), {group})")
        tiles = names
    return lines


def _loop(plan: Plan, parts: Parts) -> list[str]:
    call = f"_parts({', '.join(_parts_arguments(plan, parts))})"
    work = attend_call(plan, "*tiles")
    if parts.home:
        home = ["results", "whole", *part_results.home_arguments(plan, parts)]
        return [
            f"results = ({work} for tiles in {call})",
            f"_send_home({', '.join(home)})",
        ]
    index = ", ".join(parts.indices)
    if parts.single:
        head = f"for {index}, tiles in enumerate({call}):"
    else:
        head = f"for ({index}), tiles in zip({parts.iterations()}, {call}, strict=True):"
    kv_heads = ", kv_heads" if "G" in parts.counts else ""
    return [head, f"    _put({work}, whole{kv_heads}, {index})"]


# --- what a part is worked out from -----------------------------------------------------------


def functions(plan: Plan) -> list[str]:
    """Everything that brings parts, and takes results home; callers first."""
    parts = Parts(plan)
    texts = [_parts(plan, parts)]
    if parts.moving:
        texts.append(_start_part(plan, parts))
        if parts.lying or len(parts.moving) < len(parts.tensors):
            texts.append(_finish_part(plan, parts))
    return [*texts, *part_results.functions(plan)]


def transfers(plan: Plan, code: str) -> list[str]:
    """Of the functions that move parts, or whole tensors, those that some code comes to use."""
    parts = Parts(plan)
    axes = [axis for axis in border.NAMES if axis in _dealt(parts)]
    texts = [_start_dealt(parts, axis) for axis in axes]
    for axis in axes:
        into, back = border.both_ways(plan, axis)
        texts += [_sequence_to_part(parts, axis) if axis in parts.counts else into, back]
    texts += border.split_function(plan)
    texts += [render(name) for name in ("all_to_all", "start_all_to_all", "gather_part")]
    texts += [walk.gather(plan), *walk.gathering(plan), render("arrived"), render("wait")]
    found: list[str] = []
    for text in texts:  # callers come first
        name = text.removeprefix("def ").partition("(")[0]
        used = re.search(rf"\b{name}\(", code)
        if used and f"def {name}(" not in code:
            found.append(text)
            code += text
    return found


def _dealt(parts: Parts) -> set[str]:
    """Axes that are exchanged with the sequence."""
    return {border.dealt_axis(step) for step in (*parts.plan.before, *parts.plan.after)}


def _sequence_to_part(parts: Parts, axis: str) -> str:
    """`_sequence_to_heads` and the like, of a part."""
    name, runs = border.NAMES[axis], border.tokens(parts.plan).count
    given = f", {runs}: int" if runs else ""
    more = ", kv_heads: int" if axis == "G" else ""
    packed, what = _packed(parts, axis)
    shape = what.removeprefix("[n, ").replace(" S,", " n S,")
    return "\n".join(
        [
            f"def _sequence_to_{name}(x: Tensor, group: dist.ProcessGroup{given}"
            f"{more}, {INDEX[axis]}: int) -> Tensor:",
            f'    """[B, S, H, D] -> [{shape}: all tokens of the n ranks, in global order."""',
            f"    parts = _all_to_all({packed}, group)",
            f"    return _join(parts{f', {runs}' if runs else ''})",
        ]
    )


def _last(parts: Parts, name: str) -> Swap | Gather:
    steps, gathers = parts.story(name)
    return (*steps, *gathers)[-1]


def _moving_dims(parts: Parts) -> list[str]:
    return [step.dim for name in parts.moving for each in parts.story(name) for step in each]


def _parts_arguments(plan: Plan, parts: Parts) -> list[str]:
    """What `_parts` is given, as named here and there."""
    kv_heads = ["kv_heads"] if _needs_kv_heads(parts) else []
    return [*parts.tensors, *groups(plan, _moving_dims(parts)), *kv_heads]


def _needs_kv_heads(parts: Parts) -> bool:
    dealt = [step.split for name in parts.moving for step in parts.story(name)[0]]
    return "G" in parts.counts or "G" in dealt


def _parts(plan: Plan, parts: Parts) -> str:
    """`_parts`: the loop over parts."""
    names = _parts_arguments(plan, parts)
    meanwhile = "; the next come meanwhile" if parts.moving else ""
    lines = [
        f"def _parts({signature(names)}) -> Iterator[tuple[Tensor, ...]]:",
        f'    """Yield q, k and v of one part{parts.of_what()} after the other{meanwhile}."""',
    ]
    if not parts.moving:
        made, tiles = _tiles(parts)
        lines += [f"    for {', '.join(parts.indices)} in {parts.iterations()}:"]
        return "\n".join([*lines, *(f"        {line}" for line in made), f"        yield {tiles}"])
    start = [*_start_names(parts), *names[len(parts.tensors) :]]
    if parts.single:
        first, following, before, last = "0", parts.indices[0], f"{parts.indices[0]} - 1", None
        loop = [f"    for {following} in range(1, {parts.number}):"]
        last = str(parts.number - 1)
        head = []
    else:
        first, following, before, last = "*part", "*following", "*part", "*part"
        head = [f"    part, *others = {parts.iterations()}"]
        loop = ["    for following in others:"]
    lines += [
        *head,
        f"    received = _arrived(_start_part({', '.join([*start, first])}))",
        *loop,
        f"        tiles = {_finish_call(parts, before)}",
        "        del received  # its buffers go before the next ones come",
        f"        arriving = _start_part({', '.join([*start, following])})",
        "        try:",
        "            yield tiles",
        "        finally:  # even if the caller fails: nothing stays in flight",
        "            received = _arrived(arriving)",
        "            del arriving",
        *([] if parts.single else ["        part = following"]),
        f"    yield {_finish_call(parts, last)}",
    ]
    return "\n".join(lines)


def _start_names(parts: Parts) -> list[str]:
    return parts.moving


def _finish_names(parts: Parts) -> list[str]:
    """Tensors of which something lies here, and what else `_finish_part` needs."""
    names = [name for name in parts.tensors if name not in parts.moving]
    cut = any("G" in parts.carried(name) for name in parts.lying)
    return [*names, "received", *(["kv_heads"] if cut else [])]


def _finish_call(parts: Parts, index: str) -> str:
    if not parts.lying and len(parts.moving) == len(parts.tensors):
        return _joined(parts, "received")
    names = _finish_names(parts)
    return f"_finish_part({', '.join([*names, *([index] if parts.lying else [])])})"


def _joined(parts: Parts, received: str) -> str:
    """What has arrived, in global order."""
    outer = [_outer(parts, name) for name in parts.moving]
    if len(set(outer)) == 1:
        return f"tuple(_join(x{outer[0]}) for x in {received})"
    each = [f"_join({received}[{i}]{more})" for i, more in enumerate(outer)]
    return f"({', '.join(each)},)"


def _outer(parts: Parts, name: str) -> str:
    return border.runs_argument(parts.plan, _last(parts, name).join)


def _tile(parts: Parts, name: str) -> str:
    """A part of what lies here."""
    axes = parts.carried(name)
    if not axes:
        return name
    return parts.cut(name, axes, parts.walked(name) or "G" in axes)


def _tiles(parts: Parts) -> tuple[list[str], str]:
    """Lines that make a part of what is walked, and the tiles of a part."""
    if not any(parts.walked(name) for name in parts.lying if name != "q"):
        return [], ", ".join(
            name if name in parts.moving else _tile(parts, name) for name in parts.tensors
        )
    dense = parts.cut("x", parts.carried("k"), True)
    return [f"keys, values = ({dense} for x in (k, v))"], f"{_tile(parts, 'q')}, keys, values"


def _finish_part(plan: Plan, parts: Parts) -> str:
    names = _finish_names(parts)
    index = f", {parts.parameters()}" if parts.lying else ""
    moved, value = ", ".join(parts.moving), _joined(parts, "received")
    if len(parts.moving) == 1:
        value = f"_join(received[0]{_outer(parts, moved)})"
    made, tiles = _tiles(parts)
    if "q" in parts.moving and made:
        tiles = "q, keys, values"
    return "\n".join(
        [
            f"def _finish_part({signature(names)}{index}) -> tuple[Tensor, ...]:",
            f'    """q, k and v of a part{parts.of_what()}: what has arrived is joined."""',
            f"    {moved} = {value.removeprefix('tuple')}",
            *(f"    {line}" for line in made),
            f"    return {tiles}",
        ]
    )


def _start_part(plan: Plan, parts: Parts) -> str:
    """`_start_part`: the transfers of a part."""
    names = [*_start_names(parts), *_parts_arguments(plan, parts)[len(parts.tensors) :]]
    runs: list[tuple[str, list[str]]] = []
    for name in parts.moving:
        text = _start_of(parts, name)
        if runs and runs[-1][0] == text:
            runs[-1][1].append(name)
        else:
            runs.append((text, [name]))
    each = [
        (
            f"({text} for x in ({', '.join(group)}))"
            if len(group) > 1
            else text.replace("(x", f"({group[0]}", 1)
        )
        for text, group in runs
    ]
    if len(runs) == 1 and len(runs[0][1]) > 1:
        value = f"[{each[0][1:-1]}]"
    else:
        stars = ("*" if len(group) > 1 else "" for _, group in runs)
        value = f"[{', '.join(star + text for star, text in zip(stars, each, strict=True))}]"
    return "\n".join(
        [
            f"def _start_part({signature(names)}, {parts.parameters()}) -> {FLIGHTS}:",
            f'    """Start the transfers that bring a part{parts.of_what()}."""',
            f"    return {value}",
        ]
    )


def _start_of(parts: Parts, name: str) -> str:
    """What starts the last transfer of a part of x; those before are done in it."""
    steps, gathers = parts.story(name)
    dealt = [step.split for step in steps]
    others = [axis for axis in parts.carried(name) if axis not in dealt]
    x = "x"
    if others:
        x = parts.cut("x", others, True)
    for step in (*steps, *gathers)[:-1]:
        group = variable(step.dim) + border.runs_argument(parts.plan, step.join)
        if isinstance(step, Gather):
            x = f"_gather(({x},), {group})[0]"
        else:
            x = f"_sequence_to_{border.NAMES[step.split]}({x}, {group}{_dealing(parts, step)})"
    step = (*steps, *gathers)[-1]
    if isinstance(step, Gather):
        return f"_gather_part({x}, {variable(step.dim)})"
    return f"_start_{border.NAMES[step.split]}({x}, {variable(step.dim)}{_dealing(parts, step)})"


def _dealing(parts: Parts, step: Swap) -> str:
    """More arguments of what deals an axis: key/value heads, and which part."""
    kv_heads = f", {parts.kv_heads(step.dim)}" if step.split == "G" else ""
    return kv_heads + (f", {INDEX[step.split]}" if step.split in parts.counts else "")


def _packed(parts: Parts, axis: str) -> tuple[str, str]:
    """A part of x for every rank of a group, and the shape of what they give."""
    count, dim = parts.counts.get(axis, 1), {"B": 0, "H": 2, "G": 3}[axis]
    of = f"{count} * group.size()" if count > 1 else "group.size()"
    x = "x.unflatten(2, (kv_heads, -1))" if axis == "G" else "x"
    chunks = f"{x}.chunk({of}, dim={dim})" + (f"[{INDEX[axis]}::{count}]" if count > 1 else "")
    ways = f"{count}n" if count > 1 else "n"
    shape = f"[n, B / {ways}, S, H, D]" if axis == "B" else f"[n, B, S, H / {ways}, D]"
    return f"torch.stack({chunks})" + (".flatten(3, 4)" if axis == "G" else ""), shape


def _start_dealt(parts: Parts, axis: str) -> str:
    """`_start_heads` and the like: an all-to-all, all but its wait."""
    index, count = INDEX[axis], parts.counts.get(axis, 1)
    packed, shape = _packed(parts, axis)
    more = ", kv_heads: int" if axis == "G" else ""
    more += f", {index}: int" if count > 1 else ""
    return "\n".join(
        [
            f"def _start_{border.NAMES[axis]}(x: Tensor, group: dist.ProcessGroup{more})"
            " -> tuple[Tensor, dist.Work]:",
            f'    """[B, S, H, D] -> {shape} from the n ranks, with what to wait for."""',
            f"    return _start_all_to_all({packed}, group)",
        ]
    )
