"""Emitted text of gradients: tiles come by again, and the gradients of what comes by go with them.

A nest of several loops prints as functions that call each other: `_gradients`, one for every loop
inside it, and `_tile_gradients` for what is inside all of them.
"""

from __future__ import annotations

from mercurygen.emit import direct, held, kernels, masks, packed, walk, windows
from mercurygen.emit.border import runs_argument
from mercurygen.emit.gradient_kinds import straight_back
from mercurygen.emit.levels import Level, Names, with_owner
from mercurygen.emit.ring_kinds import name_of, ring_of
from mercurygen.emit.templates import render
from mercurygen.emit.ways import deal, runs_dealt, runs_of
from mercurygen.emit.words import called, variable
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Gather, Loop, Plan

SHARE = "tuple[Tensor, ...]"
_TILES = {"q": "queries", "k": "keys", "v": "values", "out": "outs", "lse": "lses", "do": "grads"}
_TILES |= {"delta": "deltas"}


class Gradients(Names):
    """How the functions of a plan's nest are called, and what they are given."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        walks = plan.nest.walks
        if len(walks) == 1:
            self.letters = {**self.letters, walks[0]: "owner"}
        moving = {name for loop in plan.nest.loops for name in loop.outputs}
        names = [tensor.name for tensor in self.program.outputs]
        self.every = tuple(names)
        self.moving = tuple(name for name in names if name in moving)
        self.staying = tuple(name for name in names if name not in moving)

    def function(self, index: int) -> str:
        """The name of a level's function."""
        if index == 0:
            return "_gradients"
        level = self.levels[index]
        return "_tile_gradients" if level.last else f"_gradients_along_{level.loop.walks[-1].dim}"

    def given(self, index: int) -> list[str]:
        """Parameters of a level, each with its type."""
        tensors = [*(self.staying if index else ()), *kernels.given(self.plan)]
        places = [f"{self.letters[dim]}: int" for dim in self.places(index)]
        groups = [f"{variable(dim)}: dist.ProcessGroup" for dim in self.groups(index)]
        groups = [*(f"{x}: list[int]" for x in _borders(self.plan)), *groups]
        return [*(f"{x}: Tensor" for x in tensors), *places, *groups, *_scale(self.plan, True)]

    def groups(self, index: int) -> list[str]:
        """Dimensions whose communicator a level or what is inside it needs."""
        used = set(super().groups(index))
        if index == 0:
            used |= {reduce.dim for reduce in self.plan.nest.reduces}
        return [dim for dim in self.program.mesh.names if dim in used]

    def slot(self, axis: str) -> str:
        """The number, row-major, of the rank whose tile is worked on along an axis of the mask."""
        number = ""
        for dim in self.plan.row_dims:
            walked = self.walked(axis, dim)
            if number:
                number = f"({number})" if " " in number else number
                number = f"{number} * {variable(dim)}.size() + "
            number += self.letters[dim] if walked else f"{variable(dim)}.rank()"
        return number

    def inner_call(self, index: int) -> str:
        """A call of the next level on a tile."""
        tiles = {x: _TILES[x] for x in self.levels[index].loop.tensors}
        names = {called(tensor.name): tensor.name for tensor in self.program.read}
        tensors = [tiles.get(names[x], x) for x in kernels.given(self.plan)]
        places = [self.letters[dim] for dim in self.places(index + 1)]
        groups = [variable(dim) for dim in self.groups(index + 1)]
        given = [*self.staying, *tensors, *places, *_borders(self.plan), *groups]
        given += _scale(self.plan)
        return f"{self.function(index + 1)}({', '.join(given)})"


def needs_function(plan: Plan) -> bool:
    """Whether the gradients are more than one call of the kernel."""
    wide = plan.program.kernel == TRITON  # it adds into float32
    return wide or bool(plan.nest.loops or plan.nest.reduces) or plan.nest.begin != "only"


def call(plan: Plan) -> str:
    """The call that gives dq, dk and dv."""
    if not needs_function(plan):
        mask = kernels.mask_argument(plan, plan.program.mask != "full")
        mask += ", documents=(borders, borders)" if plan.program.documents else ""
        return f"_block_backward({', '.join(kernels.given(plan))}, scale, {mask})"
    groups = [variable(dim) for dim in Gradients(plan).groups(0)]
    given = [*kernels.given(plan), *_borders(plan), *groups, *_scale(plan)]
    return f"_gradients({', '.join(given)})"


