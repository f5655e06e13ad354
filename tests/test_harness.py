"""The harness itself: real processes that fail, hang and die, and the reference against torch."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from pathlib import Path
from types import ModuleType

import numeric_cases
import pytest
import reference
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from numeric_cases import Call, PeakBytes, Problem, assert_refused, load_module, recorded
from ranks import Case, Ranks, run_cases, run_ranks


def total(rank: int, world: int, factor: int) -> tuple[int, float]:
    """This rank, and a sum over all ranks."""
    x = torch.full((3,), float(rank * factor))
    dist.all_reduce(x)
    return rank, x[0].item()


def one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def all_raise(rank: int, world: int) -> None:
    raise ValueError(f"boom {rank}")


def one_hangs(rank: int, world: int) -> None:
    while rank == 1:
        time.sleep(0.1)


def one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def not_picklable(rank: int, world: int) -> object:
    return lambda: rank


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("world", [1, 2, 16])
def test_results_come_in_rank_order(world: int) -> None:
    sum_of_ranks = world * (world - 1) / 2
    assert run_ranks(world, total, 2) == [(rank, 2 * sum_of_ranks) for rank in range(world)]


def test_tensors_come_back() -> None:
    first, second = run_ranks(2, lambda rank, world: torch.arange(3) + rank)
    assert first.tolist() == [0, 1, 2] and second.tolist() == [1, 2, 3]


def test_error_of_one_rank() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="boom") as failure:
        run_ranks(3, one_raises)
    message = str(failure.value)
    assert "one_raises on 3 ranks failed\nrank 1: Traceback" in message
    assert "rank 2 did not finish" in message
    assert time.monotonic() - start < 30, "the others were waited for until their timeout"


def test_hang_names_the_rank_and_the_line() -> None:
    with pytest.raises(AssertionError, match="rank 1 did not finish within 1 s") as failure:
        run_ranks(2, one_hangs, timeout=1)
    assert "in one_hangs" in str(failure.value)
    assert "rank 0" not in str(failure.value)


def test_dead_process() -> None:
    with pytest.raises(AssertionError, match="rank 1: the process died, exit code 3"):
        run_ranks(2, one_dies)


def test_value_that_does_not_pickle() -> None:
    with pytest.raises(AssertionError, match="pickle"):
        run_ranks(2, not_picklable)


def test_failed_cases_leave_the_others_alone() -> None:
    before = open_files()
    bad = [all_raise, one_raises, one_hangs, one_dies]
    cases = [Case("first", total, (1,))]
    for fn in bad:
        cases += [Case(fn.__name__, fn), Case(f"after {fn.__name__}", total, (1,))]
    outcomes = run_cases(2, cases, timeout=1)
    assert list(outcomes) == [case.id for case in cases]
    failed = {id for id, outcome in outcomes.items() if outcome.error}
    assert failed == {fn.__name__ for fn in bad}
    assert outcomes["after one_dies"].get() == [(0, 1.0), (1, 1.0)]
    assert not multiprocessing.active_children()
    assert open_files() == before


def test_cases_share_one_fork() -> None:
    ranks = Ranks(2)
    for number in range(3):
        ranks.add(str(number), lambda rank, world: os.getpid())
    assert ranks.ids == ["0", "1", "2"]
    assert ranks.result("0") == ranks.result("1") == ranks.result("2")


def test_partials_are_made_before_the_fork() -> None:
    made = functools.partial(os.getpid)
    outcomes = run_cases(2, [Case("made", lambda rank, world, pid: pid, (made,))])
    assert outcomes["made"].get() == [os.getpid()] * 2


def test_partial_that_fails_fails_its_case_alone() -> None:
    bad = Case("bad", total, (functools.partial(int, "x"),))
    outcomes = run_cases(2, [bad, Case("good", total, (1,))])
    assert outcomes["good"].get() == [(0, 1.0), (1, 1.0)]
    with pytest.raises(AssertionError, match="bad was not started"):
        outcomes["bad"].get()


def test_same_id_twice() -> None:
    with pytest.raises(ValueError, match="same id"):
        run_cases(1, [Case("a", total, (1,)), Case("a", total, (2,))])


# --- the reference --------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [reference.full, reference.causal])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
def test_reference_is_scaled_dot_product_attention(
    mask: reference.Mask, heads: int, kv_heads: int
) -> None:
    problem = Problem(seq=10, heads=heads, kv_heads=kv_heads, head_dim=7, value_dim=5)
    q, k, v = problem.inputs(torch.float64)
    out, lse = reference.attention(q, k, v, mask, scale=0.3)
    share = heads // kv_heads
    k, v = (x.repeat_interleave(share, 2) for x in (k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=mask is reference.causal, scale=0.3
        )
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=0, atol=1e-13)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    if mask is reference.causal:
        scores += torch.full((10, 10), float("-inf"), dtype=torch.float64).triu(1)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


def test_reference_rows_without_keys() -> None:
    q, k, v = Problem(seq=4).inputs(torch.float64)
    q.requires_grad_()
    out, lse = reference.attention(q, k, v, reference.causal, k_positions=torch.arange(2, 6))
    assert not out[:, :2].any() and out[:, 2:].all()
    assert (lse[:, :, :2] == float("-inf")).all() and lse[:, :, 2:].isfinite().all()
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_tokens_of() -> None:
    def all_tokens(order: str) -> list[list[int]]:
        return [reference.tokens_of(order, rank, 2, 8).tolist() for rank in range(2)]

    assert all_tokens("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all_tokens("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert all_tokens("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match="6 tokens"):
        reference.tokens_of("zigzag", 0, 2, 6)


@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 12), st.integers(1, 5))
def test_every_token_has_one_owner(order: str, world: int, each: int) -> None:
    seq = 2 * world * each
    tokens = [reference.tokens_of(order, rank, world, seq) for rank in range(world)]
    assert {x.numel() for x in tokens} == {2 * each}
    assert torch.cat(tokens).sort().values.tolist() == list(range(seq))


# --- what the checks of modules are made of -------------------------------------------------

EXCHANGE = """
import torch
import torch.distributed as dist

