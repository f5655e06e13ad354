"""Emitted text of tile loops: what puts the results of parts together."""

from __future__ import annotations

from mercurygen.emit import border
from mercurygen.emit.parts import FLIGHTS, INDEX, Parts, groups, signature
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Plan


def functions(plan: Plan) -> list[str]:
    """What puts results together, or takes them home first; callers first."""
    parts = Parts(plan)
    if not parts.home:
        return [_put(parts)]
    return [_send_home(plan, parts), _start_home(plan, parts), _put_home(plan, parts)]


def home_arguments(plan: Plan, parts: Parts) -> list[str]:
    """What takes results home is given, beside them."""
    along = groups(plan, [step.dim for step in parts.home])
    return [*along, *(["kv_heads"] if parts.grouped else [])]


def _send_home(plan: Plan, parts: Parts) -> str:
    """`_send_home`: results go to their owners while the next are worked out."""
    more = home_arguments(plan, parts)
    start = ", ".join(["len(whole)", *(x for x in more if x not in _put_only(parts))])
    put = ", ".join(["leaving", "whole", *(["kv_heads"] if _put_home_grouped(parts) else [])])
    if parts.single:
        index = parts.indices[0]
        head, loop = [], f"    for {index} in range(1, {parts.number}):"
        before, last, step = f"{index} - 1", str(parts.number - 1), []
    else:
        head = [f"    part, *others = {parts.iterations()}"]
        loop, before, last = "    for following in others:", "*part", "*part"
        step = ["        part = following"]
    wait = "_wait([work for _, work in leaving])"
    return "\n".join(
        [
            f"def _send_home({signature(['results', 'whole', *more])}) -> None:",
            '    """Send the results of a part to their owners while the next is worked out."""',
            *head,
            f"    leaving = _start_home(next(results), {start})",
            loop,
            "        try:",
            "            result = next(results)",
            "        finally:  # even if it fails: nothing stays in flight",
            f"            {wait}",
            f"        _put_home({put}, {before})",
            "        del leaving  # its buffers go before the next ones come",
            f"        leaving = _start_home(result, {start})",
            "        del result",
            *step,
            f"    {wait}",
            f"    _put_home({put}, {last})",
        ]
    )


def _put_only(parts: Parts) -> list[str]:
    """Arguments that only the placing needs."""
    dealt = [step.gathered for step in parts.home[:-1]]
    return [] if "G" in dealt else ["kv_heads"]


def _put_home_grouped(parts: Parts) -> bool:
    return "G" in parts.counts or parts.home[-1].gathered == "G"


def _start_home(plan: Plan, parts: Parts) -> str:
    along = [x for x in home_arguments(plan, parts) if x not in _put_only(parts)]
    x = "x"
    for step in parts.home[:-1]:
        group = variable(step.dim) + border.runs_argument(plan, step.deal)
        more = f", {parts.kv_heads(step.dim)}" if step.gathered == "G" else ""
        x = f"_{border.NAMES[step.gathered]}_to_sequence({x}, {group}{more})"
    step = parts.home[-1]
    size = f"{variable(step.dim)}.size()"
    if not border.tokens(plan).split:
        packed = f"torch.stack({x}.chunk({size}, dim=1))"
    else:
        packed = f"_split({x}, {size}{border.runs_argument(plan, step.deal)})"
    return "\n".join(
        [
            f"def _start_home({signature(['result', 'count', *along])}) -> {FLIGHTS}:",
            '    """Start to send out, and lse if it is wanted, to the owners of the tokens."""',
            "    out, lse = result",
            "    shares = (out, lse.transpose(1, 2).unsqueeze(3))[:count]  # lse as [B, s, h, 1]",
            f"    return [_start_all_to_all({packed}, {variable(step.dim)}) for x in shares]",
        ]
    )


def _place(parts: Parts, axes: list[str], grouped: bool) -> str:
    """Where a part lies in the whole of an output."""
    text = "into" + (".unflatten(2, (kv_heads, -1))" if grouped else "")
    for axis, dim in (("B", 0), ("S_q", 1), ("H", 2), ("G", 3)):
        if axis in axes:
            text += f".chunk({parts.counts[axis]}, dim={dim})[{INDEX[axis]}]"
    return text


def _put_home(plan: Plan, parts: Parts) -> str:
    """`_put_home`: what has arrived, in its place."""
    step = parts.home[-1]
    axis, grouped = step.gathered, _put_home_grouped(parts)
    count, dim = parts.counts.get(axis, 1), {"B": 0, "H": 2, "G": 3}[axis]
    of = f"{count} * received.shape[0]" if count > 1 else "received.shape[0]"
    others = [each for each in _carried_by_out(parts) if each != axis]
    place = f"{_place(parts, others, grouped)}.chunk({of}, dim={dim})"
    place += f"[{INDEX[axis]}::{count}]" if count > 1 else ""
    runs = border.in_runs(plan)
    x, target = "x", "place"
    if runs:  # x [runs, B, S / runs, h, D]
        target, x = "place.unflatten(1, (x.shape[0], -1))", "x.transpose(0, 1)"
    if grouped:
        x += f".unflatten({3 if runs else 2}, place.shape[2:4])"
    kv_heads = ", kv_heads: int" if grouped else ""
    return "\n".join(
        [
            "def _put_home("
            f"leaving: {FLIGHTS}, whole: tuple[Tensor, ...]{kv_heads}, {parts.parameters()}"
            ") -> None:",
            '    """Copy what has arrived of a part, from every rank its heads, to its place."""',
            "    for (received, _), into in zip(leaving, whole, strict=True):",
            f"        places = {place}",
            "        for x, place in zip(received.unbind(), places, strict=True):",
            f"            {target}.copy_({x})",
        ]
    )


def _carried_by_out(parts: Parts) -> list[str]:
    out = parts.program.outputs[0]
    return [axis for axis in parts.counts if out.carries(axis)]


def _put(parts: Parts) -> str:
    """`_put`: a part's results, in their place."""
    grouped = "G" in parts.counts
    place = _place(parts, _carried_by_out(parts), grouped)
    kv_heads = ", kv_heads: int" if grouped else ""
    lines = [f"        {place}.copy_(x)"]
    if grouped:
        lines = [
            f"        place = {place}",
            "        place.copy_(x.unflatten(2, place.shape[2:4]))",
        ]
    return "\n".join(
        [
            "def _put("
            f"result: tuple[Tensor, Tensor], whole: tuple[Tensor, ...]{kv_heads}, "
            f"{parts.parameters()}) -> None:",
            '    """Copy out, and lse if it is wanted, of a part to its place in the whole."""',
            "    out, lse = result",
            "    shares = out, lse.transpose(1, 2).unsqueeze(3)  # lse as [B, s, h, 1]",
            "    for x, into in zip(shares, whole, strict=False):",
            *lines,
        ]
    )
