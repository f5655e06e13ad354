"""The body on every tile, counted: the scopes of `mercurygen.lower.nest`, with sums for buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from mercurygen.cost.kernels import NOTHING, Kernels, Spent, added, seconds
from mercurygen.cost.rings import NoForm, Rings
from mercurygen.cost.steps import Call, steps_of
from mercurygen.cost.tally import NEVER, Tally
from mercurygen.ir.program import Tensor
from mercurygen.lower.plan import Plan
from mercurygen.lower.sizes import ATEN, scratch_bytes, share_bytes

Sizes = dict[str, int]  # bytes by tensor


class Part(NamedTuple):
    """A result: bytes of its buffer, of what it has of the output, and of an element."""

    live: int
    nbytes: int
    item: int


Parts = dict[str, Part]


def lively(parts: Parts) -> int:
    """Bytes of their buffers."""
    return sum(part.live for part in parts.values())


def replaced(old: Parts, new: Parts) -> int:
    """Bytes of the buffers of which others have taken the place."""
    return sum(part.live for name, part in old.items() if new[name] is not part)


class Nested(Rings):
    """One nest: from the tensors between the borders to complete results there.

    Attributes:
        busy: per kind of step (merged or not) what its calls spend.
    """

    def __init__(self, plan: Plan, tally: Tally, kernels: Kernels, dims: tuple[str, ...]) -> None:
        super().__init__(plan, tally, kernels, dims)
        program = self.program
        self.begin = plan.nest.begin
        self.steps = steps_of(program, self.walks, dims) if program.mask_axes else None
        self.strides = []
        stride = 1
        for walk in reversed(self.walks):
            self.strides.insert(0, stride)
            stride *= walk.size
        self.axes = tuple(axis.name for axis in program.axes)
        self.local = self._local()
        self.outputs = program.outputs
        self.partials = {t.name: plan.itemsize(plan.partial(t)) for t in self.outputs}
        self.results = {t.name: self._elements(t) * self.partials[t.name] for t in self.outputs}
        self.costs: dict[bool, tuple] = {}

    # --- sizes --------------------------------------------------------------------------------

    def _local(self) -> dict[str, int]:
        """Indices of every axis that a call on a whole tile is given."""
        found = dict(self.program.extents)
        for dim, axis in zip(self.mesh.names, self.program.parallel, strict=True):
            if axis is not None:
                found[axis] //= self.mesh.extent(dim)
        for walk in self.walks:
            found[walk.axis] //= walk.size
        return found

    def _elements(self, tensor: Tensor) -> int:
        """Elements of the results that a rank works out for one owner."""
        extents, found = self.program.extents, 1
        for axis in tensor.axes:
            found *= extents[axis]
        for dim, axis in zip(self.mesh.names, self.program.parallel, strict=True):
            if axis in tensor.axes:
                found //= self.mesh.extent(dim)
        for loop in self.loops:
            if tensor.name in loop.outputs and loop.axis in tensor.axes:
                found //= self.mesh.extent(loop.walks[-1].dim)
        return found

    def calls(self, merge: bool) -> tuple[list[Spent], list[float], list[int], list, list]:
        """Of every kind of step: what it spends, seconds, scratch bytes; of a single call too the
        bytes of its share, and of what that is of the outputs, in what they are merged in."""
        found = self.costs.get(merge)
        if found is None:
            kinds = self.steps.kinds if self.steps else ((None,),)
            local = tuple(self.local[axis] for axis in self.axes)
            key = "calls", id(self.tally.network), self.program.kernel, local, kinds, merge
            kept = self.program.shared.get(key)
            if kept is None:  # with the network, so that its id stays its own
                kept = self.tally.network, self._calls(kinds, merge)
                self.program.shared[key] = kept
            found = self.costs[merge] = kept[1]
        return found

    def _calls(self, kinds: Sequence[Sequence[Call | None]], merge: bool) -> tuple:
        spent, scratch, shares, regions = [], [], [], []
        for kind in kinds:
            total, most, share, region = NOTHING, 0, None, None
            for call in kind:
                one, more, share, region = self._call(call, merge)
                total, most = added(total, one), max(most, more)
            spent.append(total)
            scratch.append(most)
            shares.append(share)
            regions.append(region)
        return spent, list(map(seconds, spent)), scratch, shares, regions

    def _call(self, call: Call | None, merge: bool) -> tuple:
        """One call: what it spends, scratch bytes, and unmerged the bytes of its share."""
        extents, causal, less = dict(self.local), False, 0
        rows, columns = self.program.mask_axes or (None, None)
        if call is not None:
            extents[rows], extents[columns], causal, less = call
        numbers = tuple(extents[axis] for axis in self.axes)
        key = "call", id(self.tally.network), self.program.kernel, numbers, causal, less, merge
        found = self.program.shared.get(key)
        if found is None:
            spent = self.kernels.call(numbers, causal, merge)
            found = spent, scratch_bytes(self.plan, extents, merge), None, None
            if not merge:
                share = share_bytes(self.plan, extents)
                if call is not None:
                    extents |= {rows: extents[rows] + less, columns: extents[columns] + less}
                region = tuple(
                    prod(extents[axis] for axis in t.axes) * self.partials[t.name]
                    for t in self.outputs
                )
                found = *found[:2], share, region
            self.program.shared[key] = found
        return found

    # --- calls --------------------------------------------------------------------------------

    def step(self) -> int:
        """Which step of the whole nest it is."""
        return sum(map(int.__mul__, self.times, self.strides))

    def call(self, merge: bool) -> None:
        """The body on what the mask leaves of the tile that is here."""
        tally = self.tally
        spent, times, scratch, _, _ = self.calls(merge)
        if self.steps is None:
            tally.top(scratch[0])
            tally.run(times[0], spent[0][3])
            return
        step = self.step()
        present = self.steps.present[step]
        if tally.vary is None:
            tally.top(max(scratch[kind] for kind in present))
        else:
            tally.top_each([scratch[kind] for kind in self.steps.table[step]])
        tally.run(max(times[kind] for kind in present), max(spent[kind][3] for kind in present))

    def share(self) -> Parts:
        """The result of a tile that is one block, as the body leaves it."""
        _, _, _, shares, _ = self.calls(False)
        if self.steps is None:
            sizes = shares[0]
        else:
            found = {shares[kind] for kind in self.steps.present[self.step()]} - {None}
            if len(found) != 1:
                raise NoForm("shares differ")
            (sizes,) = found
        parts = {}
        for tensor, nbytes in zip(self.outputs, sizes, strict=True):
            wide = self.partials[tensor.name]
            item = self.plan.itemsize(tensor.dtype) if self.program.kernel == ATEN else wide
            parts[tensor.name] = Part(nbytes, self.results[tensor.name] // wide * item, item)
        self.tally.up(sum(sizes))
        self.call(False)
        return parts

    def nothing(self) -> Parts:
        """What merges to nothing."""
        sizes = self.results
        self.tally.up(sum(sizes.values()))
        self.tally.spend(self.kernels.copies(list(sizes.values())))
        return {name: Part(n, n, self.partials[name]) for name, n in sizes.items()}

    def merge(self, names: Iterable[str], absent: list[bool] | None = None) -> None:
        """Partial results of some outputs, merged into others; on some classes there are none."""
        for combine in self.program.combines:
            out = combine.outputs[0]
            if combine.kind == "softmax" and out in names:
                more = self.merge_scratch(self.results[out], out)
                if absent is None:
                    self.tally.top(more)
                else:
                    self.tally.top_each([0 if gone else more for gone in absent])
        self.merge_time(names)

    def merge_time(self, names: Iterable[str]) -> None:
        """The kernels of merges of whole results."""
        for combine in self.program.combines:
            sizes = [self.results[name] for name in combine.outputs if name in names]
            if sizes:
                self.tally.spend(self.kernels.merge(sizes))

    def merge_scratch(self, nbytes: int, out: str) -> int:
        """Bytes beside a softmax merge of partial results of so many bytes."""
        rows = nbytes // self.partials[out] // self.program.extent("D_v")
        return 2 * rows * self.plan.itemsize("accumulator")

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
        return {name: self.cast(part, self.partials[name]) for name, part in parts.items()}

    def narrow(self, parts: Parts) -> Parts:
        """In their own dtypes; the old buffers go after that."""
        items = {t.name: self.plan.itemsize(t.dtype) for t in self.outputs}
        found = {name: self.cast(part, items[name]) for name, part in parts.items()}
        self.tally.down(replaced(parts, found))
        return found

    def busiest(self) -> tuple[Spent, float]:
        """What the calls of the rank that is busy longest spend, and its compute over the mean."""
        first_merged = self.begin == "empty"
        rest = self.calls(self.begin != "only")[0]
        begin = rest if first_merged else self.calls(False)[0]
        if self.steps is None:
            times = prod(walk.size for walk in self.walks)
            one = rest[0]
            return (one[0] * times, one[1] * times, one[2] * times, one[3] * times), 1.0
        most, compute, ranks, longest = 0.0, 0.0, 0, NOTHING
        for first, others, count in self.steps.sums:
            spent = begin[first]
            for kind, times in others:
                a, b, c, d = (x * times for x in rest[kind])
                spent = spent[0] + a, spent[1] + b, spent[2] + c, spent[3] + d
            compute += spent[0] * count
            ranks += count
            most = max(most, spent[0])
            if (seconds(spent), spent) > (seconds(longest), longest):
                longest = spent
        return longest, most * ranks / compute

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
            ends = [tally.start("all-gather", stage.dim, nbytes) for nbytes in sizes]
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
