"""What plans of attention have no text yet."""

from __future__ import annotations

from mercurygen.emit import border, held, levels, masks, packed, results, ring_kinds, windows
from mercurygen.emit.loops import column_parts, part_counts
from mercurygen.emit.needed import need_form
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Plan, sliced


def not_emitted(plan: Plan) -> str | None:
    """What of a plan has no text yet."""
    program = plan.program
    if program.operator != "attention":
        return f"operator {program.operator}"
    if program.align is not None and not held.sliced(program):
        return "two sequences that are held otherwise than in slices of both"
    if program.order.kind == "striped" and need_form(plan) not in ("whole", "stripes"):
        return "direct shifts of stripes of one token"
    what = packed.not_emitted(plan) or ring_kinds.not_emitted(plan) or _of_window(plan)
    what = what or (_of_tiles(plan) if plan.tiles else results.not_emitted(plan))
    return what or border_not_emitted(plan)


def _of_window(plan: Plan) -> str | None:
    """What of a plan with a window has no text yet."""
    if not plan.program.banded:
        return None
    if plan.program.kernel == TRITON:
        return f"{windows.word(plan)} in the Triton kernel"
    if plan.program.order.kind == "striped" and masks.mask_form(plan) == "chunks":
        return f"stripes of one token that {windows.word(plan)} cuts token by token"
    if levels.partial(plan):
        return f"{windows.word(plan)} where partial results go home or are merged"
    return None


def border_not_emitted(plan: Plan) -> str | None:
    """Which reshards have no text yet."""
    plain = border.plain(plan)
    if plan.program.operator != "attention" and not plain:
        return "a backward with reshards of what is replicated, or is not the sequence"
    if plan.tiles and not (plain and sliced(plan.program)):
        return "a tile loop between pins of other axes than the sequence, or of none"
    return None


def _of_tiles(plan: Plan) -> str | None:
    """What of a plan with tile loops has no text yet."""
    parts, keys = part_counts(plan), column_parts(plan) > 1
    if keys and "G" in parts:
        return "a loop over parts of S_kv inside one over query heads"
    if levels.partial(plan) and ("S_q" in parts or keys and parts):
        return "partial results in parts of the queries, or of the keys and another axis"
    return results.not_emitted(plan)
