"""What a buffer holds, symbolically, and what copies make of it.

A content is a part of a tensor: per axis a list of atoms, in storage order. Of an output it also
knows what has been merged into it: `seen` has, for every cell (a combination of atoms, the last
axis varying fastest), the contributions that are in it, as the bits of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from math import prod

from mercurygen.ir.atoms import Region
from mercurygen.ir.layout import Interleaving
from mercurygen.lower.events import Cuts

Cells = tuple[int, ...]


class Unknown(Exception):
    """A copy that makes no sense of what its source holds; the message says why."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one buffer holds.

    Attributes:
        tensor: whose data.
        axes: of the tensor.
        region: per axis its atoms, in storage order.
        seen: of an output, per cell what is merged into it; None of an input.
    """

    tensor: str
    axes: tuple[str, ...]
    region: Region
    seen: Cells | None = None

    @property
    def cells(self) -> int:
        """Number of cells."""
        return prod(map(len, self.region))

    def atoms(self, axis: str) -> tuple[int, ...]:
        """Its atoms along an axis."""
        return self.region[self.axes.index(axis)]

    def __str__(self) -> str:
        cut = (
            f"{axis} {brief(atoms)}"
            for axis, atoms in zip(self.axes, self.region, strict=True)
            if atoms != (0,)
        )
        return f"{self.tensor} ({'; '.join(cut) or 'all of it'})"


@dataclass(frozen=True, slots=True)
class Parts:
    """A buffer with one content for (or from) every rank along a dimension."""

    parts: tuple[Content, ...]

    def __str__(self) -> str:
        return f"{len(self.parts)} parts of {self.parts[0].tensor}"


@dataclass(frozen=True, slots=True)
class Blank:
    """An output that nothing has been merged into; its region is not known yet."""

    tensor: str

    def __str__(self) -> str:
        return f"{self.tensor}, filled, with nothing merged into it"


@dataclass(frozen=True, slots=True)
class Most:
    """The largest lse of some ranks; of one only, before they are reduced."""

    content: Content
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"the largest lse of {len(self.ranks)} ranks"


@dataclass(frozen=True, slots=True)
class Weighed:
    """out and lse in the scale of the largest lse of some ranks, added up over ranks."""

    pair: tuple[Content, Content]
    most: Most
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"weighed partial results of {len(self.ranks)} ranks"


Holding = Content | Parts | Blank | Most | Weighed | None


def brief(numbers: Sequence[int]) -> str:
    """Some numbers, not too many."""
    words = [str(n) for n in numbers]
    return ", ".join(words if len(words) <= 8 else [*words[:3], "…", *words[-3:]])


def single(holding: Holding) -> Content:
    """The one part of a tensor in a buffer."""
    if isinstance(holding, Content):
        return holding
    raise Unknown(f"the source holds {holding or 'nothing'}, not one tensor")


@lru_cache(maxsize=4096)
def positions(length: int, join: Interleaving) -> tuple[tuple[int, ...], ...]:
    """Per rank, where the runs of its list lie in a joined list of `length`, run by run."""
    order = join.pieces()
    size, rest = divmod(length, len(order))
    if rest or not size:
        raise Unknown(f"{length} atoms cannot be dealt in {len(order)} pieces")
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(join.n)]
    for place, (rank, run) in enumerate(order):
        found[rank][run] = tuple(range(place * size, (place + 1) * size))
    return tuple(tuple(chain(*(runs[run] for run in sorted(runs)))) for runs in found)


def run_of(places: tuple[int, ...], part: tuple[int, int]) -> tuple[int, ...]:
    """One of equal runs of a list."""
    index, parts = part
    size, rest = divmod(len(places), parts)
    if rest or not size or not 0 <= index < parts:
        raise Unknown(f"run {index} of {parts} of {len(places)} atoms")
    return places[index * size : (index + 1) * size]


@lru_cache(maxsize=65536)
def _picked(lengths: tuple[int, ...], wanted: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Numbers of the cells at some places along every axis."""
    strides = [prod(lengths[i + 1 :]) for i in range(len(lengths))]
    return tuple(
        sum(place * stride for place, stride in zip(places, strides, strict=True))
        for places in product(*wanted)
    )


def take(content: Content, wanted: tuple[tuple[int, ...], ...]) -> Content:
    """The part at some places along every axis."""
    lengths = tuple(map(len, content.region))
    if wanted == _everything(lengths):
        return content
    region = _at(content.region, wanted)
    seen = content.seen
    if seen is not None:
        seen = tuple([seen[i] for i in _picked(lengths, wanted)])
    return Content(content.tensor, content.axes, region, seen)


