"""Modules whose callers hold tensors otherwise than in slices of the sequence over all ranks.

By heads, by batch, by the sequence over a part of the mesh, or whole: reshards of any two axes,
cuts, and gathers; numbers, layout helpers, calls and live bytes on every virtual rank.
"""

from __future__ import annotations

import numeric_cases
import pytest
import torch
from emitted import ATTENTION, Emitted, of_lines, problem_of, written
from ranks import Ranks

from mercurygen.cli.build import build
from mercurygen.emit.module import refuse
from mercurygen.virtual.run import play

ULYSSES = "parallelize H over gpu\nparallelize S_q over node\nshift k, v: S_kv along node"
CASES = {  # mesh, over what of it the sequence is ordered, pins, directives, order, causal
    "heads in, sequence out": (
        *("node=2 gpu=2", "node, gpu"),
        "pin q, k, v: S over node\npin q, k, v: H over gpu\npin out, lse: S over node, gpu",
        "parallelize H over gpu\nparallelize S_q over node\nshift k, v: S_kv along node",
        *("zigzag", True),
    ),
    "heads to batch, in runs": (  # joined outermost first
        *("node=2 gpu=2", "node, gpu"),
        "pin q, k, v: H over node, gpu\npin out, lse: S over node, gpu",
        *("parallelize B over node, gpu", "striped", False),
    ),
    "batch to heads, in runs": (
        *("node=2 gpu=2", "node, gpu"),
        "pin q, k: B over node, gpu\npin v: S over node, gpu\npin out, lse: B over node, gpu",
        *("parallelize H over node, gpu", "zigzag", True),
    ),
    "batch to query heads": (
        *("node=2 gpu=2", "node"),
        "pin q: S over node\npin q, out, lse: B over gpu\npin k, v, out, lse: S over node",
        "parallelize G over gpu\nparallelize S_q over node\nshift k, v: S_kv along node\n"
        "replicate k, v over gpu",
        *("contiguous", False),
    ),
    "cut and gathered": (
        *("node=2 gpu=2", "node"),
        "pin q: S over node\npin k, v: H over gpu\npin out, lse: B over node",
        "parallelize S_q over node\nparallelize H over gpu\nreplicate k, v over node",
        *("contiguous", True),
    ),
    "query heads cut, tokens gathered": (
        *("node=2 gpu=2", "node"),
        "pin k, v: S over node",
        "parallelize G over gpu\nparallelize S_q over node\nshard k, v: S_kv over node\n"
        "replicate k, v over gpu",
        *("contiguous", False),
    ),
}


def case(name: str) -> tuple[Emitted, numeric_cases.Problem]:
    """A schedule, and the problem that it is for."""
    mesh, ranked, pins, body, order, causal = CASES[name]
    problem = numeric_cases.Problem(
        batch=4, seq=48, heads=8, kv_heads=4, value_dim=24, causal=causal, order=order
    )
    lines = f"order S: {order} over {ranked}\n{pins}\n{body}"
    return of_lines(mesh, lines, problem_of(problem)), problem


@pytest.mark.parametrize("name", CASES)
def test_modules_of_other_pins(name: str) -> None:
    """The text event by event; numbers, helpers, calls and live bytes on every virtual rank."""
    made, _ = case(name)
    built = build(made.schedule, "pinned")
    assert play(built.module_text, made.schedule, ATTENTION, "pinned.py").error <= 1e-12


def test_numbers_on_gloo() -> None:
    """Each rank is given its part, cut by the placements, and gets back its part."""
    made, problem = case("heads in, sequence out")
    ranks = Ranks(made.world)
    ranks.add("", numeric_cases.check_forward, made.late, problem, torch.float64)
    assert max(max(errors) for errors in ranks.result("")) <= 1e-12


def test_pins_without_a_placement() -> None:
    """What DTensor has no word for is refused, with what is possible."""
    pins = "pin q: H over gpu\npin k, v, out, lse: S over node, gpu"
    body = "parallelize H over node, gpu"
    problem = numeric_cases.Problem(seq=48, heads=8, kv_heads=4, causal=False, order="contiguous")
    refusal = refuse(written("node=2 gpu=2", body, problem, pins=pins).plan)
    assert refusal is not None and refusal.slug == "pin-not-supported"
    assert refusal.explain()[1] == "pin q by H over node, gpu, or by S over gpu"
