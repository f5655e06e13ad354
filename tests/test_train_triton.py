"""Modules with the Triton kernel and its gradient: on gloo against float64, texts, the search.

On CPUs such a module works its blocks out in torch; one case runs the kernels in Triton's
interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import run
from differentiable import SAVE, Trained, Used, case_of, check_gradients, check_used, compare
from emitted import expected
from numeric_cases import Problem
from priced import network_of
from ranks import Ranks

from mercurygen.check.prove import prove
from mercurygen.cost.kernels import Kernels
from mercurygen.cost.topology import load
from mercurygen.emit import kept
from mercurygen.emit.callsites import check_text
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.errors import UserError
from mercurygen.ir.kernel import DEFAULTS
from mercurygen.ir.problem import Problem as Parameters
from mercurygen.lower.events import Derive, Fill, Kernel
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import EVERY
from mercurygen.schedule.directives import Patch
from mercurygen.search.search import search

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
RING, RINGS = "shift k, v: S_kv along", "shift k, v, dk, dv: S_kv along"
GATHER, GATHERS = "shard k, v: S_kv over", "shard k, v, dk, dv: S_kv over"
ROWS, HEADS, KEYS = "parallelize S_q over", "parallelize H over", "parallelize S_kv over"
BURST = "shift q, do, lse, delta, dq: S_q along"
SMALL = Problem(seq=48, heads=12, kv_heads=4, head_dim=10, value_dim=6)
FULL = replace(SMALL, causal=False, order="contiguous", head_dim=6, value_dim=10)
UNIFIED = f"{ROWS} n;{HEADS} m;{RING} n"


def made(mesh: str, forward: str, backward: str, problem: Problem = SMALL) -> Trained:
    """With the Triton kernel."""
    return Trained(mesh, f"{forward};patch body with triton", backward, problem)


CASES = {
    "ring": made("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m"),
    "ring, full": made("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", FULL),
    "ring, contiguous": made(
        "m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", replace(SMALL, order="contiguous")
    ),
    "ring, stripes": made(
        "m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", replace(SMALL, order="striped")
    ),
    "ring of 2": made("m=2", f"{ROWS} m;{RING} m", f"{RINGS} m", replace(SMALL, kv_heads=12)),
    "ulysses": made("m=2", f"{HEADS} m", f"{SAVE} inner"),
    "ulysses, outer": made("m=2", f"{HEADS} m", f"{SAVE} outer", FULL),
    "chunked ulysses": made("m=2", f"{HEADS} m;tile H by 2", f"{SAVE} outer"),
    "unified": made("n=2 m=2", UNIFIED, f"{RINGS} n"),
    "unified, burst": made("n=2 m=2", UNIFIED, f"{KEYS} n;{HEADS} m;{BURST} n;{SAVE} outer"),
    "double ring": made("n=2 m=2", f"{ROWS} n, m;{RING} n, m", f"{RINGS} n, m"),
    "allgather": made("m=4", f"{ROWS} m;{GATHER} m", f"{GATHERS} m"),
    "allgather, full": made("m=4", f"{ROWS} m;{GATHER} m", f"{GATHERS} m", FULL),
    "burst": made("m=4", f"{ROWS} m;{RING} m", f"{KEYS} m;{BURST} m"),
    "burst, full": made("m=4", f"{ROWS} m;{RING} m", f"{KEYS} m;{BURST} m", FULL),
    "query heads": made(
        "n=2 m=2", f"{HEADS} n;parallelize G over m;{GATHER} m", f"{GATHERS} m", SMALL
    ),
}
CASES["query heads"] = replace(CASES["query heads"], problem=replace(SMALL, heads=8, kv_heads=2))
FLOATS = (torch.float64, torch.float32, torch.bfloat16)

RANKS = {world: Ranks(world) for world in (2, 4)}
for _name, _made in CASES.items():
    _dtypes = FLOATS if _name in ("ring", "ulysses", "burst") else FLOATS[:1]
    RANKS[_made.world].add(_name, check_gradients, _made.late, _made.problem, *_dtypes)
    RANKS[_made.world].add(
        f"used by {_name}", check_used, _made.late, _made.problem, torch.bfloat16
    )


def check_interpreted(rank: int, world: int, text: str, problem: Problem) -> None:
    """The kernels themselves, in Triton's interpreter: what is imported first decides."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    case = case_of(text, problem, torch.float32)
    case.module._runs_kernels = lambda q: True
    out = case.module.attention(*case.inputs, case.mesh)
    out.backward(case.grad_out)
    compare(case, [out.detach(), *(x.grad for x in case.inputs)], problem, torch.float32)


