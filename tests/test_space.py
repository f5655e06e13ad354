"""The search's space: every schedule once, and none missing."""

from __future__ import annotations

import re
from itertools import combinations, permutations, product
from pathlib import Path

import pytest
from command import run

from mercurygen.cost.topology import load
from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Link, check_name
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directives import Along, OrderTokens, Parallelize, Pin, Shard, Shift
from mercurygen.search.place import links
from mercurygen.search.space import points, settle, size

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


LEVELS = [(2, 8), (8,), (1, 1), (2, 2, 2), (4, 4, 2), (128,), (2, 1, 6)]


@pytest.mark.parametrize("order", [None, "any"])
@pytest.mark.parametrize("sizes", LEVELS)
def test_size_is_known_beforehand(sizes: tuple[int, ...], order: str | None) -> None:
    """The formula counts what is made."""
    spanned = tuple(Link(f"l{i}", n, "wire", 1e9) for i, n in enumerate(sizes))
    made = sum(1 for _ in points(ATTENTION, SMALL, spanned, order=order))
    assert size(ATTENTION, SMALL, spanned, order) == made


def test_too_large_a_space(tmp_path: Path) -> None:
    """Refused before anything is priced; a named design, or a part of the machine, is not."""
    text = (Path(__file__).parent / "data" / "two_boxes.toml").read_text()
    text = re.sub(r"port_gpus = \{ value = \d+", "port_gpus = { value = 1", text)
    head, outer, inner = text.replace("size = { value = 4", "size = { value = 2").split("[[level]]")
    levels = [outer.replace('"box"', f'"l{i}"') for i in range(4)]
    path = tmp_path / "deep.toml"
    path.write_text("[[level]]".join([head, *levels, inner]))
    asked = ("search", "attention", "--topo", path, "--seq", "4k")
    run(*asked).refused("space-too-large", "9392", "--schedule NAME", "--group", "fewer levels")
    run(*asked, "--schedule", "ring").done()
    run(*asked, "--group", "l0=1,l1=1,l2=1,l3=2,gpu=2").done()


@pytest.mark.parametrize(
    "text", ["dim2=2 dim0=1 dim=4", "dim1=4 all0=1 all=4", "dim0=2 dim1=2 x=2", "all=2 b=2 all0=4"]
)
def test_names_of_dimensions(text: str) -> None:
    """Each once, whatever the levels are called, and legal."""
    pairs = [part.split("=") for part in text.split()]
    spanned = tuple(Link(name, int(n), "wire", 1e9) for name, n in pairs)
    spanned += (Link("a_very_long_name_xyz", 2, "wire", 1e9),)
    for mesh in meshes(spanned, 4):
        assert len(set(mesh.names)) == len(mesh.names), mesh
        for name in mesh.names:
            check_name(name, "mesh dimension")


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
