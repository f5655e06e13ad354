"""What transfers and copies leave in buffers."""

from __future__ import annotations

from mercurygen.check.content import (
    Blank,
    Content,
    Holding,
    Most,
    Parts,
    Weighed,
    brief,
    parts_of,
    place_part,
    put,
    single,
    summed,
    take,
    unpack,
)
from mercurygen.check.ledger import Ledger
from mercurygen.check.play import Op
from mercurygen.check.report import label
from mercurygen.lower.events import Batch, Collective, Unpack


class Transfers(Ledger):
    """Contents while they move."""

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

    # --- copies ---------------------------------------------------------------------------------

    def unpack(self, event: Unpack) -> None:
        """Parts joined, into a new buffer or into their place in a larger one."""
        here = self.here
        if not event.into:
            here[event.target] = unpack(here[event.source], event.axis, event.join)
            self.fits(event.target)
            return
        parts = parts_of(here[event.source], event.join)
        whole = self.started(event.target)
        for rank, part in enumerate(parts):
            wanted = place_part(whole, part, event.axis, event.join, rank, event.part)
            self.in_runs(whole, wanted, event.axis)
            whole = put(whole, part, wanted)
        here[event.target] = whole

    def in_runs(self, whole: Content, wanted: tuple[tuple[int, ...], ...], but: str) -> None:
        """A part is written in one piece along every axis but that along which it is joined."""
        for axis, places in zip(whole.axes, wanted, strict=True):
            if axis != but and places[-1] - places[0] >= len(places):
                self.fail(f"a part of {whole} has {axis} at the places {brief(places)}")

    def cut(self, source: int, target: int, cuts) -> None:
        """A dense copy of a part."""
        here, content = self.here, self.known(source)
        here[target] = take(single(content), self.places(single(content), cuts))
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
