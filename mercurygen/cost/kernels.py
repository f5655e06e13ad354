"""Seconds of what a rank does by itself: a roofline, and the least time of any kernel.

Attention runs at `attention_efficiency` of the matrix peak on its live (query, key) pairs, or as
fast as memory brings its tensors, if that is slower. Its gradient has five matrix products where
attention has two, so 2.5 times the FLOP (as FlashAttention's benchmark_flash_attention.py counts),
at the same efficiency. The Triton kernel is taken to be as fast: nobody measured it. Any other body
runs its own lines: products at that fraction of the peak too, the only one that a topology states,
and a pass through memory for every other operation. Everything else moves bytes through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from mercurygen.cost.body import body_of
from mercurygen.cost.topology import Gpu
from mercurygen.errors import InternalError
from mercurygen.ir.kernel import TRITON
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
from mercurygen.lower.sizes import ATEN, padded_width
from mercurygen.lower.visible import pairs_of

Spent = tuple[float, float, float]  # seconds of compute, of copies, and what launches add

NOTHING: Spent = (0.0, 0.0, 0.0)
FUSED = ATTENTION  # one kernel: nothing of theirs passes through memory


def added(a: Spent, b: Spent) -> Spent:
    """Both, one after the other."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


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
        self.flops = peaks[self.element] * gpu.attention_efficiency
        self.hbm, self.launch = gpu.hbm_bandwidth, gpu.launch_latency
        self.names = tuple(axis.name for axis in self.program.axes)
        if self.aten or self.triton:
            self.width = padded_width(plan)
            self.places = tuple(map(self.names.index, ("B", "S_q", "S_kv", "H", "G")))
            self.sizes = self.program.extent("D"), self.program.extent("D_v")
        self._calls: dict[tuple, Spent] = {}

    def kernel(self, event: Kernel) -> Spent:
        """The body on one block, and its merge."""
        causal = event.block is not None and event.block.causal
        return self.call(event.extents, causal, event.merge)

    def call(self, extents: Sequence[int], causal: bool, merge: bool) -> Spent:
        """A call of the body.

        Args:
            extents: per axis of the program, how many indices it is given.
            causal: whether the mask cuts the block.
            merge: whether its share is merged into the outputs.
        """
        key = extents, causal, merge
        spent = self._calls.get(key)
        if spent is None:
            spent = self._price()(*key)
            self._calls[key] = spent
        return spent

    def _price(self) -> Callable[[Sequence[int], bool, bool], Spent]:
        """What a call of the body costs."""
        if self.triton:
            return self._triton
        if self.aten:
            return self._gradient if self.gradient else self._aten
        return self._lines

    def copy(self, nbytes: float) -> Spent:
        """An element-wise kernel that reads and writes these bytes in all."""
        seconds = nbytes / self.hbm
        return 0.0, seconds, max(0.0, self.launch - seconds)

    def copies(self, sizes: Sequence[float]) -> Spent:
        """One element-wise kernel for each of some numbers of bytes."""
        seconds = launch = 0.0
        for nbytes in sizes:
            one = nbytes / self.hbm
            seconds += one
            launch += max(0.0, self.launch - one)
        return 0.0, seconds, launch

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

    # --- torch's attention ----------------------------------------------------------------------

    def _aten(self, extents: Sequence[int], causal: bool, merge: bool) -> Spent:
        """2 matrix products of 2 FLOP for each live pair, head and component."""
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        heads = kv_heads * group
        pairs = pairs_of(height, width, causal)
        flops = 4 * pairs * batch * heads * self.width
        read = height * heads + 2 * width * kv_heads
        rows = batch * height * heads
        share = rows * self.width * self.element + rows * self.wide
        nbytes = batch * read * self.width * self.element + share
        seconds = max(flops / self.flops, nbytes / self.hbm)
        spent = seconds, 0.0, max(0.0, self.launch - seconds)
        sizes = self._pads(batch, height * heads, width * kv_heads)
        if merge:
            sizes += self._merge(rows)
        return added(spent, self.copies(sizes)) if sizes else spent

    def _triton(self, extents: Sequence[int], causal: bool, merge: bool) -> Spent:
        """The same products at the same rate, heads unpadded; results pass through memory once."""
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        rows, cols = batch * height * kv_heads * group, batch * width * kv_heads
        key, value = self.sizes
        flops = 2 * pairs_of(height, width, causal) * batch * kv_heads * group * (key + value)
        read = (rows * key + cols * (key + value)) * self.element
        share = rows * (value + 1) * self.wide
        seconds = max(flops / self.flops, (read + (2 if merge else 1) * share) / self.hbm)
        return seconds, 0.0, max(0.0, self.launch - seconds)

    def _gradient(self, extents: Sequence[int], causal: bool, merge: bool) -> Spent:
        """5 matrix products; a sum for each of dq, dk and dv."""
        batch, height, width, kv_heads, group = (extents[i] for i in self.places)
        queries, keys = batch * height * kv_heads * group, batch * width * kv_heads
        pairs = pairs_of(height, width, causal)
        flops = 10 * pairs * batch * kv_heads * group * self.width
        nbytes = (4 * queries + 4 * keys) * self.width * self.element + 2 * queries * self.wide
        seconds = max(flops / self.flops, nbytes / self.hbm)
        spent = seconds, 0.0, max(0.0, self.launch - seconds)
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

    def _lines(self, extents: Sequence[int], causal: bool, merge: bool) -> Spent:
        """Every matrix product; unless one kernel does it all, a pass for every other operation.

        A fused kernel leaves out the dead half of a block that the mask cuts.
        """
        assert self.operator is not None
        given = dict(zip(self.names, extents, strict=True))
        body = body_of(self.operator)
        times = prod(given[axis] for axis in body.points)
        fused = self.program.operator in FUSED
        flops = sum(2 * prod(given[axis] for axis in axes) for axes in body.products) * times
        if fused and causal:
            flops /= 2
        shares = [
            prod(given[axis] for axis in tensor.axes)
            * self.plan.itemsize(self.plan.partial(tensor))
            for tensor in self.program.outputs
        ]
        read = (
            prod(given[axis] for axis in tensor.axes) * self.plan.itemsize(tensor.dtype)
            for tensor in self.program.read
        )
        seconds = max(flops / self.flops, (sum(read) + sum(shares)) / self.hbm)
        spent = seconds, 0.0, max(0.0, self.launch - seconds)
        if not fused:
            elements = [prod(given[a] for a in shape if a) for shape in body.passes]
            spent = added(spent, self.copies([times * n * self.wide for n in elements]))
        return added(spent, self.merge(shares)) if merge else spent


def _lerp(out: int, lse: int) -> tuple[int, ...]:
    """Bytes of each kernel of a softmax merge: difference, its sigmoid, lerp, logaddexp."""
    return 3 * lse, 2 * lse, 3 * out + lse, 3 * lse
