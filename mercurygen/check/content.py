"""What a buffer holds, symbolically, and what copies make of it.

A content is chunks of the sequence and chunks of the heads, each list in storage order. Of an
output it also knows what has been merged into it: `seen[h][i]` has the bit of every column chunk
whose share is in the cell of head h and row i. Equal rows of cells are one object, so that cost
follows what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from mercurygen.ir.layout import Interleaving

Cells = tuple[int, ...]


class Unknown(Exception):
    """A copy that makes no sense of what its source holds; the message says why."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one buffer holds.

    Attributes:
        tensor: whose data.
        chunks: of the sequence, in storage order.
        heads: chunks of the heads, in storage order.
        seen: of an output, per head and chunk the columns merged into it; None of an input.
    """

    tensor: str
    chunks: tuple[int, ...]
    heads: tuple[int, ...]
    seen: tuple[Cells, ...] | None = None

    @property
    def cells(self) -> int:
        """Number of (chunk, head chunk) pairs."""
        return len(self.chunks) * len(self.heads)

    def __str__(self) -> str:
        return f"{self.tensor} (chunks {brief(self.chunks)}; heads {brief(self.heads)})"


@dataclass(frozen=True, slots=True)
class Parts:
    """A buffer with one content for (or from) every rank along a dimension."""

    parts: tuple[Content, ...]

    def __str__(self) -> str:
        return f"{len(self.parts)} parts of {self.parts[0].tensor}"


@dataclass(frozen=True, slots=True)
class Blank:
    """An output that nothing has been merged into; its rows are not known yet."""

    tensor: str

    def __str__(self) -> str:
        return f"{self.tensor}, filled, with nothing merged into it"


Holding = Content | Parts | Blank | None


def brief(numbers: Sequence[int]) -> str:
    """Some numbers, not too many."""
    words = [str(n) for n in numbers]
    return ", ".join(words if len(words) <= 8 else [*words[:3], "…", *words[-3:]])


@lru_cache(maxsize=4096)
def positions(length: int, join: Interleaving) -> tuple[tuple[int, ...], ...]:
    """Per rank, where the runs of its list lie in a joined list of `length`, run by run."""
    order = join.pieces()
    size, rest = divmod(length, len(order))
    if rest or not size:
        raise Unknown(f"{length} chunks cannot be dealt in {len(order)} pieces")
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(join.n)]
    for place, (rank, run) in enumerate(order):
        found[rank][run] = tuple(range(place * size, (place + 1) * size))
    return tuple(tuple(chain(*(runs[run] for run in sorted(runs)))) for runs in found)


def pack(content: Holding, by: str, join: Interleaving) -> Parts:
    """One part for every rank along a dimension: by heads, or by the tokens that it owns."""
    whole = _single(content)
    if by == "heads":
        size, rest = divmod(len(whole.heads), join.n)
        if rest or not size:
            raise Unknown(f"{len(whole.heads)} head chunks cannot be split {join.n} ways")
        return Parts(
            tuple(_heads(whole, i * size, (i + 1) * size) for i in range(join.n)),
        )
    return Parts(tuple(_take(whole, at) for at in positions(len(whole.chunks), join)))


def unpack(holding: Holding, by: str, join: Interleaving) -> Content:
    """The parts from the ranks as one: tokens interleaved, or heads in a row."""
    if not isinstance(holding, Parts):
        raise Unknown(f"the source holds {holding or 'nothing'}, not one part from each rank")
    parts = holding.parts
    if len(parts) != join.n:
        raise Unknown(f"{len(parts)} parts are joined as if there were {join.n}")
    names = {part.tensor for part in parts}
    if len(names) > 1:
        raise Unknown("parts of different tensors: " + ", ".join(sorted(names)))
    return _join_heads(parts) if by == "heads" else _join_chunks(parts, join)


def _join_heads(parts: tuple[Content, ...]) -> Content:
    first = parts[0]
    for part in parts:
        if part.chunks != first.chunks:
            raise Unknown(f"heads of different tokens in a row: {first} and {part}")
    seen = None if first.seen is None else tuple(chain(*(part.seen for part in parts)))
    return Content(first.tensor, first.chunks, tuple(chain(*(p.heads for p in parts))), seen)


def _join_chunks(parts: tuple[Content, ...], join: Interleaving) -> Content:
    first = parts[0]
    for part in parts:
        if part.heads != first.heads:
            raise Unknown(f"tokens of different heads interleaved: {first} and {part}")
        if len(part.chunks) != len(first.chunks):
            raise Unknown(f"parts of different lengths: {first} and {part}")
    source = _sources(len(first.chunks) * join.n, join)

    def joined(lists: Sequence[Cells]) -> Cells:
        """One list of the ranks' lists."""
        return tuple(lists[rank][index] for rank, index in source)

    chunks, seen = joined([part.chunks for part in parts]), None
    if first.seen is not None:
        seen = tuple(joined([p.seen[h] for p in parts]) for h in range(len(first.heads)))
    return Content(first.tensor, chunks, first.heads, seen)


@lru_cache(maxsize=4096)
def _sources(length: int, join: Interleaving) -> tuple[tuple[int, int], ...]:
    """Per place of the joined list: whose list it comes from, and from where in it."""
    found = {
        place: (rank, index)
        for rank, places in enumerate(positions(length, join))
        for index, place in enumerate(places)
    }
    return tuple(found[place] for place in range(length))


def _single(holding: Holding) -> Content:
    if isinstance(holding, Content):
        return holding
    raise Unknown(f"the source holds {holding or 'nothing'}, not one tensor")


def _heads(content: Content, start: int, stop: int) -> Content:
    seen = None if content.seen is None else content.seen[start:stop]
    return replace(content, heads=content.heads[start:stop], seen=seen)


def _take(content: Content, at: tuple[int, ...]) -> Content:
    """The chunks at some positions."""
    chunks, seen = tuple(content.chunks[i] for i in at), None
    if content.seen is not None:
        taken = {id(row): tuple(row[i] for i in at) for row in content.seen}
        seen = tuple(taken[id(row)] for row in content.seen)
    return replace(content, chunks=chunks, seen=seen)
