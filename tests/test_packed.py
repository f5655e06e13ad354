"""Packed documents: plans of any lengths, and modules on real ranks, document by document.

B36: lengths that no rank border respects. B37: no document sees another, and a module without
documents takes none. B72: positions restart with each document.
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import replace

import pytest
import torch
from emitted import ATTENTION, Emitted, expected, of_lines, one
from numeric_cases import Problem as Dense
from packed_cases import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    VALUE_DIM,
    Packed,
    check_all,
    check_dense_refuses,
    check_helpers,
    check_packed,
    check_refused,
)
from plans import links_of, plan_of, run_and_compare
from ranks import Ranks

from mercurygen.check.prove import prove
from mercurygen.cli.build import plans_of
from mercurygen.emit.module import emit
from mercurygen.errors import Refusal
from mercurygen.ir.caller import PACKED
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.schedule.apply import apply
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse

SEED = int(os.environ.get("MERCURYGEN_SEED", "20261130"))
ROWS = "parallelize S_q over {0}\n"
DESIGNS = {
    "ring": ("m=4", ROWS.format("m") + "shift k, v: S_kv along m"),
    "all-gather": ("m=4", ROWS.format("m") + "shard k, v: S_kv over m"),
    "Ulysses": ("m=4", "parallelize H over m"),
    "unified": ("n=2 m=2", ROWS.format("n") + "parallelize H over m\nshift k, v: S_kv along n"),
    "double ring": ("n=2 m=2", ROWS.format("n, m") + "shift k, v: S_kv along n, m"),
}
ORDERS = (("zigzag", True), ("contiguous", True), ("contiguous", False))


def random_lengths(rng: random.Random, seq: int) -> tuple[int, ...]:
    """Documents of any lengths, long and short ones."""
    found = []
    while sum(found) < seq:
        most = seq - sum(found)
        found.append(rng.randint(1, rng.choice((1, 3, most))) if most > 3 else most)
    return tuple(found)


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DESIGNS)
def test_plans_of_random_lengths(name: str) -> None:
    """Proved, and every rank gives what the operator gives on one device."""
    mesh, body = DESIGNS[name]
    rng = random.Random(f"{SEED}{name}")
    dims = ", ".join(word.partition("=")[0] for word in mesh.split())
    pins = f"pin q, k, v, out, lse: S over {dims}"
    for order, causal in ORDERS:
        for seq in (8, 48):
            lengths = random_lengths(rng, seq)
            print(name, order, causal, lengths)
            problem = problem_of(Packed(lengths, order, causal), "float64")
            lines = f"order S: {order} over {dims}\n{pins}\n{body}"
            plan = plan_of("attention", problem, mesh, lines)
            prove(plan, links_of(plan.program.mesh))
            run_and_compare(plan)


def problem_of(packed: Packed, dtype: str) -> Problem:
    """The problem of a schedule's header."""
    return Problem(
        seq=packed.seq,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=VALUE_DIM,
        dtype=dtype,
        mask="causal" if packed.causal else "full",
        layout=PACKED,
        documents=tuple(n for n in packed.lengths if n),
    )


# --- modules ------------------------------------------------------------------------------------

RANKS = {world: Ranks(world) for world in (2, 4)}
LISTS = (  # what is missing to a legal length is a document of its own, of 0 tokens if nothing is
    (7,),
    (7, 1, 5),
    (1,) * 9,
    (24,),
    (0, 5, 0, 0, 8, 3, 0),
    (300, 17, 256, 391, 60),
)
WORLDS = {"m=4": 4, "n=2 m=2": 4, "m=2": 2}


def module_of(name: str, order: str, causal: bool, mesh: str = "") -> Emitted:
    """A design's module."""
    ours, body = DESIGNS[name]
    mesh = mesh or ours
    dims = ", ".join(word.partition("=")[0] for word in mesh.split())
    pins = f"pin q, k, v, out, lse: S over {dims}"
    packed = Packed((32, 16), order, causal)
    lines = f"order S: {order} over {dims}\n{pins}\n{body}\npatch body with aten"
    return of_lines(mesh, lines, problem_of(packed, "float32"))


def resized(emitted: Emitted, packed: Packed) -> Plan:
    """The module's plan for other lengths."""
    schedule = replace(emitted.schedule, problem=problem_of(packed, "float32"))
    plan = lower(apply(ATTENTION, schedule))
    assert not isinstance(plan, Refusal), plan.explain()
    return plan


CASES: dict[str, tuple[Emitted, list[Packed]]] = {}
MODULES = [("ring", *each) for each in ORDERS] + [("all-gather", *each) for each in ORDERS]
MODULES += [(name, "zigzag", True) for name in ("Ulysses", "unified", "double ring")]


