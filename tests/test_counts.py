"""A real run's calls and memory are the plan's: kind, peers, bytes, order, on every rank."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from emitted import DESIGNS, Emitted, drawn, expected, instances, one, resized
from numeric_cases import Problem, peak_bytes, record_call
from ranks import Ranks

from mercurygen.lower.trace import trace

SEED = int(os.environ.get("MERCURYGEN_SEED", "20260731"))
SHAPES = ((2, 2, 2), (2, 4), (8,), (2, 2), (4,))
# A head size that the kernel takes and one that is padded; D_v other than D; both itemsizes.
VARIANTS = {
    "bfloat16": {"head_dim": 24, "value_dim": 40},
    "bfloat16-padded": {"head_dim": 20, "value_dim": 12},
    "float32": {"head_dim": 24, "value_dim": 24},
    "float32-padded": {"head_dim": 20, "value_dim": 20},
    "float64": {"head_dim": 12, "value_dim": 30},
}
RANKS = {world: Ranks(world) for world in (2, 3, 4, 8)}
CALLS: dict[str, Emitted] = {}
PEAKS: dict[str, Emitted] = {}  # of the problem and dtype that is run


def problem_for(world: int, causal: bool) -> Problem:
    """No two sizes alike."""
    order = "zigzag" if causal else "contiguous"
    return Problem(seq=12 * world, heads=16, kv_heads=8, batch=3, causal=causal, order=order)


def add(name: str, emitted: Emitted, problem: Problem) -> None:
    """The calls and the peaks of a schedule, with and without the log-sum-exp."""
    ranks = RANKS[emitted.world]
    for lse in (False, True):
        end = "-lse" if lse else ""
        plain = resized(emitted, problem, "bfloat16")
        CALLS[name + end] = plain
        case = f"calls-{name}{end}"
        ranks.add(case, record_call, emitted.late, problem, torch.bfloat16, lse)
        for variant, sizes in VARIANTS.items():
            dtype, run = variant.partition("-")[0], replace(problem, **sizes)
            case = f"{name}-{variant}{end}"
            PEAKS[case] = resized(emitted, run, dtype)
            ranks.add(case, peak_bytes, emitted.late, run, getattr(torch, dtype), lse)


def build() -> None:
    """Every design on the meshes that it fits, and drawn schedules."""
    for design in DESIGNS:
        for sizes in ((2,), (4,), (2, 4)):
            for causal in (True, False):
                problem = problem_for(2 if sizes == (2,) else 4 if sizes == (4,) else 8, causal)
                for number, emitted in enumerate(instances(design, sizes, problem)):
                    assert isinstance(emitted, Emitted)
                    mask = "causal" if causal else "full"
                    add(f"{design}-{mask}-{emitted.mesh}-{number}", emitted, problem)
    for number, (emitted, problem) in enumerate(drawn(SEED, 10, SHAPES, 12)):
        add(f"drawn-{number}", emitted, replace(problem, heads=16, kv_heads=8))


build()


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_the_plans(name: str) -> None:
    """Kind, group, peers, bytes and order, on every rank."""
    emitted = CALLS[name]
    runs = RANKS[emitted.world].result(f"calls-{name}")
    for rank, calls in enumerate(runs):
        played = trace(emitted.plan, rank, with_lse=name.endswith("-lse"))
        assert calls == expected(emitted.plan, played), f"rank {rank}\n{emitted.shown}"


@pytest.mark.parametrize("name", PEAKS)
def test_b44_live_bytes_are_the_plans(name: str) -> None:
    """B44: every rank's peak under a dispatch mode, to the byte."""
    emitted = PEAKS[name]
    lse = name.endswith("-lse")
    want = [trace(emitted.plan, rank, with_lse=lse).peak() for rank in range(emitted.world)]
    assert RANKS[emitted.world].result(name) == want, emitted.shown


LENGTH = 24  # tokens of a rank
RINGS = {
    world: one("ring", (world,), Problem(seq=LENGTH * world, value_dim=40, order=order), "bfloat16")
    for world, order in ((2, "zigzag"), (3, "zigzag"), (8, "zigzag"))
}
for _world, _ring in RINGS.items():
    _problem = Problem(seq=LENGTH * _world, value_dim=40)
    RANKS[_world].add("b45", peak_bytes, _ring.late, _problem, torch.bfloat16)


def test_b45_ring_memory_does_not_grow_with_ranks() -> None:
    """B45: merged as it goes; two exchange buffers from three ranks on, and one on two ranks."""
    peaks = {world: max(RANKS[world].result("b45")) for world in RINGS}
    buffers = 2 * LENGTH * 4 * (24 + 40) * 2  # batch, tokens, K, D and E, bytes: one k and one v
    assert peaks[3] == peaks[8] == peaks[2] + buffers, peaks


def test_b44_memory_held_is_local_and_two_buffers() -> None:
    """B44: in the plan of a ring of eight, k and v are ours and two of each that arrive."""
    played = trace(RINGS[8].plan, 3)
    kv = [b.label for b in played.buffers if b.label.split()[0] in ("k", "v")]
    assert sorted(kv) == sorted(["k", "v", *["k arriving along gpu", "v arriving along gpu"] * 2])
