"""Every way that tiles come by, as emitted: on real gloo ranks, and against the plan.

Direct and relayed, either way and both ways, with tiles ahead or none, alone and as levels of a
nest, in all token orders: numbers in four dtypes, live bytes and recorded calls exactly.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from emitted import Emitted, resized, written
from numeric_cases import (
    Call,
    Problem,
    check_forward,
    check_layout,
    check_sees_others,
    peak_bytes,
    record_call,
)
from ranks import Ranks

from mercurygen.emit.callsites import check_text
from mercurygen.errors import UserError
from mercurygen.lower.events import Batch, Collective, Message, Trace
from mercurygen.lower.trace import trace

SHIFT, GATHER = "shift k, v: S_kv along", "shard k, v: S_kv over"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = {"all-to-all": "all_to_all", "all-gather": "all_gather"}
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
    "direct outside of tiles ahead": ("n=2 m=4", nest("direct", "reverse prefetch 2")),
    "reverse outside": ("n=3 m=2", nest("reverse", "")),
    "both outside": ("n=4 m=2", nest("both", "prefetch 0")),
    "unified, direct": ("n=3 m=2", heads("m", queries("n", f"{SHIFT} n direct"))),
    "inverse, direct": ("n=2 m=3", heads("n", queries("m", f"{SHIFT} m direct"))),
    "inverse, both": ("n=2 m=4", heads("n", queries("m", f"{SHIFT} m both"))),
    "gather, direct": ("n=2 m=2", queries("n, m", f"{GATHER} m", f"{SHIFT} n direct")),
    "gather outside, direct": ("n=2 m=3", queries("n, m", f"{GATHER} n", f"{SHIFT} m direct")),
    "reverse, gather": ("n=3 m=2", queries("n, m", f"{SHIFT} n reverse", f"{GATHER} m")),
    "three": ("a=2 b=2 c=2", queries("a, b, c", f"{SHIFT} a, b direct, c")),
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
NEVER = {"mask-not-cuttable"}  # stripes of several ranks, where rows are not split evenly

RANKS = {world: Ranks(world) for world in (2, 3, 4, 6, 8)}
CASES: dict[str, tuple[Emitted, Problem]] = {}
REFUSED: dict[str, str] = {}


def check_dtypes(rank: int, world: int, text: str, problem: Problem) -> None:
    """out and lse in every dtype."""
    for dtype in DTYPES:
        check_forward(rank, world, text, problem, dtype)


def add(name: str, mesh: str, body: str, order: str, causal: bool) -> None:
    """A schedule's numbers, calls and live bytes."""
    world = prod(int(word.partition("=")[2]) for word in mesh.split())
    sizes = SIZES[(len(CASES) + len(REFUSED)) % len(SIZES)]
    problem = Problem(seq=12 * world, causal=causal, order=order, **sizes)
    try:
        emitted = written(mesh, body, problem)
    except UserError as error:
        REFUSED[name] = error.slug
        return
    CASES[name] = emitted, problem
    ranks = RANKS[world]
    ranks.add(name, check_dtypes, emitted.late, problem)
    for lse in (False, True):
        ranks.add(f"calls {lse} {name}", record_call, emitted.late, problem, torch.bfloat16, lse)
        for dtype in (torch.bfloat16, torch.float32):
            case = f"{dtype} {lse} {name}"
            ranks.add(case, peak_bytes, emitted.late, problem, dtype, lse)


def build() -> None:
    """Every body in every order."""
    for order, causal in ORDERS.items():
        given = order if causal else "contiguous"
        for name, (mesh, body) in BODIES.items():
            add(f"{name}, {order}", mesh, body, given, causal)
    for name, (mesh, body) in STRIPED.items():
        for mask, causal in (("causal", True), ("full", False)):
            add(f"{name}, striped {mask}", mesh, body, "striped", causal)


build()


def planned(emitted: Emitted, played: Trace) -> list[Call]:
    """A trace's transfers as the recorder says them."""
    mesh, calls = emitted.schedule.mesh, []

    def ops(way: str, messages: tuple[Message, ...]) -> list[tuple[str, int, int]]:
        found = []
        for message in messages:
            nbytes = played.buffers[message.buffer].nbytes
            found.append((way, message.peer, nbytes if message.nbytes is None else message.nbytes))
        return found

    for event in played.events:
        if isinstance(event, Batch):
            recvs, sends = ops("recv", event.recvs), ops("send", event.sends)
            sent, received = (sum(op[2] for op in side) for side in (sends, recvs))
            group = mesh.group(played.rank, event.dim)
            calls.append(Call("p2p", group, (*recvs, *sends), sent, received))
        elif isinstance(event, Collective):
            group, sizes = mesh.group(played.rank, event.dim), []
            sizes = [played.buffers[each].nbytes for each in (event.source, event.target)]
            calls.append(Call(KINDS[event.kind], group, (), *sizes))
    return calls


@pytest.mark.parametrize("name", CASES)
def test_numbers_calls_and_bytes(name: str) -> None:
    """On every rank, in float64, float32, bfloat16 and float16; with lse and without."""
    emitted, problem = CASES[name]
    ranks = RANKS[emitted.world]
    ranks.result(name)
    for lse in (False, True):
        plan = resized(emitted, problem, "bfloat16").plan
        for rank, calls in enumerate(ranks.result(f"calls {lse} {name}")):
            played = trace(plan, rank, with_lse=lse)
            assert calls == planned(emitted, played), f"rank {rank}\n{emitted.shown}"
        for dtype in ("bfloat16", "float32"):
            plan = resized(emitted, problem, dtype).plan
            want = [trace(plan, rank, with_lse=lse).peak() for rank in range(emitted.world)]
            got = ranks.result(f"torch.{dtype} {lse} {name}")
            assert got == want, f"{dtype}, lse {lse}\n{emitted.shown}"


@pytest.mark.parametrize("name", CASES)
def test_text_is_the_plan(name: str) -> None:
    """Every transfer, wait and block of the text, without torch."""
    emitted, _ = CASES[name]
    assert check_text(emitted.text, emitted.plan).events > emitted.world


def test_only_stripes_of_several_ranks_are_refused() -> None:
    """Every body is a module in every order, but for rows that are uneven stripes."""
    assert set(REFUSED.values()) <= NEVER and all("striped" in name for name in REFUSED)
    assert len(CASES) > 120
