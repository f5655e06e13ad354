"""Virtual ranks: what their buffers hold, and what transfers and copies leave there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mercurygen.check.body import Body
from mercurygen.check.order import check_order
from mercurygen.check.play import Op
from mercurygen.check.report import ProofError, label, place
from mercurygen.check.tensors import (
    Held,
    Parts,
    blank,
    cut_places,
    cut_whole,
    dense,
    pack,
    poison,
    put_part,
    snapshot,
    unpack,
    view,
)
from mercurygen.ir.operator import Operator
from mercurygen.lower.events import Batch, Cast, Cut, Pack, Put, Trace, Unpack
from mercurygen.lower.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weighed:
    """out * w and w of a softmax, w in the scale of the largest lse."""

    pair: tuple[Held, Held]


@dataclass(slots=True)
class Rank:
    """One virtual rank: what its buffers hold, and what it has returned."""

    buffers: list[Held | Parts | Weighed | None]
    results: dict[str, Tensor]


class Ranks:
    """All virtual ranks while their traces are played."""

    def __init__(
        self,
        plan: Plan,
        traces: tuple[Trace, ...],
        inputs: Mapping[str, Tensor],
        operator: Operator,
        scale: float | None,
        body: Body | None,
    ) -> None:
        import torch

        self.plan, self.program, self.traces, self.operator = plan, plan.program, traces, operator
        self.atoms, self.body, self.own = plan.atoms, operator.body_alone, body
        self.play = check_order(plan, traces)
        self.scalars = {} if scale is None else {"scale": scale}
        self.dtype = inputs[self.program.inputs[0].name].dtype
        wide = torch.promote_types(self.dtype, torch.float32)
        self.dtypes = {"inputs": self.dtype, "accumulator": wide, "integer": torch.int64}
        self.sent: dict[Op, tuple[Held | Parts | Weighed, ...]] = {}
        self.rank = self.index = 0
        self.ranks = [Rank([None] * len(t.buffers), {}) for t in traces]
        for each, rank in zip(traces, self.ranks, strict=True):
            here = self.program.mesh.coordinate(each.rank)
            for name, buffer in each.inputs.items():
                tensor = self.program.tensor(name)
                region = self.atoms.pinned(tensor, here)
                rank.buffers[buffer] = cut_whole(self.atoms, tensor, region, inputs[name])

    @property
    def here(self) -> list:
        """What the rank's buffers hold."""
        return self.ranks[self.rank].buffers

    def fail(self, what: str) -> ProofError:
        """What is wrong at this event."""
        where = place(self.traces[self.rank], self.index)
        return ProofError("lineage", self.rank, f"{where}: {what}")

    def held(self, buffer: int) -> Held:
        """The one tensor in a buffer."""
        found = self.here[buffer]
        if not isinstance(found, Held):
            raise self.fail(f"{label(self.traces[self.rank], buffer)} holds no tensor")
        return found

    def parts(self, buffer: int) -> Parts:
        """The parts in a buffer."""
        found = self.here[buffer]
        if not isinstance(found, tuple):
            raise self.fail(f"{label(self.traces[self.rank], buffer)} holds no parts")
        return found

    # --- transfers ------------------------------------------------------------------------------

    def depart(self, op: int, sends: Sequence[int], recvs: Sequence[int]) -> None:
        """What is sent is what the buffers hold now; what receives holds NaN till the wait."""
        here, trace = self.here, self.traces[self.rank]
        gone = []
        for buffer in sends:
            holding = here[buffer]
            if holding is None:
                raise self.fail(f"{label(trace, buffer)} is sent, but holds nothing")
            gone.append(holding if isinstance(holding, Weighed) else snapshot(holding))
        self.sent[self.play.ops[self.rank][op]] = tuple(gone)
        for buffer in recvs:
            if not isinstance(here[buffer], Weighed):
                here[buffer] = poison(here[buffer], self.program.inputs[0], self.dtype)

    def arrive(self, op: Op) -> None:
        """The buffers of a finished operation hold what was sent."""
        here, event = self.here, op.event
        if isinstance(event, Batch):
            partners = op.partners[len(event.sends) :]
            for message, (other, position) in zip(event.recvs, partners, strict=True):
                here[message.buffer] = self.sent[other][position]
            return
        here[event.target] = self.collected(op, [self.sent[m][0] for m in op.partners])

    def collected(self, op: Op, sent: list):
        """What a collective leaves on a rank."""
        event, me = op.event, op.partners.index(op)
        if event.kind == "broadcast":
            return snapshot(sent[event.root])
        if event.kind in ("all-to-all", "reduce-scatter"):
            sent = [parts[me] if isinstance(parts, tuple) else parts for parts in sent]
        if event.kind in ("all-reduce", "reduce-scatter"):
            if isinstance(sent[0], Weighed):
                return Weighed(tuple(self.added([x.pair[i] for x in sent]) for i in range(2)))
            return self.largest(sent) if event.reduce == "max" else self.added(sent)
        if not all(isinstance(part, Held) for part in sent):
            raise self.fail("a rank sends what is no part of one tensor")
        return tuple(sent)

    def added(self, parts: list[Held]) -> Held:
        """The sum over the ranks, in their order."""
        data = parts[0].data.clone()
        for part in parts[1:]:
            data += part.data
        return replace(parts[0], data=data)

    def largest(self, parts: list[Held]) -> Held:
        """The maximum over the ranks."""
        import torch

        data = parts[0].data
        for part in parts[1:]:
            data = torch.maximum(data, part.data)
        return replace(parts[0], data=data.clone())

    # --- copies ---------------------------------------------------------------------------------

    def striped(self, axis: str) -> bool:
        """Whether the tokens of atoms along an axis interleave."""
        return axis in self.program.mask_axes and self.program.order.kind == "striped"

    def copy(self, event: Pack | Unpack | Cut | Put | Cast) -> None:
        """A copy of one kind or another."""
        here = self.here
        match event:
            case Pack(source, target, axis, join, part):
                mixed = self.striped(axis)
                here[target] = pack(self.atoms, self.held(source), axis, join, part, mixed)
            case Unpack(source, target, axis, join, into=False):
                mixed = self.striped(axis)
                here[target] = unpack(self.atoms, self.parts(source), axis, join, mixed)
            case Unpack(source, target, axis, join, part):
                whole = self.started(target)
                for rank, piece in enumerate(self.parts(source)):
                    put_part(self.atoms, whole, piece, axis, join, rank, part)
            case Cut(source, target, cuts):
                here[target] = snapshot(
                    view(self.atoms, self.held(source), cut_places(self.held(source), cuts))
                )
            case Put(source, target, cuts):
                whole = self.started(target)
                view(self.atoms, whole, cut_places(whole, cuts)).data.copy_(self.held(source).data)
            case Cast(source, target):
                held = self.held(source)
                here[target] = replace(held, data=dense(held.data, self.dtype_of(held, target)))

    def dtype_of(self, held: Held, buffer: int):
        """The dtype that a buffer is long enough for: that of inputs, or of accumulators."""
        import torch

        nbytes = self.traces[self.rank].buffers[buffer].nbytes
        elements = self.plan.atoms.elements(held.tensor, held.region)
        if nbytes == elements * self.plan.itemsize("accumulator"):
            return self.dtypes["accumulator"]
        for reduce in self.plan.nest.reduces:
            if reduce.dtype and held.tensor.name in reduce.tensors:
                if nbytes == elements * self.plan.itemsize(reduce.dtype):
                    return getattr(torch, reduce.dtype)
        return self.dtypes["inputs"]

    def started(self, buffer: int) -> Held:
        """An output that is put together part by part."""
        if self.here[buffer] is None:
            name = self.traces[self.rank].buffers[buffer].label
            tensor = self.program.tensor(name)
            region = self.atoms.pinned(tensor, self.program.mesh.coordinate(self.rank))
            dtype = self.dtypes[tensor.dtype]
            value = 0 if tensor.dtype == "integer" else float("nan")
            self.here[buffer] = blank(self.atoms, tensor, region, value, dtype)
        return self.held(buffer)
