"""Emitted gradients: on real gloo ranks against float64, and calls and bytes against the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from differentiable import (
    SAVE,
    Trained,
    Used,
    check_flat,
    check_gradients,
    check_slopes,
    check_two_modules,
    check_used,
    check_uses,
)
from emitted import expected
from numeric_cases import Problem
from ranks import Ranks

from mercurygen.emit import kept
from mercurygen.emit.callsites import check_text
from mercurygen.errors import UserError
from mercurygen.lower.events import Event, Kernel, Trace
from mercurygen.lower.plan import Plan
from mercurygen.lower.sizes import padded_width
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.virtual.run import play

RING, RINGS = "shift k, v: S_kv along", "shift k, v, dk, dv: S_kv along"
GATHER, GATHERS = "shard k, v: S_kv over", "shard k, v, dk, dv: S_kv over"
ROWS = "parallelize S_q over"
HEADS = "parallelize H over"
SMALL = Problem(seq=48, heads=12, kv_heads=4, head_dim=10, value_dim=6)
FULL = replace(SMALL, causal=False, order="contiguous", head_dim=6, value_dim=10)
RUNS = replace(SMALL, order="contiguous")
STRIPES = replace(SMALL, order="striped")
FLOATS = (torch.float64, torch.float32, torch.bfloat16)
UNIFIED = f"{ROWS} n;{HEADS} m;{RING} n"
KEYS = "parallelize S_kv over m"
TOKENRING = f"{KEYS};shift q: S_q along m;shift out, lse: S_q along m direct"
SPLIT = f"{KEYS};shard q: S_q over m;shard out, lse: S_q over m"

CASES = {
    "ring": Trained("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", SMALL),
    "ring, full": Trained("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", FULL),
    "ring, contiguous": Trained("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", RUNS),
    "ring, stripes": Trained("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", STRIPES),
    "ring of 2": Trained(
        "m=2",
        f"{ROWS} m;{RING} m",
        f"{RINGS} m",
        Problem(seq=20, heads=3, kv_heads=3, head_dim=8, batch=2),
    ),
    "reverse ring": Trained("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m reverse", SMALL),
    "two ahead": Trained("m=4", f"{ROWS} m;{RING} m prefetch 2", f"{RINGS} m prefetch 2", RUNS),
    "one key head": Trained(
        "m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", replace(SMALL, heads=5, kv_heads=1, scale=0.3)
    ),
    "ulysses": Trained("m=4", f"{HEADS} m", f"{SAVE} inner", SMALL),
    "ulysses, outer": Trained("m=4", f"{HEADS} m", f"{SAVE} outer", SMALL),
    "ulysses, stripes": Trained("m=4", f"{HEADS} m", f"{SAVE} outer", STRIPES),
    "unified": Trained("n=2 m=2", UNIFIED, f"{RINGS} n", SMALL),
    "unified, outer": Trained("n=2 m=2", UNIFIED, f"{RINGS} n;{SAVE} outer", SMALL),
    "double ring": Trained("n=2 m=2", f"{ROWS} n, m;{RING} n, m", f"{RINGS} n, m", SMALL),
    "double ring, full": Trained("n=2 m=2", f"{ROWS} n, m;{RING} n, m", f"{RINGS} n, m", FULL),
    "double ring, inside out": Trained(
        "n=2 m=2", f"{ROWS} n, m;{RING} m, n", f"{RINGS} m, n", SMALL
    ),
    "unified double ring": Trained(
        "a=2 b=2 c=2",
        f"{ROWS} a, b;{HEADS} c;{RING} a, b",
        f"{RINGS} a, b",
        replace(SMALL, heads=6, kv_heads=2),
    ),
    "allgather": Trained("m=4", f"{ROWS} m;{GATHER} m", f"{GATHERS} m", SMALL),
    "allgather, full": Trained("m=4", f"{ROWS} m;{GATHER} m", f"{GATHERS} m", FULL),
    "allgather, dealt": Trained(
        "m=4", f"{ROWS} m;{GATHER} m", f"{GATHERS} m", replace(STRIPES, causal=False)
    ),
    "two gathers": Trained("n=2 m=2", f"{ROWS} n, m;{GATHER} n, m", f"{GATHERS} n, m", SMALL),
    "gather in a ring": Trained(
        "n=2 m=2", f"{ROWS} n, m;{RING} n;{GATHER} m", f"{RINGS} n;{GATHERS} m", SMALL
    ),
    "ring in a gather": Trained(
        "n=2 m=2", f"{ROWS} n, m;{GATHER} n;{RING} m", f"{GATHERS} n;{RINGS} m", RUNS
    ),
    "query heads": Trained(
        "n=2 m=2",
        f"{HEADS} n;parallelize G over m;{GATHER} m",
        f"{GATHERS} m",
        replace(SMALL, heads=8, kv_heads=2),
    ),
    "query heads first": Trained(
        "n=2 m=2",
        f"parallelize G over n;{HEADS} m;{GATHER} n",
        f"{GATHERS} n",
        replace(SMALL, heads=8, kv_heads=2),
    ),
    "query heads, outer": Trained(
        "n=2 m=2",
        f"{HEADS} n;parallelize G over m;{GATHER} m",
        f"{GATHERS} m;{SAVE} outer",
        replace(SMALL, heads=8, kv_heads=2),
    ),
    "batch": Trained("m=2", "parallelize B over m", f"{SAVE} inner", SMALL),
    "tokenring, ring": Trained("m=4", TOKENRING, f"{ROWS} m;{RINGS} m", SMALL),
    "direct ring, ring": Trained("m=4", f"{ROWS} m;{RING} m direct", f"{RINGS} m", SMALL),
    "split-kv, ring": Trained("m=4", SPLIT, f"{ROWS} m;{RINGS} m", RUNS),
    "chunked ulysses, ulysses": Trained(
        "m=4", f"{HEADS} m;tile H by 2", f"{SAVE} outer", replace(SMALL, heads=16, kv_heads=8)
    ),
    "chunked ulysses, ring": Trained(
        "m=4",
        f"{HEADS} m;tile H by 2",
        f"{ROWS} m;{RINGS} m",
        replace(SMALL, heads=16, kv_heads=8),
    ),
    "ring, burst": Trained(
        "m=4", f"{ROWS} m;{RING} m", f"{KEYS};shift q, do, lse, out, dq: S_q along m", SMALL
    ),
    "ring, ulysses": Trained("m=4", f"{ROWS} m;{RING} m", f"{HEADS} m", SMALL),
}
IN_BFLOAT16 = {"ring", "ulysses", "unified double ring", "allgather", "chunked ulysses, ring"}

RANKS = {world: Ranks(world) for world in (2, 4, 8)}
for _name, _made in CASES.items():
    _dtypes = FLOATS if _name in IN_BFLOAT16 else FLOATS[:2]
    RANKS[_made.world].add(_name, check_gradients, _made.late, _made.problem, *_dtypes)
    RANKS[_made.world].add(
        f"used by {_name}", check_used, _made.late, _made.problem, torch.bfloat16
    )

for _name in ("ring", "ulysses", "allgather", "chunked ulysses, ring", "unified, outer"):
    RANKS[4].add(f"uses of {_name}", check_uses, CASES[_name].late, CASES[_name].problem)
_made, _other = CASES["unified"], CASES["double ring"]
RANKS[4].add("two", check_two_modules, _made.late, _made.problem, _other.late, _other.problem)
RANKS[4].add("flat", check_flat, _made.late, _made.problem)
RANKS[2].add("slopes", check_slopes, CASES["ring of 2"].late, CASES["ring of 2"].problem)


@pytest.mark.parametrize("name", [x for x in RANKS[4].ids if x.startswith("uses of")])
def test_uses(name: str) -> None:
    """As trainers call it."""
    RANKS[4].result(name)


def test_two_modules() -> None:
    """In one process."""
    RANKS[4].result("two")


def test_flat_memory() -> None:
    """Over many steps."""
    RANKS[4].result("flat")


def test_slopes() -> None:
    """B20: gradients are those of the sum of all ranks' results, by differences in float64."""
    RANKS[2].result("slopes")


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    """The text does what both plans say, on every rank."""
    forward, backward = CASES[name].plans
    summary = check_text(CASES[name].plain, forward.plan, backward=backward.plan)
    assert summary.events > 20 * CASES[name].world


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    """On every rank."""
    RANKS[CASES[name].world].result(name)


