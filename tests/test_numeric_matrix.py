"""Every design and drawn schedules, as emitted, on real gloo processes, against float64."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from emitted import DESIGNS, Emitted, drawn, instances, links
from numeric_cases import Problem, assert_refused, check_forward, own_inputs, recorded, setup
from ranks import Ranks

from mercurygen.cost.topology import load
from mercurygen.designs import patterns
from mercurygen.errors import Refusal, UserError
from mercurygen.ir import problem as ir
from mercurygen.search.search import search

SEED = int(os.environ.get("MERCURYGEN_SEED", "20260731"))
LOCAL_SEQ = 20
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}
MESHES = ((2,), (3,), (4,), (8,), (2, 2), (2, 4), (2, 2, 2))
# of 8 ranks; all heads on fewer
HEADS_OF_EIGHT = {(8,): ("mha",), (2, 4): ("mha", "mqa"), (2, 2, 2): ("gqa",)}
MASKS = {"causal": (True, "zigzag"), "full": (False, "contiguous")}
PLAIN_CAUSAL = ((3,), (2, 2), (2, 4))  # where causal is tried in contiguous order too
SHAPES = ((2, 2, 2),) * 4 + ((2, 4),) * 4 + ((8,),) * 2 + ((2, 2), (4,), (2, 3), (3,), (2,))

RANKS = {world: Ranks(world) for world in (2, 3, 4, 6, 8, 16)}
CASES: dict[str, tuple[Emitted, int]] = {}  # of the matrix: the schedule, and its ranks
REFUSED: dict[str, tuple[str, tuple[int, ...], int, Refusal]] = {}


def check_dtypes(rank: int, world: int, text: str, problem: Problem) -> dict[str, Any]:
    """Largest errors of out and lse in both precisions."""
    return {str(x): check_forward(rank, world, text, problem, x) for x in DTYPES}


DTYPES = (torch.float32, torch.float64)


def check_heads_refused(rank: int, world: int, text: str, problem: Problem) -> None:
    """The module of more heads refuses what its schedule would have been refused for."""
    module, mesh = setup(text)
    inputs = own_inputs(module, mesh, problem, torch.float32)
    with recorded(module) as calls:
        assert_refused(lambda: module.attention(*inputs, mesh), "K must be a multiple of")
    assert not calls


def problem_for(sizes: tuple[int, ...], heads: str, causal: bool, order: str) -> Problem:
    """No two sizes alike; D_v is D in a part of them."""
    world = prod(sizes)
    return Problem(
        seq=LOCAL_SEQ * world,
        heads=HEADS[heads][0],
        kv_heads=HEADS[heads][1],
        value_dim=36 if heads != "mha" else None,
        batch=2 if world == 3 else 3,
        causal=causal,
        order=order,
        scale=0.3 if heads == "mqa" else None,
    )


def add(name: str, emitted: Emitted, heads: str, sizes: tuple[int, ...], *mask: Any) -> None:
    """All heads on the module that was emitted for eight: heads are no part of its code."""
    problem = problem_for(sizes, heads, *mask)
    CASES[name] = emitted, emitted.world
    RANKS[emitted.world].add(name, check_dtypes, emitted.late, problem)


def build() -> None:
    """Fill CASES and REFUSED, and the ranks."""
    masks = [(name, *mask, MESHES) for name, mask in MASKS.items()]
    masks.append(("plain-causal", True, "contiguous", PLAIN_CAUSAL))
    for design in DESIGNS:
        for mask, causal, order, meshes in masks:
            for sizes in meshes:
                text: dict[int, Emitted] = {}
                for heads in HEADS_OF_EIGHT.get(sizes, HEADS):
                    problem = problem_for(sizes, heads, causal, order)
                    for number, found in enumerate(instances(design, sizes, problem)):
                        shape = "x".join(map(str, sizes))
                        name = f"{design}-{mask}-{shape}-{number}-{heads}"
                        if isinstance(found, Emitted):
                            emitted = text.setdefault(number, found)
                            add(name, emitted, heads, sizes, causal, order)
                            continue
                        REFUSED[name] = design, sizes, number, found
                        if number in text:
                            world, refused = prod(sizes), f"{name}-at-run-time"
                            CASES[refused] = text[number], world
                            RANKS[world].add(
                                refused, check_heads_refused, text[number].late, problem
                            )


build()
DRAWN = {
    f"drawn-{number}-{emitted.mesh}": (emitted, problem)
    for number, (emitted, problem) in enumerate(drawn(SEED, 40, SHAPES, LOCAL_SEQ))
}
for _name, (_emitted, _problem) in DRAWN.items():
    RANKS[_emitted.world].add(_name, check_dtypes, _emitted.late, _problem)
BEST = search("attention", ir.Problem(), load("a100x16")).best
A100 = Emitted(BEST.schedule, BEST.plan)
RANKS[16].add("a100x16", check_dtypes, A100.late, Problem(seq=16 * LOCAL_SEQ, heads=16, kv_heads=8))


def passed(name: str, emitted: Emitted, seed: str = "") -> None:
    """The result of a case; a failure shows the schedule, ready to paste."""
    try:
        RANKS[emitted.world].result(name)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{seed}\n{emitted.shown}") from None


@pytest.mark.parametrize("name", CASES)
def test_design(name: str) -> None:
    """Every rank's out and lse."""
    passed(name, CASES[name][0])


