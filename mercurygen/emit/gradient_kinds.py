"""Which plans of gradients have a text, and which way gradients of tiles go."""

from __future__ import annotations

from mercurygen.emit import ring_kinds, windows
from mercurygen.emit.ring_kinds import ring_of
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Gather, Plan


def not_emitted(plan: Plan) -> str | None:
    """What of a plan of gradients has no text yet."""
    loops = plan.nest.loops
    walks = [walk for loop in loops for walk in loop.walks]
    if plan.tiles:
        return "a backward in parts"
    if any("lse" in loop.tensors and isinstance(s, Gather) for loop in loops for s in loop.stages):
        return "a backward that gathers lse"
    if any(swap.gathered == "G" for swap in plan.before):
        return "a backward that takes query heads back to the sequence before it begins"
    what = ring_kinds.not_emitted(plan)
    if what is not None:
        return what
    if plan.program.banded and plan.program.kernel == TRITON:
        return f"{windows.word(plan)} in the Triton kernel"
    if straight_back(plan):
        return None
    if any(loop.walks and loop.home != "relayed" for loop in loops):
        return "a backward where tiles come by and gradients of theirs do not go on with them"
    if len({loop.outputs for loop in loops if loop.walks}) > 1:
        return "a backward where some gradients travel inside the ring of others"
    if any(not loop.tensors or len(loop.walks) > 1 or loop.partner for loop in loops if loop.walks):
        return "a backward with rings of this kind"
    if len({ring_of(plan, walk) for walk in walks}) > 1 or any(walk.direct for walk in walks):
        return "a backward with direct rings, or rings of several kinds"
    if any(reduce.kind != "sum" or reduce.dtype for reduce in plan.nest.reduces):
        return "gradients that cross links in less than float32"
    if any(r.axis not in (None, *plan.program.mask_axes) for r in plan.nest.reduces):
        return "gradients that are dealt out along another axis than the sequence"
    if plan.nest.begin == "only" and any(reduce.axis is None for reduce in plan.nest.reduces):
        return "gradients of one block that are added up on every rank"
    return None


def straight_back(plan: Plan) -> bool:
    """Whether keys and values come from their owners by one ring, their gradients straight back.

    Of a window: then all is of what is read of a tile only.
    """
    loops = [loop for loop in plan.nest.loops if loop.walks]
    if not plan.program.banded or len(loops) != 1 or plan.nest.reduces:
        return False
    (loop,) = loops
    keys = loop.axis == plan.program.mask_axes[1] and len(loop.stages) == 1
    return keys and loop.direct and loop.home == "direct" and len(plan.nest.loops) == 1
