"""Schedules of the whole space, drawn: their modules are built and run on virtual ranks.

What is drawn has rings inside direct ones, or partial results in parts of the heads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import numeric_cases
import pytest
from emitted import ATTENTION, Emitted, links, problem_of, realize

from mercurygen.cli.build import build
from mercurygen.emit.levels import partial
from mercurygen.emit.module import refuse
from mercurygen.lower.plan import Plan
from mercurygen.search.space import points
from mercurygen.virtual.run import play

SEED = 20
PLAYED = 3  # one of so many runs on virtual ranks, too


def direct_in_nests(plan: Plan) -> bool:
    """Rings inside rings, some direct."""
    loops = plan.nest.loops
    return not partial(plan) and any(loop.direct and len(loop.walks) > 1 for loop in loops)


def partial_in_parts(plan: Plan) -> bool:
    """Partial results of a part of the heads at a time, cut alike whatever their number."""
    return partial(plan) and [len(loop.axes) for loop in plan.tiles] == [1]


DRAWN = {  # what is drawn, from how many ranks, how many
    "direct": (direct_in_nests, (2, 2), 2),
    "parts": (partial_in_parts, (2,), 2),
    "parts of two levels": (partial_in_parts, (2, 2), 2),
}


def drawn(fits: Callable[[Plan], bool], sizes: tuple[int, ...], count: int) -> Iterator[Emitted]:
    """Some schedules that fit and have modules, so many of every order and mask."""
    rng = random.Random(SEED)
    for order, causal in (("zigzag", True), ("contiguous", True), ("contiguous", False)):
        problem = problem_of(
            numeric_cases.Problem(seq=48, heads=8, kv_heads=4, causal=causal, order=order)
        )
        space = list(points(ATTENTION, problem, links(*sizes), order=order))
        rng.shuffle(space)
        cases = (realize(point, links(*sizes), problem) for point in space)
        legal = (case for case in cases if isinstance(case, Emitted) and fits(case.plan))
        yield from islice((case for case in legal if refuse(case.plan) is None), count)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_modules_do_what_their_plans_say(name: str) -> None:
    """The text event by event; of some, numbers, calls and live bytes on every virtual rank."""
    for number, case in enumerate(drawn(*DRAWN[name])):
        print(f"seed {SEED}\n{case.shown}")
        built = build(case.schedule, "drawn")
        assert built.summary.events > case.world
        if number % PLAYED == 0:
            assert play(built.module_text, case.schedule, ATTENTION, "drawn.py").operations
