"""Modules whose ranks have partial results for others' queries: on gloo, against their plan."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import expected
from numeric_cases import (
    Problem,
    assert_refused,
    check_forward,
    check_large_gaps,
    check_layout,
    check_sees_others,
    check_views,
    compiled,
    named,
    own_inputs,
    peak_bytes,
    record_call,
    recorded,
    setup,
)
from ranks import Ranks

from mercurygen.emit.callsites import check_text
from mercurygen.emit.module import emit
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.errors import Refusal
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.schedule.apply import apply
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse

ATTENTION = load("attention")
ZIGZAG, PLAIN, FULL = (True, "zigzag"), (True, "contiguous"), (False, "contiguous")
KINDS = {ZIGZAG: "zigzag", PLAIN: "contiguous", FULL: "full"}  # (causal, order)
TOKENRING = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m direct"
RELAYED = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m"
SPLIT_KV = "parallelize S_kv over m\nshard q: S_q over m\nshard out, lse: S_q over m"
ALONE = "parallelize S_kv over m\nshard q: S_q over m\nshift out, lse: S_q along m"
DOUBLE = "parallelize S_kv over n, m\nshift q: S_q along n, m\nshift out, lse: S_q along n{0}, m{0}"
KV_RING = "parallelize S_q over n\nshift k, v: S_kv along n"
SCHEDULES = {  # mesh, body
    "tokenring": ("m=4", TOKENRING),
    "relayed": ("m=4", RELAYED),
    "split-kv": ("m=4", SPLIT_KV),
    "alone": ("m=4", ALONE),
    "alone-direct": ("m=4", f"{ALONE} direct"),
    "double": ("n=2 m=2", DOUBLE.format(" direct")),
    "double-relayed": ("n=2 m=2", DOUBLE.format("")),
    "double-mixed": (
        "n=2 m=3",
        DOUBLE.replace("n{0}, m{0}", "n, m direct"),
    ),
    "ring-of-split-kv": ("n=2 m=2", f"{KV_RING}\n{SPLIT_KV}"),
    "ring-of-tokenring": ("n=2 m=2", f"{KV_RING}\n{TOKENRING}"),
    "tokenring-of-ring": (
        "n=3 m=2",
        f"parallelize S_q over n\n{TOKENRING}\nshift k, v: S_kv along n",
    ),
    "ring-of-relayed": ("n=2 m=2", f"{KV_RING}\n{RELAYED}"),
    "heads-around": ("n=2 m=2", f"parallelize H over n\n{TOKENRING}"),
    "heads-around-split-kv": ("n=2 m=2", f"parallelize H over n\n{SPLIT_KV}"),
    "heads-inside": (
        "m=3 n=2",
        f"{TOKENRING}\nparallelize H over n",
    ),
    "two-split-kv": (
        "n=2 m=2",
        "parallelize S_kv over n, m\nshard q: S_q over n, m\nshard out, lse: S_q over n, m",
    ),
}
PLAIN_ALSO = ("tokenring", "split-kv", "alone", "alone-direct", "double", "heads-around-split-kv")
NOT_ZIGZAG = {  # why: queries of one owner are no run of all; a tile in more than 8 blocks
    "alone": "order",
    "alone-direct": "order",
    "heads-around-split-kv": "blocks",
}
WHOLE = "parallelize S_kv over m\nreplicate q over m\nreplicate out, lse over m"
WHOLE_PINS = "pin k, v: S over m\npin q: replicated\npin out, lse: replicated\n"
TWO_WHOLE = WHOLE.replace("over m", "over n, m")
VARIANTS = {
    "bfloat16": {"head_dim": 24, "value_dim": 40},
    "bfloat16-padded": {"head_dim": 20, "value_dim": 12},
    "float32": {"head_dim": 24, "value_dim": 24},
    "float32-padded": {"head_dim": 20, "value_dim": 20},
    "float64": {"head_dim": 12, "value_dim": 30},
}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Made:
    """A schedule and its plan."""

    schedule: Schedule
    plan: Plan

    @property
    def late(self) -> functools.partial[str]:
        """The text, made just before the fork."""
        return functools.partial(_compiled, self)


_TEXTS: dict[str, str] = {}


def _compiled(made: Made) -> str:
    compiled(text_of(made), named(text_of(made)))
    return text_of(made)


def text_of(made: Made) -> str:
    """The text of a schedule: sizes are no part of the code."""
    schedule = made.schedule
    key = f"{schedule.mesh} {schedule.directives} {schedule.problem.mask}"
    if key not in _TEXTS:
        _TEXTS[key] = emit(schedule, made.plan, "tested")
    return _TEXTS[key]


def made(mesh: str, body: str, problem: Problem, dtype: str = "bfloat16", pins: str = "") -> Made:
    """A schedule on levels that are its mesh."""
    dims = ", ".join(word.partition("=")[0] for word in mesh.split())
    pins = pins or f"pin q, k, v, out, lse: S over {dims}\n"
    source = parse(f"""operator attention
