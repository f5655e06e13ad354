"""From a complete program to its plan."""

from __future__ import annotations

from dataclasses import replace

from mercurygen.errors import Refusal
from mercurygen.ir.atoms import Atoms
from mercurygen.ir.layout import Interleaving, interleaving
from mercurygen.ir.program import SEQUENCE, BorderStep, Program, Stage, Tensor
from mercurygen.lower.beginning import beginning, come_by
from mercurygen.lower.plan import Gather, Loop, Nest, Plan, Reduce, Spread, Swap, Walk
from mercurygen.lower.recorder import NotARun
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import NotCuttable


def lower(program: Program) -> Plan | Refusal:
    """The plan of a complete program, or why the kernel cannot do it."""
    loops = _loops(program)
    after: list[Swap | Spread] = []
    for tensor in program.outputs:  # what is only merged by is handed out if asked for
        after += _border(program, (tensor.name,), tensor.name in program.optional)
    before = _border(program, tuple(t.name for t in (*program.inputs, *program.derived)), False)
    nest = Nest(loops, "empty", _reduces(program))
    plan = Plan(program, before, nest, tuple(after), program.tiles)
    try:
        begin = beginning(plan)
    except NotCuttable as fault:
        words = str(fault)
        return Refusal("mask-not-cuttable", lambda: (words, "use another order of tokens"))
    if isinstance(begin, Refusal):
        return begin
    plan = replace(plan, nest=replace(nest, begin=begin))
    return _misaligned(plan) or plan


def _cut_by_walks(plan: Plan) -> bool:
    """Whether something that does not come by is cut to the tiles that do."""
    return any(
        tensor.carries(loop.axis) and tensor.name not in loop.tensors
        for loop in plan.nest.loops
        if loop.walks
        for tensor in plan.program.read
    )


def _misaligned(plan: Plan) -> Refusal | None:
    """Refuse a plan that needs parts of tiles that do not lie in one piece.

    Where nothing is cut there are none. Rank 0 shows them: under zigzag its tokens are the
    farthest apart, and in the other orders all ranks' lie alike.
    """
    cuts = any(isinstance(step, Spread) and not step.gathers for step in plan.before)
    moving = any(loop.outputs for loop in plan.nest.loops)
    if not (cuts or plan.tiles or moving or come_by(plan) or _cut_by_walks(plan)):
        return None
    try:
        trace(plan, 0)
    except NotARun as fault:
        axis = str(fault)
        return Refusal(
            "tiles-do-not-align",
            lambda: (
                f"what a rank works on along {axis} does not lie in one piece in what it holds",
                "`order S: contiguous`, or bring what carries it in the same tiles",
            ),
        )
    return None


# --- border ---------------------------------------------------------------------------------


def _border(program: Program, tensors: tuple[str, ...], optional: bool) -> tuple:
    """The border steps of some tensors; those alike along one dimension together."""
    found: dict[tuple, Swap | Spread] = {}
    for step in program.border:
        if step.tensor not in tensors:
            continue
        made = _step(program, step, optional)
        key = tuple(getattr(made, f) for f in made.__slots__ if f != "tensors"), type(made)
        names = found[key].tensors if key in found else ()
        found[key] = replace(made, tensors=(*names, step.tensor))
    return tuple(found.values())


def _step(program: Program, step: BorderStep, optional: bool) -> Swap | Spread:
    tensor = program.tensor(step.tensor)

    def join(axis: str) -> Interleaving:
        return _join(program, tensor, axis, step)

    def called(axis: str) -> str:  # tensors of both sequences share a step
        return SEQUENCE if axis in program.mask_axes else axis

    source, target = step.source, step.target
    if source is None or target is None:
        axis = source or target
        gathers = target is None
        return Spread((step.tensor,), step.dim, called(axis), join(axis), gathers, optional)
    names, joins = (called(source), called(target)), (join(source), join(target))
    return Swap((step.tensor,), step.dim, *names, *joins, optional)


def _join(program: Program, tensor: Tensor, axis: str, step: BorderStep) -> Interleaving:
    """How parts interleave at a step: which dimensions of the axis are joined at that time."""
    steps = [s for s in program.border if s.tensor == step.tensor]
    before, order = steps[: steps.index(step)], Atoms(program).order(tensor, axis)
    is_output = tensor.role == "output"
    now = {
        dim: program.stored(tensor, dim) if is_output else program.pinned(tensor, dim)
        for dim in program.mesh.names
    }
    now |= {s.dim: s.target for s in before}
    whole = [dim for dim in order.dims if now[dim] != axis and dim != step.dim]
    return interleaving(order, program.mesh, step.dim, whole)


# --- nest -----------------------------------------------------------------------------------


def _loops(program: Program) -> tuple[Loop, ...]:
    """The stages as loops: a run of stages of the same tensors, cut where outputs leave."""
    names = [t.name for t in (*program.inputs, *program.derived)]
    loops: list[Loop] = []
    gone: set[int] = set()
    for index, stage in enumerate(program.stages):
        if index in gone or stage.kind == "scatter":
            continue
        if stage.tensors[0] not in names:
            if not _walked_with(program, stage):
                loops.append(_alone(stage))
            continue
        outputs = _outputs_along(program, stage)
        partner = _partner(program, index)
        piece = _piece(program, stage, partner and program.stages[partner])
        skewed = None
        if partner is not None:
            gone.add(partner)
            skewed = (program.stages[partner].tensors, program.stages[partner].axis)
        at = _open(loops, stage)
        if at is not None and not skewed:
            last = loops.pop(at)
            merged = replace(last, stages=(*last.stages, piece))
        else:
            at = len(loops)
            merged = Loop(stage.tensors, stage.axis, (piece,), partner=skewed)
        if outputs and stage.kind == "walk":
            home = "direct" if "direct" in outputs[0].options else "relayed"
            tensors = tuple(name for each in outputs for name in each.tensors)
            ordered = tuple(t.name for t in program.outputs if t.name in tensors)
            merged = replace(merged, outputs=ordered, home=home)
        loops.insert(at, merged)
    first = {name: place for place, name in enumerate(names)}

    def place(loop: Loop) -> int:
        return len(names) if loop.walks else first[loop.tensors[0]]

    return tuple(sorted(_fused(loops), key=place))  # stable


