"""Every schedule that the search looks at, each once, in a fixed order.

A point is a mesh and directives, as a person would write them: the order, the pins, one
parallelize for each axis, the nest of what comes by and goes home, a tile loop, the kernel. The
reshards follow from the rest: `settle` adds them, or says why the point is not legal.

The space has, for an operator with a mask whose tensors are pinned by their sequence:

* every mesh of up to one dimension more than there are levels (or as many as a design has roles);
* for every dimension every axis that is looped over, batch and heads only where they divide;
* for every dimension and every input that does not carry its axis: gathered, walked relayed,
  walked direct, or walked both ways; these nest in every order, and of two inputs that both walk
  either is the outer one;
* for every such dimension of the results: scattered if the rows are gathered, else home, relayed
  or direct;
* no tile loop, or one of 2, 4 or 8 parts (`loops`);
* the mask's usual token order, the one that is asked for, or all.

What is the same plan is one point: gathers that nothing walks around are done once, whatever else
is written between them; reductions go innermost first; on two ranks both ways around are one; a
loop over joined heads that cuts only one of the two axes is a loop over that one.

Of more than LARGE ranks (`cost.decide`) the meshes have no more dimensions than there are levels,
or than a design has roles; nothing is walked direct or both ways, and there are no tile loops:
these are priced rank by rank.

Left out, because it gains nothing by any of our topologies and models:

* `reverse`: the mirror image of a ring costs what the ring does.
* `prefetch` other than 1: 0 only exposes transfers, more only holds more.
* `skewed`: a sequence with a mask has none. `replicate`: no pin gives a rank all of a sequence.
* several tile loops, or one that no transfer is pipelined by; loops over batch, which pipeline
  what loops over heads do; over the sequence, whose tiles the ranks' own cut is.
* rows that are walked with results scattered, and results that go home alone: tiles of a zigzag
  do not align so (`tiles-do-not-align`), and contiguous causal ranks are out of balance.
* what the rules refuse of every problem with such a mask: gathers of trimmed tiles
  (`gather-of-trimmed`), results that go home of trimmed rows beside another walk
  (`home-of-trimmed`), another's walks between those of one input (`walks-interleave`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod

from mercurygen.cost.decide import LARGE
from mercurygen.designs import patterns
from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.kernel import ATEN
from mercurygen.ir.layout import ORDERS
from mercurygen.ir.mesh import Link, Mesh
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem
from mercurygen.ir.program import SEQUENCE, BorderStep, Program
from mercurygen.schedule.apply import Attempts, start
from mercurygen.schedule.directives import (
    Along,
    Directive,
    Join,
    OrderTokens,
    Parallelize,
    Patch,
    Pin,
    Reshard,
    Shift,
    Tile,
)
from mercurygen.schedule.rules.parallelize import splittable
from mercurygen.search.loops import PARTS, loops
from mercurygen.search.nests import BOTH, DIRECT, Groups, count, directives, nests

ATENS = Patch("body", ATEN)

Body = tuple[tuple[Directive, ...], tuple[Directive, ...]]  # who splits what; what moves how


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule not yet tried.

    Attributes:
        attempts: of schedules on the mesh, this one among them.
        directives: without reshards.
        design: the named design that it is an instance of, or None.
    """

    attempts: Attempts
    directives: tuple[Directive, ...]
    design: str | None

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.start.mesh

    @property
    def start(self) -> Program:
        """The operator on the mesh, nothing distributed yet."""
        return self.attempts.start


def points(
    operator: Operator,
    problem: Problem,
    links: tuple[Link, ...],
    *,
    design: str | None = None,
    order: str | None = None,
    axes: tuple[str, ...] | None = None,
    patch: Patch = ATENS,
) -> Iterator[Point]:
    """The whole space, or the instances of one design.

    Args:
        operator: to schedule.
        problem: of one group: the heads that tensor parallelism leaves it.
        links: the levels as the group occupies them, outermost first.
        design: a name of `designs.patterns`, or None.
        order: one of `layout.ORDERS`, "any", or None for the mask's usual one. A design that has
            an order of its own has no instances in another.
        axes: of the whole space, only what splits no others.
        patch: which kernel runs the body.
    """
    if design is None:
        found = _meshes(links)
    else:
        found = tuple(mesh for mesh, _ in patterns.instances(design, links))
    for mesh in found:
        program = start(operator, problem, mesh)
        attempts = Attempts(program)
        own = design and patterns.get(design).order
        for kind in _orders(problem, mesh, order, own):
            bodies = _bodies(program, axes) if design is None else _forms(program, design)
            held = frame(program, kind)
            for split, moves in bodies:
                lines = (*held, *split, *moves)
                name = design or patterns.name_of(mesh, lines)
                yield Point(attempts, (*lines, patch), name)


