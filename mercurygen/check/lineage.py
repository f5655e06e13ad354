"""Proof that every output tile gets every contribution of the mask exactly once.

The contents of all buffers are followed through the events of all ranks, in an order in which
they can happen. What a rank has received is what the sender's buffer held when its batch started.
"""

from __future__ import annotations

from mercurygen.check.content import Blank, Content, Holding, Parts, Unknown, brief, pack, unpack
from mercurygen.check.play import Op, Play
from mercurygen.check.report import Check, ProofError, label, place
from mercurygen.check.space import Space, fault_of, members, shares_of
from mercurygen.lower.events import (
    Batch,
    Cast,
    Collective,
    Event,
    Fill,
    Kernel,
    Pack,
    Return,
    Trace,
    Unpack,
    Wait,
)
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Block


class Lineage:
    """Contents of all ranks' buffers while a play is repeated.

    Attributes:
        tiles: of outputs, returned and complete.
        contributions: to the first output.
    """

    def __init__(self, plan: Plan, traces: tuple[Trace, ...], play: Play) -> None:
        self.space, self.program, self.traces, self.play = Space(plan), plan.program, traces, play
        program = plan.program
        rows = [t.name for t in program.inputs if t.name not in plan.nest.tensors]
        self.rows, self.reads = len(rows), (*rows, *plan.nest.tensors)
        self.writes = tuple(t.name for t in program.outputs)
        self.holding: list[list[Holding]] = [[None] * len(t.buffers) for t in traces]
        self.sent: dict[Op, tuple[Holding, ...]] = {}
        self.returned: list[set[str]] = [set() for _ in traces]
        self.tiles = self.contributions = self.rank = self.index = 0
        for trace in traces:
            for name, buffer in trace.inputs.items():
                given = self.space.pinned(program.tensor(name), trace.rank)
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
        for rank, returned in enumerate(self.returned):
            if self.writes[0] not in returned or returned != self.returned[0]:
                missing = ", ".join(sorted({self.writes[0], *self.returned[0]} - returned))
                raise ProofError("lineage", rank, f"{missing or 'an output'} is not returned")

    def fail(self, what: str, check: Check = "lineage") -> None:
        """Say what is wrong at this event."""
        where = place(self.traces[self.rank], self.index)
        raise ProofError(check, self.rank, f"{where}: {what}")

    def step(self, event: Event) -> None:
        """One event of the rank."""
        here = self.holding[self.rank]
        match event:
            case Batch(op, _, sends, recvs):
                self.depart(op, tuple(m.buffer for m in sends), tuple(m.buffer for m in recvs))
            case Collective(op, _, _, source, target):
                self.depart(op, (source,), (target,))
            case Wait(op):
                self.arrive(self.play.ops[self.rank][op])
            case Pack(source, target, by, join):
                here[target] = pack(here[source], by, join)
            case Unpack(source, target, by, join):
                here[target] = unpack(here[source], by, join)
                self.fits(target)
            case Kernel():
                self.kernel(event)
            case Fill(outputs):
                for name, buffer in zip(self.writes, outputs, strict=False):
                    here[buffer] = Blank(name)
            case Cast(source, target):
                here[target] = here[source]
            case Return(name, buffer):
                self.result(name, buffer)

    # --- transfers ----------------------------------------------------------------------------

    def depart(self, op: int, sends: tuple[int, ...], recvs: tuple[int, ...]) -> None:
        """What is sent is what the buffers hold now; what receives holds nothing till the end."""
        here = self.holding[self.rank]
        self.sent[self.play.ops[self.rank][op]] = tuple(here[buffer] for buffer in sends)
        for buffer in sends:
            self.fits(buffer)
        for buffer in recvs:
            here[buffer] = None

    def arrive(self, op: Op) -> None:
        """The buffers of a finished operation hold what was sent."""
        here = self.holding[self.rank]
        if isinstance(op.event, Collective):
            parts = [self.sent[member][0] for member in op.partners]
            if op.event.kind == "all-to-all":
                me = op.partners.index(op)
                for member, part in zip(op.partners, parts, strict=True):
                    if not isinstance(part, Parts) or len(part.parts) != len(parts):
                        self.fail(f"rank {member.rank} sends {part}, not one part to each")
                parts = [part.parts[me] for part in parts]
            if not all(isinstance(part, Content) for part in parts):
                self.fail("a member sends what is no part of one tensor")
            here[op.event.target] = Parts(tuple(parts))
            return
        for message, partner in zip(
            op.event.recvs, op.partners[len(op.event.sends) :], strict=True
        ):
            other, position = partner
            here[message.buffer] = self.sent[other][position]

    def fits(self, buffer: int) -> None:
        """A buffer that moves, or was joined, is just as long as its content."""
        trace, content = self.traces[self.rank], self.holding[self.rank][buffer]
        if content is None or isinstance(content, Blank):
            self.fail(f"{label(trace, buffer)} moves, but holds {content or 'nothing'}")
        whole = content.parts if isinstance(content, Parts) else (content,)
        needed = sum(map(self.space.nbytes, whole))
        length = trace.buffers[buffer].nbytes
        if needed != length:
            what = f"{label(trace, buffer)} has {length} bytes for the {needed} of {content}"
            self.fail(what, "memory")

    # --- the body -----------------------------------------------------------------------------

    def kernel(self, event: Kernel) -> None:
        """Record the contributions of one block."""
        if (len(event.inputs), len(event.outputs)) != (len(self.reads), len(self.writes)):
            self.fail(f"reads {', '.join(self.reads)} and writes {', '.join(self.writes)}")
        inputs = [self.input(b, name) for b, name in zip(event.inputs, self.reads, strict=True)]
        rows, cols = inputs[0].chunks, inputs[-1].chunks
        for number, content in enumerate(inputs):
            alike = rows if number < self.rows else cols
            if content.chunks != alike or content.heads != inputs[0].heads:
                self.fail(f"{content} does not go with {inputs[0]} and {inputs[-1]}")
            if any(a >= b for a, b in zip(alike, alike[1:], strict=False)):
                self.fail(f"{content} is not in global order")
        block = event.block
        fault = fault_of(self.program, block, rows, cols)
        if fault:
            self.fail(fault)
        if not event.merge and block.rows != (0, len(rows)):
            self.fail(f"the block is to be the whole output, but rows are {brief(rows)}")
        shares = shares_of(block, cols)
        here = self.holding[self.rank]
        for name, buffer in zip(self.writes, event.outputs, strict=True):
            content = self.output(name, buffer, event.merge, inputs[0])
            added: dict[int, tuple[int, ...]] = {}
            for line in content.seen:
                if id(line) not in added:
                    added[id(line)] = self.add(line, block, shares, content)
            seen = tuple(added[id(line)] for line in content.seen)
            here[buffer] = Content(name, rows, content.heads, seen)

    def input(self, buffer: int, name: str) -> Content:
        """What a kernel reads as an input, which must be that input."""
        content = self.holding[self.rank][buffer]
        if not isinstance(content, Content) or content.tensor != name:
            words = label(self.traces[self.rank], buffer)
            self.fail(f"{words} is read as {name}, but holds {content or 'nothing'}")
        return content

    def output(self, name: str, buffer: int, merge: bool, rows: Content) -> Content:
        """What an output holds before the kernel."""
        content = self.holding[self.rank][buffer]
        words = label(self.traces[self.rank], buffer)
        if not merge and content is not None:
            self.fail(f"{words} is overwritten: it holds {content}")
        if isinstance(content, Content) and content.tensor == name:
            if (content.chunks, content.heads) != (rows.chunks, rows.heads):
                self.fail(f"{words} holds {content}, but the rows are of {rows}")
            return content
        if merge and not (isinstance(content, Blank) and content.tensor == name):
            self.fail(f"{words} is merged into as {name}, but holds {content or 'nothing'}")
        line = (0,) * len(rows.chunks)
        content = Content(name, rows.chunks, rows.heads, (line,) * len(rows.heads))
        length = self.traces[self.rank].buffers[buffer].nbytes
        if length < self.space.nbytes(content):
            self.fail(f"{words} has {length} bytes, too few for {content}", "memory")
        return content

    def add(
        self, line: tuple[int, ...], block: Block, shares: tuple[int, ...], out: Content
    ) -> tuple[int, ...]:
        """The cells of one head with a block's share in them; nothing may be there already."""
        start, stop = block.rows
        for row, old, new in zip(out.chunks[start:stop], line[start:stop], shares, strict=True):
            if old & new:
                tile = f"tile (rows of chunk {row}, heads {brief(out.heads)}) of {out.tensor}"
                self.fail(f"{tile} gets column chunks {brief(members(old & new))} a second time")
        sums = (old | new for old, new in zip(line[start:stop], shares, strict=True))
        return (*line[:start], *sums, *line[stop:])

    # --- the end ------------------------------------------------------------------------------

    def result(self, name: str, buffer: int) -> None:
        """An output is complete, and laid out as the caller wants it."""
        content, words = self.holding[self.rank][buffer], label(self.traces[self.rank], buffer)
        if name not in self.writes or name in self.returned[self.rank]:
            self.fail(f"{name} is no output, or is returned already")
        if not isinstance(content, Content) or content.tensor != name or content.seen is None:
            self.fail(f"{words} is returned as {name}, but holds {content or 'nothing'}")
        wanted = self.space.pinned(self.program.tensor(name), self.rank)
        if (content.chunks, content.heads) != (wanted.chunks, wanted.heads):
            self.fail(f"{words} holds {content}, but the caller wants {wanted}")
        expected = tuple(map(self.space.domain, content.chunks))
        for head, line in zip(content.heads, content.seen, strict=True):
            for row, have, want in zip(content.chunks, line, expected, strict=True):
                if have != want:
                    self.fail(
                        f"tile (rows of chunk {row}, heads {head}) of {name} lacks column chunks "
                        f"{brief(members(want & ~have))}"
                    )
        self.returned[self.rank].add(name)
        self.tiles += content.cells
        if name == self.writes[0]:
            self.contributions += sum(n.bit_count() for n in expected) * len(content.heads)
