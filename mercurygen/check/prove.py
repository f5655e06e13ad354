"""The static proof of a plan: all ranks, no tensors, exact."""

from __future__ import annotations

from dataclasses import replace

from mercurygen.check.buffers import check_buffers
from mercurygen.check.lineage import Lineage
from mercurygen.check.order import check_order
from mercurygen.check.report import ProofError, Report, Spread
from mercurygen.check.traffic import measure
from mercurygen.ir.mesh import Link
from mercurygen.lower.events import Trace
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace


def prove(plan: Plan, links: tuple[Link, ...]) -> Report:
    """Prove a plan, with and without the log-sum-exp handed out.

    Args:
        plan: of a complete program.
        links: the levels as the group occupies them.

    Returns:
        Figures of the plain call, and in `with_lse` of the other.

    Raises:
        ProofError: what is wrong, where.
        UserError: `mesh-not-of-topology`, if the levels are not those of the mesh.
    """
    ranks = range(plan.program.mesh.size)
    plain, full = (
        prove_traces(plan, tuple(trace(plan, rank, with_lse=lse) for rank in ranks), links)
        for lse in (False, True)
    )
    return replace(plain, with_lse=full)


def prove_traces(plan: Plan, traces: tuple[Trace, ...], links: tuple[Link, ...]) -> Report:
    """Prove that these traces, one per rank, do what the plan is for.

    Raises:
        ProofError: what is wrong, where.
    """
    ranks = plan.program.mesh.size
    for rank, each in enumerate(traces):
        if each.rank != rank or len(traces) != ranks:
            raise ProofError("order", rank, f"the traces are not those of ranks 0 to {ranks - 1}")
        check_buffers(each)
    play = check_order(plan, traces)
    lineage = Lineage(plan, traces, play)
    lineage.run()
    return Report(
        ranks=ranks,
        tiles=lineage.tiles,
        contributions=lineage.contributions,
        messages=play.messages,
        collectives=play.collectives,
        peak=Spread(tuple(each.peak() for each in traces)),
        traffic=measure(plan, traces, links),
    )
