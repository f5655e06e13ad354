"""Which of the two models decides: the simulation, or, of many ranks, the closed form.

A simulation plays every rank, and costs what the square of their number does. The closed form takes
ranks that do the same together; of more than LARGE it is all there is, so that what it has to go
through rank by rank, or has no form for, is not searched there: shifts that are direct or both
ways, and tile loops.
"""

from __future__ import annotations

from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost
from mercurygen.cost.simulate import simulate
from mercurygen.lower.plan import Plan

LARGE = 128  # ranks: a simulation of more takes a second and longer


def decide(plan: Plan, network: Network) -> Cost:
    """What a plan of torch's attention costs, by the better model that there is.

    Args:
        plan: the plan.
        network: the links of its group.
    """
    return (simulate if network.size <= LARGE else closed.cost)(plan, network)