INTERPRETED = Ranks(2)
_made = replace(
    CASES["burst"], mesh="m=2", problem=Problem(seq=72, heads=2, kv_heads=1, head_dim=16)
)
INTERPRETED.add("burst", check_interpreted, _made.late, _made.problem)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    """On every rank."""
    RANKS[CASES[name].world].result(name)


@needs_triton
def test_kernels() -> None:
    """On two ranks, where queries and delta travel; forked where nothing imported triton yet."""
    text = f"import {Path(__file__).stem} as tests; tests.INTERPRETED.result('burst')"
    command, here = [sys.executable, "-c", text], Path(__file__).parent
    ran = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_calls_and_bytes(name: str) -> None:
    """What every rank sends, receives and holds: nothing beside what the plans say."""
    case = CASES[name]
    forward, backward = (each.plan for each in case.plans)
    found: list[Used] = RANKS[case.world].result(f"used by {name}")
    peaks = [trace(backward, rank).peak() for rank in range(case.world)]
    wider = kept.backward_peak_bytes(forward, backward) - max(peaks)
    for rank, used in enumerate(found):
        played = trace(forward, rank, with_lse=True)
        assert used.forward == expected(forward, played), f"rank {rank}"
        assert used.backward == expected(backward, trace(backward, rank)), f"rank {rank}"
        assert used.most_backward == wider + peaks[rank], f"rank {rank}"
    assert max(used.most for used in found) == kept.peak_bytes(forward, backward)


@pytest.mark.parametrize("name", CASES)
def test_plan_and_text(name: str) -> None:
    """Both are proved and agree; delta is made once, and no block needs anything beside it."""
    case = CASES[name]
    forward, backward = case.plans
    prove(backward.plan, backward.schedule.links)
    assert check_text(case.plain, forward.plan, backward=backward.plan).events > 10 * case.world
    played = trace(backward.plan, 0)
    assert sum(isinstance(event, Derive) for event in played.events) == 1
    calls = [event for event in played.events if isinstance(event, Kernel)]
    assert calls and not any(call.scratch for call in calls)
    assert any(isinstance(event, Fill) for event in played.events) or len(calls) == 1


@pytest.mark.parametrize(
    "old, new",
    [
        ("_delta(grad_out, out)", "_delta(out, grad_out)"),
        ("(dq[:, rows], dk[:, cols], dv[:, cols])", "(dq[:, rows], dk[:, rows], dv[:, cols])"),
        ("(dq[:, rows], dk[:, cols], dv[:, cols])", "(dq, dk[:, cols], dv[:, cols])"),
        ("delta[:, :, rows], scale", "delta, scale"),
        ("scale, (dq[:, rows]", "2 * scale, (dq[:, rows]"),
        ("dv[:, cols]), ahead)", "dv[:, cols]), ahead=0)"),
        ("delta = _delta(grad_out, out)\n", "delta = _delta(grad_out, out)\n" * 2),
    ],
)
def test_wrong_texts_are_seen(old: str, new: str) -> None:
    """A block that reads, is masked or adds otherwise is not the plan's."""
    case = CASES["ring"]
    forward, backward = case.plans
    indented = new.replace("\n", "\n        ", 1) if "\n" in new else new
    assert old in case.plain
    with pytest.raises(TextMismatch):
        check_text(case.plain.replace(old, indented), forward.plan, backward=backward.plan)


