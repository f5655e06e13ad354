"""Plans of every kind: proved, and run on virtual ranks against the operator on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from drawn import Drawn, draws
from plans import (
    SCHEDULES,
    links_of,
    lowered,
    mesh_of,
    plan_of,
    problem_of,
    program_of,
    run_and_compare,
    traces_of,
)

from mercurygen.check.prove import prove
from mercurygen.errors import Refusal
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.lower.begin import misaligned
from mercurygen.lower.lower import lower_aligned
from mercurygen.lower.plan import Plan
from mercurygen.lower.recorder import NotARun
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import NotCuttable

SEED = 2024


def problems(name: str, number: int) -> Iterator[Problem | Sizes]:
    """The sizes that a schedule is tried with on its mesh of some number: every mask in turn."""
    operator, _, _, changes = SCHEDULES[name]
    if operator == "smooth":
        for window in (1, 7, 48) if number else (5, 24):
            yield problem_of(operator, window=window)
        yield problem_of(operator, ("causal", "full")[number])
    elif operator in ("matmul", "nearest"):
        yield problem_of(operator, **changes)
    else:
        yield problem_of(operator, ("causal", "full")[number % 2], **changes)


EACH = [(name, i) for name, each in SCHEDULES.items() for i in range(len(each.meshes))]


@pytest.mark.parametrize(("name", "number"), EACH)
def test_named_schedules(name: str, number: int) -> None:
    operator, meshes, body, _ = SCHEDULES[name]
    for problem in problems(name, number):
        plan = plan_of(operator, problem, meshes[number], body)
        prove(plan, links_of(plan.program.mesh))
        run_and_compare(plan, traces_of(plan))


def paste(drawn: Drawn) -> str:
    """A schedule that failed, ready to be tried again."""
    return f"run_and_compare(plan_of(*{drawn!r}))"


@pytest.mark.parametrize(
    ("operator", "count"), [("attention", 200), ("attention_backward", 50), ("matmul", 50)]
)
def test_random_schedules(operator: str, count: int) -> None:
    """Of the whole space of an operator, those that are legal; a refusal is the only other end."""
    print("seed", SEED)
    refused, words, plans = Counter(), Counter(), 0
    for drawn in draws(SEED, operator):
        if plans == count:
            break
        try:
            plan = lowered(*drawn)
            if isinstance(plan, Refusal):
                refused[plan.slug] += 1
                message, help = plan.explain()
                assert message and help != ""
                continue
            prove(plan, links_of(mesh_of(drawn.mesh)))
            run_and_compare(plan, traces_of(plan))
        except BaseException:
            print(paste(drawn))
            raise
        plans += 1
        words.update(word for word in WORDS if word in drawn.body)
    print(f"{plans} legal, {sum(refused.values())} refused: {refused.most_common()}")
    print(dict(words))
    if operator == "attention":
        assert all(words[word] >= 2 for word in WORDS), words


WORDS = (
    *("shift k, v", "shift q", "shift out", "shard k, v", "shard q", "shard out", "replicate"),
    *("direct", "reverse", "both", "prefetch", "pin", "tile", "join", "striped", "zigzag"),
)


@pytest.mark.parametrize(
    ("mesh", "body", "slug"),
    [
        (
            "m=4",
            "parallelize S_kv over m\nshard q: S_q over m\nshift out, lse: S_q along m",
            "tiles-do-not-align",
        ),
        (
            "m=4",
            "parallelize S_kv over m\nshard q: S_q over m\nshift out, lse: S_q along m direct",
            "tiles-do-not-align",
        ),
        (
            "n=2 m=2",
            "parallelize S_kv over n, m\nshift q: S_q along n\nshard q: S_q over m\n"
            "shift out, lse: S_q along n, m",
            "two-shifts-one-axis",
        ),
        (
            "n=2 m=2",
            "parallelize S_q over n\nparallelize S_kv over m\nshift q: S_q along m direct\n"
            "shift out, lse: S_q along m direct\nshift k, v: S_kv along n",
            "home-of-trimmed",
        ),
        (
            "n=2 m=3",
            "parallelize B over n\nparallelize H over m\ntile H by 2",
            "tile-of-moved",
        ),
    ],
)
def test_refused(mesh: str, body: str, slug: str) -> None:
    problem = problem_of("attention", kv_heads=12, heads=24)
    found = lowered("attention", problem, mesh, body)
    assert isinstance(found, Refusal) and found.slug == slug, found
    message, help = found.explain()
    assert message and help
    print(message, help)


def test_in_one_piece_where_it_is() -> None:
    """What zigzag refuses, contiguous order allows."""
    for home in ("", " direct"):
        body = (
            "order S: contiguous over m\nparallelize S_kv over m\nshard q: S_q over m\n"
            f"shift out, lse: S_q along m{home}"
        )
        run_and_compare(plan_of("attention", problem_of("attention"), "m=4", body))


@pytest.mark.parametrize(
    ("mesh", "body"),
    [
        (  # the owner of queries along n says nothing of keys
            "n=2 m=2",
            "parallelize S_kv over n\nparallelize S_q over m\nshift q, do, delta, lse: S_q along n"
            "\nshift k, v: S_kv along m\nshift dq: S_q along n\nshift dk, dv: S_kv along m direct",
        ),
        (  # one walk, whose tensors are gathered in lines apart
            "n=3 m=4",
            "parallelize S_kv over n, m\nshard lse: S_q over n\nshift lse: S_q along m\n"
            "shard q, do, delta: S_q over n\nshift q, do, delta: S_q along m\n"
            "shard dq: S_q over n\nshift dq: S_q along m direct",
        ),
        (  # of the results only dq is resharded
            "m=2",
            "parallelize G over m\nshift dk, dv: S_kv along m\nshift k, v: S_kv along m\n"
            "tile H by 3",
        ),
    ],
)
def test_gradients_that_move_apart(mesh: str, body: str) -> None:
    problem = problem_of("attention_backward", kv_heads=6, heads=12)
    plan = plan_of("attention_backward", problem, mesh, body)
    prove(plan, links_of(plan.program.mesh))
    run_and_compare(plan, traces_of(plan))


# --- tiles that lie in one piece ----------------------------------------------------------------


@pytest.mark.parametrize("operator", ["attention", "attention_backward", "matmul"])
def test_rank_0_shows_whether_tiles_align(operator: str) -> None:
    """A plan is refused for what a rank cannot cut in one piece if and only if some rank cannot."""
    said, looked = set(), 0
    for number, each in enumerate(draws(SEED, operator)):
        program = program_of(operator, each.problem, each.mesh, each.body)
        plan = program if isinstance(program, Refusal) else lower_aligned(program)
        if isinstance(plan, Refusal) or plan.program.mesh.size > 8:
            continue
        refused = misaligned(plan) is not None
        assert refused == (not all(aligned(plan, r) for r in range(plan.program.mesh.size))), each
        said.add(refused)
        looked += 1
        if looked >= 80 and said == {True, False}:
            break
        assert number < 4000, f"seed {SEED}"


def aligned(plan: Plan, rank: int) -> bool:
    """Whether a rank can do what a plan says."""
    try:
        trace(plan, rank)
    except (NotARun, NotCuttable):
        return False
    return True
