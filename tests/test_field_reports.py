"""The field reports within this space: each has a test that names its number.

B01 to B92 are failures of schedules written by hand; several are also tested elsewhere.
"""

from __future__ import annotations

import ast
import re
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numeric_cases
import pytest
import reference
import torch
from emitted import DESIGNS, Emitted, instances, one, written
from numeric_cases import (
    Problem,
    assert_refused,
    check_forward,
    check_large_gaps,
    check_overlap,
    check_sees_others,
    check_single,
    check_views,
    check_wrong_world,
    own_inputs,
    recorded,
    setup,
)
from ranks import Ranks, run_ranks

from mercurygen.check.prove import prove_traces
from mercurygen.check.report import ProofError
from mercurygen.cost.topology import load
from mercurygen.emit.callsites import check_text
from mercurygen.errors import Refusal, UserError
from mercurygen.ir import problem as ir
from mercurygen.lower.events import Batch, Message, Trace
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.schedule.directives import Parallelize
from mercurygen.search.search import search
from mercurygen.search.why import why

REPORTS = [
    1,
    2,
    4,
    7,
    10,
    11,
    13,
    14,
    16,
    17,
    24,
    25,
    26,
    27,
    30,
    31,
    40,
    42,
    44,
    45,
    47,
    60,
    61,
    64,
    65,
]
REPORTS += [6, 8, 34, 51, 73, 74, 77, 78, 81, 83, 84, 92]
REPORTS += [19, 20, 22, 33, 36, 37, 50, 54, 55, 56, 58, 67, 69, 70, 71, 72, 80, 86, 88]
RANKS = {world: Ranks(world) for world in (2, 3, 4, 5, 8, 16)}
SIZES = {  # where each design is tried
    "ring": (4,),
    "allgather-kv": (4,),
    "ulysses": (4,),
    "unified": (2, 2),
    "double-ring": (2, 2),
    "unified-double-ring": (2, 2, 2),
}


def problem_for(world: int, **changes: Any) -> Problem:
    """No two sizes alike."""
    return replace(Problem(seq=20 * world, batch=3, value_dim=36), **changes)


def design(name: str, **changes: Any) -> tuple[Emitted, Problem]:
    """A named design where it is tried, and a problem for it."""
    problem = problem_for(prod(SIZES[name]), **changes)
    return one(name, SIZES[name], problem), problem


ALL = {name: design(name) for name in DESIGNS}


def refusal(name: str, sizes: tuple[int, ...], problem: Problem) -> UserError:
    """Why the first instance of a design is refused."""
    found = next(instances(name, sizes, problem))
    assert isinstance(found, Refusal)
    return found.error()


def test_every_report_is_named() -> None:
    """The number of each stands in a test's name or docstring."""
    named: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = f"{node.name} {ast.get_docstring(node)}"
                named |= {x.upper() for x in re.findall(r"\b[bB]\d\d(?=\b|_)|(?<=_)b\d\d", text)}
    missing = {f"B{number:02}" for number in REPORTS} - named
    assert not missing


# --- numerics -------------------------------------------------------------------------------

GROWING = Problem(seq=640, heads=4, kv_heads=2, head_dim=40, batch=1)


def check_accumulates_wide(rank: int, world: int, text: str, problem: Problem) -> float:
    """The error of out in bfloat16; every merge is in float32, and the result is cast once."""
    module, mesh = setup(text)
    merged = []

    def merge(out: torch.Tensor, lse: torch.Tensor, *share: torch.Tensor) -> None:
        merged.append((out.dtype, lse.dtype, share[1].dtype))
        original(out, lse, *share)

    original = getattr(module, "_merge", None)
    with pytest.MonkeyPatch.context() as patch:
        if original:
            patch.setattr(module, "_merge", merge)
        error = check_forward(rank, world, text, problem, torch.bfloat16)[0]
    assert set(merged) <= {(torch.float32,) * 3}, merged
    assert mesh is not None and (merged or original is None)
    return error


