"""The search's space: every schedule once, and none missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest
from command import run

from mercurygen.check.prove import prove
from mercurygen.cost.topology import load
from mercurygen.designs import patterns
from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.layout import ORDERS
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Dim, Link, Mesh, check_name
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import Directive
from mercurygen.search.place import links
from mercurygen.search.space import Point, points, settle, size

SMALL = Problem(seq=768, heads=8, kv_heads=4)
NAIVE = Problem(batch=2, seq=48, heads=16, kv_heads=4, head_dim=8, v_head_dim=8)
ATTENTION = load_operator("attention")


def signature(plan: Plan) -> tuple:
    """A plan, but for the order in which independent lines of its schedule were written."""
    parts = {
        axis: n
        for loop in plan.tiles
        for axis, n in plan.atoms.loop_parts(loop.axes).items()
        if n > 1
    }
    program = plan.program
    moved = (plan.before, plan.nest, plan.after, tuple(parts.items()))
    return program.mesh, program.order, program.parallel, moved


def lowered(point: Point) -> Plan | Refusal:
    """The plan of a point."""
    settled = settle(point)
    return settled if isinstance(settled, Refusal) else lower(settled[0])


@pytest.mark.parametrize("sizes, order", [((4,), o) for o in ORDERS] + [((2, 3), "zigzag")])
def test_every_schedule_once(sizes: tuple[int, ...], order: str) -> None:
    """No schedule twice, no two with one plan; each is complete and names its design."""
    spanned = tuple(Link(name, n, "wire", 1e9) for name, n in zip("nm", sizes, strict=False))
    problem = Problem(seq=768, heads=16, kv_heads=4)
    space = list(points(ATTENTION, problem, spanned, order=order))
    assert len({(point.mesh, point.directives) for point in space}) == len(space)
    plans = set()
    for number, point in enumerate(space):
        settled = settle(point)
        if isinstance(settled, Refusal):
            continue
        assert point.design == patterns.name_of(point.mesh, settled[1])
        if number % 10 == 0:  # its reshards are right
            assert attempt(point.start, settled[1]) == settled[0]
        plan = lower(settled[0])
        if isinstance(plan, Plan):
            assert signature(plan) not in plans, point.directives
            plans.add(signature(plan))
    assert len(plans) > 20 or order == "striped"


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("sizes, order", [((4,), o) for o in ORDERS] + [((2, 2), "zigzag")])
def test_every_plan_is_proved(sizes: tuple[int, ...], order: str, mask: str) -> None:
    """What the search prices is right: a sample of it."""
    spanned = tuple(Link(name, n, "wire", 1e9) for name, n in zip("nm", sizes, strict=False))
    space = list(points(ATTENTION, replace(NAIVE, mask=mask), spanned, order=order))
    for point in space[3::17]:
        plan = lowered(point)
        if isinstance(plan, Plan):
            prove(plan, spanned)


def test_any_order_is_all_of_them() -> None:
    """`any` is the union, without a point twice."""
    spanned = links(load("h100x8"), (4,))
    orders = [list(points(ATTENTION, SMALL, spanned, order=order)) for order in (*ORDERS, "any")]
    lines = [[(p.mesh, p.directives) for p in each] for each in orders]
    assert sorted(map(str, lines[-1])) == sorted(map(str, (x for y in lines[:-1] for x in y)))


LEVELS = [(2, 8), (8,), (1, 1), (2, 3), (2, 1, 6), (12,)]


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
    levels = [outer.replace('"box"', f'"l{i}"') for i in range(5)]
    path = tmp_path / "deep.toml"
    path.write_text("[[level]]".join([head, *levels, inner]))
    asked = ("search", "attention", "--topo", path, "--seq", "4k")
    run(*asked).refused(
        "space-too-large", "schedules to search", "--schedule NAME", "--group", "fewer levels"
    )
    run(*asked, "--schedule", "ring").done()
    run(*asked, "--group", "l0=1,l1=1,l2=1,l3=1,l4=2,gpu=2").done()


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


# --- nothing is missing: everything is tried, in lines of a few words -------------------------

TILES = ("", "tile H by 2", "tile H by 4", "tile G by 2", "join H, G\ntile H_G by 8")
CASES = [
    ((2,), "causal", "zigzag", TILES),
    ((2,), "full", "contiguous", TILES),
    ((3,), "causal", "contiguous", TILES),
    ((3,), "full", "striped", TILES),
    ((2, 2), "causal", "zigzag", TILES),
    ((2, 2), "full", "zigzag", TILES[:2]),
]


def directives(text: str) -> tuple[Directive, ...]:
    """The lines of a schedule."""
    return tuple(parse_directive(Line("naive", 0, line)) for line in text.splitlines() if line)


def stories(dims: tuple[str, ...], tensors: str, axis: str, home: bool) -> Iterator[str]:
    """Lines that move some tensors along some dimensions in any way, in any order."""
    for order in permutations(dims):
        for words in product(
            *[("shard", "shift", "direct", "both")[: 3 if home else 4]] * len(dims)
        ):
            yield "".join(
                (
                    f"shard {tensors}: {axis} over {dim}\n"
                    if word == "shard"
                    else f"shift {tensors}: {axis} along {dim} {word.removeprefix('shift')}\n"
                )
                for dim, word in zip(order, words, strict=True)
            )


def naive(mesh: Mesh, tiles: tuple[str, ...]) -> Iterator[str]:
    """All products of lines: what splits, what moves how and in which order, loops."""
    for axes in product(("B", "H", "G", "S_q", "S_kv"), repeat=len(mesh.names)):
        split = list(zip(mesh.names, axes, strict=True))
        head = "".join(
            f"parallelize {axis} over {', '.join(d for d, a in split if a == axis)}\n"
            for axis in dict.fromkeys(axes)
        )
        kv = tuple(dim for dim, axis in split if axis in ("S_q", "G"))
        q = tuple(dim for dim, axis in split if axis == "S_kv")
        homes = list(
            dict.fromkeys(
                "".join(sorted(x.splitlines(True))) for x in stories(q, "out, lse", "S_q", True)
            )
        )
        for one, other in product(
            stories(kv, "k, v", "S_kv", False), stories(q, "q", "S_q", False)
        ):
            for nest in dict.fromkeys((one + other, other + one)):
                for home, tile in product(homes, tiles):
                    yield head + nest + home + tile


def left_out(plan: Plan) -> bool:
    """What the search leaves out, said again of a plan and its stages."""
    program = plan.program
    ways = {(s.tensors[0], s.dim): s for s in program.stages}
    if any("both" in s.options and program.mesh.extent(s.dim) == 2 for s in ways.values()):
        return True
    for (name, dim), stage in ways.items():
        if name == "q" and (stage.kind == "walk") != (ways["out", dim].kind == "walk"):
            return True
    tiled = {axis for loop in plan.tiles for axis in loop.axes}
    moved = [name for loop in plan.nest.loops if loop.leading for name in loop.tensors]
    moved += [name for swap in (*plan.before, *plan.after) for name in swap.tensors]
    pipelined = any(program.tensor(name).carries(axis) for name in moved for axis in tiled)
    return bool(tiled) and not pipelined


@pytest.mark.parametrize("sizes, mask, order, tiles", CASES)
def test_nothing_is_missing(sizes, mask, order, tiles) -> None:
    """Whatever lines are legal, their plan is one of the search's."""
    spanned = tuple(Link(name, n, "wire", 1e9) for name, n in zip("nm", sizes, strict=False))
    problem = replace(NAIVE, mask=mask)
    space = [p for p in points(ATTENTION, problem, spanned, order=order)]
    found = {signature(p) for p in map(lowered, space) if isinstance(p, Plan)}
    mesh = Mesh(tuple(Dim(link.level, link.size) for link in spanned))
    names = ", ".join(mesh.names)
    if len(sizes) == 1:  # the search calls the only dimension by its level
        assert {p.mesh for p in space} == {mesh}
    frame = f"order S: {order} over {names}\npin q, k, v, out, lse: S over {names}\n"
    program, legal = start(ATTENTION, problem, mesh), 0
    for text in naive(mesh, tiles):
        settled = attempt(program, directives(frame + text + "\npatch body with aten"))
        plan = settled if isinstance(settled, Refusal) else lower(settled)
        if isinstance(plan, Plan) and not left_out(plan):
            assert signature(plan) in found, text
            legal += 1
    assert legal >= 9
