"""Every way that tiles come by, as emitted: on real gloo ranks, and against the plan.

Direct and relayed, either way and both ways, with tiles ahead or none, alone and as levels of a
nest, in all token orders: numbers in several dtypes, live bytes and recorded calls exactly.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from emitted import Emitted, expected, resized, written
from numeric_cases import (
    Call,
    Problem,
    assert_refused,
    check_forward,
    check_layout,
    check_sees_others,
    own_inputs,
    peak_bytes,
    record_call,
    recorded,
    setup,
)
from ranks import Ranks

from mercurygen.emit.callsites import check_text
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.errors import UserError
from mercurygen.lower.trace import trace

SHIFT, GATHER = "shift k, v: S_kv along", "shard k, v: S_kv over"
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ORDERS = {"zigzag": True, "contiguous": True, "striped": True, "full": False}
SIZES = (  # of one case after the other: batch, heads, their sizes
    {"batch": 1, "heads": 6, "kv_heads": 6, "head_dim": 24, "value_dim": 24},
    {"batch": 2, "heads": 12, "kv_heads": 6, "head_dim": 20, "value_dim": 13},
    {"batch": 1, "heads": 12, "kv_heads": 6, "head_dim": 13, "value_dim": 36},
)


def queries(dims: str, *stages: str) -> str:
    """The body of a schedule whose queries stay."""
    return "\n".join([f"parallelize S_q over {dims}", *stages])


def heads(dims: str, body: str) -> str:
    """The same with heads split around it."""
    return f"parallelize H over {dims}\n{body}"


def ring(option: str) -> str:
    """One ring."""
    return queries("m", f"{SHIFT} m {option}")


def nest(outer: str, inner: str) -> str:
    """A ring inside a ring."""
    return queries("n, m", f"{SHIFT} n {outer}, m {inner}")


BODIES = {  # mesh, body
    "direct of 2": ("m=2", ring("direct")),
    "direct of 3": ("m=3", ring("direct")),
    "direct of 4": ("m=4", ring("direct")),
    "direct, reverse": ("m=4", ring("direct reverse")),
    "direct, none ahead": ("m=3", ring("direct prefetch 0")),
    "direct, 2 ahead": ("m=4", ring("direct prefetch 2")),
    "direct, all ahead": ("m=4", ring("direct prefetch 8")),
    "reverse of 2": ("m=2", ring("reverse")),
    "reverse of 3": ("m=3", ring("reverse")),
    "both of 2": ("m=2", ring("both")),
    "both of 3": ("m=3", ring("both")),
    "both of 4": ("m=4", ring("both")),
    "both of 6": ("m=6", ring("both")),
    "none ahead": ("m=3", ring("prefetch 0")),
    "2 ahead": ("m=4", ring("prefetch 2")),
    "3 ahead": ("m=6", ring("prefetch 3")),
    "all ahead, reverse": ("m=4", ring("reverse prefetch 8")),
    "direct outside": ("n=2 m=3", nest("direct", "")),
    "direct inside": ("n=2 m=2", nest("", "direct")),
    "direct both": ("n=3 m=2", nest("direct", "direct prefetch 0")),
    "direct outside both ways": ("n=2 m=3", nest("direct", "both")),
    "direct outside of tiles ahead": ("n=2 m=3", nest("direct", "reverse prefetch 2")),
    "reverse outside": ("n=3 m=2", nest("reverse", "")),
    "both outside": ("n=3 m=2", nest("both", "prefetch 0")),
    "unified, direct": ("n=3 m=2", heads("m", queries("n", f"{SHIFT} n direct"))),
    "inverse, direct": ("n=2 m=3", heads("n", queries("m", f"{SHIFT} m direct"))),
    "inverse, both": ("n=2 m=3", heads("n", queries("m", f"{SHIFT} m both"))),
    "gather, direct": ("n=2 m=2", queries("n, m", f"{GATHER} m", f"{SHIFT} n direct")),
    "gather outside, direct": ("n=2 m=3", queries("n, m", f"{GATHER} n", f"{SHIFT} m direct")),
    "reverse, gather": ("n=3 m=2", queries("n, m", f"{SHIFT} n reverse", f"{GATHER} m")),
    "three": ("a=2 b=2 c=2", queries("a, b, c", f"{SHIFT} a, b direct, c")),
    "direct along the outer": ("n=2 m=2", queries("n, m", f"{SHIFT} m, n direct")),
    "uneven": ("n=2 m=2", queries("n, m", f"{SHIFT} m direct, n")),
    "direct, other order": ("n=2 m=2", queries("n, m", f"{SHIFT} m direct, n direct")),
    "uneven both ways": ("n=3 m=2", queries("n, m", f"{SHIFT} m direct, n both")),
}
STRIPED = {  # what is of interest in this order besides
    "ring": ("m=4", ring("")),
    "nest": ("n=2 m=2", nest("", "")),
    "inverse": ("n=2 m=3", heads("n", queries("m", f"{SHIFT} m"))),
    "ulysses": ("m=3", heads("m", "")),
    "ulysses of two levels": ("n=2 m=3", heads("n, m", "")),
    "gathers": ("n=2 m=2", queries("n, m", f"{GATHER} m, n")),
    "gathers, outside in": ("n=2 m=3", queries("n, m", f"{GATHER} n, m")),
    "ring, gather": ("n=2 m=2", queries("n, m", f"{SHIFT} n", f"{GATHER} m")),
}
FULL = ("gathers", "gathers, outside in", "ring, gather")  # no causal mask can be cut there
NEVER = {"mask-not-cuttable"}  # stripes of several ranks, where rows are not split evenly

RANKS = {world: Ranks(world) for world in (2, 3, 4, 6, 8)}
CASES: dict[str, tuple[Emitted, Problem, str]] = {}  # and the dtype that is run besides float64
REFUSED: dict[str, str] = {}


def check_run(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype
) -> tuple[list[Call], list[int]]:
    """out and lse in float64 and another dtype; the calls, and live bytes without and with lse."""
    for each in (torch.float64, dtype):
        check_forward(rank, world, text, problem, each)
    calls = record_call(rank, world, text, problem, dtype, True)
    peaks = [peak_bytes(rank, world, text, problem, dtype, lse) for lse in (False, True)]
    return calls, peaks


def add(name: str, mesh: str, body: str, order: str, causal: bool) -> None:
    """A schedule's numbers, calls and live bytes."""
    world = prod(int(word.partition("=")[2]) for word in mesh.split())
    number = len(CASES) + len(REFUSED)
    problem = Problem(seq=12 * world, causal=causal, order=order, **SIZES[number % len(SIZES)])
    try:
        emitted = written(mesh, body, problem)
    except UserError as error:
        REFUSED[name] = error.slug
        return
    dtype = DTYPES[number // 2 % len(DTYPES)]
    CASES[name] = emitted, problem, str(dtype).removeprefix("torch.")
    RANKS[world].add(name, check_run, emitted.late, problem, dtype)


def build() -> None:
    """Every body in one order after the other; a direct one is another in each."""
    for number, (name, (mesh, body)) in enumerate(BODIES.items()):
        orders = [*ORDERS, *ORDERS]
        direct = ("zigzag", "contiguous") if "direct" in body else ()
        for order in dict.fromkeys((*direct, orders[number % 4])):
            causal = ORDERS[order]
            add(f"{name}, {order}", mesh, body, order if causal else "contiguous", causal)
    for name, (mesh, body) in STRIPED.items():
        add(f"{name}, stripes", mesh, body, "striped", name not in FULL)


build()


def check_stripes(rank: int, world: int, text: str, problem: Problem) -> None:
    """Helpers in striped order, dimensions counted from the end too; one token is refused."""
    check_layout(rank, world, text, problem)
    module, mesh = setup(text)
    full = torch.arange(3 * problem.seq).view(3, problem.seq)
    local = module.shard_sequence(full, mesh, dim=-1)
    assert torch.equal(local, full[:, rank::world]) and local.is_contiguous()
    assert torch.equal(module.unshard_sequence(local, mesh, dim=-1), full)
    q, k, v = (x[:, :1] for x in own_inputs(module, mesh, problem, torch.float32))
    with recorded(module) as calls:
        assert_refused(lambda: module.attention(q, k, v, mesh), "S must be at least 2")
    assert not calls


SEEN = {"direct of 4, zigzag", "direct of 3, contiguous", "both of 3, striped", "ring, stripes"}
SEEN |= {"both of 2, contiguous", "direct inside, contiguous", "inverse, direct, zigzag"}
for _name in SEEN:
    _emitted, _problem, _ = CASES[_name]
    RANKS[_emitted.world].add(f"sees {_name}", check_sees_others, _emitted.late, _problem)
_emitted, _problem, _ = CASES["ring, stripes"]
RANKS[4].add("stripes", check_stripes, _emitted.late, _problem)


@pytest.mark.parametrize("name", CASES)
def test_numbers_calls_and_bytes(name: str) -> None:
    """On every rank, in float64 and in another dtype."""
    emitted, problem, dtype = CASES[name]
    plan = resized(emitted, problem, dtype).plan
    for rank, (calls, peaks) in enumerate(RANKS[emitted.world].result(name)):
        plain, with_lse = (trace(plan, rank, with_lse=lse) for lse in (False, True))
        where = f"rank {rank}, {dtype}\n{emitted.shown}"
        assert calls == expected(emitted.plan, with_lse), where
        assert peaks == [plain.peak(), with_lse.peak()], where


@pytest.mark.parametrize("name", CASES)
def test_text_is_the_plan(name: str) -> None:
    """Every transfer, wait and block of the text, without torch."""
    emitted, *_ = CASES[name]
    assert check_text(emitted.text, emitted.plan).events > emitted.world


def test_only_stripes_of_several_ranks_are_refused() -> None:
    """Every body is a module in every order, but for rows that are uneven stripes."""
    assert set(REFUSED.values()) <= NEVER and all("striped" in name for name in REFUSED)
    assert len(CASES) > 55


def test_stripes_are_dealt_and_put_together() -> None:
    """The module's helpers; a tile of one token is refused before anything is sent."""
    RANKS[4].result("stripes")


@pytest.mark.parametrize("name", sorted(SEEN))
def test_b17_tiles_are_not_mixed_up(name: str) -> None:
    """B17: another k and v of one rank change just the rows that see them, on all ranks."""
    RANKS[CASES[name][0].world].result(f"sees {name}")


def received(name: str) -> list[int]:
    """Bytes that every rank receives."""
    plan = CASES[name][0].plan
    calls = (expected(plan, trace(plan, rank)) for rank in range(CASES[name][0].world))
    return [sum(call.received for call in each) for each in calls]


def test_direct_rings_send_what_the_mask_leaves() -> None:
    """Zigzag: from half to all of the others' tiles, 3/4 on average; contiguous: earlier ones'."""
    for order, halves in (("zigzag", [6, 5, 4, 3]), ("contiguous", [0, 2, 4, 6])):
        plan = CASES[f"direct of 4, {order}"][0].plan
        half = (plan.held_bytes("k") + plan.held_bytes("v")) // 2
        assert received(f"direct of 4, {order}") == [half * times for times in halves], order


EDITS = {  # (case, what the text says, what it is made to say)
    "less is sent": ("direct of 4, zigzag", "tokens // 2 if owner", "tokens // 3 if owner"),
    "late run": ("direct of 4, zigzag", "x[:, :tokens].clone", "x[:, -tokens:].clone"),
    "whole tile": ("direct of 4, zigzag", "_cut(x, sent)", "_cut(x, tokens)"),
    "owner": ("direct of 3, zigzag", "(me - step) % size, (me +", "(me + step) % size, (me +"),
    "not the front": ("direct of 4, zigzag", "flatten()[: buffer", "flatten()[1 : 1 + buffer"),
    "later owners": ("direct of 3, contiguous", "if owner < reader", "if owner > reader"),
    "no wait": (
        "direct, 2 ahead, zigzag",
        "    _wait(works)\n    return tiles",
        "    return tiles",
    ),
    "another buffer": ("direct, 2 ahead, zigzag", "(step + 1) % 3", "(step + 2) % 3"),
    "both forward": (
        "both of 3, striped",
        "group_peer=before) for x in back",
        "group_peer=after) for x in back",
    ),
    "below the diagonal": ("ring, stripes", "slice(None, -1)", "slice(1, None)"),
    "with the diagonal": (
        "ring, stripes",
        "slice(1, None), slice(None, -1)",
        "slice(None), slice(None)",
    ),
    "places": ("direct inside, contiguous", "(n_group.rank(),), (n,)", "(n,), (n_group.rank(),)"),
    "rows of others": ("uneven, zigzag", "[m_group.rank()])\n", "[0])\n"),
    "another owner's front": ("uneven, zigzag", "cols[(me - step - 1)", "cols[(me - step)"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_text_is_found(name: str) -> None:
    """The comparison with the plan sees every one of these."""
    case, old, new = EDITS[name]
    emitted, *_ = CASES[case]
    assert emitted.text.count(old) >= 1, emitted.text
    with pytest.raises(TextMismatch):
        check_text(emitted.text.replace(old, new), emitted.plan)
