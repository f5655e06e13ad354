"""What of a user's operator, or of its plan, has no text yet."""

from __future__ import annotations

from mercurygen.emit import operator_body, operator_home
from mercurygen.emit.operator_nest import Nest
from mercurygen.emit.operator_words import Words
from mercurygen.ir.operator import Operator
from mercurygen.lower.events import Kernel
from mercurygen.lower.plan import Plan, walk_levels
from mercurygen.lower.trace import trace


def not_emitted(plan: Plan, operator: Operator) -> str | None:
    """What of a plan has no text yet."""
    words = Words(plan, operator)
    return _no_lines(words) or _no_movement(words) or _no_results(words) or _no_cuts(words)


def _no_lines(words: Words) -> str | None:
    """What of the operator."""
    op = words.operator
    if op.derivations:
        return "a derived tensor"
    if not words.floating:
        return "an operator whose inputs are all integers"
    if len(words.positioned) > 1 and set(words.positioned) & set(words.points):
        return "`position` of a single index beside another"
    over = [a for loop in op.loops if loop.kind == "points" for a in loop.axes]
    for tensor in op.outputs:
        if set(over) - set(tensor.axes):
            return f"{tensor.name}, which does not carry every axis of `points`,"
    reads = [words.program.tensor(name) for name in words.program.body]
    for axis in words.placed:
        if not any((axis,) in t.dims for t in reads):
            return f"positions along {axis}, which has no dimension of its own"
        if axis not in words.program.mask_axes and _split_twice(words, axis):
            return f"positions along {axis}, which tensors split in two ways"
    split = {a for a in words.program.parallel if a} | {
        a for t in words.program.tensors for a in t.pin
    }
    for tensor in words.program.tensors:
        for dim in tensor.dims:
            minor = next((a for a in dim[1:] if a in split), None)
            if minor:
                return f"a split of {minor}, which shares a dimension of {tensor.name}"
    named = next((a for a in words.values if a in split and a in words.points), None)
    return f"the extent of {named}, which is split, in a line" if named else None


def _split_twice(words: Words, axis: str) -> bool:
    """Whether tensors split an axis over different dimensions."""
    tensors = [t for t in words.program.tensors if t.carries(axis)]
    return len({words.plan.atoms.split(t, axis) for t in tensors} - {()}) > 1


def _no_movement(words: Words) -> str | None:
    """What of the tiles' way."""
    plan, program = words.plan, words.program
    if plan.before or plan.after:
        return "a reshard between the pins and the schedule"
    if plan.tiles:
        return "a tile loop"
    if program.order.kind == "striped" and any(g.join.outer > 1 for g in words.gathers):
        return "a striped order that several gathers join"
    for loop in plan.nest.loops:
        if loop.partner:
            return "a skewed pair of shifts"
        levels = walk_levels(loop.walking)
        for walk, gathers in levels:
            if walk.ahead != 1:
                return f"the prefetch of the shift along {walk.dim}"
            if gathers and (len(levels) > 1 or walk.direct):
                return "a gather inside of rings in rings, or of direct tiles"
            if (walk.direct or walk.both) and len(levels) > 1:
                return f"the option of the shift along {walk.dim} beside another"
            trims = walk.direct and program.mask != "full" and loop.axis in program.mask_axes
            if trims and len(program.order.dims) > 1:
                return "a direct shift of a sequence that several dimensions split"
    ways = {walk.reverse for walk in words.walks if not walk.direct}
    if len(ways) > 1 or (True in ways and any(w.both for w in words.walks)):
        return "rings of both directions beside each other"
    return None


def _no_results(words: Words) -> str | None:
    """What of the results' way."""
    plan, program = words.plan, words.program
    walked = [loop for loop in plan.nest.loops if loop.walks]
    if any(loop.outputs for loop in walked):
        return operator_home.not_emitted(words)
    if plan.nest.begin == "first" and len(walked) > 1:
        return "several loops of tiles under a mask"
    single = len(operator_body.groups(words)) == 1
    for reduce in plan.nest.reduces:
        if reduce.dtype:
            return f"results that cross links as {reduce.dtype}"
        if reduce.kind == "softmax" and reduce.axis is None:
            return "a softmax that is all-reduced"
        if reduce.kind != "sum" and not single:
            return "results of several combines that are merged over ranks"
        if reduce.axis and (reduce.join.outer > 1 or program.order.kind != "contiguous"):
            return "results that are scattered in runs"
    return None


def _no_cuts(words: Words) -> str | None:
    """Tiles that are longer than what the body is given of them, and no run of it."""
    nest = Nest(words)
    cut = {
        (tensor.name, axis)
        for tensor in words.program.read
        for axis in tensor.axes
        if nest.held(tensor, axis) != words.here(axis)
    }
    for rank in range(words.program.mesh.size):
        for event in trace(words.plan, rank).events:
            if not isinstance(event, Kernel):
                continue
            for tensor, operand in zip(words.program.read, event.inputs, strict=True):
                if any((tensor.name, axis) not in cut for axis, _, _ in operand.cuts):
                    return f"a tile of {tensor.name} of which the body is given a part"
    for tensor in (*words.program.read, *words.program.outputs):
        for dim in tensor.dims:
            for axis in dim:
                here = words.here(axis)
                output = tensor.role == "output"
                whole = words.result(tensor, axis) if output else nest.held(tensor, axis)
                moved = [i for i, d in enumerate(here) if here[d] != whole[d]]
                between = any(here[d] is None for d in list(here)[: max(moved, default=0)])
                if moved and (between or len(dim) > 1 or _masked_zigzag(words, axis)):
                    return f"a part of {tensor.name} that is no run along {axis}"
    return None


def _masked_zigzag(words: Words, axis: str) -> bool:
    return axis in words.program.mask_axes and words.program.order.kind != "contiguous"
