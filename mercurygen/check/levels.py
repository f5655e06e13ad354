"""The proof of a plan for more ranks than can be played at once: level by level.

Of every rank, one at a time: its buffers, its memory, what it sends. What takes all ranks at once,
the order of transfers and the lineage of results, is proved on smaller meshes: for each dimension
one on which it has all its ranks and every other has CUT (or 2), with the same tokens and heads a
rank. What is the same plan there is one text with other extents, which is looked at too: all that
a plan says but numbers is equal, and every number is the product of the same dimensions.

What holds on the small meshes holds on the large one as far as what a rank does along a dimension
depends on its coordinates by their differences and their order, which is how plans of a full or a
causal mask are made (`lower.cuts`); `tests/test_levels.py` compares the two proofs, of good plans
and of broken ones, where both can be had. Masks by distance (windows, packed documents) are not of
this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

from mercurygen.check.buffers import check_buffers
from mercurygen.check.prove import prove
from mercurygen.check.report import Part, Report, Spread
from mercurygen.check.traffic import measure
from mercurygen.errors import InternalError, Refusal, UserError
from mercurygen.ir.layout import Interleaving
from mercurygen.ir.mesh import Dim, Link, Mesh
from mercurygen.ir.operator import Operator
from mercurygen.ir.program import Axis, Program
from mercurygen.lower.events import Batch, Collective, Trace
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.schedule.apply import Attempts, start
from mercurygen.schedule.schedule import Schedule

MOST_PLAYED = 1024  # ranks at once
CUT = 3  # ranks of the other dimensions: on 2 both ways around are one
NUMBERS = tuple(field.name for field in fields(Interleaving))

At = Callable[[Mesh], "Plan | Refusal"]  # the plan on a mesh with the same dimensions


def prove_by_levels(plan: Plan, links: tuple[Link, ...], at: At) -> Report:
    """Prove a plan level by level, with and without the log-sum-exp handed out.

    Args:
        plan: of a complete program.
        links: the levels as the group occupies them.
        at: the same schedule's plan on a mesh with other extents: see `elsewhere`.

    Raises:
        ProofError: what is wrong, where; of a small mesh, the ranks are its own.
        UserError: `not-proved-by-levels`: it is not a plan of which that says anything.
    """
    program = plan.program
    if program.mask == "window" or program.documents:
        raise _not_proved("its mask goes by distance, which a cut mesh does not have")
    meshes = small_meshes(program.mesh)
    plans = [_made(at, mesh) for mesh in meshes]
    _same_plan([plan, *plans])
    parts = []
    for mesh, small in zip(meshes, plans, strict=True):
        one_each = tuple(Link(dim.name, dim.size, dim.name, 1.0) for dim in mesh.dims)
        parts.append(Part(tuple(dim.size for dim in mesh.dims), prove(small, one_each)))
    plain, full = (_every_rank(plan, links, parts, lse) for lse in (False, True))
    return replace(plain, with_lse=full)


def elsewhere(operator: Operator, schedule: Schedule) -> At:
    """The plans of a schedule on meshes with other extents, with the same share for every rank."""
    begin = start(operator, schedule.local_problem, schedule.mesh)

    def at(mesh: Mesh) -> Plan | Refusal:
        axes = _scaled(Attempts(begin).attempt(schedule.directives), mesh)
        if axes is None:
            return Refusal("not-divisible", lambda: ("an extent does not divide", ""))
        found = Attempts(replace(begin, mesh=mesh, axes=axes)).attempt(schedule.directives)
        return found if isinstance(found, Refusal) else lower(found)

    return at


def small_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """For every dimension the mesh on which only it has all its ranks.

    Raises:
        UserError: `not-proved-by-levels`, if one of them is too large to be played.
    """
    found = []
    for whole in mesh.dims:
        for cut in (CUT, 2):
            dims = (d if d is whole else Dim(d.name, min(cut, d.size)) for d in mesh.dims)
            small = Mesh(tuple(dims))
            if small.size <= MOST_PLAYED:
                break
        else:
            raise _not_proved(
                f"a mesh with all of {whole.name}={whole.size} has {small.size} ranks at least, "
                f"and {MOST_PLAYED} are played at once"
            )
        found.append(small)
    return tuple(dict.fromkeys(found))


def _scaled(program: Program | Refusal, mesh: Mesh) -> tuple[Axis, ...] | None:
    """Extents with the same share for every rank; None if one does not divide."""
    if isinstance(program, Refusal):
        raise InternalError(f"a schedule that was lowered is refused: {program.slug}")
    axes = []
    for axis in program.axes:
        split = {
            dim
            for tensor in program.tensors
            for held in (tensor.pin, program.storage(tensor), program.parallel)
            for dim, along in zip(program.mesh.names, held, strict=True)
            if along == axis.name
        }
        if axis.name in program.mask_axes:
            split |= set(program.order.dims)
        share, rest = divmod(axis.extent, prod(map(program.mesh.extent, split)))
        if rest:
            return None
        axes.append(Axis(axis.name, share * prod(map(mesh.extent, split))))
    return tuple(axes)


def _made(at: At, mesh: Mesh) -> Plan:
    found = at(mesh)
    if isinstance(found, Refusal):
        raise _not_proved(f"on {_sizes(mesh)} ranks the schedule is refused: {found.slug}")
    return found


# --- the same plan --------------------------------------------------------------------------


def _same_plan(plans: list[Plan]) -> None:
    """Plans on meshes with other extents say the same but for extents.

    Every number is, on all meshes, the product of the extents of the same dimensions, times what
    no extent is part of.

    Raises:
        UserError: `not-proved-by-levels`.
    """
    meshes = [plan.program.mesh for plan in plans]
    (words, first), *others = map(_taken_apart, plans)
    for mesh, (other, _) in zip(meshes[1:], others, strict=True):
        if other != words:
            raise _not_proved(f"on {_sizes(mesh)} ranks it is another plan")
    dims = meshes[0].names
    subsets = [s for n in range(len(dims) + 1) for s in combinations(dims, n)]
    products = [[prod(map(mesh.extent, subset)) for mesh in meshes] for subset in subsets]
    for values in zip(first, *(numbers for _, numbers in others), strict=True):
        factors = ({divmod(*pair) for pair in zip(values, each, strict=True)} for each in products)
        if not any(len(found) == 1 and not min(found)[1] for found in factors):
            raise _not_proved(f"its parts are {values} on meshes of other extents")


def _sizes(mesh: Mesh) -> str:
    return " x ".join(str(dim.size) for dim in mesh.dims)


def _taken_apart(plan: Plan) -> tuple[Any, list[int]]:
    """All that a plan says but extents, and the numbers that are made of these."""
    numbers: list[int] = []
    words = _words(plan, numbers)
    return words, numbers


def _words(value: Any, numbers: list[int]) -> Any:
    if isinstance(value, Interleaving):
        numbers += [getattr(value, name) for name in NUMBERS]
        return Interleaving
    if isinstance(value, Mesh):
        return value.names
    if isinstance(value, Axis):
        return value.name
    if isinstance(value, tuple):
        return tuple(_words(each, numbers) for each in value)
    if is_dataclass(value):
        each = (_words(getattr(value, field.name), numbers) for field in fields(value))
        return type(value).__name__, *each
    return value


# --- rank by rank ---------------------------------------------------------------------------


def _every_rank(plan: Plan, links: tuple[Link, ...], parts: list[Part], lse: bool) -> Report:
    """What is exact of each rank by itself, one at a time: buffers, memory, what it sends."""
    mesh, peaks = plan.program.mesh, []
    messages, collectives = 0, 0

    def traces() -> Iterator[Trace]:
        nonlocal messages, collectives
        for rank in range(mesh.size):
            each = trace(plan, rank, with_lse=lse)
            check_buffers(each)
            peaks.append(each.peak())
            messages += sum(len(e.sends) for e in each.events if isinstance(e, Batch))
            first = [dim for dim, place in mesh.coordinate(rank).items() if not place]
            collectives += sum(isinstance(e, Collective) and e.dim in first for e in each.events)
            yield each

    traffic = measure(plan, traces(), links)
    return Report(
        ranks=mesh.size,
        tiles=sum(part.report.tiles for part in parts),
        contributions=sum(part.report.contributions for part in parts),
        messages=messages,
        collectives=collectives,
        peak=Spread(tuple(peaks)),
        traffic=traffic,
        parts=tuple(parts),
    )


def _not_proved(why: str) -> UserError:
    return UserError(
        "not-proved-by-levels",
        f"more than {MOST_PLAYED} ranks are proved level by level, which this is not: {why}",
        help="place the operator on a part of the machine: --group, or the line `group`",
    )
