"""A backward plan's trace of one rank, event by event, beside what the module's text does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mercurygen.emit.autograd import Context
from mercurygen.emit.kept import kept
from mercurygen.emit.playback import Playback
from mercurygen.emit.python_expressions import Complaint
from mercurygen.emit.values import Dtype, Tensor
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.events import Derive, Kernel, Merge
from mercurygen.lower.kept import SAVED

GRAD_OUT = "do"


class BackwardPlayback(Playback):
    """What the backward's text does, each time beside the plan's next event."""

    def externals(self) -> dict[str, Any]:
        """What stands for torch and torch.distributed."""
        scatter = partial(self.collective, "reduce-scatter")
        names = ("reduce_scatter_single", "reduce_scatter_tensor")
        own = {f"torch.distributed.{name}": scatter for name in names}
        return super().externals() | own

    def hooks(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What is called instead of functions of the module."""
        return {
            "_delta": self.derive,
            "_block_backward": self.triton if self.program.kernel == TRITON else self.aten,
            "_add": lambda values: self.add(**values),
        }

    def given(self, saved: tuple[Tensor, ...], scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradient of out, and the saved tensors: as dense as those that were saved."""
        dense = dict(zip(SAVED, (x.sure and x.is_dense for x in saved), strict=True))
        self.scale, tensors = scale, {}
        for name, number in self.trace.inputs.items():
            dtype = self.dtype_of(name)
            tensor = Tensor.new(self.local_shape(name), dtype, "input", sure=dense.get(name, False))
            self.bound[number], tensor.storage.buffer = tensor.storage, number
            tensors[name] = tensor
        return tensors[GRAD_OUT], tuple(tensors[name] for name in SAVED)

    def dtype_of(self, name: str) -> Dtype:
        """The dtype of a tensor of the operator."""
        return Dtype(self.plan.itemsize(self.program.tensor(name).dtype))

    def part(self, name: str, number: int, tensor: Tensor, *more: Any) -> None:
        """A part of a tensor; lse is a view of what crossed a border as [B, S, h, 1]."""
        if name == "lse" and tensor.cuts is None and tensor.turned:
            base, cuts = tensor.turned
            tensor = Tensor(
                tensor.storage, tensor.shape, tensor.dtype, tensor.strides, False, cuts, base
            )
        super().part(name, number, tensor, *more)

    def derive(self, values: dict[str, Any]) -> Tensor:
        """`_delta`."""
        event = self.expect(Derive, "makes delta")
        (derived,) = self.program.derived
        for name, number in zip(derived.reads, event.inputs, strict=True):
            tensor = values["grad_out" if name == GRAD_OUT else name]
            self.bind(f"{name} that {derived.name} is made of", number, tensor.storage)
            if not tensor.whole:
                raise Complaint(f"makes {derived.name} of a part of {name}")
        made = Tensor.new(self.local_shape(derived.name), self.accumulator, "derived")
        self.bound[event.output], made.storage.buffer = made.storage, event.output
        return made

    def block_of(self, values: dict[str, Any]) -> tuple[Kernel, dict[str, Tensor]]:
        """What a block reads: the plan's next call."""
        event = self.expect(Kernel, "runs the kernel")
        given = {**values, GRAD_OUT: values["grad_out"]}
        for declared, operand in zip(self.program.read, event.inputs, strict=True):
            tensor = given[declared.name]
            if tensor.storage.arriving:
                raise Complaint(f"the kernel reads {declared.name} before it arrived")
            self.bind(f"{declared.name} of the kernel", operand.buffer, tensor.storage)
            self.of_block(declared.name, tensor, operand, event)
        self.same("scale", self.scale, values["scale"])
        return event, given

    def triton(self, values: dict[str, Any]) -> None:
        """`_block_backward` of the Triton kernel, which adds by itself, to zeros at first."""
        event, given = self.block_of(values)
        self.masked(event, given)
        outputs = zip(self.program.outputs, event.outputs, given["grads"], strict=True)
        for declared, operand, tensor in outputs:
            name, number = declared.name, operand.buffer
            if event.merge:
                self.changed(f"{name} of the sum", number, tensor)
                self.of_block(name, tensor, operand, event)
                continue
            fresh = tensor.storage.made == 0.0 and tensor.storage.buffer is None and tensor.whole
            if not fresh or tensor.storage.nbytes != self.trace.buffers[number].nbytes:
                raise Complaint(f"{name} of the only block is not added to zeros of its size")
            self.bound[number], tensor.storage.buffer = tensor.storage, number

    def aten(self, values: dict[str, Any]) -> tuple[Tensor, ...]:
        """`_block_backward` of torch's kernel, which `_add` may follow."""
        event, given = self.block_of(values)
        self.masked(event, given)
        self.documents(event, given)
        shares = tuple(
            Tensor.new(given[tensor.name.removeprefix("d")].shape, self.dtype, "kernel", sure=False)
            for tensor in self.program.outputs
        )
        if event.merge:
            self.merging = event, [share.storage for share in shares]
        else:
            for operand, share in zip(event.outputs, shares, strict=True):
                self.bound[operand.buffer] = share.storage
                share.storage.buffer = operand.buffer
        return shares

    def add(self, totals: tuple[Tensor, ...], shares: tuple[Tensor, ...]) -> None:
        """`_add`."""
        if not self.merging:
            for total, share in zip(totals, shares, strict=True):
                self.add_results(total, share)
            return
        event, made = self.merging
        if [share.storage for share in shares] != made:
            raise Complaint("adds something else than the block's gradients")
        outputs = zip(self.program.outputs, event.outputs, totals, strict=True)
        for declared, operand, tensor in outputs:
            self.changed(f"{declared.name} of the sum", operand.buffer, tensor)
            self.of_block(declared.name, tensor, operand, event)
        self.merging = None
        self.compared += 1

    def add_results(self, total: Tensor, share: Tensor) -> None:
        """Gradients that have arrived, to those of this rank."""
        event = self.expect(Merge, "adds gradients")
        (source,), (target,) = event.sources, event.targets
        name = self.trace.buffers[target].label.split()[0]
        self.changed(f"{name} of the sum", target, total)
        self.part(name, target, total, event.cuts)
        self.bind(f"{name} that is added", source, share.storage)
        if share.storage.arriving or not share.whole:
            raise Complaint(f"adds a part of {name}, or before it arrived")

    def changed(self, what: str, number: int, tensor: Tensor) -> None:
        """A buffer that something is added to."""
        if tensor.storage.arriving:
            raise Complaint(f"{what}: a transfer still writes to it")
        self.bind(what, number, tensor.storage)
        tensor.storage.contents += 1
        self.contents[number] += 1

    def returned(self, result: Any, given: int) -> None:
        """What `backward` returns: gradients, and None for what is no tensor."""
        if (event := self.peek()) or self.merging:
            raise Complaint(f"the plan {self.words(event)}, the text returns")
        names = [tensor.name for tensor in self.program.outputs]
        if not isinstance(result, tuple) or len(result) != given:
            raise Complaint(f"the backward of {given} arguments returns something else")
        if any(x is not None for x in result[len(names) :]):
            raise Complaint("returns gradients of what is no tensor")
        for name, tensor in zip(names, result, strict=False):
            self.bind(f"result {name}", self.returns[name], tensor.storage)
            self.same(f"shape of {name}", self.local_shape(name), list(tensor.shape))
            self.same(f"dtype of {name}", self.dtype, tensor.dtype)
        self.compared += len(names)


# --- what a forward keeps -----------------------------------------------------------------------


def check_saved(forward: Playback, backward: BackwardPlayback, context: Context) -> None:
    """Complain unless the tensors that a forward kept are those that the backward's plan reads."""
    saved = context.saved or ()
    forward.same("tensors that are saved", len(SAVED), len(saved))
    numbers = kept(forward.plan, backward.plan, forward.trace)
    for name, tensor, contents in zip(SAVED, saved, context.contents, strict=True):
        forward.same(f"shape of saved {name}", backward.local_shape(name), list(tensor.shape))
        forward.same(f"dtype of saved {name}", backward.dtype_of(name), tensor.dtype)
        if name in numbers:
            forward.bind(f"saved {name}", numbers[name], tensor.storage)
        padded = tensor.storage.made == "kernel" and tensor.base == tensor.shape  # rows are longer
        if tensor.storage.contents != contents or not (tensor.whole or padded):
            raise Complaint(f"saves a part of {name}, or changes it later")