all_reduce = dist.all_reduce  # bound at import

def exchange(x, group):
    me, size = group.rank(), group.size()
    y = torch.empty_like(x)
    recv = dist.P2POp(dist.irecv, y, group=group, group_peer=(me - 1) % size)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(me + 1) % size)
    for work in dist.batch_isend_irecv([recv, send]):
        work.wait()
    all_reduce(y, op=dist.ReduceOp.MAX, group=group)
    parts = torch.empty(size, 2)
    dist.all_gather_into_tensor(parts.view(-1), y[:2], group=group)
    return parts
"""


def record_exchange(rank: int, world: int) -> list[Call]:
    module: ModuleType = load_module(EXCHANGE)
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    with recorded(module) as calls:
        module.exchange(torch.ones(6), group)
    assert dist.all_reduce is module.all_reduce, "the patch is undone"
    return calls


def test_recorded_calls() -> None:
    group = (2, 0, 1)
    for rank, calls in enumerate(run_ranks(3, record_exchange)):
        me = group.index(rank)
        ops = (("recv", (me - 1) % 3, 24), ("send", (me + 1) % 3, 24))
        assert calls == [
            Call("p2p", group, ops, 24, 24),
            Call("all_reduce", group, (), 24, 24, "MAX"),
            Call("all_gather", group, (), 8, 24),
        ]


def test_peak_bytes() -> None:
    x = torch.ones(100)  # 400 bytes
    with PeakBytes(x, x[10:]) as memory:
        y = x + 1  # 800
        view = y[5:].reshape(5, 19)
        del y
        z = torch.cat([view, view])  # 800 + 760
        del z, view  # 400
        x.mul_(2)
        _ = x.double()  # 1200
    assert memory.peak == 1560
    assert memory.live == 1200


def test_load_module_keeps_source_lines() -> None:
    module = load_module("def f():\n    raise RuntimeError('here')\n", "emitted_f")
    with pytest.raises(RuntimeError) as failure:
        module.f()
    assert "raise RuntimeError('here')" in str(failure.traceback[-1].statement)


def test_assert_refused() -> None:
    def refuse() -> None:
        raise ValueError("8 ranks, not 3")

    assert assert_refused(refuse, 8, 3) == "8 ranks, not 3"
    with pytest.raises(AssertionError, match="does not name"):
        assert_refused(refuse, 9)
    with pytest.raises(AssertionError, match="not refused"):
        assert_refused(lambda: None)


def test_close_counts_infinities_and_nan() -> None:
    problem, inf, nan = Problem(seq=1), float("-inf"), float("nan")
    close = numeric_cases.assert_close
    assert close(torch.tensor([inf, 1.0]), torch.tensor([inf, 1.5]), 0.6, "x", problem) == 0.5
    for wrong in (inf, nan):
        with pytest.raises(AssertionError, match="off by .* seed=20|seed=20.*off by"):
            close(torch.tensor([wrong]), torch.tensor([1.0]), 1e9, "x", problem)
