"""Every schedule that the search looks at, each once, in a fixed order.

A point is a mesh and directives, as a person would write them: the order, the pins, one
parallelize for each axis, the nest of the inputs that come by, the kernel. The reshards follow
from the rest: `settle` adds them, or says why the point is not legal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, permutations, product
from math import perm

from mercurygen.designs import patterns
from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Link, Mesh
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem
from mercurygen.ir.program import SEQUENCE, Program
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directives import (
    Along,
    Directive,
    OrderTokens,
    Parallelize,
    Patch,
    Pin,
    Reshard,
    Shard,
    Shift,
)
from mercurygen.schedule.rules.parallelize import splittable

KERNEL = "aten"


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule not yet tried.

    Attributes:
        start: the operator on the mesh, nothing distributed yet.
        directives: without reshards.
        design: the named design that it is an instance of, or None.
    """

    start: Program
    directives: tuple[Directive, ...]
    design: str | None

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.start.mesh


def points(
    operator: Operator,
    problem: Problem,
    links: tuple[Link, ...],
    *,
    design: str | None = None,
    order: str | None = None,
) -> Iterator[Point]:
    """The whole space, or the instances of one design.

    Args:
        operator: to schedule.
        problem: of one group: the heads that tensor parallelism leaves it.
        links: the levels as the group occupies them, outermost first.
        design: a name of `designs.patterns`, or None.
        order: "zigzag", "contiguous", "any", or None for the mask's usual one.
    """
    if design is None:
        found = _meshes(links)
    else:
        found = tuple(mesh for mesh, _ in patterns.instances(design, links))
    for mesh in found:
        program = start(operator, problem, mesh)
        bodies = _bodies(program) if design is None else (patterns.get(design).on(mesh),)
        for body in bodies:
            name = design or patterns.name_of(mesh, body)
            for kind in _orders(problem, mesh, order):
                yield Point(program, (*_frame(program, kind), *body, Patch("body", KERNEL)), name)


def size(
    operator: Operator, problem: Problem, links: tuple[Link, ...], order: str | None = None
) -> int:
    """How many points the whole space has, by a formula: none is made.

    Of d dimensions some split the rows, and these become stages in any order, each of two kinds.
    """
    total = 0
    for mesh in _meshes(links):
        others = len(splittable(start(operator, problem, mesh))) - 1
        d = len(mesh.dims)
        bodies = sum(perm(d, k) * 2**k * others ** (d - k) for k in range(d + 1))
        total += bodies * len(_orders(problem, mesh, order))
    return total


def settle(point: Point) -> tuple[Program, tuple[Directive, ...]] | Refusal:
    """The complete program of a point and its directives with the reshards, or a refusal."""
    program = attempt(point.start, point.directives)
    if isinstance(program, Refusal):
        return program
    frame = [d for d in point.directives if isinstance(d, OrderTokens | Pin)]
    rest = [d for d in point.directives if not isinstance(d, OrderTokens | Pin)]
    return program, (*frame, *_reshards(program), *rest)


def _meshes(links: tuple[Link, ...]) -> tuple[Mesh, ...]:
    """The meshes of the whole space."""
    active = sum(link.size > 1 for link in links)
    return meshes(links, max(active + 1, patterns.most_roles()))


def _orders(problem: Problem, mesh: Mesh, order: str | None) -> tuple[str, ...]:
    """Token orders to try; on one rank all are the same, and contiguous fits every length."""
    usual = "zigzag" if problem.mask == "causal" and mesh.dims else "contiguous"
    if order is None:
        return (usual,)
    if order != "any":
        return (order,)
    return ("contiguous", "zigzag") if mesh.dims else ("contiguous",)


def _frame(program: Program, kind: str) -> tuple[Directive, ...]:
    """Order and pins: every tensor's sequence over all dimensions."""
    dims = program.mesh.names
    named = tuple(t.name for t in program.tensors if program.sequence(t))
    pins = (Pin(named, SEQUENCE, dims),) if dims else ()
    return (OrderTokens(SEQUENCE, kind, dims), *pins)


def _bodies(program: Program) -> Iterator[tuple[Directive, ...]]:
    """Every way to split the iterations over the mesh, with every nest for it."""
    rows, columns = program.mask_axes
    brought = tuple(t.name for t in program.inputs if not t.carries(rows))
    names = program.mesh.names
    for axes in product(splittable(program), repeat=len(names)):
        split = dict(zip(names, axes, strict=True))
        lines = tuple(
            Parallelize(axis, tuple(dim for dim in names if split[dim] == axis))
            for axis in dict.fromkeys(axes)
        )
        over = [dim for dim in names if split[dim] == rows]
        for dims in permutations(over):
            for kinds in product((Shift, Shard), repeat=len(dims)):
                yield (*lines, *_nest(brought, columns, dims, kinds))


def _nest(
    tensors: tuple[str, ...], axis: str, dims: tuple[str, ...], kinds: tuple[type, ...]
) -> Iterator[Directive]:
    """The stages, outermost first; adjacent ones of a kind share a line."""
    for kind, pairs in groupby(zip(kinds, dims, strict=True), key=lambda pair: pair[0]):
        named = tuple(dim for _, dim in pairs)
        if kind is Shift:
            yield Shift(tensors, axis, tuple(Along(dim) for dim in named))
        else:
            yield Shard(tensors, axis, named)


def _reshards(program: Program) -> Iterator[Reshard]:
    """The border as directives: tensors that swap the same axes along a dimension share a line."""

    def swap(step) -> tuple[str, str, str]:
        source, target = (
            SEQUENCE if axis in program.mask_axes else axis for axis in (step.source, step.target)
        )
        return source, target, step.dim

    for (source, target, dim), steps in groupby(program.border, key=swap):
        yield Reshard(tuple(step.tensor for step in steps), source, target, dim)
