"""The plan interpreter against the operator on one device, and against emitted modules on gloo."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from numeric_cases import Problem as Case
from numeric_cases import own_inputs, setup
from ranks import Ranks
from reference import tokens_of
from torch import Tensor

from mercurygen.check.interpret import run_plan, run_traces
from mercurygen.check.report import ProofError
from mercurygen.designs import patterns
from mercurygen.dsl.interpret import interpret
from mercurygen.emit.module import emit, refuse
from mercurygen.errors import InternalError, Refusal
from mercurygen.ir.mesh import Link
from mercurygen.ir.problem import Problem
from mercurygen.lower.events import Batch, Kernel, Trace, Wait
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.schedule.apply import apply
from mercurygen.schedule.directives import Directive
from mercurygen.schedule.schedule import Schedule, Target
from mercurygen.schedule.text import parse
from mercurygen.search.space import Point, points, settle

ATTENTION = load("attention")
TINY = Problem(2, 32, 8, 4, 6, 5, "float64", "causal")  # grouped heads, D_v is not D
SEED = 11
GROUPS = ((1, 4), (2, 2), (2, 4), (2, 2, 2), (1, 6), (1, 1))

Legal = tuple[Point, tuple[Directive, ...], Plan]


def links(group: tuple[int, ...]) -> tuple[Link, ...]:
    return tuple(Link(f"level{i}", size, "wire", 1e9) for i, size in enumerate(group))


def problem_of(group: tuple[int, ...], **changes: object) -> Problem:
    seq = 24 if prod(group) == 6 else TINY.seq
    heads = {"heads": 12, "kv_heads": 6} if prod(group) == 6 else {}
    return replace(TINY, seq=seq, **heads, **changes)


@cache
def space(group: tuple[int, ...], problem: Problem, design: str | None) -> tuple[Point, ...]:
    """All points of a design, or of the whole space."""
    return tuple(points(ATTENTION, problem, links(group), design=design, order="any"))


def realized(each: Iterable[Point]) -> Iterator[Legal]:
    """Those that have a plan."""
    for point in each:
        settled = settle(point)
        if not isinstance(settled, Refusal):
            plan = lower(settled[0])
            if isinstance(plan, Plan):
                yield point, settled[1], plan


@cache
def legal(group: tuple[int, ...], problem: Problem, design: str) -> tuple[Legal, ...]:
    """Every schedule of a design with a plan."""
    return tuple(realized(space(group, problem, design)))


def shuffled(
    rng: random.Random, group: tuple[int, ...], problem: Problem, design: str | None = None
) -> Iterator[Legal]:
    """The same of a design or the whole space, at random: only those that are taken are lowered."""
    found = space(group, problem, design)
    return realized(rng.sample(found, len(found)))


def inputs_of(
    plan: Plan, seed: int = SEED, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    program = plan.program
    return {
        t.name: torch.randn(
            [prod(map(program.extent, dim)) for dim in t.dims],
            generator=generator,
            dtype=torch.float64,
        ).to(dtype)
        for t in program.inputs
    }


def local(plan: Plan, whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's rows of whole outputs, by the independent token order; the sequence is pinned."""
    program = plan.program
    seq = program.extent(program.mask_axes[0])
    own = tokens_of(program.order.kind, rank, program.mesh.size, seq)
    return {name: x.index_select(1 if name == "out" else 2, own) for name, x in whole.items()}


def check(plan: Plan, tolerance: float = 1e-12, **options: float) -> None:
    """The plan's results on every rank are those of the operator on one device."""
    inputs = inputs_of(plan)
    whole = interpret(ATTENTION, inputs, options, mask=plan.program.mask)
    results = run_plan(plan, inputs, **options)
    assert len(results) == plan.program.mesh.size
    for rank, result in enumerate(results):
        want = local(plan, whole, rank)
        assert set(result) == set(want)
        for name, x in result.items():
            torch.testing.assert_close(x, want[name], rtol=0, atol=tolerance)


