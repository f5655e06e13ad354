"""Partial results of several ranks, as one: sums, softmaxes, and merges in rank order."""

from __future__ import annotations

from functools import lru_cache

from mercurygen.errors import InternalError
from mercurygen.ir.atoms import Region
from mercurygen.lower.body import Body
from mercurygen.lower.events import Cut, Merge, Pack, Unweigh, Weigh
from mercurygen.lower.plan import Reduce
from mercurygen.lower.recorder import Tile
from mercurygen.lower.results import Named


class Reductions(Body):
    """One rank's part in the reductions of a nest."""

    def reduce(self, results: Named, reduce: Reduce) -> Named:
        """Partial results of a dimension's ranks, as one."""
        mine = {name: x for name, x in results.items() if name in reduce.tensors}
        mine = self.widen(mine)
        results = {**results, **mine}
        if reduce.kind == "sum":
            for name, x in list(mine.items()):
                way = self.scatter_sum if reduce.axis else self.sum_over
                mine[name] = results[name] = way(x, reduce)
                del x
            return results
        if reduce.kind == "softmax" and reduce.axis is None:
            self.softmax_over(mine, reduce)
            return results
        return {**results, **self.exchange(mine, reduce)}

    def narrowed(self, x: Tile, reduce: Reduce) -> Tile:
        """In the dtype that is asked for on the link."""
        return x if reduce.dtype is None else self.cast(x, reduce.dtype)

    def scatter_sum(self, x: Tile, reduce: Reduce) -> Tile:
        """Everyone's sum of its part."""
        x = self.narrowed(x, reduce)
        parts = self.like(f"{x.tensor.name} in parts", x)
        self.events.append(Pack(x.live.number, parts.live.number, reduce.axis, reduce.join))
        region = self.scattered(x, reduce)
        target = self.tile(f"{x.tensor.name} of {reduce.dim}", x.tensor, region, x.dtype)
        self.wait(self.collective("reduce-scatter", reduce.dim, parts, target))
        return self.cast(target, self.plan.partial(x.tensor))

    def sum_over(self, x: Tile, reduce: Reduce) -> Tile:
        """The sum of all, everywhere."""
        x = self.narrowed(x, reduce)
        self.wait(self.collective("all-reduce", reduce.dim, x, x))
        return self.cast(x, self.plan.partial(x.tensor))

    def softmax_over(self, mine: Named, reduce: Reduce) -> None:
        """The maximum of lse, then one sum of what is weighed by it, in place."""
        out, lse = (mine[name] for name in reduce.tensors)
        most = self.like("largest lse", lse)
        self.events.append(Cut(lse.live.number, most.live.number, ()))
        self.wait(self.collective("all-reduce", reduce.dim, most, most, reduce="max"))
        packed = out._replace(
            live=self.empty("weighed out and weights", self.nbytes(out) + self.nbytes(lse))
        )
        pair = (out.live.number, lse.live.number)
        self.events.append(Weigh(pair, most.live.number, packed.live.number))
        self.wait(self.collective("all-reduce", reduce.dim, packed, packed))
        self.events.append(Unweigh(packed.live.number, most.live.number, pair))

    def scattered(self, x: Tile, reduce: Reduce) -> Region:
        """What a rank keeps of a partial result along the axis of a reduction."""
        places = _dealt(len(x.atoms(reduce.axis)), reduce.join, self.place[reduce.dim])
        kept = tuple(x.atoms(reduce.axis)[i] for i in places)
        index = x.tensor.axes.index(reduce.axis)
        return (*x.region[:index], kept, *x.region[index + 1 :])

    def exchange(self, mine: Named, reduce: Reduce) -> Named:
        """Partial results to the ranks that keep them, merged there in rank order."""
        size, received = self.mesh.extent(reduce.dim), {}
        for name, x in mine.items():
            if reduce.axis is None:
                parts = x._replace(
                    live=self.empty(f"{name} from {reduce.dim}", self.nbytes(x) * size)
                )
                self.wait(self.collective("all-gather", reduce.dim, x, parts))
                received[name] = (parts, x.region)
                continue
            packed = self.like(f"{name} in parts", x)
            self.events.append(Pack(x.live.number, packed.live.number, reduce.axis, reduce.join))
            parts = self.like(f"{name} from {reduce.dim}", x)
            self.wait(self.collective("all-to-all", reduce.dim, packed, parts))
            received[name] = (parts, self.scattered(x, reduce))
            del packed
        results = {
            name: self.tile(name, parts.tensor, region, parts.dtype)
            for name, (parts, region) in received.items()
        }
        self.fill(results)
        first = results[reduce.tensors[0]]
        scratch = self.merge_scratch(first) if reduce.kind == "softmax" else 0
        sources = tuple(parts.live.number for parts, _ in received.values())
        targets = tuple(x.live.number for x in results.values())
        for part in range(size):
            self.events.append(Merge(sources, targets, (), part, scratch))
        return results


@lru_cache(maxsize=4096)
def _dealt(length: int, join, index: int) -> tuple[int, ...]:
    """Places of a joined list that one rank owns."""
    order = join.pieces()
    size, rest = divmod(length, len(order))
    if rest:
        raise InternalError(f"{length} atoms cannot be dealt in {len(order)} pieces")
    runs = {run: place for place, (rank, run) in enumerate(order) if rank == index}
    return tuple(runs[run] * size + i for run in sorted(runs) for i in range(size))