GROWS = {
    "ring": {2: (2,), 4: (4,), 8: (8,), 16: (16,)},
    "allgather-kv": {2: (2,), 4: (4,), 8: (8,), 16: (16,)},
    "double-ring": {4: (2, 2), 8: (2, 4), 16: (4, 4)},
}
for _name, _meshes in GROWS.items():
    for _world, _sizes in _meshes.items():
        _late = one(_name, _sizes, GROWING).late
        RANKS[_world].add(f"b01 {_name}", check_accumulates_wide, _late, GROWING)


def error_alone() -> float:
    """The error of the kernel on one device, in bfloat16."""
    q, k, v = GROWING.inputs(torch.bfloat16)
    want, _ = reference.attention(q, k, v, GROWING.mask)
    share = GROWING.heads // GROWING.kv_heads
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(share, 2) for x in (k, v))))
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (got.transpose(1, 2).double() - want).abs().max().item()


@pytest.mark.parametrize("name", GROWS)
def test_b01_error_does_not_grow_with_ranks(name: str) -> None:
    """B01: bfloat16 on 2 to 16 ranks, one sequence; no worse than 2.5 times one device."""
    errors = {world: max(RANKS[world].result(f"b01 {name}")) for world in GROWS[name]}
    print(name, errors, error_alone())
    assert errors[16] <= 1.5 * errors[min(errors)], errors
    assert max(errors.values()) <= 2.5 * error_alone() + 2e-3, errors


GAPS = [
    (name, causal, dtype)
    for name in ("ring", "allgather-kv", "double-ring", "unified", "unified-double-ring")
    for causal in (True, False)
    for dtype in (torch.float32, torch.bfloat16)
]
for _name, _causal, _dtype in GAPS:
    _emitted, _problem = design(_name, causal=_causal)
    RANKS[_emitted.world].add(
        f"b02 {_name} {_causal} {_dtype}", check_large_gaps, _emitted.late, _problem, _dtype
    )


@pytest.mark.parametrize("name, causal, dtype", GAPS)
def test_b02_large_gaps_between_lse(name: str, causal: bool, dtype: torch.dtype) -> None:
    """B02: no exponential of a raw difference; +-300 and more between blocks."""
    RANKS[ALL[name][0].world].result(f"b02 {name} {causal} {dtype}")


LAYOUTS = [
    (name, c, order)
    for name in DESIGNS
    for c in (True, False)
    for order in ("zigzag", "contiguous")
]
for _name, _causal, _order in LAYOUTS:
    _emitted, _problem = design(_name, causal=_causal, order=_order)
    RANKS[_emitted.world].add(
        f"b07 {_name} {_causal} {_order}", check_forward, _emitted.late, _problem, torch.float64
    )


