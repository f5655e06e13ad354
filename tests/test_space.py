"""The search's space: every schedule once, and none missing."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest

from mercurygen.cost.topology import load
from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.problem import Problem
from mercurygen.lower.plan import Plan, lower
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directives import Along, OrderTokens, Parallelize, Pin, Shard, Shift
from mercurygen.search.place import links
from mercurygen.search.space import points, settle

SMALL = Problem(seq=768, heads=8, kv_heads=4)
ATTENTION = load_operator("attention")


@pytest.mark.parametrize("order", [None, "any"])
@pytest.mark.parametrize("name", ["a100x16", "h100x8", "a100x32", "l40x8"])
def test_every_schedule_once(name: str, order: str | None) -> None:
    """No schedule twice, no two with one plan; each is complete and round-trips."""
    topology = load(name)
    group = tuple(level.size for level in topology.levels)
    space = list(points(ATTENTION, Problem(), links(topology, group), order=order))
    assert len({(point.mesh, point.directives) for point in space}) == len(space)
    plans = []
    for point in space:
        settled = settle(point)
        if not isinstance(settled, Refusal):
            plan = lower(settled[0])
            assert attempt(point.start, settled[1]) == settled[0]  # its reshards are right
            if isinstance(plan, Plan):
                plans.append(_signature(plan))
    assert len(set(plans)) == len(plans)


def _signature(plan: Plan) -> str:
    """A plan without the names of its dimensions."""
    mesh = plan.program.mesh
    text = repr((plan.before, plan.nest, plan.after, plan.program.order.kind, plan.row_dims))
    for index, dim in enumerate(mesh.dims):
        text = text.replace(f"'{dim.name}'", str(index))
    return repr([dim.size for dim in mesh.dims]) + text


@pytest.mark.parametrize("group", [(2, 4), (2, 2), (1, 8)])
def test_nothing_is_missing(group: tuple[int, ...]) -> None:
    """Whatever of all axes and nests is legal, is in the space."""
    spanned = links(load("a100x16"), group)
    found = {_core(p.mesh, p.directives) for p in points(ATTENTION, SMALL, spanned)}
    legal = {
        _core(p.mesh, p.directives)
        for p in points(ATTENTION, SMALL, spanned)
        if not isinstance(settle(p), Refusal)
    }
    tried = set()
    for mesh in meshes(spanned, 3):
        program = start(ATTENTION, SMALL, mesh)
        frame = (
            OrderTokens("S", "zigzag", mesh.names),
            Pin(("q", "k", "v", "out", "lse"), "S", mesh.names),
        )
        for axes in product(("S_q", "H", "S_kv", "B"), repeat=len(mesh.dims)):
            split = [Parallelize(a, (d,)) for a, d in zip(axes, mesh.names, strict=True)]
            for nest in _nests(mesh.names):
                directives = (*frame, *split, *nest)
                if not isinstance(attempt(program, directives), Refusal):
                    tried.add(_core(mesh, directives))
    assert tried == legal <= found


def _nests(names: tuple[str, ...]):
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            for dims in permutations(chosen):
                for kinds in product((True, False), repeat=count):
                    yield tuple(
                        (
                            Shift(("k", "v"), "S_kv", (Along(dim),))
                            if walk
                            else Shard(("k", "v"), "S_kv", (dim,))
                        )
                        for walk, dim in zip(kinds, dims, strict=True)
                    )


def _core(mesh, directives) -> tuple:
    """Sizes, who splits what, and the stages in order."""
    split, nest = {}, []
    for d in directives:
        if isinstance(d, Parallelize):
            split |= dict.fromkeys(d.dims, d.axis)
        elif isinstance(d, Shift | Shard):
            nest += [(type(d).__name__, dim) for dim in d.dims]
    return mesh, tuple(sorted(split.items())), tuple(nest)
