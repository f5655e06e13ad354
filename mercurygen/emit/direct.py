"""Emitted text of tiles that come straight from their owners, as far as the mask leaves them."""

from __future__ import annotations

from math import prod

from mercurygen.emit import windows
from mercurygen.emit.loops import runs_of_chunk, walked
from mercurygen.emit.needed import (
    cut_loop,
    may_be_empty,
    need_form,
    own_are_longer,
    rows_are_cut,
    uneven,
)
from mercurygen.emit.templates import render
from mercurygen.emit.words import letters, variable
from mercurygen.lower.plan import Loop, Plan, Stages, Walk

_NEEDED = {
    "before": '''\
def _needed(reader: PLACE, owner: PLACE, tokens: int) -> int:
    """How many tokens of an owner's tile a reader sees."""
    return tokens if owner < reader else 0  # a later owner's come after all of the reader's''',
    "halves": '''\
def _needed(reader: PLACE, owner: PLACE, tokens: int) -> int:
    """How many tokens of an owner's tile, from the front, a reader sees."""
    return tokens // 2 if owner < reader else tokens  # an earlier one's late run comes later''',
    "after": '''\
def _needed(reader: PLACE, owner: PLACE, tokens: int) -> int:
    """How many rows of an owner's tile see keys of a reader."""
    return tokens if owner > reader else 0  # an earlier owner's come before all of the reader's''',
    "late halves": '''\
def _needed(reader: PLACE, owner: PLACE, tokens: int) -> int:
    """How many rows of an owner's tile, from its end, see keys of a reader."""
    return tokens if owner > reader else tokens // 2  # an earlier one's early run comes earlier''',
    "chunks": '''\
def _needed(rows: list[int], cols: list[int], tokens: int) -> int:
    """How many tokens of a tile, from the front, some rows see; both by numbers of their chunks."""
    return bisect_left(cols, rows[-1] + 1) * tokens // len(cols)''',
}
_NEEDED_ROWS = '''\
def _needed(rows: list[int], cols: list[int], tokens: int) -> int:
    """How many rows of a tile, from its end, see some columns; both by numbers of their chunks."""
    return (len(rows) - bisect_left(rows, cols[0])) * tokens // len(rows)'''


_FRONTS = '''\
def _fronts(into: tuple[Tensor, ...], rows: list[int], cols: list[int]) -> tuple[Tensor, ...]:
    """The fronts of buffers into which goes what some rows see of a tile of these columns."""
    return tuple(_front(x, _needed(rows, cols, x.shape[1])) for x in into)'''


def functions(plan: Plan) -> list[str]:
    """`_fetch`, and what says how much is read."""
    form = need_form(plan)
    if form == "whole":
        return [render("fetch_whole")]
    window = plan.program.banded
    cuts = form not in ("before", "after")  # there all of a tile is read, or nothing
    rows = rows_are_cut(plan)
    fetch = render(
        "fetch",
        more="".join(f", {each}" for each in parameters(plan)) + windows.parameter(plan),
        received=asked(plan, "me", "owner"),
        sent=asked(plan, "reader", "me"),
        leaving="leaving" if cuts else "own",
        cuts=cuts,
        empty=may_be_empty(plan),
        window=window,
    )
    if window:
        return [fetch, *_of_window(plan), render("cut", window=True, rows=False), render("front")]
    place = "tuple[int, ...]" if _places(plan) else "int"
    needed = _NEEDED_ROWS if rows and form == "chunks" else _NEEDED[form].replace("PLACE", place)
    fronts = [_FRONTS] if uneven(plan) else []
    cut = [render("cut", window=False, rows=rows)] if cuts else []
    return [fetch, *cut, *fronts, needed, render("front")]


def _of_window(plan: Plan) -> list[str]:
    """What a window leaves of tiles, and at which steps anybody reads something."""
    whole = tuple(each for each in plan.row_dims if each != walked(plan)[0].dim)
    sign = "+" if walked(plan)[0].reverse else "-"
    found = asked(plan, "me", f"(me {sign} step) % size", tokens="tokens", whole=whole)
    steps = windows.STEPS.format(asked=f"_needed({found})")
    if need_form(plan) == "stripes":
        return [steps, windows.NEEDED_STRIPES]
    return [steps, windows.VISIBLE_HERE, windows.NEEDED]


