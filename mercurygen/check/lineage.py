"""Proof that every cell of an output gets every contribution of the domain exactly once.

The contents of all buffers are followed through the events of all ranks, in an order in which
they can happen. What a rank has received is what the sender's buffer held when its batch started.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from mercurygen.check.content import (
    Blank,
    Content,
    Holding,
    Most,
    Parts,
    Unknown,
    Weighed,
    brief,
    cut,
    pack,
    parts_of,
    place_part,
    places_of,
    put,
    single,
    summed,
    take,
    unpack,
)
from mercurygen.check.play import Op, Play
from mercurygen.check.report import Check, ProofError, label, place
from mercurygen.check.space import Space, fault_of
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import (
    Batch,
    Cast,
    Collective,
    Cut,
    Derive,
    Event,
    Fill,
    Free,
    Kernel,
    Merge,
    Pack,
    Put,
    Return,
    Trace,
    Unpack,
    Unweigh,
    Wait,
    Weigh,
)
from mercurygen.lower.plan import Plan


class Lineage:
    """Contents of all ranks' buffers while a play is repeated.

    Attributes:
        tiles: cells of outputs, returned and complete.
        contributions: to the first output.
    """

    def __init__(self, plan: Plan, traces: tuple[Trace, ...], play: Play) -> None:
        self.space, self.program, self.traces, self.play = Space(plan), plan.program, traces, play
        self.plan = plan
        self.reads, self.writes = self.program.read, self.program.outputs
        self.holding: list[list[Holding]] = [[None] * len(t.buffers) for t in traces]
        self.elements: list[list[int]] = [[0] * len(t.buffers) for t in traces]
        self.sent: dict[Op, tuple[Holding, ...]] = {}
        self.returned: list[set[str]] = [set() for _ in traces]
        self.tiles = self.contributions = self.rank = self.index = 0
        for trace in traces:
            for name, buffer in trace.inputs.items():
                given = self.space.pinned(self.program.tensor(name), trace.rank)
                self.holding[trace.rank][buffer] = given

    def run(self) -> None:
        """Repeat the play.

        Raises:
            ProofError: of check "lineage", or "memory" if a buffer is not as long as its content.
        """
        for rank, start, stop in self.play.order:
            self.rank, events = rank, self.traces[rank].events
            for index in range(start, stop):
                self.index = index
                try:
                    self.step(events[index])
                except Unknown as fault:
                    self.fail(str(fault))
        wanted = {t.name for t in self.writes} - set(self.program.optional)
        for rank, returned in enumerate(self.returned):
            if wanted - returned or returned != self.returned[0]:
                missing = ", ".join(sorted((wanted | self.returned[0]) - returned))
                raise ProofError("lineage", rank, f"{missing or 'an output'} is not returned")

    def fail(self, what: str, check: Check = "lineage") -> None:
        """Say what is wrong at this event."""
        where = place(self.traces[self.rank], self.index)
        raise ProofError(check, self.rank, f"{where}: {what}")

    @property
    def here(self) -> list[Holding]:
        """Contents of the rank's buffers."""
        return self.holding[self.rank]

    def step(self, event: Event) -> None:
        """One event of the rank."""
        here = self.here
        match event:
            case Batch() | Collective():
                self.depart(event)
            case Wait(op):
                self.arrive(self.play.ops[self.rank][op])
            case Pack(source, target, axis, join, part):
                here[target] = pack(here[source], axis, join, part)
                self.fits(target)
            case Unpack():
                self.unpack(event)
            case Cut(source, target, cuts):
                self.cut(source, target, cuts)
            case Put(source, target, cuts):
                whole, piece = self.started(target), single(here[source])
                here[target] = put(whole, piece, places_of(whole, cuts))
            case Kernel():
                self.kernel(event)
            case Merge():
                self.merge(event)
            case Weigh() | Unweigh():
                self.weigh(event)
            case Derive(inputs, output):
                self.derive(inputs, output)
            case Fill(outputs):
                self.fill(outputs)
            case Cast(source, target):
                self.fits_anew(source, target)
                here[target] = here[source]
            case Return(name, buffer):
                self.result(name, buffer)
            case Free(buffer):
                here[buffer] = None

    # --- transfers ----------------------------------------------------------------------------

    def depart(self, event: Batch | Collective) -> None:
        """What is sent is what the buffers hold now; what receives holds nothing till the end."""
        here, op = self.here, self.play.ops[self.rank][event.op]
        if isinstance(event, Collective):
            if event.kind != "broadcast" or op.partners.index(op) == event.root:
                self.fits(event.source)
            self.sent[op] = (here[event.source],)
            here[event.target] = None
            return
        for message in event.sends:
            self.fits(message.buffer, message.nbytes)
        self.sent[op] = tuple(here[message.buffer] for message in event.sends)
        for message in event.recvs:
            here[message.buffer] = None

    def arrive(self, op: Op) -> None:
        """The buffers of a finished operation hold what was sent."""
        here, event = self.here, op.event
        if isinstance(event, Collective):
            here[event.target] = self.collected(op, [self.sent[m][0] for m in op.partners])
            return
        partners = op.partners[len(event.sends) :]
        for message, (other, position) in zip(event.recvs, partners, strict=True):
            here[message.buffer] = self.sent[other][position]

    def collected(self, op: Op, parts: list[Holding]) -> Holding:
        """What a collective leaves on a rank."""
        event, me = op.event, op.partners.index(op)
        if event.kind == "broadcast":
            return parts[event.root]
        if event.kind in ("all-to-all", "reduce-scatter"):
            for member, part in zip(op.partners, parts, strict=True):
                if not isinstance(part, Parts) or len(part.parts) != len(parts):
                    self.fail(f"rank {member.rank} sends {part}, not one part to each")
            parts = [part.parts[me] for part in parts]
        if event.kind == "all-reduce":
            return self.reduced(event, parts, tuple(m.rank for m in op.partners))
        if not all(isinstance(part, Content) for part in parts):
            self.fail("a member sends what is no part of one tensor")
        return summed(parts) if event.kind == "reduce-scatter" else Parts(tuple(parts))

    def reduced(self, event: Collective, parts: list[Holding], ranks: tuple[int, ...]) -> Holding:
        """What an all-reduce leaves: the largest lse, sums of weighed results, or sums."""
        if event.reduce == "max":
            lse = self.softmax()[1]
            if not all(isinstance(part, Content) and part.tensor == lse for part in parts):
                self.fail("the maximum of what is no lse")
            if len({part.region for part in parts}) > 1:
                self.fail("the largest lse of different rows")
            return Most(parts[0], ranks)
        if all(isinstance(part, Weighed) for part in parts):
            if any(part.most.ranks != ranks or len(part.ranks) > 1 for part in parts):
                self.fail("weighed by the largest lse of other ranks than are added up")
            pair = tuple(summed([part.pair[i] for part in parts]) for i in range(2))
            return Weighed(pair, parts[0].most, ranks)
        if not all(isinstance(part, Content) and part.seen is not None for part in parts):
            self.fail("adds what are no partial results")
        kinds = {c.kind for c in self.program.combines if parts[0].tensor in c.outputs}
        if kinds != {"sum"}:
            self.fail(f"adds partial results of {parts[0].tensor}, which are no sums")
        return summed(parts)

    def size(self, content: Holding) -> int:
        """Elements of what a buffer holds."""
        if isinstance(content, Parts):
            return sum(map(self.size, content.parts))
        if isinstance(content, Most):
            return self.size(content.content)
        if isinstance(content, Weighed):
            return sum(map(self.size, content.pair))
        return self.space.elements(content)

    def fits(self, buffer: int, nbytes: int | None = None) -> None:
        """A buffer that moves, or was joined, is just as long as its content."""
        trace, content = self.traces[self.rank], self.here[buffer]
        if isinstance(content, Blank):
            content = self.here[buffer] = self.unwritten(content, buffer, nbytes)
        if content is None:
            self.fail(f"{label(trace, buffer)} moves, but holds nothing")
        length = trace.buffers[buffer].nbytes if nbytes is None else nbytes
        sizes = [self.plan.itemsize(dtype) for dtype in self.dtypes(content)]
        elements = self.size(content)
        if length not in [elements * size for size in sizes]:
            needed = " or ".join(str(elements * size) for size in sorted(set(sizes)))
            what = f"{label(trace, buffer)} has {length} bytes for the {needed} of {content}"
            self.fail(what, "memory")

    def dtypes(self, content: Holding) -> tuple[str, ...]:
        """Dtypes that a content may have: inputs one, outputs as they are merged or returned."""
        if isinstance(content, Parts):
            content = content.parts[0]
        if not isinstance(content, Content):
            return ("accumulator",)
        tensor = self.program.tensor(content.tensor)
        if tensor.role != "output":
            return (tensor.dtype,)
        asked = [r.dtype for r in self.plan.nest.reduces if r.dtype and tensor.name in r.tensors]
        return (tensor.dtype, self.plan.partial(tensor), *asked)

    def unwritten(self, blank: Blank, buffer: int, nbytes: int | None) -> Content:
        """A filled buffer that is sent as it is: what it would be merged into says its region."""
        region = self.blank_region(buffer)
        tensor = self.program.tensor(blank.tensor)
        empty = Content(tensor.name, tensor.axes, region, None)
        return replace(empty, seen=(0,) * empty.cells)

    def blank_region(self, buffer: int):
        """The region that the plan gave a filled buffer."""
        region = self.traces[self.rank].regions.get(buffer)
        if region is None:
            self.fail(f"{label(self.traces[self.rank], buffer)} moves, but holds no tensor")
        return region

    def fits_anew(self, source: int, target: int) -> None:
        """A copy in another dtype has as many elements."""
        content = self.here[source]
        if content is None:
            self.fail(f"{label(self.traces[self.rank], source)} is copied, but holds nothing")
        if isinstance(content, Content):
            self.here[target] = content
            self.fits(target)

    # --- copies -------------------------------------------------------------------------------

    def unpack(self, event: Unpack) -> None:
        """Parts joined, into a new buffer or into their place in a larger one."""
        here = self.here
        if event.part is None:
            here[event.target] = unpack(here[event.source], event.axis, event.join)
            self.fits(event.target)
            return
        parts = parts_of(here[event.source], event.join)
        whole = self.started(event.target)
        for rank, part in enumerate(parts):
            wanted = place_part(whole, part, event.axis, event.join, rank, event.part)
            whole = put(whole, part, wanted)
        here[event.target] = whole

    def started(self, buffer: int) -> Content:
        """An output that is put together part by part."""
        held = self.here[buffer]
        if isinstance(held, Content):
            return held
        name = self.traces[self.rank].buffers[buffer].label
        tensor = next((t for t in self.writes if t.name == name), None)
        if held is not None or tensor is None:
            self.fail(f"{label(self.traces[self.rank], buffer)} is written in part")
        content = self.space.pinned(tensor, self.rank)
        self.here[buffer] = content = replace(content, seen=(0,) * content.cells)
        self.fits(buffer)
        return content

    def cut(self, source: int, target: int, cuts) -> None:
        """A dense copy of a part."""
        here = self.here
        content = here[source]
        if isinstance(content, Blank):
            content = here[source] = self.unwritten(content, source, None)
        here[target] = cut(single(content), cuts)
        self.fits(target)

    def derive(self, inputs: tuple[int, ...], output: int) -> None:
        """A derived tensor is made of inputs that lie alike."""
        tensor = next(t for t in self.program.derived if len(t.reads) == len(inputs))
        region = self.space.pinned(tensor, self.rank)
        for name, buffer in zip(tensor.reads, inputs, strict=True):
            content = self.input(buffer, self.program.tensor(name))
            for axis in tensor.axes:
                if axis in content.axes and content.atoms(axis) != region.atoms(axis):
                    self.fail(f"{tensor.name} of {content}")
        self.here[output] = region
        self.fits(output)

    def fill(self, outputs: tuple[int, ...]) -> None:
        """Outputs become what merges to nothing."""
        by_label = {t.name: t.name for t in self.writes}
        for buffer in outputs:
            name = self.traces[self.rank].buffers[buffer].label
            if name not in by_label:
                self.fail(f"{label(self.traces[self.rank], buffer)} is no output")
            self.here[buffer] = Blank(name)

    # --- the body -----------------------------------------------------------------------------

    def kernel(self, event: Kernel) -> None:
        """Record the contributions of one block."""
        if (len(event.inputs), len(event.outputs)) != (len(self.reads), len(self.writes)):
            names = ", ".join(t.name for t in (*self.reads, *self.writes))
            self.fail(f"the body is of {names}")
        lists: dict[str, tuple[int, ...]] = {}
        for operand, tensor in zip(event.inputs, self.reads, strict=True):
            content = self.within(cut(self.input(operand.buffer, tensor), operand.cuts), event)
            for axis, atoms in zip(content.axes, content.region, strict=True):
                if lists.setdefault(axis, atoms) != atoms:
                    self.fail(f"{content} has {axis} {brief(atoms)}, others {brief(lists[axis])}")
        for axis, atoms in lists.items():
            if any(a >= b for a, b in zip(atoms, atoms[1:], strict=False)):
                self.fail(f"{axis} {brief(atoms)} is not in global order")
        self.masked(event, lists)
        for operand, tensor in zip(event.outputs, self.writes, strict=True):
            self.contribute(event, operand, tensor, lists)

    def within(self, content: Content, event: Kernel) -> Content:
        """A content cut to the block, along the axes of the mask."""
        if event.block is None:
            return content
        rows, cols = self.program.mask_axes
        return cut(content, ((rows, *event.block.rows), (cols, *event.block.cols)))

    def masked(self, event: Kernel, lists: dict[str, tuple[int, ...]]) -> None:
        """The kernel can do the block, and must; it is given as much as it says."""
        if (event.block is None) != (not self.program.mask_axes):
            self.fail("a block of an operator without a mask, or none of one with it")
        if event.block is not None:
            rows, cols = (lists[axis] for axis in self.program.mask_axes)
            fault = fault_of(self.space, event.block, rows, cols)
            if fault:
                self.fail(fault)

    def input(self, buffer: int, tensor: Tensor) -> Content:
        """What a kernel reads as an input, which must be that input."""
        content = self.here[buffer]
        if not isinstance(content, Content) or content.tensor != tensor.name:
            words = label(self.traces[self.rank], buffer)
            self.fail(f"{words} is read as {tensor.name}, but holds {content or 'nothing'}")
        return content

    def contribute(self, event: Kernel, operand, tensor: Tensor, lists: dict) -> None:
        """Add a block's share to an output; nothing of it may be there already."""
        buffer, here = operand.buffer, self.here
        causal = event.block is not None and event.block.causal
        region = tuple(lists.get(axis, (0,)) for axis in tensor.axes)
        shares = self.space.shares(tensor, region, lists, causal)
        words = label(self.traces[self.rank], buffer)
        if not event.merge:
            if here[buffer] is not None:
                self.fail(f"{words} is overwritten: it holds {here[buffer]}")
            here[buffer] = Content(tensor.name, tensor.axes, region, shares)
            return
        whole = self.output(buffer, tensor)
        places = places_of(whole, operand.cuts)
        if event.block is not None:
            rows, cols = self.program.mask_axes
            for axis, (start, stop) in ((rows, event.block.rows), (cols, event.block.cols)):
                if axis in tensor.axes:
                    index = tensor.axes.index(axis)
                    run = places[index][start:stop]
                    places = (*places[:index], run, *places[index + 1 :])
        self.add(buffer, whole, places, region, shares)

    def output(self, buffer: int, tensor: Tensor) -> Content:
        """What an output holds before something is merged into it."""
        held, trace = self.here[buffer], self.traces[self.rank]
        if isinstance(held, Blank) and held.tensor == tensor.name:
            held = self.unwritten(held, buffer, None)
            self.here[buffer] = held
            self.fits(buffer)
        if not isinstance(held, Content) or held.tensor != tensor.name or held.seen is None:
            what = f"is merged into as {tensor.name}, but holds {held or 'nothing'}"
            self.fail(f"{label(trace, buffer)} {what}")
        return held

    def add(self, buffer: int, whole: Content, places, region, shares: tuple[int, ...]) -> None:
        """Merge contributions into a part of an output."""
        old = take(whole, places)
        if old.region != region:
            self.fail(f"{label(self.traces[self.rank], buffer)} holds {old}, not the block's cells")
        tensor = self.program.tensor(whole.tensor)
        for have, new in zip(old.seen, shares, strict=True):
            if have & new:
                twice = self.space.words(tensor, have & new)
                self.fail(f"a cell of {old} gets {twice} a second time")
        sums = tuple(have | new for have, new in zip(old.seen, shares, strict=True))
        self.here[buffer] = put(whole, replace(old, seen=sums), places)

    # --- partial results ----------------------------------------------------------------------

    def merge(self, event: Merge) -> None:
        """Partial results into others; those that belong together are all there."""
        names = []
        for source, target in zip(event.sources, event.targets, strict=True):
            held = self.here[source]
            if isinstance(held, Blank):
                held = self.here[source] = self.unwritten(held, source, None)
            if event.part is not None:
                if not isinstance(held, Parts) or not 0 <= event.part < len(held.parts):
                    self.fail(f"part {event.part} of {held or 'nothing'}")
                held = held.parts[event.part]
            part = single(held)
            if part.seen is None:
                self.fail(f"{part} is no partial result")
            names.append(part.tensor)
            whole = self.output(target, self.program.tensor(part.tensor))
            self.add(target, whole, places_of(whole, event.cuts), part.region, part.seen)
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

    def softmax(self) -> tuple[str, ...]:
        """The outputs of the softmax merge."""
        found = next((c.outputs for c in self.program.combines if c.kind == "softmax"), None)
        if found is None:
            self.fail("the operator has no softmax merge")
        return found

    # --- the end ------------------------------------------------------------------------------

    def result(self, name: str, buffer: int) -> None:
        """An output is complete, and laid out as the caller wants it."""
        content, words = self.here[buffer], label(self.traces[self.rank], buffer)
        tensor = next((t for t in self.writes if t.name == name), None)
        if tensor is None or name in self.returned[self.rank]:
            self.fail(f"{name} is no output, or is returned already")
        if not isinstance(content, Content) or content.tensor != name or content.seen is None:
            self.fail(f"{words} is returned as {name}, but holds {content or 'nothing'}")
        wanted = self.space.pinned(tensor, self.rank)
        if content.region != wanted.region:
            self.fail(f"{words} holds {content}, but the caller wants {wanted}")
        length = self.traces[self.rank].buffers[buffer].nbytes
        needed = self.space.elements(content) * self.plan.itemsize(tensor.dtype)
        if length < needed:
            self.fail(f"{words} has {length} bytes for the {needed} of {name}", "memory")
        first = name == self.writes[0].name
        for cell, have in zip(product(*content.region), content.seen, strict=True):
            want = self.space.domain(tensor, cell)
            if have != want:
                at = ", ".join(
                    f"{axis} {i}"
                    for axis, i in zip(tensor.axes, cell, strict=True)
                    if self.space.count[axis] > 1
                )
                lacks = self.space.words(tensor, want & ~have)
                self.fail(f"the cell {at or '0'} of {name} lacks {lacks}")
            self.contributions += want.bit_count() if first else 0
        self.returned[self.rank].add(name)
        self.tiles += content.cells
