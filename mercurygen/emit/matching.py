"""A plan's trace of one rank, event by event, and which storages of the text are its buffers."""

from __future__ import annotations

from math import prod
from typing import Any

from mercurygen.emit.handles import DeviceMesh
from mercurygen.emit.held import ways
from mercurygen.emit.python_expressions import Complaint
from mercurygen.emit.values import Dtype, Storage, Tensor
from mercurygen.ir.problem import ATTENTION
from mercurygen.lower.events import (
    Batch,
    Cast,
    Collective,
    Cut,
    Cuts,
    Derive,
    Event,
    Fill,
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


class Matching:
    """The plan's events of a rank, and which storages of the text are which of its buffers."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        """At the first event."""
        self.plan, self.trace, self.program = plan, trace, plan.program
        mesh = plan.program.mesh
        self.mesh = DeviceMesh(mesh, trace.rank) if mesh.dims else None
        self.index = self.compared = 0
        self.bound: dict[int, Storage] = {}
        self.sources: dict[int, tuple[int, int]] = {}  # of a copy: of what, of which contents
        self.taken: dict[int, Cuts] = {}  # of a copy of a part, which part
        self.filled: dict[int, float] = {}
        self.contents = [0] * len(trace.buffers)
        self.picked: dict[int, Pack | Cut] = {}  # what is copied out of an input
        self.returns: dict[str, int] = {}  # buffer by name
        self.puts: dict[int, list[int]] = {}  # what is copied into parts of a buffer, in order
        self.merging: tuple[Kernel, list[Storage]] | None = None
        self.dtype, self.accumulator = (Dtype(plan.itemsize(x)) for x in ("inputs", "accumulator"))

    def local_shape(self, name: str) -> list[int]:
        """Shape of what the caller holds of a tensor."""
        tensor, mesh = self.program.tensor(name), self.program.mesh
        pins = list(zip(mesh.dims, tensor.pin, strict=True))
        splits = [prod(dim.size for dim, axis in pins if axis in axes) for axes in tensor.dims]
        extents = [prod(map(self.program.extent, axes)) for axes in tensor.dims]
        return [extent // split for extent, split in zip(extents, splits, strict=True)]

    def peek(self) -> Event | None:
        """The next event that the text must do; what lies before it becomes known."""
        while self.index < len(self.trace.events):
            match event := self.trace.events[self.index]:
                case Batch() | Collective() | Wait() | Derive():
                    return event
                case Kernel() | Merge() | Weigh() | Unweigh():
                    return event
                case Put(source, target) | Unpack(source, target, into=True):
                    self.puts.setdefault(target, []).append(source)
                case (
                    Pack(source, target)
                    | Unpack(source, target)
                    | Cast(source, target)
                    | Cut(source, target)
                ):
                    self.sources[target] = (source, self.contents[source])
                    if isinstance(event, Cut) and self.of_tokens(event):
                        self.taken[target] = event.indices  # a front of a tile
                    elif isinstance(event, Pack | Cut) and source in self.trace.inputs.values():
                        self.picked[target] = event
                case Fill(outputs):
                    values = (0.0, float("-inf")) if self.program.operator == ATTENTION[0] else ()
                    values = values or (0.0,) * len(outputs)
                    self.filled |= dict(zip(outputs, values, strict=True))
                case Return(name, buffer):
                    self.returns[name] = buffer
            self.index += 1
        return None

    def of_tokens(self, event: Cut) -> bool:
        """Whether a part is the front of a tile, or all of it; or a run of tokens."""
        axes = [axis for axis, _, _ in event.cuts]
        return not self.plan.tiles and all(axis in self.program.mask_axes for axis in axes)

    def expect(self, kind: type, what: str) -> Any:
        """The next event, which must be of this kind."""
        if self.merging:
            raise Complaint(f"the plan merges the block, the text {what}")
        if type(event := self.peek()) is not kind:
            raise Complaint(f"the plan {self.words(event)}, the text {what}")
        self.index += 1
        self.compared += 1
        return event

    def words(self, event: Event | None) -> str:
        """An event, for people."""
        label = [buffer.label for buffer in self.trace.buffers]
        match event:
            case Batch(op, dim, sends):
                sent = " and ".join(label[m.buffer] for m in sends)
                return f"starts transfer {op}, a batch along {dim}: sends {sent}"
            case Collective(op, dim, kind, source):
                return f"starts transfer {op}, an {kind} over {dim} of {label[source]}"
            case Wait(op):
                return f"waits for transfer {op}"
            case Kernel(inputs, block=block):
                return (
                    f"runs the kernel on {' and '.join(label[x.buffer] for x in inputs)}, {block}"
                )
            case Merge(sources):
                return f"merges {' and '.join(label[x] for x in sources)}"
            case Derive(inputs, output):
                return f"makes {label[output]} of {' and '.join(label[x] for x in inputs)}"
            case Weigh() | Unweigh():
                return "weighs out and lse for a sum, or back"
        return "is over"

    def same(self, what: str, plan: Any, text: Any) -> None:
        """Complain unless both agree."""
        if plan != text:
            raise Complaint(f"{what}: the plan has {plan}, the text {text}")

    def bind(self, what: str, number: int, storage: Storage) -> None:
        """A storage is one of the plan's buffers, and no other is."""
        known = self.bound.get(number)
        if known is None and storage.buffer is None:
            if number in self.sources:
                fits = self.plan_root(number) == self.text_root(storage)
                fits = fits and self.fits_cuts(number, storage)
            else:
                fits = storage.made == self.filled.get(number, "empty")
            if fits and storage.nbytes == self.trace.buffers[number].nbytes:
                self.bound[number], storage.buffer = storage, number
                self.picks(what, number, storage)
                return
        if known is not storage:
            plan = self.trace.buffers[number]
            text = f"{self.name(storage)}, {storage.nbytes} bytes"
            raise Complaint(
                f"{what}: the plan has {plan.label}, {plan.nbytes} bytes, the text {text}"
            )

    def fits_cuts(self, number: int, storage: Storage) -> bool:
        """Whether a copy of a part is of the plan's part: so many tokens from the front on."""
        if number not in self.taken or (not self.taken[number] and storage.nbytes):
            return True  # of all of it
        ((axis, start, stop),) = self.taken[number] or ((None, 0, 0),)
        if len(storage.picks) != 1:
            return False
        (view,) = storage.picks
        want = [(0, size) for size in view.base]
        want[1] = start, stop
        return list(view.cuts) == want

    def picks(self, what: str, number: int, storage: Storage) -> None:
        """The parts of an input that a copy is of, if both say so: not the tokens of a sequence."""
        before = self.sources.get(number, (number, 0))[0]
        if before not in self.bound and before != number and storage.source:
            self.picks(what, before, storage.source[0])
        event = self.picked.get(number)
        if event is None or not storage.picks:
            return
        name = next(n for n, buffer in self.trace.inputs.items() if buffer == event.source)
        if isinstance(event, Cut):
            want = [{a: self.indices(a, x, y, self.plan.atoms.count[a])} for a, x, y in event.cuts]
            want = [{axis: span for each in want for axis, span in each.items()}]
        elif event.axis in self.program.mask_axes:
            return
        else:
            (index, parts), ranks = event.part, event.join.n
            if event.join.outer > 1:  # several runs of each
                return
            places = [rank * parts + index for rank in range(ranks)]
            held = ways(self.program, self.program.tensor(name), event.axis)  # by the caller
            count = ranks * parts * held
            want = [{event.axis: self.indices(event.axis, x, x + 1, count)} for x in places]
        have = [
            {axis: self.span(name, axis, tensor) for axis in spans}
            for spans, tensor in zip(want, storage.picks, strict=False)
        ]
        if want != have:
            raise Complaint(f"{what}: the plan has {want} of {name}, the text {have}")

    def tokens(self, name: str, number: int, axis: str, start: int, stop: int) -> tuple[int, int]:
        """A run of a buffer's atoms in indices.

        Of a buffer of which the plan does not say what it is of, atoms count from the first of the
        axis: equal runs of them have as many tokens anywhere.
        """
        length, region = self.plan.atoms.length, self.trace.regions.get(number)
        atoms = tuple(range(stop))
        if region is not None:
            atoms = region[self.program.tensor(name).axes.index(axis)]
        return length(axis, atoms[:start]), length(axis, atoms[:stop])

    def indices(self, axis: str, start: int, stop: int, count: int) -> tuple[int, int]:
        """Some of `count` equal parts of an axis of a whole dimension of a tensor."""
        size = self.program.extent(axis) // count
        return start * size, stop * size

    def span(self, name: str, axis: str, tensor: Tensor) -> tuple[float, float]:
        """What a view has of an axis, which is a dimension, or the major part of one."""
        declared = self.program.tensor(name)
        if len(tensor.base) == len(declared.axes):
            return tensor.cuts[declared.axes.index(axis)]
        at = declared.dimension(axis)
        axes = declared.dims[at]
        minor = prod(self.program.extent(each) for each in axes[axes.index(axis) + 1 :])
        start, stop = tensor.cuts[at]
        return start / minor, stop / minor

    def name(self, storage: Storage) -> str:
        """A storage, for people."""
        if storage.buffer is not None:
            return self.trace.buffers[storage.buffer].label
        if storage.source:
            return f"a copy of {self.name(storage.source[0])}"
        return f"another buffer ({storage.made})"

    def plan_root(self, number: int) -> tuple[int, int] | None:
        """The nearest buffer known to both that this is a copy of, and of which contents."""
        root = self.sources.get(number)
        while root and root[0] not in self.bound:
            root = self.sources.get(root[0])
        return root

    def text_root(self, storage: Storage) -> tuple[int, int] | None:
        """The same of a storage."""
        root = storage.source
        while root and root[0].buffer is None:
            root = root[0].source
        return (root[0].buffer, root[1]) if root else None
