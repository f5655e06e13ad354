"""CommIR's text: both ways at every stage of random schedules, and two goldens."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from textwrap import dedent

import pytest
from drawn import GROUPS, draws
from plans import OPERATORS, SCHEDULES, directives_of, mesh_of, problem_of

from mercurygen.errors import Refusal, UserError
from mercurygen.ir.mesh import Link
from mercurygen.ir.problem import Problem
from mercurygen.ir.program import Program
from mercurygen.ir.text import parse, show
from mercurygen.operators import load
from mercurygen.schedule import text as schedule_text
from mercurygen.schedule.apply import apply, attempt, start, steps
from mercurygen.schedule.directives import Directive, Pin
from mercurygen.schedule.rules import RULES
from mercurygen.schedule.schedule import Schedule, Target
from mercurygen.search.space import points, settle

ATTENTION = load("attention")
SEED = 7


def schedule(mesh: str, body: str, problem: str = "", group: str = "") -> schedule_text.Source:
    """A small schedule; the sequence pinned over everything."""
    dims = ", ".join(word.partition("=")[0] for word in mesh.split())
    levels = group or mesh
    head = f"""operator attention
    problem batch=2 seq=768 heads=8 kv_heads=4 head_dim=64 {problem or 'bfloat16 causal'}
    topology t sha256:0123456789abcdef {' '.join(f'{x} wire 25GB/s' for x in levels.split())}
    group {levels}
    tp 1
    mesh {mesh}
    order S: zigzag over {dims}
    pin q, k, v, out, lse: S over {dims}
    """
    return schedule_text.parse(dedent(head) + dedent(body), "a.sched")


def both_ways(program: Program) -> None:
    """The two laws, for a program and for the text that it makes."""
    text = show(program)
    assert parse(text) == program, text
    assert show(parse(text)) == text


def space(seed: int, problem: Problem) -> Iterator[tuple[Program, tuple[Directive, ...]]]:
    """Legal schedules on some groups, in random order."""
    found = []
    for sizes in [(2, 4), (2, 2, 2), (1, 8), (1, 1)]:
        links = tuple(Link(f"level{i}", n, "wire", 1e9) for i, n in enumerate(sizes))
        found += points(ATTENTION, problem, links, order="any")
    random.Random(seed).shuffle(found)
    for point in found:  # as many as are asked for
        settled = settle(point)
        if not isinstance(settled, Refusal):
            yield point.start, settled[1]


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_random_programs_at_every_stage(mask: str) -> None:
    print("seed", SEED)
    problem = Problem(batch=3, seq=768, heads=16, kv_heads=8, head_dim=64, v_head_dim=32, mask=mask)
    count = 0
    for program, directives in islice(space(SEED, problem), 60):
        complete = attempt(program, directives)
        assert isinstance(complete, Program)
        both_ways(complete)
        both_ways(program)
        for directive in directives:
            program = RULES[type(directive)].rewrite(program, directive)
            both_ways(program)
        count += 1
    assert count == 60


def test_shuffled_directives() -> None:
    """Halves of schedules, in any order, also such as no complete program has."""
    print("seed", SEED)
    rng = random.Random(SEED)
    for begin, directives in islice(space(SEED, Problem(seq=768, heads=8, kv_heads=8)), 200):
        program = begin
        for directive in rng.sample(directives, len(directives)):
            rule = RULES[type(directive)]
            if rule.refuse(program, directive) is None:
                program = rule.rewrite(program, directive)
            both_ways(program)


@pytest.mark.parametrize("name", SCHEDULES)
def test_named_schedules_at_every_stage(name: str) -> None:
    operator, meshes, body, changes = SCHEDULES[name]
    masks = [{"window": 7}, {}] if operator == "smooth" else [{}]
    for mesh in meshes:
        for window in masks:
            problem = problem_of(operator, **changes, **window)
            program = start(OPERATORS[operator], problem, mesh_of(mesh))
            complete = attempt(program, directives_of(body))
            assert isinstance(complete, Program)
            both_ways(complete)
            both_ways(program)
            for directive in directives_of(body):
                program = RULES[type(directive)].rewrite(program, directive)
                both_ways(program)


@pytest.mark.parametrize("operator", GROUPS)
def test_drawn_schedules_at_every_stage(operator: str) -> None:
    """Of the whole space; also such as are refused, up to where they are."""
    print("seed", SEED)
    complete = 0
    for drawn in islice(draws(SEED, operator), 150):
        program = start(OPERATORS[operator], drawn.problem, mesh_of(drawn.mesh))
        for directive in directives_of(drawn.body):
            if RULES[type(directive)].refuse(program, directive) is not None:
                break
            program = RULES[type(directive)].rewrite(program, directive)
            both_ways(program)
        settled = attempt(
            start(OPERATORS[operator], drawn.problem, mesh_of(drawn.mesh)),
            directives_of(drawn.body),
        )
        if isinstance(settled, Program):
            both_ways(settled)
            complete += 1
    assert complete > 30


def test_golden_of_the_rest() -> None:
    """What attention's own schedules do not have: derived, tiles, scatter, dtypes, replicas."""
    body = """
    parallelize S_q over node
    parallelize S_kv over gpu
    shift k, v: S_kv along node direct prefetch 2
    shift dk, dv: S_kv along node direct
    shard q, do, lse, delta: S_q over gpu
    replicate dq over gpu as bfloat16
    pin dq: S over node
    pin q, out, lse, do: S over node, gpu
    pin k, v, dk, dv: S over node, gpu
    join H, G
    tile B by 2
    """
    problem = problem_of("attention_backward", batch=4)
    program = start(OPERATORS["attention_backward"], problem, mesh_of("node=2 gpu=2"))
    settled = attempt(program, directives_of(body))
    assert isinstance(settled, Program), settled.explain()
    both_ways(settled)
    assert show(settled).partition("input do")[2] == dedent("""\
         [B, S_q, H * G, D_v] pinned S_q over node, gpu
        derived delta [B, H * G, S_q] accumulator from out, do pinned S_q over node, gpu
        output dq [B, S_q, H * G, D] pinned S_q over node
        output dk [B, S_kv, H, D] pinned S_kv over node, gpu
        output dv [B, S_kv, H, D_v] pinned S_kv over node, gpu
        together k, v
        together dk, dv
        combine dq by sum
        combine dk by sum
        combine dv by sum
        loops B, H, G, S_q, S_kv
        order S: zigzag over node, gpu
        replicated dq over gpu as bfloat16
        join H, G
        tile B by 2
        walk k, v: S_kv along node direct prefetch 2
          walk dk, dv: S_kv along node direct
            gather q, lse, do, delta: S_q over gpu
              body reads q, k, v, lse, do, delta with body
        """)


