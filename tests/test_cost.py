"""The cost model: bytes and memory exactly, times against formulas worked out here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.simulate import simulate
from mercurygen.cost.topology import Topology, load
from mercurygen.errors import Refusal
from mercurygen.ir.problem import DTYPES, Problem
from mercurygen.lower.events import Batch, Collective
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load as load_operator
from mercurygen.search.place import links
from mercurygen.search.space import points, settle

SMALL = Problem(batch=2, seq=192, heads=8, kv_heads=4, head_dim=12, v_head_dim=20)
GROUPS = [("a100x16", (2, 4)), ("a100x16", (2, 2)), ("h100x8", (6,)), ("a100x32", (4, 2))]


def machine(name: str, group: tuple[int, ...]) -> Topology:
    """A shipped topology with levels of just these sizes."""
    topology = load(name)
    sized = zip(topology.levels, group, strict=True)
    return replace(topology, levels=tuple(replace(x, size=n, port_gpus=1) for x, n in sized))


def plans(problem: Problem, topology: Topology, **options) -> Iterator[tuple[Plan, str | None]]:
    """Legal plans, plain and relayed, of rows and heads, and the design of each.

    `test_closed.py` has the others.
    """
    spanned = links(topology, tuple(level.size for level in topology.levels))
    options["axes"] = ("S_q", "H")
    for point in points(load_operator("attention"), problem, spanned, **options):
        settled = settle(point)
        words = " ".join(map(str, point.directives)).replace(",", " ").split()
        if isinstance(settled, Refusal) or {"direct", "both", "tile"} & set(words):
            continue
        plan = lower(settled[0])
        if not isinstance(plan, Refusal):
            yield plan, point.design


def network(topology: Topology) -> Network:
    """All of a topology."""
    return Network(topology, tuple(level.size for level in topology.levels))


def only(problem: Problem, topology: Topology, design: str) -> Plan:
    """The first instance of a design."""
    return next(plan for plan, _ in plans(problem, topology, design=design))


# --- bytes and memory -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("name, group", GROUPS)
def test_closed_and_simulated_agree_with_traces(name: str, group: tuple, mask: str) -> None:
    """Bytes along each dimension, operations and peak memory, on every rank of every candidate."""
    topology = machine(name, group)
    net, seen = network(topology), 0
    for plan, _ in plans(replace(SMALL, mask=mask), topology, order="any"):
        one, other = closed.cost(plan, net), simulate(plan, net)
        traces = [trace(plan, rank) for rank in range(plan.program.mesh.size)]
        assert one.peak_memory == other.peak_memory == max(t.peak() for t in traces)
        sent = [_sent(plan, t) for t in traces]
        for a, b in zip(one.dims, other.dims, strict=True):
            along = [counted[a.name] for counted in sent]
            assert a == b
            assert a.mean == sum(along) / len(along) and a.most == max(along)
        assert one.links == other.links
        total = sum(x.mean for x in one.dims)
        assert sum(x.mean for x in one.links) == pytest.approx(total, rel=1e-12)
        number = sum(isinstance(e, Batch | Collective) for e in traces[0].events)
        assert one.operations == other.operations == number
        assert one.imbalance == pytest.approx(other.imbalance)
        seen += 1
    assert seen > 20


def _sent(plan: Plan, played) -> Counter[str]:
    """Bytes that a rank sends along each dimension, from its events."""
    sent: Counter[str] = Counter()
    for event in played.events:
        match event:
            case Batch(dim=dim, sends=sends):
                sent[dim] += sum(played.buffers[m.buffer].nbytes for m in sends)
            case Collective(dim=dim, kind=kind, source=source):
                n, size = plan.program.mesh.extent(dim), played.buffers[source].nbytes
                sent[dim] += size * (n - 1) // (n if kind == "all-to-all" else 1)
    return sent


CLASSIC = [
    *("ring", "allgather-kv", "ulysses", "unified", "double-ring", "unified-double-ring"),
]


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("design", CLASSIC)  # test_formulas.py has the others
def test_formulas_of_the_designs(design: str, mask: str) -> None:
    """Bytes and operations as in schedules.md 4.1, 4.4 to 4.7."""
    problem = Problem(seq=65536, heads=32, kv_heads=16, mask=mask)
    topology = load("a100x16")
    ranks, e = topology.size, DTYPES[problem.dtype]
    q = problem.seq // ranks * problem.heads * problem.head_dim * e
    kv = 2 * problem.seq // ranks * problem.kv_heads * problem.head_dim * e
    instances = [plan for plan, name in plans(problem, topology) if name == design]
    assert instances
    for plan in instances:
        sizes = [dim.size for dim in plan.program.mesh.dims]
        swap = [(n - 1) * (2 * q + kv) // n for n in sizes]
        expected = {
            "ring": ([(sizes[0] - 1) * kv], sizes[0] - 1),
            "allgather-kv": ([(sizes[0] - 1) * kv], 2),
            "ulysses": ([swap[0]], 4),
        }
        if len(sizes) >= 2:
            outer, inner = sizes[:2]
            rings = [(outer - 1) * kv, outer * (inner - 1) * kv]
            steps = outer - 1 + outer * (inner - 1)
            expected["unified"] = ([rings[0], swap[1]], 4 + outer - 1)
            expected["double-ring"] = (rings, steps)
            expected["unified-double-ring"] = ([*rings, swap[-1]], 4 + steps)
        found = closed.cost(plan, network(topology))
        assert ([x.most for x in found.dims], found.operations) == expected[design]
        assert all(x.mean == x.most for x in found.dims)


def test_levels_of_a_merged_ring() -> None:
    """One rank of a node sends to the next node, by whom NCCL's rings take turns."""
    problem, topology = Problem(), load("a100x16")
    kv = 2 * problem.seq // 16 * 8 * 128 * 2
    node, gpu = closed.cost(only(problem, topology, "ring"), network(topology)).links
    assert (node.most, node.mean) == (15 * kv, 15 * kv * 2 / 16)
    assert (gpu.most, gpu.mean) == (15 * kv, 15 * kv * 14 / 16)
    node, gpu = closed.cost(only(problem, topology, "allgather-kv"), network(topology)).links
    assert node.most == node.mean == 15 * kv * 2 / 16
    assert gpu.most == gpu.mean == 15 * kv * 14 / 16


