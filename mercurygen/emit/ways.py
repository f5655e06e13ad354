"""Emitted text of how partial results become complete: their way home, and reductions."""

from __future__ import annotations

from mercurygen.emit import rings
from mercurygen.emit.border import is_striped, runs, runs_name, steps
from mercurygen.emit.levels import PAIR, Names, with_owner
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Plan, Reduce, Swap

_CARRIED = {
    "pair": PAIR,
    "of": "(out, lse) of every rank's queries",
    "whose": "its queries",
    "merge": "_merge(*share, *arriving)",
}


def ways_home(names: Names) -> list[str]:
    """Functions that bring results to the owners of their queries."""
    plan = names.plan
    loops = [loop for loop in plan.nest.loops if loop.outputs]
    texts = []
    if any(not loop.tensors for loop in loops):
        relayed = any(loop.home == "relayed" for loop in loops if not loop.tensors)
        owner = with_owner(plan)
        texts.append(
            render(
                "by_owner",
                relayed=relayed,
                owner=owner,
                yields="tuple[int, Tensor]" if owner else "Tensor",
                what="(owner, queries)" if owner else "the queries",
            )
        )
    shares = "list[Tensor]" if names.trimmed else "tuple[Tensor, ...]" if names.blank else PAIR
    for home in dict.fromkeys(loop.home for loop in loops):
        if home == "direct":
            texts += _to_owners(names, shares)
        else:
            alone = any(not loop.tensors for loop in loops if loop.home == "relayed")
            both = rings.carries_both_ways(plan)
            first, *_ = (loop for loop in loops if loop.home == "relayed")
            on = ", on" if both else rings.way_argument(plan, first.walks[-1].reverse)
            values = {"on": on, "parameter": ", on: int" if both else "", **_CARRIED}
            texts.append(render("carry", alone=alone, raw=names.rounded, **values))
    if names.rounded and loops:
        dense = "list[Tensor]" if names.trimmed else "tuple[Tensor, ...]"
        values = {"share_type": shares, "dense_type": dense, "trimmed": names.trimmed}
        texts.append(render("dense", **values))
    return texts


def _to_owners(names: Names, shares: str) -> list[str]:
    """Straight to the owners."""
    loop = next(loop for loop in names.plan.nest.loops if loop.home == "direct")
    dim = loop.walks[-1].dim
    rows, cols = names.program.mask_axes
    part, less = "tuple[Tensor, ...]", names.trimmed or names.blank
    values = {
        "trimmed": names.trimmed,
        "some": names.blank,
        "less": less,
        "raw": names.rounded,
        "share_type": shares,
        "arriving_type": f"tuple[slice, {part}]" if names.trimmed else part,
        "sends_type": shares if names.trimmed else part,
        "recvs_type": "Iterable[Tensor]" if less else part,
        "beside": "".join(f", {variable(each)}: dist.ProcessGroup" for each in beside_home(names)),
        "mine": names.chunks(rows, **{dim: "me"}),
        "theirs": names.chunks(cols, **{dim: "peer"}),
    }
    return [render("to_owners", **values), render("transfer", **values)]


def beside_home(names: Names) -> list[str]:
    """The other dimensions of whose ranks it depends what goes straight to the owners."""
    if not (names.trimmed or names.blank):
        return []
    home = next(loop for loop in names.plan.nest.loops if loop.home == "direct").walks[-1].dim
    return [dim for dim in names.own_places() if dim != home]


def reductions(plan: Plan) -> list[str]:
    """Functions that merge what all ranks of a dimension have."""
    texts, name = [], runs_dealt(plan)
    kinds = dict.fromkeys(reduce.axis is None for reduce in plan.nest.reduces)
    for everywhere in kinds:
        if everywhere:
            texts.append(render("all_reduce", causal=plan.program.mask != "full"))
            continue
        values = {
            "parameter": f", {name}: int" if name else "",
            "argument": f", {name}" if name else "",
        }
        texts += [render("scatter", **values), deal(plan)]
        if not any(isinstance(step, Swap) for step in steps(plan)):  # else the border has it
            texts.append(render("all_to_all"))
    return texts


def deal(plan: Plan) -> str:
    """`_deal`: what each rank of a group owns of a tensor."""
    name, zigzag, striped = runs_dealt(plan), plan.program.order.halves == 2, is_striped(plan)
    return render(
        "deal",
        striped=striped,
        zigzag_runs=zigzag and name,
        zigzag=zigzag,
        runs=name,
        copies=(zigzag or name) and not striped,
        parameter=f", {name}: int" if name else "",
    )


def runs_dealt(plan: Plan) -> str:
    """What the functions that deal results call the runs of what slower dimensions have here, or,
    where tokens are dealt one by one, how many stay together; "" if they need no such number."""
    joins = [reduce.join for reduce in plan.nest.reduces if reduce.join]
    return runs_name(plan) if any(runs(plan, join) > 1 for join in joins) else ""


def runs_of(plan: Plan, reduce: Reduce) -> str:
    """`, 2`: that number of a reduction, where its functions take it."""
    return f", {runs(plan, reduce.join)}" if reduce.join and runs_dealt(plan) else ""
