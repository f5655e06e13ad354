"""Proof that every cell of an output gets every contribution of the domain exactly once.

The contents of all buffers are followed through the events of all ranks, in an order in which
they can happen. What a rank has received is what the sender's buffer held when its batch started.
"""

from __future__ import annotations

from itertools import product

from mercurygen.check.content import Content, Unknown, pack, put, single
from mercurygen.check.contributions import Contributions
from mercurygen.check.report import ProofError, label
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
    Unpack,
    Unweigh,
    Wait,
    Weigh,
)


class Lineage(Contributions):
    """All ranks' events, one after the other."""

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

    def step(self, event: Event) -> None:
        """One event of the rank."""
        here = self.here
        match event:
            case Batch() | Collective():
                self.depart(event)
            case Wait(op):
                self.arrive(self.play.ops[self.rank][op])
            case Pack(source, target, axis, join, part):
                here[target] = pack(self.known(source), axis, join, part)
                self.fits(target)
            case Unpack():
                self.unpack(event)
            case Cut(source, target, cuts):
                self.cut(source, target, cuts)
            case Put(source, target, cuts):
                whole, piece = self.started(target), single(self.known(source))
                here[target] = put(whole, piece, self.places(whole, cuts))
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
                here[target] = self.known(source)
            case Return(name, buffer):
                self.result(name, buffer)
            case Free(buffer):
                here[buffer] = None

    def result(self, name: str, buffer: int) -> None:
        """An output is complete, and laid out as the caller wants it."""
        content, words = self.known(buffer), label(self.traces[self.rank], buffer)
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
