"""The search for training: a forward and a backward, each with a schedule of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from command import run

from mercurygen.check.prove import prove
from mercurygen.cli.build import plans_of, prove_schedule
from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.report import together
from mercurygen.cost.simulate import simulate
from mercurygen.cost.topology import load
from mercurygen.designs import patterns
from mercurygen.errors import UserError
from mercurygen.ir.problem import Problem
from mercurygen.schedule.directives import Parallelize
from mercurygen.schedule.schedule import Backward
from mercurygen.schedule.text import parse, show
from mercurygen.search.gradients import bodies
from mercurygen.search.search import search

SMALL = Problem(seq=4096, heads=8, kv_heads=8, head_dim=64, v_head_dim=64)
TOPOLOGIES = ("h100x8", "a100x16")


@pytest.fixture(scope="module")
def results() -> dict:
    """One search for each topology."""
    return {name: search("attention", Problem(), load(name), passes="train") for name in TOPOLOGIES}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_best_is_proved_and_costs_what_both_passes_do(results, name: str) -> None:
    """Times and bytes of forward and backward add up; the peak is the higher one."""
    result = results[name]
    network = Network(result.topology, result.group, result.tp)
    for candidate in result.ranked[:10]:
        forward, backward = plans_of(candidate.schedule)
        assert (forward.plan, backward.plan) == (candidate.plan, candidate.gradient)
        cost = together(simulate(forward.plan, network), simulate(backward.plan, network))
        assert cost == candidate.simulated
    proved = prove_schedule(result.best.schedule)
    reports = proved.report, proved.backward.report
    assert result.best.cost.peak_memory == max(report.peak.most for report in reports)
    for link in result.best.cost.links:
        assert link.mean == pytest.approx(sum(r.traffic.crossing[link.name].mean for r in reports))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_schedules_round_trip(results, name: str) -> None:
    """Their text says it all, and is in normal form already."""
    for candidate in results[name].ranked[:10]:
        schedule = parse(show(candidate.schedule), "x.sched").schedule
        assert schedule == candidate.schedule
        assert plans_of(schedule)[0].schedule == schedule


def test_nothing_beats_the_best() -> None:
    """Every forward that the search ranks, with every backward tried one by one."""
    result = search("attention", SMALL, load("h100x8"), passes="train")
    network = Network(result.topology, result.group, result.tp)
    tried, least = 0, float("inf")
    for candidate in result.ranked[::3]:
        if len(candidate.schedule.mesh.dims) > 2:
            continue
        forward = closed.cost(candidate.plan, network)
        for lines, save in product(bodies(SMALL.axes, candidate.schedule.mesh), ("inner", "outer")):
            schedule = replace(candidate.schedule, backward=Backward(lines, save))
            try:
                _, backward = plans_of(schedule)
            except UserError:
                continue
            tried += 1
            least = min(least, together(forward, closed.cost(backward.plan, network)).time)
    print(tried, "pairs")
    assert tried > 100
    assert min(c.closed.time for c in result.ranked) <= least * (1 + 1e-9)


@pytest.mark.parametrize("design", patterns.names("train"))
def test_designs_have_their_own_backward(design: str) -> None:
    """A named design is searched with its own; all of them are proved."""
    problem = replace(SMALL, heads=32)
    try:
        result = search("attention", problem, load("a100x16"), design=design, passes="train")
    except UserError as error:
        assert error.slug in ("tile-parts", "mask-too-fragmented", "heads-not-divisible"), error
        return
    pattern = patterns.get(design)
    for candidate in result.ranked:
        own = pattern.backward_on(candidate.schedule.mesh)
        lines = candidate.schedule.backward.directives
        assert candidate.design == design and set(own) <= set(lines)
        assert any(isinstance(d, Parallelize) for d in lines) == (design == "burst")
    backward = plans_of(result.best.schedule)[1]
    prove(backward.plan, backward.schedule.links)


def _bytes(schedule, lines) -> int:
    """Bytes that a rank sends in a backward of so many hops."""
    text = show(replace(schedule, backward=None)) + "backward\n" + lines
    _, backward = plans_of(parse(text, "x.sched").schedule)
    (crossing,) = prove(backward.plan, backward.schedule.links).traffic.crossing.values()
    return crossing.most


@pytest.mark.parametrize("kernel", ("aten", "triton"))
@pytest.mark.parametrize("group", (1, 2, 4))
def test_burst_against_ring_follows_from_bytes(group: int, kernel: str) -> None:
    """5 H against 6 H_kv, as out travels: keys and values stay where heads have their own.

    As delta does, a number a row, 4 H against 6 H_kv.
    """
    problem = replace(SMALL, heads=8 * group, dtype="bfloat16")
    topology = load("h100x8")
    ring = search("attention", problem, topology, design="ring", kernel=kernel).best.schedule
    moved, wide, rows = ("out", 3, 1) if kernel == "aten" else ("delta", 2, 2)
    keys = _bytes(ring, "shift k, v, dk, dv: S_kv along gpu\n")
    queries = f"parallelize S_kv over gpu\nshift q, {moved}, lse, do, dq: S_q along gpu\n"
    burst = _bytes(ring, queries)
    tokens, dim = problem.seq // 8, problem.head_dim
    hops = 8  # with their gradients, which end at home; what is only read needs one less
    row = tokens * dim
    assert keys == 8 * row * (2 * 2 * (hops - 1) + 2 * 4 * hops)
    by_row = rows * tokens * 8 * group * 4 * (hops - 1)
    assert burst == 8 * group * row * (wide * 2 * (hops - 1) + 4 * hops) + by_row
    assert (burst < keys) == (group == 1)


@pytest.mark.parametrize("kernel", ("aten", "triton"))
@pytest.mark.parametrize("heads, faster", [(8, "burst"), (16, "ring"), (32, "ring")])
def test_designs_cross_over_where_the_bytes_do(heads: int, faster: str, kernel: str) -> None:
    """On a slow ring, heads of their own let queries travel, shared ones keys and values."""
    problem = replace(SMALL, seq=8192, heads=heads)
    times = {}
    for design in ("ring", "burst"):
        how = {"design": design, "passes": "train", "kernel": kernel}
        result = search("attention", problem, load("l20x8"), **how)
        assert result.best.design == design
        times[design] = result.best.cost.time
    assert min(times, key=times.get) == faster, times


def test_a_design_of_the_backward_needs_one() -> None:
    """Its forward alone is that of another design."""
    with pytest.raises(UserError) as caught:
        search("attention", SMALL, load("h100x8"), design="burst")
    assert caught.value.slug == "design-of-backward" and "--pass train" in caught.value.help
    assert "burst" not in patterns.names() and "burst" in patterns.names("train")


SECTION = """operator attention
problem batch=1 seq=4096 heads=8 kv_heads=8 head_dim=64 bfloat16 causal
topology t sha256:0123456789abcdef gpu=4 NVLink 300GB/s
group gpu=4
tp 1
mesh gpu=4
"""


def test_what_is_left_out() -> None:
    """What splits the iterations and what is saved may be; reshards are worked out."""
    forward = SECTION + "parallelize H over gpu\n"
    schedule = plans_of(parse(forward + "backward\n").schedule)[0].schedule
    assert schedule.backward.save == "inner"
    text = show(schedule).partition("backward\n")[2]
    assert text.splitlines() == [
        "reshard do: S to H along gpu",
        "reshard dq, dk, dv: H to S along gpu",
        "save q, k, v, out, lse: inner",
    ]
    outer = parse(forward + "backward\nsave lse, out, q, k, v: outer\n").schedule
    text = show(plans_of(outer)[0].schedule).partition("backward\n")[2]
    assert text.splitlines()[0] == "reshard q, k, v, out, lse, do: S to H along gpu"
    ring = SECTION + "parallelize S_q over gpu\nshift k, v: S_kv along gpu\nbackward\n"
    found = plans_of(parse(ring + "shift k, v, dk, dv: S_kv along gpu\n").schedule)[0].schedule
    assert found.backward.save == "outer"  # no border: the same as inner


@pytest.mark.parametrize(
    "lines, slug, line",
    [
        ("shift k, v: S_kv along gpu\n", "no-story", 0),
        ("shift k, v, dk: S_kv along gpu\n", "together-split", 10),
        ("shift k, v, dk, dv: S_kv along node\n", "unknown-dimension", 10),
        ("shift k, v, dk, dv: S_kv along gpu\nbackward\n", "unknown-directive", 11),
        ("shift k, v, dk, dv: S_kv along gpu\nsave q: outer\n", "saves-all", 11),
        ("save q, k, v, out, lse: here\n", "syntax", 10),
        ("pin q: S over gpu\n", "backward-shares", 10),
    ],
)
def test_bad_sections(lines: str, slug: str, line: int) -> None:
    """Refused with the line of the section that is wrong."""
    forward = SECTION + "parallelize S_q over gpu\nshift k, v: S_kv along gpu\nbackward\n"
    with pytest.raises(UserError) as caught:
        source = parse(forward + lines, "x.sched")
        plans_of(source.schedule, source.spans)
    assert caught.value.slug == slug, caught.value.render()
    if line:
        assert caught.value.span and caught.value.span.line == line, caught.value.render()


def test_emitted_and_checked(tmp_path) -> None:
    """The pair is written, verified and found unchanged; the command in it says `--pass train`."""
    out = run("emit", "attention", "--topo", "h100x8", "--pass", "train", "-o", tmp_path).done()
    assert "forward and backward by the model" in out and "backward: 8 ranks played" in out
    (sched,) = tmp_path.glob("*_train_h100x8.sched")
    assert sched.read_text().startswith("# mercurygen emit attention --topo h100x8 --pass train\n")
    assert (
        "3 calls with their gradients" in run("verify", "--no-run", sched.with_suffix(".py")).done()
    )
    run("check", tmp_path).done()
