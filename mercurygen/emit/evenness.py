"""What a docstring says of how even the work of the ranks is on packed documents."""

from __future__ import annotations

from mercurygen.ir.documents import busiest
from mercurygen.lower.plan import Plan


def of_documents(plan: Plan) -> str:
    """How even the work of the ranks is, of the documents of the schedule."""
    program, ranks = plan.program, plan.program.mesh.size
    if not plan.row_dims:
        return " Every rank works on all documents, with heads of its own."
    causal, found = program.mask == "causal", []
    for zigzag in (True, False):
        if sum(program.documents) % (2 * ranks if zigzag else ranks) == 0:
            most, mean = busiest(program.documents, ranks, zigzag, causal)
            found.append(f"{most / mean:.3g} times the mean {'zigzag' if zigzag else 'contiguous'}")
    return (
        f" Of the documents above the busiest rank has {' and '.join(found)}, in pairs of queries "
        "and keys; `imbalance` says it of others."
    )
