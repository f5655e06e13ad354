"""The proof level by level, beside the proof of all ranks at once, where both can be had."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import lcm, prod

import pytest

from mercurygen.check.levels import elsewhere, prove_by_levels, small_meshes
from mercurygen.check.prove import prove
from mercurygen.check.report import ProofError
from mercurygen.errors import Refusal, UserError
from mercurygen.ir.mesh import Dim, Link, Mesh
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Gather, Plan, Walk
from mercurygen.operators import load
from mercurygen.schedule.apply import Attempts, start
from mercurygen.schedule.directives import Along, Parallelize, Patch, Shard, Shift
from mercurygen.schedule.schedule import Schedule, Target
from mercurygen.search.space import Point, frame, is_variant, points, settle

SEED = 11
BROKEN = 4  # ways, of each schedule
TWO, THREE = (5, 4), (4, 2, 3)
MOST = (8, 4, 4)  # 128 ranks
Change = Callable[[Plan], Plan]


def problem_of(sizes: tuple[int, ...], mask: str) -> Problem:
    """Tokens that all dimensions divide, and heads that any does."""
    heads = lcm(*sizes)
    return Problem(seq=4 * prod(sizes), heads=2 * heads, kv_heads=heads, head_dim=8, mask=mask)


def links_of(sizes: tuple[int, ...]) -> tuple[Link, ...]:
    """A level for each dimension."""
    return tuple(Link(f"d{i}", size, "wire", 1e9) for i, size in enumerate(sizes))


@cache
def drawn(sizes: tuple[int, ...], mask: str, many: int) -> tuple[tuple[Schedule, Plan], ...]:
    """Schedules whose mesh is that of the levels, without tile loops, and their plans."""
    problem, links, operator = problem_of(sizes, mask), links_of(sizes), load("attention")
    whole = [
        point
        for point in points(operator, problem, links)
        if tuple(dim.size for dim in point.mesh.dims) == sizes and not is_variant(point.directives)
    ]
    order, found = random.Random(f"{SEED} {sizes} {mask}").sample(whole, len(whole)), []
    for point in order:
        settled = settle(point)
        if isinstance(settled, Refusal):
            continue
        program, directives = settled
        plan = lower(program)
        if not isinstance(plan, Refusal):
            target = Target("levels", "sha256:0", links)
            head = "attention", problem, target, sizes, 1, point.mesh
            found.append((Schedule(*head, directives), plan))
        if len(found) == many:
            break
    return tuple(found)


def changes(plan: Plan) -> Iterator[tuple[str, Change]]:
    """Ways to break a plan, by number of a part, so that plans of other meshes break alike."""

    def nest(plan: Plan, **values: object) -> Plan:
        return replace(plan, nest=replace(plan.nest, **values))

    def loop(plan: Plan, at: int, **values: object) -> Plan:
        loops = list(plan.nest.loops)
        loops[at] = replace(loops[at], **values)
        return nest(plan, loops=tuple(loops))

    def stage(plan: Plan, at: int, i: int, **values: object) -> Plan:
        stages = list(plan.nest.loops[at].stages)
        stages[i] = replace(stages[i], **values)
        return loop(plan, at, stages=tuple(stages))

    for name in ("before", "after"):
        for i in range(len(getattr(plan, name))):
            yield (
                f"a step {name} is left out",
                lambda p, n=name, i=i: replace(
                    p, **{n: getattr(p, n)[:i] + getattr(p, n)[i + 1 :]}
                ),
            )
    for i in range(len(plan.nest.reduces)):
        yield (
            "a reduction is left out",
            lambda p, i=i: nest(p, reduces=p.nest.reduces[:i] + p.nest.reduces[i + 1 :]),
        )
    for begin in {"only", "first", "empty"} - {plan.nest.begin}:
        yield f"results begin {begin}", lambda p, b=begin: nest(p, begin=b)
    if len(plan.nest.loops) > 1:
        yield "loops in another order", lambda p: nest(p, loops=p.nest.loops[::-1])
    for at, each in enumerate(plan.nest.loops):
        yield (
            "a loop is left out",
            lambda p, at=at: nest(p, loops=p.nest.loops[:at] + p.nest.loops[at + 1 :]),
        )
        if each.outputs:
            yield "results stay", lambda p, at=at: loop(p, at, outputs=(), home=None)
        if len(each.stages) > 1:
            yield (
                "stages in another order",
                lambda p, at=at: loop(p, at, stages=p.nest.loops[at].stages[::-1]),
            )
        for i, one in enumerate(each.stages):
            other = next(d for d in plan.program.mesh.names if d != one.dim)
            yield "along another dimension", lambda p, at=at, i=i, d=other: stage(p, at, i, dim=d)
            yield (
                "a stage is left out",
                lambda p, at=at, i=i: loop(
                    p, at, stages=p.nest.loops[at].stages[:i] + p.nest.loops[at].stages[i + 1 :]
                ),
            )
            if isinstance(one, Walk):
                yield (
                    "the other way around",
                    lambda p, at=at, i=i, r=not one.reverse: stage(p, at, i, reverse=r),
                )
                yield (
                    "the last tile does not come",
                    lambda p, at=at, i=i: stage(
                        p,
                        at,
                        i,
                        steps=tuple(
                            range(1, p.program.mesh.extent(p.nest.loops[at].stages[i].dim) - 1)
                        ),
                    ),
                )
            elif isinstance(one, Gather) and (one.join.outer > 1 or one.join.halves > 1):
                yield (
                    "parts joined as they come",
                    lambda p, at=at, i=i: stage(
                        p,
                        at,
                        i,
                        join=replace(p.nest.loops[at].stages[i].join, outer=1, halves=1),
                    ),
                )


def by_levels(plan: Plan, schedule: Schedule, change: Change) -> None:
    """The proof of a changed plan, whose small ones are changed alike."""
    at = elsewhere(load("attention"), schedule)

    def changed(mesh: Mesh) -> Plan | Refusal:
        found = at(mesh)
        return found if isinstance(found, Refusal) else change(found)

    prove_by_levels(change(plan), schedule.links, changed)


def stands(proof: Callable[[], object]) -> bool:
    """Whether a proof is given. What cannot even be played is not proved."""
    try:
        proof()
    except (ProofError, UserError):
        return False
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False  # of a plan that no lowering makes
    except Exception as error:
        if type(error).__name__ in ("NotARun", "NotCuttable", "InternalError"):
            return False
        raise
    return True


@pytest.mark.parametrize(
    ("sizes", "mask"), [(TWO, "causal"), (TWO, "full"), (THREE, "causal")], ids=str
)
def test_both_proofs_say_the_same(sizes: tuple[int, ...], mask: str) -> None:
    """Of schedules drawn from the space and of each broken in some ways: proved by both or none."""
    counts: Counter[bool] = Counter()
    draw = random.Random(f"{SEED} {sizes} {mask}")
    for schedule, plan in drawn(sizes, mask, 2):
        full = prove(plan, schedule.links)
        short = prove_by_levels(plan, schedule.links, elsewhere(load("attention"), schedule))
        for one, other in ((full, short), (full.with_lse, short.with_lse)):
            assert (one.messages, one.collectives) == (other.messages, other.collectives)
            assert (one.peak, one.traffic) == (other.peak, other.traffic)
        ways = list(changes(plan))
        for words, change in draw.sample(ways, min(BROKEN, len(ways))):
            whole = stands(lambda p=plan, c=change, s=schedule: prove(c(p), s.links))
            parts = stands(lambda p=plan, c=change, s=schedule: by_levels(p, s, c))
            assert whole == parts, f"seed {SEED}: {words}:\n{schedule}"
            counts[whole] += 1
    print(f"{sizes}, {mask}: {counts[False]} broken plans refused by both, {counts[True]} by none")
    assert counts[False] >= 4


def test_128_ranks() -> None:
    """The largest mesh on which both are compared: a ring, tiles gathered inside it, all-to-all."""
    links, operator = links_of(MOST), load("attention")
    mesh = Mesh(tuple(Dim(link.level, link.size) for link in links))
    begin = start(operator, problem_of(MOST, "causal"), mesh)
    lines = (
        *(Parallelize("S_q", ("d0", "d1")), Parallelize("H", ("d2",))),
        *(Shift(("k", "v"), "S_kv", (Along("d0"),)), Shard(("k", "v"), "S_kv", ("d1",))),
        Patch("body", "aten"),
    )
    program, directives = settle(Point(Attempts(begin), (*frame(begin, "zigzag"), *lines), None))
    plan, target = lower(program), Target("levels", "sha256:0", links)
    head = "attention", problem_of(MOST, "causal"), target, MOST, 1, mesh
    full = prove(plan, links)
    short = prove_by_levels(plan, links, elsewhere(operator, Schedule(*head, directives)))
    assert (full.peak, full.traffic) == (short.peak, short.traffic)
    assert [part.sizes for part in short.parts] == [(8, 3, 3), (3, 4, 3), (3, 3, 4)]


def test_a_plan_that_differs_only_on_the_large_mesh() -> None:
    """What the small meshes do not show is seen by comparing the plans."""
    count = 0
    for schedule, plan in drawn(TWO, "causal", 2):
        at = elsewhere(load("attention"), schedule)
        for words, change in changes(plan):
            with pytest.raises(UserError) as caught:
                prove_by_levels(change(plan), schedule.links, at)
            assert caught.value.slug == "not-proved-by-levels", words
            count += 1
    assert count > 10


def test_what_is_not_proved_so() -> None:
    """Masks by distance, and a dimension that is too long beside the others."""
    with pytest.raises(UserError, match="all of d0=1000 has 2000 ranks"):
        small_meshes(Mesh((Dim("d0", 1000), Dim("d1", 4))))
    schedule, plan = drawn(TWO, "causal", 1)[0]
    windowed = replace(plan, program=replace(plan.program, mask="window", window=8))
    with pytest.raises(UserError, match="goes by distance"):
        prove_by_levels(windowed, schedule.links, elsewhere(load("attention"), schedule))