@pytest.mark.parametrize("name, causal, order", LAYOUTS)
def test_b07_every_layout_under_every_mask(name: str, causal: bool, order: str) -> None:
    """B07: right for each pair of token order and mask that is accepted."""
    RANKS[ALL[name][0].world].result(f"b07 {name} {causal} {order}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DESIGNS)
def test_b07_striped_is_right_or_refused(name: str, causal: bool) -> None:
    """B07: a striped order gives a module that says so, or is refused by what it cannot do."""
    problem = problem_for(prod(SIZES[name]), causal=causal, order="striped")
    for found in instances(name, SIZES[name], problem):
        if isinstance(found, Refusal):
            assert found.slug == "mask-not-cuttable" and causal
        else:
            assert "S: striped over" in found.text
            assert check_text(found.text, found.plan).events


# --- order of messages ----------------------------------------------------------------------


def altered(world: int, rank: int, change: Any) -> tuple[Plan, tuple[Trace, ...], Any]:
    """A ring's traces, the last exchange of one rank changed."""
    emitted = one("ring", (world,), problem_for(world))
    traces = [trace(emitted.plan, i) for i in range(world)]
    events = list(traces[rank].events)
    where = max(i for i, event in enumerate(events) if isinstance(event, Batch))
    events[where] = change(events[where])
    traces[rank] = replace(traces[rank], events=tuple(events))
    return emitted.plan, tuple(traces), emitted.schedule.links


CHANGES = {
    "a send is missing": lambda b: replace(b, sends=b.sends[1:]),
    "a receive too many": lambda b: replace(b, recvs=(*b.recvs, b.recvs[0])),
    "another peer": lambda b: replace(
        b, sends=(Message(b.recvs[0].peer, b.sends[0].buffer), b.sends[1])
    ),
    "in another order": lambda b: replace(b, sends=b.sends[::-1]),
}


@pytest.mark.parametrize(
    "change, world", [(c, w) for c in CHANGES for w in (2, 3, 4) if (c, w) != ("another peer", 2)]
)
def test_b11_unmatched_operations_fail_the_proof(change: str, world: int) -> None:
    """B11: what gloo would let pass; the intact schedule is proved."""
    plan, traces, links = altered(world, 1, lambda batch: batch)
    prove_traces(plan, traces, links)
    plan, traces, links = altered(world, 1, CHANGES[change])
    with pytest.raises(ProofError) as caught:
        prove_traces(plan, traces, links)
    assert caught.value.check in ("order", "buffers", "lineage")


def check_with_sleeps(rank: int, world: int, text: str, problem: Problem, iterations: int) -> None:
    """The same result, bit by bit, however late each rank is."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    first = module.attention(*local, mesh, return_lse=True)
    random = torch.Generator().manual_seed(problem.seed + rank)

    def late(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(torch.rand((), generator=random).item() / 500)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_block_forward", "_shift", "_all_to_all", "_all_gather"):
            if hasattr(module, name):
                patch.setattr(module, name, late(getattr(module, name)))
        for iteration in range(iterations):
            again = module.attention(*local, mesh, return_lse=True)
            same = all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
            assert same, f"iteration {iteration}, seed {problem.seed}"
    check_forward(rank, world, text, problem, torch.float32)


WAITS = {("ring", (2,)), ("ring", (4,)), ("ring", (8,)), ("double-ring", (2, 2))}
WAITS |= {("unified-double-ring", (2, 2, 2)), ("allgather-kv", (4,)), ("unified", (2, 2))}
for _name, _sizes in sorted(WAITS):
    _problem = problem_for(prod(_sizes))
    _emitted = one(_name, _sizes, _problem)
    RANKS[_emitted.world].add(
        f"b13 {_name} {_sizes}", check_with_sleeps, _emitted.late, _problem, 100
    )


@pytest.mark.parametrize("name, sizes", sorted(WAITS))
def test_b13_random_delays(name: str, sizes: tuple[int, ...]) -> None:
    """B13: 100 calls with ranks that sleep at random."""
    RANKS[prod(sizes)].result(f"b13 {name} {sizes}")


def calls_of(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method of this name."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == name
    ]


@pytest.mark.parametrize("name", DESIGNS)
def test_b13_every_handle_is_waited_for(name: str) -> None:
    """B13: handles are a list, gone through; none is picked by its index."""
    tree = ast.parse(ALL[name][0].text)
    handles = {"works", "work"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            assert getattr(node.value, "id", "") not in handles, ast.unparse(node)
    started = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and calls_of(n, "_shift")]
    assert all(ast.unparse(n.targets[0]) == "works" for n in started)
    functions = {getattr(node, "name", ""): node for node in tree.body}
    waited = []
    if "_walk_ring" in functions:
        assert "for work in works:\n        work.wait()" in ast.unparse(functions["_wait"])
        tries = [n for n in ast.walk(functions["_walk_ring"]) if isinstance(n, ast.Try)]
        waited = [one for n in tries for one in n.finalbody if calls_of(one, "_wait")]
    assert len(waited) == len(started) == len(calls_of(tree, "batch_isend_irecv"))


@pytest.mark.parametrize("name", DESIGNS)
def test_b14_messages_are_batched(name: str) -> None:
    """B14: isend and irecv only inside P2POp; one batch a step, receives first on every rank."""
    emitted = ALL[name][0]
    tree = ast.parse(emitted.text)
    assert not [c for x in ("isend", "irecv", "send", "recv") for c in calls_of(tree, x)]
    assert len(calls_of(tree, "batch_isend_irecv")) == ("shift" in emitted.shown)
    batches = [
        [e for e in trace(emitted.plan, rank).events if isinstance(e, Batch)]
        for rank in range(emitted.world)
    ]
    assert len({tuple((b.op, b.dim, len(b.sends)) for b in each) for each in batches}) == 1


for _world in (2, 3, 4, 5, 8):
    _problem = problem_for(_world)
    RANKS[_world].add(
        "b14", check_forward, one("ring", (_world,), _problem).late, _problem, torch.float64
    )


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_b14_ring_runs(world: int) -> None:
    """B14: even and odd rings."""
    RANKS[world].result("b14")


def check_marked(rank: int, world: int, text: str) -> None:
    """One exchange: each tile says whose it is and what."""
    module, mesh = setup(text)
    group = mesh.get_group()
    tiles = tuple(torch.full((5,), 100.0 * what + rank) for what in range(4))
    into = tuple(map(torch.empty_like, tiles))
    for work in module._shift(tiles, into, group):
        work.wait()
    marks = [x.unique().tolist() for x in into]
    assert marks == [[100.0 * what + (rank - 1) % world] for what in range(4)], marks


def check_double_ring_marked(rank: int, world: int, text: str) -> None:
    """Rings of two in both dimensions: the next and the previous rank are one."""
    module, mesh = setup(text)
    seen = []
    tiles = (torch.full((1, 2, 1, 1), float(rank)), torch.full((1, 2, 1, 1), 100.0 + rank))
    for _, (k, v) in module._walk_tiles(tiles, *(mesh.get_group(name) for name in module.MESH)):
        assert len(k.unique()) == 1 and torch.equal(v, k + 100), (k, v)
        seen.append(int(k.flatten()[0]))
    assert sorted(seen) == list(range(world)) and seen[0] == rank, seen


for _world in (2, 4):
    RANKS[_world].add("b17", check_marked, one("ring", (_world,), problem_for(_world)).late)
RANKS[4].add("b17 double ring", check_double_ring_marked, ALL["double-ring"][0].late)


@pytest.mark.parametrize("world, case", [(2, "b17"), (4, "b17"), (4, "b17 double ring")])
def test_b17_next_is_previous(world: int, case: str) -> None:
    """B17: several messages between two ranks at once arrive in the buffers they are for."""
    RANKS[world].result(case)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DESIGNS)
def test_b24_length_not_divisible_is_refused(name: str) -> None:
    """B24: 1001 tokens on 8 ranks: the length, the ranks and the nearest legal lengths."""
    sizes = (2, 2, 2) if name == "unified-double-ring" else (8,)
    for order, legal in (("zigzag", "1008"), ("contiguous", "1000")):
        error = refusal(name, sizes, problem_for(8, seq=1001, order=order))
        assert error.slug.startswith("seq-not-divisible")
        assert "1001" in error.message and "8" in error.message and legal in (error.help or "")


for _check in (numeric_cases.check_refusals, numeric_cases.check_check_inputs):
    for _name in DESIGNS:
        _emitted, _problem = ALL[_name]
        RANKS[_emitted.world].add(f"{_check.__name__} {_name}", _check, _emitted.late, _problem)


@pytest.mark.parametrize("check", ["check_refusals", "check_check_inputs"])
@pytest.mark.parametrize("name", DESIGNS)
def test_b24_shapes_of_other_ranks(name: str, check: str) -> None:
    """B24: bad shapes raise before any message; with check_inputs, another rank's do too."""
    RANKS[ALL[name][0].world].result(f"{check} {name}")


for _name in ("ring", "unified"):
    _emitted, _problem = ALL[_name]
    RANKS[_emitted.world].add(
        f"b73 {_name}", numeric_cases.check_positions, _emitted.late, _problem
    )


@pytest.mark.parametrize("name", ["ring", "unified"])
def test_b73_tokens_in_another_order(name: str) -> None:
    """B73: data in plain order under zigzag is found by check_inputs, if told the positions."""
    RANKS[ALL[name][0].world].result(f"b73 {name}")


def test_b25_zigzag_says_what_plain_order_would_take() -> None:
    """B25: neither P nor 2P divides 2999; 8 divides 1000 and 16 does not: two messages."""
    neither = refusal("ring", (4,), problem_for(4, seq=2999))
    half = refusal("ring", (8,), problem_for(8, seq=1000))
    assert neither.slug == "seq-not-divisible" and "3000" in (neither.help or "")
    assert half.slug == "seq-not-divisible-zigzag" and "1008" in (half.help or "")
    assert "4 ranks" in neither.message and "8 ranks" in half.message and "zigzag" in half.message
    plain = one("ring", (8,), problem_for(8, seq=1000, order="contiguous"))
    assert plain.world == 8


def check_tiny(rank: int, world: int, text: str, seq: int, order: str) -> str:
    """A very short sequence: right, with the shape of the input, or refused by all ranks."""
    module, mesh = setup(text)
    problem = Problem(seq=seq, heads=1, kv_heads=1, head_dim=4, order=order)
    multiple = 2 * world if order == "zigzag" else world
    if seq % multiple == 0:
        check_forward(rank, world, text, problem, torch.float64)
        return "right"
    q, k, v = problem.inputs(torch.float32)
    assert_refused(lambda: module.shard("q", q, mesh), seq, multiple)
    if seq % world == 0:
        mine = [x.chunk(world, 1)[rank] for x in (q, k, v)]
        with recorded(module) as calls:
            assert_refused(lambda: module.attention(*mine, mesh, seq=seq), "S must be even")
        assert not calls
    return "refused"


TINY = [
    (world, seq, order)
    for world in (2, 4, 8)
    for seq in sorted({world, 2 * world - 1, 2 * world, 4})
    for order in ("zigzag", "contiguous")
]
for _world, _seq, _order in TINY:
    for _name in ("ring", "allgather-kv"):
        _late = one(_name, (_world,), problem_for(_world, order=_order)).late
        RANKS[_world].add(f"b26 {_name} {_seq} {_order}", check_tiny, _late, _seq, _order)


@pytest.mark.parametrize("name", ["ring", "allgather-kv"])
@pytest.mark.parametrize("world, seq, order", TINY)
def test_b26_very_short_sequences(world: int, seq: int, order: str, name: str) -> None:
    """B26: S = P, 2P - 1, 2P and 4."""
    fits = seq % (2 * world if order == "zigzag" else world) == 0
    got = RANKS[world].result(f"b26 {name} {seq} {order}")
    assert got == ["right" if fits else "refused"] * world


for _name in DESIGNS:
    _emitted, _problem = ALL[_name]
    for _dtype in (torch.float64, torch.bfloat16):
        RANKS[_emitted.world].add(
            f"b47 {_name} {_dtype}", check_views, _emitted.late, _problem, _dtype
        )
    RANKS[_emitted.world].add(f"b74 {_name}", check_sees_others, _emitted.late, _problem)
    _full, _problem = design(_name, causal=False, order="contiguous")
    RANKS[_full.world].add(f"b74 {_name} full", check_sees_others, _full.late, _problem)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", DESIGNS)
def test_b47_views_are_made_contiguous(name: str, dtype: torch.dtype) -> None:
    """B47: transposed, sliced from one tensor, head size first, expanded."""
    RANKS[ALL[name][0].world].result(f"b47 {name} {dtype}")


@pytest.mark.parametrize("mask", ["", " full"])
@pytest.mark.parametrize("name", DESIGNS)
def test_b74_every_rank_sees_the_others(name: str, mask: str) -> None:
    """B74: another k and v on one rank moves exactly the rows that may see its tokens."""
    RANKS[ALL[name][0].world].result(f"b74 {name}{mask}")


def test_b74_a_schedule_without_communication_is_refused() -> None:
    """B74: queries are split and nothing brings the keys; or a design lacks its inner ranks."""
    with pytest.raises(UserError) as caught:
        written("gpu=4", "parallelize S_q over gpu", problem_for(4))
    assert caught.value.slug == "no-story", caught.value.render()
    with pytest.raises(UserError) as caught:
        search("attention", ir.Problem(), load("h100x8"), group=(2,), design="unified")
    assert caught.value.slug == "design-does-not-fit"


WIDTHS = {"192 and 128": (192, 128), "24 and 16": (24, 16), "16 and 24": (16, 24)}
for _name, _sizes in {
    "ring": (2,),
    "ulysses": (2,),
    "unified": (2, 2),
    "allgather-kv": (2,),
}.items():
    for _width, (_d, _e) in WIDTHS.items():
        _problem = problem_for(
            prod(_sizes), heads=8, kv_heads=2, batch=1, head_dim=_d, value_dim=_e
        )
        RANKS[prod(_sizes)].add(
            f"b78 {_name} {_width}",
            check_forward,
            one(_name, _sizes, _problem).late,
            _problem,
            torch.float64,
        )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "name, world", [("ring", 2), ("ulysses", 2), ("unified", 4), ("allgather-kv", 2)]
)
def test_b78_keys_and_values_of_different_head_sizes(name: str, world: int, width: str) -> None:
    """B78: GQA 8/2; out has the values' head size."""
    RANKS[world].result(f"b78 {name} {width}")


