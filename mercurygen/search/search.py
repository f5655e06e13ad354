"""Search: the closed form ranks the whole space, the simulation decides among the best.

Offline, on one core, with nothing but arithmetic; the same result on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mercurygen import operators
from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.simulate import simulate
from mercurygen.cost.topology import Topology
from mercurygen.designs import patterns
from mercurygen.errors import Refusal, UserError, closest
from mercurygen.ir.mesh import Link
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.schedule.schedule import Schedule
from mercurygen.search.place import links, place, target
from mercurygen.search.result import OBJECTIVES, Candidate, Counts, Named, Result, pareto
from mercurygen.search.space import Point, points, settle
from mercurygen.search.space import size as space_size

Progress = Callable[[str, int, int], None]  # (what is done, how many are, of how many)

FINALISTS = 50
LARGEST_SPACE = 6000  # schedules: a minute or so on one core
ORDERS = ("zigzag", "contiguous", "striped", "any")
# Of several refusals of one design, the one that came furthest says most.
_FURTHEST = ("over-memory-limit", "mask-too-fragmented", "heads-not-divisible")


def search(
    operator: str,
    problem: Problem,
    topology: Topology,
    *,
    group: tuple[int, ...] | None = None,
    tp: int = 1,
    design: str | None = None,
    order: str | None = None,
    memory_limit: int | None = None,
    objective: str = "time",
    progress: Progress | None = None,
) -> Result:
    """The best schedules of an operator on a topology.

    Args:
        operator: a shipped name, or `path.py::function`.
        problem: over all tensor-parallel ranks.
        topology: the machine.
        group: ranks of the operator per level, outermost first; default: all that tp leaves.
        tp: tensor-parallel ranks that share the heads; they sit beside each other.
        design: a named design, to search among its instances only.
        order: token order: one of ORDERS; None: zigzag if causal, else contiguous.
        memory_limit: bytes of a GPU; None: all of its memory.
        objective: "time" or "memory".
        progress: called now and then with what is done, how many are, of how many.

    Raises:
        UserError: a wrong argument; `space-too-large`; the reason that refuses every schedule, if
            it is one; or `nothing-fits` (exit code 1).
    """
    _check(objective, order, design)
    group = place(topology, group, tp)
    limit = topology.gpu.memory_bytes if memory_limit is None else memory_limit
    local = problem.split_heads(tp)
    spanned = links(topology, group)
    network = Network(topology, group, tp)
    header = Schedule(operator, problem, target(topology), group, tp, None, ())
    tried = _Tried(header, network, limit)
    space = _space(operators.load(operator), local, spanned, design, order)
    for done, point in enumerate(space, 1):
        tried.look(point)
        _tell(progress, "schedules priced", done, len(space))
    if not tried.legal:
        raise _nothing(tried, design, spanned)
    ranked = _decide(tried.legal, network, objective, progress)
    return Result(
        problem=problem,
        topology=topology,
        group=group,
        tp=tp,
        objective=objective,
        memory_limit=limit,
        counts=tried.counts(),
        ranked=ranked,
        pareto=pareto(list(ranked)),
        named=_named((design,) if design else patterns.names(), ranked, tried, spanned),
    )


@dataclass(slots=True)
class _Tried:
    """What became of the points so far.

    Attributes:
        header: a schedule without mesh and directives.
        network: the links of the group.
        limit: bytes of a GPU.
        legal: candidates, priced by the closed form.
        refused: (design, refusal) of the others.
        least: the least memory of those that are over the limit, or None.
    """

    header: Schedule
    network: Network
    limit: int
    legal: list[Candidate] = field(default_factory=list)
    refused: list[tuple[str | None, Refusal]] = field(default_factory=list)
    least: int | None = None

    def look(self, point: Point) -> None:
        """Price a point, or note what refuses it."""
        settled = settle(point)
        if isinstance(settled, Refusal):
            self.refused.append((point.design, settled))
            return
        program, directives = settled
        plan = lower(program)
        if isinstance(plan, Refusal):
            self.refused.append((point.design, plan))
            return
        cost = closed.cost(plan, self.network)
        if cost.peak_memory > self.limit:
            self.refused.append((point.design, _over(cost.peak_memory, self.limit)))
            self.least = min(cost.peak_memory, self.least or cost.peak_memory)
            return
        schedule = replace(self.header, mesh=point.mesh, directives=directives)
        self.legal.append(Candidate(schedule, plan, point.design, cost))

    def counts(self) -> Counts:
        """How many were looked at, legal and refused."""
        slugs = Counter(refusal.slug for _, refusal in self.refused)
        total = len(self.legal) + len(self.refused)
        return Counts(total, len(self.legal), tuple(sorted(slugs.items())))


def _check(objective: str, order: str | None, design: str | None) -> None:
    if objective not in OBJECTIVES:
        raise UserError(
            "unknown-objective", f"no objective {objective!r}", help=closest(objective, OBJECTIVES)
        )
    if order is not None and order not in ORDERS:
        raise UserError("unknown-order", f"no order {order!r}", help=closest(order, ORDERS))
    if design is not None:
        patterns.get(design)


def _space(
    operator: Operator,
    problem: Problem,
    spanned: tuple[Link, ...],
    design: str | None,
    order: str | None,
) -> list[Point]:
    """The points to look at; refused beforehand if they are too many."""
    size = 0 if design else space_size(operator, problem, spanned, order)
    if size > LARGEST_SPACE:
        raise UserError(
            "space-too-large",
            f"{size} schedules to search: this version looks at {LARGEST_SPACE} at most",
            help="name a design with --schedule NAME, place the operator on a part of the machine "
            "with --group, or write a topology with fewer levels",
        )
    return list(points(operator, problem, spanned, design=design, order=order))


def _over(peak: int, limit: int) -> Refusal:
    return Refusal(
        "over-memory-limit",
        lambda: (
            f"needs {peak} bytes ({_gib(peak)}) on a GPU; the limit is {limit} ({_gib(limit)})",
            "more GPUs, a shorter sequence, or a higher --memory-limit",
        ),
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.4g} GiB"


def _decide(
    legal: list[Candidate], network: Network, objective: str, progress: Progress | None
) -> tuple[Candidate, ...]:
    """Simulate the best of the closed form, its Pareto set and all named designs; best first."""
    ordered = sorted(legal, key=lambda c: c.key(objective))
    chosen = dict.fromkeys(c.text for c in ordered[:FINALISTS])
    chosen |= dict.fromkeys(c.text for c in pareto(legal))
    finalists = [c for c in ordered if c.text in chosen or c.design]
    decided = []
    for done, candidate in enumerate(finalists, 1):
        decided.append(replace(candidate, simulated=simulate(candidate.plan, network)))
        _tell(progress, "schedules simulated", done, len(finalists))
    return tuple(sorted(decided, key=lambda c: c.key(objective)))


def _tell(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


def _named(
    names: tuple[str, ...], ranked: tuple[Candidate, ...], tried: _Tried, spanned: tuple[Link, ...]
) -> tuple[Named, ...]:
    """The best instance of every design, or what refuses it."""
    found = []
    for name in names:
        best = next((c for c in ranked if c.design == name), None)
        if best is None:
            error = _refusal_of(name, tried, spanned)
            found.append(Named(name, None, error.slug, error.message, error.help))
        else:
            found.append(Named(name, best))
    return tuple(found)


def _refusal_of(name: str, tried: _Tried, spanned: tuple[Link, ...]) -> UserError:
    """Why no instance of a design is legal: of its refusals, the one that came furthest."""
    refusals = [refusal for design, refusal in tried.refused if design == name]
    if not refusals:
        count = len(patterns.get(name).roles)
        have = " ".join(f"{link.level}={link.size}" for link in spanned)
        return UserError(
            "design-does-not-fit",
            f"{name} needs a mesh of {count} dimension{'s' if count > 1 else ''}, "
            f"and the group {have} has no such mesh",
            help="a dimension has at least 2 ranks; fitting designs: "
            + (", ".join(n for n in patterns.names() if patterns.instances(n, spanned)) or "none"),
        )
    return min(refusals, key=_distance).error()


def _distance(refusal: Refusal) -> int:
    return _FURTHEST.index(refusal.slug) if refusal.slug in _FURTHEST else len(_FURTHEST)


def _nothing(tried: _Tried, design: str | None, spanned: tuple[Link, ...]) -> UserError:
    """The error if no schedule is legal."""
    if not tried.refused:
        return _refusal_of(design or "", tried, spanned)
    counts = tried.counts()
    best = min((refusal for _, refusal in tried.refused), key=_distance)
    if len(counts.refused) == 1 and tried.least is None:
        return best.error()
    said = ", ".join(f"{slug} {count}" for slug, count in counts.refused)
    message, help = best.explain()
    note = None
    if tried.least is None:
        note = message
    else:
        help = (
            f"the least that a schedule needs is {tried.least} bytes ({_gib(tried.least)}); {help}"
        )
    return UserError(
        "nothing-fits",
        f"none of {counts.candidates} schedules is legal: {said}",
        note=note,
        help=help,
        exit_code=1,
    )
