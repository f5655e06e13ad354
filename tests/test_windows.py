"""Sliding windows: every order and design against a mask of booleans, and how far tiles come.

Four ranks with slabs of 12 tokens, or chunks of 6 under zigzag: windows end inside a slab, at its
border, and beyond the next one; the widest sees everything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from differentiable import SAVE, Trained, check_gradients
from emitted import Emitted, expected, of_lines, problem_of
from numeric_cases import Problem, assert_refused, compare, own_inputs, record_call, setup
from plans import links_of, lowered, run_and_compare
from plans import problem_of as small
from priced import network_of
from ranks import Ranks

from mercurygen.check.prove import prove
from mercurygen.cost import closed
from mercurygen.cost.simulate import simulate
from mercurygen.emit.callsites import check_text
from mercurygen.errors import Refusal, UserError
from mercurygen.ir.problem import Problem as Wanted
from mercurygen.lower.events import Batch
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace

SLAB = 12
PROBLEM = Problem(seq=4 * SLAB, heads=4, kv_heads=2, order="contiguous")
WINDOWS = ((0, 0), (SLAB - 2, 0), (SLAB - 1, 0), (SLAB, 0), (5 * SLAB // 2, 0), (99, 0), (7, 5))
RING = "parallelize S_q over m\nshift k, v: S_kv along m"
PLANS = {  # mesh, directives
    "ring": ("m=4", RING),
    "direct": ("m=4", f"{RING} direct"),
    "reverse": ("m=4", f"{RING} direct reverse"),
    "gather": ("m=4", "parallelize S_q over m\nshard k, v: S_kv over m"),
    "ulysses": ("m=2", "parallelize H over m"),
    "unified": (
        "n=2 m=2",
        "parallelize S_q over n\nparallelize H over m\nshift k, v: S_kv along n direct",
    ),
    "double": ("n=2 m=2", "parallelize S_q over n, m\nshift k, v: S_kv along n, m"),
    "queries": (
        "m=4",
        "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m direct",
    ),
}
ORDERS = ("contiguous", "zigzag", "striped")


def lines(name: str, order: str) -> tuple[str, str]:
    """The mesh of a plan, and its lines."""
    mesh, body = PLANS[name]
    dims = ", ".join(each.partition("=")[0] for each in mesh.split())
    return mesh, f"order S: {order} over {dims}\npin q, k, v, out, lse: S over {dims}\n{body}"


CASES = [(name, order) for name in PLANS for order in ORDERS]
REFUSED = {("gather", "striped"), ("unified", "striped")}  # stripes that are not evenly spaced


@pytest.mark.parametrize("name, order", CASES)
def test_plans(name: str, order: str) -> None:
    """Proved, right on virtual ranks, and the closed form's bytes are those of the events."""
    mesh, body = lines(name, order)
    for before, after in ((SLAB, 0), (5, 7)):
        plan = lowered("attention", small("attention", window=before + 1, ahead=after), mesh, body)
        if (name, order) in REFUSED:
            assert isinstance(plan, Refusal) and plan.slug == "mask-not-cuttable"
            continue
        assert isinstance(plan, Plan), plan.explain()
        prove(plan, links_of(plan.program.mesh))
        run_and_compare(plan)
        network = network_of(plan.program.mesh)
        one, other = closed.cost(plan, network), simulate(plan, network)
        assert (one.peak_memory, one.dims) == (other.peak_memory, other.dims)


def emitted(name: str, order: str, before: int = SLAB, after: int = 0) -> Emitted:
    """A schedule's module."""
    mesh, body = lines(name, order)
    problem = problem_of(replace(PROBLEM, order=order, window=(before, after)))
    return of_lines(mesh, f"{body}\npatch body with aten", problem)


def windowed(order: str, before: int = SLAB, after: int = 0) -> Problem:
    """A problem with a window."""
    return replace(PROBLEM, order=order, window=(before, after))


# --- on ranks -----------------------------------------------------------------------------------


def check_windows(rank: int, world: int, text: str, problem: Problem) -> None:
    """A module takes other windows than its own: out and lse on every rank."""
    module, mesh = setup(text)
    inputs = problem.inputs(torch.float64)
    for window in WINDOWS:
        if window[1] and "this ring brings" in text:  # no tiles of what comes after
            local = own_inputs(module, mesh, problem, torch.float64)
            call = partial(module.attention, *local, mesh, window=window)
            assert_refused(call, str(window), "before a query only")
            continue
        compare(module, mesh, replace(problem, window=window), inputs, 1e-12)


RUN = [("direct", "contiguous"), ("ring", "contiguous"), ("direct", "zigzag"), ("gather", "zigzag")]
RUN += [("direct", "striped"), ("unified", "zigzag"), ("double", "contiguous")]
RANKS, PAIR = Ranks(4), Ranks(2)
for _name, _order in RUN:
    _case, _problem = emitted(_name, _order), replace(PROBLEM, order=_order)
    RANKS.add(f"{_name}-{_order}", check_windows, _case.late_plain, _problem)
    RANKS.add(f"calls-{_name}-{_order}", record_call, _case.late_plain, _problem, torch.bfloat16)


