"""The words that a search takes: objectives, passes, kernels, orders, and which go together."""

from __future__ import annotations

from mercurygen.designs import patterns
from mercurygen.errors import UserError, closest
from mercurygen.ir import layout
from mercurygen.ir.kernel import OPERATORS
from mercurygen.search.candidate import OBJECTIVES

PASSES = ("fwd", "train")
ORDERS = (*layout.ORDERS, "any")


def check(objective: str, order: str | None, design: str | None, passes: str, kernel: str) -> None:
    """Refuse what a search cannot be asked for.

    Raises:
        UserError: with the nearest that it can.
    """
    if objective not in OBJECTIVES:
        raise UserError(
            "unknown-objective", f"no objective {objective!r}", help=closest(objective, OBJECTIVES)
        )
    if passes not in PASSES:
        raise UserError("unknown-pass", f"no pass {passes!r}", help=closest(passes, PASSES))
    if kernel not in OPERATORS:
        help = closest(kernel, OPERATORS)
        raise UserError("unknown-kernel", f"no kernel {kernel!r} for attention", help=help)
    if order is not None and order not in ORDERS:
        raise UserError("unknown-order", f"no order {order!r}", help=closest(order, ORDERS))
    if design is not None and patterns.get(design).name not in patterns.names(passes):
        raise UserError(
            "design-of-backward",
            f"{design} is a design of the backward: its forward is that of another",
            help="search it with `--pass train`",
        )