@pytest.mark.parametrize("name", DRAWN)
def test_drawn(name: str) -> None:
    """Schedules nobody has named; another draw with MERCURYGEN_SEED=n."""
    print("seed", SEED)
    passed(name, DRAWN[name][0], f"seed {SEED}, {DRAWN[name][1]}")


def test_a100x16_on_sixteen_ranks() -> None:
    """The main job's module."""
    assert A100.world == 16 and BEST.design == "unified"
    passed("a100x16", A100)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Exactly where the innermost dimension, which splits heads, does not divide them."""
    design, sizes, number, refusal = REFUSED[name]
    error = refusal.error()
    assert error.slug == "heads-not-divisible", error.render()
    assert _heads_over(design, sizes, number)
    assert HEADS[name.rpartition("-")[2]][1] % _heads_over(design, sizes, number)
    assert error.help and "split" in error.message


def _heads_over(design: str, sizes: tuple[int, ...], number: int) -> int:
    """Ranks among which a design splits the heads; 0 if it does not."""
    if design not in ("ulysses", "unified", "unified-double-ring"):
        return 0
    return patterns.instances(design, links(*sizes))[number][0].dims[-1].size


@pytest.mark.parametrize(
    "design, topology, group",
    [
        ("unified", "a100x8", (2,)),
        ("double-ring", "a100x8", (2,)),
        ("unified-double-ring", "a100x8", (4,)),
        ("unified-double-ring", "a100x16", (2, 2)),
    ],
)
def test_too_few_ranks(design: str, topology: str, group: tuple[int, ...]) -> None:
    """A design with more roles than the group has factors."""
    with pytest.raises(UserError) as caught:
        search("attention", ir.Problem(), load(topology), group=group, design=design)
    assert caught.value.slug == "design-does-not-fit"
    assert "dimensions" in caught.value.message and "ring" in (caught.value.help or "")


def test_nothing_is_missing() -> None:
    """Every design, mask, head count and mesh is a case or refused; on 8 ranks, some heads."""
    for design in DESIGNS:
        roles = len(patterns.get(design).roles)
        for sizes in MESHES:
            fits = roles == 1 or (roles == 2 and prod(sizes) > 3) or prod(sizes) == 8
            for mask in MASKS:
                for heads in HEADS_OF_EIGHT.get(sizes, HEADS):
                    name = f"{design}-{mask}-{'x'.join(map(str, sizes))}-0-{heads}"
                    assert (name in CASES or name in REFUSED) == fits, name
    assert len(CASES) > 170 and len(DRAWN) == 40


@pytest.mark.parametrize("design", DESIGNS)
def test_code_is_that_of_every_problem(design: str) -> None:
    """Sizes stand in the docstring only: so one module serves the tests of all of them."""
    codes = set()
    for changes in ({}, {"heads": 16, "kv_heads": 16, "batch": 1, "value_dim": 40, "seq": 1600}):
        problem = replace(problem_for((2, 2, 2), "mha", *MASKS["causal"]), **changes)
        for dtype in ("bfloat16", "float32"):
            found = next(instances(design, (2, 2, 2), problem, dtype))
            assert isinstance(found, Emitted)
            codes.add(found.emit().split('"""', 2)[2])
    assert len(codes) == 1
