"""One schedule, three ways: the plan interpreted, its module on virtual ranks, and on gloo.

The interpreter is given the module's own kernel and merge, so that all three give the same bits;
but where gloo adds up results, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod

import numeric_cases
import pytest
import torch
from emitted import ATTENTION, Emitted, written
from numeric_cases import load_module, setup
from ranks import Ranks as Gloo
from torch import Tensor

from mercurygen.check.body import Body
from mercurygen.check.interpret import run_plan
from mercurygen.check.tensors import held_by_caller
from mercurygen.virtual.rank import Rank
from mercurygen.virtual.run import Ranks as Virtual
from mercurygen.virtual.run import inputs

torch.set_num_threads(1)

SEED = 31
QUERIES = "parallelize S_q over m\nshift k, v: S_kv along m "
HOME = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m"
DEALT = "parallelize S_kv over m\nshard q: S_q over m\nshard out, lse: S_q over m"
SCHEDULES = {  # mesh, body, order ("full": without a mask), pins
    "ring": ("m=4", QUERIES, "zigzag"),
    "both ways": ("m=3", QUERIES + "both", "full"),
    "direct": ("m=4", QUERIES + "direct", "zigzag"),
    "direct, ahead": ("m=3", QUERIES + "direct prefetch 2", "contiguous"),
    "stripes": ("m=3", QUERIES + "reverse", "striped"),
    "double": ("n=2 m=2", "parallelize S_q over n, m\nshift k, v: S_kv along n, m", "zigzag"),
    "gathered": (
        "n=2 m=2",
        "parallelize S_q over n, m\nshard k, v: S_kv over m\nshift k, v: S_kv along n",
        "zigzag",
    ),
    "heads": ("n=2 m=2", f"parallelize H over n\n{QUERIES}", "zigzag"),
    "home": ("m=4", HOME + " direct", "zigzag"),
    "travel": ("m=3", HOME, "full"),
    "dealt": ("m=4", DEALT, "zigzag"),
    "dealt of a ring": (
        "n=2 m=2",
        f"parallelize S_q over n\nshift k, v: S_kv along n\n{DEALT}",
        "contiguous",
    ),
    "added": (
        "m=4",
        "parallelize S_kv over m\nreplicate q over m\nreplicate out, lse over m",
        "zigzag",
        "pin k, v: S over m\npin q, out, lse: replicated",
    ),
}
ADDED = {"added"}  # gloo adds up in an order of its own
Results = dict[str, Tensor]


@cache
def module(name: str) -> Emitted:
    """A schedule, for sizes that are not alike."""
    mesh, body, order, *pins = SCHEDULES[name]
    causal = order != "full"
    problem = numeric_cases.Problem(
        seq=12 * prod(int(word.partition("=")[2]) for word in mesh.split()),
        heads=12,
        kv_heads=6,
        head_dim=20,
        value_dim=12,
        causal=causal,
        order=order if causal else "contiguous",
    )
    return written(mesh, body, problem, "float64", pins="".join(pins))


def slices(emitted: Emitted, rank: int) -> list[Tensor]:
    """What a rank is given, cut by the pins."""
    plan = emitted.plan
    whole = inputs(plan, SEED, torch.float64)
    return [held_by_caller(plan, t, rank, whole[t.name]) for t in plan.program.inputs]


def interpreted(emitted: Emitted, body: Body | None = None) -> list[Results]:
    """The plan, event by event."""
    whole = inputs(emitted.plan, SEED, torch.float64)
    return run_plan(emitted.plan, whole, operator=ATTENTION, body=body)


def own(emitted: Emitted) -> Body:
    """The module's kernel and merge."""
    space = load_module(emitted.text)

    def block(given: Mapping[str, Tensor], causal: bool) -> Results:
        q, k, v = given.values()
        out, lse = space._block_forward(q, k, v, q.shape[3] ** -0.5, causal)
        return {"out": out, "lse": lse}

    def merge(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        space._merge(*old.values(), *new.values())

    return Body(block, merge)


def on_virtual(emitted: Emitted) -> list[Results]:
    """The module's text, all ranks in this process."""
    ranks = Virtual(emitted.text, ATTENTION, "differential.py", emitted.world)
    ranks.load(emitted.plan)
    found: list[Results] = [{} for _ in range(emitted.world)]

    def act(rank: Rank) -> None:
        with rank.silence():
            given = slices(emitted, rank.number)
        call = ranks.spaces[rank.number]["attention"]
        out, lse = call(*given, ranks.meshes[rank.number], return_lse=True)
        found[rank.number] = {"out": out, "lse": lse}

    ranks.play(act)
    return found


def on_gloo(rank: int, world: int, text: str, given: list[list[Tensor]]) -> Results:
    """The same on a real rank."""
    module, mesh = setup(text)
    with torch.no_grad():
        out, lse = module.attention(*given[rank], mesh, return_lse=True)
    return {"out": out, "lse": lse}


@cache
def gloo() -> dict[int, Gloo]:
    """One fork for each number of ranks."""
    groups: dict[int, Gloo] = {}
    for name in SCHEDULES:
        emitted = module(name)
        group = groups.setdefault(emitted.world, Gloo(emitted.world))
        given = [slices(emitted, rank) for rank in range(emitted.world)]
        group.add(name, on_gloo, emitted.late, given)
    return groups


def difference(first: list[Results], second: list[Results]) -> float:
    """The largest of any element on any rank; NaN and other shapes are infinite."""
    worst = 0.0
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert x.shape == other[name].shape and x.dtype == other[name].dtype, name
            if torch.equal(x, other[name]):
                continue
            error = (x - other[name]).abs().masked_fill(x == other[name], 0)
            worst = max(worst, error.nan_to_num(float("inf")).max().item())
    return worst


@pytest.mark.parametrize("name", SCHEDULES)
def test_three_ways(name: str) -> None:
    """The same bits, by the module's kernel; within 1e-13, by the operator's lines."""
    emitted = module(name)
    print(f"seed {SEED}\n{emitted.shown}")
    virtual, real = on_virtual(emitted), gloo()[emitted.world].result(name)
    plan = interpreted(emitted, own(emitted))
    found = {
        "plan and virtual": difference(plan, virtual),
        "virtual and gloo": difference(virtual, real),
        "operator and virtual": difference(interpreted(emitted), virtual),
    }
    print(found)
    assert found["plan and virtual"] == 0
    assert found["virtual and gloo"] <= (1e-13 if name in ADDED else 0)
    assert found["operator and virtual"] <= 1e-13
