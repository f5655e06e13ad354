"""What ranks read of the tiles that come by, where each gets only that, without playing them.

It depends on the mask, the order of the tokens, on who has which part of the sequence, and on how
far away the owner of a tile is; many schedules of a search share it (`Program.shared`).
"""

from __future__ import annotations

from itertools import product
from math import prod

from mercurygen.cost.steps import Classes, classes_of
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.liveness import Liveness
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Gather, Loop, Stages, Walk
from mercurygen.lower.visible import read_run

MANY = 2**32  # more than there are lists of atoms


def brought(loops: tuple[Loop, ...], number: int) -> tuple[Stages, int]:
    """All stages of a loop's tensors, outermost first, and where those of the loop begin."""
    tensor, stages, first = loops[number].tensors[0], (), 0
    for index, loop in enumerate(loops):
        if index == number:
            first = len(stages)
        if tensor in loop.tensors:
            stages = (*stages, *loop.stages)
    return stages, first


def trimmed(program: Program, loops: tuple[Loop, ...], number: int) -> bool:
    """Whether ranks get only what they read of a loop's tiles."""
    loop = loops[number]
    if program.mask == "full" or loop.axis not in program.mask_axes or not loop.tensors:
        return False
    stages, first = brought(loops, number)
    done = stages[: first + len(loop.stages)]
    return any(isinstance(stage, Walk) and stage.direct for stage in done)


class Sent:
    """One step's transfer of a trimmed walk: tokens, per class.

    Attributes:
        out: that it sends.
        into: that come to it.
        takes: 1 where it takes part.
        most: of what one sends.
        copies: of what it sends is copied, or None if no class copies.
    """

    __slots__ = ("out", "into", "takes", "most", "copies")

    def __init__(self, out: list[int], into: list[int], copies: list[int] | None) -> None:
        self.out, self.into, self.copies = out, into, copies
        self.takes = [1 if a or b else 0 for a, b in zip(out, into, strict=True)]
        self.most = max(out)

    def without(self, off: list[bool]) -> Sent:
        """The same where some classes take no part; what they copy they do."""
        out, into = (
            [0 if gone else n for n, gone in zip(tokens, off, strict=True)]
            for tokens in (self.out, self.into)
        )
        return Sent(out, into, self.copies)


class Lengths:
    """Tokens that every class has of the tiles of one loop, of which it gets what it reads."""

    def __init__(
        self, program: Program, loops: tuple[Loop, ...], number: int, classes: Classes
    ) -> None:
        """
        Args:
            program: the program.
            loops: of the nest.
            number: of the loop.
            classes: of the ranks.
        """
        self.program, self.classes, self.axis = program, classes, loops[number].axis
        self.stages, self.first = brought(loops, number)
        self.atoms = atoms_of(program)
        storage = program.storage(program.tensor(loops[number].tensors[0]))
        self.split = tuple(
            dim for dim, a in zip(program.mesh.names, storage, strict=True) if a == self.axis
        )
        self.reads = _Reads.of(program, self.axis, classes)
        self._depths: dict[int, _Depth] = {}
        self._found: dict[tuple, list[int]] = {}
        self._sent: dict[tuple, Sent] = {}

    def depth(self, depth: int) -> _Depth:
        """A tile that has been through so many stages of the loop."""
        found = self._depths.get(depth)
        if found is None:
            found = self._depths[depth] = _Depth(self, self.first + depth)
        return found

    def at(self, around: tuple[int, ...], times: tuple[int, ...], depth: int) -> list[int]:
        """Tokens that every class has of a tile.

        Args:
            around: steps of the walks before the loop's.
            times: steps of the loop's walks so far, outermost first.
            depth: stages of the loop that the tile has been through.
        """
        key = around, times, depth
        found = self._found.get(key)
        if found is None:
            at = self.depth(depth)
            away = {  # how far from a rank the owner is
                dim: (step if reverse else -step) % size
                for (dim, reverse, size), step in zip(at.walks, (*around, *times), strict=True)
            }
            inner = tuple([dims for dim, dims in at.direct if away[dim]])
            owner = tuple([(dim, away.get(dim, 0)) for dim in at.split])
            found = self._found[key] = self.reads.at(owner, inner)
        return found

    def sent(
        self,
        walk: Walk,
        around: tuple[int, ...],
        outer: tuple[int, ...],
        depth: int,
        step: int,
    ) -> Sent:
        """What one step of a walk of the loop sends.

        Args:
            walk: the walk.
            around: steps of the walks before the loop's.
            outer: steps of the loop's walks outside this one.
            depth: stages of the loop outside this one.
            step: whose tile arrives.
        """
        key = around, outer, depth, step
        found = self._sent.get(key)
        if found is None:
            found = self._sent[key] = self._send(walk, *key)
        return found

    def _send(self, walk: Walk, around, outer, depth: int, step: int) -> Sent:
        into = self.at(around, (*outer, step), depth + 1)
        if not walk.direct:
            return Sent(self.at(around, (*outer, step - 1), depth + 1), into, None)
        away = self.classes.away(walk.dim, -step if walk.reverse else step)
        out, own = [into[i] for i in away], self.at(around, outer, depth)
        whole = self.depth(depth).tokens
        copies = [  # what is all of a buffer is sent from there
            n if n != mine or n != whole else 0 for n, mine in zip(out, own, strict=True)
        ]
        return Sent(out, into, copies if any(copies) else None)


