"""Partial results of the body: their buffers, their dtypes, one merged into another."""

from __future__ import annotations

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Fill, Merge
from mercurygen.lower.recorder import Limits, Tile, Tiles
from mercurygen.lower.sizes import softmax_scratch
from mercurygen.lower.walks import Walks

Named = dict[str, Tile]  # tiles of inputs, or partial results of outputs, by tensor


class Results(Walks):
    """One rank's partial results."""

    def result_region(self, tensor: Tensor, limits: Limits) -> Region:
        """What a rank works out of an output."""
        return tuple(
            limits.get(axis) or self.atoms.iterations(axis, self.place) for axis in tensor.axes
        )

    def nothing(self) -> Named:
        """What merges to nothing; outputs that stay here are what other tiles gave so far."""
        found, fresh = {}, {}
        for tensor in self.program.outputs:
            region, before = self.result_region(tensor, self.limits), self.staying.get(tensor.name)
            if before is not None and before.region == region:
                found[tensor.name] = before
                continue
            made = self.tile(tensor.name, tensor, region, self.plan.partial(tensor))
            found[tensor.name] = fresh[tensor.name] = made
        if fresh:
            self.fill(fresh)
        return found

    def fill(self, results: Named) -> None:
        """Buffers become what merges to nothing."""
        self.regions.update({x.live.number: x.region for x in results.values()})
        self.events.append(Fill(tuple(x.live.number for x in results.values())))

    def widen(self, results: Named) -> Named:
        """In the dtypes that they are merged in; the same buffers if they are that already."""
        return {n: self.cast(x, self.plan.partial(x.tensor)) for n, x in results.items()}

    def narrow(self, results: Named) -> Named:
        """In their own dtypes; the same buffers if they are that already."""
        return {n: self.cast(x, x.tensor.dtype) for n, x in results.items()}

    def merge(self, parts: Named, results: Named) -> None:
        """Merge partial results into others, in place; not what is those others."""
        parts = {n: x for n, x in parts.items() if x.live is not results[n].live}
        for combine in self.program.combines:
            names = [name for name in combine.outputs if name in parts]
            if not names:
                continue
            first = parts[names[0]]
            cuts = self.cuts_of(first.tensor, results[names[0]].region, first.region)
            self.events.append(
                Merge(
                    tuple(parts[name].live.number for name in names),
                    tuple(results[name].live.number for name in names),
                    cuts,
                    None,
                    self.merge_scratch(first) if combine.kind == "softmax" else 0,
                )
            )

    def merge_scratch(self, out: Tile) -> int:
        """Bytes beside a softmax merge of partial results in their own dtype."""
        return softmax_scratch(self.plan, out.tensor, out.region)


def named(tiles: Tiles) -> Named:
    """Tiles by their tensors' names."""
    return {x.tensor.name: x for x in tiles}
