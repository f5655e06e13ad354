"""A plan's trace of one rank, event by event, beside what the module's text does.

The methods of `Playback` stand for torch.distributed's functions, and for the module's kernel and
merge: each complains unless the plan does the same next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from mercurygen.emit.handles import Group, Operation, Work
from mercurygen.emit.kernels import mask_word
from mercurygen.emit.matching import Matching
from mercurygen.emit.python_expressions import Complaint
from mercurygen.emit.values import EXTERNALS, Storage, Tensor
from mercurygen.ir.caller import PACKED, arranged, exchanged
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.events import (
    Batch,
    Collective,
    Cuts,
    Kernel,
    Merge,
    Operand,
    Unweigh,
    Wait,
    Weigh,
)
from mercurygen.lower.visible import Block, binding


class Playback(Matching):
    """What the text does, each time beside the plan's next event."""

    def externals(self) -> dict[str, Any]:
        """What stands for torch and torch.distributed."""
        dist, gather = "torch.distributed.", partial(self.collective, "all-gather")
        own = {"P2POp": Operation, "batch_isend_irecv": self.batch}
        own |= {"all_to_all_single": partial(self.collective, "all-to-all")}
        own |= {"all_gather_single": gather, "all_gather_into_tensor": gather}
        own |= {"all_reduce": self.all_reduce}
        return EXTERNALS | {dist + name: value for name, value in own.items()}

    def hooks(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What is called instead of functions of the module."""
        return {
            "_autocast": lambda values: (values["q"], values["k"], values["v"]),
            "_check": lambda values: None,
            "_borders": lambda values: [*self.plan.atoms.domain.borders],
            "_block_forward": self.triton if self.program.kernel == TRITON else self.aten,
            "_merge": lambda values: self.merge(**values),
            "_weigh": lambda values: self.weigh(**values),
            "_unweigh": lambda values: self.unweigh(**values),
        }

    def inputs(self, scale: float | None, layout: str) -> list[Tensor]:
        """The tensors that `attention` is given: views that lie dense in the order inside."""
        pair = exchanged(layout)
        tensors = []
        for name, number in self.trace.inputs.items():
            tensor = Tensor.new(self.local_shape(name), self.dtype, "input", sure=False)
            self.bound[number], tensor.storage.buffer = tensor.storage, number
            outside = tensor.transpose(*pair) if pair else tensor
            tensors.append(outside.squeeze(0) if layout == PACKED else outside)
        head = self.program.extent(self.program.inputs[0].dims[3][0])
        self.scale = head**-0.5 if scale is None else scale
        return tensors

    def moved(
        self, what: str, number: int, tensor: Tensor, nbytes: int | None, into: bool = False
    ) -> None:
        """A transfer's operand: a whole dense buffer, or so many bytes at its front."""
        if not isinstance(tensor, Tensor) or not tensor.is_dense or not tensor.sure:
            raise Complaint(f"{what}: not sure to be contiguous")
        if not (tensor.whole if nbytes is None else tensor.at_front):
            raise Complaint(f"{what}: not all of a buffer, or not what stands at its front")
        if nbytes is not None:
            self.same(f"{what}, bytes", nbytes, tensor.numel() * tensor.dtype.itemsize)
        self.bind(what, number, tensor.storage)
        if into:
            tensor.storage.arriving = True
            tensor.storage.contents += 1
            self.contents[number] += 1

    def works(self, op: int, count: int, targets: Sequence[Tensor]) -> list[Work]:
        """Handles of a transfer, all to be waited on once."""
        waiting: list[Work] = []

        def wait(work: Work) -> None:
            if work not in waiting:
                raise Complaint("waits again")
            waiting.remove(work)
            if not waiting:
                what = f"waits for transfer {op}"
                self.same("wait", self.expect(Wait, what).op, op)
                for tensor in targets:
                    tensor.storage.arriving = False

        waiting += [Work(wait) for _ in range(count)]
        return list(waiting)

    def batch(self, ops: list[Operation]) -> list[Work]:
        """`batch_isend_irecv`."""
        sends, recvs = ([x for x in ops if x.path.endswith(kind)] for kind in (".isend", ".irecv"))
        if len(sends) + len(recvs) != len(ops):
            raise Complaint("a batch of something else than isend and irecv")
        event = self.expect(
            Batch, f"starts a batch along {' and '.join({x.group.dim for x in ops})}"
        )
        for verb, plan, text in (("sends", event.sends, sends), ("receives", event.recvs, recvs)):
            self.same(f"{verb} along {event.dim}", len(plan), len(text))
            for i, (message, op) in enumerate(zip(plan, text, strict=True)):
                what = f"operation {i} that {verb} along {event.dim}"
                self.same(f"{what}, group", event.dim, op.group.dim)
                self.same(f"{what}, peer", message.peer, op.peer)
                into = verb == "receives"
                self.moved(what, message.buffer, op.tensor, message.nbytes, into)
        return self.works(event.op, len(ops), [op.tensor for op in recvs])

    def collective(
        self, kind: str, into: Tensor, x: Tensor, *, group: Group, async_op: bool = False
    ) -> Any:
        """One that all ranks of a group do."""
        event = self.expect(Collective, f"starts an {kind} over {group.dim}")
        self.same("collective", event.kind, kind)
        self.same(f"{kind}, group", event.dim, group.dim)
        self.moved(f"{kind}, source", event.source, x, None)
        self.moved(f"{kind}, target", event.target, into, None, into=True)
        (work,) = self.works(event.op, 1, [into])
        return work if async_op else work.wait()

    def all_reduce(self, x: Tensor, op: Any = None, *, group: Group) -> None:
        """One that leaves the sum, or the maximum, in every rank's tensor."""
        event = self.expect(Collective, f"starts an all-reduce over {group.dim}")
        self.same("collective", event.kind, "all-reduce")
        self.same("all-reduce, group", event.dim, group.dim)
        how = getattr(op, "path", "sum").rpartition(".")[2].lower()
        self.same("all-reduce", event.reduce, how)
        self.moved("all-reduce, source", event.source, x, None)
        self.moved("all-reduce, target", event.target, x, None, into=True)
        (work,) = self.works(event.op, 1, [x])
        work.wait()

    def part(
        self,
        name: str,
        number: int,
        tensor: Tensor,
        cuts: Cuts,
        block: Block | None = None,
        extents: Sequence[int] | None = None,
    ) -> None:
        """A part of a tensor of the operator.

        Args:
            name: of the tensor.
            number: of its buffer.
            tensor: what the text has.
            cuts: of its axes, in atoms; of an axis left out, all.
            block: of that part, which tokens.
            extents: indices of every axis of the program that the body is given; None: all.
        """
        declared, names = self.program.tensor(name), [axis.name for axis in self.program.axes]
        given = dict(zip(names, extents or map(self.program.extent, names), strict=True))
        want = [(0, size) for size in tensor.base]
        for axis, start, stop in cuts:
            if declared.carries(axis):
                at = declared.dimension(axis)
                axes = declared.dims[at]
                size = prod(given[each] for each in axes[axes.index(axis) + 1 :])
                want[at] = tuple(size * n for n in self.tokens(name, number, axis, start, stop))
        sequence = self.program.sequence(declared)
        if block is not None and sequence:
            at = declared.dimension(sequence)
            span = block.given(self.program.mask_axes.index(sequence))
            want[at] = tuple(want[at][0] + n for n in span)
        if tensor.cuts is None or list(tensor.cuts) != want:
            raise Complaint(f"part of {name}: the plan has {want}, the text {tensor.cuts}")

    def of_block(self, name: str, tensor: Tensor, operand: Operand, event: Kernel) -> None:
        """A part of a tensor of the operator: the operand's cuts, and in them the block."""
        self.part(name, operand.buffer, tensor, operand.cuts, event.block, event.extents)

    def block(self, values: dict[str, Any]) -> Kernel:
        """What a block reads: the plan's next call."""
        event = self.expect(Kernel, "runs the kernel")
        for declared, operand in zip(self.program.inputs, event.inputs, strict=True):
            name, tensor = declared.name, values[declared.name]
            self.bind(f"{name} of the kernel", operand.buffer, tensor.storage)
            self.of_block(name, tensor, operand, event)
        self.same("scale", self.scale, values["scale"])
        return event

    def shares(self, values: dict[str, Any], dtype: Any, sure: bool) -> tuple[Tensor, Tensor]:
        """Fresh out and lse of a block; `sure`: dense in the order of their dimensions."""
        q, v = values["q"], values["v"]
        out = Tensor.new([*q.shape[:3], v.shape[3]], dtype, "kernel", sure=sure)
        lse = [q.shape[0], q.shape[2], q.shape[1]]
        return out, Tensor.new(lse, self.accumulator, "kernel", sure=sure)

    def masked(self, event: Kernel, values: dict[str, Any]) -> None:
        """How the mask cuts the block: of a row and a column alone either word says it."""
        block, word = event.block, mask_word(self.plan)
        plans = {"causal": block.masked, "ahead": block.band[1]}
        if word in plans and block.height * block.width > 1:
            self.same(word, plans[word], values[word])
        elif word == "band":
            size = block.height, block.width
            self.same(word, *(binding(*size, band) for band in (block.band, values[word])))

    def begins(self, event: Kernel, shares: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A block whose own result is what the plan goes on with."""
        shares = self.padded(event, shares[0]), shares[1]
        for operand, share in zip(event.outputs, shares, strict=True):
            self.bound[operand.buffer] = share.storage
            share.storage.buffer = operand.buffer
        return shares

    def padded(self, event: Kernel, out: Tensor) -> Tensor:
        """Out as a part of rows that are as long as the plan has them."""
        nbytes = self.trace.buffers[event.outputs[0].buffer].nbytes
        width = out.shape[3] * nbytes // out.storage.nbytes
        if width == out.shape[3]:
            return out
        full = Tensor.new([*out.shape[:3], width], out.dtype, "kernel", sure=out.sure)
        cuts = tuple((0, size) for size in out.shape)
        return Tensor(full.storage, out.shape, out.dtype, full.strides, out.sure, cuts, out.shape)

    def merges(self, event: Kernel, results: tuple[Tensor, Tensor]) -> None:
        """A block merged into results."""
        for name, operand, tensor in zip(("out", "lse"), event.outputs, results, strict=True):
            self.bind(f"{name} of the merge", operand.buffer, tensor.storage)
            self.of_block(name, tensor, operand, event)
            tensor.storage.contents += 1
            self.contents[operand.buffer] += 1

    def aten(self, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """`_block_forward` of torch's kernel, which `_merge` may follow."""
        event = self.block(values)
        self.masked(event, values)
        self.documents(event, values)
        shares = self.shares(values, self.dtype, sure=False)
        if not event.merge:
            return self.begins(event, shares)
        self.merging = event, [share.storage for share in shares]
        return shares

    def documents(self, event: Kernel, values: dict[str, Any]) -> None:
        """Which rows and columns of the block each packed document has."""
        pieces = event.block.documents
        if not pieces:
            return
        want = tuple([pieces[0][i][0], *(piece[i][1] for piece in pieces)] for i in (0, 1))
        want = tuple([place - places[0] for place in places] for places in want)
        one = ([0, values["q"].shape[1]], [0, values["k"].shape[1]])
        self.same("documents", want, values["documents"] or one)

    def triton(self, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """`_block_forward` of the Triton kernel, which merges by itself."""
        event, into = self.block(values), values["into"]
        self.masked(event, values)
        self.same("merged", event.merge, into is not None)
        if into is None:
            return self.begins(event, self.shares(values, self.accumulator, sure=True))
        self.merges(event, into)
        return into

    def merge(self, out: Tensor, lse: Tensor, share_out: Tensor, share_lse: Tensor) -> None:
        """`_merge`."""
        shares = share_out, share_lse
        if not self.merging:
            return self.merge_results((out, lse), shares)
        event, made = self.merging
        if [share.storage for share in shares] != made or not all(share.whole for share in shares):
            raise Complaint("merges something else than the block's result")
        self.merges(event, (out, lse))
        self.merging = None
        self.compared += 1

    def merge_results(self, pair: tuple[Tensor, Tensor], shares: tuple[Tensor, Tensor]) -> None:
        """`_merge` of what is no block's result."""
        event = self.expect(Merge, "merges")
        names = ("out", "lse")
        for name, number, tensor in zip(names, event.targets, pair, strict=True):
            self.bind(f"{name} of the merge", number, tensor.storage)
            self.part(name, number, tensor, event.cuts)
            tensor.storage.contents += 1
            self.contents[number] += 1
        for name, number, tensor in zip(names, event.sources, shares, strict=True):
            self.bind(f"{name} that is merged", number, tensor.storage)
            self.same(f"part of {name} that is merged", event.part, tensor.part)
            if tensor.storage.arriving or (event.part is None and not tensor.whole):
                raise Complaint(f"merges a part of {name}, or before it arrived")

    def weigh(self, out: Tensor, lse: Tensor, most: Tensor) -> Tensor:
        """`_weigh`."""
        event = self.expect(Weigh, "weighs results")
        for name, number, tensor in zip(
            ("out", "lse", "largest lse"),
            (*event.sources, event.most),
            (out, lse, most),
            strict=True,
        ):
            self.bind(f"{name} that is weighed", number, tensor.storage)
        packed = Tensor.new([out.numel() + lse.numel()], self.accumulator, "weighed")
        self.same("bytes", self.trace.buffers[event.target].nbytes, packed.storage.nbytes)
        self.bound[event.target], packed.storage.buffer = packed.storage, event.target
        return packed

    def unweigh(self, packed: Tensor, out: Tensor, lse: Tensor, most: Tensor) -> None:
        """`_unweigh`."""
        event = self.expect(Unweigh, "undoes the weights")
        self.bind("the sum", event.source, packed.storage)
        self.bind("the largest lse", event.most, most.storage)
        for name, number, tensor in zip(("out", "lse"), event.targets, (out, lse), strict=True):
            self.bind(f"{name} of the sum", number, tensor.storage)
            tensor.storage.contents += 1
            self.contents[number] += 1

    def result(self, result: Any, with_lse: bool, layout: str) -> None:
        """What `attention` returns."""
        names = ["out", "lse"] if with_lse else ["out"]
        if (event := self.peek()) or self.merging:
            raise Complaint(f"the plan {self.words(event)}, the text returns")
        tensors = result if with_lse else (result,)
        self.same("results", len(names), len(tensors))
        for name, tensor in zip(names, tensors, strict=True):
            self.bind(f"result {name}", self.returns[name], tensor.storage)
            shape = arranged(layout, self.local_shape(name))
            self.same(f"shape of {name}", shape, list(tensor.shape))
            self.put_together(name, tensor.storage)
        self.compared += len(names)

    def put_together(self, name: str, storage: Storage) -> None:
        """A result that parts were copied into: from the plan's buffers, all of it."""
        want = self.puts.get(storage.buffer, [])
        have: list[Storage] = []
        for source, _, _ in storage.puts:
            if not have or have[-1] is not source:
                have.append(source)
        self.same(f"copies into {name}", len(want), len(have))
        for number, source in zip(want, have, strict=True):
            self.bind(f"part of {name}", number, source)
        if want:
            size = sum(count for _, count, _ in storage.puts)
            self.same(f"elements copied into {name}", prod(storage.shape), size)
