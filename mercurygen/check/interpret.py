"""The plan interpreter: all ranks in one process, on real tensors, event by event.

The ranks go on as their transfers allow (`check.play`). A block is computed by the operator itself
and merged by the operator's own combine, so what comes out is what the operator gives on one
device if, and only if, the plan moves and merges the right things. Every tensor travels with what
it is a part of. What is being received holds NaN until it is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mercurygen.check.body import Body
from mercurygen.check.ranks import Ranks, Weighed
from mercurygen.check.tensors import (
    Held,
    aligned,
    blank,
    cut_places,
    indices,
    join_axes,
    merge,
    split_axes,
    view,
)
from mercurygen.dsl.interpret import derive, interpret
from mercurygen.ir.operator import Domain, Operator
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
    Operand,
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
from mercurygen.lower.trace import trace

if TYPE_CHECKING:
    from torch import Tensor


def run_plan(
    plan: Plan,
    inputs: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    operator: Operator | None = None,
    body: Body | None = None,
) -> list[dict[str, Tensor]]:
    """Run a plan on virtual ranks, the log-sum-exp handed out.

    Args:
        plan: of a complete program.
        inputs: the whole tensors by name, shaped as the operator declares them, of any float
            dtype: [B, S, H * G, D] and so on, with the program's extents.
        scale: the operator's scalar of this name; None: its default.
        operator: that the plan is of; default: the shipped one of the program's name.
        body: computes and merges blocks in the operator's place; knows its scalars itself.

    Returns:
        Per rank its part of every output, shaped as declared, in the output's dtype.

    Raises:
        ProofError: the ranks do not come to an end, or read what is not there.
    """
    traces = tuple(trace(plan, rank, with_lse=True) for rank in range(plan.program.mesh.size))
    return run_traces(plan, traces, inputs, scale=scale, operator=operator, body=body)


def run_traces(
    plan: Plan,
    traces: tuple[Trace, ...],
    inputs: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    operator: Operator | None = None,
    body: Body | None = None,
) -> list[dict[str, Tensor]]:
    """Run these traces, one per rank, as `run_plan` runs those of the plan."""
    import torch

    if operator is None:
        from mercurygen.operators import load  # its parser is slow to import

        operator = load(plan.program.operator)
    with torch.no_grad():
        return _Player(plan, traces, inputs, operator, scale, body).run()


class _Player(Ranks):
    """All virtual ranks, event by event."""

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
        match event:
            case Free(buffer):
                self.here[buffer] = None
            case Batch(op, _, sends, recvs):
                self.depart(op, [m.buffer for m in sends], [m.buffer for m in recvs])
            case Collective(op, _, kind, source, target):
                root = kind == "broadcast" and self.play.ops[self.rank][op]
                if not root or root.partners.index(root) == event.root:
                    self.depart(op, [source], [target])
                else:
                    self.sent[root] = (None,)
            case Wait(op):
                self.arrive(self.play.ops[self.rank][op])
            case Pack() | Unpack() | Cut() | Put() | Cast():
                self.copy(event)
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
            case Return(name, buffer):
                self.result(name, buffer)

    def derive(self, inputs: tuple[int, ...], output: int) -> None:
        """A derived tensor, by the operator."""
        tensor = next(t for t in self.program.derived if len(t.reads) == len(inputs))
        given, regions = {}, {}
        for name, buffer in zip(tensor.reads, inputs, strict=True):
            held = self.held(buffer)
            given[name] = join_axes(held.tensor, held.data)
            regions |= dict(zip(held.axes, held.region, strict=True))
        data = derive(self.operator, tensor.name, given, self.scalars)
        region = tuple(regions[axis] for axis in tensor.axes)
        sizes = {axis: self.atoms.length(axis, atoms) for axis, atoms in regions.items()}
        self.here[output] = Held(tensor, split_axes(tensor, data, sizes.__getitem__), region)

    # --- the body -------------------------------------------------------------------------------

    def operand(self, operand: Operand, event: Kernel) -> Held:
        """A view of an operand, cut to the block."""
        held = self.held(operand.buffer)
        held = view(self.atoms, held, cut_places(held, operand.cuts))
        if event.block is None or (self.own is None and self.atoms.domain.striped):
            return held  # of stripes the operator masks all tokens by position
        spans = dict(zip(self.program.mask_axes, event.block[:2], strict=True))
        data, region = held.data, list(held.region)
        for number, axis in enumerate(held.axes):
            if axis in spans:
                start, stop = spans[axis]
                data = data.narrow(number, start, stop - start)
                touched = self.atoms.sequences[axis].touched(region[number], spans[axis])
                region[number] = region[number][slice(*touched)]
        return Held(held.tensor, data, tuple(region))

    def kernel(self, event: Kernel) -> None:
        """The operator on one block: what the mask leaves of it, or all of its pairs."""
        given, regions, sizes = {}, {}, {}
        for tensor, operand in zip(self.program.read, event.inputs, strict=True):
            held = self.operand(operand, event)
            if held.tensor.name != tensor.name:
                raise self.fail(f"reads {held.tensor.name} as {tensor.name}")
            given[tensor.name] = join_axes(tensor, held.data)
            for axis, atoms, size in zip(held.axes, held.region, held.data.shape, strict=True):
                regions[axis], sizes[axis] = atoms, size
        if self.own is not None:
            shares = self.own.block(given, event.block is not None and event.block.masked)
        else:
            shares = interpret(
                self.body,
                given,
                self.scalars,
                mask=self.domain(event),
                tiles={axis: max(1, size) for axis, size in sizes.items()},
                positions={a: indices(self.atoms, a, atoms) for a, atoms in regions.items()},
            )
        outputs = {}
        for tensor, operand in zip(self.program.outputs, event.outputs, strict=True):
            data = split_axes(tensor, shares[tensor.name], sizes.__getitem__)
            outputs[tensor.name] = (operand, data)
        if not event.merge:
            for name, (operand, data) in outputs.items():
                tensor = self.program.tensor(name)
                region = tuple(regions[axis] for axis in tensor.axes)
                self.here[operand.buffer] = Held(tensor, data, region)
            return
        states = {name: self.operand(operand, event) for name, (operand, _) in outputs.items()}
        for name, state in states.items():
            if any(regions[a] != atoms for a, atoms in zip(state.axes, state.region, strict=True)):
                raise self.fail(f"the cells of {name} are others than those of the block")
        self.fold(states, {name: data for name, (_, data) in outputs.items()})

    def fold(self, states: dict[str, Held], shares: dict[str, Tensor]) -> None:
        """Merge shares into views of outputs, in place."""
        if self.own is not None:
            self.own.fold(states, shares)
        else:
            merge(self.operator, self.program, states, shares)

    def domain(self, event: Kernel) -> Domain | str | None:
        """The mask of a call; a full block has none, but for what packed documents leave of it."""
        if event.block is None:
            return None
        if self.program.documents:
            return self.program.domain
        return self.program.domain if event.block.masked else "full"

    # --- partial results ------------------------------------------------------------------------

    def merge(self, event: Merge) -> None:
        """Partial results into others, in place."""
        states, shares = {}, {}
        for source, target in zip(event.sources, event.targets, strict=True):
            part = self.held(source) if event.part is None else self.parts(source)[event.part]
            whole = self.held(target)
            state = view(self.atoms, whole, cut_places(whole, event.cuts))
            if (state.tensor, state.region) != (part.tensor, part.region):
                raise self.fail(f"merges {part.tensor.name} of other cells")
            states[part.tensor.name], shares[part.tensor.name] = state, part.data
        self.fold(states, shares)

    def weigh(self, event: Weigh | Unweigh) -> None:
        """A softmax's results to the scale of the largest lse, or back."""
        import torch

        most = self.held(event.most).data
        if isinstance(event, Weigh):
            out, lse = (self.held(buffer) for buffer in event.sources)
            empty = most == -torch.inf
            weight = torch.exp(torch.where(empty, -torch.inf, lse.data - most))
            spread = _spread(lse, out, weight)
            pair = replace(out, data=out.data * spread), replace(lse, data=weight)
            self.here[event.target] = Weighed(pair)
            return
        held = self.here[event.source]
        out, total = held.pair
        spread = _spread(total, out, total.data)
        average = torch.where(spread > 0, out.data / spread, 0)
        self.here[event.targets[0]] = replace(out, data=average)
        self.here[event.targets[1]] = replace(total, data=most + torch.log(total.data))

    def fill(self, outputs: tuple[int, ...]) -> None:
        """Outputs become what merges to nothing."""
        identity = {
            name: value
            for combine in self.operator.combines
            for name, value in zip(combine.outputs, combine.identity, strict=True)
        }
        trace = self.traces[self.rank]
        for buffer in outputs:
            tensor = self.program.tensor(trace.buffers[buffer].label)
            dtype = self.dtypes[self.plan.partial(tensor)]
            value = identity.get(tensor.name, 0)
            region = trace.regions[buffer]
            self.here[buffer] = blank(self.atoms, tensor, region, value, dtype)

    def result(self, name: str, buffer: int) -> None:
        """An output, laid out as the caller wants it."""
        held, tensor = self.held(buffer), self.program.tensor(name)
        wanted = self.atoms.pinned(tensor, self.program.mesh.coordinate(self.rank))
        if held.tensor != tensor or held.region != wanted:
            raise self.fail(f"{held.tensor.name} of other cells is returned as {name}")
        data = join_axes(tensor, held.data)
        self.ranks[self.rank].results[name] = data.to(self.dtypes[tensor.dtype])


def _spread(lse: Held, out: Held, data: Tensor) -> Tensor:
    """A vector over the axes of lse, to be multiplied with out."""
    data = aligned(out.tensor, lse.tensor, data)
    missing = [i for i, axis in enumerate(out.axes) if axis not in lse.axes]
    for number in missing:
        data = data.unsqueeze(number)
    return data
