"""Queries and keys that are two sequences: every order and design, both alignments, and windows.

Four ranks. A module takes other lengths than those that it was planned for: fewer queries than
keys, as many, and more, of which the first see nothing under `bottom-right` (out 0, lse -inf, no
gradient). What is compared with is a mask of booleans on one device (`reference.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from differentiable import SAVE, Trained, check_gradients
from emitted import Emitted, expected, of_lines, problem_of
from numeric_cases import Problem, assert_refused, compare, own_inputs, record_call, setup
from plans import links_of, lowered, run_and_compare, traces_of
from plans import problem_of as small
from priced import network_of
from ranks import Ranks
from test_windows import ORDERS
from test_windows import PLANS as EVERY

from mercurygen.check.prove import prove, prove_traces
from mercurygen.check.report import ProofError
from mercurygen.cost import closed
from mercurygen.cost.simulate import simulate
from mercurygen.emit.callsites import check_text
from mercurygen.errors import Refusal
from mercurygen.ir.text import parse, show
from mercurygen.lower.events import Kernel
from mercurygen.lower.trace import trace

BOTTOM, TOP = "bottom-right", "top-left"
SIZED = (  # mask, queries, keys, alignment, window, ahead
    ("full", 48, 24, None, None, 0),
    ("causal", 24, 72, BOTTOM, None, 0),
    ("causal", 48, 16, BOTTOM, None, 0),  # two thirds of the queries see nothing
    ("causal", 40, 56, TOP, None, 0),  # whole ranks of keys that nobody sees, cut unevenly
    ("causal", 48, 16, TOP, None, 0),
    ("window", 24, 72, BOTTOM, 20, 3),
    ("window", 72, 24, TOP, 9, 0),
)
UNIFIED = "parallelize S_q over n\nparallelize H over m\nshift k, v: S_kv along n"
PLANS = {**EVERY, "unified": ("n=2 m=2", UNIFIED)}
SOME = ("ring", "direct", "gather", "unified", "queries")  # in the other orders
UNEVEN = {("gather", "striped"), ("unified", "striped")}  # stripes that are not evenly spaced


def lines(name: str, order: str) -> tuple[str, str]:
    """The mesh of a plan, and its lines."""
    mesh, body = PLANS[name]
    dims = ", ".join(each.partition("=")[0] for each in mesh.split())
    return mesh, f"order S: {order} over {dims}\npin q, k, v, out, lse: S over {dims}\n{body}"


def refused(name: str, order: str, mask: str) -> str | None:
    """The slug of what refuses a plan: direct exchanges may leave a rank out, even the first."""
    if mask == "full":
        return None
    uneven = "mask-not-cuttable" if (name, order) in UNEVEN else None
    return "direct-skips-tiles" if "direct" in PLANS[name][1] else uneven


@pytest.mark.parametrize("mask, seq, keys, align, window, ahead", SIZED)
@pytest.mark.parametrize("order", ORDERS)
def test_plans(
    order: str, mask: str, seq: int, keys: int, align: str, window: int, ahead: int
) -> None:
    """Proved, right on virtual ranks, and the closed form's bytes are those of the events."""
    sizes = {"seq": seq, "seq_kv": keys, "align": align, "heads": 4, "kv_heads": 4}
    problem = small("attention", mask, **sizes, window=window, ahead=ahead)
    for name in PLANS if order == "contiguous" else SOME:
        mesh, body = lines(name, order)
        plan = lowered("attention", problem, mesh, body)
        if isinstance(plan, Refusal):
            assert plan.slug == refused(name, order, mask)
            continue
        assert not refused(name, order, mask)
        assert parse(show(plan.program)) == plan.program
        prove(plan, links_of(plan.program.mesh))
        run_and_compare(plan)
        network = network_of(plan.program.mesh)
        one, other = closed.cost(plan, network), simulate(plan, network)
        assert (one.peak_memory, one.dims) == (other.peak_memory, other.dims)


@pytest.mark.parametrize("align", (BOTTOM, TOP))
@pytest.mark.parametrize("more", (1, -1, 48))
def test_another_alignment_is_caught(align: str, more: int) -> None:
    """Blocks whose rows stand at one key more or less, or where the other alignment has them."""
    problem = small("attention", seq=24, seq_kv=72, align=align)
    plan = lowered("attention", problem, *lines("ring", "contiguous"))
    more = -more if align == BOTTOM else more
    traces = tuple(
        replace(each, events=tuple(_moved(event, more) for event in each.events))
        for each in traces_of(plan)
    )
    with pytest.raises(ProofError, match="the mask leaves"):
        prove_traces(plan, traces, links_of(plan.program.mesh))


def _moved(event: object, more: int) -> object:
    """A block whose rows see so many keys more, if the mask cuts it."""
    if not isinstance(event, Kernel) or event.block.band[1] is None:
        return event
    low, high = event.block.band
    return replace(event, block=event.block._replace(band=(low, high + more)))


# --- on ranks -----------------------------------------------------------------------------------