def size(
    operator: Operator, problem: Problem, links: tuple[Link, ...], order: str | None = None
) -> int:
    """How many points the whole space has, by a formula for every way to split: none is made."""
    total = 0
    for mesh in _meshes(links):
        program = start(operator, problem, mesh)
        groups, trims = Groups.of(program), program.mask != "full"
        bodies = 0
        for split in _splits(program):
            columns, rows = (_missing(program, split, x) for x in (groups.columns, groups.rows))
            sizes = (tuple(n for _, n in columns), tuple(n for _, n in rows))
            for kinds, many in count(*sizes, trims).items():
                bodies += many * len(loops(program, groups, split, kinds))
        total += bodies * len(_orders(problem, mesh, order))
    return total


def beyond(point: Point) -> Refusal | None:
    """What more than LARGE ranks are not priced for: see `cost.decide`."""
    ranks = point.mesh.size
    found = next((d for d in point.directives if _every_rank(d)), None)
    if ranks <= LARGE or found is None:
        return None
    return Refusal(
        "too-many-ranks-to-price",
        lambda: (
            f"`{found}` is not priced for {ranks} ranks: every one of them would be played",
            f"at most {LARGE} ranks (`--group`); or write the schedule, which is then proved",
        ),
    )


def _every_rank(directive: Directive) -> bool:
    """Whether a line is priced rank by rank."""
    if isinstance(directive, Shift):
        return any({BOTH, DIRECT} & set(along.options) for along in directive.along)
    return isinstance(directive, Tile)


def is_variant(directives: tuple[Directive, ...]) -> bool:
    """Whether a schedule is a plainer one with a tile loop, or with a ring both ways."""
    return any(
        isinstance(d, Tile | Join)
        or (isinstance(d, Shift) and any(BOTH in along.options for along in d.along))
        for d in directives
    )


def plain(directives: tuple[Directive, ...]) -> tuple[Directive, ...]:
    """The directives without tile loops, rings both ways and reshards: what variants share."""
    found = []
    for d in directives:
        if isinstance(d, Shift):
            along = tuple(Along(a.dim, tuple(o for o in a.options if o != BOTH)) for a in d.along)
            d = replace(d, along=along)
        if not isinstance(d, Tile | Join | Reshard):
            found.append(d)
    return tuple(found)


def settle(point: Point) -> tuple[Program, tuple[Directive, ...]] | Refusal:
    """The complete program of a point and its directives with the reshards, or a refusal."""
    program = point.attempts.attempt(point.directives)
    if isinstance(program, Refusal):
        return program
    held = [d for d in point.directives if isinstance(d, OrderTokens | Pin)]
    rest = [d for d in point.directives if not isinstance(d, OrderTokens | Pin)]
    return program, (*held, *_reshards(program), *rest)


def _meshes(links: tuple[Link, ...]) -> tuple[Mesh, ...]:
    """The meshes of the whole space; of more than LARGE ranks no dimension more than levels."""
    more = prod(link.size for link in links) <= LARGE
    active = sum(link.size > 1 for link in links)
    return meshes(links, max(active + more, patterns.most_roles()))


def _orders(
    problem: Problem, mesh: Mesh, order: str | None, own: str | None = None
) -> tuple[str, ...]:
    """Token orders to try; on one rank all are the same, and contiguous fits every length."""
    if own is not None:
        return (own,) if order in (None, "any", own) else ()
    usual = "zigzag" if problem.mask == "causal" and mesh.dims else "contiguous"
    if order is None:
        return (usual,)
    if order != "any":
        return (order,)
    return ORDERS if mesh.dims else ("contiguous",)


