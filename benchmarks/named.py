"""The plans of a published design: its directives on a mesh of its degrees, forward and backward."""

from __future__ import annotations

from math import isqrt

from mercurygen.designs import patterns
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Dim, Mesh
from mercurygen.ir.problem import Problem
from mercurygen.ir.program import SEQUENCE
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directives import (
    Directive,
    OrderTokens,
    Parallelize,
    Patch,
    Pin,
    Shard,
    Shift,
)

LOCAL = "local"
GOING = {("k", "v"): ("k", "v"), ("q",): ("q", "do", "lse", "delta")}  # in the backward
HOME = {("k", "v"): ("dk", "dv"), ("q",): ("dq",)}
SAVED, HANDED = ("q", "k", "v", "lse"), ("out", "do", "dq", "dk", "dv")

Found = Plan | Refusal | str


def known() -> tuple[str, ...]:
    """The names that a row's design may have."""
    return (LOCAL, *patterns.names())


def mesh_of(design: str, ulysses: int, ring: int, nodes: int) -> Mesh | str:
    """The dimensions that a design's roles have, or why it cannot have them.

    A double ring goes around within a node and then from node to node; where its ring has one rank
    in each node, in windows as near to square as divides.
    """
    if design == LOCAL:
        return Mesh(())
    roles = patterns.get(design).roles
    heads = [ulysses] if roles[-1] == "heads" else []
    rest = len(roles) - len(heads)
    if (ulysses > 1) != bool(heads) or (ring > 1) != bool(rest):
        return f"{design} of ulysses {ulysses}, ring {ring}"
    if rest < 2:
        sizes = [ring] * rest + heads
    else:
        outer = next(n for n in range(isqrt(ring), 0, -1) if ring % n == 0)
        if nodes < ring and ring % nodes == 0 and nodes > 1:
            outer = nodes
        sizes = [outer, ring // outer, *heads]
    if 1 in sizes:
        return f"{design} on a ring of {ring}"
    return Mesh(tuple(map(Dim, roles, sizes)))


def plans(design: str, problem: Problem, mesh: Mesh, order: str, way: str) -> list[Found]:
    """What a pass runs: the forward's plan, the backward's, or both."""
    body = () if design == LOCAL else patterns.get(design).on(mesh)
    found: list[Found] = []
    if way != "bwd":
        found.append(_forward(problem, mesh, order, body))
    if way != "fwd":
        found.append(_backward(problem, mesh, order, body))
    return found


def _forward(problem: Problem, mesh: Mesh, order: str, body: tuple[Directive, ...]) -> Found:
    names = ("q", "k", "v", "out", "lse")
    pins = (Pin(names, SEQUENCE, mesh.names),) if mesh.dims else ()
    frame = (OrderTokens(SEQUENCE, order, mesh.names), *pins)
    return _plan("attention", problem, mesh, (*frame, *body, Patch("body", "aten")))


def _backward(problem: Problem, mesh: Mesh, order: str, body: tuple[Directive, ...]) -> Found:
    """Its tensors come by as the forward's do; what the forward saved is held as it was used."""
    split = {dim: d.axis for d in body if isinstance(d, Parallelize) for dim in d.dims}
    inner = tuple(dim for dim in mesh.names if split[dim] == "H")
    outer = tuple(dim for dim in mesh.names if dim not in inner)
    pins = [Pin(HANDED, SEQUENCE, mesh.names), Pin(SAVED, SEQUENCE, outer), Pin(SAVED, "H", inner)]
    frame = [OrderTokens(SEQUENCE, order, mesh.names), *(pin for pin in pins if pin.dims)]
    moves: list[Directive] = []
    for d in body:
        if isinstance(d, Parallelize):
            moves.append(d)
        elif d.tensors in GOING and isinstance(d, Shard):
            moves.append(Shard(GOING[d.tensors], d.axis, d.dims))
            moves.append(Shard(HOME[d.tensors], d.axis, d.dims))
        elif d.tensors in GOING and isinstance(d, Shift):
            moves.append(Shift(GOING[d.tensors], d.axis, d.along))
            moves.append(Shift(HOME[d.tensors], d.axis, d.along))
    return _plan("attention_backward", problem, mesh, (*frame, *moves))


def _plan(
    operator: str, problem: Problem, mesh: Mesh, directives: tuple[Directive, ...]
) -> Found:
    program = attempt(start(load(operator), problem, mesh), directives)
    return program if isinstance(program, Refusal) else lower(program)
