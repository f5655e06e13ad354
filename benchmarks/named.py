"""The plans of a published design: its directives on a mesh of its degrees, both passes."""

from __future__ import annotations

from dataclasses import dataclass
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

Found = Plan | Refusal


def known() -> tuple[str, ...]:
    """The names that a row's design may have."""
    return (LOCAL, *patterns.names())


@dataclass(frozen=True, slots=True)
class Named:
    """A design on a mesh.

    Attributes:
        mesh: a dimension for each role.
        body: directives, in the forward.
        seats: of every rank its place on the machine: ranks that split heads sit side by side.
    """

    mesh: Mesh
    body: tuple[Directive, ...]
    seats: tuple[int, ...]


def named(
    design: str, ulysses: int, ring: int, order: str, kv_heads: int, nodes: int
) -> Named | str:
    """A design with these degrees, or why it cannot have them.

    A double ring goes around within a node and then from node to node; where its ring has one rank
    in each node, in windows as near to square as divides. Tokens are striped over the ring, so the
    ranks that split heads come first then: their tokens together are evenly spaced too.
    """
    if design == LOCAL:
        return Named(Mesh(()), (), ())
    pattern = patterns.get(design)
    roles, body = pattern.roles, pattern.directives
    heads = (ulysses,) if roles[-1] == "heads" else ()
    rest = len(roles) - len(heads)
    if (ulysses > 1) != bool(heads) or (ring > 1) != bool(rest):
        return f"{design} of ulysses {ulysses}, ring {ring}"
    sizes = (*_rings(ring, nodes, rest), *heads)
    if 1 in sizes:
        return f"{design} on a ring of {ring}"
    if roles == ("heads",) and kv_heads % ulysses and ulysses % kv_heads == 0:
        queries = Dim("queries", ulysses // kv_heads)
        grouped = Parallelize("G", ("queries",)), Shard(("k", "v"), "S_kv", ("queries",))
        mesh = Mesh((queries, Dim("heads", kv_heads)))
        return Named(mesh, (*body, *grouped), tuple(range(ulysses)))
    dims = tuple(map(Dim, roles, sizes))
    if order != "striped" or not heads or not rest:
        return Named(Mesh(dims), body, tuple(range(ulysses * ring)))
    seats = tuple(other * ulysses + head for head in range(ulysses) for other in range(ring))
    return Named(Mesh((dims[-1], *dims[:-1])), body, seats)


def _rings(ring: int, nodes: int, count: int) -> tuple[int, ...]:
    if count < 2:
        return (ring,) * count
    outer = next(n for n in range(isqrt(ring), 0, -1) if ring % n == 0)
    if 1 < nodes < ring and ring % nodes == 0:
        outer = nodes
    return outer, ring // outer


def plans(design: Named, problem: Problem, order: str, way: str) -> list[Found]:
    """What a pass runs: the forward's plan, the backward's, or both."""
    mesh, body = design.mesh, design.body
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
    pins = [Pin(HANDED, SEQUENCE, mesh.names), Pin(SAVED, "H", inner)]
    if "queries" in outer:
        pins += [Pin(("q", "lse"), "G", outer), Pin(("k", "v"), SEQUENCE, outer)]
    else:
        pins.append(Pin(SAVED, SEQUENCE, outer))
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


def _plan(operator: str, problem: Problem, mesh: Mesh, directives: tuple[Directive, ...]) -> Found:
    program = attempt(start(load(operator), problem, mesh), directives)
    return program if isinstance(program, Refusal) else lower(program)
