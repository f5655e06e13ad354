"""Emitted text of the border: reshards between what the caller holds and what the body works on."""

from __future__ import annotations

from math import lcm, prod

from mercurygen.emit import outside, swaps
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.program import SEQUENCE
from mercurygen.lower.plan import Gather, Plan, Spread, Swap

Step = Swap | Spread
NAMES = {"H": "heads", "G": "query_heads", "B": "batch"}  # what is split, as functions are named
_SIDES = {"H": swaps.HEADS, "G": swaps.QUERY_HEADS, "B": swaps.BATCH, SEQUENCE: swaps.SEQUENCE}
_IN_RUNS = {"H": swaps.HEAD_RUNS, "B": swaps.BATCH_RUNS}


def steps(plan: Plan) -> tuple[Step, ...]:
    """All reshards, before and after."""
    return (*plan.before, *plan.after)


def joins(plan: Plan) -> tuple[Interleaving, ...]:
    """Every interleaving of the sequence that the plan uses, in order of use."""
    found = [join for step in plan.before for join in _of_sequence(step)]
    found += [join for step in plan.after for join in _of_sequence(step)]
    return (*found, *(s.join for s in plan.nest.stages if isinstance(s, Gather)))


def _of_sequence(step: Step) -> list[Interleaving]:
    """How a reshard joins or deals the sequence, if it does."""
    if isinstance(step, Spread):
        return [step.join] if step.axis == SEQUENCE else []
    named = ((step.gathered, step.join), (step.split, step.deal))
    return [join for axis, join in named if axis == SEQUENCE]


def is_striped(plan: Plan) -> bool:
    """Whether tokens are dealt one by one."""
    return plan.program.order.kind == "striped"


def runs(plan: Plan, join: Interleaving) -> int:
    """Runs of a slice, or, where tokens are dealt one by one, how many of them stay together."""
    return join.inner if is_striped(plan) else join.outer


def needs_runs(plan: Plan) -> bool:
    """Whether tokens of other dimensions are held already when some join."""
    return any(runs(plan, join) > 1 for join in joins(plan))


def runs_name(plan: Plan) -> str:
    """What the module's functions call that number."""
    return "inner" if is_striped(plan) else "outer"


def runs_argument(plan: Plan, join: Interleaving) -> str:
    """`, 2` where the module's functions take that number, else nothing."""
    return f", {runs(plan, join)}" if needs_runs(plan) else ""


def dealt_axis(swap: Swap) -> str:
    """What a swap exchanges with the sequence: H, G or B."""
    return swap.split if swap.split in NAMES else swap.gathered


def heads_before(plan: Plan, dim: str) -> int:
    """Ways in which key/value heads are split already where a dimension is dealt."""
    mesh = plan.program.mesh
    outer = mesh.names[: mesh.names.index(dim)]
    return prod(mesh.extent(d) for d in outer if plan.program.parallel_axis(d) == "H")


def sides(step: Step) -> tuple[swaps.Side, ...]:
    """What a reshard joins, then what it deals."""
    if isinstance(step, Spread):
        return (_side(step.axis, step.join),)
    return _side(step.gathered, step.join), _side(step.split, step.deal)


def _side(axis: str, join: Interleaving) -> swaps.Side:
    return _IN_RUNS[axis] if axis in _IN_RUNS and join.outer > 1 else _SIDES[axis]


def function_name(step: Step) -> str:
    """`_sequence_to_heads`, `_all_heads`, `_own_heads`."""
    names = [side.name for side in sides(step)]
    if isinstance(step, Swap):
        return f"_{'_to_'.join(names)}"
    return f"_{'all' if step.gathers else 'own'}_{names[0]}"


