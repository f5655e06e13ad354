"""Field reports that virtual ranks show: the numbers are those of test_field_reports.py."""

from __future__ import annotations

import numeric_cases
import pytest
import torch
from emitted import ATTENTION, Emitted, instances, one

from mercurygen.errors import Refusal
from mercurygen.virtual.report import VirtualError
from mercurygen.virtual.run import play

torch.set_num_threads(1)

DESIGNS = {
    "ring": (8,),
    "allgather-kv": (8,),
    "ulysses": (4,),
    "unified": (4, 2),
    "double-ring": (2, 4),
}


def design(name: str, **changes: object) -> Emitted:
    """A named design for a problem that it takes."""
    sizes = {"seq": 3840, "heads": 16, "kv_heads": 8, **changes}
    return one(name, DESIGNS[name], numeric_cases.Problem(**sizes))


def found(emitted: Emitted, old: str, new: str) -> VirtualError:
    """What is wrong with an edited module."""
    assert emitted.text.count(old) == 1, (emitted.text.count(old), old)
    with pytest.raises(VirtualError) as caught:
        play(emitted.text.replace(old, new), emitted.schedule, ATTENTION, "edited.py")
    return caught.value


def passes(emitted: Emitted) -> None:
    """The module as it was emitted is right."""
    assert play(emitted.text, emitted.schedule, ATTENTION, "emitted.py").error <= 1e-12


def test_b04_nothing_visible_weighs_nothing() -> None:
    """Early ranks see none of the late ranks' keys; what is not there yet is -inf, not 0."""
    passes(design("ring", order="contiguous"))
    gather = design("allgather-kv", order="contiguous")
    passes(gather)
    assert found(gather, "-torch.inf, dtype=dtype", "0.0, dtype=dtype").check == "result"


@pytest.mark.parametrize("name", DESIGNS)
def test_b10_the_first_operation_of_a_group_is_everybodys(name: str) -> None:
    """It is, in every design; a message between two of a fresh group is refused."""
    emitted = design(name)
    passes(emitted)
    old = "    _check(q, k, v, mesh, seq)\n"
    new = old + (
        "    if dist.get_rank() < 2:\n"
        "        way = dist.isend if dist.get_rank() else dist.irecv\n"
        "        way(torch.empty(1), 1 - dist.get_rank()).wait()\n"
    )
    error = found(emitted, old, new)
    assert error.check == "deadlock" and "where all its members must come" in error.message


@pytest.mark.parametrize(("kv_heads", "heads", "world"), [(7, 7, 4), (20, 20, 8), (30, 30, 4)])
def test_b27_heads_that_do_not_divide(kv_heads: int, heads: int, world: int) -> None:
    """Ulysses is refused and says why; a ring takes them."""
    problem = numeric_cases.Problem(world * 64, heads, kv_heads)
    refused = next(instances("ulysses", (world,), problem))
    assert isinstance(refused, Refusal)
    assert refused.error().slug == "heads-not-divisible", refused.error()
    passes(one("ring", (world,), problem))


@pytest.mark.parametrize(("kv_heads", "world", "sizes"), [(2, 8, (4, 2)), (1, 4, (4,))])
def test_b30_fewer_key_heads_than_ranks(kv_heads: int, world: int, sizes: tuple[int, ...]) -> None:
    """Ulysses is refused; a ring, around as many heads as there are, is right."""
    problem = numeric_cases.Problem(world * 64, 8, kv_heads)
    refused = next(instances("ulysses", (world,), problem))
    assert isinstance(refused, Refusal) and refused.error().slug == "heads-not-divisible"
    passes(one("unified" if len(sizes) > 1 else "ring", sizes, problem))


def test_b31_only_key_heads_travel() -> None:
    """A module that repeats them before it sends them sends more than the plan says."""
    error = found(
        design("ring"),
        "_walk_ring((k.contiguous(), v.contiguous()), gpu)",
        "_walk_ring(tuple(x.repeat_interleave(2, 2) for x in (k, v)), gpu)",
    )
    assert error.check == "calls" and "the plan has: batch along gpu" in error.message


@pytest.mark.parametrize(
    ("lse", "check"),
    [
        ("F.pad(lse, (0, 32))[..., : lse.shape[2]]", "not-contiguous"),
        ("lse.unsqueeze(3).expand(-1, -1, -1, 2)[..., 0].repeat(1, 1, 2)[..., ::2]", "not-"),
        ("lse.transpose(0, 1).flatten(1)", ""),  # [h, B rows]
        ("lse * 1.4426950408889634", "result"),  # to the base 2
    ],
)
def test_b81_other_layouts_of_the_log_sum_exp(lse: str, check: str) -> None:
    """A kernel that hands out another one is found where it returns."""
    error = found(
        design("ring"),
        "return out.transpose(1, 2)[..., :v_dim], lse",
        f"return out.transpose(1, 2)[..., :v_dim], {lse}",
    )
    assert error.check.startswith(check) and error.check != "layout", error


def test_b84_one_rank_has_the_same_contract() -> None:
    """The same dtypes, scale and log-sum-exp; a module that skips the scale is found."""
    alone = next(instances(None, (1,), numeric_cases.Problem(480, 12, 6, order="contiguous")))
    assert isinstance(alone, Emitted)
    passes(alone)
    error = found(alone, " if scale is None else scale\n", "\n")
    assert error.check == "result" and "with return_lse" in error.message
