"""What a forward keeps for its backward: which buffers of its trace, and what that costs."""

from __future__ import annotations

from dataclasses import replace

from mercurygen.lower.events import Collective, Free, Pack, Return, Trace, Unpack
from mercurygen.lower.kept import SAVED, is_outer, outer
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace


def kept(plan: Plan, backward: Plan, played: Trace) -> dict[str, int]:
    """The buffers of what is kept, by name; lse is left out where the trace does not say it."""
    found = dict(played.inputs)
    found |= {e.name: e.buffer for e in played.events if isinstance(e, Return)}
    unmoved = outer(plan, backward)
    for name in SAVED:
        into = sum(name in swap.tensors for swap in plan.before)
        back = sum(name in swap.tensors for swap in plan.after)
        if name in found and name not in unmoved:
            found[name] = _before(played, _through(played, found[name], into), back)
    return found


def nbytes(plan: Plan, backward: Plan) -> int:
    """Bytes on one rank of what is kept: of out as wide as the kernel left it."""
    played = trace(plan, 0, with_lse=True)
    buffers = kept(plan, backward, played)
    return sum(played.buffers[buffers[name]].nbytes for name in SAVED)


def backward_peak_bytes(plan: Plan, backward: Plan) -> int:
    """Most bytes alive on any rank in the backward, what was kept for it included."""
    wider = nbytes(plan, backward) - sum(backward.held_bytes(name) for name in SAVED)
    ranks = range(plan.program.mesh.size)
    return wider + max(trace(backward, rank).peak() for rank in ranks)


def peak_bytes(plan: Plan, backward: Plan) -> int:
    """Most bytes alive on any rank in the forward, what is kept for the backward included."""
    moves, most = is_outer(plan, backward), 0
    for rank in range(plan.program.mesh.size):
        played = trace(plan, rank, with_lse=moves)
        stay = {Free(buffer) for buffer in kept(plan, backward, played).values()}
        events = tuple(event for event in played.events if event not in stay)
        most = max(most, replace(played, events=events).peak())
    return most


def _through(played: Trace, number: int, swaps: int) -> int:
    """What becomes of a buffer in so many all-to-alls."""
    for event in played.events:
        match event:
            case Pack(source, target) | Collective(source=source, target=target) if swaps:
                number = target if source == number else number
            case Unpack(source, target) if swaps and source == number:
                number, swaps = target, swaps - 1
    return number


def _before(played: Trace, number: int, swaps: int) -> int:
    """What a buffer was before so many all-to-alls."""
    for event in reversed(played.events):
        match event:
            case Unpack(source, target) | Collective(source=source, target=target) if swaps:
                number = source if target == number else number
            case Pack(source, target) if swaps and target == number:
                number, swaps = source, swaps - 1
    return number