problem batch={problem.batch} seq={problem.seq} heads={problem.heads} \
kv_heads={problem.kv_heads} head_dim={problem.head_dim} \
v_head_dim={problem.value_dim or problem.head_dim} {dtype} {"causal" if problem.causal else "full"}
topology test sha256:0123456789abcdef {" ".join(f"{x} wire 25GB/s" for x in mesh.split())}
group {mesh}
tp 1
mesh {mesh}
order S: {problem.order} over {dims}
{pins}{body}
""")
    plan = lower(apply(ATTENTION, source.schedule, source.spans))
    assert not isinstance(plan, Refusal), plan.slug
    return Made(source.schedule, plan)


# --- the cases ------------------------------------------------------------------------------

RANKS = {world: Ranks(world) for world in (2, 4, 6, 8)}
CASES: dict[str, Made] = {}
PEAKS: dict[str, tuple[Made, bool]] = {}


def check_dtypes(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype
) -> list[Any]:
    """Largest errors of out and lse in float64 and another dtype."""
    return [check_forward(rank, world, text, problem, each) for each in (torch.float64, dtype)]


def problem_for(world: int, causal: bool, order: str) -> Problem:
    """No two sizes alike; odd head sizes."""
    sizes = {"heads": 12, "kv_heads": 6, "head_dim": 20, "value_dim": 12}
    return Problem(12 * world, causal=causal, order=order, batch=1 + causal, **sizes)


def add(name: str, mesh: str, body: str, kind: tuple[bool, str], pins: str = "") -> None:
    """Numbers, calls and peaks of a schedule."""
    world = prod(int(word.partition("=")[2]) for word in mesh.split())
    problem, ranks = problem_for(world, *kind), RANKS[world]
    case = CASES[name] = made(mesh, body, problem, pins=pins)
    others = [dtype for dtype in DTYPES if dtype != torch.float64]
    dtype = others[len(CASES) % len(others)]
    ranks.add(f"numbers-{name}", check_dtypes, case.late, problem, dtype)
    for lse in (False, True):
        ranks.add(f"calls-{name}-{lse}", record_call, case.late, problem, torch.bfloat16, lse)
    for variant, sizes in VARIANTS.items():
        dtype, run = variant.partition("-")[0], replace(problem, **sizes)
        for lse in (False, True) if variant == "bfloat16" else (False,):
            peak = f"{name}-{variant}{'-lse' if lse else ''}"
            PEAKS[peak] = made(mesh, body, run, dtype, pins), lse
            ranks.add(f"peak-{peak}", peak_bytes, case.late, run, getattr(torch, dtype), lse)


def build() -> None:
    """Every schedule, causal and full."""
    for name, (mesh, body) in SCHEDULES.items():
        kinds = [FULL] if name in NOT_ZIGZAG else [ZIGZAG, FULL]
        for kind in [*kinds, *([PLAIN] if name in PLAIN_ALSO else [])]:
            add(f"{name}-{KINDS[kind]}", mesh, body, kind)
    for kind, word in KINDS.items():
        add(f"whole-{word}", "m=4", WHOLE, kind, WHOLE_PINS)
    pins = "pin q, out, lse: S over m\npin k, v: replicated\n"
    add("kv-whole-zigzag", "m=4", "parallelize S_q over m\nreplicate k, v over m", ZIGZAG, pins)
    add("two-whole", "n=2 m=2", TWO_WHOLE, ZIGZAG, WHOLE_PINS.replace("over m", "over n, m"))


build()
ERRORS = {"tokenring": TOKENRING, "split-kv": SPLIT_KV}
LONG = Problem(seq=512, heads=4, kv_heads=2, head_dim=32, batch=2)
for _world in (2, 8):
    for _name, _body in ERRORS.items():
        _case = made(f"m={_world}", _body, LONG)
        RANKS[_world].add(f"error-{_name}", check_forward, _case.late, LONG, torch.bfloat16)


def check_failing_share(rank: int, world: int, text: str, problem: Problem) -> None:
    """A kernel that fails on all ranks leaves nothing in flight: the next call is right."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float64)
    block, blocks = module._block_forward, []

    def failing(*args: Any, **keywords: Any) -> Any:
        blocks.append(args)
        if len(blocks) == 2:
            raise ArithmeticError("a block")
        return block(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_block_forward", failing)
        with pytest.raises(ArithmeticError):
            module.attention(*local, mesh)
    check_forward(rank, world, text, problem, torch.float64)


def check_self_check(rank: int, world: int, text: str, problem: Problem) -> None:
    """What the module's own check compares."""
    module, mesh = setup(text)
    for dtype in DTYPES:
        error, allowed = module._error(mesh, dtype)
        assert error <= allowed, (dtype, error, allowed)
    assert not any(module._blind(mesh, other) for other in range(world))


def check_whole(rank: int, world: int, text: str, problem: Problem) -> None:
    """Tensors that every rank holds: what is no such tensor is refused, by its shape or sum."""
    module, mesh = setup(text)
    q, k, v = own_inputs(module, mesh, problem, torch.float32)
    module.check_inputs(q, k, v, mesh)
    assert_refused(lambda: module.check_inputs(q + rank, k, v, mesh), "different q")
    assert_refused(lambda: module.check_inputs(q, k * 0 + 1, v, mesh), "the same k")
    with recorded(module) as calls:
        short = q[:, : k.shape[1]]
        assert_refused(lambda: module.attention(short, k, v, mesh), "N = 4 S")
        full = problem.inputs(torch.float32)
        assert_refused(lambda: module.attention(*full, mesh), "N = 4 S")
        refused = problem.seq + 4
        assert_refused(lambda: module.attention(q, k, v, mesh, seq=refused), refused)
    assert not calls


MORE = {  # further checks: on which cases
    check_layout: ("tokenring-zigzag", "whole-zigzag", "kv-whole-zigzag", "two-whole"),
    check_self_check: ("tokenring-zigzag", "split-kv-full", "whole-contiguous", "whole-full"),
    check_sees_others: ("tokenring-zigzag", "relayed-zigzag", "split-kv-contiguous"),
    check_failing_share: ("tokenring-zigzag", "relayed-zigzag", "ring-of-tokenring-zigzag"),
    check_whole: ("whole-contiguous", "whole-zigzag"),
}
IN_DTYPE = {
    check_large_gaps: ("tokenring-full", "split-kv-full", "relayed-full"),
    check_views: ("tokenring-zigzag", "ring-of-tokenring-zigzag", "split-kv-contiguous"),
}
CHECKS: dict[str, int] = {}  # ranks of every further check
for _check, _names in [*MORE.items(), *IN_DTYPE.items()]:
    for _name in _names:
        _made = CASES[_name]
        _world = _made.plan.program.mesh.size
        _kind = next(k for k, w in KINDS.items() if _name.endswith(w) or _name == "two-whole")
        _id = f"{_check.__name__}-{_name}"
        _more = (torch.float64,) if _check in IN_DTYPE else ()
        CHECKS[_id] = _world
        RANKS[_world].add(_id, _check, _made.late, problem_for(_world, *_kind), *_more)


# --- on gloo --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    """Every rank's out and lse in two of four dtypes; rows without a key on their rank, too."""
    RANKS[CASES[name].plan.program.mesh.size].result(f"numbers-{name}")


@pytest.mark.parametrize("name", CASES)
def test_calls_are_the_plans(name: str) -> None:
    """Kind, group, peers, bytes and order, on every rank."""
    plan = CASES[name].plan
    for lse in (False, True):
        runs = RANKS[plan.program.mesh.size].result(f"calls-{name}-{lse}")
        for rank, calls in enumerate(runs):
            assert calls == expected(plan, trace(plan, rank, with_lse=lse)), f"rank {rank}"


@pytest.mark.parametrize("name", PEAKS)
def test_live_bytes_are_the_plans(name: str) -> None:
    """Every rank's peak, to the byte."""
    case, lse = PEAKS[name]
    world = case.plan.program.mesh.size
    want = [trace(case.plan, rank, with_lse=lse).peak() for rank in range(world)]
    assert RANKS[world].result(f"peak-{name}") == want


@pytest.mark.parametrize("name", CHECKS)
def test_more(name: str) -> None:
    """Layout, views, other ranks' keys, large gaps, failures, the module's own check."""
    RANKS[CHECKS[name]].result(name)


@pytest.mark.parametrize("name", ERRORS)
def test_partial_results_are_not_rounded(name: str) -> None:
    """In bfloat16 eight ranks are as good as two: partial results cross links in float32."""
    for what in (0, 1):  # out, lse: of rounded ones the latter would be off a hundred times more
        two, eight = (
            max(errors[what] for errors in RANKS[world].result(f"error-{name}")) for world in (2, 8)
        )
        assert 0 < eight <= 1.5 * two


# --- the text -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_text_is_the_plans(name: str) -> None:
    """Every transfer, wait, kernel call and merge, interpreted without torch."""
    case = CASES[name]
    assert check_text(text_of(case), case.plan).events > case.plan.program.mesh.size
    lines = text_of(case).splitlines()
    assert len(lines) < 600 and "nan_to_num" not in text_of(case)


def test_text_is_formatted_and_clean(tmp_path: Path) -> None:
    """black and ruff have nothing to say about any of them."""
    for number, case in enumerate(CASES.values()):
        (tmp_path / f"module_{number}.py").write_text(text_of(case))
    config = str(Path(__file__).parent.parent / "pyproject.toml")
    ruff = ["ruff", "check", "-q", "--config", config, str(tmp_path)]
    subprocess.run([sys.executable, "-m", *ruff], check=True)
    some = [str(tmp_path / f"module_{number}.py") for number in (0, len(CASES) - 1)]
    black = ["black", "-q", "--check", "-l", "100", "-t", "py310", *some]
    subprocess.run([sys.executable, "-m", *black], check=True)


MUTATIONS = [
    ("tokenring-zigzag", "(2 * me - owner) % size", "(2 * me - owner + 1) % size"),
    ("tokenring-zigzag", "            _merge_arrived(out, lse, arriving)\n", ""),
    ("tokenring-zigzag", "share = _dense(share)", "share = list(share)"),
    ("tokenring-zigzag", "    _merge_arrived(out, lse, arriving)\n    return", "    return"),
    ("relayed-zigzag", "            _merge(*share, *arriving)\n", ""),
    ("relayed-zigzag", "return arriving", "return share"),
    ("relayed-full", "            share = _dense(share)\n", ""),
    ("split-kv-zigzag", "_deal(lse, 2, group.size())", "_deal(lse, 1, group.size())"),
    (
        "split-kv-full",
        "strict=True):\n        _merge(out, lse, *share)",
        "strict=True):\n        x",
    ),
    ("alone-full", "me - step - 1", "me - step"),
    ("whole-contiguous", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN"),
    ("whole-contiguous", "    _unweigh(packed, out, lse, most)\n", ""),
    ("ring-of-tokenring-zigzag", "[n], [m_group.rank()]", "[n], [n_group.rank()]"),
]


@pytest.mark.parametrize("name, old, new", MUTATIONS)
def test_another_text_is_refused(name: str, old: str, new: str) -> None:
    """What communicates, merges or sends otherwise than the plan."""
    text = text_of(CASES[name])
    assert old in text
    with pytest.raises(TextMismatch):
        check_text(text.replace(old, new), CASES[name].plan)


def test_whole_tensors_are_placed_so() -> None:
    """PLACEMENTS and the docstring say what every rank holds."""
    text = text_of(CASES["whole-contiguous"])
    assert 'name: (Replicate(),) for name in ("q", "out", "lse")' in text
    assert 'PLACEMENTS["k"] = (Shard(1),)' in text
    assert "Every rank holds all of q and a slice of the sequence of k and v" in text
    assert "q [B, N, h, D], k [B, s, k, D]" in text
