"""Process groups that are not all ranks in order: subsets, any order, several at once, slices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emitted import Emitted, one
from numeric_cases import (
    Problem,
    assert_refused,
    check_forward,
    check_groups,
    check_slice,
    load_module,
    own_inputs,
    place,
    recorded,
)
from ranks import Ranks

EIGHT, FOUR = Ranks(8, timeout=120), Ranks(4)
GROUPS = {  # of one fork, one after the other: ranks make different numbers of groups
    "upper half": [[4, 5, 6, 7]],
    "odd": [[1, 3, 5, 7]],
    "unsorted": [[6, 2, 0, 4]],
    "two at once": [[4, 5, 6, 7], [0, 1, 2, 3]],
    "two interleaved, unsorted": [[5, 0, 7, 2], [3, 4, 1, 6]],
}
DESIGNS = {
    "ring": (4,),
    "allgather-kv": (2, 2),
    "ulysses": (4,),
    "unified": (2, 2),
    "double-ring": (2, 2),
}


def problem_for(world: int) -> Problem:
    """No two sizes alike."""
    return Problem(seq=20 * world, batch=3, value_dim=36)


def design(name: str, sizes: tuple[int, ...]) -> tuple[Emitted, Problem]:
    """A module for these levels, and a problem for it."""
    problem = problem_for(prod(sizes))
    return one(name, sizes, problem), problem


for _name, _sizes in DESIGNS.items():
    _emitted, _problem = design(_name, _sizes)
    for _which, _groups in GROUPS.items():
        EIGHT.add(f"{_name} on {_which}", check_groups, _emitted.late, _problem, *_groups)
_emitted, _problem = design("ring", (3,))
EIGHT.add("ring of three", check_groups, _emitted.late, _problem, [6, 2, 0])
for _name, _sizes in (("unified-double-ring", (2, 2, 2)), ("unified", (2, 4))):
    _emitted, _problem = design(_name, _sizes)
    for _which, _ranks in (
        ("all ranks", list(range(8))),
        ("all ranks, shuffled", [*range(7, -1, -1)]),
    ):
        EIGHT.add(f"{_name} on {_which}", check_groups, _emitted.late, _problem, _ranks)


@pytest.mark.parametrize("case", EIGHT.ids)
def test_b40_groups(case: str) -> None:
    """B40: peers are the group's, in its order, whatever their global numbers."""
    EIGHT.result(case)


# --- groups made again and again ------------------------------------------------------------


def check_repeated(rank: int, world: int, text: str, problem: Problem, *groups: list[int]) -> None:
    check_groups(rank, world, text, problem, *groups, repeat=20)


REPEATED = {"b16 pairs": (FOUR, "ring", (2,), [[0, 3], [1, 2]])}
REPEATED["b16 unsorted"] = EIGHT, "unified", (2, 2), [[6, 0, 3, 5], [4, 1, 7, 2]]
for _name, (_ranks, _design, _sizes, _groups) in REPEATED.items():
    _emitted, _problem = design(_design, _sizes)
    _ranks.add(_name, check_repeated, _emitted.late, _problem, *_groups)


@pytest.mark.parametrize("case", REPEATED)
def test_b16_groups_repeated(case: str) -> None:
    """B16: 20 times on groups that do not lie side by side, each rank calling only for its own."""
    REPEATED[case][0].result(case)


def check_levelled(rank: int, world: int, text: str, small: str, problem: Problem) -> int:
    """The upper ranks make more groups than the lower ones; then all make a mesh together."""
    module, pair = load_module(text), load_module(small)
    groups = [dist.new_group([6, 7], sort_ranks=False), dist.new_group([7, 5], sort_ranks=False)]
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            pair.make_mesh(group)
    before = len(dist.distributed_c10d._world.pg_names)
    check_groups(rank, world, text, problem, list(range(8)))
    assert len(dist.distributed_c10d._world.pg_names) > before
    del module
    return before


_pair, _ = design("ring", (2,))
_emitted, _problem = design("unified-double-ring", (2, 2, 2))
EIGHT.add("levelled", check_levelled, _emitted.late, _pair.late, _problem)


def test_ranks_that_have_made_more_groups() -> None:
    """torch names a group by how many a rank has made: `make_mesh` brings all to one count."""
    before = EIGHT.result("levelled")
    assert len(set(before)) > 1, "all ranks had made as many: nothing was tested"


# --- slices of a larger mesh ------------------------------------------------------------------

SLICES = {
    "dp2 x unified 2x2": ("unified", (2, 2)),
    "dp2 x ring 4": ("ring", (4,)),
    "dp2 x double ring 2x2": ("double-ring", (2, 2)),
    "dp4 x ulysses 2": ("ulysses", (2,)),
}
for _name, (_design, _sizes) in SLICES.items():
    _emitted, _problem = design(_design, _sizes)
    EIGHT.add(_name, check_slice, _emitted.late, _problem)