@lru_cache(maxsize=65536)
def _everything(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All places along every axis."""
    return tuple(tuple(range(length)) for length in lengths)


def _at(region: Region, wanted: tuple[tuple[int, ...], ...]) -> Region:
    """The atoms at some places along every axis."""
    return tuple(
        [tuple([atoms[i] for i in places]) for atoms, places in zip(region, wanted, strict=True)]
    )


def places_of(content: Content, cuts: Cuts) -> tuple[tuple[int, ...], ...]:
    """The places that some cuts leave along every axis."""
    found = list(_everything(tuple(map(len, content.region))))
    for axis, start, stop in cuts:
        if axis not in content.axes:
            continue
        index = content.axes.index(axis)
        if not 0 <= start < stop <= len(content.region[index]):
            raise Unknown(f"{axis} {start} to {stop - 1} of {len(content.region[index])} atoms")
        found[index] = tuple(range(start, stop))
    return tuple(found)


def put(content: Content, part: Content, wanted: tuple[tuple[int, ...], ...]) -> Content:
    """A content with a part of it written anew."""
    region = _at(content.region, wanted)
    if part.region != region or part.tensor != content.tensor:
        raise Unknown(f"{part} is put where {replace(content, region=region)} belongs")
    if content.seen is None or part.seen is None:
        raise Unknown(f"{content} is no output")
    seen = list(content.seen)
    numbers = _picked(tuple(map(len, content.region)), wanted)
    for number, cell in zip(numbers, part.seen, strict=True):
        seen[number] = cell
    return Content(content.tensor, content.axes, content.region, tuple(seen))


def pack(content: Holding, axis: str, join: Interleaving, part: tuple[int, int]) -> Parts:
    """One part for every rank along a dimension: what it owns of an axis."""
    whole = single(content)
    if axis not in whole.axes:
        raise Unknown(f"{whole} is dealt along {axis}, which it does not carry")
    index = whole.axes.index(axis)
    everything = places_of(whole, ())
    found = []
    for places in positions(len(whole.region[index]), join):
        wanted = (*everything[:index], run_of(places, part), *everything[index + 1 :])
        found.append(take(whole, wanted))
    return Parts(tuple(found))


def parts_of(holding: Holding, join: Interleaving) -> tuple[Content, ...]:
    """One part from each rank, all of one tensor and alike but for where they belong."""
    if not isinstance(holding, Parts):
        raise Unknown(f"the source holds {holding or 'nothing'}, not one part from each rank")
    parts = holding.parts
    if len(parts) != join.n:
        raise Unknown(f"{len(parts)} parts are joined as if there were {join.n}")
    names = {part.tensor for part in parts}
    if len(names) > 1:
        raise Unknown("parts of different tensors: " + ", ".join(sorted(names)))
    return parts


def unpack(holding: Holding, axis: str, join: Interleaving) -> Content:
    """The parts from the ranks as one, interleaved along an axis."""
    parts = parts_of(holding, join)
    first = parts[0]
    if axis not in first.axes:
        raise Unknown(f"{first} is joined along {axis}, which it does not carry")
    index = first.axes.index(axis)
    for part in parts:
        alike = (*part.region[:index], *part.region[index + 1 :])
        if alike != (*first.region[:index], *first.region[index + 1 :]):
            raise Unknown(f"parts of different things in a row: {first} and {part}")
        if len(part.region[index]) != len(first.region[index]):
            raise Unknown(f"parts of different lengths: {first} and {part}")
    source = _sources(len(first.region[index]) * join.n, join)
    atoms = tuple(parts[rank].region[index][i] for rank, i in source)
    region = (*first.region[:index], atoms, *first.region[index + 1 :])
    if first.seen is None:
        return replace(first, region=region)
    return replace(first, region=region, seen=_joined(parts, index, source))


def _joined(parts: tuple[Content, ...], index: int, source: tuple[tuple[int, int], ...]) -> Cells:
    """The cells of parts, interleaved along an axis."""
    lengths = tuple(map(len, parts[0].region))
    before, inner = prod(lengths[:index]), prod(lengths[index + 1 :])
    step = lengths[index] * inner
    return tuple(
        cell
        for outer in range(before)
        for rank, i in source
        for cell in parts[rank].seen[outer * step + i * inner : outer * step + (i + 1) * inner]
    )


@lru_cache(maxsize=4096)
def _sources(length: int, join: Interleaving) -> tuple[tuple[int, int], ...]:
    """Per place of the joined list: whose list it comes from, and from where in it."""
    found = {
        place: (rank, index)
        for rank, places in enumerate(positions(length, join))
        for index, place in enumerate(places)
    }
    return tuple(found[place] for place in range(length))


def place_part(
    whole: Content, part: Content, axis: str, join: Interleaving, rank: int, run: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Where one rank's part of a run belongs in the whole.

    Along `axis` it is that run of what the rank owns; along the others, where its atoms are.
    """
    if axis not in whole.axes:
        raise Unknown(f"{whole} is joined along {axis}, which it does not carry")
    found = []
    for each, atoms in zip(whole.axes, whole.region, strict=True):
        if each == axis:
            found.append(run_of(positions(len(atoms), join)[rank], run))
            continue
        have = {atom: i for i, atom in enumerate(atoms)}
        missing = [a for a in part.atoms(each) if a not in have]
        if missing:
            raise Unknown(f"{part} has no place in {whole}")
        found.append(tuple(have[a] for a in part.atoms(each)))
    return tuple(found)


def summed(contents: Sequence[Content]) -> Content:
    """Partial results of one part, added up: nothing may be in two of them."""
    first = contents[0]
    seen = list(first.seen or ())
    for other in contents[1:]:
        if (other.tensor, other.region) != (first.tensor, first.region) or other.seen is None:
            raise Unknown(f"{first} and {other} are added")
        for i, cell in enumerate(other.seen):
            if seen[i] & cell:
                raise Unknown(f"{first} gets what it has already from another rank")
            seen[i] |= cell
    return replace(first, seen=tuple(seen))
