"""Modules whose tiles or results move in other ways, on virtual ranks: right ones, and bugs.

Direct and relayed, either way and both ways, tiles ahead, stripes; partial results that go home,
travel on, are dealt out or added up; tensors that every rank holds whole.
"""

from __future__ import annotations

from functools import cache

import numeric_cases
import pytest
import torch
from emitted import ATTENTION, Emitted, written

from mercurygen.lower.events import Batch, Collective, Trace
from mercurygen.lower.trace import trace
from mercurygen.virtual.calls import Call, planned
from mercurygen.virtual.report import Played, VirtualError
from mercurygen.virtual.run import play

torch.set_num_threads(1)

QUERIES = "parallelize S_q over m\nshift k, v: S_kv along m "
NESTED = "parallelize S_q over n, m\nshift k, v: S_kv along n {}, m {}"
HOME = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m direct"
TRAVEL = HOME.removesuffix(" direct")
DEALT = "parallelize S_kv over m\nshard q: S_q over m\nshard out, lse: S_q over m"
ADDED = "parallelize S_kv over m\nreplicate q over m\nreplicate out, lse over m"
WHOLE = "pin k, v: S over m\npin q, out, lse: replicated"
SCHEDULES = {  # mesh, body, order ("full": without a mask), pins
    "direct": ("m=4", QUERIES + "direct", "zigzag"),
    "direct contiguous": ("m=3", QUERIES + "direct", "contiguous"),
    "direct of 2 full": ("m=2", QUERIES + "direct", "full"),
    "direct striped": ("m=3", QUERIES + "direct", "striped"),
    "direct 2 ahead": ("m=4", QUERIES + "direct prefetch 2", "zigzag"),
    "none ahead": ("m=3", QUERIES + "prefetch 0", "zigzag"),
    "3 ahead": ("m=6", QUERIES + "prefetch 3", "contiguous"),
    "reverse 2 ahead": ("m=4", QUERIES + "reverse prefetch 2", "striped"),
    "both of 2": ("m=2", QUERIES + "both", "zigzag"),
    "both of 3": ("m=3", QUERIES + "both", "zigzag"),
    "both of 8": ("m=8", QUERIES + "both", "full"),
    "striped": ("m=4", QUERIES, "striped"),
    "direct outside": ("n=2 m=3", NESTED.format("direct", "both"), "zigzag"),
    "direct twice": ("n=3 m=2", NESTED.format("direct", "direct prefetch 0"), "contiguous"),
    "three": (
        "a=2 b=2 c=2",
        "parallelize S_q over a, b, c\nshift k, v: S_kv along a, b direct, c",
        "zigzag",
    ),
    "direct, then gathered": (
        "n=2 m=2",
        "parallelize S_q over n, m\nshard k, v: S_kv over m\nshift k, v: S_kv along n direct",
        "zigzag",
    ),
    "heads, direct": (
        "n=3 m=2",
        "parallelize H over m\nparallelize S_q over n\nshift k, v: S_kv along n direct",
        "zigzag",
    ),
    "heads, stripes": ("n=2 m=2", "parallelize H over n, m", "striped"),
    "home": ("m=4", HOME, "zigzag"),
    "home contiguous": ("m=3", HOME, "contiguous"),
    "home full": ("m=2", HOME, "full"),
    "travel": ("m=4", TRAVEL, "zigzag"),
    "travel full": ("m=3", TRAVEL, "full"),
    "dealt": ("m=4", DEALT, "zigzag"),
    "dealt full": ("m=3", DEALT, "full"),
    "dealt of a ring": (
        "n=2 m=2",
        "parallelize S_q over n\nshift k, v: S_kv along n\n" + DEALT,
        "zigzag",
    ),
    "home of two": (
        "n=2 m=2",
        "parallelize S_kv over n, m\nshift q: S_q along n, m\n"
        "shift out, lse: S_q along n, m direct",
        "zigzag",
    ),
    "heads, travel": ("n=2 m=2", "parallelize H over n\n" + TRAVEL, "full"),
    "gathered, home": (
        "m=4",
        "parallelize S_kv over m\nshard q: S_q over m\nshift out, lse: S_q along m direct",
        "contiguous",
    ),
    "added": ("m=4", ADDED, "zigzag", WHOLE),
    "added contiguous": ("m=3", ADDED, "contiguous", WHOLE),
    "added over two": (
        "n=2 m=2",
        ADDED.replace("over m", "over n, m"),
        "full",
        WHOLE.replace("over m", "over n, m"),
    ),
    "keys whole": (
        "m=4",
        "parallelize S_q over m\nreplicate k, v over m",
        "zigzag",
        "pin q, out, lse: S over m\npin k, v: replicated",
    ),
}