def build() -> None:
    """Modules with all lists on 4 ranks; the ring also on 2."""
    rng = random.Random(SEED)
    for name, order, causal in MODULES:
        both = name == "ring" and order == "zigzag"
        for mesh in (DESIGNS[name][0], *(("m=2",) if both else ())):
            emitted, world = module_of(name, order, causal, mesh), WORLDS[mesh]
            every = []
            for lengths in (*LISTS, random_lengths(rng, 16 * world)):
                rest = -sum(lengths) % (2 * world)
                every.append(Packed((*lengths, rest), order, causal))
            case = f"{name}-{mesh}-{order}-{'causal' if causal else 'full'}"
            CASES[case] = emitted, every
            RANKS[world].add(case, check_all, emitted.late, every, torch.float32)


build()


@pytest.mark.parametrize("case", CASES)
def test_b36_b37_every_rank_against_each_document_alone(case: str) -> None:
    """out and lse in float64's terms; calls and bytes are those of the plan for these lengths."""
    emitted, every = CASES[case]
    runs = RANKS[emitted.world].result(case)
    for number, packed in enumerate(every):
        plan = resized(emitted, packed)
        for rank, calls in enumerate(runs):
            want = expected(plan, trace(plan, rank, with_lse=True))
            assert calls[number] == want, (rank, packed)


# --- gradients ----------------------------------------------------------------------------------

BACKWARD = {
    "ring": "shift k, v, dk, dv: S_kv along m",
    "all-gather": "shard k, v: S_kv over m\nshard dk, dv: S_kv over m",
    "Ulysses": "",
    "double ring": "shift k, v, dk, dv: S_kv along n, m",
}
TRAINED = [("ring", "zigzag", True), ("all-gather", "zigzag", True), ("Ulysses", "zigzag", True)]
TRAINED += [("ring", "contiguous", False), ("double ring", "contiguous", True)]


def trained(name: str, order: str, causal: bool) -> Schedule:
    """A design's schedule with a section `backward`."""
    forward = module_of(name, order, causal).shown
    return parse(f"{forward}backward\n{BACKWARD[name]}\n").schedule


def text_of(schedule: Schedule) -> str:
    """Its module."""
    forward, backward = plans_of(schedule)
    assert backward is not None
    return emit(forward.schedule, forward.plan, "tested", ATTENTION, backward.plan)


TRAINS: dict[str, tuple[Schedule, list[Packed]]] = {}
for _name, _order, _causal in TRAINED:
    _every = [Packed((*x, -sum(x) % 8), _order, _causal) for x in (*LISTS[:5], (17, 2, 41, 20))]
    _schedule, _case = trained(_name, _order, _causal), f"{_name}-{_order}-{_causal}"
    TRAINS[_case] = _schedule, _every
    _text = functools.partial(text_of, _schedule)
    RANKS[4].add(f"train-{_case}", check_all, _text, _every, torch.float64, True)


@pytest.mark.parametrize("case", TRAINS)
def test_gradients_against_each_document_alone(case: str) -> None:
    """out, lse, dq, dk and dv of every rank; calls and bytes of both passes are the plans'."""
    schedule, every = TRAINS[case]
    runs = RANKS[4].result(f"train-{case}")
    for number, packed in enumerate(every):
        plans = plans_of(replace(schedule, problem=problem_of(packed, "float64")))
        for rank, calls in enumerate(runs):
            want = [y for x in plans for y in expected(x.plan, trace(x.plan, rank, with_lse=True))]
            assert calls[number] == want, (rank, packed)


RING, GATHER = module_of("ring", "zigzag", True), module_of("all-gather", "contiguous", False)
WIDE = Packed((300, 17, 256, 391, 60), "zigzag")
RANKS[4].add("float64", check_packed, RING.late, WIDE, torch.float64)
RANKS[4].add("bfloat16", check_packed, RING.late, WIDE, torch.bfloat16)
RANKS[4].add("helpers", check_helpers, RING.late, Packed((7, 0, 1, 5, 19), "zigzag"))
RANKS[4].add("helpers full", check_helpers, GATHER.late, Packed((30, 2), "contiguous", False))
RANKS[4].add("refused", check_refused, RING.late, Packed((7, 1, 24), "zigzag"))
RANKS[2].add("dense", check_dense_refuses, one("ring", (2,), Dense(seq=16)).late)


@pytest.mark.parametrize("case", ["float64", "bfloat16", "helpers", "helpers full", "refused"])
def test_b72_on_four_ranks(case: str) -> None:
    RANKS[4].result(case)


def test_b37_a_dense_module_takes_no_documents() -> None:
    RANKS[2].result("dense")