def parameters(plan: Plan) -> list[str]:
    """What a direct ring must know to say how much of a tile a rank reads."""
    form = need_form(plan)
    if form == "whole":
        return []
    if _listed(plan):
        return ["rows: list[list[int]]", "cols: list[list[int]]"]
    if form == "chunks":
        return [f"{variable(dim)}: dist.ProcessGroup" for dim in beside(plan)]
    if _places(plan):
        return ["ours: tuple[int, ...]", "theirs: tuple[int, ...]"]
    return []


def beside(plan: Plan) -> tuple[str, ...]:
    """Dimensions beside those of the rings along which a place is asked for, where it goes by
    numbers of chunks."""
    loop = cut_loop(plan)
    if loop is None or need_form(plan) != "chunks":
        return ()
    here = {stage.dim for stage in loop.walking}
    split = {dim for axis in plan.program.mask_axes for dim in plan.program.parallel_dims(axis)}
    return tuple(dim for dim in plan.program.order.dims if dim in split - here)


def _listed(plan: Plan) -> bool:
    """Whether rings of a nest are given the chunks of rows and columns that it goes by."""
    loop = cut_loop(plan)
    return loop is not None and need_form(plan) == "chunks" and len(loop.walks) > 1


class Lists:
    """The chunks of rows and columns that a ring of a nest goes by, if it does.

    Attributes:
        names: how `_walk_tiles` calls them, as arguments of the ring.
        rows: a line that makes the rows: per rank of the ring those that read what it receives;
            of a ring that passes fronts on, those that read what this rank receives.
        cols: a line that makes the columns: per rank of the ring those of its tile.
    """

    def __init__(self, plan: Plan, depth: int) -> None:
        self.plan, self.mesh = plan, plan.program.mesh
        self.names, self.rows, self.cols = [], "", ""
        if not _listed(plan):
            return
        self.loop: Loop = cut_loop(plan)
        walks = self.loop.walks
        self.walk = walks[depth]
        self.around = [walk for walk in walks[:depth] if walk.direct]
        passed_on = self.walk.dim in uneven(plan)
        if not (self.walk.direct or passed_on):
            return
        dim = self.walk.dim
        self.names = [f"rows_{dim}", f"cols_{dim}"]
        self.cols = f"{self.names[1]} = {self._per_rank(dim, self._of_tile(depth))}"
        rows = self._received() if passed_on else self._per_rank(dim, self._reading(self.walk, {}))
        self.rows = f"{self.names[0]} = {rows}"
        if passed_on and own_are_longer(plan, dim):
            at = letters(self.mesh.dims)
            self.names[0] += "".join(f"[{at[walk.dim]}]" for walk in self.around)

    def _per_rank(self, dim: str, chunks: str) -> str:
        """A list of something for every rank along a dimension."""
        at = letters(self.mesh.dims)[dim]
        used = at if f"[{at}]" in chunks or f"{at} ==" in chunks else "_"
        return f'[{chunks} for {used} in range(MESH["{dim}"])]'

    def _received(self) -> str:
        """The rows that read what comes: of what is ours along the direct rings around, all."""
        mine = [
            self._reading(walk, {walk.dim: f"[{variable(walk.dim)}.rank()]"})
            for walk in self.around
        ]
        if not own_are_longer(self.plan, self.walk.dim):
            return mine[-1]
        chunks = _chunks_at(self.plan, {})
        for walk, rows in zip(self.around, mine, strict=True):
            at = letters(self.mesh.dims)[walk.dim]
            chunks = f"({chunks})" if " if " in chunks else chunks
            chunks = f"{chunks} if {at} == {variable(walk.dim)}.rank() else {rows}"
        for walk in reversed(self.around):
            chunks = self._per_rank(walk.dim, chunks)
        return chunks

    def _reading(self, walk: Walk, place: dict[str, str]) -> str:
        """The rows that read what a rank of a direct ring receives, on it and further inside."""
        inside = {each.dim for each in _inside(self.loop, walk)}
        at = {d: f"[{variable(d)}.rank()]" for d in self.plan.row_dims if d not in inside}
        if walk.dim in at:
            at[walk.dim] = f"[{letters(self.mesh.dims)[walk.dim]}]"
            at |= place
        return _chunks_at(self.plan, at)

    def _of_tile(self, depth: int) -> str:
        """The columns of a tile that comes by at a depth."""
        walks = self.loop.walks
        inside = [stage.dim for stage in _inside(self.loop, walks[depth], True)]
        own = (*self.plan.program.parallel_dims(self.loop.axis), *inside)
        at = {dim: f"[{variable(dim)}.rank()]" for dim in own}
        at |= {walk.dim: f"[{letters(self.mesh.dims)[walk.dim]}]" for walk in walks[: depth + 1]}
        return _chunks_at(self.plan, at)


