"""What only holds once all directives are in: stories of tensors, borders, sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from mercurygen.errors import Refusal
from mercurygen.ir.layout import Order
from mercurygen.ir.problem import divisors, nearest_multiples
from mercurygen.ir.program import BorderStep, Program, Tensor

SETTLED = tuple[Program, None] | tuple[None, "Fault"]


class Fault:
    """A refusal, and the word of the directive that it is about (None: the mesh)."""

    def __init__(self, refusal: Refusal, word: str | None, mention: str = "") -> None:
        self.refusal, self.word, self.mention = refusal, word, mention


def complete(program: Program) -> SETTLED:
    """The program with its order and border settled, or why it is not legal."""
    program = _with_default_pins(program)
    fault = _fault_of_stories(program)
    if fault:
        return None, fault
    split = sequence_dims(program)
    if program.order is None:
        kind = "zigzag" if program.mask == "causal" and split else "contiguous"
        program = replace(program, order=Order(kind, split))
    program = replace(program, kernel=program.kernel or "aten")
    fault = _fault_of_order(program, split) or _fault_of_sizes(program)
    if fault:
        return None, fault
    return _settle_border(program)


def _with_default_pins(program: Program) -> Program:
    """Where no line pins anything, callers hold slices of the sequence over all dimensions."""
    if any(any(tensor.pin) for tensor in program.tensors):
        return program

    def pinned(tensor: Tensor) -> Tensor:
        return replace(tensor, pin=(program.sequence(tensor),) * len(program.mesh.dims))

    return replace(program, tensors=tuple(map(pinned, program.tensors)))


def sequence_dims(program: Program) -> tuple[str, ...]:
    """The dimensions over which a sequence is split, by a pin or by the schedule."""
    return tuple(
        dim
        for dim in program.mesh.names
        if any(
            axis in program.mask_axes
            for tensor in program.tensors
            for axis in (program.pinned(tensor, dim), program.stored(tensor, dim))
        )
    )


def _fault_of_stories(program: Program) -> Fault | None:
    for dim in program.mesh.names:
        axis = program.parallel_axis(dim)
        if axis is None:
            return Fault(_unused(program, dim), None)
        for tensor in program.tensors:
            refusal = _story(program, tensor, dim, axis)
            if refusal:
                return refusal
    return None


def _unused(program: Program, dim: str) -> Refusal:
    return Refusal(
        "dimension-unused",
        lambda: (
            f"the mesh dimension {dim}={program.mesh.extent(dim)} splits nothing",
            f"write `parallelize S_q over {dim}` or `parallelize H over {dim}`",
        ),
    )


def _story(program: Program, tensor: Tensor, dim: str, axis: str) -> Fault | None:
    stages = [s for s in program.stages if s.dim == dim and tensor.name in s.tensors]
    whole = (tensor.name, dim) in program.replicated
    word = "replicate" if whole else "shard" if stages and stages[0].kind == "gather" else "shift"
    if tensor.carries(axis):
        if not stages and not whole:
            return None
        explain = (
            f"{tensor.name} carries {axis}, which {dim} splits: each rank has its own part",
            f"drop {tensor.name} along {dim} from the `{word}`",
        )
        return Fault(Refusal("already-local", lambda: explain), word, dim)
    if stages and whole:
        explain = (
            f"{tensor.name} is both replicated over {dim} and stored split there",
            "each tensor has one story per dimension: keep one of the two lines",
        )
        return Fault(Refusal("two-stories", lambda: explain), "replicate", dim)
    if whole and program.pinned(tensor, dim) is not None:
        explain = (
            f"{tensor.name} is pinned {program.pinned(tensor, dim)} over {dim}: "
            "nobody gives a rank all of it",
            f"write `shard {tensor.name}: {program.sequence(tensor)} over {dim}`",
        )
        return Fault(Refusal("replicate-needs-pin", lambda: explain), "replicate", dim)
    if not stages and not whole:
        sequence = program.sequence(tensor)
        group = next((g for g in program.together if tensor.name in g), (tensor.name,))
        explain = (
            f"{tensor.name} does not carry {axis}: how does it come to the ranks along {dim}?",
            f"write `shift {', '.join(group)}: {sequence} along {dim}` "
            f"or `shard {', '.join(group)}: {sequence} over {dim}`",
        )
        return Fault(Refusal("no-story", lambda: explain), "parallelize", dim)
    return None


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
    rows = program.mask_axes[0]
    extent, order = program.extent(rows), program.order
    refusal = sequence_refusal(extent, order.kind, order.ranks(program.mesh))
    if refusal:
        return Fault(refusal, "order")
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


def _split_sets(program: Program, axis: str) -> Iterator[tuple[str, ...]]:
    """Every set of dimensions over which some tensor has the axis split at one time."""
    names = program.mesh.names
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
    what = {"H": "kv_heads", "B": "batch"}.get(axis, axis)
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
    for step in needed:
        if not _is_swap(program, step):
            explain = (
                f"{step.tensor} is pinned {step.source or 'replicated'} over {step.dim} "
                f"where the schedule has {step.target or 'all of it'}: this version only "
                "swaps a split sequence for split heads, and back for outputs",
                f"pin {step.tensor}: S over {step.dim}, or parallelize what it is pinned by",
            )
            refusal = Refusal("reshard-not-supported", lambda explain=explain: explain)
            return None, Fault(refusal, "pin")
    if not program.border:
        return replace(program, border=needed), None
    if sorted(map(_key, program.border)) != sorted(map(_key, needed)):
        lines = ", ".join(f"{s.tensor}: {s.source} to {s.target} along {s.dim}" for s in needed)
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


def _is_swap(program: Program, step: BorderStep) -> bool:
    """Whether a step trades a split sequence for split heads (an input), or back (an output)."""
    is_input = any(tensor.name == step.tensor for tensor in program.inputs)
    sequence, heads = (step.source, step.target) if is_input else (step.target, step.source)
    return sequence in program.mask_axes and heads == "H"


def _key(step: BorderStep) -> tuple:
    return (step.tensor, step.dim, step.source, step.target)


def needed_border(program: Program) -> tuple[BorderStep, ...]:
    """The collectives from the pins to the schedule and back.

    An all-to-all along one dimension moves the same bytes in whatever order they come: inputs
    go outermost first, and outputs leave the way the inputs came.
    """
    steps = []
    for dim in program.mesh.names:
        for tensor in program.inputs:
            pinned, stored = program.pinned(tensor, dim), program.stored(tensor, dim)
            if pinned != stored:
                steps.append(BorderStep(tensor.name, pinned, stored, dim))
    for dim in reversed(program.mesh.names):
        for tensor in program.outputs:
            pinned, stored = program.pinned(tensor, dim), program.stored(tensor, dim)
            if pinned != stored:
                steps.append(BorderStep(tensor.name, stored, pinned, dim))
    return tuple(steps)