def arguments(plan: Plan, step: Step, tensor: str) -> str:
    """What a reshard's function is given of a tensor, beside it."""
    given = [variable(step.dim)]
    cut = isinstance(step, Spread) and not step.gathers  # of a sequence always one run
    joined = [] if cut else _of_sequence(step)
    given += [str(runs(plan, join)) for join in joined if needs_runs(plan)]
    joined = (step.join,) if isinstance(step, Spread) else (step.join, step.deal)
    for side, join in zip(sides(step), joined, strict=True):
        if side.count:
            own = side is swaps.QUERY_HEADS
            given.append(_kv_heads(plan, step, tensor) if own else str(join.outer))
    return ", ".join(given)


def _kv_heads(plan: Plan, step: Step, tensor: str) -> str:
    """Key/value heads of which a tensor has the query heads at a step, by those of k then."""
    ours = _ways(plan, tensor, step, "H")
    theirs = _ways(plan, "k", step, "H")
    if ours == theirs:
        return "k.shape[2]"
    if theirs % ours == 0:
        return f"k.shape[2] * {theirs // ours}"
    more = f"k.shape[2] * {theirs}" if theirs > 1 else "k.shape[2]"
    return f"{more} // {ours}"


def _ways(plan: Plan, name: str, step: Step | None, axis: str) -> int:
    """In how many ways a tensor is split along an axis when a step begins; None: at the end."""
    now = _now(plan, name, step)
    return prod(plan.program.mesh.extent(dim) for dim, along in now.items() if along == axis)


def _now(plan: Plan, name: str, step: Step | None) -> dict[str, str | None]:
    """The axis by which every dimension has a tensor split when a step begins."""
    program = plan.program
    tensor = program.tensor(name)
    held = program.storage(tensor) if tensor.role == "output" else tensor.pin
    now = dict(zip(program.mesh.names, held, strict=True))
    for each in steps(plan):
        if each == step:
            break
        if name in each.tensors:
            now[each.dim] = each.split if isinstance(each, Swap) else each.axis
            if isinstance(each, Spread) and each.gathers:
                now[each.dim] = None
    return now


def nbytes(plan: Plan, step: Step, name: str) -> int:
    """Bytes that a rank has of a tensor when a step begins."""
    return plan.nbytes(name, tuple(dim for dim, along in _now(plan, name, step).items() if along))


def splits(plan: Plan, axis: str) -> int:
    """A multiple of the ways in which the border has any tensor split along an axis."""
    names = [tensor.name for tensor in plan.program.tensors]
    return lcm(*(_ways(plan, name, step, axis) for step in (*steps(plan), None) for name in names))


def before(plan: Plan) -> list[str]:
    """Lines of the public function before the body."""
    lines = []
    for step in plan.before:
        lines += into_part(plan, step, step.tensors)
    return lines


def into_part(plan: Plan, step: Step, tensors: tuple[str, ...]) -> list[str]:
    """The line that reshards some tensors."""
    if not tensors:
        return []
    call = function_name(step)
    given = [arguments(plan, step, name) for name in tensors]
    if len(tensors) == 1 or len(set(given)) > 1:
        return [f"{x} = {call}({x}, {more})" for x, more in zip(tensors, given, strict=True)]
    names = ", ".join(tensors)
    return [f"{names} = ({call}(x, {given[0]}) for x in ({names}))"]


def after(plan: Plan, layout: str) -> list[str]:
    """Lines of the public function after the body; layout: of the caller's tensors."""
    lines, lse = home(plan)
    lines += outside.back(layout)
    if not lse:
        return [*lines, f"return (out, {outside.lse(layout)}) if return_lse else out"]
    lines += ["if return_lse:", *(f"    {line}" for line in lse)]
    turned = outside.lse(layout).replace("lse", "lse.squeeze(3).transpose(1, 2)")
    return [*lines, f"    return out, {turned}", "return out"]


