"""The search: its space, what it finds, what it refuses, and why it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mercurygen.cost.topology import load
from mercurygen.designs import patterns
from mercurygen.errors import Refusal, UserError
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import apply
from mercurygen.schedule.directives import Parallelize
from mercurygen.schedule.text import parse, show
from mercurygen.search.result import Result
from mercurygen.search.search import search
from mercurygen.search.why import label, why

SMALL = Problem(seq=768, heads=8, kv_heads=4)
ATTENTION = load_operator("attention")

_NOT_EMITTED = Refusal("not-emitted", lambda: ("no text yet", None))

_SCRIPT = """
import json, sys
from mercurygen.cost.topology import load
from mercurygen.ir.problem import Problem
from mercurygen.search.search import search
from mercurygen.search.why import why
result = search("attention", Problem(), load("a100x16"))
heavy = [name for name in ("torch", "numpy", "triton") if name in sys.modules]
print(json.dumps([result.to_dict(), why(result), heavy]))
"""


def run(problem: Problem | None = None, topology: str = "a100x16", **options) -> Result:
    """A search for attention."""
    return search("attention", problem or Problem(), load(topology), **options)


def refused(slug: str, code: int = 2, problem: Problem | None = None, **options) -> UserError:
    """The error of a search that must fail."""
    with pytest.raises(UserError) as caught:
        run(problem, **options)
    assert (caught.value.slug, caught.value.exit_code) == (slug, code), caught.value.render()
    return caught.value


# --- what it finds ----------------------------------------------------------------------------


def test_text_of_a_schedule() -> None:
    """As a person writes it: order, pin, reshards, parallelize, nest, kernel."""
    best = run().best
    assert best.design == "unified"
    assert best.text.splitlines()[3:] == [
        "group node=2 gpu=8",
        "tp 1",
        "mesh node=2 gpu=8",
        "order S: zigzag over node, gpu",
        "pin q, k, v, out, lse: S over node, gpu",
        "reshard q, k, v: S to H along gpu",
        "reshard out, lse: H to S along gpu",
        "parallelize S_q over node",
        "parallelize H over gpu",
        "shift k, v: S_kv along node",
        "patch body with aten",
    ]


# of several numbers and kinds of levels, none of whose searches is long
ROUND_TRIPS = ("a100x8", "a100x16", "h100x16", "l20x8", "mi300x8")


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_schedules_round_trip(name: str) -> None:
    """Text and back, and applied again they give the plan that was priced."""
    for candidate in run(topology=name, order="any").ranked[:5]:
        source = parse(candidate.text)
        assert source.schedule == candidate.schedule
        assert show(source.schedule) == candidate.text
        program = apply(ATTENTION, source.schedule, source.spans)
        assert lower(program) == candidate.plan
        assert candidate.design == patterns.name_of(
            source.schedule.mesh, source.schedule.directives
        )


def test_same_result_everywhere_and_no_torch() -> None:
    """Under any hash seed, byte for byte; torch and numpy stay out."""
    outputs = set()
    for seed in ("0", "1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        root = Path(__file__).parents[1]
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], env=env, cwd=root, capture_output=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    found, _, heavy = json.loads(outputs.pop())
    assert not heavy
    assert found["counts"]["candidates"] > 300
    assert found["best"]["name"] == "unified"
    assert set(found["best"]["bytes_per_link"]) == {"node", "gpu"}


def test_counts_named_and_pareto() -> None:
    """Everything is counted once; every design is there; nothing beats the Pareto set."""
    result = run()
    counts = result.counts
    assert counts.candidates == counts.legal + sum(number for _, number in counts.refused)
    assert [named.name for named in result.named] == list(patterns.names())
    (ulysses,) = [named for named in result.named if named.name == "ulysses"]
    assert ulysses.best is None and ulysses.slug == "heads-not-divisible"
    assert "16 ranks" in ulysses.message
    for named in result.named:
        if named.best:
            assert named.best.design == named.name
            rivals = [c for c in result.ranked if c.design == named.name]
            assert named.best.cost.time == min(c.cost.time for c in rivals)
    for one in result.pareto:
        for other in result.ranked:
            faster = other.cost.time < one.cost.time - 1e-12
            assert not (faster and other.cost.peak_memory <= one.cost.peak_memory)
            assert other.cost.time > one.cost.time - 1e-12 or faster
    assert result.pareto[0] == result.ranked[0]
    near = [c for c in result.ranked if c.cost.time <= 1.01 * result.ranked[0].cost.time]
    assert result.best in near and result.best.lines == min(c.lines for c in near)
    assert len(result.ranked) >= 50


def test_memory_limit_and_objective() -> None:
    """What is over the limit is refused; the leanest schedule is what --objective memory finds."""
    lean = run(objective="memory")
    least = lean.best.cost.peak_memory
    assert least == lean.pareto[-1].cost.peak_memory < run().best.cost.peak_memory
    tight = run(memory_limit=least)
    assert all(c.cost.peak_memory == least for c in tight.ranked)
    assert dict(tight.counts.refused)["over-memory-limit"] > 100
    (ring,) = [named for named in tight.named if named.name == "ring"]
    assert ring.slug == "over-memory-limit"
    error = refused("nothing-fits", 1, memory_limit=least - 1)
    assert "over-memory-limit" in error.message and str(least) in error.help


def test_links_change_the_ranking_and_why_says_so() -> None:
    """B64: on PCIe and UPI Ulysses loses, on NVSwitch it or all-gather wins."""
    fast, slow = run(topology="h100x8"), run(topology="l40x8")
    split = {d.axis for d in fast.best.schedule.directives if isinstance(d, Parallelize)}
    assert split == {"H"}  # ulysses, in chunks or not
    times = {named.name: named.best.cost.times for named in slow.named if named.best}
    assert slow.best.design != "ulysses" and times["ulysses"].total > 1.2 * slow.best.cost.time
    ports = {c.design: c.cost.links[0].port for c in slow.ranked if c.design}
    assert ports["ulysses"] > ports["ring"]
    said = why(slow)
    assert said.startswith(label(slow.best)) and "more waiting for transfers" in said
    assert "UPI" not in why(fast)


def test_why_counts_the_parts() -> None:
    """The parts of two totals differ by what the totals differ by, so what is said adds up."""
    for topology in ("a100x16", "l20x8"):
        for candidate in run(topology=topology, order="any").ranked:
            times = candidate.cost.times
            parts = times.compute + times.copies + times.launch + times.exposed
            assert parts == pytest.approx(times.total, rel=1e-9)
    contiguous = why(run(order="contiguous"))
    assert "times the mean work" in contiguous


@pytest.mark.parametrize("topology, heads", [("a100x16", 40), ("a100x32", 12)])
def test_heads_go_inside_a_node(topology: str, heads: int) -> None:
    """B65: the group that splits heads lies on NVLink, the sequence goes between nodes."""
    best = run(Problem(heads=heads, kv_heads=heads), topology).best
    split = {
        dim: d.axis
        for d in best.schedule.directives
        if isinstance(d, Parallelize)
        for dim in d.dims
    }
    dims = best.schedule.mesh.dims
    assert split[dims[0].name] == "S_q" and dims[0].name == "node"
    assert split[dims[-1].name] == "H" and dims[-1].name.startswith("gpu")
    assert heads % dims[-1].size == 0


def test_closed_form_ranks_as_the_simulation() -> None:
    """On balanced schedules the two agree; the winner is the same."""
    ranked = run().ranked
    for candidate in ranked:
        assert candidate.simulated.time == pytest.approx(candidate.closed.time, rel=0.05)
    assert min(ranked, key=lambda c: c.closed.time).design == ranked[0].design


def test_one_design_group_and_tp() -> None:
    """Only instances of the design; the group's own ranks; heads after tensor parallelism."""
    result = run(design="double-ring", topology="h100x8")
    assert {c.design for c in result.ranked} == {"double-ring"}
    assert [dict(gpu0=2, gpu1=4), dict(gpu0=4, gpu1=2)] == sorted(
        (c.to_dict()["mesh"] for c in result.ranked), key=lambda mesh: mesh["gpu0"]
    )
    assert run(tp=2).best.schedule.group == (2, 4)
    assert run(tp=2).best.plan.program.extent("H") == 4
    assert run(group=(1, 1)).best.text.endswith("mesh\norder S: contiguous\npatch body with aten\n")


