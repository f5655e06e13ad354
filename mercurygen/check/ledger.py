"""What the buffers of all ranks hold, and whether it is what an event needs there."""

from __future__ import annotations

from dataclasses import replace

from mercurygen.check.content import (
    Blank,
    Content,
    Holding,
    Most,
    Parts,
    Weighed,
    places_of,
    put,
    take,
)
from mercurygen.check.play import Op, Play
from mercurygen.check.report import Check, ProofError, label, place
from mercurygen.check.space import Space
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Cuts, Trace
from mercurygen.lower.plan import Plan


class Ledger:
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
        self.softmaxes = {c.outputs[0] for c in self.program.combines if c.kind == "softmax"}
        self.sent: dict[Op, tuple[Holding, ...]] = {}
        self.returned: list[set[str]] = [set() for _ in traces]
        self.tiles = self.contributions = self.rank = self.index = 0
        for trace in traces:
            for name, buffer in trace.inputs.items():
                given = self.space.pinned(self.program.tensor(name), trace.rank)
                self.holding[trace.rank][buffer] = given

    def fail(self, what: str, check: Check = "lineage") -> None:
        """Say what is wrong at this event."""
        where = place(self.traces[self.rank], self.index)
        raise ProofError(check, self.rank, f"{where}: {what}")

    @property
    def here(self) -> list[Holding]:
        """Contents of the rank's buffers."""
        return self.holding[self.rank]

    def places(self, content: Content, cuts: Cuts) -> tuple[tuple[int, ...], ...]:
        """The places that some cuts leave; of several stripes none lie in one piece."""
        for axis, start, stop in cuts:
            if axis in self.plan.atoms.striped and axis in content.axes:
                length = len(content.atoms(axis))
                if (start, stop) != (0, length):
                    self.fail(f"{axis} {start} to {stop - 1} of {length} stripes of {content}")
        return places_of(content, cuts)

    def input(self, buffer: int, tensor: Tensor) -> Content:
        """What a kernel reads as an input, which must be that input."""
        content = self.here[buffer]
        if not isinstance(content, Content) or content.tensor != tensor.name:
            words = label(self.traces[self.rank], buffer)
            self.fail(f"{words} is read as {tensor.name}, but holds {content or 'nothing'}")
        return content

    def output(self, buffer: int, tensor: Tensor) -> Content:
        """What an output holds before something is merged into it."""
        held, trace = self.here[buffer], self.traces[self.rank]
        if isinstance(held, Blank) and held.tensor == tensor.name:
            held = self.unwritten(held, buffer)
            self.here[buffer] = held
            self.fits(buffer)
        if not isinstance(held, Content) or held.tensor != tensor.name or held.seen is None:
            what = f"is merged into as {tensor.name}, but holds {held or 'nothing'}"
            self.fail(f"{label(trace, buffer)} {what}")
        return held

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
        merged = Content(old.tensor, old.axes, old.region, sums)
        self.here[buffer] = put(whole, merged, places)

    def known(self, buffer: int) -> Holding:
        """What a buffer holds; of one that is still as it was filled, whose region."""
        held = self.here[buffer]
        if isinstance(held, Blank):
            held = self.here[buffer] = self.unwritten(held, buffer)
        return held

    def unwritten(self, blank: Blank, buffer: int) -> Content:
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

    def softmax(self) -> tuple[str, ...]:
        """The outputs of the softmax merge."""
        found = next((c.outputs for c in self.program.combines if c.kind == "softmax"), None)
        if found is None:
            self.fail("the operator has no softmax merge")
        return found

    # --- lengths --------------------------------------------------------------------------------

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
            content = self.here[buffer] = self.unwritten(content, buffer)
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

    def fits_anew(self, source: int, target: int) -> None:
        """A copy in another dtype has as many elements."""
        content = self.here[source]
        if content is None:
            self.fail(f"{label(self.traces[self.rank], source)} is copied, but holds nothing")
        if isinstance(content, Content):
            self.here[target] = content
            self.fits(target)