@pytest.mark.parametrize("name, order", RUN)
def test_on_ranks(name: str, order: str) -> None:
    """B33, B34: W of 1, a slab less one, a slab, one more, 2.5 slabs, everything, both ways."""
    RANKS.result(f"{name}-{order}")


@pytest.mark.parametrize("name, order", RUN)
def test_calls_are_the_plans(name: str, order: str) -> None:
    """Bytes that were counted, operation by operation."""
    plan = emitted(name, order).plan
    for rank, calls in enumerate(RANKS.result(f"calls-{name}-{order}")):
        assert calls == expected(plan, trace(plan, rank))


# --- training -----------------------------------------------------------------------------------

DIRECT = "parallelize S_q over m; shift k, v: S_kv along m direct"
BACK = f"{SAVE} outer; parallelize S_q over m; "
TRAINED = {
    "direct-contiguous": Trained(
        "m=4", DIRECT, f"{BACK}shift k, v, dk, dv: S_kv along m direct", windowed("contiguous")
    ),
    "direct-zigzag": Trained(
        "m=4", DIRECT, f"{BACK}shift k, v, dk, dv: S_kv along m direct", windowed("zigzag", 7, 5)
    ),
    "direct-striped": Trained(
        "m=4", DIRECT, f"{BACK}shift k, v, dk, dv: S_kv along m direct", windowed("striped", 2)
    ),
    "ring": Trained(
        "m=4", DIRECT, f"{BACK}shift k, v, dk, dv: S_kv along m", windowed("contiguous", 30)
    ),
    "gather": Trained("m=4", DIRECT, f"{BACK}shard k, v, dk, dv: S_kv over m", windowed("zigzag")),
    "heads": Trained(
        "m=2",
        "parallelize H over m",
        f"{SAVE} inner; parallelize H over m",
        windowed("contiguous", 20, 3),
    ),
}
for _name, _trained in TRAINED.items():
    _ranks = RANKS if _trained.world == 4 else PAIR
    _dtypes = torch.float64, torch.float32
    _ranks.add(f"train-{_name}", check_gradients, _trained.late, _trained.problem, *_dtypes)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str) -> None:
    """dq, dk and dv on every rank; the plan's numbers are those of the operator, too."""
    trained = TRAINED[name]
    (RANKS if trained.world == 4 else PAIR).result(f"train-{name}")
    forward, backward = trained.plans
    check_text(trained.plain, forward.plan, backward=backward.plan)


def test_gradients_are_sent_for_what_is_read() -> None:
    """Of a tile k and v come, and dk and dv go back, for the tokens in the window alone."""
    backward = TRAINED["direct-contiguous"].plans[1].plan
    token = 2 * PROBLEM.batch * PROBLEM.kv_heads * PROBLEM.head_dim
    for rank in range(4):
        read, given = (min(SLAB, x * SLAB) for x in (rank, 3 - rank))
        calls = expected(backward, trace(backward, rank))
        assert sum(x.received for x in calls) == token * (2 * read + 4 * given)
        assert sum(x.sent for x in calls) == token * (2 * given + 4 * read)


# --- how far tiles come -------------------------------------------------------------------------


@pytest.mark.parametrize("before, hops", [(1, 1), (11, 1), (12, 1), (13, 2), (24, 2), (35, 3)])
def test_hops(before: int, hops: int) -> None:
    """A ring has as many as the window has begun slabs; a direct one brings just its tokens."""
    ring, direct = (emitted(name, "contiguous", before).plan for name in ("ring", "direct"))
    sent = [[x for x in trace(ring, r).events if isinstance(x, Batch)] for r in range(4)]
    assert [len(each) for each in sent] == [hops] * 4
    token = 2 * PROBLEM.batch * PROBLEM.kv_heads * PROBLEM.head_dim * 2  # k and v in 2 bytes
    for rank in range(4):
        read = min(before, rank * SLAB)
        calls = expected(direct, trace(direct, rank))
        assert sum(call.received for call in calls) == read * token


@pytest.mark.parametrize("order", ORDERS)
def test_what_no_one_reads_is_not_sent(order: str) -> None:
    """Under zigzag a tile's early and late chunk have their own neighbours."""
    plan = emitted("direct", order, 3).plan
    distances = {"contiguous": {1}, "zigzag": {1, 3}, "striped": {1, 2, 3}}[order]
    (walk,) = plan.nest.loops[0].walks
    assert set(walk.steps or (1, 2, 3)) == distances


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("window, ahead", [(0, 0), (-3, 0), (5, -1), (64, 0), (99, 0), (99, 63)])
def test_no_windows(window: int, ahead: int) -> None:
    """Nothing seen, a number below 0, and a window that keeps nothing out."""
    with pytest.raises(UserError) as refused:
        Wanted(seq=64, mask="window", window=window, ahead=ahead)
    assert refused.value.slug == "window-out-of-range"