PROBLEM = Problem(seq=24, heads=4, kv_heads=2, order="contiguous", seq_kv=72, align=BOTTOM)
LENGTHS = (24, 72), (64, 16), (32, 32), (40, 56)  # of every module that is run
WIDE = (5, 0), (30, 7), (0, 40)


def problems(problem: Problem, windows: tuple) -> list[Problem]:
    """The same with other lengths, and windows."""
    sized = [replace(problem, seq=seq, seq_kv=keys) for seq, keys in LENGTHS]
    return [replace(each, window=window) for each in sized for window in windows]


def check_lengths(rank: int, world: int, text: str, problem: Problem) -> None:
    """A module takes other lengths than its own: out and lse on every rank."""
    module, mesh = setup(text)
    for each in problems(problem, WIDE if problem.window else (None,)):
        compare(module, mesh, each, each.inputs(torch.float64), 1e-12)
    local = own_inputs(module, mesh, problem, torch.float64)
    call = partial(module.attention, *local, mesh, seq=problem.seq, seq_kv=problem.seq)
    assert_refused(call, "T is not", str(problem.seq))


def emitted(name: str, problem: Problem) -> Emitted:
    """A schedule's module."""
    mesh, body = lines(name, problem.order)
    return of_lines(mesh, f"{body}\npatch body with aten", problem_of(problem))


def of(order: str = "contiguous", align: str | None = BOTTOM, **more: object) -> Problem:
    """A problem of another order and alignment; without one, of a full mask."""
    return replace(PROBLEM, order=order, align=align, causal=align is not None, **more)


RUN = {
    "ring": ("ring", of()),
    "ring-top": ("ring", of(align=TOP)),
    "ring-zigzag": ("ring", of("zigzag")),
    "ring-striped": ("ring", of("striped")),
    "gather-zigzag": ("gather", of("zigzag", TOP)),
    "unified-zigzag": ("unified", of("zigzag")),
    "double": ("double", of()),
    "window-ring": ("ring", of(window=(9, 4))),
    "window-gather": ("gather", of(window=(9, 4))),
    "window-ring-zigzag": ("ring", of("zigzag", TOP, window=(9, 0))),
    "full-direct": ("direct", of(align=None)),
    "full-queries": ("queries", of(align=None)),
    "full-gather-zigzag": ("gather", of("zigzag", None)),
}
RANKS, PAIR = Ranks(4), Ranks(2)
for _case, (_name, _problem) in RUN.items():
    _emitted = emitted(_name, _problem)
    _late = _emitted.late_plain
    RANKS.add(_case, check_lengths, _late, _problem)
    RANKS.add(f"calls-{_case}", record_call, _late, _problem, torch.bfloat16)


@pytest.mark.parametrize("case", RUN)
def test_on_ranks(case: str) -> None:
    """B08: both alignments with fewer queries than keys, as many, and more, each on every rank."""
    RANKS.result(case)
    plan = emitted(*RUN[case]).plan  # and the bytes that were counted, operation by operation
    for rank, calls in enumerate(RANKS.result(f"calls-{case}")):
        assert calls == expected(plan, trace(plan, rank))


# --- training -----------------------------------------------------------------------------------

RING = "parallelize S_q over m; shift k, v: S_kv along m"
BACK = f"{SAVE} outer; parallelize S_q over m; "
BURST = f"{SAVE} outer; parallelize S_kv over m; shift q, out, lse, do, dq: S_q along m"
TRAINED = {
    "ring": Trained("m=4", RING, f"{BACK}shift k, v, dk, dv: S_kv along m", of()),
    "burst": Trained("m=4", RING, BURST, of("zigzag", TOP)),
    "window": Trained("m=4", RING, f"{BACK}shift k, v, dk, dv: S_kv along m", of(window=(9, 3))),
    "striped": Trained("m=4", RING, f"{BACK}shift k, v, dk, dv: S_kv along m", of("striped")),
    "gather": Trained("m=4", RING, f"{BACK}shard k, v, dk, dv: S_kv over m", of("zigzag")),
    "full": Trained("m=4", RING, f"{BACK}shift k, v, dk, dv: S_kv along m", of(align=None)),
    "heads": Trained(
        "m=2", "parallelize H over m", f"{SAVE} inner; parallelize H over m", of(align=TOP)
    ),
    "alone": Trained("", "", f"{SAVE} outer", of()),
}


def check_trained(rank: int, world: int, text: str, problem: Problem) -> None:
    """dq, dk and dv of one module for every length; in float32, too, for its own."""
    for each in problems(problem, (problem.window,)):
        check_gradients(rank, world, text, each, torch.float64)
    check_gradients(rank, world, text, problem, torch.float32)


for _name, _trained in TRAINED.items():
    _ranks = {1: RANKS, 2: PAIR, 4: RANKS}[_trained.world]
    _ranks.add(f"train-{_name}", check_trained, _trained.late, _trained.problem)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str) -> None:
    """B06: dq, dk and dv on every rank, none of them NaN where queries see no key."""
    trained = TRAINED[name]
    (PAIR if trained.world == 2 else RANKS).result(f"train-{name}")
    forward, backward = trained.plans
    check_text(trained.plain, forward.plan, backward=backward.plan)