@pytest.mark.parametrize("name", CASES)
def test_calls_and_bytes(name: str) -> None:
    """What every rank sends, receives and holds, in forward and backward."""
    made = CASES[name]
    forward, backward = (each.plan for each in made.plans)
    found: list[Used] = RANKS[made.world].result(f"used by {name}")
    for rank, used in enumerate(found):
        played, after = trace(forward, rank, with_lse=True), trace(backward, rank)
        assert used.forward == expected(forward, played), f"rank {rank}"
        assert used.backward == expected(backward, after), f"rank {rank}"
        wider = kept.backward_peak_bytes(forward, backward) - peak_of(backward)
        least, most = (wider + seen(backward, after, lse).peak() for lse in (0, 1))
        assert least <= used.most_backward <= most, f"rank {rank}"
    assert max(used.most for used in found) == kept.peak_bytes(forward, backward)


def peak_of(plan: Plan) -> int:
    """Most bytes alive on any rank."""
    return max(trace(plan, rank).peak() for rank in range(plan.program.mesh.size))


def seen(plan: Plan, played: Trace, lse: int) -> Trace:
    """A backward's trace without what its kernel allocates inside, with or without a dense lse."""
    width, wide = padded_width(plan), plan.itemsize("accumulator")
    names = [axis.name for axis in plan.program.axes]
    events: list[Event] = []
    for event in played.events:
        if isinstance(event, Kernel):
            size = dict(zip(names, event.extents, strict=True))
            keys = size["B"] * size["S_kv"] * size["H"]
            rows = size["B"] * size["S_q"] * size["H"] * size["G"]
            inside = rows * (width + 2 - lse) * wide
            if size["G"] > 1:
                inside += 2 * keys * size["G"] * width * plan.itemsize("inputs")
            event = replace(event, scratch=event.scratch - inside)
        events.append(event)
    return replace(played, events=tuple(events))


