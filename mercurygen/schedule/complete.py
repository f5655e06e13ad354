"""What only holds once all directives are in: pins, order, sizes, borders."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mercurygen.errors import Refusal
from mercurygen.ir.kernel import kernels_of
from mercurygen.ir.layout import Order
from mercurygen.ir.problem import divisors, nearest_multiples
from mercurygen.ir.program import Axis, Program, Tensor
from mercurygen.schedule.borders import settle_border
from mercurygen.schedule.fault import Fault
from mercurygen.schedule.stories import fault_of_stories
from mercurygen.schedule.tile_loops import fault_of_tiles

SETTLED = tuple[Program, None] | tuple[None, Fault]
OWN_BODY = "body"  # the kernel that is the operator's own lines


def complete(program: Program) -> SETTLED:
    """The program with its order and border settled, or why it is not legal."""
    program = _with_default_pins(program)
    fault = _fault_of_derived(program) or fault_of_stories(program)
    if fault:
        return None, fault
    kernel = program.kernel
    if kernel is None:
        kernel = "aten" if "aten" in kernels_of(program.operator) else OWN_BODY
    if program.border or program.tiles:
        return _laid_out(program.changed(kernel=kernel))
    key = "laid out", program.layout  # of many schedules, which differ in how tensors move
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = _laid_out(program)
    settled, fault = found
    if fault is not None:
        return None, fault
    if program.order is None:
        program = program.changed(order=settled.order)
    return program.changed(kernel=kernel, border=settled.border), None


def _laid_out(program: Program) -> SETTLED:
    """Order and border of a program whose tensors have their stories."""
    split = sequence_dims(program)
    if program.order is None:
        kind = "zigzag" if program.mask == "causal" and split else "contiguous"
        program = program.changed(order=Order(kind, split))
    fault = _fault_of_order(program, split) or _fault_of_sizes(program) or fault_of_tiles(program)
    if fault:
        return None, fault
    return settle_border(program)


def _with_default_pins(program: Program) -> Program:
    """Where no line pins anything: slices of the sequence over all dimensions.

    What has no sequence is held, and wanted, as the schedule stores it.
    """
    if program.pinned_at_all:
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
                refusal = Refusal("derived-pins", lambda e=explain: e)
                return Fault(refusal, ("pin", name), ("pin", tensor.reads[0]))
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
        (
            f"write `order S: {program.order.kind} over {', '.join(split)}`"
            if split
            else "leave the order out"
        ),
    )
    odd = next(dim for dim in program.mesh.names if (dim in split) != (dim in program.order.dims))
    return Fault(Refusal("order-dims", lambda: explain), ("order",), ("pin", odd))


def _fault_of_sizes(program: Program) -> Fault | None:
    if program.mask_axes:
        order = program.order
        for axis in program.mask_axes:
            extent = program.extent(axis)
            name = "seq_kv" if program.align and axis == program.mask_axes[1] else "seq"
            refusal = sequence_refusal(extent, order.kind, order.ranks(program.mesh), name)
            if refusal:
                return Fault(refusal, ("order",))
    if _divides(program):
        return None
    for axis in program.axes:
        if axis.name in program.mask_axes:
            continue
        for dims in _split_sets(program, axis.name):
            ranks = prod(program.mesh.extent(dim) for dim in dims)
            if axis.extent % ranks:
                refusal = _indivisible(program, axis, dims, ranks)
                named = (axis.name, *dims)
                return Fault(refusal, ("parallelize", *named), instead=("pin", *named))
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


def _split_sets(program: Program, axis: str) -> Iterator[tuple[str, ...]]:
    """Every set of dimensions over which some tensor has the axis split at one time."""
    names = program.mesh.names
    yield program.parallel_dims(axis)
    for tensor in program.tensors:
        yield tuple(d for d in names if program.pinned(tensor, d) == axis)
        yield tuple(d for d in names if program.stored(tensor, d) == axis)


def sequence_refusal(seq: int, kind: str, ranks: int, name: str = "seq") -> Refusal | None:
    """Refuse a length that the ranks cannot share in this order; zigzag needs two chunks each."""
    if kind != "zigzag":
        if seq % ranks == 0:
            return None
        return Refusal(
            "seq-not-divisible",
            lambda: (
                f"{name}={seq} cannot be split over {ranks} ranks",
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
                f"{name}={seq} cannot be split over {ranks} ranks; zigzag needs 2 chunks a rank",
                f"nearest legal lengths: {legal}; pad the end, which causal queries never see",
            ),
        )
    return Refusal(
        "seq-not-divisible-zigzag",
        lambda: (
            f"{name}={seq} is {seq // ranks} tokens a rank over {ranks} ranks, "
            "but zigzag needs an even number",
            f"nearest legal lengths: {legal}; or a contiguous order, which {seq} allows "
            "(`order S: contiguous`, `--order contiguous`)",
        ),
    )


def _indivisible(program: Program, axis: Axis, dims: tuple[str, ...], ranks: int) -> Refusal:
    heads = program.mask_axes and axis.name == "H"
    names = {"H": "kv_heads", "B": "batch", "G": "query heads of a key/value head"}
    what = names.get(axis.name, axis.name) if program.mask_axes else axis.name
    sequence = "; or split the sequence: `parallelize S_q over …`" if program.mask_axes else ""
    return Refusal(
        "heads-not-divisible" if heads else "not-divisible",
        lambda: (
            f"{what}={axis.extent} cannot be split over {', '.join(dims)} ({ranks} ranks)",
            f"legal numbers of ranks: {divisors(axis.extent)}{sequence}",
        ),
    )