# --- as on one device -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name", patterns.names())
def test_designs(name: str, mask: str) -> None:
    count = 0
    for group in ((1, 4), (2, 2), (2, 4), (2, 2, 2)):
        problem = problem_of(group, mask=mask)
        if name == "ulysses-chunked":  # several heads on a rank
            problem = replace(problem, heads=32, kv_heads=16)
        for _, _, plan in legal(group, problem, name):
            check(plan)
            count += 1
    assert count >= 4


def samples() -> Iterator[Plan]:
    rng = random.Random(SEED)
    for _ in range(40):
        group = rng.choice(GROUPS)
        heads = rng.choice([{}, {"heads": 4, "kv_heads": 4}, {"heads": 16, "kv_heads": 8}])
        mask = rng.choice(["causal", "full"])
        problem = problem_of(group, mask=mask)
        if prod(group) != 6:
            problem = replace(problem, **heads)
        yield next(shuffled(rng, group, problem))[2]


def test_random_schedules() -> None:
    print("seed", SEED)
    plans = list(samples())
    for plan in plans:
        check(plan)
    assert len({p.program.mesh for p in plans}) > 8
    assert {p.nest.begin for p in plans} == {"only", "first", "empty"}


def test_scale_and_dtypes() -> None:
    _, _, plan = legal((2, 4), problem_of((2, 4)), "unified")[0]
    check(plan, scale=0.25)
    _, _, low = legal((2, 4), problem_of((2, 4), dtype="bfloat16"), "double-ring")[0]
    inputs = inputs_of(low, dtype=torch.bfloat16)
    whole = interpret(ATTENTION, {name: x.double() for name, x in inputs.items()})
    for rank, result in enumerate(run_plan(low, inputs)):
        assert result["out"].dtype == torch.bfloat16 and result["lse"].dtype == torch.float32
        want = local(low, whole, rank)
        torch.testing.assert_close(result["out"].double(), want["out"], rtol=0, atol=0.05)
        torch.testing.assert_close(result["lse"].double(), want["lse"], rtol=0, atol=1e-4)


def test_other_shapes_are_refused() -> None:
    _, _, plan = legal((1, 4), problem_of((1, 4)), "ring")[0]
    inputs = inputs_of(plan)
    with pytest.raises(InternalError, match="k is"):
        run_plan(plan, inputs | {"k": inputs["k"][:, :-1]})


HEADER = """operator attention
problem batch=1 seq=32 heads=8 kv_heads=4 head_dim=6 float64 causal
topology t sha256:0123456789abcdef node=2 wire 1GB/s gpu=2 wire 1GB/s
group node=2 gpu=2
tp 1
mesh node=2 gpu=2
"""


def by_hand(body: str) -> Plan:
    plan = lower(apply(ATTENTION, parse(HEADER + body).schedule))
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("story", ["shift k, v: S_kv along node", "shard k, v: S_kv over node"])
def test_replicated(story: str) -> None:
    """k and v are given whole along one dimension."""
    pins = "pin q, out, lse: S over node, gpu\npin k, v: S over node\nreplicate k, v over gpu\n"
    for order in ("zigzag", "contiguous"):
        head = f"order S: {order} over node, gpu\nparallelize S_q over node, gpu\n"
        check(by_hand(head + pins + story))