REFUSED = {
    "a backward in parts": (f"{HEADS} m", f"{SAVE} outer;tile H by 2"),
    "gradients of theirs do not go on": (
        f"{ROWS} m;{RING} m",
        f"{RING} m;shift dk, dv: S_kv along m direct",
    ),
    "gathers lse": (f"{ROWS} m;{RING} m", f"{KEYS};shard q, do, lse, out, dq: S_q over m"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_not_emitted(words: str) -> None:
    """What has no text yet is refused in words."""
    made = Trained("m=2", *REFUSED[words], replace(RUNS, heads=16, kv_heads=8))
    with pytest.raises(UserError, match=words) as caught:
        _ = made.plain
    assert caught.value.slug == "not-emitted"


def test_kept_in_other_parts() -> None:
    """Heads that the forward split over m are not those that n and m split."""
    problem = replace(SMALL, heads=8, kv_heads=8)
    made = Trained("n=2 m=2", UNIFIED, f"{HEADS} n, m;{SAVE} inner", problem)
    with pytest.raises(UserError, match="splits H over dimensions outside"):
        _ = made.plain
    outer = Trained("n=2 m=2", UNIFIED, f"{HEADS} n, m;{SAVE} outer", problem)
    forward, backward = outer.plans
    assert check_text(outer.plain, forward.plan, backward=backward.plan).events


def test_of_one_rank() -> None:
    """No mesh, no groups: the kernel's gradients, as autograd wants them."""
    problem = Problem(seq=24, heads=6, kv_heads=3, head_dim=10, value_dim=6)
    made = Trained("", "", "", problem)
    forward, backward = made.plans
    assert check_text(made.text, forward.plan, backward=backward.plan).ranks == (0,)
    check_gradients(0, 1, made.text, problem, *FLOATS)


def test_heads_of_both() -> None:
    """Heads that only the backward splits: in the docstring, in `_check`, on virtual ranks."""
    made = CASES["ring, ulysses"]
    assert "K of 4" in made.plain and "K must be a multiple of 4" in made.plain
    schedule = made.plans[0].schedule
    assert play(made.plain, schedule, load("attention"), "<both>").calls == 3