# --- time and choice ------------------------------------------------------------------------

OVERLAP = {
    "ring": ("gpu=4", "parallelize S_q over gpu\nshift k, v: S_kv along gpu"),
    "double ring": (
        "node=2 gpu=2",
        "parallelize S_q over node, gpu\nshift k, v: S_kv along node, gpu",
    ),
    "gather in a walk": (  # its first exchange is waited for before its first block
        "node=4 gpu=2",
        "parallelize S_q over node, gpu\nshift k, v: S_kv along node\nshard k, v: S_kv over gpu",
    ),
}
for _name, (_mesh, _body) in OVERLAP.items():
    _problem = problem_for(8, causal=False, order="contiguous")
    _emitted = written(_mesh, _body, _problem)
    RANKS[_emitted.world].add(
        f"b61 {_name}", check_overlap, _emitted.late, _problem, 0.1, ("batch_isend_irecv",)
    )


@pytest.mark.parametrize("name", OVERLAP)
def test_b61_transfers_run_under_compute(name: str) -> None:
    """B61: each block and each transfer waits 0.1 s: the longer of the two sums, not both."""
    world = 8 if name == "gather in a walk" else 4
    print(RANKS[world].result(f"b61 {name}"))


def test_b61_next_transfer_is_posted_before_compute() -> None:
    """B61: in the plan of a ring, every exchange starts before the block that it hides under."""
    played = trace(ALL["ring"][0].plan, 1).events
    kinds = [type(event).__name__ for event in played]
    order = "".join({"Batch": "b", "Kernel": "k", "Wait": "w"}.get(kind, "") for kind in kinds)
    assert re.fullmatch(r"(bk+w)+k+", order), order