@cache
def module(name: str) -> Emitted:
    """A schedule; its sizes do not matter."""
    mesh, body, order, *pins = SCHEDULES[name]
    causal = order != "full"
    problem = numeric_cases.Problem(
        1920, 16, 8, causal=causal, order=order if causal else "contiguous"
    )
    return written(mesh, body, problem, pins="".join(pins))


def played(name: str, text: str | None = None) -> Played:
    """A module, edited or not, on virtual ranks."""
    emitted = module(name)
    return play(text or emitted.text, emitted.schedule, ATTENTION, "edited.py")


@pytest.mark.parametrize("name", SCHEDULES)
def test_right(name: str) -> None:
    """Numbers, every call and wait, nothing touched in flight."""
    ran = played(name)
    assert ran.ranks == module(name).world and ran.error <= 1e-12
    assert bool(ran.operations) == (name != "keys whole")


PLANTED = {  # what: module, what its text says, what it is made to say, check, words
    "rows from the end": (
        "direct",
        "x[:, :tokens].clone",
        "x[:, -tokens:].clone",
        "result",
        "out is off by",
    ),
    "more than is seen": (
        "direct",
        "return tokens // 2 if owner < reader else tokens",
        "return tokens",
        "calls",
        "the plan has: batch along m",
    ),
    "more than is received": (
        "direct",
        "sent = _needed(reader, me, tokens)",
        "sent = tokens",
        "order",
        "where rank",
    ),
    "nobody's tile": (
        "direct contiguous",
        "if owner < reader",
        "if owner > reader",
        "misuse",
        "2, 0, 24",
    ),
    "another's tile": (
        "direct contiguous",
        "yield (me - step) % size, tiles",
        "yield (me + step) % size, tiles",
        "result",
        "is off by",
    ),
    "read before it is here": (
        "direct 2 ahead",
        "    _wait(works)\n    return tiles",
        "    return tiles",
        "in-flight-read",
        "being received",
    ),
    "two into one buffer": (
        "direct 2 ahead",
        "(step + 1) % 3",
        "step % 3",
        "in-flight-write",
        "is to receive",
    ),
    "both the same way": (
        "both of 3",
        "group_peer=before) for x in back",
        "group_peer=after) for x in back",
        "deadlock",
        "needs the other side",
    ),
    "sides mixed up": (
        "both of 3",
        "[((me - step - 1) % size, arriving[0]), ((me + step + 1) % size, arriving[1])]",
        "[((me + step + 1) % size, arriving[0]), ((me - step - 1) % size, arriving[1])]",
        "result",
        "is off by",
    ),
    "with the diagonal": (
        "striped",
        "slice(1, None), slice(None, -1)",
        "slice(None), slice(None)",
        "result",
        "is off by",
    ),
    "not merged at home": (
        "home",
        "            _merge_arrived(out, lse, arriving)\n            works",
        "            works",
        "result",
        "out is off by",
    ),
    "the last not merged at home": (
        "home full",
        "    _merge_arrived(out, lse, arriving)\n    return",
        "    return",
        "result",
        "is off by",
    ),
    "merged before it is home": (
        "home",
        "            _wait(works)\n            _merge_arrived",
        "            _merge_arrived",
        "in-flight-read",
        "being received",
    ),
    "the last merged before it is home": (
        "home",
        "        _wait(works)\n    _merge_arrived(out, lse, arriving)\n    return",
        "        pass\n    _merge_arrived(out, lse, arriving)\n    return",
        "in-flight-read",
        "being received",
    ),
    "another home": (
        "home",
        "works = _transfer(share, owner, into, peer, group)",
        "works = _transfer(share, (owner + 1) % size, into, peer, group)",
        "order",
        "from this rank to itself",
    ),
    "a share as the kernel leaves it": (
        "home",
        "share = _dense(share)",
        "share = list(share)",
        "not-contiguous",
        "of a send",
    ),
    "not added on the way": (
        "travel full",
        "            _merge(*share, *arriving)\n",
        "",
        "result",
        "out is off by",
    ),
    "another's sum": ("travel full", "return arriving", "return share", "result", "is off by"),
    "sent while it is merged": (
        "travel full",
        "            _wait(works)\n            _merge(*share, *arriving)",
        "            _merge(*share, *arriving)\n            _wait(works)",
        "in-flight-read",
        "being received",
    ),
    "a rank's part is dropped": (
        "dealt",
        "zip(outs.unbind(), lses.unbind(), strict=True)",
        "zip(outs.unbind()[1:], lses.unbind()[1:], strict=True)",
        "result",
        "is off by",
    ),
    "dealt to others": (
        "dealt",
        "own = [(chunks[i], chunks[-1 - i]) for i in range(n)]",
        "own = [(chunks[i], chunks[-1 - i]) for i in reversed(range(n))]",
        "result",
        "is off by",
    ),
    "merged before it is dealt": (
        "dealt full",
        "all_to_all_single(received, parts, group=group)",
        "all_to_all_single(received, parts, group=group, async_op=True)",
        "in-flight-read",
        "being received",
    ),
    # the sum of all lse does as well as the largest, as long as no exponential is too large
    "the sum for the largest": (
        "added",
        "dist.all_reduce(most, dist.ReduceOp.MAX, group=group)\n    packed",
        "dist.all_reduce(most, group=group)\n    packed",
        "calls",
        "all-reduce (sum) along m",
    ),
    "the largest for the sum": (
        "added contiguous",
        "dist.all_reduce(packed, group=group)",
        "dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)",
        "calls",
        "the plan has: all-reduce (sum)",
    ),
    "left in another scale": (
        "added contiguous",
        "    _unweigh(packed, out, lse, most)\n",
        "",
        "result",
        "is off by",
    ),
    "no number": (
        "added",
        "    most.clamp_(min=torch.finfo(most.dtype).min)  # -inf less -inf is no number\n",
        "    most.masked_fill_(most > -9, -torch.inf)\n",
        "result",
        "NaN",
    ),
    "a slice of what is whole": (
        "keys whole",
        'PLACEMENTS["k"]',
        'PLACEMENTS["q"]',
        "layout",
        "gives another part than the pins say",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_bug(what: str) -> None:
    """Found by the check that it breaks, with the rank and words."""
    name, old, new, check, words = PLANTED[what]
    text = module(name).text
    assert text.count(old) == 1, (text.count(old), old, text)
    with pytest.raises(VirtualError) as caught:
        played(name, text.replace(old, new))
    print(caught.value)
    assert caught.value.check == check and words in caught.value.message
    assert caught.value.rank >= 0


def started(played: Trace) -> list[Call]:
    """What a trace starts."""
    return [step for step in planned(played) if isinstance(step, Call)]


def test_what_a_trace_starts() -> None:
    """Fronts of buffers by their own bytes; what a reduction does."""
    plan = module("direct").plan
    played = trace(plan, 1, with_lse=False)
    messages = [m for e in played.events if isinstance(e, Batch) for m in (*e.sends, *e.recvs)]
    assert any(m.nbytes not in (None, played.buffers[m.buffer].nbytes) for m in messages)
    sizes = [size for call in started(played) for _, size in (*call.sends, *call.recvs)]
    buffers = [played.buffers[m.buffer].nbytes if m.nbytes is None else m.nbytes for m in messages]
    assert sizes == buffers
    added = trace(module("added").plan, 0, with_lse=False)
    assert [call.how for call in started(added)] == ["max", "sum"]
    assert [e.reduce for e in added.events if isinstance(e, Collective)] == ["max", "sum"]
