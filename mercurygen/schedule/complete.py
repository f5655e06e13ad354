"""What only holds once all directives are in: pins, order, sizes, borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from mercurygen.errors import Refusal
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.layout import Order
from mercurygen.ir.problem import divisors, nearest_multiples
from mercurygen.ir.program import BorderStep, Program, Tensor
from mercurygen.schedule.directives import Reshard
from mercurygen.schedule.rules.tile import MOST_PARTS
from mercurygen.schedule.stories import Fault, fault_of_stories

SETTLED = tuple[Program, None] | tuple[None, Fault]
OWN_BODY = "body"  # the kernel that is the operator's own lines
ATEN_OPERATORS = ("attention",)


def complete(program: Program) -> SETTLED:
    """The program with its order and border settled, or why it is not legal."""
    program = _with_default_pins(program)
    fault = _fault_of_derived(program) or fault_of_stories(program)
    if fault:
        return None, fault
    kernel = program.kernel
    if kernel is None:
        kernel = "aten" if program.operator in ATEN_OPERATORS else OWN_BODY
    if program.border or program.tiles:
        return _laid_out(program.changed(kernel=kernel))
    key = "laid out", program.layout  # of many schedules, which differ in how tensors move
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = _laid_out(program)
    settled, fault = found
    if fault is not None:
        return None, fault
    return program.changed(kernel=kernel, order=settled.order, border=settled.border), None


def _laid_out(program: Program) -> SETTLED:
    """Order and border of a program whose tensors have their stories."""
    split = sequence_dims(program)
    if program.order is None:
        kind = "zigzag" if program.mask == "causal" and split else "contiguous"
        program = program.changed(order=Order(kind, split))
    fault = _fault_of_order(program, split) or _fault_of_sizes(program) or _fault_of_tiles(program)
    if fault:
        return None, fault
    return _settle_border(program)


def _with_default_pins(program: Program) -> Program:
    """Where no line pins anything: slices of the sequence over all dimensions.

    What has no sequence is held, and wanted, as the schedule stores it.
    """
    if any(any(tensor.pin) for tensor in program.tensors):
        return _with_derived_pins(program)

    def pinned(tensor: Tensor) -> Tensor:
        sequence = program.sequence(tensor)
        if sequence is not None:
            return tensor.pinned_as((sequence,) * len(program.mesh.dims))
        return tensor.pinned_as(program.storage(tensor))

    return _with_derived_pins(program.changed(tensors=tuple(map(pinned, program.tensors))))


def _with_derived_pins(program: Program) -> Program:
    """A derived tensor lies where the rows of what it is made of lie."""
    if not program.derived:
        return program

    def pinned(tensor: Tensor) -> Tensor:
        if tensor.role != "derived":
            return tensor
        source = program.tensor(tensor.reads[0])
        pin = tuple(axis if axis and tensor.carries(axis) else None for axis in source.pin)
        return tensor.pinned_as(pin)

    return program.changed(tensors=tuple(map(pinned, program.tensors)))


def _fault_of_derived(program: Program) -> Fault | None:
    """A derived tensor is made where all that it is made of lies alike, in whole rows of it."""
    for tensor in program.derived:
        for name in tensor.reads:
            pin = program.tensor(name).pin
            if pin != tensor.pin:
                explain = (
                    f"{tensor.name} is made of {', '.join(tensor.reads)} where their rows lie, but "
                    f"{name} is pinned otherwise",
                    f"pin {', '.join(tensor.reads)} alike, along axes that {tensor.name} carries",
                )
                return Fault(Refusal("derived-pins", lambda e=explain: e), "pin", name)
    return None


def sequence_dims(program: Program) -> tuple[str, ...]:
    """The dimensions over which a sequence is split, by a pin or by the schedule."""
    named: set[tuple[int, str | None]] = set()
    for tensor in program.tensors:
        named.update(enumerate(tensor.pin))
        named.update(enumerate(program.storage(tensor)))
    return tuple(
        dim
        for index, dim in enumerate(program.mesh.names)
        if any((index, axis) in named for axis in program.mask_axes)
    )


def _fault_of_order(program: Program, split: tuple[str, ...]) -> Fault | None:
    if program.order.dims == split:
        return None
    explain = (
        f"the order ranks the sequence over {', '.join(program.order.dims) or 'nothing'}, "
        f"but it is split over {', '.join(split) or 'nothing'}",
        f"write `order S: {program.order.kind} over {', '.join(split)}`",
    )
    return Fault(Refusal("order-dims", lambda: explain), "order")


def _fault_of_sizes(program: Program) -> Fault | None:
    if program.mask_axes:
        order = program.order
        for axis in program.mask_axes:
            extent = program.extent(axis)
            refusal = sequence_refusal(extent, order.kind, order.ranks(program.mesh))
            if refusal:
                return Fault(refusal, "order")
    if _divides(program):
        return None
    for axis in program.axes:
        if axis.name in program.mask_axes:
            continue
        for dims in _split_sets(program, axis.name):
            ranks = prod(program.mesh.extent(dim) for dim in dims)
            if axis.extent % ranks:
                return Fault(
                    _indivisible(axis.name, axis.extent, dims, ranks), "parallelize", axis.name
                )
    return None


def _divides(program: Program) -> bool:
    """Whether no axis is split into more parts than it has, as `_split_sets` says at length."""
    sizes, extents = [dim.size for dim in program.mesh.dims], program.extents
    splits = {program.parallel}
    for tensor in program.tensors:
        splits |= {tensor.pin, program.storage(tensor)}
    for split in splits:
        ways: dict[str, int] = {}
        for axis, size in zip(split, sizes, strict=True):
            if axis is not None and axis not in program.mask_axes:
                ways[axis] = ways.get(axis, 1) * size
        for axis, count in ways.items():
            if extents[axis] % count:
                return False
    return True


def _fault_of_tiles(program: Program) -> Fault | None:
    atoms = atoms_of(program)
    for loop in program.tiles:
        parts = atoms.loop_parts(loop.axes)
        seen = [
            program.extent(axis)
            // prod(program.mesh.extent(dim) for dim in program.parallel_dims(axis))
            for axis in loop.axes
        ]
        if prod(parts.values()) != loop.parts or any(
            size % parts[axis] for axis, size in zip(loop.axes, seen, strict=True)
        ):
            name = "_".join(loop.axes)
            legal = ", ".join(str(parts) for parts in _equal_parts(seen) if parts > 1) or "none"
            return Fault(
                Refusal(
                    "tile-parts",
                    lambda name=name, loop=loop, legal=legal, seen=seen: (
                        f"{name} has {prod(seen)} on a rank, which is not {loop.parts} equal parts",
                        f"legal: {legal}",
                    ),
                ),
                "tile",
                loop.axes[0],
            )
        for axis in loop.axes:
            fault = _fault_of_sequence_tile(program, axis) or _fault_of_pinned_tile(program, axis)
            if fault:
                return fault
    for axis in program.axes:
        count = atoms.count[axis.name]
        if axis.extent % count:
            legal = nearest_multiples(axis.extent, count)
            return Fault(
                Refusal(
                    "not-divisible",
                    lambda axis=axis, count=count, legal=legal: (
                        f"{axis.name}={axis.extent} is cut into {count} parts by this schedule",
                        f"nearest legal: {legal}",
                    ),
                ),
                "parallelize",
                axis.name,
            )
    return None


def _equal_parts(seen: list[int]) -> list[int]:
    """In how many equal parts joined axes fall: of the first, or of all of it and of the rest."""
    first, *rest = seen
    found = [n for n in range(1, min(first, MOST_PARTS) + 1) if first % n == 0]
    if rest and first <= MOST_PARTS:
        found += [first * n for n in _equal_parts(rest) if 1 < n <= MOST_PARTS // first]
    return found


def _fault_of_sequence_tile(program: Program, axis: str) -> Fault | None:
    """Tiles of a sequence: not where its tokens interleave, nor where it moves."""
    if axis not in program.mask_axes:
        return None
    if program.order.kind == "striped":
        explain = ("tiles of a striped sequence are no stripes", "use another order")
        return Fault(Refusal("tile-striped", lambda: explain), "tile", axis, ("order", "S"))
    moving = [s.dim for s in program.stages if s.axis == axis]
    border = [
        dim
        for tensor in program.tensors
        if tensor.carries(axis)
        for dim in program.mesh.names
        if program.pinned(tensor, dim) != program.stored(tensor, dim)
    ]
    if moving or border:
        explain = (
            f"{axis} is stored split over {(moving or border)[0]} and exchanged there: its parts "
            "are no runs of what a rank sends",
            "tile another axis",
        )
        return Fault(Refusal("tile-of-moved", lambda: explain), "tile", axis)
    return None


def _fault_of_pinned_tile(program: Program, axis: str) -> Fault | None:
    """A tiled axis that the caller holds split, and the nest does not: its parts lie elsewhere.

    Or one that is dealt, or joined, in more than one reshard: its parts are no runs between them.
    """
    border = needed_border(program)
    for tensor in (*program.read, *program.outputs):
        steps = [step for step in border if step.tensor == tensor.name]
        moved = [step for step in steps if axis in (step.source, step.target)]
        if len(moved) > 1 or (moved and tensor.role == "output" and moved[0] != steps[-1]):
            explain = (
                f"{tensor.name} is resharded in {len(steps)} steps, between which its parts of "
                f"{axis} are no runs",
                f"tile another axis, or split {axis} over the outermost dimension only",
            )
            return Fault(Refusal("tile-of-moved", lambda e=explain: e), "tile", axis)
        for dim in program.mesh.names:
            if program.pinned(tensor, dim) == axis != program.stored(tensor, dim):
                explain = (
                    f"{tensor.name} is pinned {axis} over {dim}, but worked on otherwise: the "
                    f"parts of {axis} are not those that ranks hold",
                    f"tile another axis, or `parallelize {axis} over {dim}`",
                )
                rival = ("pin", tensor.name)
                return Fault(Refusal("tile-of-moved", lambda e=explain: e), "tile", axis, rival)
    return None


def _split_sets(program: Program, axis: str) -> Iterator[tuple[str, ...]]:
    """Every set of dimensions over which some tensor has the axis split at one time."""
    names = program.mesh.names
    yield program.parallel_dims(axis)
    for tensor in program.tensors:
        yield tuple(d for d in names if program.pinned(tensor, d) == axis)
        yield tuple(d for d in names if program.stored(tensor, d) == axis)


def sequence_refusal(seq: int, kind: str, ranks: int) -> Refusal | None:
    """Refuse a length that the ranks cannot share in this order; zigzag needs two chunks each."""
    if kind != "zigzag":
        if seq % ranks == 0:
            return None
        return Refusal(
            "seq-not-divisible",
            lambda: (
                f"seq={seq} cannot be split over {ranks} ranks",
                f"nearest legal lengths: {nearest_multiples(seq, ranks)}",
            ),
        )
    if seq % (2 * ranks) == 0:
        return None
    legal = nearest_multiples(seq, 2 * ranks)
    if seq % ranks:
        return Refusal(
            "seq-not-divisible",
            lambda: (
                f"seq={seq} cannot be split over {ranks} ranks; zigzag needs 2 chunks a rank",
                f"nearest legal lengths: {legal}; pad the end, which causal queries never see",
            ),
        )
    return Refusal(
        "seq-not-divisible-zigzag",
        lambda: (
            f"seq={seq} is {seq // ranks} tokens a rank over {ranks} ranks, "
            "but zigzag needs an even number",
            f"nearest legal lengths: {legal}; or a contiguous order, which {seq} allows "
            "(`order S: contiguous`, `--order contiguous`)",
        ),
    )


def _indivisible(axis: str, extent: int, dims: tuple[str, ...], ranks: int) -> Refusal:
    what = {"H": "kv_heads", "B": "batch", "G": "queries per key/value head"}.get(axis, axis)
    slug = "heads-not-divisible" if axis == "H" else "not-divisible"
    return Refusal(
        slug,
        lambda: (
            f"{what}={extent} cannot be split over {', '.join(dims)} ({ranks} ranks)",
            f"split fewer ways ({what} has the divisors {divisors(extent)}), "
            "or use the sequence: `parallelize S_q over …`",
        ),
    )


def _settle_border(program: Program) -> SETTLED:
    needed = needed_border(program)
    if not program.border:
        return program.changed(border=needed), None
    if Counter(program.border) != Counter(needed):
        steps = (Reshard((s.tensor,), s.source, s.target, s.dim) for s in needed)
        lines = ", ".join(str(step).removeprefix("reshard ") for step in steps)
        refusal = Refusal(
            "reshard-wrong",
            lambda: (
                "the reshards do not lead from the pins to what the schedule works from",
                f"needed: {lines or 'none'}",
            ),
        )
        return None, Fault(refusal, "reshard")
    if program.border != needed:
        refusal = Refusal(
            "reshard-order",
            lambda: (
                "reshards in another order: inputs outermost dimension first, outputs last",
                "leave the reshard lines out: they are then written for you",
            ),
        )
        return None, Fault(refusal, "reshard")
    return program, None


def needed_border(program: Program) -> tuple[BorderStep, ...]:
    """The collectives from the pins to the schedule and back.

    An all-to-all along one dimension moves the same bytes in whatever order they come: inputs
    go outermost first, and outputs leave the way the inputs came.
    """
    ways = {
        tensor.name: tuple(zip(tensor.pin, program.storage(tensor), strict=True))
        for tensor in program.tensors
    }
    steps = []
    for index, dim in enumerate(program.mesh.names):
        for tensor in program.read:
            pinned, stored = ways[tensor.name][index]
            if pinned != stored:
                steps.append(BorderStep(tensor.name, pinned, stored, dim))
    for index, dim in reversed(tuple(enumerate(program.mesh.names))):
        for tensor in program.outputs:
            pinned, stored = ways[tensor.name][index]
            if pinned != stored:
                steps.append(BorderStep(tensor.name, stored, pinned, dim))
    return tuple(steps)
