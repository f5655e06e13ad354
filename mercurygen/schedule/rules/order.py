"""`order S: zigzag over node, gpu`: which tokens a rank owns.

before: no order
after:  `order S: zigzag over node, gpu`
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.layout import Order
from mercurygen.ir.program import SEQUENCE, Program
from mercurygen.schedule.directives import OrderTokens
from mercurygen.schedule.rules.common import unknown_dim


def refuse(program: Program, d: OrderTokens) -> Refusal | None:
    """Unknown dimensions, another axis than S, a second order, dimensions out of mesh order."""
    if not program.mask_axes:
        return Refusal(
            "order-axis",
            lambda: (
                f"{program.operator} has no sequence to order: it has no mask",
                "leave the order out",
            ),
        )
    if d.axis != SEQUENCE:
        return Refusal(
            "order-axis",
            lambda: (f"only the sequence has an order, not {d.axis}", f"write `order S: {d.kind}`"),
        )
    if program.order is not None:
        return Refusal(
            "order-twice", lambda: ("the order is given twice", "a schedule has one order")
        )
    found = unknown_dim(program, d.dims)
    if found:
        return found
    if d.dims != program.mesh.in_order(d.dims):
        return Refusal(
            "order-dims",
            lambda: (
                "the dimensions of the order are not in mesh order",
                "write `over " + ", ".join(program.mesh.in_order(d.dims)) + "`",
            ),
        )
    return None


def rewrite(program: Program, d: OrderTokens) -> Program:
    """The program with its token order."""
    return program.changed(order=Order(d.kind, d.dims))