def test_golden_of_a_border_and_a_window() -> None:
    body = """
    pin x: replicated
    pin rate, out: T over m
    order S: contiguous over m
    parallelize T over m
    shift x: S along m
    """
    program = start(OPERATORS["smooth"], problem_of("smooth", window=7), mesh_of("m=4"))
    settled = attempt(program, directives_of(body))
    assert isinstance(settled, Program), settled.explain()
    both_ways(settled)
    assert "mask window 7 over T, S\n" in show(settled)
    assert show(settled).endswith(
        "reshard x: replicated to S along m\nwalk x: S along m\n  body with body\n"
    )


def test_what_may_repeat() -> None:
    source = schedule(
        "a=2 b=2",
        """
        replicate q over a, b
        replicate k, v over b
        reshard out: S to H along a
        reshard q, k: S to H along a
        reshard k: S to H along a
        reshard v: replicated to H along b
        """,
    )
    program = None
    for directive in source.schedule.directives:
        points = [p for _, p in partial(source, directive)]
        program = points[-1]
        both_ways(program)
    assert "replicated q over a, b\nreplicated k over b" in show(program)
    assert "reshard v: replicated to H along b\n" in show(program)


def partial(source: schedule_text.Source, last: Directive) -> list[tuple[object, Program]]:
    """The steps up to a directive of a schedule that is not complete."""
    found = []
    for directive, program in steps(ATTENTION, source.schedule, source.spans):
        found.append((directive, program))
        if directive is last:
            break
    return found


def test_names_of_an_operator_may_be_long() -> None:
    """As long as its author likes, and words of this text."""
    source = schedule("over=2 body=4", UNIFIED.replace("gpu", "body").replace("node", "over"))
    program = apply(ATTENTION, source.schedule)
    both_ways(program)
    text = show(program)
    for old, new in {
        "q": "the_queries_of_every_token",
        "lse": "accumulator",
        "out": "_out",
    }.items():
        text = re.sub(rf"\b{old}\b", new, text)
    assert show(parse(text)) == text
    renamed = replace(program, operator="an_operator_with_a_rather_long_name")
    both_ways(renamed)


