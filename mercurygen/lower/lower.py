"""From a complete program to its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mercurygen.errors import Refusal
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.layout import Interleaving, interleaving
from mercurygen.ir.program import SEQUENCE, BorderStep, Program, Stage, Tensor
from mercurygen.lower import packed
from mercurygen.lower.begin import begin, misaligned
from mercurygen.lower.plan import Gather, Loop, Nest, Plan, Reduce, Spread, Swap, Walk
from mercurygen.lower.reach import shortened


def lower(program: Program) -> Plan | Refusal:
    """The plan of a complete program, or why the kernel cannot do it."""
    plan = lower_aligned(program)
    return plan if isinstance(plan, Refusal) else misaligned(plan) or plan


def lower_aligned(program: Program) -> Plan | Refusal:
    """The plan of a program whose tiles lie in one piece: that is not looked at."""
    loops = shortened(program, _loops(program))
    how = packed.refuse(program, loops) or begin(program, loops)
    if isinstance(how, Refusal):
        return how
    before, after = _around(program)
    return Plan(program, before, Nest(loops, how, _reduces(program)), after, program.tiles)


# --- border ---------------------------------------------------------------------------------


def _around(program: Program) -> tuple[tuple[Swap | Spread, ...], tuple[Swap | Spread, ...]]:
    """The border before and after the nest; programs of one layout share it."""
    key = "border", program.layout
    found = program.shared.get(key)
    if found is None:
        after: list[Swap | Spread] = []
        for tensor in program.outputs:  # what is only merged by is handed out if asked for
            after += _border(program, (tensor.name,), tensor.name in program.optional)
        names = tuple(t.name for t in (*program.inputs, *program.derived))
        found = program.shared[key] = (_border(program, names, False), tuple(after))
    return found


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
    before, order = steps[: steps.index(step)], atoms_of(program).order(tensor, axis)
    is_output = tensor.role == "output"
    now = {
        dim: program.stored(tensor, dim) if is_output else program.pinned(tensor, dim)
        for dim in program.mesh.names
    }
    now |= {s.dim: s.target for s in before}
    whole = [dim for dim in order.dims if now[dim] != axis and dim != step.dim]
    return interleaving(order, program.mesh, step.dim, whole)


# --- nest -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """A loop that is not complete yet.

    Attributes:
        tensors: that come by.
        axis: along which they are stored split.
        stages: so far, each with the dimensions over which the tensors are gathered before it.
        outputs: whose results go home with it.
        home: how.
        partner: the other stage of a skewed pair.
    """

    tensors: tuple[str, ...]
    axis: str
    stages: tuple[tuple[Stage, tuple[str, ...]], ...]
    outputs: tuple[str, ...] = ()
    home: str | None = None
    partner: Stage | None = None

    @property
    def walks(self) -> bool:
        """Whether its tiles come by one after the other."""
        return any(stage.kind == "walk" for stage, _ in self.stages)


def _loops(program: Program) -> tuple[Loop, ...]:
    """The stages as loops: a run of stages of the same tensors, cut where outputs leave."""
    outputs = program.output_names
    homes: dict[str, list[Stage]] = {}  # output walks, per dimension
    walked = set()  # dimensions of the others
    for stage in program.stages:
        if stage.kind == "walk":
            if stage.tensors[0] in outputs:
                homes.setdefault(stage.dim, []).append(stage)
            else:
                walked.add(stage.dim)
    drafts: list[_Draft] = []
    gathered: dict[str, tuple[str, ...]] = {}  # per tensor, over which dimensions so far
    gone: set[Stage] = set()
    for stage in program.stages:
        first = stage.tensors[0]
        if stage in gone or stage.kind == "scatter":
            continue
        if first in outputs:
            if stage.dim not in walked:  # they move although no input does
                alone = _Draft((), stage.axis, ((stage, ()),), stage.tensors, _way_home(stage))
                drafts.append(alone)
            continue
        partner = _partner(program, stage) if stage.options else None
        if partner:
            gone.add(partner)
        at = _open(drafts, stage) if drafts and not partner else None
        if at is None:
            at = len(drafts)
            drafts.append(_Draft(stage.tensors, stage.axis, (), partner=partner))
        draft = drafts[at]
        draft.stages = (*draft.stages, (stage, gathered.get(first, ())))
        if stage.kind == "gather":
            gathered |= {name: (*gathered.get(name, ()), stage.dim) for name in stage.tensors}
        elif stage.dim in homes:
            going = {name for home in homes[stage.dim] for name in home.tensors}
            draft.outputs = tuple(t.name for t in program.outputs if t.name in going)
            draft.home = _way_home(homes[stage.dim][0])
    loops = [_loop(program, draft) for draft in drafts]
    if len(loops) > 1:
        names = [t.name for t in program.tensors]
        loops = _fused(loops)
        loops.sort(key=lambda x: len(names) if x.walks else names.index(x.tensors[0]))  # stable
    return tuple(loops)


def _way_home(stage: Stage) -> str:
    return "direct" if "direct" in stage.options else "relayed"


def _open(drafts: list[_Draft], stage: Stage) -> int | None:
    """The loop that one more stage of the same tensors goes on with.

    Gathers outside of the tensors' own walks are done once: another's walk parts the two.
    """
    for at in reversed(range(len(drafts))):
        draft = drafts[at]
        goes_on = stage.kind == "gather" or not draft.outputs
        if draft.tensors == stage.tensors and goes_on and not draft.partner:
            others = drafts if not draft.walks else drafts[at + 1 :]
            apart = stage.kind == "walk" and any(each.walks for each in others)
            return None if apart else at
    return None


def _loop(program: Program, draft: _Draft) -> Loop:
    """The loop of a draft; programs of one layout share it."""
    whole = draft.tensors, draft.stages, draft.outputs, draft.home, draft.partner
    key = "loop", program.layout, whole
    found = program.shared.get(key)
    if found is None:
        partner = draft.partner
        pieces = tuple(_piece(program, *each, partner) for each in draft.stages)
        found = program.shared[key] = Loop(
            draft.tensors,
            draft.axis,
            pieces,
            outputs=draft.outputs,
            home=draft.home,
            partner=(partner.tensors, partner.axis) if partner else None,
        )
    return found


def _fused(loops: list[Loop]) -> list[Loop]:
    """Loops along one and the same walk as one: their tensors come by in step."""
    fused: list[Loop] = []
    for loop in _led_alike(loops):
        same = next((i for i, each in enumerate(fused) if _in_step(each, loop)), None)
        if same is None:
            fused.append(loop)
            continue
        old = fused[same]
        tensors = (*old.tensors, *loop.tensors)
        fused[same] = replace(old, tensors=tensors, outputs=old.outputs or loop.outputs)
    return fused


def _led_alike(loops: list[Loop]) -> list[Loop]:
    """Loops whose walks are one another's, after gathers that are not, begin with the walks."""
    found: list[Loop] = []
    for loop in loops:
        others = (x for x in loops if (x.axis, x.walking) == (loop.axis, loop.walking))
        if loop.walks and loop.leading and any(x.leading != loop.leading for x in others):
            found.append(Loop(loop.tensors, loop.axis, loop.leading))
            loop = replace(loop, stages=loop.walking)
        found.append(loop)
    return found


