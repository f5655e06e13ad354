"""What a search works out once for many schedules is what each alone would be priced by."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost
from mercurygen.cost.topology import load
from mercurygen.errors import Refusal
from mercurygen.ir.problem import Problem
from mercurygen.ir.shared import Shared
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import Attempts, attempt, start
from mercurygen.search.collect import seldom_collected
from mercurygen.search.place import links
from mercurygen.search.space import Point, is_variant, points, settle

SEED = int(os.environ.get("MERCURYGEN_SEED", "20260731"))
ATTENTION = load_operator("attention")
PROBLEM = Problem(batch=4, seq=3072, heads=32, kv_heads=8, head_dim=12, v_head_dim=16)
SPACES = [  # topology, group, mask, order, one point of how many
    ("a100x16", (2, 4), "causal", "any", 300),
    ("a100x16", (2, 4), "full", None, 300),
    ("h100x8", (8,), "causal", "contiguous", 150),
    ("l40x8", None, "causal", None, 200),
    ("a100x32", (4, 2), "causal", "striped", 40),
]

Found = tuple[str | Plan, Cost | None]  # of a schedule: the slug of its refusal, or plan and cost


def space(topology: str, group: tuple[int, ...] | None, mask: str, order: str | None) -> tuple:
    """The links of a group, and every point of the space."""
    machine = load(topology)
    group = group or tuple(level.size for level in machine.levels)
    spanned = links(machine, group)
    found = points(ATTENTION, replace(PROBLEM, mask=mask), spanned, order=order)
    return Network(machine, group), found


def sample(found: Iterator[Point], seed: int, one_of: int) -> Iterator[Point]:
    """Runs of points next to each other, which share most, drawn from the space."""
    draw, left = random.Random(seed), 0
    for point in found:
        if not left and draw.random() < 1 / one_of / 3:
            left = 3
        if left:
            left -= 1
            yield point


def priced(plan: Plan | Refusal, network: Network, simulated: bool) -> Found:
    """Plan and cost; of what is only simulated the plan."""
    if isinstance(plan, Refusal):
        return plan.slug, None
    return plan, None if simulated else closed.cost(plan, network)


def together(point: Point, network: Network) -> Found:
    """As the search does it, beside all the points before."""
    settled = settle(point)
    plan = settled if isinstance(settled, Refusal) else lower(settled[0])
    return priced(plan, network, is_variant(point.directives))


def alone(point: Point, problem: Problem, network: Network) -> Found:
    """From a program, and on links, of which nothing is known yet."""
    settled = attempt(start(ATTENTION, problem, point.mesh), point.directives)
    plan = settled if isinstance(settled, Refusal) else lower(settled)
    fresh = Network(network.topology, network.group)
    return priced(plan, fresh, is_variant(point.directives))


@pytest.mark.parametrize("topology, group, mask, order, one_of", SPACES)
def test_shared_is_alone(topology: str, group, mask: str, order: str | None, one_of: int) -> None:
    """Plans, bytes, memory and times, to the last bit, and the same refusals."""
    network, found = space(topology, group, mask, order)
    problem, kinds = replace(PROBLEM, mask=mask), set()
    for number, point in enumerate(sample(found, SEED, one_of)):
        one, other = together(point, network), alone(point, problem, network)
        assert one == other, f"seed {SEED}, point {number}: {point.directives}"
        kinds.add(one[0] if isinstance(one[0], str) else one[1] is None)
    assert {True, False} <= kinds, f"seed {SEED}: {kinds}"


def test_to_forget_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with next to nothing kept."""
    monkeypatch.setattr(Shared, "MOST", 7)
    network, found = space("a100x16", (2, 4), "causal", None)
    problem = replace(PROBLEM, mask="causal")
    for number, point in enumerate(sample(found, SEED + 1, 600)):
        one = together(point, network)
        assert len(point.start.shared) <= Shared.MOST
        assert one == alone(point, problem, network), f"seed {SEED + 1}, point {number}"


def test_attempts_in_any_order() -> None:
    """What a schedule becomes does not depend on those that were tried before it."""
    network, found = space("h100x8", (8,), "causal", None)
    drawn = [p for p in sample(found, SEED + 2, 60) if len(p.mesh.dims) == 2]
    tries = {point.mesh: Attempts(point.start) for point in drawn}
    random.Random(SEED).shuffle(drawn)
    for point in drawn:
        made = tries[point.mesh].attempt(point.directives)
        again = attempt(point.start, point.directives)
        slugs = [x.slug if isinstance(x, Refusal) else x for x in (made, again)]
        assert slugs[0] == slugs[1], f"seed {SEED}: {point.directives}"
    assert len(drawn) > 10 and network.size == 8


def test_the_collector_is_as_before() -> None:
    """Also after an error; one that is switched off stays so."""
    import gc

    before = gc.get_threshold()
    try:
        with pytest.raises(ZeroDivisionError), seldom_collected():
            assert gc.get_threshold()[0] > before[0]
            raise ZeroDivisionError
        assert gc.get_threshold() == before
        gc.set_threshold(0, *before[1:])
        with seldom_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
