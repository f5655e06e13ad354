"""What a call costs on the host, in calls of Python functions: nothing is planned at run time.

Field reports B60 (planning and launching dominate) and B77 (a drop-in for flash attention's
function). Counts of calls are the same on every machine; times are not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emitted import DESIGNS, Emitted, instances, one
from numeric_cases import Problem, load_module, own_inputs, setup
from ranks import Ranks
from torch import Tensor

FULL = Problem(seq=64, heads=4, kv_heads=2, head_dim=16, value_dim=16, batch=1, causal=False)
WORLDS = (2, 4, 8)
RANKS = {world: Ranks(world) for world in WORLDS}


def hand_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The ring that one would write: no checks, nothing but transfers, blocks and merges."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = lse = None
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for step in range(world):
        works = []
        if step + 1 < world:
            news = [torch.empty_like(x) for x in (k, v)]
            ops = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in (k, v)]
            ops += [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in news]
            works = dist.batch_isend_irecv(ops)
        share, its = flash(*(x.transpose(1, 2) for x in (q, k, v)))
        share, its = share.transpose(1, 2).float(), its.transpose(1, 2).unsqueeze(3)
        if out is None:
            out, lse = share, its
        else:
            out = out - torch.sigmoid(its - lse) * (out - share)
            lse = torch.logaddexp(lse, its)
        for work in works:
            work.wait()
        if works:
            k, v = news
    return out.to(q.dtype)


def calls_of(function: Callable[..., Any], *args: Any) -> int:
    """Calls of Python functions, of all libraries, while it runs."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def count(rank: int, world: int, text: str) -> tuple[list[int], int]:
    """Of three calls of the module each, and of the ring by hand."""
    module, mesh = setup(text)
    q, k, v = own_inputs(module, mesh, FULL, torch.float32)
    hand_ring(q, k, v)
    own = [calls_of(module.attention, q, k, v, mesh) for _ in range(3)]
    return own, calls_of(hand_ring, q, k, v)


for _world in WORLDS:
    RANKS[_world].add("ring", count, one("ring", (_world,), FULL).late)


@pytest.mark.parametrize("world", WORLDS)
def test_b60_no_more_calls_than_by_hand(world: int) -> None:
    """B60: at most 200 more in all: arguments and mesh are checked, and groups looked up, once.

    Every call after the first costs the same: nothing is looked up, planned or kept.
    """
    for own, by_hand in RANKS[world].result("ring"):
        print(f"{world} ranks: {own} calls, by hand {by_hand}")
        assert own[1] == own[2] <= own[0]
        assert own[1] <= by_hand + 200


def test_b60_each_step_adds_the_same() -> None:
    """B60: a step costs the same however many ranks there are, and no more than by hand."""
    steps = {world: RANKS[world].result("ring")[0] for world in WORLDS}
    own = {world: counts[0][1] for world, counts in steps.items()}
    by_hand = {world: counts[1] for world, counts in steps.items()}
    assert own[8] - own[4] == 2 * (own[4] - own[2])
    assert own[8] - own[4] <= by_hand[8] - by_hand[4]


@pytest.mark.parametrize("name", DESIGNS)
def test_b77_signature_of_a_drop_in(name: str) -> None:
    """B77: q, k, v in flash attention's order and layout; then the mesh; the rest by name."""
    problem = replace(FULL, seq=160, heads=16, kv_heads=8)
    every = (x for sizes in ((8,), (2, 4), (2, 2, 2)) for x in instances(name, sizes, problem))
    found = next(x for x in every if isinstance(x, Emitted))
    attention = load_module(found.text).attention
    parameters = inspect.signature(attention).parameters
    assert list(parameters) == ["q", "k", "v", "mesh", "scale", "seq", "return_lse"]
    by_name = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert by_name == {"scale": None, "seq": None, "return_lse": False}
    text = " ".join(attention.__doc__.split())
    assert "q: [B, S, H, D]" in text and "this rank's slice" in text
