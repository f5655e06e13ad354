"""Seconds of what a rank does by itself: a roofline, and the least time of any kernel.

Attention runs at `attention_efficiency` of the matrix peak on its live (query, key) pairs, or as
fast as memory brings its tensors, if that is slower. Everything else moves bytes through memory.
"""

from __future__ import annotations

from mercurygen.cost.topology import Gpu
from mercurygen.errors import InternalError
from mercurygen.lower.events import Buffer, Cast, Event, Fill, Pack, Unpack
from mercurygen.lower.plan import Plan
from mercurygen.lower.sizes import extent_of, local_heads, padded_width, share_bytes
from mercurygen.lower.visible import Block, live_pairs

Spent = tuple[float, float, float]  # seconds of compute, of copies, and what launches add

NOTHING: Spent = (0.0, 0.0, 0.0)


def added(a: Spent, b: Spent) -> Spent:
    """Both, one after the other."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


class Kernels:
    """Prices of the kernels of one plan on one kind of GPU."""

    def __init__(self, plan: Plan, gpu: Gpu) -> None:
        self.plan, self.gpu = plan, gpu
        self.batch = plan.program.extent("B")
        self.heads, self.kv_heads = local_heads(plan)
        self.width = padded_width(plan)
        self.element = plan.itemsize("inputs")
        self.wide = plan.itemsize("accumulator")
        peaks = {2: gpu.matmul_flops_16, 4: gpu.matmul_flops_32, 8: gpu.matmul_flops_64}
        self.flops = peaks[self.element] * gpu.attention_efficiency
        self._blocks: dict[tuple[Block, bool], Spent] = {}

    def block(self, block: Block, merge: bool) -> Spent:
        """The body on one block, and its merge."""
        spent = self._blocks.get((block, merge))
        if spent is None:
            spent = self._attention(block)
            for nbytes in (*self._pads(block), *(self._merge(block) if merge else ())):
                spent = added(spent, self.copy(nbytes))
            self._blocks[block, merge] = spent
        return spent

    def blocks(self, blocks: tuple[Block, ...], merge: bool) -> Spent:
        """The body on every block of a tile."""
        spent = NOTHING
        for block in blocks:
            spent = added(spent, self.block(block, merge))
        return spent

    def copy(self, nbytes: float) -> Spent:
        """An element-wise kernel that reads and writes these bytes in all."""
        seconds = nbytes / self.gpu.hbm_bandwidth
        return 0.0, seconds, max(0.0, self.gpu.launch_latency - seconds)

    def event(self, event: Event, buffers: tuple[Buffer, ...]) -> Spent:
        """A copy of a trace."""
        match event:
            case Pack(source, target) | Unpack(source, target) | Cast(source, target):
                return self.copy(buffers[source].nbytes + buffers[target].nbytes)
            case Fill(outputs):
                spent = NOTHING
                for number in outputs:
                    spent = added(spent, self.copy(buffers[number].nbytes))
                return spent
            case _:
                raise InternalError(f"{event} is no copy")

    def _attention(self, block: Block) -> Spent:
        """2 matrix products of 2 FLOP for each live pair, head and component."""
        height, width = extent_of(block, self.plan)
        pairs = live_pairs(block, self.plan.chunk)
        flops = 4 * pairs * self.batch * self.heads * self.width
        read = height * self.heads + 2 * width * self.kv_heads
        nbytes = self.batch * read * self.width * self.element + sum(share_bytes(self.plan, block))
        seconds = max(flops / self.flops, nbytes / self.gpu.hbm_bandwidth)
        return seconds, 0.0, max(0.0, self.gpu.launch_latency - seconds)

    def _pads(self, block: Block) -> list[int]:
        """Bytes of each copy to the kernel's head size: of q, k and v, where theirs differs."""
        height, width = extent_of(block, self.plan)
        key, value = self.plan.program.extent("D"), self.plan.program.extent("D_v")
        rows = []
        if key != self.width:
            rows += [(height * self.heads, key), (width * self.kv_heads, key)]
        if value != self.width:
            rows += [(width * self.kv_heads, value)]
        return [self.batch * n * (size + self.width) * self.element for n, size in rows]

    def _merge(self, block: Block) -> list[int]:
        """Bytes of each kernel of `_merge`: difference, its sigmoid, widening, lerp, logaddexp."""
        height, _ = extent_of(block, self.plan)
        rows = self.batch * height * self.heads
        lse, out = rows * self.wide, rows * self.plan.program.extent("D_v")
        widen = [out * (self.element + self.wide)] if self.element < self.wide else []
        return [3 * lse, 2 * lse, *widen, 3 * out * self.wide + lse, 3 * lse]