def _borders(plan: Plan) -> list[str]:
    """What the functions are given of packed documents."""
    return ["borders"] if plan.program.documents else []


def _scale(plan: Plan, typed: bool = False) -> list[str]:
    """What every function is given last: the scale, and the window if there is one."""
    window = plan.program.banded
    if typed:
        return ["scale: float", *([f"window: {windows.kind(plan)}"] * window)]
    return ["scale", *(["window"] * window)]


def functions(plan: Plan) -> list[str]:
    """`_gradients` and what it comes to, callers first."""
    if not needs_function(plan):
        return []
    names = Gradients(plan)
    texts = [_function(names, index) for index in range(len(names.levels))]
    if names.moving:
        moved = _moved(plan)
        share = f"({', '.join(names.moving)})" if len(names.moving) > 1 else names.moving[0]
        values = {
            "pair": SHARE,
            "of": f"{share} of every rank's {moved}",
            "whose": f"its {moved}",
            "merge": "_add(share, arriving)",
            "on": "",
            "parameter": "",
        }
        if straight_back(plan):
            texts += _send_home(plan, share)
        else:
            texts.append(render("carry", alone=False, raw=False, **values))
    return [*texts, *_sums(plan), *masks.visible_functions(plan), *walk.functions(plan)]


def _send_home(plan: Plan, share: str) -> list[str]:
    """Straight back to the owners."""
    needed = direct.asked(plan, "reader", "me")
    parameters = "".join(f", {variable(each)}: dist.ProcessGroup" for each in direct.beside(plan))
    parameters += windows.parameter(plan)
    values = {"share": share, "needed": needed, "parameters": parameters}
    return [render("send_home", **values), render("add_arrived")]


def heading(plan: Plan) -> str:
    """What moves, in a few words."""
    names = Gradients(plan)
    if not names.moving:
        return "backward"
    if straight_back(plan):
        return f"backward: {_moved(plan)} come by, {' and '.join(names.moving)} go back"
    go = "go on with them" if len(names.moving) > 1 else "goes on with them"
    return f"backward: {_moved(plan)} come by, {' and '.join(names.moving)} {go}"


def _moved(plan: Plan) -> str:
    """What comes by, in words."""
    tensors = next(loop.tensors for loop in plan.nest.loops if loop.walks)
    return "queries" if "q" in tensors else " and ".join(tensors)


# --- the functions ------------------------------------------------------------------------------


def _function(names: Gradients, index: int) -> str:
    """One level."""
    level, first = names.levels[index], index == 0
    result = SHARE
    lines = [
        f"def {names.function(index)}({', '.join(names.given(index))}) -> {result}:",
        f'    """{_doc(names, index)}"""',
    ]
    for loop in level.gathers:
        gathered = _tiles(names, loop, index)
        lines.append(f"    {_listed(loop.tensors)} = {gathered}")
    if level.last:
        lines += _body(names, index)
    else:
        lines += [f"    {line}" for line in _made(names.staying)] if first else []
        lines += _ring(names, index)
    if not first:
        return "\n".join(lines)
    lines += _reduced(names)
    return "\n".join([*lines, f"    return tuple(x.to(q.dtype) for x in ({_every(names)}))"])


def _every(names: Gradients) -> str:
    return ", ".join(names.every)


def _listed(tensors: tuple[str, ...]) -> str:
    """Variables of some tensors, as the target of an assignment."""
    names = ", ".join(called(x) for x in tensors)
    return names if len(tensors) > 1 else f"({names},)"


def _doc(names: Gradients, index: int) -> str:
    """What a level does."""
    if index == 0:
        t = held.inside(names.plan)
        return (
            f"Gradients of q [B, s, h, D], k [B, {t}, k, D] and v [B, {t}, k, E], in their dtype."
        )
    stay, move = " and ".join(names.staying), " and ".join(names.moving)
    level = names.levels[index]
    if level.last:
        return f"Add to {stay} what these tiles give; return their {move}, of the same dtype."
    dim = level.loop.walks[-1].dim
    return f"Add to {stay} what the tiles along {dim} give; return {move} of the tile of this rank."


