"""The body on every tile, counted: the scopes of `mercurygen.lower.nest`, with sums for buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from mercurygen.cost.common import Common, Part, Parts
from mercurygen.cost.rings import NoForm, Rings
from mercurygen.cost.shape import Calls, Shape
from mercurygen.cost.tally import NEVER, Tally
from mercurygen.lower.plan import Plan

Sizes = dict[str, int]  # bytes by tensor


class Nested(Rings):
    """One nest: from the tensors between the borders to complete results there.

    Attributes:
        results: partial results that a rank works out for one owner.
        staying: outputs that those of the next tiles are merged into right away.
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
        self.staying: tuple[str, ...] = ()

    # --- calls --------------------------------------------------------------------------------

    def calls(self, merge: bool) -> Calls:
        """The body's calls, merged into results or not."""
        if merge not in self.of_call:
            self.of_call[merge] = self.shape.calls(self.plan, merge)
        return self.of_call[merge]

    def call(self, merge: bool) -> None:
        """The body on what the mask leaves of the tile that is here; the one before it is gone."""
        tally, step = self.tally, self.step
        if self.pending:
            tally.alive -= self.pending
            self.pending = 0
        calls = self.of_call.get(merge) or self.calls(merge)
        if tally.vary is None:
            height = tally.alive + calls.highest[step]
            if height > tally.peak:
                tally.peak = height
        else:
            tally.top_each(calls.scratch_each(step))
        tally.run(calls.longest[step], calls.hosts[step])

    def share(self) -> Parts:
        """The result of a tile that is one block, as the body leaves it."""
        made = self.calls(False).share(self.step)
        if made is None:
            raise NoForm("shares differ")
        self.tally.up(sum(made))
        self.call(False)
        return self.results.share(made)

    def nothing(self) -> Parts:
        """What merges to nothing; outputs that stay here are what other tiles gave so far."""
        found, fill = self.results.nothing(self.staying)
        self.tally.up(found.live)
        self.tally.spend(fill)
        return found

    def merge(self, names: tuple[str, ...], absent: list[bool] | None = None) -> None:
        """Partial results of some outputs, merged into others; on some classes there are none."""
        scratch, spent = self.results.merge(names)
        tally = self.tally
        if scratch:
            if absent is None:
                tally.top(scratch)
            else:
                tally.top_each([0 if gone else scratch for gone in absent])
        for each in spent:
            tally.spend(each)

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
        return parts if parts.wide else self.casts(parts, self.common.wide)

    def narrow(self, parts: Parts) -> Parts:
        """In their own dtypes; the old buffers go after that."""
        found = self.casts(parts, self.common.items)
        self.tally.alive -= parts.gone(found)
        return found

    def casts(self, parts: Parts, items: dict[str, int]) -> Parts:
        """With so many bytes an element."""
        found = {name: self.cast(part, items[name]) for name, part in parts.items()}
        return Parts(self.common, found)

    # --- scopes -------------------------------------------------------------------------------

    def scope(self, number: int, tiles: Sizes) -> Parts:
        """The partial results of all that the loops from one inwards bring."""
        loops, tally = self.loops, self.tally
        if number < len(loops) and loops[number].outputs:
            return self.moving(number, tiles)
        index, walks, made = number, [], {}
        while index < len(loops) and not loops[index].outputs:
            loop = loops[index]
            if loop.leading:
                tiles, more = self.lead(index, tiles)
                tally.alive -= made.get(loop.tensors, 0)  # gathered before, over other dimensions
                made[loop.tensors] = more
            if loop.walks:
                walks.append(index)
            index += 1
        rest = index if index < len(loops) else None
        found = self.merged(walks, rest, tiles) if walks or rest is not None else self.once()
        tally.alive -= sum(made.values()) + self.pending
        self.pending = 0
        for each in walks:
            last = self.offsets[each] + len(loops[each].walks) - 1
            tally.alive -= self.old[last]
            self.old[last] = 0
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
            tally.alive -= whole + before
            sizes, before = [nbytes * times for nbytes in sizes], whole
        return {**tiles, **dict(zip(loop.tensors, sizes, strict=True))}, before

    def merged(self, walks: list[int], rest: int | None, tiles: Sizes) -> Parts:
        """Every tile of some loops inside one another, merged into one result."""
        if rest is None and self.begin != "first":
            found = self.nothing()
            self.items(walks, tiles, partial(self.call, True))
            return found
        found, tally = None, self.tally

        def body() -> None:
            nonlocal found
            tally.alive -= self.pending
            self.pending = 0
            if rest is None and found is not None:
                self.call(True)
                return
            inner = self.share() if rest is None else self.scope(rest, tiles)
            if found is None:
                found = self.widen(inner) if rest is None else inner
                tally.alive -= inner.gone(found)
                return
            self.merge(self.common.names)
            tally.alive -= inner.live

        self.items(walks, tiles, body)
        return found

    def items(self, walks: list[int], tiles: Sizes, body: Callable[[], None]) -> None:
        """Every tile of loops inside loops."""
        if not walks:
            body()
            return
        number, inner = walks[0], walks[1:]
        loop, each = self.loops[number], body
        if inner:

            def each() -> None:
                self.items(inner, tiles, body)

        if self.trimmed[number] and (inner or number + 1 < len(self.loops)):
            each = partial(self.where_read, number, each)
        names = loop.tensors + (loop.partner[0] if loop.partner else ())
        self.coming(number, [tiles[name] for name in names], each)

    def where_read(self, number: int, body: Callable[[], None]) -> None:
        """What is inside, on the classes that read something of the tile that is here."""
        gone = self.empty(number)
        if gone is None:
            body()
        elif not all(gone):
            away = [NEVER if one else 0 for one in gone]
            self.tally.up_each(away, look=False)
            body()
            self.tally.down_each(away)

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
