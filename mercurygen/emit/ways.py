"""Emitted text of how partial results become complete: their way home, and reductions."""

from __future__ import annotations

from mercurygen.emit import rings
from mercurygen.emit.levels import PAIR, Names, with_owner
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Plan

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
    texts, outer = [], reduce_outer(plan)
    kinds = dict.fromkeys(reduce.axis is None for reduce in plan.nest.reduces)
    for everywhere in kinds:
        if everywhere:
            texts.append(render("all_reduce", causal=plan.program.mask != "full"))
            continue
        values = {
            "parameter": ", outer: int" if outer else "",
            "argument": ", outer" if outer else "",
        }
        texts += [render("scatter", **values), deal(plan)]
        if not plan.before:  # else the border has it
            texts.append(render("all_to_all"))
    return texts


def deal(plan: Plan) -> str:
    """`_deal`: what each rank of a group owns of a tensor."""
    outer, zigzag = reduce_outer(plan), plan.program.order.halves == 2
    return render(
        "deal",
        zigzag_runs=zigzag and outer,
        zigzag=zigzag,
        runs=outer,
        copies=zigzag or outer,
        parameter=", outer: int" if outer else "",
    )


def reduce_outer(plan: Plan) -> bool:
    """Whether a reduction deals tokens of slower dimensions that are here."""
    return any(reduce.join and reduce.join.outer > 1 for reduce in plan.nest.reduces)