def test_out_stays_where_its_gradient_is() -> None:
    """Delta is made where their rows lie: of what is kept out alone does not lie as the body
    has it, and a number a row crosses the border in its place."""
    _, backward = CASES["ulysses"].plans
    pins = {tensor.name: tensor.pin for tensor in backward.program.tensors}
    assert pins["out"] == pins["do"] == pins["delta"] == ("S_q",) and pins["q"] == ("H",)
    crossing = {name for step in backward.plan.before for name in step.tensors}
    assert crossing == {"do", "delta"}


def test_price() -> None:
    """Seven products where torch's gradient has five, at its rate; no kernels that merge."""
    case = CASES["ring"]
    plans = [
        each.plans[1].plan
        for each in (case, Trained("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m", SMALL))
    ]
    gpu = network_of(plans[0].program.mesh).topology.gpu
    large = {"B": 1, "H": 16, "G": 2, "S_q": 32768, "S_kv": 32768, "D": 128, "D_v": 128}
    prices = []
    for plan in plans:
        kernels = Kernels(plan, gpu)
        kernels.width, kernels.sizes = 128, (128, 128)
        extents = tuple(large[axis.name] for axis in plan.program.axes)
        prices.append(kernels.call(extents, EVERY, True))
    (ours, copies, *_), (atens, merges, *_) = prices
    assert 1.4 <= ours / atens < 1.5 and copies == 0 < merges


def test_columns_before_the_square_cost_whole() -> None:
    """A causal block of many columns costs what its live pairs do, whichever way it is cut."""
    plan = CASES["allgather"].plans[1].plan
    kernels = Kernels(plan, network_of(plan.program.mesh).topology.gpu)
    sizes = {axis.name: axis.extent for axis in plan.program.axes} | {"B": 64, "H": 8, "G": 8}

    def seconds(rows: int, cols: int, causal: bool) -> float:
        extents = tuple((sizes | {"S_q": rows, "S_kv": cols}).values())
        band = (None, cols - rows) if causal else EVERY
        return kernels.call(extents, band, True)[0]

    parts = seconds(8192, 65536 - 8192, False) + seconds(8192, 8192, True)
    assert seconds(8192, 65536, True) == pytest.approx(parts, rel=0.01)


@pytest.mark.parametrize("topo, sm", [("a100x8", "sm_80"), ("h100x8", "sm_90"), ("l20x8", None)])
def test_tiles_of_the_gpu(topo: str, sm: str | None) -> None:
    """The search writes the tiles for the topology's GPU, of both passes, where it knows them."""
    problem = Parameters(seq=4096, heads=8, kv_heads=8, head_dim=64, v_head_dim=64)
    how = {"design": "ring", "passes": "train", "kernel": "triton"}
    schedule = search("attention", problem, load(topo), **how).best.schedule
    for lines, way in (
        (schedule.directives, "forward"),
        (schedule.backward.directives, "backward"),
    ):
        patches = [dict(d.options) for d in lines if isinstance(d, Patch)]
        if sm is not None:
            assert patches == [DEFAULTS[sm, way]]
        else:
            assert patches == ([{}] if way == "forward" else [])


def test_one_kernel_for_both() -> None:
    """A backward with another kernel than its forward's is refused."""
    with pytest.raises(UserError) as caught:
        _ = made("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m;patch body with aten").plans
    assert caught.value.slug == "kernel-of-both"


def test_unknown_kernel() -> None:
    """Of the command line, with those that there are."""
    ran = run("emit", "attention", "--topo", "a100x8", "--kernel", "trition")
    ran.refused("unknown-kernel", "did you mean `triton`?")