def test_progress() -> None:
    """It is told how far it is."""
    told = []
    run(SMALL, group=(2, 2), progress=lambda what, done, total: told.append((what, done, total)))
    size = max(done for what, done, _ in told if what == "schedules priced")
    assert ("schedules priced", size, size) in told
    assert told[-1][1] == told[-1][2]


# --- what it refuses ------------------------------------------------------------------------


def test_refusals() -> None:
    """One reason for all is that reason, with the nearest legal sizes."""
    assert "131040 or 131072" in refused("seq-not-divisible", problem=Problem(seq=131071)).help
    odd = refused("seq-not-divisible-zigzag", problem=Problem(seq=131088))
    assert "131072 or 131104" in odd.help
    assert run(Problem(seq=131088), order="contiguous").counts.legal
    assert "1, 2, 4, 8" in refused("heads-not-divisible", design="ulysses").help
    refused("seq-not-divisible", problem=Problem(seq=131071), order="any")
    mixed = refused("nothing-fits", 1, order="any", problem=Problem(seq=131088), memory_limit=1)
    assert "seq-not-divisible-zigzag" in mixed.message and "the least" in mixed.help


def test_what_is_not_emitted_is_not_chosen() -> None:
    """Plans without a module are counted, never ranked, and named if the model prefers one."""
    everything = run(SMALL, group=(2, 2))
    best = everything.best.plan
    other = run(SMALL, group=(2, 2), emits=lambda plan: _NOT_EMITTED if plan == best else None)
    assert (everything.counts.not_emitted, other.counts.not_emitted) == (0, 1)
    assert other.counts.legal == everything.counts.legal
    assert other.unemitted.plan == best and everything.unemitted is None
    assert best not in [candidate.plan for candidate in other.ranked]
    assert other.best.key("time")[0] >= everything.best.key("time")[0]
    assert "no module is emitted for yet" in why(other)
    refused("not-emitted", problem=SMALL, group=(2, 2), emits=lambda plan: _NOT_EMITTED)


