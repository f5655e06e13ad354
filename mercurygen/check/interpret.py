"""The plan interpreter: all ranks in one process, on real tensors, event by event.

The ranks go on as their transfers allow (`check.play`). A block is computed by the operator itself
and merged by the operator's own combine, so what comes out is what the operator gives on one
device if, and only if, the plan moves and merges the right things. Every tensor travels with the
global positions of its tokens. What is being received holds NaN until it is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mercurygen.check.order import check_order
from mercurygen.check.play import Op
from mercurygen.check.report import ProofError, label, place
from mercurygen.check.tensors import (
    Held,
    Parts,
    blank,
    cut,
    owned,
    pack,
    poison,
    region,
    snapshot,
    state_merge,
    unpack,
)
from mercurygen.dsl.interpret import interpret
from mercurygen.ir.operator import Operator
from mercurygen.lower.events import (
    Batch,
    Cast,
    Collective,
    Event,
    Fill,
    Free,
    Kernel,
    Pack,
    Return,
    Trace,
    Unpack,
    Wait,
)
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace

if TYPE_CHECKING:
    from torch import Tensor


def run_plan(
    plan: Plan,
    inputs: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    operator: Operator | None = None,
) -> list[dict[str, Tensor]]:
    """Run a plan on virtual ranks, the log-sum-exp handed out.

    Args:
        plan: of a complete program.
        inputs: the whole tensors by name, shaped as the operator declares them, of any float
            dtype: [B, S, H * G, D] and so on, with the program's extents.
        scale: the operator's scalar of this name; None: its default.
        operator: that the plan is of; default: the shipped one of the program's name.

    Returns:
        Per rank its part of every output: out in the dtype of the inputs, lse in
        promote_types(that, float32).

    Raises:
        ProofError: the ranks do not come to an end, or read what is not there.
    """
    traces = tuple(trace(plan, rank, with_lse=True) for rank in range(plan.program.mesh.size))
    return run_traces(plan, traces, inputs, scale=scale, operator=operator)


def run_traces(
    plan: Plan,
    traces: tuple[Trace, ...],
    inputs: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    operator: Operator | None = None,
) -> list[dict[str, Tensor]]:
    """Run these traces, one per rank, as `run_plan` runs those of the plan."""
    import torch

    if operator is None:
        from mercurygen.operators import load  # its parser is slow to import

        operator = load(plan.program.operator)
    with torch.no_grad():
        return _Ranks(plan, traces, inputs, operator, scale).run()


@dataclass(slots=True)
class _Rank:
    """One virtual rank: what its buffers hold, and what it has returned."""

    buffers: list[Held | Parts | None]
    results: dict[str, Tensor]


class _Ranks:
    """All virtual ranks while their traces are played."""

    def __init__(
        self,
        plan: Plan,
        traces: tuple[Trace, ...],
        inputs: Mapping[str, Tensor],
        operator: Operator,
        scale: float | None,
    ) -> None:
        import torch

        self.plan, self.program, self.traces, self.operator = plan, plan.program, traces, operator
        self.play = check_order(plan, traces)
        rows = [t.name for t in self.program.inputs if t.name not in plan.nest.tensors]
        self.rows, self.reads = len(rows), (*rows, *plan.nest.tensors)
        self.scalars = {} if scale is None else {"scale": scale}
        self.dtype = inputs[self.reads[0]].dtype
        self.accumulator = torch.promote_types(self.dtype, torch.float32)
        self.sent: dict[Op, tuple[Held | Parts, ...]] = {}
        self.rank = self.index = 0
        self.ranks = [_Rank([None] * len(t.buffers), {}) for t in traces]
        for each, rank in zip(traces, self.ranks, strict=True):
            for name, buffer in each.inputs.items():
                tensor = self.program.tensor(name)
                rank.buffers[buffer] = cut(plan, tensor, each.rank, inputs[name])

    def run(self) -> list[dict[str, Tensor]]:
        """Play all ranks to the end."""
        for rank, start, stop in self.play.order:
            self.rank = rank
            for index in range(start, stop):
                self.index = index
                self.step(self.traces[rank].events[index])
        return [rank.results for rank in self.ranks]

    def step(self, event: Event) -> None:
        """One event of the rank."""
        here = self.ranks[self.rank].buffers
        match event:
            case Free(buffer):
                here[buffer] = None
            case Batch(op, _, sends, recvs):
                self.depart(op, [m.buffer for m in sends], [m.buffer for m in recvs])
            case Collective(op, _, _, source, target):
                self.depart(op, [source], [target])
            case Wait(op):
                self.arrive(self.play.ops[self.rank][op])
            case Pack(source, target, by, join):
                here[target] = pack(self.program, self.held(source), by, join)
            case Unpack(source, target, by, join):
                here[target] = unpack(self.program, self.parts(source), by, join)
            case Kernel():
                self.kernel(event)
            case Fill(outputs):
                self.fill(outputs)
            case Cast(source, target):
                held = self.held(source)
                dtype = self.accumulator if held.data.dtype == self.dtype else self.dtype
                here[target] = Held(held.tensor, held.data.to(dtype), held.positions)
            case Return(name, buffer):
                self.result(name, buffer)

    def fail(self, what: str) -> ProofError:
        """What is wrong at this event."""
        where = place(self.traces[self.rank], self.index)
        return ProofError("lineage", self.rank, f"{where}: {what}")

    def held(self, buffer: int) -> Held:
        """The one tensor in a buffer."""
        found = self.ranks[self.rank].buffers[buffer]
        if not isinstance(found, Held):
            raise self.fail(f"{label(self.traces[self.rank], buffer)} holds no tensor")
        return found

    def parts(self, buffer: int) -> Parts:
        """The parts in a buffer."""
        found = self.ranks[self.rank].buffers[buffer]
        if not isinstance(found, tuple):
            raise self.fail(f"{label(self.traces[self.rank], buffer)} holds no parts")
        return found

    # --- transfers ----------------------------------------------------------------------------

    def depart(self, op: int, sends: Sequence[int], recvs: Sequence[int]) -> None:
        """What is sent is what the buffers hold now; what receives holds NaN till the wait."""
        here, trace = self.ranks[self.rank].buffers, self.traces[self.rank]
        gone = []
        for buffer in sends:
            holding = here[buffer]
            if holding is None:
                raise self.fail(f"{label(trace, buffer)} is sent, but holds nothing")
            gone.append(snapshot(holding))
        self.sent[self.play.ops[self.rank][op]] = tuple(gone)
        for buffer in recvs:
            here[buffer] = poison(here[buffer], self.program.inputs[0], self.dtype)

    def arrive(self, op: Op) -> None:
        """The buffers of a finished operation hold what was sent."""
        here = self.ranks[self.rank].buffers
        if isinstance(op.event, Batch):
            partners = op.partners[len(op.event.sends) :]
            for message, (other, position) in zip(op.event.recvs, partners, strict=True):
                here[message.buffer] = self.sent[other][position]
            return
        me, parts = op.partners.index(op), []
        for member in op.partners:
            sent = self.sent[member][0]
            if op.event.kind == "all-to-all" and isinstance(sent, tuple):
                sent = sent[me]
            if not isinstance(sent, Held):
                raise self.fail(f"rank {member.rank} sends what is no part of one tensor")
            parts.append(sent)
        here[op.event.target] = tuple(parts)

    # --- the body -----------------------------------------------------------------------------

    def kernel(self, event: Kernel) -> None:
        """The operator on one block: the square that the diagonal cuts, or all of its pairs."""
        (rows, columns), chunk, block = self.program.mask_axes, self.plan.chunk, event.block
        given, positions = {}, {}
        for number, (name, buffer) in enumerate(zip(self.reads, event.inputs, strict=True)):
            mine = number < self.rows
            start, stop = block.rows if mine else block.cols
            tile = region(self.program, self.held(buffer), start * chunk, stop * chunk)
            if tile.tensor.name != name:
                raise self.fail(f"reads {tile.tensor.name} as {name}")
            given[name], positions[rows if mine else columns] = tile.data, tile.positions
        shares = interpret(
            self.operator,
            given,
            self.scalars,
            mask="causal" if block.causal else "full",
            tiles={axis: max(1, len(where)) for axis, where in positions.items()},
            positions=positions,
        )
        here = self.ranks[self.rank].buffers
        outputs = dict(zip((t.name for t in self.program.outputs), event.outputs, strict=True))
        if not event.merge:
            for name, buffer in outputs.items():
                here[buffer] = Held(self.program.tensor(name), shares[name], positions[rows])
            return
        states = {
            name: region(
                self.program,
                self.held(buffer),
                block.rows[0] * chunk,
                block.rows[1] * chunk,
            )
            for name, buffer in outputs.items()
        }
        for name, state in states.items():
            if state.positions.tolist() != positions[rows].tolist():
                raise self.fail(f"the rows of {name} are others than those of the block")
        state_merge(self.operator, states, shares)

    def fill(self, outputs: tuple[int, ...]) -> None:
        """Outputs become what merges to nothing."""
        identity = {
            name: value
            for combine in self.operator.combines
            for name, value in zip(combine.outputs, combine.identity, strict=True)
        }
        for tensor, buffer in zip(self.program.outputs, outputs, strict=True):
            self.ranks[self.rank].buffers[buffer] = blank(
                self.plan, tensor, self.rank, identity[tensor.name], self.accumulator
            )

    def result(self, name: str, buffer: int) -> None:
        """An output, laid out as the caller wants it."""
        held, tensor = self.held(buffer), self.program.tensor(name)
        wanted = owned(self.plan, tensor, self.rank)
        if held.tensor != tensor or held.positions.tolist() != wanted.tolist():
            raise self.fail(f"{held.tensor.name} of other tokens is returned as {name}")
        self.ranks[self.rank].results[name] = held.data
