"""Schedules at the edges: odd names, odd pins, one head or one token a rank."""

from __future__ import annotations

import pytest
import torch
from emitted import ATTENTION, Emitted, written
from numeric_cases import Problem, check_forward, peak_bytes
from ranks import Ranks

from mercurygen.emit.callsites import check_text
from mercurygen.emit.module import emit
from mercurygen.errors import UserError
from mercurygen.lower.lower import lower
from mercurygen.lower.trace import trace
from mercurygen.schedule.apply import apply
from mercurygen.schedule.text import parse, show

FOUR, EIGHT = Ranks(4), Ranks(8)

# Names that emitted code uses itself, or that its own names are made from.
NAMES = (
    ("MESH", "q", "P2POp"),
    ("size", "me", "tiles"),
    ("m", "m_group", "m_group_group"),
    ("of_gpu", "gpu", "at_gpu"),
    ("all", "type", "print"),
    ("Shard", "keys", "values"),
    ("g0", "g1", "gpu0"),
    ("self", "slot", "dist"),
)
BODIES = (
    "parallelize S_q over {a}, {b}, {c}\nshift k, v: S_kv along {c}, {a}\n"
    "shard k, v: S_kv over {b}",
    "parallelize S_q over {a}, {b}, {c}\nshift k, v: S_kv along {a}, {b}, {c}",
    "parallelize H over {a}, {c}\nparallelize S_q over {b}\nshard k, v: S_kv over {b}",
)
NAMED = Problem(seq=64, heads=8, kv_heads=8)
for names in NAMES:
    for number, body in enumerate(BODIES):
        a, b, c = names
        found = written(f"{a}=2 {b}=2 {c}=2", body.format(a=a, b=b, c=c), NAMED)
        EIGHT.add(f"{a} {b} {c} {number}", check_forward, found.late, NAMED, torch.float64)


@pytest.mark.parametrize("case", EIGHT.ids)
def test_dimensions_named_as_emitted_code_names_things(case: str) -> None:
    EIGHT.result(case)


SMALL: dict[str, Emitted] = {}
for order in ("zigzag", "contiguous"):
    for batch in (1, 2):
        for seq in (4, 8) if order == "contiguous" else (8,):
            for mesh, body in (
                ("gpu=4", "parallelize H over gpu"),
                ("node=2 gpu=2", "parallelize H over node, gpu"),
            ):
                problem = Problem(seq, 4, 4, value_dim=40, batch=batch, order=order)
                case = f"{mesh} {order} batch {batch} seq {seq}"
                SMALL[case] = written(mesh, body, problem)
                FOUR.add(case, check_forward, SMALL[case].late, problem, torch.float64)
                FOUR.add(f"peak {case}", peak_bytes, SMALL[case].late, problem, torch.bfloat16)


@pytest.mark.parametrize("case", SMALL)
def test_one_head_or_one_token_a_rank(case: str) -> None:
    """Where a copy could be a view it is a copy all the same: plan, text and run agree."""
    FOUR.result(case)
    plan = SMALL[case].plan
    assert FOUR.result(f"peak {case}") == [trace(plan, rank).peak() for rank in range(4)]
    check_text(SMALL[case].emit(), plan)


RING = "parallelize S_q over gpu\nshift {}: S_kv along gpu"


def test_tensors_in_another_order_are_the_same_schedule() -> None:
    problem = Problem(seq=16)
    one, other = (written("gpu=2", RING.format(x), problem) for x in ("k, v", "v, k"))
    assert one.plan == other.plan
    check_text(other.emit(), other.plan)


@pytest.mark.parametrize(
    "pins, body",
    [
        (("q, k, out, lse: S over gpu", "v: H over gpu"), "parallelize H over gpu"),
        (("q, k, v, out: S over gpu", "lse: H over gpu"), "parallelize H over gpu"),
        (("q, k, v, out, lse: H over gpu",), "parallelize H over gpu"),
    ],
)
def test_pins_by_heads_have_a_module(pins: tuple[str, ...], body: str) -> None:
    """Whose transfers are the plan's; `tests/test_emit_pins.py` runs such modules."""
    whole = written("gpu=4", "parallelize H over gpu", Problem(seq=64))
    dropped = ("order", "pin", "parallelize", "reshard")
    lines = [line for line in show(whole.schedule).splitlines() if not line.startswith(dropped)]
    text = "\n".join(lines)
    text += "".join(f"\npin {pin}" for pin in pins) + f"\n{body}\n"
    schedule = parse(text).schedule
    plan = lower(apply(ATTENTION, schedule))
    check_text(emit(schedule, plan, "name"), plan)


@pytest.mark.parametrize(
    "body, slug",
    [
        ("parallelize S_q over gpu\nshift k, v: S_kv along gpu, gpu", "named-twice"),
        ("pin q: replicated\n" + RING.format("k, v"), "pinned-twice"),
        (RING.format("k, v") + "\npin lse: replicated", "pinned-twice"),
        ("parallelize H over gpu\nreplicate k, v over gpu", "already-local"),
        ("parallelize S_q over gpu\nreplicate k, v over gpu", "replicate-needs-pin"),
    ],
)
def test_refused_in_words(body: str, slug: str) -> None:
    with pytest.raises(UserError) as caught:
        written("gpu=2", body, Problem(seq=16))
    assert caught.value.slug == slug and caught.value.span is not None


def test_pins_and_order_have_defaults() -> None:
    """Without lines of its own a causal schedule has zigzag slices over all dimensions."""
    whole = written("gpu=4", "parallelize H over gpu", Problem(seq=64))
    lines = show(whole.schedule).splitlines()
    bare = "\n".join(line for line in lines if line.split()[0] not in ("pin", "order"))
    program = apply(ATTENTION, parse(bare + "\n").schedule)
    assert program == whole.plan.program and program.order.kind == "zigzag"