class _Depth:
    """A tile that has been through some of its stages.

    Attributes:
        walks: of these, dimension, whether in reverse, and size.
        direct: of each that is direct, its dimension and those of the walks inside it.
        split: dimensions that the tile is split over now.
        tokens: of all of the tile.
    """

    def __init__(self, lengths: Lengths, count: int) -> None:
        stages, extent = lengths.stages, lengths.program.mesh.extent
        done = [(i, s) for i, s in enumerate(stages[:count]) if isinstance(s, Walk)]
        self.walks = [(s.dim, s.reverse, extent(s.dim)) for _, s in done]
        self.direct = [
            (s.dim, tuple(x.dim for x in stages[i + 1 :] if isinstance(x, Walk)))
            for i, s in done
            if s.direct
        ]
        whole = {stage.dim for stage in stages[:count] if isinstance(stage, Gather)}
        self.split = tuple(dim for dim in lengths.split if dim not in whole)
        self.tokens = lengths.program.extent(lengths.axis) // prod(map(extent, self.split))


class _Reads:
    """Tokens that classes read of tiles of one axis of the mask, by how far away the owners are."""

    def __init__(self, program: Program, axis: str, classes: Classes) -> None:
        self.program, self.axis, self.classes = program, axis, classes
        rows, columns = program.mask_axes
        self.other = columns if axis == rows else rows
        self.atoms = atoms_of(program)
        self.runs = _Runs.of(program, axis == rows)
        self._found: dict[tuple, list[int]] = {}
        self._tiles: dict[tuple[str, ...], list[int]] = {}
        self._unions: dict[tuple[str, ...], list[int]] = {}

    @classmethod
    def of(cls, program: Program, axis: str, classes: Classes) -> _Reads:
        """Those of a program; it matters who works on which part of the other axis."""
        rows, columns = program.mask_axes
        others = program.parallel_dims(columns if axis == rows else rows)
        key = "reads", program.order, atoms_of(program).domain, axis, classes.dims, others
        found = program.shared.get(key)
        if found is None:
            found = program.shared[key] = cls(program, axis, classes)
        return found

    def at(
        self, away: tuple[tuple[str, int], ...], inner: tuple[tuple[str, ...], ...]
    ) -> list[int]:
        """Per class the tokens of a tile that it has.

        Args:
            away: dimensions that the tile is split over, with how far the owner is along each.
            inner: of each direct walk that it has come along, the dimensions of those inside.
        """
        key = away, inner
        found = self._found.get(key)
        if found is None:
            numbers = [0] * self.classes.count
            for dim, n in away if inner else ():  # whole tiles are equally long
                size, owners = self.program.mesh.extent(dim), self.classes.further(dim, n)
                numbers = [number * size + i for number, i in zip(numbers, owners, strict=True)]
            tiles = self.tiles(tuple([dim for dim, _ in away]))
            regions = [tiles[number] for number in numbers]
            for dims in inner:
                pairs = zip(regions, self.unions(dims), strict=True)
                regions = [self.runs[tile * MANY + others] for tile, others in pairs]
            found = self._found[key] = [self.runs.tokens[number] for number in regions]
        return found

    def tiles(self, dims: tuple[str, ...]) -> list[int]:
        """The atoms, by number, of every tile that is split over some dimensions."""
        found = self._tiles.get(dims)
        if found is None:
            places = classes_of(self.program, dims).places
            held = ({dim: (i,) for dim, i in place.items()} for place in places)
            owned = [self.atoms.owned(self.program.order, self.axis, each) for each in held]
            found = self._tiles[dims] = list(map(self.runs.number, owned))
        return found

    def unions(self, dims: tuple[str, ...]) -> list[int]:
        """Per class, by number, the atoms of the other axis of all ranks that differ along some
        dimensions."""
        found = self._unions.get(dims)
        if found is None:
            split = self.program.parallel_dims(self.other)
            made: dict[tuple[int | None, ...], int] = {}
            found = self._unions[dims] = []
            for place in self.classes.places:
                where = tuple([None if dim in dims else place[dim] for dim in split])
                if where not in made:
                    made[where] = self.runs.number(self._union(split, where))
                found.append(made[where])
        return found

    def _union(self, split: tuple[str, ...], where: tuple[int | None, ...]) -> tuple[int, ...]:
        """Atoms of the other axis at some coordinates, or (None) at all along a dimension."""
        mesh = self.program.mesh
        spans = (
            (range(mesh.extent(dim)) if i is None else (i,))
            for dim, i in zip(split, where, strict=True)
        )
        union: set[int] = set()
        for at in product(*spans):
            union.update(self.atoms.iterations(self.other, dict(zip(split, at, strict=True))))
        return tuple(sorted(union))


