"""Schedules drawn from everything that is emitted, on gloo and on virtual ranks.

Up to 8 ranks, with and without a mask, in every order of the tokens: numbers against float64,
live bytes and calls against the plan. A schedule that fails is printed as a file has it.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from drawn import Drawn, draws
from emitted import ATTENTION, Emitted, of_lines
from numeric_cases import Problem, check_forward, peak_bytes
from plans import lowered, mesh_of
from ranks import Ranks

from mercurygen.emit.module import refuse
from mercurygen.errors import Refusal
from mercurygen.ir import problem as ir
from mercurygen.lower.trace import trace
from mercurygen.virtual.run import play

SEED, COUNT, MOST_RANKS = 14, 60, 8
DTYPE = torch.float64
KINDS = {  # what some of the schedules must have
    "masks": ("causal", "full"),
    "orders": ("contiguous", "zigzag", "striped"),
    "walks": ("shift k, v: S_kv", "shard k, v: S_kv", " reverse", " both", "prefetch", "direct"),
    "results": ("shift out, lse: S_q", "shard out, lse: S_q", "replicate out, lse over"),
    "splits": ("parallelize H over", "parallelize S_q over", "parallelize S_kv over"),
    "meshes": ("mesh d0=2\n", "mesh d0=2 d1=3\n", "mesh d0=4 d1=2\n"),
}


@cache
def drawn() -> tuple[tuple[Emitted, Problem], ...]:
    """Different schedules that are emitted, and the numbers that each is run with."""
    found: dict[tuple[str, str, str], Drawn] = {}
    for each in draws(SEED, "attention"):
        if mesh_of(each.mesh).size > MOST_RANKS:
            continue
        plan = lowered("attention", each.problem, each.mesh, each.body)
        if isinstance(plan, Refusal) or refuse(plan) is not None:
            continue
        assert isinstance(each.problem, ir.Problem)
        found.setdefault((each.mesh, each.body, each.problem.mask), each)
        if len(found) == COUNT:
            break
    return tuple(map(made, found.values()))


def made(drawn: Drawn) -> tuple[Emitted, Problem]:
    """A drawn schedule, and its problem as the checks have it."""
    ours = drawn.problem
    assert isinstance(ours, ir.Problem)
    emitted = of_lines(drawn.mesh, drawn.body, ours)
    problem = Problem(
        seq=ours.seq,
        heads=ours.heads,
        kv_heads=ours.kv_heads,
        head_dim=ours.head_dim,
        value_dim=ours.v_head_dim,
        batch=ours.batch,
        causal=ours.mask == "causal",
        order=emitted.plan.program.order.kind,
        seed=SEED,
    )
    return emitted, problem


def check(rank: int, world: int, text: str, problem: Problem) -> tuple[int, int]:
    """Out and lse; live bytes without lse and with it."""
    check_forward(rank, world, text, problem, DTYPE)
    without, with_lse = (peak_bytes(rank, world, text, problem, DTYPE, x) for x in (False, True))
    return without, with_lse


@cache
def ranks() -> dict[int, Ranks]:
    """One fork for each number of ranks."""
    groups: dict[int, Ranks] = {}
    for number, (emitted, problem) in enumerate(drawn()):
        group = groups.setdefault(emitted.world, Ranks(emitted.world))
        group.add(str(number), check, emitted.late, problem)
    return groups


@pytest.mark.parametrize("number", range(COUNT))
def test_drawn_schedule(number: int) -> None:
    """Numbers within 1e-12, the plan's bytes alive, and the plan's calls and waits.

    Where tiles are gathered before they go round a ring, the module lets go of its own as soon as
    it was passed on, and the plan after the ring: there the plan's bytes are a bound.
    """
    emitted, _ = drawn()[number]
    print(f"seed {SEED}, schedule {number}:\n{emitted.shown}")
    peaks = ranks()[emitted.world].result(str(number))
    bound = any(loop.leading and loop.walks for loop in emitted.plan.nest.loops)
    for rank, found in enumerate(peaks):
        traces = [trace(emitted.plan, rank, with_lse=lse) for lse in (False, True)]
        wanted = tuple(each.peak() for each in traces)
        assert found == wanted or (bound and found < wanted), f"rank {rank}: {found}, {wanted}"
    assert play(emitted.text, emitted.schedule, ATTENTION, "drawn.py").error <= 1e-12


def test_all_kinds_are_drawn() -> None:
    """The sample has every mask, order and way in which tiles and results move."""
    texts = [emitted.shown for emitted, _ in drawn()]
    missing = {
        word for words in KINDS.values() for word in words if not any(word in t for t in texts)
    }
    assert not missing and len(set(texts)) == COUNT