def test_golden_before_and_after() -> None:
    source = schedule("node=2 gpu=4", RING)
    points = list(steps(ATTENTION, source.schedule, source.spans))
    assert [str(directive) for directive, _ in points] == [
        "None",
        "order S: zigzag over node, gpu",
        "pin q, k, v, out, lse: S over node, gpu",
        "parallelize S_q over node, gpu",
        "shift k, v: S_kv along node",
        "shard k, v: S_kv over gpu",
        "None",
    ]
    assert show(points[0][1]) == dedent("""\
        program attention
        mesh node=2 gpu=4
        dtype bfloat16
        axis B = 2
        axis H = 4
        axis G = 2
        axis S_q = 768
        axis S_kv = 768
        axis D = 64
        axis D_v = 64
        mask causal over S_q, S_kv
        input q [B, S_q, H * G, D]
        input k [B, S_kv, H, D]
        input v [B, S_kv, H, D_v]
        output out [B, S_q, H * G, D_v]
        output lse [B, H * G, S_q] accumulator
        together k, v
        together out, lse
        combine out, lse by softmax
        loops B, H, G, S_q, S_kv
        body
        """)
    assert show(points[-1][1]).endswith(
        "loops B, H, G, S_q, S_kv\norder S: zigzag over node, gpu\n"
        "walk k, v: S_kv along node\n  gather k, v: S_kv over gpu\n    body with aten\n"
    )


RING = """
parallelize S_q over node, gpu
shift k, v: S_kv along node
shard k, v: S_kv over gpu
"""
UNIFIED = "parallelize H over gpu\nparallelize S_q over node\nshift k, v: S_kv along node\n"


def test_golden_complete() -> None:
    source = schedule("node=2 gpu=4", UNIFIED)
    program = apply(ATTENTION, source.schedule, source.spans)
    assert show(program) == dedent("""\
        program attention
        mesh node=2 gpu=4
        dtype bfloat16
        axis B = 2
        axis H = 4 over gpu
        axis G = 2
        axis S_q = 768 over node
        axis S_kv = 768
        axis D = 64
        axis D_v = 64
        mask causal over S_q, S_kv
        input q [B, S_q, H * G, D] pinned S_q over node, gpu
        input k [B, S_kv, H, D] pinned S_kv over node, gpu
        input v [B, S_kv, H, D_v] pinned S_kv over node, gpu
        output out [B, S_q, H * G, D_v] pinned S_q over node, gpu
        output lse [B, H * G, S_q] accumulator pinned S_q over node, gpu
        together k, v
        together out, lse
        combine out, lse by softmax
        loops B, H, G, S_q, S_kv
        order S: zigzag over node, gpu
        reshard q: S_q to H along gpu
        reshard k, v: S_kv to H along gpu
        walk k, v: S_kv along node
          body with aten
        reshard out, lse: H to S_q along gpu
        """)
    commented = show(program).replace("  body", "\n\t# here\n body").replace("\n", "  # a\n")
    assert parse(commented) == program


# --- the schedule's own text ---------------------------------------------------------------------


def test_bandwidth_keeps_all_digits() -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    source = schedule("gpu=8", "parallelize H over gpu\n").schedule
    speeds = [25e9, 300e9, 0.1, 1.0, 1e9 / 3, 12345678901.0, 5e-324, 9e14]
    for speed in speeds + [rng.uniform(1, 9) * 10 ** rng.randrange(-9, 14) for _ in range(500)]:
        target = Target("t", source.target.digest, (Link("gpu", 8, "wire", speed),))
        changed = Schedule(
            source.operator, source.problem, target, (8,), 1, source.mesh, source.directives
        )
        assert schedule_text.parse(schedule_text.show(changed)).schedule == changed
    assert schedule_text.show_speed(25e9) == "25" and schedule_text.show_speed(2.5e9) == "2.5"


@pytest.mark.parametrize("speed", ["0", "-1", "inf", "nan", "1e3", "1_0", "٣", "1" * 30, "."])
def test_bandwidth_refused(speed: str) -> None:
    text = schedule_text.show(schedule("gpu=8", "parallelize H over gpu\n").schedule)
    with pytest.raises(UserError):
        schedule_text.parse(text.replace(" 25GB/s", f" {speed}GB/s"))


def test_pin_over_nothing() -> None:
    """It prints what parses, and is what it parses to."""
    for pin in (Pin(("q",), "S", ()), Pin(("q",), None, ("gpu",)), Pin(("q",), None, ())):
        assert str(pin) == "pin q: replicated"
        source = schedule("gpu=8", f"{pin}\n")
        assert source.schedule.directives[-1] == pin