class _Runs(dict[int, int]):
    """By a tile and what of the other axis a rank works on, the run of the tile that it reads.

    Lists of atoms go by number, a pair of them by MANY times the first and the second. Made when
    it is asked for.

    Attributes:
        lists: the atoms of each number.
        tokens: of each.
    """

    def __init__(self, domain: Liveness, by_rows: bool) -> None:
        super().__init__()
        self.domain, self.by_rows = domain, by_rows
        self.side = domain.rows if by_rows else domain.columns
        self.lists: list[tuple[int, ...]] = []
        self.tokens: list[int] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    @classmethod
    def of(cls, program: Program, by_rows: bool) -> _Runs:
        """Those of a program's mask."""
        key = "runs", atoms_of(program).domain, by_rows
        found = program.shared.get(key)
        if found is None:
            found = program.shared[key] = cls(*key[1:])
        return found

    def number(self, atoms: tuple[int, ...]) -> int:
        """The number of a list of atoms."""
        found = self._numbers.setdefault(atoms, len(self.lists))
        if found == len(self.lists):
            self.lists.append(atoms)
            self.tokens.append(self.side.tokens(atoms))
        return found

    def __missing__(self, pair: int) -> int:
        tile, others = (self.lists[number] for number in divmod(pair, MANY))
        start, stop = read_run(self.domain, self.by_rows, tile, others)
        self[pair] = found = self.number(tile[start:stop])
        return found


def lengths_of(program: Program, loops: tuple[Loop, ...], number: int, classes: Classes) -> Lengths:
    """The lengths of a loop; schedules that agree in what they depend on share them."""
    tensor, stages, first = loops[number].tensors[0], (), 0
    for index, loop in enumerate(loops):
        first = len(stages) if index == number else first
        stages += loop.reach if tensor in loop.tensors else ()
    rows, columns = program.mask_axes
    others = program.parallel_dims(columns if loops[number].axis == rows else rows)
    storage = program.layout.stored[tensor]
    key = "lengths", program.order, tensor, stages, first, storage, others, classes.dims
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = Lengths(program, loops, number, classes)
    return found