def test_heads_pinned_by_the_caller() -> None:
    """No border: the caller holds heads split over one dimension, tokens over the other."""
    pins = "".join(f"pin q, k, v, out, lse: {x}\n" for x in ("S over node", "H over gpu"))
    split = "parallelize S_q over node\nparallelize H over gpu\nshift k, v: S_kv along node\n"
    plan = by_hand("order S: zigzag over node\n" + pins + split)
    inputs = inputs_of(plan)
    whole = interpret(ATTENTION, inputs)
    for rank, result in enumerate(run_plan(plan, inputs)):
        own = tokens_of("zigzag", rank // 2, 2, 32)
        heads = slice(rank % 2 * 4, rank % 2 * 4 + 4)
        torch.testing.assert_close(result["out"], whole["out"][:, own, heads], rtol=0, atol=1e-12)
        want = whole["lse"][:, heads].index_select(2, own)
        torch.testing.assert_close(result["lse"], want, rtol=0, atol=1e-12)


# --- what goes wrong shows ------------------------------------------------------------------


def ring() -> tuple[Plan, tuple[Trace, ...]]:
    _, _, plan = legal((1, 4), problem_of((1, 4), mask="full"), "ring")[0]
    return plan, tuple(trace(plan, rank, with_lse=True) for rank in range(4))


def test_read_before_the_wait_is_nan() -> None:
    """The wait comes after the kernel that needs it; with the proof left out, the result is NaN."""
    plan, traces = ring()
    late = []
    for each in traces:
        events = list(each.events)
        kernels = [i for i, event in enumerate(events) if isinstance(event, Kernel)]
        waits = [i for i, event in enumerate(events) if isinstance(event, Wait)]
        last = events.pop(waits[-1])
        events.insert(kernels[-1], last)  # after the last kernel: one place earlier now
        late.append(replace(each, events=tuple(events)))
    results = run_traces(plan, tuple(late), inputs_of(plan))
    assert all(result["out"].isnan().any() for result in results)


def test_wrong_tile_is_seen() -> None:
    """A rank that passes on its own tile twice."""
    plan, traces = ring()
    changed = []
    for each in traces:
        first = next(event for event in each.events if isinstance(event, Batch))
        events = tuple(
            replace(event, sends=first.sends) if isinstance(event, Batch) else event
            for event in each.events
        )
        changed.append(replace(each, events=events))
    inputs = inputs_of(plan)
    whole = interpret(ATTENTION, inputs, mask="full")
    for rank, result in enumerate(run_traces(plan, tuple(changed), inputs)):
        assert (result["out"] - local(plan, whole, rank)["out"]).abs().max() > 1e-3


def test_missing_wait_is_refused() -> None:
    plan, traces = ring()
    waits = [event for event in traces[1].events if isinstance(event, Wait)]
    events = tuple(event for event in traces[1].events if event != waits[-1])
    with pytest.raises(ProofError, match="nobody waits"):
        run_traces(
            plan, (traces[0], replace(traces[1], events=events), *traces[2:]), inputs_of(plan)
        )


# --- as the emitted module on real ranks ----------------------------------------------------

REAL = Ranks(4)
CASES: dict[str, tuple[Plan, Case]] = {}


def _real() -> None:
    rng = random.Random(SEED)
    names = ("ring", "allgather-kv", "ulysses", "unified", "double-ring", None)
    for number, name in enumerate(names):
        group = (1, 4) if name in ("ring", "ulysses") else (2, 2)
        mask = "full" if number % 3 == 2 else "causal"
        problem = problem_of(group, mask=mask)
        found = shuffled(rng, group, problem, name)
        point, directives, plan = next(each for each in found if refuse(each[2]) is None)
        spans = links(group)
        target = Target("t", "sha256:0123456789abcdef", spans)
        schedule = Schedule("attention", problem, target, group, 1, point.mesh, directives)
        case = Case(
            seq=problem.seq,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            value_dim=problem.v_head_dim,
            batch=problem.batch,
            causal=mask == "causal",
            order=plan.program.order.kind,
        )
        key = f"{number}-{name or 'random'}"
        CASES[key] = plan, case
        REAL.add(key, emitted, emit(schedule, plan, "interpreted"), case)


def emitted(rank: int, world: int, text: str, case: Case) -> tuple[Tensor, Tensor]:
    """What the emitted module gives on this rank."""
    module, mesh = setup(text)
    return module.attention(*own_inputs(module, mesh, case, torch.float64), mesh, return_lse=True)


_real()


@pytest.mark.parametrize("key", REAL.ids)
def test_as_emitted(key: str) -> None:
    plan, case = CASES[key]
    inputs = dict(zip("qkv", case.inputs(torch.float64), strict=True))
    found = REAL.result(key)
    for result, (out, lse) in zip(run_plan(plan, inputs), found, strict=True):
        torch.testing.assert_close(result["out"], out, rtol=0, atol=1e-12)
        torch.testing.assert_close(result["lse"], lse, rtol=0, atol=1e-12)