def _open(loops: list[Loop], stage: Stage) -> int | None:
    """The loop that one more stage of the same tensors goes on with.

    Gathers outside of the tensors' own walks are done once: another's walk parts the two.
    """
    for at in reversed(range(len(loops))):
        loop = loops[at]
        goes_on = stage.kind == "gather" or not loop.outputs
        if loop.tensors == stage.tensors and goes_on and not loop.partner:
            others = loops if not loop.walks else loops[at + 1 :]
            apart = stage.kind == "walk" and any(each.walks for each in others)
            return None if apart else at
    return None


def _fused(loops: list[Loop]) -> list[Loop]:
    """Loops along one and the same walk as one: their tensors come by in step."""
    fused: list[Loop] = []
    for loop in loops:
        same = next((i for i, each in enumerate(fused) if _in_step(each, loop)), None)
        if same is None:
            fused.append(loop)
            continue
        old = fused[same]
        tensors = (*old.tensors, *loop.tensors)
        fused[same] = replace(old, tensors=tensors, outputs=old.outputs or loop.outputs)
    return fused


def _in_step(one: Loop, other: Loop) -> bool:
    return bool(one.walks) and one.stages == other.stages and one.axis == other.axis


def _alone(stage: Stage) -> Loop:
    """Outputs that move although no input does."""
    home = "direct" if "direct" in stage.options else "relayed"
    walk = Walk(stage.dim, reverse="reverse" in stage.options)
    return Loop((), stage.axis, (walk,), outputs=stage.tensors, home=home)


def _walked_with(program: Program, stage: Stage) -> bool:
    """Whether some input is walked along the dimension of an output's walk."""
    outputs = {t.name for t in program.outputs}
    return any(
        s.dim == stage.dim and s.kind == "walk" and s.tensors[0] not in outputs
        for s in program.stages
    )


def _outputs_along(program: Program, stage: Stage) -> list[Stage]:
    outputs = {t.name for t in program.outputs}
    return [
        s
        for s in program.stages
        if s.kind == "walk" and s.dim == stage.dim and s.tensors[0] in outputs
    ]


def _partner(program: Program, index: int) -> int | None:
    """The other stage of a skewed pair."""
    stage = program.stages[index]
    if "skewed" not in stage.options:
        return None
    for i, other in enumerate(program.stages):
        if i != index and "skewed" in other.options and other.axis == stage.axis:
            return i
    return None


def _piece(program: Program, stage: Stage, partner: Stage | None) -> Gather | Walk:
    if stage.kind == "walk":
        ahead = next((int(o.split()[1]) for o in stage.options if o.startswith("prefetch")), 1)
        return Walk(
            stage.dim,
            direct="direct" in stage.options,
            reverse="reverse" in stage.options,
            both="both" in stage.options,
            ahead=ahead,
            skew=partner.dim if partner else None,
        )
    tensor = program.tensor(stage.tensors[0])
    order = Atoms(program).order(tensor, stage.axis)
    before = program.stages[: program.stages.index(stage)]
    done = {s.dim for s in before if s.kind == "gather" and tensor.name in s.tensors}
    split = {d for d in order.dims if program.stored(tensor, d) == stage.axis}
    whole = [d for d in order.dims if d in done or d not in split]
    join = interleaving(order, program.mesh, stage.dim, whole)
    broadcast = any(stage.axis in loop.axes for loop in program.tiles)
    return Gather(stage.dim, join, broadcast)


def _reduces(program: Program) -> tuple[Reduce, ...]:
    """Partial results that are not sent home by a loop, innermost dimension first."""
    found = []
    for dim in reversed(program.mesh.names):
        for combine in program.combines:
            first = program.tensor(combine.outputs[0])
            scatter = _scatter(program, first.name, dim)
            if scatter is not None:
                order = Atoms(program).order(first, scatter.axis)
                scattered = {d for d in order.dims if _scatter(program, first.name, d)}
                left = scattered - {r.dim for r in found if first.name in r.tensors}
                whole = [
                    d for d in order.dims if d in left or program.stored(first, d) != scatter.axis
                ]
                join = interleaving(order, program.mesh, dim, whole)
                found.append(
                    Reduce(combine.outputs, combine.kind, dim, scatter.axis, join, scatter.dtype)
                )
            elif (first.name, dim) in program.replicated:
                lower_to = {(t, d): x for t, d, x in program.reduce_dtype}
                dtype = lower_to.get((first.name, dim))
                found.append(Reduce(combine.outputs, combine.kind, dim, None, None, dtype))
    return tuple(found)


def _scatter(program: Program, name: str, dim: str) -> Stage | None:
    for stage in program.stages:
        if stage.kind == "scatter" and stage.dim == dim and name in stage.tensors:
            return stage
    return None
