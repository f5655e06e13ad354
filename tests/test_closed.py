"""The closed form against the simulation, whose bytes and memory are those of all ranks' traces."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

import pytest
from priced import CASES, case, drawn_plans, machine, network_of

from mercurygen.check.traffic import measure
from mercurygen.cost import closed
from mercurygen.cost.body import body_of
from mercurygen.cost.kernels import Kernels
from mercurygen.cost.links import Network, regime
from mercurygen.cost.report import Cost
from mercurygen.cost.rings import NoForm
from mercurygen.cost.simulate import distinct_ranks, simulate
from mercurygen.cost.topology import load
from mercurygen.ir.mesh import Link
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import DIAGONAL, EVERY
from mercurygen.operators import load as load_operator

SEED = int(os.environ.get("MERCURYGEN_SEED", "20260731"))


def exact(cost: Cost) -> tuple:
    """What both must agree on to the byte."""
    return cost.peak_memory, cost.links, cost.dims, cost.operations


@pytest.mark.parametrize("line", CASES)
def test_known_schedules(line: str) -> None:
    """Bytes per level and dimension, operations and peak, of every kind of plan."""
    operator, plan = case(line)
    network = network_of(plan.program.mesh)
    one, other = closed.cost(plan, network, operator), simulate(plan, network, operator)
    assert exact(one) == exact(other)
    assert one.imbalance == pytest.approx(other.imbalance)


def test_most_known_schedules_have_a_closed_form() -> None:
    """Only tile loops, skewed shifts and shifts both ways are simulated."""
    simulated = []
    for line in CASES:
        operator, plan = case(line)
        try:
            assert not plan.tiles
            closed.closed_form(plan, network_of(plan.program.mesh), operator)
        except (AssertionError, NoForm):
            simulated.append(line)
    words = ("tile", "skewed", "both")
    assert all(any(word in line for word in words) for line in simulated), simulated


@pytest.mark.parametrize("part", range(4))
def test_drawn_schedules(part: int) -> None:
    """The same of schedules at random: orders, stories, options, dtypes, padded heads."""
    formed = 0
    for words, plan in drawn_plans(SEED + part, 60):
        network = network_of(plan.program.mesh)
        try:
            one = closed.closed_form(plan, network)
        except NoForm:
            continue
        other = simulate(plan, network)
        formed += 1
        assert exact(one) == exact(other), words
        assert one.imbalance == pytest.approx(other.imbalance), words
    assert formed > 50, f"seed {SEED + part}"


# --- the simulation against the traces of all ranks -----------------------------------------------


@pytest.mark.parametrize("line", CASES[::2])
def test_ranks_that_share_a_trace_do_the_same(line: str) -> None:
    """Events and buffers of every rank are those of the one that stands for it."""
    _, plan = case(line)
    for ranks in distinct_ranks(plan).values():
        first, *rest = (trace(plan, rank) for rank in ranks)
        assert all((x.events, x.buffers) == (first.events, first.buffers) for x in rest)


@pytest.mark.parametrize("line", CASES[1::2])
def test_bytes_are_those_of_the_proof(line: str) -> None:
    """Mean and most along every dimension, as the verifier counts them on all ranks."""
    operator, plan = case(line)
    mesh = plan.program.mesh
    traces = tuple(trace(plan, rank) for rank in range(mesh.size))
    links = tuple(Link(dim.name, dim.size, "wire", 1e9) for dim in mesh.dims)
    proved = measure(plan, traces, links)
    found = simulate(plan, network_of(mesh), operator)
    for traffic in found.dims:
        assert (traffic.most, traffic.mean) == (
            proved.sent[traffic.name].most,
            pytest.approx(float(proved.sent[traffic.name].mean)),
        )
    assert found.peak_memory == max(one.peak() for one in traces)


# --- times ----------------------------------------------


def test_times_rank_as_the_simulation() -> None:
    """Spearman's correlation of closed and simulated times over schedules of eight ranks."""
    pairs = []
    for _, plan in drawn_plans(SEED, 150):
        if plan.program.mesh.size == 8:
            network = network_of(plan.program.mesh)
            pairs.append((closed.cost(plan, network).time, simulate(plan, network).time))
    assert len(pairs) > 40
    assert spearman(pairs) > 0.95, f"seed {SEED}"


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Correlation of ranks; ties share theirs."""
    columns = list(zip(*pairs, strict=True))
    a, b = ([(_below(x, c) + _below(x, c, True)) / 2 for x in c] for c in columns)
    n = len(pairs)
    mean = (n - 1) / 2
    cov = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return cov / prod(sum((x - mean) ** 2 for x in c) ** 0.5 for c in (a, b))


def _below(value: float, column: tuple[float, ...], equal: bool = False) -> float:
    return sum(x <= value for x in column) - 1 if equal else sum(x < value for x in column)


def test_times_of_reductions() -> None:
    """A reduce-scatter is an all-gather of a part; an all-reduce both; a broadcast a chain."""
    network = Network(machine("h100x8", (8,)), (8,))
    level, members = network.topology.levels[0], tuple(range(8))
    rate = level.bandwidth * level.efficiency
    loads = {
        kind: network.load(kind, members)
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
    }
    busiest = {kind: max(s for _, s in load.seconds) * rate for kind, load in loads.items()}
    assert busiest == pytest.approx(
        {"all-gather": 7, "reduce-scatter": 7 / 8, "all-reduce": 7 / 4, "broadcast": 1}
    )
    for kind, hops in (("all-gather", 7), ("reduce-scatter", 7), ("all-reduce", 14)):
        assert loads[kind].latency == pytest.approx(level.base_latency + hops * level.latency)
        assert loads[kind].small == pytest.approx(level.base_latency + hops * level.small_latency)
    assert loads["broadcast"].latency == loads["all-gather"].latency


def test_little_data_goes_by_the_protocol_that_is_done_first() -> None:
    """Half the bandwidth, and a fraction of the latency; without such a protocol, never."""
    topology = machine("h100x8", (8,))
    level = topology.levels[0]
    load = Network(topology, (8,)).load("all-gather", tuple(range(8)))
    per_byte = max(s for _, s in load.seconds)
    even = 7 * (level.latency - level.small_latency) / per_byte  # bytes where both take as long
    assert regime(load, 0.9 * even) == (load.small, 2.0)
    assert regime(load, 1.1 * even) == (load.latency, 1.0)
    without = replace(topology, levels=(replace(level, small_latency=None),))
    load = Network(without, (8,)).load("all-gather", tuple(range(8)))
    assert regime(load, 1) == (load.latency, 1.0)


def test_gradient_does_five_products_for_two() -> None:
    """At their own efficiency, with the same softmax, on the live half alike."""
    lines = {line.split(" | ")[0]: line for line in CASES if "parallelize H over m" in line}
    spent = {}
    for name in ("attention", "attention_backward"):
        operator, plan = case(lines[name])
        kernels = Kernels(plan, load("h100x8").gpu, operator)
        given = {**plan.program.extents, "S_q": 2**15, "S_kv": 2**15, "D": 8, "D_v": 8}
        extents = tuple(given[axis.name] for axis in plan.program.axes)
        spent[name] = kernels.call(extents, DIAGONAL, False)[0]
    gpu, scores = load("h100x8").gpu, {}
    for name, products, efficiency, start, tail in (
        ("attention", 2, gpu.attention_efficiency, gpu.block_start, gpu.causal_tail),
        ("attention_backward", 5, gpu.gradient_efficiency, gpu.gradient_start, 0.5),
    ):
        peak = gpu.matmul_flops_16 * efficiency
        heads = prod(plan.program.extents[axis] for axis in ("B", "H", "G"))
        longest, rows = 2**15 + start, heads * 2**15
        keys = rows * ((2**15 + 128) / 2 + start) + 128 * gpu.sms * tail * longest
        scores[name] = keys * (2 * products * 8 / peak + 1 / gpu.softmax_rate)
    assert spent == pytest.approx(scores, rel=1e-9)


def test_products_and_passes_of_bodies() -> None:
    """Every `@` with the axes that it runs over."""
    assert body_of(load_operator("matmul")).products == (("M", "K", "N"),)
    body = body_of(load_operator("attention_backward"))
    assert body.points == ("B", "H", "G")
    assert sorted(map(sorted, body.products)) == sorted(
        map(sorted, 3 * [("S_q", "S_kv", "D")] + 2 * [("S_q", "S_kv", "D_v")])
    )
    assert ("S_q", "S_kv") in body.passes


def test_a_matmul_takes_its_flops() -> None:
    """2 M N K at the GPU's fraction of the float32 peak."""
    line = next(x for x in CASES if x.startswith("matmul") and "replicate c over m" in x)
    operator, plan = case(line)
    gpu = load("h100x8").gpu
    kernels = Kernels(plan, gpu, operator)
    n = 2**14
    flops = 2 * n**3
    assert kernels.call((n, n, n), EVERY, False)[0] == pytest.approx(
        flops / (gpu.matmul_flops_32 * gpu.matmul_efficiency)
    )