def test_b64_the_ranking_depends_on_the_links() -> None:
    """B64: all-to-all on PCIe and UPI loses against rings, on NVLink it wins; with the reason."""
    found = {
        name: search("attention", ir.Problem(), load(name)) for name in ("l40x8", "l20x8", "h100x8")
    }
    times = {
        name: {x.name: x.best.cost.time for x in result.named if x.best}
        for name, result in found.items()
    }
    assert times["h100x8"]["ulysses"] < times["h100x8"]["ring"]
    for name in ("l40x8", "l20x8"):
        assert times[name]["ulysses"] > 1.2 * times[name]["ring"]
        assert found[name].best.design != "ulysses"
        best = {x.name: x.best for x in found[name].named if x.best}
        times_of = [best[x].cost.times for x in ("ulysses", "ring")]
        assert times_of[0].exposed > times_of[1].exposed and "% more" in why(found[name])
    directives = found["h100x8"].best.schedule.directives
    assert {d.axis for d in directives if isinstance(d, Parallelize)} == {"H"}  # chunked or not


def test_b65_degrees_reason_and_runner_up() -> None:
    """B65: the choice names the mesh, the order and by how much the next one is behind."""
    result = search("attention", ir.Problem(heads=40, kv_heads=40), load("a100x16"))
    said = why(result)
    assert said.startswith("unified on node=2 gpu=8 (zigzag)") and "% more" in said
    dims = {dim.name: dim.size for dim in result.best.schedule.mesh.dims}
    assert dims == {"node": 2, "gpu": 8}
    assert "parallelize H over gpu\n" in result.best.text


