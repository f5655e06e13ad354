"""Emitted text of tiles that come straight from their owners, as far as the mask leaves them."""

from __future__ import annotations

from mercurygen.emit.loops import walked
from mercurygen.emit.needed import need_form
from mercurygen.emit.templates import render
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Plan

_NEEDED = {
    "before": '''\
def _needed(reader: PLACE, owner: PLACE, tokens: int) -> int:
    """How many tokens of an owner's tile a reader sees."""
    return tokens if owner < reader else 0  # a later owner's come after all of the reader's''',
    "halves": '''\
def _needed(reader: PLACE, owner: PLACE, tokens: int) -> int:
    """How many tokens of an owner's tile, from the front, a reader sees."""
    return tokens // 2 if owner < reader else tokens  # an earlier one's late run comes later''',
    "chunks": '''\
def _needed(rows: list[int], cols: list[int], tokens: int) -> int:
    """How many tokens of a tile, from the front, some rows see; both by numbers of their chunks."""
    return bisect_left(cols, rows[-1] + 1) * tokens // len(cols)''',
}


def functions(plan: Plan) -> list[str]:
    """`_fetch`, and what says how much is read."""
    form = need_form(plan)
    if form == "whole":
        return [render("fetch_whole")]
    cuts = form != "before"  # there all of a tile is read, or nothing
    fetch = render(
        "fetch",
        more="".join(f", {each}" for each in parameters(plan)),
        received=_asked(plan, "me", "owner"),
        sent=_asked(plan, "reader", "me"),
        leaving="leaving" if cuts else "own",
        cuts=cuts,
        empty=may_be_empty(plan),
    )
    place = "tuple[int, ...]" if _places(plan) else "int"
    needed = _NEEDED[form].replace("PLACE", place)
    return [fetch, *([render("cut")] if cuts else []), needed, render("front")]


def may_be_empty(plan: Plan) -> bool:
    """Whether nothing at all may be read of a tile."""
    return need_form(plan) in ("before", "chunks")


def parameters(plan: Plan) -> list[str]:
    """What a direct ring must know to say how much of a tile a rank reads."""
    form = need_form(plan)
    if form == "whole":
        return []
    if form == "chunks":
        return [f"{variable(dim)}: dist.ProcessGroup" for dim in beside(plan)]
    if _places(plan):
        return ["ours: tuple[int, ...]", "theirs: tuple[int, ...]"]
    return []


def beside(plan: Plan) -> tuple[str, ...]:
    """Dimensions beside a direct walk that split the rows, where it goes by numbers of chunks."""
    walk, *_ = walked(plan)
    if not walk.direct or need_form(plan) != "chunks":
        return ()
    return tuple(dim for dim in plan.row_dims if dim != walk.dim)


def _places(plan: Plan) -> bool:
    """Whether an owner is said by its places along several rings, and not by a number."""
    return any(walk.direct for walk in walked(plan)[1:])


def _asked(plan: Plan, reader: str, owner: str) -> str:
    """Arguments of `_needed`."""
    if need_form(plan) != "chunks":
        if _places(plan):
            return f"(*ours, {reader}), (*theirs, {owner})"
        return f"{reader}, {owner}"
    dim, program = walked(plan)[0].dim, plan.program

    def held(index: str, mine: tuple[str, ...]) -> str:
        places = [
            (
                f"[{index}]"
                if each == dim
                else f"[{variable(each)}.rank()]" if each in mine else f'range(MESH["{each}"])'
            )
            for each in program.order.dims
        ]
        return f"_chunks({', '.join(places)})"

    return f"{held(reader, beside(plan))}, {held(owner, ())}"
