"""Emitted text of tile loops: what brings a part, and what puts its results together."""

from __future__ import annotations

import re

from mercurygen.emit import border, walk
from mercurygen.emit.loops import part_counts
from mercurygen.emit.nest import attend_call
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Gather, Loop, Plan, Swap

INDEX = {"B": "b", "H": "h", "G": "g", "S_q": "i"}  # of a part of an axis
WORDS = {"B": "the batch", "H": "the heads", "G": "the query heads", "S_q": "the rows"}
DENSE = ".clone(memory_format=torch.contiguous_format)"
FLIGHTS = "list[tuple[Tensor, dist.Work]]"


class Parts:
    """How the tile loops of a plan cut its tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program = plan, plan.program
        self.counts = part_counts(plan)
        self.indices = [INDEX[axis] for axis in self.counts]
        self.tensors = [t.name for t in self.program.read]
        self.moving = [t for t in self.tensors if self.tiled(t) and self.story(t) != ((), ())]
        self.lying = [t for t in self.tensors if self.tiled(t) and t not in self.moving]
        self.home = [s for s in plan.after if not s.optional]  # steps of out; lse has the same

    @property
    def grouped(self) -> bool:
        """Whether query heads are told apart by their key/value head."""
        dealt = [border.dealt_axis(s) for s in (*self.plan.before, *self.plan.after)]
        return "G" in self.counts or "G" in dealt

    @property
    def single(self) -> bool:
        """Whether one axis is looped over."""
        return len(self.counts) == 1

    @property
    def number(self) -> int:
        """Parts of a single axis."""
        (count,) = self.counts.values()
        return count

    def tiled(self, name: str) -> bool:
        """Whether the loops cut a tensor."""
        return any(self.program.tensor(name).carries(axis) for axis in self.counts)

    def story(self, name: str) -> tuple[tuple[Swap, ...], tuple[Gather, ...]]:
        """The reshards of an input, and its gathers outside every walk."""
        steps = tuple(step for step in self.plan.before if name in step.tensors)
        gathers = [g for loop in self.plan.nest.loops if name in loop.tensors for g in loop.leading]
        return steps, tuple(gathers)

    def walked(self, name: str) -> bool:
        """Whether a tensor comes by."""
        return any(name in loop.tensors for loop in self.plan.nest.loops if loop.walks)

    def iterations(self) -> str:
        """An iterable of the indices of all parts."""
        if self.single:
            return f"range({self.number})"
        return f"product({', '.join(f'range({n})' for n in self.counts.values())})"

    def parameters(self) -> str:
        """`h: int, g: int`."""
        return ", ".join(f"{index}: int" for index in self.indices)

    def what(self) -> str:
        """What a part is of, in words."""
        words = [WORDS[axis] for axis in self.counts]
        return " and ".join(dict.fromkeys(words))

    def of_what(self) -> str:
        """` of the heads`; nothing where it is long."""
        return f" of {self.what()}" if self.single else ""

    def kv_heads(self, dim: str) -> str:
        """Key/value heads of a part where a dimension deals query heads."""
        ways = border.heads_before(self.plan, dim) * self.counts.get("H", 1)
        return f"kv_heads // {ways}" if ways > 1 else "kv_heads"

    def cut(self, x: str, axes: list[str], dense: bool) -> str:
        """A part of x along some axes; dense: a copy."""
        text = x
        if "G" in axes:
            text += ".unflatten(2, (kv_heads, -1))"
        for axis, dim in (("B", 0), ("S_q", 1), ("H", 2), ("G", 3)):
            if axis in axes:
                text += f".chunk({self.counts[axis]}, dim={dim})[{INDEX[axis]}]"
        text += DENSE if dense else ""
        return text + (".flatten(2, 3)" if "G" in axes else "")

    def carried(self, name: str) -> list[str]:
        """The tiled axes of a tensor."""
        return [axis for axis in self.counts if self.program.tensor(name).carries(axis)]


# --- the public function ----------------------------------------------------------------------


def body(plan: Plan) -> list[str]:
    """Lines of the public function from the groups to its return."""
    parts = Parts(plan)
    lines = ["kv_heads = k.shape[2]"] if parts.grouped else []
    whole = [name for name in parts.tensors if not parts.tiled(name)]
    for step in plan.before:
        lines += border.into_part(plan, step, tuple(n for n in step.tensors if n in whole))
    for loop in plan.nest.loops:
        if all(name in whole for name in loop.tensors):
            lines += _gather_whole(plan, loop)
    lines += [
        "out = q.new_empty(*q.shape[:3], v.shape[3])",
        "whole = (out,)",
        "if return_lse:",
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype)",
        "    whole = (out, lse.transpose(1, 2).unsqueeze(3))  # [B, S, H, 1]",
        "",
        *_loop(plan, parts),
        "return (out, lse) if return_lse else out",
    ]
    return lines


def _gather_whole(plan: Plan, loop: Loop) -> list[str]:
    """What the loops do not cut, gathered once."""
    names, lines = ", ".join(loop.tensors), []
    fresh = any(loop.tensors[0] in step.tensors for step in plan.before)  # dense already
    tiles = names if fresh else ", ".join(f"{name}.contiguous()" for name in loop.tensors)
    for gather in loop.leading:
        group = variable(gather.dim) + border.outer_argument(plan, gather.join)
        lines.append(f"{names} = _gather(({tiles}), {group})")
        tiles = names
    return lines


def _loop(plan: Plan, parts: Parts) -> list[str]:
    call = f"_parts({', '.join(_parts_arguments(plan, parts))})"
    work = attend_call(plan, "*tiles")
    if parts.home:
        home = ["results", "whole", *_home_arguments(plan, parts)]
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
    if parts.home:
        texts += [_send_home(plan, parts), _start_home(plan, parts), _put_home(plan, parts)]
    else:
        texts.append(_put(plan, parts))
    return texts


def transfers(plan: Plan, code: str) -> list[str]:
    """Of the functions that move parts, or whole tensors, those that some code comes to use."""
    parts, values = Parts(plan), border.parameters(plan)
    axes = [axis for axis in border.NAMES if axis in _dealt(parts)]
    texts = [_start_dealt(parts, axis) for axis in axes]
    for axis in axes:
        into, back = render(f"swap_{border.NAMES[axis]}", **values).split("\n\n\n")
        texts += [_sequence_to_part(parts, axis) if axis in parts.counts else into, back]
    texts += border.split_function(plan)
    texts += [render(name) for name in ("all_to_all", "start_all_to_all", "gather_part")]
    texts += [walk.gather(plan), *walk.gathering(plan), render("landed"), render("wait")]
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
    name, values = border.NAMES[axis], border.parameters(parts.plan)
    more = ", kv_heads: int" if axis == "G" else ""
    packed, what = _packed(parts, axis)
    shape = what.removeprefix("[n, ").replace(" S,", " n S,")
    return "\n".join(
        [
            f"def _sequence_to_{name}(x: Tensor, group: dist.ProcessGroup{values['parameter']}"
            f"{more}, {INDEX[axis]}: int) -> Tensor:",
            f'    """[B, S, H, D] -> [{shape}: all tokens of the n ranks, in global order."""',
            f"    parts = _all_to_all({packed}, group)",
            f"    return _join(parts{values['argument']})",
        ]
    )


def _last(parts: Parts, name: str) -> Swap | Gather:
    steps, gathers = parts.story(name)
    return (*steps, *gathers)[-1]


def _groups(plan: Plan, dims: list[str]) -> list[str]:
    return [variable(dim) for dim in plan.program.mesh.in_order(dims)]


def _moving_dims(parts: Parts) -> list[str]:
    return [step.dim for name in parts.moving for each in parts.story(name) for step in each]


def _parts_arguments(plan: Plan, parts: Parts) -> list[str]:
    """What `_parts` is given, as named here and there."""
    kv_heads = ["kv_heads"] if _needs_kv_heads(parts) else []
    return [*parts.tensors, *_groups(plan, _moving_dims(parts)), *kv_heads]


def _needs_kv_heads(parts: Parts) -> bool:
    dealt = [step.split for name in parts.moving for step in parts.story(name)[0]]
    return "G" in parts.counts or "G" in dealt


def _signature(names: list[str]) -> str:
    kinds = {"kv_heads": "int", "count": "int", "result": "tuple[Tensor, Tensor]"}
    kinds |= {"whole": "tuple[Tensor, ...]", "received": "list[Tensor]"}
    kinds |= {"leaving": FLIGHTS, "results": "Iterator[tuple[Tensor, Tensor]]"}
    tensors = {"q", "k", "v"}
    return ", ".join(
        f"{x}: {'Tensor' if x in tensors else kinds.get(x, 'dist.ProcessGroup')}" for x in names
    )


def _parts(plan: Plan, parts: Parts) -> str:
    """`_parts`: the loop over parts."""
    names = _parts_arguments(plan, parts)
    meanwhile = "; the next come meanwhile" if parts.moving else ""
    lines = [
        f"def _parts({_signature(names)}) -> Iterator[tuple[Tensor, ...]]:",
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
        f"    received = _landed(_start_part({', '.join([*start, first])}))",
        *loop,
        f"        tiles = {_finish_call(parts, before)}",
        "        del received  # its buffers go before the next ones come",
        f"        arriving = _start_part({', '.join([*start, following])})",
        "        try:",
        "            yield tiles",
        "        finally:  # even if the caller fails: nothing stays in flight",
        "            received = _landed(arriving)",
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
    return border.outer_argument(parts.plan, _last(parts, name).join)


def _tile(parts: Parts, name: str) -> str:
    """A part of what lies here."""
    axes = parts.carried(name)
    if not axes:
        return name
    return parts.cut(name, axes, parts.walked(name) or "G" in axes)


def _tiles(parts: Parts) -> tuple[list[str], str]:
    """Lines that make a part of what is walked, and the tiles of a part."""
    if not any(parts.walked(name) for name in parts.lying):
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
            f"def _finish_part({_signature(names)}{index}) -> tuple[Tensor, ...]:",
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
            f"def _start_part({_signature(names)}, {parts.parameters()}) -> {FLIGHTS}:",
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
        group = variable(step.dim) + border.outer_argument(parts.plan, step.join)
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


# --- what becomes of its results --------------------------------------------------------------


def _home_arguments(plan: Plan, parts: Parts) -> list[str]:
    groups = _groups(plan, [step.dim for step in parts.home])
    return [*groups, *(["kv_heads"] if parts.grouped else [])]


def _send_home(plan: Plan, parts: Parts) -> str:
    """`_send_home`: results go to their owners while the next are worked out."""
    more = _home_arguments(plan, parts)
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
            f"def _send_home({_signature(['results', 'whole', *more])}) -> None:",
            '    """Send the results of every part to their owners while the next is worked out."""',
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
    groups = [x for x in _home_arguments(plan, parts) if x not in _put_only(parts)]
    x = "x"
    for step in parts.home[:-1]:
        group = variable(step.dim) + border.outer_argument(plan, step.deal)
        more = f", {parts.kv_heads(step.dim)}" if step.gathered == "G" else ""
        x = f"_{border.NAMES[step.gathered]}_to_sequence({x}, {group}{more})"
    step = parts.home[-1]
    size = f"{variable(step.dim)}.size()"
    if border.variant(plan) == "contiguous":
        packed = f"torch.stack({x}.chunk({size}, dim=1))"
    else:
        packed = f"_split({x}, {size}{border.outer_argument(plan, step.deal)})"
    return "\n".join(
        [
            f"def _start_home({_signature(['result', 'count', *groups])}) -> {FLIGHTS}:",
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
    runs = border.variant(plan) != "contiguous"
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


def _put(plan: Plan, parts: Parts) -> str:
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