# --- times ----------------------------------------------------------------------------------


def quick(topology: Topology) -> Topology:
    """With a host that takes no time."""
    return replace(topology, gpu=replace(topology.gpu, host_launch=0.0, host_transfer=0.0))


def test_all_gather_on_one_idle_level() -> None:
    """The simulated ring: n - 1 latencies and n - 1 shards, once launched."""
    problem, topology = Problem(), quick(load("h100x8"))
    level, shard = topology.levels[0], problem.seq // 8 * 8 * 128 * 2
    step = level.latency + shard / (level.bandwidth * level.efficiency)
    plan = only(problem, topology, "allgather-kv")
    for found in (simulate(plan, network(topology)), closed.cost(plan, network(topology))):
        each = level.base_latency + 7 * step
        assert found.times.transfers == pytest.approx(2 * each, rel=1e-12)
        assert found.times.exposed == pytest.approx(
            2 * (each + topology.gpu.launch_latency), rel=1e-12
        )


def test_all_to_all_on_one_idle_level() -> None:
    """Seven eighths of a buffer leave at the speed of the GPU's own links."""
    problem, topology = Problem(), load("h100x8")
    level = topology.levels[0]
    rate = level.bandwidth * level.efficiency
    sizes = [problem.seq // 8 * heads * 128 * 2 for heads in (32, 8, 8, 32)]
    latency = level.base_latency + level.latency
    expected = sum(latency + 7 / 8 * size / rate for size in sizes)
    found = simulate(only(problem, topology, "ulysses"), network(topology))
    assert found.times.transfers == pytest.approx(expected, rel=1e-12)


def test_balanced_ring_hides_its_transfers() -> None:
    """Under a zigzag every step has the same work, and NVLink is faster than it."""
    topology = quick(load("h100x8"))
    found = simulate(only(Problem(), topology, "ring"), network(topology))
    assert found.imbalance == pytest.approx(1, rel=0.01)
    slowed = found.times.transfers * 16 / 132  # by the SMs that move it
    assert found.times.exposed == pytest.approx(slowed, rel=0.01)


def test_the_host_of_short_steps_sets_the_pace() -> None:
    """A ring of tiny tiles: 7 batches of 4 messages, and the launches between them."""
    problem, topology = Problem(seq=1024, heads=8, kv_heads=8), load("h100x8")
    gpu, plan = topology.gpu, only(problem, topology, "ring")
    for found in (simulate(plan, network(topology)), closed.cost(plan, network(topology))):
        assert 28 * gpu.host_transfer < found.time < 1.5 * 28 * gpu.host_transfer
        assert found.times.exposed > 0.5 * found.time


def test_slow_link_is_exposed() -> None:
    """With a link a thousand times slower the ring takes its transfers' time."""
    topology = load("h100x8")
    level = replace(topology.levels[0], bandwidth=topology.levels[0].bandwidth / 1000)
    slow = replace(topology, levels=(level,))
    plan = only(Problem(), slow, "ring")
    kv = 2 * Problem().seq // 8 * 8 * 128 * 2
    hop = (
        level.base_latency
        + level.latency
        + kv / (level.bandwidth * level.efficiency)
        + slow.gpu.launch_latency
    )
    for found in (simulate(plan, network(slow)), closed.cost(plan, network(slow))):
        assert 7 * hop < found.time < 7 * hop + found.times.compute
        assert found.times.exposed > 0.9 * found.time


def test_kernel_time_is_the_blocks_of_its_grid() -> None:
    """One rank: half of all scores and half a tile a row; then the longest block is waited for."""
    topology = machine("h100x8", (1,))
    problem = Problem(seq=65536)
    (plan,) = [plan for plan, _ in plans(problem, topology)]
    gpu, blocks = topology.gpu, problem.heads * problem.seq // 128
    score = 4 * 128 / (gpu.matmul_flops_16 * gpu.attention_efficiency) + 1 / gpu.softmax_rate
    keys = blocks * ((problem.seq + 128) / 2 + 100) + gpu.sms * (problem.seq + 100)
    expected = 128 * keys * score
    found = closed.cost(plan, network(topology))
    assert found.time == simulate(plan, network(topology)).time == pytest.approx(expected)
    assert found.links == found.dims == ()


def test_tiny_kernels_take_their_launch() -> None:
    """Nothing is shorter than a launch."""
    topology = machine("h100x8", (1,))
    (plan,) = [plan for plan, _ in plans(Problem(seq=16, heads=1, kv_heads=1), topology)]
    found = closed.cost(plan, network(topology))
    launch = topology.gpu.launch_latency
    assert found.time == pytest.approx(launch, rel=0.01)
    assert found.times.launch < launch


def test_contiguous_causal_ring_is_imbalanced() -> None:
    """The last rank works at every step: nearly twice the mean."""
    topology = load("h100x8")
    plans_of = {
        order: next(p for p, _ in plans(Problem(), topology, design="ring", order=order))
        for order in ("contiguous", "zigzag")
    }
    net = network(topology)
    late, even = (simulate(plans_of[order], net) for order in ("contiguous", "zigzag"))
    assert late.imbalance == pytest.approx(15 / 8, rel=0.01)  # r + 1/2 of 8 blocks, mean 4
    assert late.times.compute == pytest.approx(even.times.compute * 15 / 8, rel=0.02)


# --- shared links ---------------------------------------------------------------------------


def test_four_gpus_share_a_port() -> None:
    """A shift from switch to switch takes the port four times as long as one GPU would."""
    topology = load("l40x8")
    outer, mesh = topology.levels[0], only(Problem(), topology, "unified").program.mesh
    price = network(topology).price("shift", mesh, "switch")
    rate = outer.port_bandwidth * outer.efficiency
    assert dict(price.seconds)[0] == pytest.approx(4 / rate)
    assert price.latency == outer.base_latency + outer.latency


def test_siblings_share_the_port_too() -> None:
    """Half the ranks, and tensor-parallel or data-parallel siblings: the port is as busy."""
    topology = load("l40x8")
    whole = Network(topology, (2, 4))
    for half in (Network(topology, (2, 2), 2), Network(topology, (2, 2), 1)):
        for net, far in ((whole, 4), (half, 2)):
            busy: Counter[int] = Counter()
            for rank in range(far):
                for resource, seconds in net.path(rank, rank + far).seconds:
                    busy[resource] += seconds
            assert max(busy.values()) == pytest.approx(4 / (20.8e9 * 0.38))


def test_racks_and_nodes_share_a_gpus_port() -> None:
    """A transfer to another rack is out of the NIC that one to another node is out of."""
    net = network(load("racks-h100x128"))
    far, near = (dict(net.path(0, other).seconds) for other in (32, 8))
    assert len(set(near) & set(far)) == 1  # in, they go to other GPUs
    assert {net.levels[resource] for resource in near} == {1}
    inside = network(load("a100x16"))
    assert {inside.levels[resource] for resource, _ in inside.path(0, 8).seconds} == {0}


def test_ranks_of_one_node_do_not_cross_nodes() -> None:
    """The level of a path is the outermost on which its ends differ."""
    net = network(load("a100x16"))
    assert (net.path(0, 7).level, net.path(7, 8).level) == (1, 0)
    base = 8.4e-6
    latencies = net.path(0, 7).latency, net.path(7, 8).latency
    assert latencies == pytest.approx((base + 3.4e-6, base + 14e-6))
