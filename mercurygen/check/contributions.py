"""What the body and merges add to outputs; nothing twice."""

from __future__ import annotations

from mercurygen.check.content import Content, Most, Parts, Weighed, brief, single, take
from mercurygen.check.report import label
from mercurygen.check.space import fault_of
from mercurygen.check.transfers import Transfers
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Kernel, Merge, Operand, Unweigh, Weigh
from mercurygen.lower.sizes import scratch_bytes, softmax_scratch, with_block


class Contributions(Transfers):
    """Contents while they are computed."""

    def kernel(self, event: Kernel) -> None:
        """Record the contributions of one block."""
        if (len(event.inputs), len(event.outputs)) != (len(self.reads), len(self.writes)):
            names = ", ".join(t.name for t in (*self.reads, *self.writes))
            self.fail(f"the body is of {names}")
        lists: dict[str, tuple[int, ...]] = {}
        for operand, tensor in zip(event.inputs, self.reads, strict=True):
            content = self.part(operand, tensor)
            for axis, atoms in zip(content.axes, content.region, strict=True):
                if lists.setdefault(axis, atoms) != atoms:
                    self.fail(f"{content} has {axis} {brief(atoms)}, others {brief(lists[axis])}")
        for axis, atoms in lists.items():
            if any(a >= b for a, b in zip(atoms, atoms[1:], strict=False)):
                self.fail(f"{axis} {brief(atoms)} is not in global order")
        self.masked(event, lists)
        self.sized(event, lists)
        lists |= {axis: lists[axis][slice(*run)] for axis, run in self.touched(event, lists)}
        for operand, tensor in zip(event.outputs, self.writes, strict=True):
            self.contribute(event, operand, tensor, lists)

    def touched(self, event: Kernel, lists: dict) -> list[tuple[str, tuple[int, int]]]:
        """Per axis of the mask the run of an operand's atoms that the block has tokens of."""
        if event.block is None:
            return []
        cut, pairs = self.space.sequences, zip(self.program.mask_axes, event.block[:2], strict=True)
        return [(a, cut[a].touched(lists[a], span)) for a, span in pairs if a in lists]

    def part(self, operand: Operand, tensor: Tensor) -> Content:
        """What a kernel reads as an input."""
        content = self.input(operand.buffer, tensor)
        return take(content, self.places(content, operand.cuts))

    def masked(self, event: Kernel, lists: dict[str, tuple[int, ...]]) -> None:
        """The kernel can do the block, and must; it is given as much as it says."""
        if (event.block is None) != (not self.program.mask_axes):
            self.fail("a block of an operator without a mask, or none of one with it")
        if event.block is not None:
            rows, cols = (lists[axis] for axis in self.program.mask_axes)
            fault = fault_of(self.space, event.block, rows, cols)
            if fault:
                self.fail(fault)

    def sized(self, event: Kernel, lists: dict[str, tuple[int, ...]]) -> None:
        """The call is as large, and needs as much memory beside its operands, as it says."""
        extents = {
            axis.name: self.plan.atoms.length(axis.name, lists.get(axis.name, (0,)))
            for axis in self.program.axes
        }
        extents = with_block(self.plan, extents, event.block)
        if tuple(extents[axis.name] for axis in self.program.axes) != event.extents:
            self.fail(f"the body is given {extents}, but said to be given {event.extents}")
        scratch = scratch_bytes(self.plan, extents, event.merge)
        if event.scratch != scratch:
            self.fail(f"needs {scratch} bytes beside, not {event.scratch}", "memory")

    def contribute(self, event: Kernel, operand, tensor: Tensor, lists: dict) -> None:
        """Add a block's share to an output; nothing of it may be there already."""
        buffer, here = operand.buffer, self.here
        block = event.block
        masked = block is not None and (block.masked or bool(block.documents))
        region = tuple(lists.get(axis, (0,)) for axis in tensor.axes)
        shares = self.space.shares(tensor, region, lists, masked)
        words = label(self.traces[self.rank], buffer)
        if not event.merge:
            if here[buffer] is not None:
                self.fail(f"{words} is overwritten: it holds {here[buffer]}")
            here[buffer] = Content(tensor.name, tensor.axes, region, shares)
            return
        whole = self.output(buffer, tensor)
        places = self.places(whole, operand.cuts)
        held = {
            axis: tuple([atoms[i] for i in at])
            for axis, atoms, at in zip(whole.axes, whole.region, places, strict=True)
        }
        for axis, run in self.touched(event, held):
            index = tensor.axes.index(axis)
            places = (*places[:index], places[index][slice(*run)], *places[index + 1 :])
        self.add(buffer, whole, places, region, shares)

    # --- partial results ------------------------------------------------------------------------

    def merge(self, event: Merge) -> None:
        """Partial results into others; those that belong together are all there."""
        names, scratch = [], 0
        for source, target in zip(event.sources, event.targets, strict=True):
            held = self.known(source)
            if event.part is not None:
                if not isinstance(held, Parts) or not 0 <= event.part < len(held.parts):
                    self.fail(f"part {event.part} of {held or 'nothing'}")
                held = held.parts[event.part]
            part = single(held)
            if part.seen is None:
                self.fail(f"{part} is no partial result")
            tensor = self.program.tensor(part.tensor)
            if part.tensor in self.softmaxes:
                scratch = softmax_scratch(self.plan, tensor, part.region)
            names.append(part.tensor)
            whole = self.output(target, tensor)
            self.add(target, whole, self.places(whole, event.cuts), part.region, part.seen)
        if event.scratch != scratch:
            self.fail(f"needs {scratch} bytes beside, not {event.scratch}", "memory")
        if not any(set(names) <= set(c.outputs) for c in self.program.combines):
            self.fail(f"merges {', '.join(names)}, which do not belong together")
        for combine in self.program.combines:
            if combine.kind != "sum" and set(names) & set(combine.outputs) != set(combine.outputs):
                if set(names) & set(combine.outputs):
                    self.fail(f"merges {', '.join(names)} without what belongs to it")

    def weigh(self, event: Weigh | Unweigh) -> None:
        """A softmax's results to the scale of the largest lse, or back."""
        here = self.here
        most = here[event.most]
        if not isinstance(most, Most):
            self.fail(f"weighed by {most or 'nothing'}, which is no maximum")
        if isinstance(event, Weigh):
            pair = tuple(
                self.output(buffer, self.program.tensor(name))
                for buffer, name in zip(event.sources, self.softmax(), strict=True)
            )
            if pair[1].region != most.content.region:
                self.fail("weighed by the largest lse of other rows")
            here[event.target] = Weighed(pair, most, (self.rank,))
            self.fits(event.target)
            return
        held = here[event.source]
        if not isinstance(held, Weighed) or held.most != most:
            self.fail(f"out and lse of {held or 'nothing'}")
        for buffer, content in zip(event.targets, held.pair, strict=True):
            old = self.output(buffer, self.program.tensor(content.tensor))
            if old.region != content.region:
                self.fail(f"{label(self.traces[self.rank], buffer)} holds {old}, not {content}")
            here[buffer] = content
