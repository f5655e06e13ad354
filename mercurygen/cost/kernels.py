"""Seconds of what a rank does by itself: thread blocks on SMs, bytes of memory, and launches.

Attention is a grid of thread blocks, one for every 128 rows of a head, one at a time on an SM. A
block goes over the keys that its rows see, whole tiles of them, and spends some time around that
loop. Per score it does the products, at their share of the peak, and what of the softmax they do
not hide. A full grid takes whole waves; a causal one the mean of its blocks, and then waits for a
long one that began late. Its gradient has five products where attention has two (2.5 times the
FLOP, as FlashAttention's benchmark_flash_attention.py counts), and blocks of keys that go over
queries. Neither is faster than memory brings its tensors.

Any other body runs its own lines: products at the GPU's share of the peak, and a pass through
memory for every other operation. Everything else moves bytes through memory. No kernel takes less
than a launch; the host, which launches them, takes its own time for each. The Triton kernels are
taken to be as fast as torch's, a product like a product: nobody measured them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from mercurygen.cost.body import body_of
from mercurygen.cost.topology import Gpu
from mercurygen.errors import InternalError
from mercurygen.ir.kernel import ATEN, TRITON
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import ATTENTION, BACKWARD
from mercurygen.lower.events import (
    Buffer,
    Cast,
    Cut,
    Derive,
    Event,
    Fill,
    Kernel,
    Merge,
    Pack,
    Put,
    Unpack,
    Unweigh,
    Weigh,
)
from mercurygen.lower.plan import Plan
from mercurygen.lower.sizes import padded_width
from mercurygen.lower.visible import DIAGONAL, EVERY, Band, Block, band_pairs, sizes_of

# seconds of compute, of copies, and what launches add; and, beside them, of the host
Spent = tuple[float, float, float, float]

Documents = tuple[tuple[int, int], ...]  # of each its rows and columns
NOTHING: Spent = (0.0, 0.0, 0.0, 0.0)
FUSED = ATTENTION  # one kernel: nothing of theirs passes through memory
TILE = 128  # rows of a thread block, and of a tile: kBlockM in flash_fwd_launch_template.h
GRADIENT_TAIL = 0.5  # blocks of the gradient begin in any order: on average half of the longest


def added(a: Spent, b: Spent) -> Spent:
    """Both, one after the other."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def seconds(spent: Spent) -> float:
    """Of the GPU."""
    return spent[0] + spent[1] + spent[2]