def home(plan: Plan) -> tuple[list[str], list[str]]:
    """Lines that take out to the caller's layout; and those for lse, which they leave 4-dim."""
    lines, lse = [], []
    for step in plan.after:
        call, given = from_part(plan, step)
        if not step.optional:
            lines.append(f"out = {call}(out, {given})")
        else:
            lse.append(f"lse = {call}(lse, {given})")
    if lse:
        rows, step = "lse.transpose(1, 2).unsqueeze(3)", next(s for s in plan.after if s.optional)
        if isinstance(step, Spread) and step.gathers:
            lse[:0] = [f"lse = {rows}  # [B, S, H, 1]", f"lse = lse.{swaps.COPY}"]
        else:
            lse[0] = f"{lse[0].replace('(lse, ', f'({rows}, ')}  # [B, S, H, 1]"
    return lines, lse


def from_part(plan: Plan, step: Step) -> tuple[str, str]:
    """The function of a reshard of a result; and its arguments."""
    return function_name(step), arguments(plan, step, step.tensors[0])


def variant(plan: Plan) -> str:
    """Which of the fixed texts fits the order and what joins."""
    order = plan.program.order.kind
    return f"{order}_runs" if needs_runs(plan) else order


def join_function(plan: Plan) -> str:
    """`_join`: slices from the ranks of a group into global order."""
    return render(f"join_{variant(plan)}")


def tokens(plan: Plan) -> swaps.Tokens:
    """How the module's functions deal and join the sequence."""
    count = runs_name(plan) if needs_runs(plan) else ""
    return swaps.Tokens(variant(plan) != "contiguous", in_runs(plan), count)


def in_runs(plan: Plan) -> bool:
    """Whether `_split` gives runs of tokens, as [n, runs, ...], not slices, as [n, ...]."""
    return variant(plan) != "contiguous" and not is_striped(plan)


def split_function(plan: Plan) -> list[str]:
    """`_split`, where what a rank owns is no one run of tokens."""
    texts = variant(plan) != "contiguous"
    return [render(f"split_{variant(plan)}")] if texts else []


def swap_functions(plan: Plan) -> list[str]:
    """The functions of all reshards, each beside its reverse, and what they call."""
    texts: dict[str, str] = {}
    made = {function_name(step): step for step in steps(plan)}
    for name, step in made.items():
        if name in texts:
            continue
        texts[name] = function(plan, step)
        back = next((n for n, s in made.items() if n != name and _is_reverse(s, step)), None)
        if back and back not in texts:
            texts[back] = function(plan, made[back], reverse=True)
    found = list(texts.values())
    code = "\n".join(found)
    found += split_function(plan) if "_split(" in code else []
    return [*found, *([render("all_to_all")] if "_all_to_all(" in code else [])]


def both_ways(plan: Plan, axis: str) -> tuple[str, str]:
    """The functions that exchange the sequence with an axis, and back."""
    pair = swaps.SEQUENCE, _SIDES[axis]
    return swaps.swap(*pair, tokens(plan)), swaps.swap(*pair[::-1], tokens(plan), reverse=True)


def _is_reverse(one: Step, other: Step) -> bool:
    return isinstance(one, Swap) and isinstance(other, Swap) and sides(one) == sides(other)[::-1]


def function(plan: Plan, step: Step, reverse: bool = False) -> str:
    """The function of a reshard; reverse: of one that stands before it."""
    if isinstance(step, Swap):
        return swaps.swap(*sides(step), tokens(plan), reverse)
    (side,) = sides(step)
    if step.gathers:
        return swaps.gather(side, tokens(plan))
    return swaps.own(side)


def plain(plan: Plan) -> bool:
    """Whether the border only exchanges the sequence with other axes."""
    return all(
        isinstance(step, Swap) and SEQUENCE in (step.gathered, step.split) for step in steps(plan)
    )


def heading(plan: Plan) -> str:
    """What the border does, in a few words."""
    dims = " and ".join(dict.fromkeys(step.dim for step in steps(plan)))
    dims = dims if len(dims) < 50 else "border"
    if not plain(plan):
        return f"{dims}: from what the caller holds to what the body needs, and back"
    axes = dict.fromkeys(map(dealt_axis, steps(plan)))
    dealt = " and ".join(NAMES[axis].replace("_", " ") for axis in axes)
    return f"{dims}: all-to-all between sequence and {dealt}"