def _made(outputs: tuple[str, ...]) -> list[str]:
    """Zeros that gradients are added to."""
    of = [x.removeprefix("d") for x in outputs]
    if len(of) == 1:
        return [f"{outputs[0]} = {of[0]}.new_zeros({of[0]}.shape, dtype=lse.dtype)"]
    made = f"(x.new_zeros(x.shape, dtype=lse.dtype) for x in ({', '.join(of)}))"
    return [f"{', '.join(outputs)} = {made}"]


def _tiles(names: Gradients, loop: Loop, index: int) -> str:
    """What a loop starts from, gathered over its leading stages."""
    own = [called(x) for x in loop.tensors]
    if index == 0:
        made = [f"{x}.contiguous()" for x in own]
        own = [
            x if _packed(names.plan, t) else y
            for t, x, y in zip(loop.tensors, own, made, strict=True)
        ]
    tiles = f"({own[0]},)" if len(own) == 1 else f"({', '.join(own)})"
    for stage in loop.leading:
        group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
        tiles = f"_gather({tiles}, {group})"
    return tiles


def _packed(plan: Plan, name: str) -> bool:
    """Whether a border, this one or the forward's, leaves a tensor contiguous."""
    tensor = plan.program.tensor(name)
    dealt = {axis for axis in tensor.pin if axis and axis != plan.program.sequence(tensor)}
    return bool(dealt) or any(name in swap.tensors for swap in plan.before)


def _walk(names: Gradients, index: int) -> str:
    """The tiles of a level, one after the other."""
    loop = names.levels[index].loop
    function = name_of(names.plan, loop.walks[-1])
    group = variable(loop.walks[-1].dim)
    if ring_of(names.plan, loop.walks[-1]).short:
        group += "".join(f", {variable(each)}" for each in direct.beside(names.plan)) + ", window"
    call = f"{function}({_tiles(names, loop, index)}, {group})"
    for stage in loop.walking[1:]:
        if isinstance(stage, Gather):
            group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
            call = f"_gather_ahead({call}, {group})"
    return call


def _ring(names: Gradients, index: int) -> list[str]:
    """A loop whose gradients travel."""
    level: Level = names.levels[index]
    dim = level.loop.walks[-1].dim
    tile = ", ".join(_TILES[x] for x in level.loop.tensors)
    target = f"{names.letters[dim]}, ({tile})" if with_owner(names.plan) else tile
    share, carried = names.inner_call(index), f"_carry(shares, {variable(dim)})"
    if straight_back(names.plan):
        more = "".join(f", {variable(each)}" for each in direct.beside(names.plan))
        some = f"{_TILES[level.loop.tensors[0]]}.shape[1]"  # else nothing of the tile is read
        share = f"({names.letters[dim]}, {share} if {some} else ())"
        carried = f"_send_home(shares, {variable(dim)}{more}, window)"
    lines = [f"    shares = ({share} for {target} in {_walk(names, index)})"]
    if index:
        return [*lines, f"    return {carried}"]
    target = _listed(names.moving)
    return [*lines, f"    {target} = {carried}"]


def _body(names: Gradients, index: int) -> list[str]:
    """The body on what the mask leaves of the tiles that are here."""
    plan, every, tensors = names.plan, _every(names), ", ".join(kernels.given(names.plan))
    masked = plan.program.mask != "full"
    if plan.nest.begin == "only" and plan.program.kernel != TRITON:
        share = f"_block_backward({tensors}, scale, {kernels.mask_argument(plan, masked)})"
        if plan.nest.reduces:  # they are added up in float32
            return [f"    {every} = (x.to(lse.dtype) for x in {share})"]
        return [f"    {every} = {share}"]
    end = [f"return {', '.join(names.moving)}"] if index else []
    if index and len(names.moving) == 1:
        end = [f"return ({names.moving[0]},)"]
    if plan.nest.begin == "only":
        blocks = kernels.added(plan, tensors, every, masked)
    else:
        blocks = _blocks(names, tensors)
    lines = [*_made(names.moving if index else names.every), *blocks, *end]
    return [f"    {line}" for line in lines]


