"""The static proof: good plans pass, with the bytes of the textbook; altered traces do not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from mutants import Traces, edit, found

from mercurygen.check.content import pack, unpack
from mercurygen.check.order import check_order
from mercurygen.check.prove import prove, prove_traces
from mercurygen.check.report import ProofError
from mercurygen.check.space import Space
from mercurygen.errors import Refusal
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.mesh import Link
from mercurygen.lower.events import (
    Batch,
    Buffer,
    Event,
    Kernel,
    Message,
    Trace,
    Wait,
)
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.schedule.apply import apply
from mercurygen.schedule.text import parse

SEQ, HEADS, KV_HEADS, HEAD_DIM = 48 * 24, 96, 48, 64
E = 2  # bytes of a bfloat16


def lowered(
    mesh: str,
    body: str,
    *,
    group: str = "",
    mask: str = "causal",
    order: str = "zigzag",
    pins: str = "",
    dims: str = "",
    seq: int = SEQ,
) -> tuple[Plan | Refusal, tuple[Link, ...]]:
    """The plan of a schedule, and the links of its group; the sequence pinned over everything."""
    levels = group or mesh
    dims = dims or ", ".join(word.partition("=")[0] for word in mesh.split())
    text = f"""operator attention
problem batch=1 seq={seq} heads={HEADS} kv_heads={KV_HEADS} head_dim={HEAD_DIM} bfloat16 {mask}
topology t sha256:0123456789abcdef {' '.join(f'{level} wire 25GB/s' for level in levels.split())}
group {levels}
tp 1
mesh {mesh}
order S: {order} over {dims}
{pins or f'pin q, k, v, out, lse: S over {dims}'}
{body}"""
    source = parse(text)
    return lower(apply(load("attention"), source.schedule, source.spans)), source.schedule.links


def plan_of(mesh: str, body: str, **options: str) -> Plan:
    plan, _ = lowered(mesh, body, **options)
    assert isinstance(plan, Plan)
    return plan


def traces_of(plan: Plan) -> Traces:
    return tuple(trace(plan, rank) for rank in range(plan.program.mesh.size))


RING = "parallelize S_q over {0}\nshift k, v: S_kv along {0}\n"
GATHER = "parallelize S_q over {0}\nshard k, v: S_kv over {0}\n"
ULYSSES = "parallelize H over {0}\n"
NEST = "parallelize S_q over node, gpu\n"
SHIFT, SHARD = "shift k, v: S_kv along {0}\n", "shard k, v: S_kv over {0}\n"
DOUBLE = "parallelize S_q over {0}, {1}\nshift k, v: S_kv along {0}, {1}\n"


# --- good plans -----------------------------------------------------------------------------------


def bodies(mesh: str) -> Iterator[str]:
    """Every design of the space: what each dimension splits, how tiles come by, in what nest."""
    names = [word.partition("=")[0] for word in mesh.split()]
    for axes in itertools.product(("S_q", "H"), repeat=len(names)):
        split = "".join(f"parallelize {a} over {n}\n" for n, a in zip(names, axes, strict=True))
        rows = [name for name, axis in zip(names, axes, strict=True) if axis == "S_q"]
        for nest in itertools.permutations(rows):
            for kinds in itertools.product((SHIFT, SHARD), repeat=len(nest)):
                lines = (k.format(n) for k, n in zip(kinds, nest, strict=True))
                yield split + "".join(lines)


MESHES = (
    *(("m=2", ""), ("m=3", ""), ("m=4", ""), ("all=16", "node=2 gpu=8"), ("all=6", "node=3 gpu=2")),
    *(("a=2 b=2", ""), ("a=2 b=3", ""), ("a=3 b=2", ""), ("a=2 b=4", "gpu=8")),
    *(("a=2 b=2 c=2", ""), ("a=2 b=3 c=2", "node=2 gpu=6")),
)


@pytest.mark.parametrize(("mesh", "group"), MESHES)
def test_every_design_is_proved(mesh: str, group: str) -> None:
    refused = proved = 0
    big = mesh.count("=") == 3
    for body in bodies(mesh):
        for mask, order in (("causal", "zigzag"), ("causal", "contiguous"), ("full", "zigzag")):
            if big and order == "contiguous" and "H" in body:
                continue
            plan, links = lowered(mesh, body, group=group, mask=mask, order=order)
            if isinstance(plan, Refusal):
                assert plan.slug == "mask-too-fragmented"
                refused += 1
                continue
            report = prove(plan, links)
            proved += 1
            count = Space(plan).count
            n, heads = count["S_q"], count["B"] * count["H"] * count["G"]
            pairs = n * (n + 1) // 2 if mask == "causal" else n * n
            assert report.contributions == pairs * heads
            assert report.tiles == n * heads
            assert report.with_lse.tiles == 2 * report.tiles
    assert proved >= 9 and refused <= proved // 10
    print(f"{mesh}: {proved} plans proved, {refused} refused")


PINS = {  # pins, the dimensions of the order, directives: heads that the caller holds split, ...
    "all by heads": (
        "pin q, k, v, out, lse: H over gpu\npin q, k, v, out, lse: S over node",
        "node",
    ),
    "inputs by heads": (
        "pin q, k, v: H over gpu\npin q, k, v: S over node\npin out, lse: S over node, gpu",
        "node, gpu",
    ),
    "outputs by heads": (
        "pin out, lse: H over gpu\npin out, lse: S over node\npin q, k, v: S over node, gpu",
        "node, gpu",
    ),
}


@pytest.mark.parametrize("name", PINS)
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_pins_of_heads(name: str, order: str) -> None:
    pins, dims = PINS[name]
    body = ULYSSES.format("gpu") + RING.format("node")
    plan, links = lowered("node=2 gpu=4", body, order=order, pins=pins, dims=dims)
    swaps = {"all by heads": 0, "inputs by heads": 1, "outputs by heads": 3}[name]
    assert prove(plan, links).traffic.steps["gpu"] == swaps


@pytest.mark.parametrize("whole", ["node", "gpu"])
def test_keys_that_are_given_whole(whole: str) -> None:
    split = "gpu" if whole == "node" else "node"
    pins = f"pin q, out, lse: S over node, gpu\npin k, v: S over {split}"
    for kind in (SHIFT, SHARD):
        body = NEST + f"replicate k, v over {whole}\n" + kind.format(split)
        plan, links = lowered("node=2 gpu=4", body, pins=pins)
        assert prove(plan, links).traffic.sent[whole].most == 0


def test_a_large_double_ring_in_time() -> None:
    plan, links = lowered("node=16 gpu=8", DOUBLE.format("node", "gpu"), seq=4096)
    start = time.process_time()
    report = prove(plan, links)
    spent = time.process_time() - start
    print(f"128 ranks, {report.messages} messages: {spent:.2f} s of one core")
    assert report.messages == 128 * 2 * (15 + 16 * 7)


@pytest.mark.parametrize("halves", [1, 2])
def test_pack_undoes_unpack(halves: int) -> None:
    plan = plan_of("a=2 b=3", ULYSSES.format("a, b"), order=("contiguous", "zigzag")[halves - 1])
    q, mesh = plan.program.tensor("q"), plan.program.mesh
    space, join = Space(plan), Interleaving(3, 1, halves)
    for axis in ("H", "S_q"):
        whole = space.pinned(q, 0)
        if axis == "S_q":
            owned = plan.program.order.owned(mesh, {"a": (1,)})
            region = (whole.region[0], owned, *whole.region[2:])
        else:
            heads = tuple(range(space.count["H"]))
            region = (*whole.region[:2], heads, *whole.region[3:])
        whole = replace(whole, region=region)
        parts = pack(whole, axis, replace(join, halves=halves if axis == "S_q" else 1), (0, 1))
        joined = unpack(parts, axis, replace(join, halves=halves if axis == "S_q" else 1))
        assert joined == whole
        if axis == "S_q":
            each = [plan.program.order.owned(mesh, {"a": (1,), "b": (i,)}) for i in range(3)]
            assert [part.atoms("S_q") for part in parts.parts] == each


# --- bytes: the formulas of reference/schedules.md, section 4 -------------------------------------


def sizes(ranks: int) -> tuple[float, float, float]:
    """Elements of q, of k and v, of lse, on one rank: Q, KV, L of the reference."""
    tokens = SEQ / ranks
    return tokens * HEADS * HEAD_DIM, 2 * tokens * KV_HEADS * HEAD_DIM, tokens * HEADS


W, w = 3, 4  # nodes, GPUs of a node
Q, KV, L = sizes(W * w)
A2A = (2 * Q + KV) * E
TWO = "node=3 gpu=4"
FORMULAS = [  # design, mesh, body, bytes along node and gpu, steps there
    ("4.1 ring", "all=12", RING.format("all"), {"all": 11 * KV * E}, {"all": 11}),
    ("4.4 Ulysses", "all=12", ULYSSES.format("all"), {"all": 11 / 12 * A2A}, {"all": 4}),
    ("4.7 all-gather", "all=12", GATHER.format("all"), {"all": 11 * KV * E}, {"all": 2}),
    (
        "4.5 hybrid",
        TWO,
        ULYSSES.format("gpu") + RING.format("node"),
        {"gpu": (w - 1) / w * A2A, "node": (W - 1) * KV * E},
        {"gpu": 4, "node": W - 1},
    ),
    (
        "4.6 double ring",
        TWO,
        DOUBLE.format("node", "gpu"),
        {"gpu": W * (w - 1) * KV * E, "node": (W - 1) * KV * E},
        {"gpu": W * (w - 1), "node": W - 1},
    ),
    (
        "4.6, the other nesting",
        TWO,
        NEST + "shift k, v: S_kv along gpu, node\n",
        {"gpu": (w - 1) * KV * E, "node": w * (W - 1) * KV * E},
        {"gpu": w - 1, "node": w * (W - 1)},
    ),
    (
        "walk, gather inside",
        TWO,
        NEST + SHIFT.format("node") + SHARD.format("gpu"),
        {"gpu": W * (w - 1) * KV * E, "node": (W - 1) * KV * E},
        {"gpu": 2 * W, "node": W - 1},
    ),
    (
        "gather, walk inside",
        TWO,
        NEST + SHARD.format("node") + SHIFT.format("gpu"),
        {"gpu": (w - 1) * W * KV * E, "node": (W - 1) * KV * E},
        {"gpu": w - 1, "node": 2},
    ),
    (
        "4.4, two stages",
        TWO,
        ULYSSES.format("node, gpu"),
        {"gpu": (w - 1) / w * A2A, "node": (W - 1) / W * A2A},
        {"gpu": 4, "node": 4},
    ),
]


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("design", "mesh", "body", "sent", "steps"), FORMULAS)
def test_bytes_of_the_reference(
    design: str, mesh: str, body: str, sent: dict[str, float], steps: dict[str, int], order: str
) -> None:
    plan, links = lowered(mesh, body, group=TWO, order=order)
    traffic = prove(plan, links).traffic
    for dim, nbytes in sent.items():
        assert traffic.sent[dim].mean == traffic.sent[dim].most == pytest.approx(nbytes, abs=0.1)
    assert traffic.steps == steps
    if mesh == TWO:  # each dimension is a level
        assert {k: v.values for k, v in traffic.crossing.items()} == {
            k: v.values for k, v in traffic.sent.items()
        }


def test_bytes_of_lse() -> None:
    plan, links = lowered("all=12", ULYSSES.format("all"))
    report = prove(plan, links)
    more = report.with_lse.traffic.sent["all"].most - report.traffic.sent["all"].most
    assert more == pytest.approx(11 / 12 * L * 4, abs=0.1)
    assert report.with_lse.traffic.steps == {"all": 5}


def test_a_flat_ring_crosses_the_border_on_the_last_rank_of_a_node() -> None:
    plan, links = lowered("all=12", RING.format("all"), group=TWO)
    crossing = prove(plan, links).traffic.crossing
    lap = round(11 * KV * E)
    assert crossing["node"].values == (0, 0, 0, lap) * 3
    assert crossing["gpu"].values == (lap, lap, lap, 0) * 3


def test_a_flat_gather_crosses_the_border_on_all_ranks_in_turn() -> None:
    """NCCL lays several rings: what the three edges between nodes carry is spread evenly."""
    plan, links = lowered("all=12", GATHER.format("all"), group=TWO)
    crossing = prove(plan, links).traffic.crossing
    lap = round(11 * KV * E)
    assert crossing["node"].values == (lap * 3 // 12,) * 12
    assert crossing["gpu"].values == (lap * 9 // 12,) * 12


def test_a_flat_all_to_all_crosses_the_border_to_each_rank_beyond() -> None:
    plan, links = lowered("all=12", ULYSSES.format("all"), group=TWO)
    crossing = prove(plan, links).traffic.crossing
    assert crossing["node"].mean == crossing["node"].most == pytest.approx(8 / 12 * A2A, abs=0.1)
    assert crossing["gpu"].mean == pytest.approx(3 / 12 * A2A, abs=0.1)


def test_dimensions_that_share_a_level() -> None:
    body = "parallelize S_q over a, b\nshift k, v: S_kv along a, b\n"
    plan, links = lowered("a=3 b=4", body, group="node=1 gpu=12")
    traffic = prove(plan, links).traffic
    assert traffic.crossing["node"].most == 0
    assert traffic.crossing["gpu"].most == traffic.sent["a"].most + traffic.sent["b"].most


# --- order, by hand -----------------------------------------------------------------------------


def by_hand(script: dict[int, list[tuple]]) -> Traces:
    """Traces of batches: per rank ("dim", peer, "send" or "recv" or "both") or ("wait", op)."""
    traces = []
    for rank, lines in sorted(script.items()):
        events: list[Event] = []
        for number, line in enumerate(lines):
            if line[0] == "wait":
                events.append(Wait(line[1]))
                continue
            dim, peer, way = line
            sends = (Message(peer, 0),) if way != "recv" else ()
            recvs = (Message(peer, 1),) if way != "send" else ()
            events.append(Batch(number, dim, sends, recvs))
        traces.append(Trace(rank, tuple(events), (Buffer("x", 8), Buffer("y", 8)), {}))
    return tuple(traces)


@pytest.mark.parametrize("warm", [False, True])
def test_two_ranks_in_opposite_order_of_two_communicators(warm: bool) -> None:
    """Ranks 1 and 2 go along b first, 0 and 3 along a: everyone waits, around the square."""
    plan = plan_of("a=2 b=2", DOUBLE.format("a", "b"))
    script, apart = {}, {}
    for rank in range(4):
        along = {"a": ("a", 1 - rank // 2, "both"), "b": ("b", 1 - rank % 2, "both")}
        lines = [along["a"], ("wait", 0), along["b"], ("wait", 2)] * (1 + warm)
        if warm:
            lines[5:] = [("wait", 4), along["b"], ("wait", 6)]
        swapped = list(lines)
        swapped[-4], swapped[-2] = lines[-2], lines[-4]
        script[rank], apart[rank] = lines, swapped if rank in (1, 2) else lines
    assert check_order(plan, by_hand(script)).messages == 8 * (1 + warm)
    with pytest.raises(ProofError, match="closes the circle") as error:
        check_order(plan, by_hand(apart))
    assert error.value.check == "order"
    print(error.value)


TWO_RANKS = {
    "one batch": ([("m", 1, "both"), ("wait", 0)], None),
    "send, then receive": (
        [("m", 1, "send"), ("wait", 0), ("m", 1, "recv"), ("wait", 2)],
        "closes the circle",
    ),
    "one queue": (
        [("m", 1, "send"), ("m", 1, "recv"), ("wait", 0), ("wait", 1)],
        "closes the circle",
    ),
    "to itself": ([("m", 0, "both"), ("wait", 0)], "to itself"),
    "no such peer": ([("m", 2, "both"), ("wait", 0)], "peer 2 of 2"),
    "nobody waits": ([("m", 1, "both")], "nobody waits"),
    "no match": ([("m", 1, "send"), ("wait", 0)], "needs rank 1's side"),
    "waits twice": ([("m", 1, "both"), ("wait", 0), ("wait", 0)], "not in flight"),
    "no such dimension": ([("n", 1, "both"), ("wait", 0)], "no dimension n"),
}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str) -> None:
    lines, fault = TWO_RANKS[name]
    plan = plan_of("m=2", RING.format("m"))
    mirrored = [(line[0], 1 - line[1], line[2]) if len(line) == 3 else line for line in lines]
    if fault is None:
        check_order(plan, by_hand({0: lines, 1: mirrored}))
        return
    with pytest.raises(ProofError, match=fault):
        check_order(plan, by_hand({0: lines, 1: mirrored}))


def test_the_first_operation_needs_all_members() -> None:
    plan = plan_of("m=3", RING.format("m"))
    pair = {0: [("m", 1, "both"), ("wait", 0)], 1: [("m", 0, "both"), ("wait", 0)], 2: []}
    with pytest.raises(ProofError, match="all its members must come, rank 2 too"):
        check_order(plan, by_hand(pair))


# --- what is wrong, in words ------------------------------------------------------------------


def test_errors_read_well() -> None:
    plan, links = lowered("m=4", RING.format("m"))
    traces = traces_of(plan)
    index, kernel = found(traces[2], Kernel)[1]
    with pytest.raises(ProofError) as error:
        prove_traces(plan, edit(traces, 2, (index, (kernel, kernel))), links)
    message = str(error.value)
    print(message)
    assert message.startswith("lineage: rank 2: event ")
    assert "a second time" in message and "of out" in message
