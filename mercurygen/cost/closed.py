"""What a schedule costs, in closed form where there is one; by simulation where there is none."""

from __future__ import annotations

from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost
from mercurygen.cost.simulate import simulate
from mercurygen.ir.operator import Operator
from mercurygen.lower.plan import Plan


def cost(plan: Plan, network: Network, operator: Operator | None = None) -> Cost:
    """What a plan costs on the links of its group.

    Args:
        plan: the plan.
        network: the links of its group.
        operator: whose lines the body is; torch's attention needs none.
    """
    return simulate(plan, network, operator)
