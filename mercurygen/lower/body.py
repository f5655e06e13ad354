"""The body on the tiles that are here: what they have in common, and its blocks."""

from __future__ import annotations

from functools import lru_cache

from mercurygen.ir.atoms import Region
from mercurygen.ir.kernel import ATEN
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Cuts, Kernel, Operand, Turn
from mercurygen.lower.recorder import Limits, NotARun, Tile, cuts_of
from mercurygen.lower.results import Named, Results
from mercurygen.lower.sizes import scratch_bytes, share_bytes, with_block
from mercurygen.lower.visible import Block, visible
from mercurygen.lower.walks import Owners


class Body(Results):
    """One rank's calls of the body."""

    def turn(self, owner: Owners) -> None:
        """The body comes to the tile of an owner."""
        part = tuple((axis, *at) for axis, at in self.part.items())
        self.events.append(Turn(tuple({**self.owner, **owner}.items()), part))

    def operands(self, tensors: Named, outputs: Named) -> tuple[dict, tuple[Operand, ...], tuple]:
        """What all operands of the body have in common, and each cut to it."""
        tiles = [tensors[t.name] for t in self.program.read]
        results = list(outputs.values())
        signature = tuple((x.tensor.axes, x.region) for x in (*tiles, *results))
        common, cuts = _aligned(signature, tuple(sorted(self.limits.items())), self.striped)
        found = [
            Operand(x.live.number, cut) for x, cut in zip((*tiles, *results), cuts, strict=True)
        ]
        return dict(common), tuple(found[: len(tiles)]), tuple(found[len(tiles) :])

    def blocks(self, tensors: Named) -> tuple[Block, ...] | None:
        """What the mask leaves of the tiles that are here; None of an operator without one."""
        if not self.program.mask_axes:
            return None
        common, _, _ = self.operands(tensors, {})
        rows, columns = (common[axis] for axis in self.program.mask_axes)
        return visible(self.atoms.domain, self.program.kernel, rows, columns)

    def merge_blocks(self, tensors: Named, results: Named) -> None:
        """The body on what the mask leaves of the tiles, merged into results."""
        common, inputs, outputs = self.operands(tensors, results)
        blocks: tuple[Block | None, ...] = (None,)
        if self.program.mask_axes:
            rows, columns = (common[axis] for axis in self.program.mask_axes)
            blocks = visible(self.atoms.domain, self.program.kernel, rows, columns)
        for block in blocks:
            extents = with_block(self.plan, self.lengths(common), block)
            self.kernel(inputs, outputs, block, True, extents)

    def share(self, tensors: Named) -> Named:
        """The result of tiles that are one block."""
        common, inputs, _ = self.operands(tensors, {})
        blocks = self.blocks(tensors)
        block = None
        if blocks is not None:
            (block,) = blocks
            for axis, span in zip(self.program.mask_axes, block[:2], strict=True):
                touched = self.atoms.sequences[axis].touched(common[axis], span)
                common = {**common, axis: common[axis][slice(*touched)]}
        whole = self.lengths(common)
        extents = with_block(self.plan, whole, block)
        results = {}
        for tensor, nbytes in zip(
            self.program.outputs, share_bytes(self.plan, extents), strict=True
        ):
            aten = self.program.kernel == ATEN
            dtype = tensor.dtype if aten else self.plan.partial(tensor)
            live = self.empty(tensor.name, nbytes)
            results[tensor.name] = Tile(live, tensor, self.region_in(tensor, common), dtype)
        outputs = tuple(Operand(x.live.number) for x in results.values())
        self.kernel(inputs, outputs, block, False, extents)
        return results

    def region_in(self, tensor: Tensor, common: Limits) -> Region:
        """The part of an output that a call works out."""
        return tuple(
            common.get(axis) or self.limits.get(axis) or self.atoms.iterations(axis, self.place)
            for axis in tensor.axes
        )

    def lengths(self, common: Limits) -> dict[str, int]:
        """Indices along every axis."""
        length = self.atoms.length
        return {
            axis.name: length(axis.name, common.get(axis.name, (0,))) for axis in self.program.axes
        }

    def kernel(self, inputs, outputs, block: Block | None, merge: bool, extents) -> None:
        """The body on one block; its share is merged into the outputs, or is them."""
        scratch = scratch_bytes(self.plan, extents, merge)
        numbers = tuple(extents[axis.name] for axis in self.program.axes)
        self.events.append(Kernel(inputs, outputs, block, merge, scratch, numbers))


@lru_cache(maxsize=65536)
def _aligned(
    operands: tuple, limits: tuple, striped: tuple[str, ...]
) -> tuple[tuple, tuple[Cuts, ...]]:
    """The atoms that operands have in common along every axis, and each one's cuts to them."""
    common: dict[str, tuple[int, ...]] = dict(limits)
    for axes, region in operands:
        for axis, atoms in zip(axes, region, strict=True):
            held = common.get(axis)
            if held is None or held == atoms:
                common[axis] = atoms
            elif len(held) <= len(atoms):
                common[axis] = tuple(a for a in held if a in set(atoms))
            else:
                common[axis] = tuple(a for a in atoms if a in set(held))
    held = {
        axis: atoms for axes, region in operands for axis, atoms in zip(axes, region, strict=True)
    }
    for axis, atoms in common.items():
        if not atoms and held.get(axis):
            raise NotARun(axis)  # one is of other tiles than another
    cuts = tuple(
        cuts_of(axes, region, tuple(common[axis] for axis in axes), striped)
        for axes, region in operands
    )
    return tuple(common.items()), cuts
