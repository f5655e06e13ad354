"""Schedules of every kind, their plans, and what each must give: shared by several tests.

A schedule here is a mesh and directives, without a file's header. The sizes are small, odd where
they may be, and different from each other.
"""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mercurygen.check.interpret import run_traces
from mercurygen.check.tensors import cut_whole, join_axes
from mercurygen.dsl.interpret import interpret
from mercurygen.errors import Refusal
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Dim, Link, Mesh
from mercurygen.ir.operator import Domain, Operator
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.ir.program import Program
from mercurygen.lower.events import Trace
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import Directive

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial"
OPERATORS: dict[str, Operator] = {
    "attention": load("attention"),
    "attention_backward": load("attention_backward"),
    "matmul": load("matmul"),
    "smooth": load(f"{TUTORIAL / 'smooth.py'}::smooth"),
    "nearest": load(f"{TUTORIAL / 'nearest.py'}::nearest"),
}
EXTENTS = {
    "matmul": (("M", 24), ("N", 36), ("K", 144)),
    "smooth": (("T", 48), ("S", 48), ("C", 3)),
    "nearest": (("N", 36), ("M", 24), ("C", 3)),
}


class Named(NamedTuple):
    """A schedule to be tried.

    Attributes:
        operator: its name.
        meshes: on which it is tried.
        body: its directives.
        changes: to the sizes.
    """

    operator: str
    meshes: tuple[str, ...]
    body: str
    changes: dict[str, int] = {}


def problem_of(operator: str, mask: str = "causal", **changes: int) -> Problem | Sizes:
    """Small sizes; `window` is the width of a window mask, `ahead` what it has after a query."""
    window, ahead = changes.pop("window", None), changes.pop("ahead", 0)
    if operator in EXTENTS:
        extents = tuple((dict(EXTENTS[operator]) | changes).items())
        if operator != "smooth":
            return Sizes(extents, "float64")
        return Sizes(extents, "float64", "window" if window else mask, window)
    sizes = dict(batch=2, seq=48, heads=12, kv_heads=6, head_dim=5, v_head_dim=7) | changes
    if "align" in changes:
        return Problem(**sizes, dtype="float64", mask=mask, window=window, ahead=ahead)
    if window:
        return Problem(**sizes, dtype="float64", mask="window", window=window, ahead=ahead)
    return Problem(**sizes, dtype="float64", mask=mask)


def mesh_of(text: str) -> Mesh:
    """`n=2 m=4`."""
    sizes = (word.split("=") for word in text.split())
    return Mesh(tuple(Dim(name, int(size)) for name, size in sizes))


def links_of(mesh: Mesh) -> tuple[Link, ...]:
    """One level for every dimension."""
    return tuple(Link(dim.name, dim.size, "wire", 1e9) for dim in mesh.dims)


def directives_of(body: str) -> tuple[Directive, ...]:
    """Lines of a schedule."""
    lines = (line.strip() for line in body.strip().splitlines())
    return tuple(parse_directive(Line("x", i, line)) for i, line in enumerate(lines, 1))


def program_of(operator: str, problem: Problem | Sizes, mesh: str, body: str) -> Program | Refusal:
    """The complete program of a schedule."""
    return attempt(start(OPERATORS[operator], problem, mesh_of(mesh)), directives_of(body))


def lowered(operator: str, problem: Problem | Sizes, mesh: str, body: str) -> Plan | Refusal:
    """The plan of a schedule."""
    program = program_of(operator, problem, mesh, body)
    return program if isinstance(program, Refusal) else lower(program)


def plan_of(operator: str, problem: Problem | Sizes, mesh: str, body: str) -> Plan:
    """The plan of a schedule that is legal."""
    plan = lowered(operator, problem, mesh, body)
    assert isinstance(plan, Plan), plan.explain()
    return plan


# --- as on one device ---------------------------------------------------------------------------


def domain_of(program: Program) -> Domain | None:
    """The mask of a program, as the operator takes it."""
    return program.domain


