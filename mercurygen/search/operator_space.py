"""Schedules of any operator: every way to split its loops, and every story of every tensor.

The caller holds every input split over every dimension, along an axis that is looped over: what
would be given whole would cost nothing, and be everybody's choice. Ranked are the seconds that the
bytes of the busiest of a few ranks need on their links, then the memory at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Link, Mesh, cover
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Sizes
from mercurygen.ir.program import Program, Tensor
from mercurygen.lower.events import Batch, Collective, Trace
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.recorder import NotARun
from mercurygen.lower.trace import trace
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directives import (
    Along,
    Directive,
    Parallelize,
    Replicate,
    Shard,
    Shift,
)

Directives = tuple[Directive, ...]


@dataclass(frozen=True, slots=True)
class Priced:
    """A legal schedule.

    Attributes:
        mesh: the mesh.
        directives: of the schedule.
        plan: lowered from them.
        seconds: that its bytes need on their links, of the busiest of a few ranks.
        peak: bytes alive at most, of the same ranks.
    """

    mesh: Mesh
    directives: Directives
    plan: Plan
    seconds: float
    peak: int


def operator_points(
    operator: Operator, problem: Sizes, links: tuple[Link, ...]
) -> Iterator[tuple[Program, Directives]]:
    """Every (operator on a mesh, directives), in a fixed order, legal or not."""
    active = sum(link.size > 1 for link in links)
    for mesh in meshes(links, active):
        program = start(operator, problem, mesh)
        for axes in product(program.loops, repeat=len(mesh.dims)):
            split = dict(zip(mesh.names, axes, strict=True))
            lines = tuple(
                Parallelize(axis, tuple(d for d in mesh.names if split[d] == axis))
                for axis in dict.fromkeys(axes)
            )
            ways = [_stories(program, names, d, split) for d in split for names in _moved(program)]
            for chosen in product(*ways):
                yield program, (*lines, *(line for line in chosen if line is not None))


def _moved(program: Program) -> list[tuple[str, ...]]:
    """Tensors that have one story: those that belong together, inputs before outputs."""
    groups = {name: each for each in program.together for name in each}
    groups |= {name: each.outputs for each in program.combines for name in each.outputs}
    found: dict[tuple[str, ...], None] = {}
    for tensor in (*program.read, *program.outputs):
        if tensor.role != "derived":
            found[groups.get(tensor.name, (tensor.name,))] = None
    return list(found)


def _stories(
    program: Program, names: tuple[str, ...], dim: str, split: dict[str, str]
) -> list[Directive | None]:
    """What may become of some tensors along a dimension; None: their part is local."""
    tensor = program.tensor(names[0])
    if tensor.carries(split[dim]):
        return [None]
    axes = _axes(program, tensor)
    found: list[Directive | None] = [Shard(names, axis, (dim,)) for axis in axes]
    for axis in axes:
        found += [Shift(names, axis, (Along(dim),)), Shift(names, axis, (Along(dim, ("direct",)),))]
    if tensor.role == "output" or not axes:
        found.append(Replicate(names, (dim,)))
    return found


def _axes(program: Program, tensor: Tensor) -> list[str]:
    """Axes along which a tensor may be stored split: its sequence, else those looped over."""
    sequence = program.sequence(tensor)
    if sequence is not None:
        return [sequence]
    return [axis for axis in tensor.axes if axis in program.loops]


def search_operator(
    operator: Operator,
    problem: Sizes,
    links: tuple[Link, ...],
    refuse: Callable[[Plan], Refusal | None],
) -> tuple[list[Priced], dict[str, int]]:
    """All legal schedules that modules are emitted for, the best first.

    Args:
        operator: to be scheduled.
        problem: its sizes.
        links: the levels as the group occupies them.
        refuse: what else refuses a plan.

    Returns:
        The schedules, and how often each slug refused one.
    """
    found, refused = [], {}
    for program, directives in operator_points(operator, problem, links):
        priced = _priced(program, directives, links, refuse)
        if isinstance(priced, str):
            refused[priced] = refused.get(priced, 0) + 1
        else:
            found.append(priced)
    found.sort(key=lambda x: (x.seconds, x.peak, len(x.mesh.dims), len(x.directives)))  # stable
    return found, refused


def _priced(
    program: Program,
    directives: Directives,
    links: tuple[Link, ...],
    refuse: Callable[[Plan], Refusal | None],
) -> Priced | str:
    """A schedule with its price, or the slug of what refuses it."""
    settled = attempt(program, directives)
    plan = settled if isinstance(settled, Refusal) else lower(settled)
    if isinstance(plan, Refusal):
        return plan.slug
    try:
        refusal = refuse(plan)
        if refusal is not None:
            return refusal.slug
        size = program.mesh.size
        played = [trace(plan, rank) for rank in sorted({0, size // 2, size - 1})]
    except NotARun:
        return "not-a-run"
    speed = _speeds(program.mesh, links)
    seconds = max(sum(sent(each, program.mesh, speed).values()) for each in played)
    peak = max(each.peak() for each in played)
    return Priced(program.mesh, directives, plan, seconds, peak)


def _speeds(mesh: Mesh, links: tuple[Link, ...]) -> dict[str, float]:
    """Bytes per second of the slowest link of every dimension."""
    return {
        dim: min(links[i].bandwidth for i in levels) for dim, levels in cover(mesh, links).items()
    }


def sent(played: Trace, mesh: Mesh, speed: dict[str, float]) -> dict[str, float]:
    """Seconds per dimension that the bytes which a rank sends need on its link."""
    found = dict.fromkeys(mesh.names, 0.0)
    for event in played.events:
        if isinstance(event, Batch):
            for message in event.sends:
                nbytes = message.nbytes
                nbytes = played.buffers[message.buffer].nbytes if nbytes is None else nbytes
                found[event.dim] += nbytes / speed[event.dim]
        elif isinstance(event, Collective):
            size, nbytes = mesh.extent(event.dim), played.buffers[event.source].nbytes
            times = {"all-gather": size - 1, "all-reduce": 2 * (size - 1) / size, "broadcast": 1}
            share = times.get(event.kind, (size - 1) / size)
            found[event.dim] += nbytes * share / speed[event.dim]
    return found