def _blocks(names: Gradients, tensors: str) -> list[str]:
    """The blocks that the mask leaves, added up."""
    plan, every, form = names.plan, _every(names), masks.mask_form(names.plan)
    if form == "documents":
        return packed.gradients(plan, *map(names.slot, names.program.mask_axes))
    if form == "all":
        return kernels.added(plan, tensors, every, False)
    cut = {"q": "rows", "grad_out": "rows", "out": "rows", "k": "cols", "v": "cols"}
    part = ", ".join(
        f"{x}[:, {cut[x]}]" if x in cut else f"{x}[:, :, rows]" for x in kernels.given(plan)
    )
    parts = ", ".join(f"{x}[:, {'rows' if x == 'dq' else 'cols'}]" for x in names.every)
    rows, cols = names.program.mask_axes
    word = kernels.mask_word(plan)
    if form in masks.LISTED:
        first, second = "mine", "theirs"  # whose rows, and whose columns
        if any(loop.axis == rows for loop in plan.nest.loops if loop.walks):
            first, second = second, first
        ours = f"{first}, {second}"
        if form == "spaced":
            return [
                f"{ours} = {names.chunks(rows)}, {names.chunks(cols)}",
                f"rows, cols = _visible({ours})",
                *kernels.added(plan, part, parts, True, apart=True),
            ]
        (added,) = kernels.added(plan, part, parts, kernels.CUT)
        visible = "_visible_here" if straight_back(plan) else "_visible"
        return [
            f"{ours} = {names.chunks(rows)}, {names.chunks(cols)}",
            f"for rows, cols, {word} in {visible}({ours}"
            f"{windows.sized(plan, f'q.shape[1] // len({first})')}"
            f"{windows.argument(plan)}):",
            f"    {added}",
        ]
    me, owner, lines = names.slot(rows), names.slot(cols), []
    if len(plan.row_dims) > 1:
        lines.append(f"me, owner = {me}, {owner}")
        me, owner = "me", "owner"
    if form == "before":
        added = kernels.added(plan, tensors, every, f"{owner} == {me}", apart=True)
        return [
            *lines,
            f"if {owner} <= {me}:  # a later owner's tokens come after all of ours",
            *(f"    {line}" for line in added),
        ]
    if plan.program.banded:  # stripes
        (added,) = kernels.added(plan, part, parts, kernels.CUT)
        return [
            *lines,
            f"for rows, cols, band in _visible({me}, {owner}{windows.sized(plan, 'q.shape[1]')}, "
            "window):  # one at most",
            f"    {added}",
        ]
    tokens = ", q.shape[1]" if form == "halves" else ""
    target = f"rows, cols, {word}" if form == "halves" else "rows, cols"
    return [
        *lines,
        f"{target} = _visible({me}, {owner}{tokens})",
        *kernels.added(plan, part, parts, kernels.CUT if form == "halves" else True, apart=True),
    ]


def _reduced(names: Gradients) -> list[str]:
    """What is added up over ranks."""
    plan, lines = names.plan, []
    gathered = ", ".join(called(x) for loop in names.levels[0].gathers for x in loop.tensors)
    if gathered and plan.nest.reduces:
        lines.append(f"    del {gathered}  # of all ranks: what is added up needs room")
    for reduce in plan.nest.reduces:
        group = variable(reduce.dim) + (runs_of(plan, reduce) if reduce.axis else "")
        call = "_sum_of_part" if reduce.axis else "_sum_over"
        lines += [f"    {x} = {call}({x}, {group})" for x in reduce.tensors]
    return lines


def _sums(plan: Plan) -> list[str]:
    """Functions that add up what all ranks of a dimension have."""
    texts = []
    if any(reduce.axis is None for reduce in plan.nest.reduces):
        texts.append(render("operator_reduce", sum_all=True, sum_part=False))
    if any(reduce.axis for reduce in plan.nest.reduces):
        runs = runs_dealt(plan)
        parts = f"_deal(x, 1, group.size(){f', {runs}' if runs else ''})"
        parameter = f", {runs}: int" if runs else ""
        texts += [render("sum_of_part", parts=parts, parameter=parameter), deal(plan)]
    return texts