def _inside(loop: Loop, walk: Walk, gathers: bool = False) -> Stages:
    """The walks inside one, with the gathers or without."""
    stages = loop.walking
    inner = stages[stages.index(walk) + 1 :]
    return tuple(stage for stage in inner if gathers or isinstance(stage, Walk))


def _chunks_at(plan: Plan, places: dict[str, str]) -> str:
    """The chunks of the ranks at some places; elsewhere of all."""
    at = (places.get(dim, f'range(MESH["{dim}"])') for dim in plan.program.order.dims)
    return f"_chunks({', '.join(at)})"


def _places(plan: Plan) -> bool:
    """Whether an owner is said by its places along several rings, and not by a number."""
    loop = cut_loop(plan)
    return loop is not None and any(walk.direct for walk in loop.walks[1:])


def asked(
    plan: Plan, reader: str, owner: str, tokens: str = "tokens", whole: tuple[str, ...] = ()
) -> str:
    """Arguments of `_needed`.

    Args:
        plan: of the module.
        reader, owner: their places along the ring.
        tokens: of a whole tile.
        whole: dimensions beside the ring of which all ranks' rows are meant.
    """
    if plan.program.banded:
        if need_form(plan) == "stripes":
            return f"{reader}, {owner}, {tokens}, window"
        count = _chunk_count(plan)
        size = f"{tokens}{f' // {count}' if count > 1 else ''}"
        return ", ".join((*_chunks_of(plan, reader, owner, whole), size, "window"))
    if _listed(plan):
        return f"rows[{reader}], cols[{owner}], {tokens}"
    if need_form(plan) != "chunks":
        if _places(plan):
            return f"(*ours, {reader}), (*theirs, {owner}), {tokens}"
        return f"{reader}, {owner}, {tokens}"
    return ", ".join((*_chunks_of(plan, reader, owner, whole), tokens))


def _chunk_count(plan: Plan) -> int:
    """Chunks of a tile that comes by."""
    program, dim = plan.program, walked(plan)[0].dim
    others = prod(program.mesh.extent(each) for each in program.order.dims if each != dim)
    return program.order.halves * others * runs_of_chunk(plan)


def _chunks_of(plan: Plan, reader: str, owner: str, whole: tuple[str, ...]) -> list[str]:
    """The chunks along both axes of the mask of the rank that reads, or owns, the tile."""
    loop, program = cut_loop(plan), plan.program
    place = {axis: owner if axis == loop.axis else reader for axis in program.mask_axes}
    (walk,) = loop.walks

    def held(axis: str) -> str:
        """Those along one axis."""
        split = program.parallel_dims(axis)
        at = {dim: f"[{variable(dim)}.rank()]" for dim in split if dim not in whole}
        if axis == loop.axis or walk.dim in split:  # else every rank along it has all of them
            at[walk.dim] = f"[{place[axis]}]"
        return _chunks_at(plan, at)

    return [held(axis) for axis in program.mask_axes]
