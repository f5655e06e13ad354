"""The body on every tile, counted: the scopes of `mercurygen.lower.nest`, with sums for buffers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from mercurygen.cost.common import Common, Part, Parts
from mercurygen.cost.rings import NoForm, Rings
from mercurygen.cost.shape import Calls, Shape
from mercurygen.cost.tally import NEVER, Tally
from mercurygen.lower.plan import Plan

Sizes = dict[str, int]  # bytes by tensor


def lively(parts: Parts) -> int:
    """Bytes of their buffers."""
    return sum([part.live for part in parts.values()])


def replaced(old: Parts, new: Parts) -> int:
    """Bytes of the buffers of which others have taken the place."""
    return sum([part.live for name, part in old.items() if new[name] is not part])


class Nested(Rings):
    """One nest: from the tensors between the borders to complete results there.

    Attributes:
        results: partial results that a rank works out for one owner.
    """

    def __init__(self, plan: Plan, tally: Tally, common: Common, shape: Shape) -> None:
        super().__init__(plan, tally, common, shape)
        self.begin = plan.nest.begin
        self.steps, self.outputs = shape.steps, common.outputs
        homes = tuple(
            [(loop.outputs, loop.axis, loop.walks[-1].dim) for loop in self.loops if loop.outputs]
        )
        self.results = common.partials(_elements(plan, common, shape, homes))
        self.of_call: dict[bool, Calls] = {}

    # --- calls --------------------------------------------------------------------------------

    def calls(self, merge: bool) -> Calls:
        """The body's calls, merged into results or not."""
        if merge not in self.of_call:
            self.of_call[merge] = self.shape.calls(self.plan, merge)
        return self.of_call[merge]

    def call(self, merge: bool) -> None:
        """The body on what the mask leaves of the tile that is here."""
        tally, step = self.tally, self.step
        calls = self.of_call.get(merge) or self.calls(merge)
        if tally.vary is None:
            height = tally.alive + calls.highest[step]
            if height > tally.peak:
                tally.peak = height
        else:
            tally.top_each(calls.scratch_each(step))
        tally.now += calls.longest[step]

    def share(self) -> Parts:
        """The result of a tile that is one block, as the body leaves it."""
        made = self.calls(False).share(self.step)
        if made is None:
            raise NoForm("shares differ")
        parts = {}
        for name, nbytes in zip(self.common.names, made, strict=True):
            wide = self.common.wide[name]
            item = self.common.items[name] if self.common.aten else wide
            parts[name] = Part(nbytes, self.results.sizes[name] // wide * item, item)
        self.tally.up(sum(made))
        self.call(False)
        return parts

    def nothing(self) -> Parts:
        """What merges to nothing."""
        self.tally.up(self.results.total)
        self.tally.spend(self.results.fill)
        return self.results.nothing

    def merge(self, names: Iterable[str], absent: list[bool] | None = None) -> None:
        """Partial results of some outputs, merged into others; on some classes there are none."""
        scratch, spent = self.results.merge(names)
        if scratch:
            if absent is None:
                self.tally.top(scratch)
            else:
                self.tally.top_each([0 if gone else scratch for gone in absent])
        for each in spent:
            self.tally.spend(each)

    def cast(self, part: Part, item: int) -> Part:
        """In a dtype with so many bytes an element: a new buffer, if it has other bytes now."""
        if part.item == item:
            return part
        nbytes = part.nbytes // part.item * item
        self.tally.up(nbytes)
        self.tally.copy(part.live + nbytes)
        return Part(nbytes, nbytes, item)

    def widen(self, parts: Parts) -> Parts:
        """In the dtypes that they are merged in; the old buffers stay."""
        return {name: self.cast(part, self.common.wide[name]) for name, part in parts.items()}

    def narrow(self, parts: Parts) -> Parts:
        """In their own dtypes; the old buffers go after that."""
        found = {name: self.cast(part, self.common.items[name]) for name, part in parts.items()}
        self.tally.down(replaced(parts, found))
        return found

    # --- scopes -------------------------------------------------------------------------------

    def scope(self, number: int, tiles: Sizes) -> Parts:
        """The partial results of all that the loops from one inwards bring."""
        if number < len(self.loops) and self.loops[number].outputs:
            return self.moving(number, tiles)
        index = number
        while index < len(self.loops) and not self.loops[index].outputs:
            index += 1
        rest = index < len(self.loops)
        tally, made = self.tally, {}
        for each in range(number, index):
            loop = self.loops[each]
            if loop.leading:
                tiles, more = self.lead(each, tiles)
                tally.down(made.get(loop.tensors, 0))  # gathered before, over other dimensions
                made[loop.tensors] = more
        walks = [each for each in range(number, index) if self.loops[each].walks]
        if not walks and not rest:
            found = self.once()
        else:
            found = self.merged(walks, index if rest else None, tiles)
        tally.down(sum(made.values()))
        for each in walks:
            last = self.offsets[each] + len(self.loops[each].walks) - 1
            tally.down(self.old[last])
            self.old[last] = 0
        tally.down(self.pending)
        self.pending = 0
        return found

    def lead(self, number: int, tiles: Sizes) -> tuple[Sizes, int]:
        """The gathers of a loop outside every walk, and the bytes that they leave."""
        tally, loop = self.tally, self.loops[number]
        sizes, before = [tiles[name] for name in loop.tensors], 0
        for stage in loop.leading:
            times = self.mesh.extent(stage.dim)
            whole = sum(sizes) * times
            tally.up(whole)
            wire = self.common.wire("all-gather", stage.dim)
            ends = [tally.start(wire, nbytes) for nbytes in sizes]
            for end in ends:
                tally.wait(end)
            tally.up(whole)
            for nbytes in sizes:
                tally.copy(2 * nbytes * times)
            tally.down(whole)
            tally.down(before)
            sizes, before = [nbytes * times for nbytes in sizes], whole
        return {**tiles, **dict(zip(loop.tensors, sizes, strict=True))}, before

    def merged(self, walks: list[int], rest: int | None, tiles: Sizes) -> Parts:
        """Every tile of some loops inside one another, merged into one result."""
        found: Parts = {}
        first = self.begin == "first"
        if rest is None and not first:
            found = self.nothing()

        def body() -> None:
            tally = self.tally
            tally.alive -= self.pending
            self.pending = 0
            if rest is not None:
                inner = self.scope(rest, tiles)
                if not found:
                    found.update(inner)
                    return
                self.merge(inner)
                tally.down(lively(inner))
            elif first and not found:
                share = self.share()
                found.update(self.widen(share))
                tally.down(replaced(share, found))
            else:
                self.call(True)

        self.items(walks, tiles, body)
        return found

    def items(self, walks: list[int], tiles: Sizes, body) -> None:
        """Every tile of loops inside loops."""
        if not walks:
            body()
            return
        number = walks[0]
        loop = self.loops[number]
        deep = len(walks) > 1 or number + 1 < len(self.loops)

        def each() -> None:
            gone = self.empty(number) if deep else None
            if gone is None:
                self.items(walks[1:], tiles, body)
                return
            if all(gone):
                return
            away = [NEVER if one else 0 for one in gone]
            self.tally.up_each(away, look=False)
            self.items(walks[1:], tiles, body)
            self.tally.down_each(away)

        names = loop.tensors + (loop.partner[0] if loop.partner else ())
        self.coming(number, [tiles[name] for name in names], each)

    def once(self) -> Parts:
        """The results of tiles that are all there is."""
        if self.begin == "empty":
            found = self.nothing()
            self.call(True)
            return found
        return self.share()

def _elements(
    plan: Plan, common: Common, shape: Shape, homes: tuple[tuple[tuple[str, ...], str, str], ...]
) -> tuple[int, ...]:
    """Elements of every output that a rank works out for one owner.

    Args:
        plan: the plan.
        common: with others.
        shape: of the plan.
        homes: outputs that go home, the axis of the tiles that they are of, the dimension.
    """
    found = shape.elements.get(homes)
    if found is None:
        program, mesh, counts = plan.program, common.mesh, []
        for tensor in common.outputs:
            count = prod(program.extents[axis] for axis in tensor.axes)
            for dim, axis in zip(mesh.names, program.parallel, strict=True):
                if axis in tensor.axes:
                    count //= mesh.extent(dim)
            for names, axis, dim in homes:
                if tensor.name in names and axis in tensor.axes:
                    count //= mesh.extent(dim)
            counts.append(count)
        found = shape.elements[homes] = tuple(counts)
    return found