def test_order_of_a_design() -> None:
    """It is the design's own: not among zigzag schedules, and found alone or in any order."""
    (striped,) = [x for x in run(SMALL, group=(1, 4)).named if x.name == "striped-ring"]
    assert striped.slug == "another-order" and "--order striped" in striped.help
    alone = run(SMALL, group=(1, 4), design="striped-ring")
    assert alone.best.plan.program.order.kind == "striped"
    assert {candidate.design for candidate in alone.ranked} == {"striped-ring"}
    refused("another-order", problem=SMALL, group=(1, 4), design="striped-ring", order="zigzag")


def test_wrong_arguments() -> None:
    """Each with the nearest legal value."""
    assert "`ring`" in refused("unknown-design", design="rings").help
    assert "`time`" in refused("unknown-objective", objective="tme").help
    assert "`zigzag`" in refused("unknown-order", order="zig-zag").help
    assert "1, 2, 4, 8" in refused("tp-does-not-fit", tp=3).help
    assert refused("group-not-of-topology", group=(2, 8), tp=2).help.endswith("1, 2, 4")
    refused("group-not-of-topology", group=(2, 3))
    refused("group-not-of-topology", group=(8,))
    refused("heads-not-divisible", problem=Problem(kv_heads=2), tp=4)
    assert (
        "2 dimensions" in refused("design-does-not-fit", design="double-ring", group=(2, 1)).message
    )
