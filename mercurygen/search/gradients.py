"""The best backward for a forward schedule: every way that its mesh's dimensions can have.

Per dimension of the mesh, what splits the iterations, and what moves then:

* key/value heads, or the queries of a head (k and v gathered, their gradients reduce-scattered);
* rows: k and v come by, or are gathered; their gradients travel with them, or are
  reduce-scattered;
* columns: q, out (or delta, where the kernel reads that), lse and the gradient of out come by
  (Burst), or are gathered; the gradient of q travels with them, or is reduce-scattered.

Dimensions nest in mesh order, the outermost outside. The forward's choice does not matter, but for
the order and what it saves: forwards that agree in these share the best backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from mercurygen import operators
from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost
from mercurygen.designs import patterns
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.program import Program
from mercurygen.lower.kept import refuse
from mercurygen.lower.lower import lower_aligned
from mercurygen.lower.plan import Plan
from mercurygen.schedule.apply import Attempts, start
from mercurygen.schedule.directives import Along, Directive, Parallelize, Patch, Shard, Shift
from mercurygen.schedule.gradient import gradient, moves, section
from mercurygen.schedule.schedule import Backward, Schedule
from mercurygen.search.space import ATENS, Point, settle

# What splits a dimension's iterations, and how the tensors without that axis move.
WAYS = (
    ("H", ""),
    ("S_q", "walk"),
    ("S_q", "gather"),
    ("S_kv", "walk"),
    ("S_kv", "gather"),
    ("G", "gather"),
)
DIRECT = ("S_q", "direct")  # of a window: from and to the owners of what is read
KEYS = ("k", "v", "dk", "dv"), "S_kv"
QUERIES = ("q", "out", "lse", "do", "dq"), "S_q"


@dataclass(frozen=True, slots=True)
class Gradient:
    """A backward and what it costs.

    Attributes:
        backward: the section of the schedule, in normal form.
        plan: of the gradient's operator.
        closed: its cost in lock step.
    """

    backward: Backward
    plan: Plan
    closed: Cost


class Gradients:
    """The best backward of every forward that a search looks at."""

    def __init__(
        self,
        network: Network,
        limit: int,
        objective: str,
        emits: Callable[[Plan], Refusal | None] | None,
        patch: Patch = ATENS,
        own: bool = False,
    ) -> None:
        """
        Args:
            network: the links of the group.
            limit: bytes of a GPU.
            objective: "time" or "memory".
            emits: refuses backward plans that have no module yet.
            patch: which kernel runs the body.
            own: look at the design's own backward only.
        """
        self.patch, self.own = patch, own
        self.network, self.limit, self.objective, self.emits = network, limit, objective, emits
        self._found: dict[tuple, Gradient | Refusal] = {}
        self._begun: dict[tuple[str, Mesh], Attempts] = {}

    def of(
        self, schedule: Schedule, plan: Plan, design: str | None
    ) -> Iterator[tuple[Gradient | Refusal, str | None]]:
        """The best backward of a forward, and first, if it has a design, those of designs with it.

        Each with the name of the design that both directions are; a refusal if there is none.

        Args:
            schedule: of the forward, complete.
            plan: its plan.
            design: that the forward is an instance of.
        """
        plans = []
        for name in () if design is None else (design,) if self.own else patterns.alike(design):
            lines = patterns.get(name).backward_on(schedule.mesh)
            whole = replace(schedule, backward=self._section(lines))
            own = self._priced(whole, plan.program)
            if isinstance(own, Gradient):
                own = self._refuse(plan, own) or own
            if isinstance(own, Gradient):
                plans.append(own.plan)
                own = replace(own, backward=_section(whole, plan.program, own))
            yield own, name
        if design is not None and self.own:
            return
        best = self._best(schedule, plan)
        if isinstance(best, Refusal) or best.plan not in plans:
            yield best, None

    def _best(self, schedule: Schedule, plan: Plan) -> Gradient | Refusal:
        whole, program = replace(schedule, backward=Backward(())), plan.program
        frame = gradient(whole, program).directives
        pins = tuple(str(d) for d in frame if not isinstance(d, Parallelize))
        key = schedule.mesh, pins
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._search(whole, plan)
        if isinstance(found, Refusal):
            return found
        return replace(found, backward=_section(whole, program, found))

    def _search(self, whole: Schedule, plan: Plan) -> Gradient | Refusal:
        last: Refusal | None = None
        found: list[Gradient] = []
        window = whole.problem.mask == "window"
        for lines in bodies(whole.local_problem.axes, whole.mesh, window):
            one = self._priced(replace(whole, backward=self._section(lines)), plan.program)
            if isinstance(one, Refusal):
                last = one
            else:
                found.append(one)
        for one in sorted(found, key=self._key):
            refusal = self._refuse(plan, one)
            if refusal is None:
                return one
            last = refusal
        assert last is not None, "at least one way is tried"
        return last

    def _section(self, lines: tuple[Directive, ...]) -> Backward:
        """A section with these lines, written for torch's kernel, for the one that is asked for."""
        return Backward((*moves(self.patch.kernel, lines), self.patch))

    def _refuse(self, plan: Plan, one: Gradient) -> Refusal | None:
        """What keeps a legal backward from the forward with this plan, or from a module."""
        return refuse(plan, one.plan) or (self.emits(one.plan) if self.emits else None)

    def _priced(self, whole: Schedule, program: Program) -> Gradient | Refusal:
        """One backward, or what refuses it."""
        alone = gradient(whole, program)
        settled = settle(Point(self._attempts(alone), alone.directives, None))
        if isinstance(settled, Refusal):
            return settled
        complete, directives = settled
        plan = lower_aligned(complete)
        if isinstance(plan, Refusal):
            return plan
        return Gradient(Backward(directives), plan, closed.cost(plan, self.network))

    def _attempts(self, alone: Schedule) -> Attempts:
        """Of backward schedules on one mesh: programs that they share are made once."""
        key = alone.operator, alone.mesh
        if key not in self._begun:
            begin = start(operators.load(alone.operator), alone.local_problem, alone.mesh)
            self._begun[key] = Attempts(begin)
        return self._begun[key]

    def _key(self, one: Gradient) -> tuple:
        """Those over the memory limit come last; the caller refuses them."""
        time, memory = round(one.closed.time, 12), one.closed.peak_memory
        first = (memory, time) if self.objective == "memory" else (time, memory)
        return (memory > self.limit, *first)