# --- degenerate and wrong numbers of ranks --------------------------------------------------

ALONE = Problem(seq=21, value_dim=36, order="contiguous", batch=3)


def alone() -> Emitted:
    """The module for one rank."""
    return next(x for x in instances(None, (1,), ALONE) if isinstance(x, Emitted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_b83_one_rank_without_process_group(causal: bool, dtype: torch.dtype) -> None:
    """B83: no process group, no mesh, no call."""
    problem = replace(ALONE, causal=causal)
    found = next(x for x in instances(None, (1,), problem) if isinstance(x, Emitted))
    assert found.world == 1
    check_single(found.text, problem, dtype)


def check_alone(rank: int, world: int, text: str) -> None:
    """The module for one rank, in a process group of one."""
    module, mesh = setup(text)
    assert mesh is None and module.make_mesh() is None
    with recorded(module) as calls:
        numeric_cases.check_layout(rank, world, text, ALONE)
        check_forward(rank, world, text, ALONE, torch.float64)
        module.check_inputs(*own_inputs(module, mesh, ALONE, torch.float32), mesh)
    assert not calls


def test_b83_one_rank_with_a_process_group() -> None:
    """B83: a group of one changes nothing."""
    run_ranks(1, check_alone, alone().text)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_b83_levels_of_one_vanish(order: str) -> None:
    """B83: R = 1 or U = 1: the same schedules as without the level, so the same messages."""
    problem = problem_for(4, order=order)
    plain = list(instances(None, (4,), problem))
    for sizes in ((1, 4), (1, 1, 4)):
        others = list(instances(None, sizes, problem))
        assert len(plain) == len(others)
        for x, y in zip(plain, others, strict=True):
            if isinstance(x, Emitted):
                assert isinstance(y, Emitted)
                assert (x.schedule.mesh, x.plan) == (y.schedule.mesh, y.plan)
            else:
                assert isinstance(y, Refusal) and x.slug == y.slug


EIGHT = one("ring", (8,), problem_for(8))
UNIFIED = one("unified-double-ring", (2, 2, 2), problem_for(8))
for _world in (2, 3):
    for _name, _emitted in (("ring", EIGHT), ("unified-double-ring", UNIFIED)):
        RANKS[_world].add(f"b92 {_name}", check_wrong_world, _emitted.late, problem_for(8))
RANKS[8].add("b92 fewer", check_wrong_world, ALL["ring"][0].late, problem_for(8))


@pytest.mark.parametrize(
    "world, case",
    [(w, f"b92 {n}") for w in (2, 3) for n in ("ring", "unified-double-ring")] + [(8, "b92 fewer")],
)
def test_b92_wrong_number_of_ranks(world: int, case: str) -> None:
    """B92: emitted for 8, started on 2 and 3; emitted for 4, started on 8: both numbers said."""
    RANKS[world].result(case)
