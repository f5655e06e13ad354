"""Results that go home, and reductions, counted: the rest of `mercurygen.lower.nest`."""

from __future__ import annotations

from mercurygen.cost.common import Part, Parts, merge_scratch
from mercurygen.cost.going import Going, Homes, SentCall, SentHome, Travelling
from mercurygen.cost.nested import Sizes
from mercurygen.lower.plan import Gather, Reduce


class Homeward(Homes):
    """A nest whose loops may send results home."""

    def whole(self, tiles: Sizes) -> Parts:
        """All loops and reductions."""
        found = self.scope(0, tiles)
        if self.plan.nest.reduces:
            wide = self.widen(found)
            self.tally.alive -= found.gone(wide)
            found = wide
        for reduce in self.plan.nest.reduces:
            found = self.reduce(found, reduce)
        return self.narrow(found)

    def moving(self, number: int, tiles: Sizes) -> Parts:
        """A loop whose results go to the owners of its tiles."""
        loop, made, tally = self.loops[number], 0, self.tally
        if loop.tensors and loop.leading:
            tiles, made = self.lead(number, tiles)
        way: type[Going] = Travelling
        if loop.home == "direct":
            one_call = self.begin == "only" and self.steps is not None
            way = SentCall if one_call and number + 1 == len(self.loops) else SentHome
        sizes = [tiles[name] for name in loop.tensors]
        for stage in loop.walking:
            if isinstance(stage, Gather):
                times = self.mesh.extent(stage.dim)
                tiles = {**tiles, **{name: tiles[name] * times for name in loop.tensors}}
        going = way(self, number, tiles)
        if loop.tensors:
            self.coming(number, sizes, going.step)
        else:
            for step in range(going.size):
                self.turn(self.offsets[number], step)
                going.step()
        last = self.offsets[number] + len(loop.walks) - 1
        tally.down(self.old[last])
        self.old[last] = 0
        found = going.end()
        tally.down(made)
        return found

    # --- reductions ---------------------------------------------------------------------------

    def reduce(self, found: Parts, reduce: Reduce) -> Parts:
        """Partial results of a dimension's ranks, as one; what they were goes after that."""
        mine = {name: part for name, part in found.items() if name in reduce.tensors}
        before = Parts(self.common, mine)
        mine = self.widen(before)
        if reduce.kind == "sum":
            after = {name: self.summed(part, reduce, name) for name, part in mine.items()}
        elif reduce.kind == "softmax" and reduce.axis is None:
            after = self.softmax(mine, reduce)
        else:
            after = self.exchange(mine, reduce)
        after = Parts(self.common, after)
        self.tally.alive -= before.gone(mine) + mine.gone(after)
        return Parts(self.common, {**found, **after})

    def summed(self, part: Part, reduce: Reduce, name: str) -> Part:
        """A sum over a dimension, of all or of everyone's part."""
        tally = self.tally
        item = part.item if reduce.dtype is None else self.plan.itemsize(reduce.dtype)
        narrow = self.cast(part, item)
        gone = 0 if narrow is part else narrow.live
        wire = self.common.wire(
            "all-reduce" if reduce.axis is None else "reduce-scatter", reduce.dim
        )
        if reduce.axis is None:
            tally.wait(tally.start(wire, narrow.live))
            found = self.cast(narrow, self.common.wide[name])
            tally.down(gone if found is not narrow else 0)
            return found
        tally.up(narrow.nbytes)
        tally.copy(2 * narrow.nbytes)
        kept = narrow.nbytes // self.mesh.extent(reduce.dim)
        tally.up(kept)
        tally.wait(tally.start(wire, narrow.nbytes))
        target = Part(kept, kept, item)
        found = self.cast(target, self.common.wide[name])
        tally.down(narrow.nbytes + gone + (kept if found is not target else 0))
        return found

    def softmax(self, mine: Parts, reduce: Reduce) -> dict[str, Part]:
        """The maximum of lse, then one sum of what is weighed by it, in place."""
        tally, wire = self.tally, self.common.wire("all-reduce", reduce.dim)
        out, lse = (mine[name].nbytes for name in reduce.tensors)
        tally.up(lse)
        tally.copy(2 * lse)
        tally.wait(tally.start(wire, lse))
        tally.up(out + lse)
        tally.spend(self.common.kernels.weigh(out, lse, out + lse))
        tally.wait(tally.start(wire, out + lse))
        tally.spend(self.common.kernels.weigh(out, lse, out + lse))
        tally.down(out + 2 * lse)
        return mine

    def exchange(self, mine: Parts, reduce: Reduce) -> dict[str, Part]:
        """Partial results to the ranks that keep them, merged there in rank order."""
        tally, size, gone, kept = self.tally, self.mesh.extent(reduce.dim), 0, {}
        wire = self.common.wire("all-gather" if reduce.axis is None else "all-to-all", reduce.dim)
        for name, part in mine.items():
            nbytes = part.nbytes
            if reduce.axis is None:
                tally.up(nbytes * size)
                tally.wait(tally.start(wire, part.live))
                gone, kept[name] = gone + nbytes * size, Part(nbytes, nbytes, part.item)
                continue
            tally.up(nbytes)
            tally.copy(2 * nbytes)
            tally.up(nbytes)
            tally.wait(tally.start(wire, nbytes))
            tally.down(nbytes)
            gone, kept[name] = gone + nbytes, Part(nbytes // size, nbytes // size, part.item)
        sizes = [part.nbytes for part in kept.values()]
        tally.up(sum(sizes))
        tally.spend(self.common.kernels.copies(sizes))
        if reduce.kind == "softmax":
            tally.top(merge_scratch(self.common, sizes[0], reduce.tensors[0]))
        spent = self.common.kernels.merge(sizes)
        for _ in range(size):
            tally.spend(spent)
        tally.down(gone)
        return kept
