"""What a docstring says where queries and keys are two sequences."""

from __future__ import annotations

from mercurygen.emit import held
from mercurygen.ir.layout import Order
from mercurygen.lower.plan import Plan

_STAND = {
    "bottom-right": (
        "Bottom-right, as flash-attention from 2.1 on: of N queries and M keys query i stands at "
        "key i + M - N, the last at the last. A query that stands before all keys sees none: its "
        "out is 0, its lse -inf, and it has no gradient."
    ),
    "top-left": "Top-left, as torch's is_causal: query i stands at key i.",
}
_RULES = {
    "contiguous": "rank r owns chunk r of the {chunks} of each",
    "zigzag": "rank r owns chunks r and {last} - r of the {chunks} of each",
    "striped": "rank r owns every {ranks}th token of each, from token r on",
}


def holds(plan: Plan) -> str:
    """What the caller has on a rank."""

    def part(what: str, name: str) -> str:
        """All of a sequence, or a slice."""
        return f"{'all' if held.whole(plan.program, name) else 'a slice'} of the {what}"

    back = "all of the output" if held.whole(plan.program, "out") else "its queries' output"
    return (
        f"Every rank holds {part('queries', 'q')} and {part('keys and values', 'k')}, which are a "
        f"sequence of their own, with all heads, and gets back {back}."
    )


def order(dealt: Order, ranks: int) -> str:
    """Who owns which tokens of both sequences."""
    halves = dealt.halves
    rule = _RULES[dealt.kind].format(ranks=ranks, chunks=ranks * halves, last=ranks * halves - 1)
    return f"{dealt.kind.capitalize()}: both sequences are dealt alike; {rule}."


def stands(plan: Plan) -> str:
    """Where queries stand among the keys, if the mask asks."""
    return _STAND.get(plan.program.align, "")


def slices(plan: Plan) -> str:
    """S and T of a rank."""
    slice_ = "its slice of " if plan.program.mesh.dims else ""
    more = [
        f", {letter} all {what}"
        for letter, what, name in (("N", "queries", "q"), ("M", "keys", "k"))
        if held.whole(plan.program, name)
    ]
    return f"S {slice_}the queries, T of the keys{''.join(more)}"


def tokens(plan: Plan, times: int) -> str:
    """`, t = 4 T`: tokens of keys in the body, so many times those of a rank."""
    if plan.program.align is None:
        return ""
    return f", t = {times} T" if times > 1 else ", t = T"