def _in_step(one: Loop, other: Loop) -> bool:
    return one.axis == other.axis and bool(one.walks) and one.stages == other.stages


def _partner(program: Program, stage: Stage) -> Stage | None:
    """The other stage of a skewed pair."""
    if "skewed" not in stage.options:
        return None
    for other in program.stages:
        if other is not stage and "skewed" in other.options and other.axis == stage.axis:
            return other
    return None


def _piece(
    program: Program, stage: Stage, gathered: tuple[str, ...], partner: Stage | None
) -> Gather | Walk:
    """A stage of what is gathered over some dimensions before."""
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
    order = atoms_of(program).order(tensor, stage.axis)
    split = {d for d in order.dims if program.stored(tensor, d) == stage.axis}
    whole = [d for d in order.dims if d in gathered or d not in split]
    join = interleaving(order, program.mesh, stage.dim, whole)
    broadcast = any(stage.axis in loop.axes for loop in program.tiles)
    return Gather(stage.dim, join, broadcast)


def _reduces(program: Program) -> tuple[Reduce, ...]:
    """Partial results that are not sent home by a loop; programs of one layout share them."""
    scatters = tuple([stage for stage in program.stages if stage.kind == "scatter"])
    if not scatters and not program.replicated:
        return ()
    key = "reduces", program.layout, scatters, program.replicated, program.reduce_dtype
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = _reduced(program)
    return found


def _reduced(program: Program) -> tuple[Reduce, ...]:
    """All reductions, innermost dimension first."""
    found = []
    for dim in reversed(program.mesh.names):
        for combine in program.combines:
            first = program.tensor(combine.outputs[0])
            scatter = _scatter(program, first.name, dim)
            if scatter is not None:
                order = atoms_of(program).order(first, scatter.axis)
                scattered = {d for d in order.dims if _scatter(program, first.name, d)}
                left = scattered - {r.dim for r in found if first.name in r.tensors}
                whole = [
                    d for d in order.dims if d in left or program.stored(first, d) != scatter.axis
                ]
                join = interleaving(order, program.mesh, dim, whole)
                found.append(_reduce(program, combine, dim, scatter.axis, join, scatter.dtype))
            elif (first.name, dim) in program.replicated:
                lower_to = {(t, d): x for t, d, x in program.reduce_dtype}
                dtype = lower_to.get((first.name, dim))
                found.append(_reduce(program, combine, dim, None, None, dtype))
    return tuple(found)


def _scatter(program: Program, name: str, dim: str) -> Stage | None:
    for stage in program.stages:
        if stage.kind == "scatter" and stage.dim == dim and name in stage.tensors:
            return stage
    return None


def _reduce(program, combine, dim, axis, join, dtype) -> Reduce:
    return Reduce(combine.outputs, combine.kind, dim, axis, join, dtype)