@pytest.mark.parametrize("case", SLICES)
def test_b42_slice_of_a_mesh(case: str) -> None:
    """B42: data parallelism outside; coordinates come from the groups, not from the rank."""
    EIGHT.result(case)


# --- meshes that are refused ------------------------------------------------------------------


def check_unordered(rank: int, world: int, text: str, problem: Problem, ranks: list[int]) -> None:
    """A mesh that lists its ranks in another order than its group does."""
    module = load_module(text)
    mesh = dist.DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=tuple(module.MESH))
    good = module.make_mesh()
    inputs = own_inputs(module, good, problem, torch.float32)
    with recorded(module) as calls:
        assert_refused(lambda: module.attention(*inputs, mesh), "order", "make_mesh")
    assert not calls, calls
    module.attention(*inputs, good)
    assert place(good) == rank


def check_elsewhere(rank: int, world: int, text: str, problem: Problem) -> None:
    """A mesh of other ranks."""
    module = load_module(text)
    mesh = dist.DeviceMesh("cpu", torch.tensor([2, 3]), mesh_dim_names=tuple(module.MESH))
    if rank < 2:
        q, k, v = (x[:, :20] for x in problem.inputs(torch.float32))
        assert_refused(lambda: module.attention(q, k, v, mesh), "holds this rank")


_emitted, _problem = design("ring", (4,))
FOUR.add("no rank at its place", check_unordered, _emitted.late, _problem, [1, 0, 3, 2])
FOUR.add("elsewhere", check_elsewhere, _pair.late, problem_for(2))
FIXED = Ranks(4, timeout=10)
FIXED.add("some ranks at their place", check_unordered, _emitted.late, _problem, [3, 1, 0, 2])


def check_counted_names(rank: int, world: int, text: str, problem: Problem) -> None:
    """Groups named by how often a rank has asked for a name, as torch 2.14 does it."""
    c10d = dist.distributed_c10d

    def by_calls(ranks: list[int]) -> str:
        c10d._world.group_count += 1
        return hashlib.sha1(f"{ranks} {c10d._world.group_count}".encode()).hexdigest()

    original, c10d._hash_ranks_to_str = c10d._hash_ranks_to_str, by_calls
    try:
        dist.new_group([0])  # asked for by all, held by one
        for _ in range(rank % 2):
            dist.new_group([rank], use_local_synchronization=True)
        check_forward(rank, world, text, problem, torch.float64)
    finally:
        c10d._hash_ranks_to_str = original


COUNTED = Ranks(4, timeout=30)
COUNTED.add("counted", check_counted_names, _emitted.late, _problem)


def test_names_that_count_calls() -> None:
    """Ranks that have made different numbers of groups agree on names, by either way to count."""
    COUNTED.result("counted")


def test_mesh_whose_groups_are_not_in_its_order() -> None:
    """torch sorts the groups of a mesh that it makes itself."""
    FOUR.result("no rank at its place")


def test_mesh_whose_groups_are_not_in_its_order_for_some() -> None:
    """A rank whose own place agrees refuses too: it would wait for those that do."""
    FIXED.result("some ranks at their place")


def test_mesh_of_other_ranks() -> None:
    """Refused on a rank that it does not hold."""
    FOUR.result("elsewhere")


def check_named(rank: int, world: int, text: str, make: Callable[[], Any], words: Any) -> None:
    module = load_module(text)
    q, k, v = (torch.zeros(1, 4, 8, 8) for _ in range(3))
    mesh = make()
    with recorded(module) as calls:
        assert_refused(lambda: module.attention(q, k, v, mesh), *words)
    assert not calls, calls


def _mesh(shape: tuple[int, ...], *names: str) -> Callable[[], Any]:
    return lambda: dist.init_device_mesh("cpu", shape, mesh_dim_names=names)


WRONG = {
    "swapped names": (_mesh((2, 2), "gpu", "node"), ("node", "gpu", "2")),
    "other shape": (_mesh((4, 1), "node", "gpu"), ("4", "1")),
    "one dimension": (_mesh((4,), "node"), ("4",)),
    "no names": (lambda: dist.init_device_mesh("cpu", (2, 2)), ("node",)),
    "no mesh": (lambda: None, ("DeviceMesh",)),
    "a group": (lambda: dist.group.WORLD, ("DeviceMesh",)),
}
_emitted, _problem = design("unified", (2, 2))
for _name, (_make, _words) in WRONG.items():
    FOUR.add(_name, check_named, _emitted.late, _make, _words)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_mesh(case: str) -> None:
    """Refused by name and shape, before any message."""
    FOUR.result(case)
