"""Schedules of the whole space, drawn: their modules are built and run on virtual ranks.

What is drawn has rings inside direct ones, or partial results: in parts of the heads, beside rings
inside rings, of what the mask leaves of tiles, or of stripes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import numeric_cases
import pytest
from emitted import ATTENTION, Emitted, links, problem_of, realize, written

from mercurygen.cli.build import build
from mercurygen.emit.levels import partial
from mercurygen.emit.needed import need_form
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


def partial_of_nests(plan: Plan) -> bool:
    """Partial results of keys and values that come by in rings inside rings."""
    return partial(plan) and any(len(loop.walks) > 1 for loop in plan.nest.loops)


def partial_of_masked(plan: Plan) -> bool:
    """Partial results where direct rings bring what the mask leaves of tiles."""
    return partial(plan) and need_form(plan) != "whole"


def stripes(plan: Plan) -> bool:
    """Partial results of a causal square of every tile."""
    return partial(plan) and plan.program.order.kind == "striped"


MASKED, STRIPED = (("zigzag", True), ("contiguous", True)), (("striped", True),)
EVERY = (*MASKED, ("contiguous", False))
DRAWN = {  # what is drawn, from how many ranks, in which orders and masks, how many of each
    "direct": (direct_in_nests, (2, 2), EVERY, 2),
    "parts": (partial_in_parts, (2,), EVERY, 1),
    "parts of two levels": (partial_in_parts, (2, 2), EVERY, 1),
    "nests": (partial_of_nests, (2, 2, 2), EVERY, 1),
    "masked": (partial_of_masked, (2, 2), MASKED, 2),
    "stripes": (stripes, (2, 2), STRIPED, 2),
}


def drawn(
    fits: Callable[[Plan], bool],
    sizes: tuple[int, ...],
    masks: tuple[tuple[str, bool], ...],
    count: int,
) -> Iterator[Emitted]:
    """Some schedules that fit, so many of every order and mask: all of them have modules."""
    rng = random.Random(SEED)
    for order, causal in masks:
        problem = problem_of(
            numeric_cases.Problem(seq=48, heads=8, kv_heads=4, causal=causal, order=order)
        )
        space = list(points(ATTENTION, problem, links(*sizes), order=order))
        rng.shuffle(space)
        cases = (realize(point, links(*sizes), problem) for point in space)
        yield from islice((x for x in cases if isinstance(x, Emitted) and fits(x.plan)), count)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_modules_do_what_their_plans_say(name: str) -> None:
    """The text event by event; of some, numbers, calls and live bytes on every virtual rank."""
    for number, case in enumerate(drawn(*DRAWN[name])):
        print(f"seed {SEED}\n{case.shown}")
        built = build(case.schedule, "drawn")
        assert built.summary.events > case.world
        if number % PLAYED == 0:
            assert play(built.module_text, case.schedule, ATTENTION, "drawn.py").operations


WRITTEN = {  # what the search leaves out: mesh, directives, order, whether it is causal
    # of 2 key/value heads with 2 query heads each four parts cut both, of 4 they would not
    "joined axes": (
        "gpu=2",
        "parallelize S_q over gpu\nshard k, v: S_kv over gpu\njoin H, G\ntile H_G by 4",
        *("zigzag", True),
    ),
    "parts of the keys": (
        "gpu=2",
        "parallelize S_kv over gpu\nshard q, out, lse: S_q over gpu\ntile S_kv by 3",
        *("zigzag", True),
    ),
    "home alone": (
        "node=2 gpu=2",
        "parallelize S_q over node\nparallelize S_kv over gpu\nshift k, v: S_kv along node\n"
        "shard q: S_q over gpu\nshift out, lse: S_q along gpu",
        *("contiguous", False),
    ),
    "dealt stripes": (
        "node=2 gpu=2",
        "parallelize S_kv over node\nparallelize H over gpu\nshard q, out, lse: S_q over node",
        *("striped", False),
    ),
    "queries that come by": (
        "node=2 gpu=2",
        "parallelize S_kv over node\nparallelize S_q over gpu\nshard k, v: S_kv over gpu\n"
        "shift q: S_q along node\nshard out, lse: S_q over node",
        *("contiguous", True),
    ),
    "a ring beside a nest": (
        "rack=2 node=2 gpu=2",
        "parallelize S_kv over rack\nparallelize S_q over node, gpu\nshift q: S_q along rack\n"
        "shift k, v: S_kv along node, gpu\nshift out, lse: S_q along rack",
        *("contiguous", False),
    ),
    "reverse": (
        "node=2 gpu=3",
        "parallelize S_kv over node, gpu\nshift q: S_q along node, gpu reverse\n"
        "shift out, lse: S_q along node, gpu",
        *("contiguous", True),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_modules_do_what_their_plans_say(name: str) -> None:
    """The text event by event; numbers, calls and live bytes on every virtual rank."""
    mesh, body, order, causal = WRITTEN[name]
    heads = 4 if "join" in body else 8
    problem = numeric_cases.Problem(
        seq=72, heads=heads, kv_heads=heads // 2, causal=causal, order=order
    )
    case = written(mesh, body, problem)
    built = build(case.schedule, "written")
    assert play(built.module_text, case.schedule, ATTENTION, "written.py").operations
