"""Plans that the tests of prices share: known schedules, every story on some meshes, machines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mercurygen.cost.links import Network
from mercurygen.cost.topology import Topology, load
from mercurygen.errors import Refusal
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Dim, Mesh
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directive_text import parse_directive

CASES = Path(__file__).with_name("schedules.txt").read_text().splitlines()
SMALL = Problem(batch=2, seq=32, heads=8, kv_heads=4, head_dim=4, v_head_dim=6, dtype="bfloat16")
MATRICES = Sizes((("M", 16), ("N", 24), ("K", 32)))
MESHES = ("n=2 m=4", "m=4", "n=4 m=2", "n=2 m=2 l=2", "m=3", "n=2 m=3", "n=2 m=2 l=4", "m=8")
ORDERS = ("", "order S: zigzag over ", "order S: contiguous over ", "order S: striped over ")
COMING = ("shard", "shift", "shift direct", "shift reverse", "shift prefetch 0", "shift prefetch 2")
HOME = ("shift", "shift direct")


def mesh_of(text: str) -> Mesh:
    """A mesh from `n=2 m=4`."""
    words = (word.split("=") for word in text.split())
    return Mesh(tuple(Dim(name, int(size)) for name, size in words))


def plan_of(
    operator: Operator, problem: Problem | Sizes, mesh: Mesh, lines: list[str]
) -> Plan | Refusal:
    """The plan of a schedule's lines."""
    directives = tuple(parse_directive(Line("test", i, line)) for i, line in enumerate(lines))
    program = attempt(start(operator, problem, mesh), directives)
    return program if isinstance(program, Refusal) else lower(program)


def case(line: str) -> tuple[Operator, Plan]:
    """A known schedule, from its line."""
    name, mask, mesh, body = (part.strip() for part in line.split("|"))
    problem = MATRICES if name == "matmul" else replace(SMALL, mask=mask)
    operator = load_operator(name)
    plan = plan_of(operator, problem, mesh_of(mesh), [x.strip() for x in body.split(";")])
    assert isinstance(plan, Plan), (line, plan.explain())
    return operator, plan


def machine(name: str, group: tuple[int, ...]) -> Topology:
    """A shipped topology with levels of just these sizes."""
    topology = load(name)
    sized = zip(topology.levels, group, strict=True)
    return replace(topology, levels=tuple(replace(x, size=n, port_gpus=1) for x, n in sized))


def network_of(mesh: Mesh) -> Network:
    """Two nodes that a mesh fits on, or one."""
    group = (2, mesh.size // 2) if mesh.dims[0].size % 2 == 0 else (1, mesh.size)
    return Network(machine("a100x16", group), group)


def moving(draw: random.Random, tensors: str, axis: str, dim: str, ways: tuple[str, ...]) -> str:
    """One story along one dimension, drawn."""
    word, *options = draw.choice(ways).split(" ", 1)
    if word == "shard":
        return f"shard {tensors}: {axis} over {dim}"
    return f"shift {tensors}: {axis} along {' '.join((dim, *options))}"


def drawn(draw: random.Random) -> tuple[Problem, Mesh, list[str]]:
    """A schedule of attention, legal or not."""
    mesh, body, split = mesh_of(draw.choice(MESHES)), [], []
    for dim in mesh.names:
        axis = draw.choice(("B", "H", "G", "S_q", "S_q", "S_kv", "S_kv"))
        split.append(f"parallelize {axis} over {dim}")
        if axis in ("S_q", "G"):
            body.append(moving(draw, "k, v", "S_kv", dim, COMING))
        elif axis == "S_kv" and draw.random() < 0.3:
            body += [f"shard q: S_q over {dim}", f"shard out, lse: S_q over {dim}"]
        elif axis == "S_kv":
            body.append(moving(draw, "q", "S_q", dim, COMING[1:4]))
            body.append(moving(draw, "out, lse", "S_q", dim, HOME))
    if draw.random() < 0.3:
        draw.shuffle(body)
    order = draw.choice(ORDERS)
    lines = [order + ", ".join(mesh.names)] if order else []
    problem = replace(
        SMALL,
        seq=96,
        batch=4,
        heads=32,
        kv_heads=8,
        head_dim=draw.choice((4, 8)),
        v_head_dim=draw.choice((6, 8)),
        dtype=draw.choice(("bfloat16", "float32")),
        mask=draw.choice(("causal", "causal", "full")),
    )
    return problem, mesh, [*lines, *split, *body]


def drawn_plans(seed: int, count: int) -> Iterator[tuple[str, Plan]]:
    """So many legal plans of attention, with what they were made of."""
    draw, operator, found = random.Random(seed), load_operator("attention"), 0
    while found < count:
        problem, mesh, lines = drawn(draw)
        plan = plan_of(operator, problem, mesh, lines)
        if isinstance(plan, Plan):
            found += 1
            sizes = " ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)
            yield f"seed {seed}, {problem}, {sizes}: {'; '.join(lines)}", plan