@cache
def wanted(operator: str, extents: tuple, mask: Domain | None, seed: int) -> tuple:
    """Inputs in float64, and the outputs that the operator gives on one device."""
    op, sizes = OPERATORS[operator], dict(extents)
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for tensor in op.inputs:
        shape = [prod(sizes[axis] for axis in dim) for dim in tensor.dims]
        inputs[tensor.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if operator == "smooth":  # so that no weight is large where a window is wide
        inputs["rate"] = inputs["rate"].abs() + 0.1
    if operator == "attention_backward":
        forward = interpret(OPERATORS["attention"], {n: inputs[n] for n in "qkv"}, mask=mask)
        inputs |= forward
    return inputs, interpret(op, inputs, mask=mask, tiles=sizes)


def traces_of(plan: Plan, with_lse: bool = True) -> tuple[Trace, ...]:
    """What all ranks do."""
    ranks = range(plan.program.mesh.size)
    return tuple(trace(plan, rank, with_lse=with_lse) for rank in ranks)


def run_and_compare(plan: Plan, traces: tuple[Trace, ...] | None = None, seed: int = 3) -> None:
    """Every output on every rank is the operator's on one device, to 1e-12 of its largest."""
    program = plan.program
    extents = tuple(program.extents.items())
    inputs, whole = wanted(program.operator, extents, domain_of(program), seed)
    operator = OPERATORS[program.operator]
    results = run_traces(plan, traces or traces_of(plan), inputs, operator=operator)
    assert len(results) == program.mesh.size
    for rank, result in enumerate(results):
        here = program.mesh.coordinate(rank)
        assert set(result) == {tensor.name for tensor in program.outputs}
        for tensor in program.outputs:
            region = plan.atoms.pinned(tensor, here)
            part = cut_whole(plan.atoms, tensor, region, whole[tensor.name])
            compare(result[tensor.name], join_axes(tensor, part.data), f"{tensor.name} on {rank}")


def compare(found: Tensor, want: Tensor, what: str) -> None:
    """Equal, infinities included, but for 1e-12 of the largest."""
    assert found.shape == want.shape, (what, found.shape, want.shape)
    same = found == want
    error = (found - want).abs().masked_fill(same, 0).max().item()
    scale = max(1.0, want.double().masked_fill(same, 0).abs().max().item())
    assert error <= 1e-12 * scale, f"{what}: {error}"


# --- the schedules ------------------------------------------------------------------------------

A, AB, MM = "attention", "attention_backward", "matmul"
ROWS = "parallelize S_q over {0}\n"
NESTED = ROWS.format("n, m")
COLUMNS = "parallelize S_kv over {0}\n"
OUT = "shift out, lse: S_q along {0}\n"
ONE, TWO, ODD = ("m=4", "m=3"), ("n=2 m=2", "n=3 m=2"), ("m=2", "m=3")

ATTENTION = {
    "ring": Named(A, ONE, ROWS.format("m") + "shift k, v: S_kv along m"),
    "all-gather": Named(A, ONE, ROWS.format("m") + "shard k, v: S_kv over m"),
    "Ulysses": Named(A, ODD, "parallelize H over m"),
    "Ulysses in two stages": Named(A, ("a=2 b=3", "a=3 b=2"), "parallelize H over a, b"),
    "unified": Named(
        A,
        ("n=2 m=2", "n=2 m=3"),
        ROWS.format("n") + "parallelize H over m\nshift k, v: S_kv along n",
    ),
    "double ring": Named(A, ("n=2 m=4", "n=3 m=2"), NESTED + "shift k, v: S_kv along n, m"),
    "ring of gathers": Named(A, TWO, NESTED + "shift k, v: S_kv along n\nshard k, v: S_kv over m"),
    "gather, ring inside": Named(
        A, TWO, NESTED + "shard k, v: S_kv over n\nshift k, v: S_kv along m"
    ),
    "direct": Named(A, ONE, ROWS.format("m") + "shift k, v: S_kv along m direct"),
    "direct contiguous": Named(
        A,
        ONE,
        "order S: contiguous over m\n" + ROWS.format("m") + "shift k, v: S_kv along m direct",
    ),
    "both": Named(
        A, ("m=4", "m=5"), ROWS.format("m") + "shift k, v: S_kv along m both", {"seq": 40}
    ),
    "reverse": Named(A, ONE, ROWS.format("m") + "shift k, v: S_kv along m reverse"),
    "direct reverse": Named(A, ONE, ROWS.format("m") + "shift k, v: S_kv along m direct reverse"),
    "prefetch 2": Named(A, ONE, ROWS.format("m") + "shift k, v: S_kv along m prefetch 2"),
    "prefetch 0": Named(A, ONE, ROWS.format("m") + "shift k, v: S_kv along m prefetch 0"),
    "direct prefetch 2": Named(
        A, ONE, ROWS.format("m") + "shift k, v: S_kv along m direct prefetch 2"
    ),
    "direct prefetch 0": Named(
        A, ONE, ROWS.format("m") + "shift k, v: S_kv along m direct prefetch 0"
    ),
    "direct, relayed inside": Named(A, TWO, NESTED + "shift k, v: S_kv along n direct, m"),
    "relayed, direct inside": Named(A, TWO, NESTED + "shift k, v: S_kv along n, m direct"),
    "direct twice": Named(
        A, ("n=2 m=4", "n=3 m=2"), NESTED + "shift k, v: S_kv along n direct, m direct"
    ),
    "striped ring": Named(
        A, ONE, "order S: striped over m\n" + ROWS.format("m") + "shift k, v: S_kv along m"
    ),
    "striped double ring": Named(
        A, TWO, "order S: striped over n, m\n" + NESTED + "shift k, v: S_kv along n, m"
    ),
    "striped Ulysses": Named(A, ODD, "order S: striped over m\nparallelize H over m"),
    "striped unified": Named(
        A,
        TWO[:1] + ("n=2 m=3",),
        "order S: striped over n, m\n"
        + ROWS.format("m")
        + "parallelize H over n\nshift k, v: S_kv along m",
    ),
    "TokenRing": Named(
        A, ONE, COLUMNS.format("m") + "shift q: S_q along m\n" + OUT.format("m direct")
    ),
    "TokenRing contiguous": Named(
        A,
        ONE,
        "order S: contiguous over m\n"
        + COLUMNS.format("m")
        + "shift q: S_q along m\n"
        + OUT.format("m direct"),
    ),
    "q ring": Named(A, ONE, COLUMNS.format("m") + "shift q: S_q along m\n" + OUT.format("m")),
    "q direct": Named(
        A, ONE, COLUMNS.format("m") + "shift q: S_q along m direct\n" + OUT.format("m direct")
    ),
    "double TokenRing": Named(
        A,
        TWO,
        COLUMNS.format("n, m") + "shift q: S_q along n, m\n" + OUT.format("n direct, m direct"),
    ),
    "double q ring": Named(
        A, TWO, COLUMNS.format("n, m") + "shift q: S_q along n, m\n" + OUT.format("n, m")
    ),
    "split-KV": Named(
        A, ONE, COLUMNS.format("m") + "shard q: S_q over m\nshard out, lse: S_q over m"
    ),
    "split-KV of replicas": Named(
        A,
        ONE,
        "order S: contiguous over m\npin k, v: S over m\npin q: replicated\n"
        "pin out, lse: replicated\n"
        + COLUMNS.format("m")
        + "replicate q over m\nreplicate out, lse over m",
    ),
    "k and v walk, split-KV": Named(
        A,
        TWO,
        ROWS.format("n")
        + COLUMNS.format("m")
        + "shift k, v: S_kv along n\nshard q: S_q over m\nshard out, lse: S_q over m",
    ),
    "TokenRing, k and v inside": Named(
        A,
        TWO,
        ROWS.format("n")
        + COLUMNS.format("m")
        + "shift q: S_q along m\n"
        + OUT.format("m direct")
        + "shift k, v: S_kv along n",
    ),
    "k and v walk, TokenRing inside": Named(
        A,
        TWO,
        ROWS.format("n")
        + COLUMNS.format("m")
        + "shift k, v: S_kv along n\nshift q: S_q along m\n"
        + OUT.format("m direct"),
    ),
    "queries of a head": Named(
        A,
        ("n=2 m=2", "n=3 m=2"),
        "parallelize H over n\nparallelize G over m\nshard k, v: S_kv over m",
    ),
    "queries of a head, ring": Named(
        A, ODD, "parallelize G over m\nshift k, v: S_kv along m", {"heads": 36}
    ),
    "batch": Named(A, ODD, "parallelize B over m", {"batch": 6, "kv_heads": 2, "heads": 6}),
    "batch, as pinned": Named(
        A,
        ODD,
        "pin q, k, v, out, lse: B over m\nparallelize B over m",
        {"batch": 6, "kv_heads": 2, "heads": 6},
    ),
    "pipelined all-gather": Named(
        A, ONE, ROWS.format("m") + "shard k, v: S_kv over m\ntile H by 3"
    ),
    "chunked Ulysses": Named(
        A, ODD, "parallelize H over m\ntile H by 2", {"kv_heads": 12, "heads": 12, "batch": 1}
    ),
    "joined heads": Named(
        A,
        ("m=2", "m=4"),
        "parallelize H over m\njoin H, G\ntile H_G by 12",
        {"kv_heads": 12, "heads": 48, "batch": 1},
    ),
    "ring per head": Named(A, ODD, ROWS.format("m") + "shift k, v: S_kv along m\ntile H by 3"),
    "tiles of keys": Named(
        A, ODD, "pin q, k, v, out, lse: H over m\nparallelize H over m\ntile S_kv by 2"
    ),
    "tiles of queries and keys": Named(
        A,
        ODD,
        "pin q, k, v, out, lse: H over m\nparallelize H over m\ntile S_q by 2\ntile S_kv by 4",
    ),
    "tiles, reordered": Named(
        A,
        ODD,
        "pin q, k, v, out, lse: H over m\nparallelize H over m\n"
        "tile S_kv by 4\ntile S_q by 2\nreorder S_q, S_kv",
    ),
}

BACKWARD = {
    "ring": Named(
        AB, ONE, ROWS.format("m") + "shift k, v: S_kv along m\nshift dk, dv: S_kv along m"
    ),
    "ring, straight home": Named(
        AB, ONE, ROWS.format("m") + "shift k, v: S_kv along m\nshift dk, dv: S_kv along m direct"
    ),
    "direct, straight home": Named(
        AB,
        ONE,
        ROWS.format("m") + "shift k, v: S_kv along m direct\nshift dk, dv: S_kv along m direct",
    ),
    "all-gather and reduce-scatter": Named(
        AB, ONE, ROWS.format("m") + "shard k, v: S_kv over m\nshard dk, dv: S_kv over m"
    ),
    "Ulysses": Named(AB, ODD, "parallelize H over m"),
    "burst": Named(
        AB,
        ONE,
        COLUMNS.format("m") + "shift q, do, lse, delta: S_q along m\nshift dq: S_q along m",
    ),
    "split-KV": Named(
        AB, ONE, COLUMNS.format("m") + "shard q, do, lse, delta: S_q over m\nshard dq: S_q over m"
    ),
    "double ring": Named(
        AB, TWO, NESTED + "shift k, v: S_kv along n, m\nshift dk, dv: S_kv along n, m"
    ),
    "unified": Named(
        AB,
        ("n=2 m=2", "n=2 m=3"),
        ROWS.format("n")
        + "parallelize H over m\nshift k, v: S_kv along n\nshift dk, dv: S_kv along n",
    ),
    "pipelined": Named(
        AB,
        ONE,
        ROWS.format("m") + "shard k, v: S_kv over m\nshard dk, dv: S_kv over m\ntile H by 2",
    ),
    "double burst": Named(
        AB,
        TWO,
        COLUMNS.format("n, m")
        + "shift q, do, lse, delta: S_q along n, m\nshift dq: S_q along n, m",
    ),
}

GRID = "parallelize M over row\nparallelize N over col\n"
SUMMA = GRID + "shard a: K over col\nshard b: K over row\n"
CANNON = GRID + "shift a: K along col skewed\nshift b: K along row skewed\n"
MATMUL = {
    "all-gather": Named(MM, ONE, "parallelize N over m\nshard a: M over m"),
    "ring all-gather": Named(MM, ONE, "parallelize N over m\nshift a: M along m"),
    "both ways": Named(MM, ONE, "parallelize N over m\nshift a: M along m both"),
    "direct": Named(MM, ONE, "parallelize N over m\nshift a: M along m direct"),
    "reduce-scatter": Named(MM, ONE, "parallelize K over m\nshard c: M over m"),
    "ring reduce-scatter": Named(MM, ONE, "parallelize K over m\nshift c: M along m"),
    "direct reduce-scatter": Named(MM, ONE, "parallelize K over m\nshift c: M along m direct"),
    "all-reduce": Named(MM, ONE, "parallelize K over m\nreplicate c over m"),
    "SUMMA": Named(MM, ("row=2 col=2", "row=2 col=3"), SUMMA + "tile K by 12"),
    "SUMMA of long rows": Named(MM, ("row=2 col=4", "row=4 col=2"), SUMMA + "tile K by 4"),
    "Cannon": Named(MM, ("row=2 col=2", "row=3 col=3", "row=4 col=4"), CANNON),
    "2.5D": Named(
        MM,
        ("depth=2 row=2 col=2", "depth=3 row=2 col=2"),
        "parallelize K over depth\n" + CANNON + "shard c: M over depth",
    ),
    "2.5D of SUMMA": Named(
        MM,
        ("depth=2 row=2 col=2", "depth=2 row=3 col=2"),
        "parallelize K over depth\n" + SUMMA + "tile K by 6\nreplicate c over depth",
    ),
}

SMOOTH, NEAREST = "smooth", "nearest"
USERS = {
    "smooth, ring": Named(SMOOTH, ONE, "parallelize T over m\nshift x: S along m"),
    "smooth, direct": Named(SMOOTH, ONE, "parallelize T over m\nshift x: S along m direct"),
    "smooth, straight home": Named(
        SMOOTH, ONE, "parallelize S over m\nshift rate: T along m\nshift out: T along m direct"
    ),
    "smooth, reduce-scatter": Named(
        SMOOTH, ONE, "parallelize S over m\nshard rate: T over m\nshard out: T over m"
    ),
    "nearest, all-gather": Named(NEAREST, ONE, "parallelize N over m\nshard y: M over m"),
    "nearest, ring": Named(NEAREST, ONE, "parallelize N over m\nshift y: M along m"),
    "nearest, all-reduce": Named(
        NEAREST,
        ONE,
        "pin x, distance, index: replicated\npin y: M over m\nparallelize M over m\n"
        "replicate x over m\nreplicate distance over m\nreplicate index over m",
    ),
    "nearest, reduce-scatter": Named(
        NEAREST,
        ONE,
        "parallelize M over m\nshard x: N over m\nshard distance, index: N over m",
    ),
    "nearest, straight home": Named(
        NEAREST,
        ONE,
        "parallelize M over m\nshift x: N along m\nshift distance, index: N along m direct",
    ),
    "nearest, with the tiles": Named(
        NEAREST, ONE, "parallelize M over m\nshift x: N along m\nshift distance, index: N along m"
    ),
}
SCHEDULES = {
    **{f"attention: {name}": each for name, each in ATTENTION.items()},
    **{f"backward: {name}": each for name, each in BACKWARD.items()},
    **{f"matmul: {name}": each for name, each in MATMUL.items()},
    **USERS,
}