def frame(program: Program, kind: str) -> tuple[Directive, ...]:
    """Order and pins: every tensor's sequence over all dimensions."""
    dims = program.mesh.names
    named = tuple(t.name for t in program.tensors if program.sequence(t))
    pins = (Pin(named, SEQUENCE, dims),) if dims else ()
    return (OrderTokens(SEQUENCE, kind, dims), *pins)


def usual_axes(operator: Operator, problem: Problem, links: tuple[Link, ...]) -> tuple[str, ...]:
    """Axes that win in practice: rows and key/value heads, queries of a head where those are few.

    Splitting the columns, or the batch, moves more under every mask that is balanced.
    """
    few = problem.axes.get("H", 1) < max((link.size for link in links), default=1)
    rows = operator.mask.axes[0] if operator.mask else ""
    return (rows, "H", "G") if few else (rows, "H")


def _splits(program: Program, only: tuple[str, ...] | None = None) -> Iterator[dict[str, str]]:
    """Per dimension an axis, in every way that batch and heads can be divided."""
    mesh = program.mesh
    known = [axis for axis in splittable(program) if only is None or axis in only]
    for axes in product(known, repeat=len(mesh.names)):
        split = dict(zip(mesh.names, axes, strict=True))
        ways = {
            axis: prod(mesh.extent(dim) for dim in mesh.names if split[dim] == axis)
            for axis in axes
            if axis not in program.mask_axes
        }
        if all(program.extent(axis) % n == 0 for axis, n in ways.items()):
            yield split


def _missing(
    program: Program, split: dict[str, str], tensors: tuple[str, ...]
) -> tuple[tuple[str, int], ...]:
    """Dimensions, with sizes, along which tensors do not carry the axis that is split."""
    tensor = program.tensor(tensors[0])
    return tuple(
        (dim, program.mesh.extent(dim)) for dim, axis in split.items() if not tensor.carries(axis)
    )


def _bodies(program: Program, axes: tuple[str, ...] | None) -> Iterator[Body]:
    """Every way to split the iterations over the mesh, with every nest and tile loop for it."""
    groups, names = Groups.of(program), program.mesh.names
    for split in _splits(program, axes):
        lines = tuple(
            Parallelize(axis, tuple(dim for dim in names if split[dim] == axis))
            for axis in dict.fromkeys(split.values())
        )
        columns, rows = (_missing(program, split, x) for x in (groups.columns, groups.rows))
        for nest in nests(columns, rows, program.mask != "full", program.mesh.size > LARGE):
            moves = directives(nest, groups, names)
            for loop in loops(program, groups, split, nest.kinds):
                yield lines, (*moves, *loop)


def _forms(program: Program, design: str) -> Iterator[Body]:
    """A design on a mesh, with every number of parts of its tile loop that divides."""
    pattern = patterns.get(design)
    body = pattern.on(program.mesh)
    lines = tuple(d for d in body if isinstance(d, Parallelize))
    moves = tuple(d for d in body if not isinstance(d, Parallelize))
    if pattern.tile is None:
        yield lines, moves
        return
    dims = [dim for d in lines if d.axis == pattern.tile for dim in d.dims]
    have = program.extent(pattern.tile) // prod(program.mesh.extent(dim) for dim in dims)
    fitting = [parts for parts in PARTS if have % parts == 0 and have]
    for parts in fitting or PARTS[:1]:  # what does not fit is refused
        yield lines, (*moves, Tile(pattern.tile, parts))


def _reshards(program: Program) -> tuple[Reshard, ...]:
    """The border as directives: tensors that swap the same axes along a dimension share a line.

    Programs of one layout have the same.
    """
    key = "reshards", program.layout
    found = program.shared.get(key)
    if found is None:

        def swap(step: BorderStep) -> tuple[str, str, str]:
            source, target = (
                SEQUENCE if axis in program.mask_axes else axis
                for axis in (step.source, step.target)
            )
            return source, target, step.dim

        found = program.shared[key] = tuple(
            Reshard(tuple(step.tensor for step in steps), source, target, dim)
            for (source, target, dim), steps in groupby(program.border, key=swap)
        )
    return found