class Kernels:
    """Prices of the kernels of one plan on one kind of GPU."""

    def __init__(self, plan: Plan, gpu: Gpu, operator: Operator | None = None) -> None:
        """
        Args:
            plan: the plan.
            gpu: what runs it.
            operator: whose lines the body is; torch's attention needs none.
        """
        self.plan, self.gpu, self.program = plan, gpu, plan.program
        self.aten = plan.program.kernel == ATEN
        self.triton = plan.program.kernel == TRITON
        self.gradient = plan.program.operator in BACKWARD
        if not (self.aten or self.triton) and operator is None:
            raise InternalError(f"the lines of {self.program.operator} are not given")
        self.operator = operator
        self.element = plan.itemsize("inputs")
        self.wide = plan.itemsize("accumulator")
        peaks = {2: gpu.matmul_flops_16, 4: gpu.matmul_flops_32, 8: gpu.matmul_flops_64}
        self.flops = peaks[self.element]
        self.hbm, self.launch = gpu.hbm_bandwidth * gpu.hbm_efficiency, gpu.launch_latency
        self.names = tuple(axis.name for axis in self.program.axes)
        if self.aten or self.triton:
            self.width = padded_width(plan)
            self.places = tuple(map(self.names.index, ("B", "S_q", "S_kv", "H", "G")))
            self.sizes = self.program.extent("D"), self.program.extent("D_v")
        self.documents: Documents = ()
        self._calls: dict[tuple, Spent] = {}

    def kernel(self, event: Kernel) -> Spent:
        """The body on one block, and its merge."""
        block = event.block
        if block is None:
            return self.call(event.extents, EVERY, event.merge)
        return self.call(event.extents, bounds(block), event.merge, sizes_of(block))

    def call(
        self, extents: Sequence[int], band: Band, merge: bool, documents: Documents = ()
    ) -> Spent:
        """A call of the body.

        Args:
            extents: per axis of the program, how many indices it is given.
            band: which columns a row sees.
            merge: whether its share is merged into the outputs.
            documents: rows and columns of each packed document; none: the block is one.
        """
        key = extents, band, merge, documents
        spent = self._calls.get(key)
        if spent is None:
            self.documents = documents
            spent = self._price()(*key[:3])
            self._calls[key] = spent
        return spent

    def _price(self) -> Callable[[Sequence[int], Band, bool], Spent]:
        """What a call of the body costs."""
        if self.triton:
            return self._triton_gradient if self.gradient else self._triton
        if self.aten:
            return self._gradient if self.gradient else self._aten
        return self._lines

    def copy(self, nbytes: float) -> Spent:
        """An element-wise kernel that reads and writes these bytes in all."""
        spent = nbytes / self.hbm
        return 0.0, spent, max(0.0, self.launch - spent), self.gpu.host_launch

    def copies(self, sizes: Sequence[float]) -> Spent:
        """One element-wise kernel for each of some numbers of bytes."""
        spent = launch = 0.0
        for nbytes in sizes:
            one = nbytes / self.hbm
            spent += one
            launch += max(0.0, self.launch - one)
        return 0.0, spent, launch, len(sizes) * self.gpu.host_launch

    def event(self, event: Event, buffers: tuple[Buffer, ...]) -> Spent:
        """A copy of a trace; a part of a buffer costs what the part has."""

        def size(number: int) -> int:
            return buffers[number].nbytes

        match event:
            case Pack(target=part) | Cut(target=part) | Unpack(source=part) | Put(source=part):
                return self.copy(2 * size(part))
            case Cast(source, target):
                return self.copy(size(source) + size(target))
            case Fill(outputs):
                return self.copies([size(number) for number in outputs])
            case Derive(inputs, output):
                return self.copy(sum(map(size, inputs)) + size(output))
            case Merge(sources, targets, _, part):
                parts = sources if part is None else targets
                return self.merge([size(number) for number in parts])
            case Weigh((out, lse), _, target):
                return self.weigh(size(out), size(lse), size(target))
            case Unweigh(source, _, (out, lse)):
                return self.weigh(size(out), size(lse), size(source))
            case _:
                raise InternalError(f"{event} is no copy")

    def merge(self, sizes: Sequence[int]) -> Spent:
        """Partial results of these sizes into others: sums, or a softmax of out and lse."""
        softmax = len(sizes) == 2 and any(c.kind == "softmax" for c in self.program.combines)
        if softmax:
            return self.copies(_lerp(*sizes))
        return self.copies([3 * size for size in sizes])

    def weigh(self, out: int, lse: int, packed: int) -> Spent:
        """The weight of every row, and the product (or the quotient) beside it."""
        return self.copies([3 * lse, out + lse + packed])

    # --- a grid of thread blocks ----------------------------------------------------------------

    def _compute(self, work: float, nbytes: float) -> Spent:
        """One kernel, which is no faster than memory brings its bytes."""
        spent = max(work, nbytes / self.hbm)
        return spent, 0.0, max(0.0, self.launch - spent), self.gpu.host_launch

    def grid(self, heads: int, height: int, width: int, flops: int, band: Band) -> float:
        """Seconds of attention: thread blocks of rows that go over columns.

        Args:
            heads: over the batch too.
            height: rows of a head.
            width: columns that they go over, those that they see.
            flops: of a score.
            band: which columns a row sees.
        """
        gpu, seen = self.gpu, _seen(height, width, height, width, band)
        score = flops / (self.flops * gpu.attention_efficiency) + 1 / gpu.softmax_rate
        if self.documents:
            return self._mixed(heads, self.documents, score, band != EVERY, gpu.block_start)
        return self._waves(heads, height, seen, score, gpu.block_start, gpu.causal_tail)

    def gradient_grid(self, heads: int, height: int, width: int, flops: int, band: Band) -> float:
        """The same of its gradient: thread blocks of columns that go over rows."""
        gpu, seen = self.gpu, _seen(height, width, width, height, band)
        score = flops / (self.flops * gpu.gradient_efficiency) + 1 / gpu.softmax_rate
        if self.documents:
            turned = tuple((width, height) for height, width in self.documents)
            return self._mixed(heads, turned, score, band != EVERY, gpu.gradient_start)
        return self._waves(heads, width, seen, score, gpu.gradient_start, GRADIENT_TAIL)

    def _waves(
        self,
        heads: int,
        length: int,
        seen: tuple[int, float | None],
        score: float,
        start: int,
        tail: float,
    ) -> float:
        """Blocks of a length that go over the most, and the mean, of what they see."""
        blocks, sms, (most, mean) = heads * -(-length // TILE), self.gpu.sms, seen
        longest = -(-most // TILE) * TILE + start
        loops = -(-blocks // sms) * longest
        if mean is not None:
            loops = min(loops, max(longest, blocks * (mean + start) / sms + tail * longest))
        return loops * TILE * sms * score

    def _mixed(
        self, heads: int, documents: Documents, score: float, causal: bool, start: int
    ) -> float:
        """The same of documents that are one grid: thread blocks of very different lengths.

        They begin as they come, so that on average the SMs wait for half of the longest.
        """
        loops, longest = 0.0, 0
        for height, width in documents:
            blocks = -(-height // TILE)
            tiled = -(-width // TILE) * TILE
            least, most = sorted((height, width))  # a causal one has a square at its end
            cut = least * (2 * most - least + TILE) / (2 * TILE)
            loops += (min(cut, blocks * tiled) if causal else blocks * tiled) + blocks * start
            longest = max(longest, tiled + start)
        loops = max(longest, heads * loops / self.gpu.sms + longest / 2)
        return loops * TILE * self.gpu.sms * score

    # --- torch's attention ----------------------------------------------------------------------

    def _aten(self, extents: Sequence[int], band: Band, merge: bool) -> Spent:
        """2 matrix products of 2 FLOP for each score and component."""
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        heads = kv_heads * group
        read = height * heads + 2 * width * kv_heads
        rows = batch * height * heads
        share = rows * self.width * self.element + rows * self.wide
        nbytes = batch * read * self.width * self.element + share
        work = self.grid(batch * heads, height, width, 4 * self.width, band)
        spent = self._compute(work, nbytes)
        sizes = self._pads(batch, height * heads, width * kv_heads)
        if merge:
            sizes += self._merge(rows)
        return added(spent, self.copies(sizes)) if sizes else spent

    def _triton(self, extents: Sequence[int], band: Band, merge: bool) -> Spent:
        """The same products at the same rate, heads unpadded; results pass through memory once."""
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        heads = kv_heads * group
        rows, cols = batch * height * heads, batch * width * kv_heads
        key, value = self.sizes
        read = (rows * key + cols * (key + value)) * self.element
        share = rows * (value + 1) * self.wide
        parts, flops = _by_diagonal(height, width, band), 2 * (key + value)
        work = sum(self.grid(batch * heads, height, n, flops, cut) for n, cut in parts)
        return self._compute(work, read + (2 if merge else 1) * share)

    def _triton_gradient(self, extents: Sequence[int], band: Band, merge: bool) -> Spent:
        """Two kernels, that of keys of 4 products and that of queries of 3; each adds as it writes.

        At the rate of torch's gradient: both work out the scores and their slopes anew.
        """
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        heads = batch * kv_heads * group
        key, value = self.sizes
        rows, cols = heads * height, batch * width * kv_heads
        read = (rows + cols) * (key + value) * self.element + 2 * rows * self.wide
        shares = cols * (key + value) * self.wide, rows * key * self.wide
        flops = 4 * (key + value), 2 * (2 * key + value)
        parts, grid = _by_diagonal(height, width, band), self.gradient_grid
        grids = [sum(grid(heads, height, n, each, cut) for n, cut in parts) for each in flops]
        pairs = zip(grids, shares, strict=True)
        keys, queries = (self._compute(work, read + 2 * share) for work, share in pairs)
        spent = added(keys, queries)
        return spent if merge else added(spent, self.copies([*shares]))

    def _gradient(self, extents: Sequence[int], band: Band, merge: bool) -> Spent:
        """5 matrix products; a sum for each of dq, dk and dv."""
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        queries, keys = batch * height * kv_heads * group, batch * width * kv_heads
        nbytes = (4 * queries + 4 * keys) * self.width * self.element + 2 * queries * self.wide
        heads = batch * kv_heads * group
        work = self.gradient_grid(heads, height, width, 10 * self.width, band)
        spent = self._compute(work, nbytes)
        key, value = self.sizes
        sizes = []
        if key != self.width:
            sizes += [n * (key + self.width) * self.element for n in (queries, keys)]
        if value != self.width:
            sizes += [n * (value + self.width) * self.element for n in (queries, queries, keys)]
        if merge:
            wide = self.element + 2 * self.wide
            sizes += [queries * key * wide, keys * key * wide, keys * value * wide]
        return added(spent, self.copies(sizes)) if sizes else spent

    def _pads(self, batch: int, queries: int, keys: int) -> list[int]:
        """Bytes of each copy to the kernel's head size: of q, k and v, where theirs differs."""
        key, value = self.sizes
        rows = []
        if key != self.width:
            rows += [(queries, key), (keys, key)]
        if value != self.width:
            rows += [(keys, value)]
        return [batch * n * (size + self.width) * self.element for n, size in rows]

    def _merge(self, rows: int) -> list[int]:
        """Bytes of each kernel of `_merge`: difference, its sigmoid, widening, lerp, logaddexp."""
        lse, out = rows * self.wide, rows * self.sizes[1]
        widen = [out * (self.element + self.wide)] if self.element < self.wide else []
        return [3 * lse, 2 * lse, *widen, 3 * out * self.wide + lse, 3 * lse]

    # --- any other body -------------------------------------------------------------------------

    def _lines(self, extents: Sequence[int], band: Band, merge: bool) -> Spent:
        """Every matrix product; unless one kernel does it all, a pass for every other operation."""
        assert self.operator is not None
        given = dict(zip(self.names, extents, strict=True))
        body = body_of(self.operator)
        times = prod(given[axis] for axis in body.points)
        fused = self.program.operator in FUSED
        flops = sum(2 * prod(given[axis] for axis in axes) for axes in body.products)
        shares = [
            prod(given[axis] for axis in tensor.axes)
            * self.plan.itemsize(self.plan.partial(tensor))
            for tensor in self.program.outputs
        ]
        read = (
            prod(given[axis] for axis in tensor.axes) * self.plan.itemsize(tensor.dtype)
            for tensor in self.program.read
        )
        if fused:
            height, width = (given[axis] for axis in self.program.mask_axes)
            grid = self.grid if self.program.operator == FUSED[0] else self.gradient_grid
            work = grid(times, height, width, flops // (height * width), band)
        else:
            work = flops * times / (self.flops * self.gpu.matmul_efficiency)
        spent = self._compute(work, sum(read) + sum(shares))
        if not fused:
            elements = [prod(given[a] for a in shape if a) for shape in body.passes]
            spent = added(spent, self.copies([times * n * self.wide for n in elements]))
        return added(spent, self.merge(shares)) if merge else spent


def bounds(block: Block) -> Band:
    """The band of a block; what is masked by position is priced as a square on the diagonal."""
    return DIAGONAL if block.by_position else block.band


def _seen(height: int, width: int, length: int, over: int, band: Band) -> tuple[int, float | None]:
    """What thread blocks go over: most, and on average if the mask makes them differ.

    Args:
        height, width: rows and columns of the block.
        length: the one of these that is cut into thread blocks.
        over: the other.
        band: which columns a row sees.
    """
    low, high = band
    if band == EVERY:
        return over, None
    if band == DIAGONAL:
        return over, (over + TILE) / 2  # half of what a tile of any shape has
    most = over if low is None or high is None else min(over, high - low + TILE)
    edges = (low is not None) + (high is not None)  # each cuts through a tile
    mean = band_pairs(height, width, band) / length + (edges * TILE - 1) / 2
    return most, min(mean, float(over))


def _by_diagonal(height: int, width: int, band: Band) -> tuple[tuple[int, Band], ...]:
    """Columns of a block with a band each: all before its square on the diagonal apart."""
    if band == (None, width - height) and width > height:
        return (width - height, EVERY), (height, DIAGONAL)
    return ((width, band),)


def _lerp(out: int, lse: int) -> tuple[int, ...]:
    """Bytes of each kernel of a softmax merge: difference, its sigmoid, lerp, logaddexp."""
    return 3 * lse, 2 * lse, 3 * out + lse, 3 * lse
