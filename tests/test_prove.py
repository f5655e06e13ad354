"""The static proof: good plans pass, with the bytes of the textbook; altered traces do not."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mercurygen.check.content import pack, unpack
from mercurygen.check.order import check_order
from mercurygen.check.prove import prove, prove_traces
from mercurygen.check.report import ProofError
from mercurygen.check.space import Space
from mercurygen.errors import Refusal
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.mesh import Link
from mercurygen.lower.events import (
    Alloc,
    Batch,
    Buffer,
    Cast,
    Collective,
    Event,
    Fill,
    Free,
    Kernel,
    Message,
    Pack,
    Return,
    Trace,
    Unpack,
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

Traces = tuple[Trace, ...]
Mutant = tuple[str, set[str], Traces]


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
            space = Space(plan)
            n = space.chunks
            pairs = n * (n + 1) // 2 if mask == "causal" else n * n
            assert report.contributions == pairs * space.heads
            assert report.tiles == n * space.heads
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
    start = time.perf_counter()
    report = prove(plan, links)
    spent = time.perf_counter() - start
    print(f"128 ranks, {report.messages} messages: {spent:.2f} s")
    assert spent < 10
    assert report.messages == 128 * 2 * (15 + 16 * 7)


@pytest.mark.parametrize("halves", [1, 2])
def test_pack_undoes_unpack(halves: int) -> None:
    plan = plan_of("a=2 b=3", ULYSSES.format("a, b"), order=("contiguous", "zigzag")[halves - 1])
    q, mesh = plan.program.tensor("q"), plan.program.mesh
    space, join = Space(plan), Interleaving(3, 1, halves)
    for by in ("heads", "sequence"):
        whole = space.pinned(q, 0)
        if by == "sequence":
            whole = replace(whole, chunks=plan.program.order.owned(mesh, {"a": (1,)}))
        parts = pack(whole, by, join)
        assert unpack(parts, by, join) == whole
        if by == "sequence":
            owned = [plan.program.order.owned(mesh, {"a": (1,), "b": (i,)}) for i in range(3)]
            assert [part.chunks for part in parts.parts] == owned


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


# --- mutations ----------------------------------------------------------------------------------


def edit(traces: Traces, rank: int, *edits: tuple[int, tuple[Event, ...]]) -> Traces:
    """The traces with some events of one rank, each by number, put in the place of others."""
    events: list[Event] = list(traces[rank].events)
    for index, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        events[index : index + 1] = new
    changed = replace(traces[rank], events=tuple(events))
    return (*traces[:rank], changed, *traces[rank + 1 :])


def everywhere(traces: Traces, kind: type, number: int, change: Callable) -> Traces:
    """The same change of the same event on all ranks: the event of this number among its kind."""
    for rank, one in enumerate(traces):
        index, event = found(one, kind)[number]
        traces = edit(traces, rank, (index, change(rank, event)))
    return traces


def found(one: Trace, kind: type | tuple[type, ...]) -> list[tuple[int, Event]]:
    return [(i, event) for i, event in enumerate(one.events) if isinstance(event, kind)]


def wait_of(one: Trace, op: int) -> int:
    return next(i for i, e in enumerate(one.events) if isinstance(e, Wait) and e.op == op)


def of_batches(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    mesh, batches = plan.program.mesh, found(traces[rank], Batch)
    for index, b in batches:

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        size, (first, *others) = mesh.extent(b.dim), b.sends
        away = [replace(m, peer=(m.peer + 1) % size) for m in b.sends]
        yield "drop a send", {"order"}, become(replace(b, sends=tuple(others)))
        yield "duplicate a send", {"order"}, become(replace(b, sends=(first, *b.sends)))
        yield "swap two sends", {"lineage"}, become(replace(b, sends=b.sends[::-1]))
        yield "send to a wrong peer", {"order"}, become(replace(b, sends=tuple(away)))
        yield "drop a receive", {"order", "buffers"}, become(replace(b, recvs=b.recvs[1:]))
        yield "swap two receives", {"lineage"}, become(replace(b, recvs=b.recvs[::-1]))
        back = [replace(m, peer=(m.peer + 1) % size) for m in b.recvs]
        yield "receive from a wrong peer", {"order"}, become(replace(b, recvs=tuple(back)))
        into = tuple(replace(m, buffer=s.buffer) for m, s in zip(b.recvs, b.sends, strict=True))
        yield "receive into what is sent", {"buffers"}, become(replace(b, recvs=into))
        given = tuple(replace(m, buffer=1) for m in b.recvs)
        yield "receive into the caller's", {"buffers"}, become(replace(b, recvs=given))
        for dim in mesh.names:
            if dim != b.dim:
                yield "wrong dimension", {"order"}, become(replace(b, dim=dim))
        at = wait_of(traces[rank], b.op)
        yield "missing wait", {"buffers", "order"}, become(at=at)
        yield "no batch", {"order", "buffers"}, edit(traces, rank, (index, ()), (at, ()))
        yield "batch twice", {"buffers", "order"}, become(b, b)
        if len(batches) > 1 and index != batches[0][0]:
            stale = batches[0][1].sends
            if stale != b.sends:
                sends = tuple(
                    replace(m, buffer=s.buffer) for m, s in zip(b.sends, stale, strict=True)
                )
                yield "send a stale tile", {"lineage", "buffers"}, become(replace(b, sends=sends))


def of_whole_rings(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    """The same mistake on every rank: everything matches, and the tiles are wrong."""
    mesh = plan.program.mesh
    for number, (_, b) in enumerate(found(traces[0], Batch)):

        def swapped(rank: int, event: Event) -> tuple[Event, ...]:
            sends = tuple(
                replace(m, peer=r.peer) for m, r in zip(event.sends, event.recvs, strict=True)
            )
            recvs = tuple(
                replace(m, peer=s.peer) for m, s in zip(event.recvs, event.sends, strict=True)
            )
            return (replace(event, sends=sends, recvs=recvs),)

        if mesh.extent(b.dim) > 2:
            yield "a step backwards", {"lineage"}, everywhere(traces, Batch, number, swapped)
        for dim in mesh.names:
            if dim == b.dim or mesh.extent(dim) != mesh.extent(b.dim):
                continue

            def turned(rank: int, event: Event, dim: str = dim) -> tuple[Event, ...]:
                size, me = mesh.extent(dim), mesh.coordinate(rank)[dim]
                sends = tuple(replace(m, peer=(me + 1) % size) for m in event.sends)
                recvs = tuple(replace(m, peer=(me - 1) % size) for m in event.recvs)
                return (replace(event, dim=dim, sends=sends, recvs=recvs),)

            yield "wrong dimension everywhere", {"lineage"}, everywhere(
                traces, Batch, number, turned
            )


def of_collectives(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    mesh, one = plan.program.mesh, traces[rank]
    collectives = found(one, Collective)
    for index, c in collectives:

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        at = wait_of(one, c.op)
        yield "missing wait", {"buffers"}, become(at=at)
        yield "no collective", {"buffers", "order"}, edit(traces, rank, (index, ()), (at, ()))
        yield "receive into what is sent", {"buffers"}, become(replace(c, target=c.source))
        for dim in mesh.names:
            if dim != c.dim:
                yield "wrong dimension", {"order"}, become(replace(c, dim=dim))
        kind = "all-gather" if c.kind == "all-to-all" else "all-to-all"
        yield "wrong kind", {"order"}, become(replace(c, kind=kind))
        if c.kind == "all-to-all":
            copied = next(e.source for _, e in found(one, Pack) if e.target == c.source)
            yield "send what is not in parts", {"lineage"}, become(replace(c, source=copied))
    for (i, one_c), (j, other) in itertools.pairwise(collectives):
        if (one_c.dim, one_c.kind) == (other.dim, other.kind) and j - i < 3:
            crossed = edit(traces, rank, (i, (other,)), (j, (one_c,)))
            yield "collectives crossed", {"lineage", "order"}, crossed


def of_kernels(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    one = traces[rank]
    for index, k in found(one, Kernel):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        (top, end), (left, right), causal = k.block
        rest = {"lineage"} if k.merge else {"lineage", "buffers"}
        yield "dropped block", rest, become()
        yield "doubled block", {"lineage"}, become(k, k)
        yield "merge or not", {"lineage", "buffers"}, become(replace(k, merge=not k.merge))
        flag = k.block._replace(causal=not causal)
        yield "wrong causal flag", {"lineage"}, become(replace(k, block=flag))
        for name, block in (
            ("shifted block", k.block._replace(cols=(left + 1, right + 1))),
            ("shifted block", k.block._replace(rows=(top + 1, end + 1))),
            ("narrower block", k.block._replace(cols=(left, right - 1))),
            ("lower block", k.block._replace(rows=(top, end - 1))),
            ("wider block", k.block._replace(cols=(left, right + 1))),
        ):
            yield name, {"lineage"}, become(replace(k, block=block))
        q, key, value = k.inputs
        yield "keys for values", {"lineage"}, become(replace(k, inputs=(q, value, key)))
        yield "no values", {"lineage"}, become(replace(k, inputs=(q, key)))
        yield "outputs swapped", {"lineage", "buffers", "memory"}, become(
            replace(k, outputs=k.outputs[::-1])
        )
        for at, w in found(one, Wait):
            started = (
                next(e for e in one.events if isinstance(e, Batch) and e.op == w.op)
                if any(isinstance(e, Batch) and e.op == w.op for e in one.events)
                else None
            )
            if started and at < index and {m.buffer for m in started.recvs} & set(k.inputs):
                late = edit(traces, rank, (at, ()), (index, (k, w)))
                yield "late wait", {"buffers"}, late


def of_copies(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    one = traces[rank]
    for index, c in found(one, (Pack, Unpack, Cast)):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        yield "dropped copy", {"buffers"}, become()
        yield "copy in place", {"lineage", "buffers"}, become(replace(c, target=c.source))
        if isinstance(c, Cast):
            continue
        join = c.join
        by = "heads" if c.by == "sequence" else "sequence"
        yield "wrong kind of copy", {"lineage"}, become(replace(c, by=by))
        yield "wrong number of parts", {"lineage"}, become(
            replace(c, join=replace(join, n=2 * join.n))
        )
        if c.by == "sequence":
            number = found(one, type(c)).index((index, c))
            wrong = replace(join, halves=3 - join.halves)
            yield "wrong join order", {"lineage"}, become(replace(c, join=wrong))
            wrong = replace(join, outer=2 * join.outer)
            yield "wrong join order", {"lineage"}, become(replace(c, join=wrong))

            def joined(r: int, event: Event, wrong: Interleaving = wrong) -> tuple[Event, ...]:
                return (replace(event, join=wrong),)

            yield "wrong join everywhere", {"lineage"}, everywhere(traces, type(c), number, joined)


def of_buffers(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    one = traces[rank]
    for index, event in found(one, (Alloc, Free, Fill, Return)):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        match event:
            case Alloc(buffer):
                used = any(
                    buffer in (getattr(e, "source", None), getattr(e, "target", None))
                    or buffer in (*getattr(e, "inputs", ()), *getattr(e, "outputs", ()))
                    for e in one.events
                )
                if used:
                    yield "not allocated", {"buffers"}, become()
                    yield "freed at once", {"buffers"}, become(event, Free(buffer))
                yield "allocated twice", {"buffers"}, become(event, event)
            case Free(buffer):
                yield "freed twice", {"buffers"}, become(event, event)
                yield "read when freed", {"buffers"}, become(event, Return("lse", buffer))
            case Fill(outputs):
                yield "not filled", {"buffers"}, become()
                last = found(one, Kernel)[-1][0] + 1
                late = edit(traces, rank, (last, (event, one.events[last])))
                yield "filled again", {"lineage"}, late
                yield "half filled", {"buffers"}, become(Fill(outputs[:1]))
            case Return(name, buffer):
                yield "no result", {"lineage"}, become()
                yield "another's result", {"lineage"}, become(Return(name, 0))
                yield "result of another name", {"lineage"}, become(Return("lse", buffer))
                yield "result twice", {"lineage"}, become(event, event)
                yield "result freed", {"buffers"}, become(event, Free(buffer))
                yield "result written", {"buffers"}, become(event, Fill((buffer,)))


def of_sizes(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """A buffer of another length, here, and on all ranks alike."""
    moved = {
        buffer
        for _, event in found(traces[rank], (Batch, Collective))
        for buffer in (
            [m.buffer for m in event.recvs] if isinstance(event, Batch) else [event.target]
        )
    }
    for number in sorted(moved):

        def longer(one: Trace, number: int = number) -> Trace:
            buffers = list(one.buffers)
            buffers[number] = replace(buffers[number], nbytes=2 * buffers[number].nbytes)
            return replace(one, buffers=tuple(buffers))

        changed = (*traces[:rank], longer(traces[rank]), *traces[rank + 1 :])
        yield "longer buffer", {"order"}, changed
    sent = [(b.source, b.target) for _, b in found(traces[0], Collective)]
    for pair in sent:

        def both(one: Trace, pair: tuple[int, int] = pair) -> Trace:
            buffers = [
                replace(b, nbytes=b.nbytes * 2) if i in pair else b
                for i, b in enumerate(one.buffers)
            ]
            return replace(one, buffers=tuple(buffers))

        yield "longer everywhere", {"memory", "order"}, tuple(map(both, traces))


def of_order(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    """Two communicators, each waited for at once, in opposite order on ranks across."""
    mesh = plan.program.mesh
    for (_, one), (_, other) in itertools.pairwise(found(traces[0], Batch)):
        if [one.dim, other.dim] != list(plan.nest.walks[:2]):
            continue

        def at_once(across: bool, ops: tuple[int, int] = (one.op, other.op)) -> Traces:
            changed = traces
            for each in traces:
                at = [next(i for i, e in found(each, Batch) if e.op == op) for op in ops]
                runs = [(each.events[i], Wait(each.events[i].op)) for i in at]
                if across and sum(mesh.coordinate(each.rank).values()) % 2:
                    runs.reverse()
                waits = [(wait_of(each, op), ()) for op in ops]
                changed = edit(
                    changed, each.rank, *waits, (at[0], (*runs[0], *runs[1])), (at[1], ())
                )
            return changed

        check_order(plan, at_once(False))
        yield "communicators crossed", {"order"}, at_once(True)


BASES = {
    "ring": ("m=4", RING.format("m"), {}),
    # (under a causal mask some tiles of a contiguous ring go unused: to swap those harms nothing)
    "full ring of three": ("m=3", RING.format("m"), {"order": "contiguous", "mask": "full"}),
    "gather": ("m=4", GATHER.format("m"), {}),
    "Ulysses": ("m=3", ULYSSES.format("m"), {}),
    "Ulysses in two stages": ("a=2 b=2", ULYSSES.format("a, b"), {}),
    "unified": ("a=2 b=2", ULYSSES.format("b") + RING.format("a"), {}),
    "double ring": ("a=2 b=2", DOUBLE.format("a", "b"), {}),
    "double ring of nine": ("a=3 b=3", DOUBLE.format("a", "b"), {}),
    "walk, gather inside": (
        "a=3 b=2",
        "parallelize S_q over a, b\n" + SHIFT.format("a") + SHARD.format("b"),
        {},
    ),
    "gather, walk inside": (
        "a=2 b=3",
        "parallelize S_q over a, b\n" + SHARD.format("a") + SHIFT.format("b"),
        {},
    ),
}


def mutants(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    for rank in (0, len(traces) - 1):
        yield from of_batches(plan, traces, rank)
        yield from of_collectives(plan, traces, rank)
        yield from of_kernels(plan, traces, rank)
        yield from of_copies(plan, traces, rank)
        yield from of_buffers(plan, traces, rank)
        yield from of_sizes(plan, traces, rank)
    yield from of_whole_rings(plan, traces)
    yield from of_order(plan, traces)


COUNTED: Counter = Counter()


@pytest.mark.parametrize("base", BASES)
def test_every_mutant_is_caught(base: str) -> None:
    mesh, body, options = BASES[base]
    plan, links = lowered(mesh, body, **options)
    traces, missed = traces_of(plan), []
    prove_traces(plan, traces, links)
    for name, checks, changed in mutants(plan, traces):
        try:
            prove_traces(plan, changed, links)
            missed.append(f"{name}: not caught")
        except ProofError as error:
            COUNTED[name, error.check] += 1
            if error.check not in checks:
                missed.append(f"{name}: {error}")
    assert not missed, f"{len(missed)} missed: " + "\n".join(missed[:20])


def test_mutants_were_many() -> None:
    for (name, check), count in sorted(COUNTED.items()):
        print(f"{count:5} {name}: {check}")
    print(f"{sum(COUNTED.values()):5} in all")
    assert not COUNTED or sum(COUNTED.values()) >= 150


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