def _section(whole: Schedule, program: Program, found: Gradient) -> Backward:
    """The section in normal form, for this forward."""
    alone = gradient(whole, program)
    return section(whole, program, replace(alone, directives=found.backward.directives))


def bodies(
    extents: dict[str, int], mesh: Mesh, window: bool = False
) -> Iterator[tuple[Directive, ...]]:
    """Every backward of a mesh, as directives without order, pins and reshards.

    Args:
        extents: of the axes; batch and heads are split only where they divide.
        mesh: of the forward.
        window: whether the mask is one: then tiles may come straight from their owners.
    """
    ways_of = (*WAYS, DIRECT) if window and len(mesh.names) == 1 else WAYS
    for ways in product(ways_of, repeat=len(mesh.names)):
        along = tuple(zip(mesh.names, ways, strict=True))
        split: dict[str, tuple[str, ...]] = {}
        for dim, (axis, _) in along:
            split[axis] = (*split.get(axis, ()), dim)
        heads = ("H", "G")
        if any(extents[x] % prod(map(mesh.extent, split.get(x, ()))) for x in heads):
            continue
        lines = tuple(Parallelize(axis, dims) for axis, dims in split.items())
        yield (*lines, *_moves(along))


def _moves(along: tuple[tuple[str, tuple[str, str]], ...]) -> Iterator[Directive]:
    """What moves along every dimension, the outermost first; walks of one kind as one line."""
    for tensors, axis in (KEYS, QUERIES):
        walks, gathers = [], []
        for dim, (split, way) in along:
            moved = split in ("S_q", "G") if axis == "S_kv" else split == "S_kv"
            if moved and way == "gather":
                gathers.append(dim)
            elif moved:
                walks.append(Along(dim, ("direct",)) if way == "direct" else Along(dim))
        if walks:
            yield Shift(tensors, axis, tuple(walks))
        if gathers:
            yield Shard(tensors, axis, tuple(gathers))
