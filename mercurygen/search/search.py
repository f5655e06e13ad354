"""Search: the closed form ranks the whole space, the simulation decides among the best.

Offline, on one core, with nothing but arithmetic; the same result on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mercurygen import operators
from mercurygen.cost import closed
from mercurygen.cost.decide import LARGE
from mercurygen.cost.links import Network
from mercurygen.cost.report import together
from mercurygen.cost.simulate import simulate
from mercurygen.cost.topology import Topology
from mercurygen.designs import patterns
from mercurygen.errors import Refusal, UserError
from mercurygen.ir.kernel import ATEN, BACKWARD, FORWARD, options_for
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower_aligned
from mercurygen.lower.plan import Plan
from mercurygen.schedule.directives import Patch
from mercurygen.schedule.schedule import Schedule
from mercurygen.search.arguments import check
from mercurygen.search.asked import Asked
from mercurygen.search.candidate import Candidate, pareto
from mercurygen.search.collect import seldom_collected
from mercurygen.search.gradients import Gradients
from mercurygen.search.place import links, place, target
from mercurygen.search.result import Counts, Named, Result
from mercurygen.search.robust import Robustness, weigh
from mercurygen.search.space import Point, beyond, is_variant, plain, settle, usual_axes

Progress = Callable[[str, int, int], None]  # (what is done, how many are, of how many)
Emits = Callable[[Plan], Refusal | None]  # why no module is emitted for a plan yet

FINALISTS = 50
VARIED = 8  # plain schedules whose variants are priced too
KEPT = 2000  # candidates, before all but those that can still win are dropped
WAYS = FORWARD, BACKWARD
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
    whole: bool = False,
    passes: str = "fwd",
    kernel: str = ATEN,
    emits: Emits | None = None,
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
        order: token order: one of `arguments.ORDERS`; None: zigzag if causal, else contiguous.
        memory_limit: bytes of a GPU; None: all of its memory.
        objective: "time", "memory", or "robust": see `mercurygen.search.robust`.
        whole: search all of the space: the columns and the batch split too.
        passes: "fwd", or "train": forward and backward, each with a schedule of its own.
        kernel: that runs the body; its tiles are those for the kind of GPU, if that is known.
        emits: refuses plans that have no module yet: they are counted, and not chosen.
        progress: called now and then with what is done, how many are, of how many.

    Raises:
        UserError: a wrong argument; `space-too-large`; the reason that refuses every schedule, if
            it is one; or `nothing-fits` (exit code 1).
    """
    check(objective, order, design, passes, kernel)
    group = place(topology, group, tp)
    limit = topology.gpu.memory_bytes if memory_limit is None else memory_limit
    spanned = links(topology, group)
    network = Network(topology, group, tp)
    header = Schedule(operator, problem, target(topology), group, tp, None, ())
    local, loaded = problem.split_heads(tp), operators.load(operator)
    axes = None if whole else usual_axes(loaded, local, spanned)
    patches = [Patch("body", kernel, options_for(kernel, topology.gpu.name, x)) for x in WAYS]
    asked = Asked(loaded, local, spanned, order, design, axes, patches[0])
    tried = _Tried(header, network, limit, objective, emits)
    if passes == "train":
        tried.gradients = Gradients(network, limit, objective, emits, patches[1], bool(design))
    with seldom_collected():
        tried = _try(asked, tried, progress)
    ranked = _decide(tried.finalists(), network, objective, progress)
    named = _named((design,) if design else patterns.names(passes), ranked, tried, asked)
    asked_for = problem, topology, group, tp, objective, limit
    front, other = pareto(list(ranked)), tried.better_unemitted(ranked[0])
    found = tried.counts(), ranked, front, named, other
    return Result(*asked_for, *found, _robust(ranked, tried, progress))


@dataclass(slots=True)
class _Tried:
    """What became of the points so far.

    Attributes:
        header: a schedule without mesh and directives.
        network: the links of the group.
        limit: bytes of a GPU.
        objective: what the candidates are compared by.
        emits: refuses plans that have no module yet.
        gradients: finds every forward's backward; None: of the forward alone.
        kept: candidates that may win, priced by the closed form.
        unemitted: the best candidate without a module, or None.
        legal: how many schedules are legal.
        without: those that might have won but have no module, by number.
        emitted: those that are known to have one.
        refused: how many are not, by slug.
        furthest: per design (None: of all) the refusal that came furthest.
        least: the least memory of those that are over the limit, or None.
        skipped: variants that were not priced.
        over: (peak memory, number, mesh, plain directives) of those that need too much.
    """

    header: Schedule
    network: Network
    limit: int
    objective: str = "time"
    emits: Emits | None = None
    gradients: Gradients | None = None
    kept: list[Candidate] = field(default_factory=list)
    unemitted: Candidate | None = None
    legal: int = 0
    without: set[int] = field(default_factory=set)
    emitted: set[int] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    furthest: dict[str | None, Refusal] = field(default_factory=dict)
    least: int | None = None
    skipped: int = 0
    over: list[tuple] = field(default_factory=list)

    def look(self, number: int, point: Point) -> None:
        """Price a point, or note what refuses it."""
        settled = beyond(point) or settle(point)
        if isinstance(settled, Refusal):
            return self.refuse(point, settled)
        program, directives = settled
        plan = lower_aligned(program)  # those of the space are
        if isinstance(plan, Refusal):
            return self.refuse(point, plan)
        cost = closed.cost(plan, self.network)
        schedule = replace(self.header, mesh=point.mesh, directives=directives)
        forward = Candidate(schedule, plan, point.design, number, cost)
        if self.gradients is None or cost.peak_memory > self.limit:
            return self.weigh(point, forward)
        for found, design in self.gradients.of(schedule, plan, point.design):
            if isinstance(found, Refusal):
                self.refuse(point, found)
                continue
            both = replace(schedule, backward=found.backward)
            cost = together(forward.closed, found.closed)
            self.weigh(point, Candidate(both, plan, design, number, cost, gradient=found.plan))

    def weigh(self, point: Point, candidate: Candidate) -> None:
        """Keep what fits into memory."""
        need = candidate.cost.peak_memory
        if need > self.limit:
            self.least = min(need, self.least or need)
            self.over.append((need, candidate.number, point.mesh, plain(point.directives)))
            return self.refuse(point, _over(need, self.limit))
        self.legal += 1
        self.keep(candidate)

    def refuse(self, point: Point, refusal: Refusal) -> None:
        """Count a refusal."""
        self.refused[refusal.slug] += 1
        for design in {point.design, None}:
            known = self.furthest.get(design)
            if known is None or _distance(refusal) < _distance(known):
                self.furthest[design] = refusal

    def keep(self, candidate: Candidate) -> None:
        """Keep a candidate, while it may win."""
        self.kept.append(candidate)
        if len(self.kept) > KEPT:
            self.kept = self.finalists()

    def finalists(self) -> list[Candidate]:
        """Those with a module: the best of the closed form, its Pareto set, all named designs."""
        chosen: list[Candidate] = []
        least: float | None = None  # of what is not the objective
        for candidate in sorted(self.kept, key=lambda c: c.key(self.objective)):
            _, other, *_ = candidate.key(self.objective)
            better = least is None or other < least
            if len(chosen) >= FINALISTS and not better and not candidate.design:
                continue
            if self.has_module(candidate):
                least = other if better else least
                chosen.append(candidate)
        return chosen

    def has_module(self, candidate: Candidate) -> bool:
        """Whether a module is emitted for a candidate; of those without the best is noted."""
        if self.emits is None or candidate.number in self.emitted:
            return True
        if self.emits(candidate.plan) is None:
            self.emitted.add(candidate.number)
            return True
        self.without.add(candidate.number)
        self.unemitted = min(
            (x for x in (self.unemitted, candidate) if x), key=lambda c: c.key(self.objective)
        )
        return False

    def better_unemitted(self, best: Candidate) -> Candidate | None:
        """The best candidate without a module, simulated, if it beats the best with one."""
        if self.unemitted is None:
            return None
        other = simulated(self.unemitted, self.network)
        return other if other.key(self.objective) < best.key(self.objective) else None

    def counts(self) -> Counts:
        """How many were looked at, legal and refused."""
        total = self.legal + self.refused.total()
        refused = tuple(sorted(self.refused.items()))
        return Counts(total, self.legal, len(self.without), refused, self.skipped)


def _try(asked: Asked, tried: _Tried, progress: Progress | None) -> _Tried:
    """Price every plain point, and the variants of the best; some schedule must be legal.

    Variants, with a tile loop or rings both ways, are simulated, a hundred times as slow.
    """
    size, variants = asked.size(), {}
    for done, point in enumerate(asked.points(asked.design), 1):
        if asked.design is None and point.design is None and is_variant(point.directives):
            key = point.mesh, plain(point.directives)
            variants.setdefault(key, []).append((done, point))
        else:
            tried.look(done, point)
        _tell(progress, "schedules priced", done, size)
    best = [
        (c.schedule.mesh, plain(c.schedule.directives))
        for key in dict.fromkeys((tried.objective, "time"))
        for c in sorted(tried.kept, key=lambda c: c.key(key))[:VARIED]
    ]
    best += [
        (mesh, lines)
        for _, _, mesh, lines in sorted(tried.over, key=lambda over: over[:2])[:VARIED]
    ]
    for key in best:  # of what needs too much memory the leanest: a variant may need less
        for done, point in variants.pop(key, ()):
            tried.look(done, point)
    tried.skipped = sum(map(len, variants.values()))
    if not tried.finalists():
        raise _nothing(tried, asked)
    return tried


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
    finalists: list[Candidate], network: Network, objective: str, progress: Progress | None
) -> tuple[Candidate, ...]:
    """The finalists, simulated; best first."""
    decided = []
    for done, candidate in enumerate(finalists, 1):
        decided.append(simulated(candidate, network))
        _tell(progress, "schedules simulated", done, len(finalists))
    return tuple(sorted(decided, key=lambda c: c.key(objective)))


def _robust(
    ranked: tuple[Candidate, ...], tried: _Tried, progress: Progress | None
) -> Robustness | None:
    """How schedules do where links are not as planned, if that is the objective."""
    if tried.objective != "robust":
        return None
    return weigh(ranked, tried.kept, tried.has_module, tried.network, progress)


def simulated(candidate: Candidate, network: Network) -> Candidate:
    """With its cost by the event simulation, of forward and backward if it has both.

    Of more than LARGE ranks the closed form stands.
    """
    if network.size > LARGE:
        return candidate
    cost = simulate(candidate.plan, network)
    if candidate.gradient is not None:
        cost = together(cost, simulate(candidate.gradient, network))
    return replace(candidate, simulated=cost)


def _tell(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


def _named(
    names: tuple[str, ...], ranked: tuple[Candidate, ...], tried: _Tried, asked: Asked
) -> tuple[Named, ...]:
    """The best instance of every design, or what refuses it."""
    found = []
    for name in names:
        best = next((c for c in ranked if c.design == name), None)
        if best is None:
            error = _refusal_of(name, tried, asked)
            found.append(Named(name, None, error.slug, error.message, error.help))
        else:
            found.append(Named(name, best))
    return tuple(found)


def _refusal_of(name: str, tried: _Tried, asked: Asked) -> UserError:
    """Why no instance of a design is chosen: of its refusals, the one that came furthest."""
    own, roles = patterns.get(name).order, len(patterns.get(name).roles)
    orders = (own, "any") if asked.design is None else (own, "any", None)
    if own is not None and asked.order not in orders:
        return UserError(
            "another-order",
            f"{name} has the {own} order, and the caller's tokens lie in another",
            help=f"`--order {own}`, or `--order any`",
        )
    alone = _Tried(tried.header, tried.network, tried.limit)
    for number, point in enumerate(asked.points(name), 1):
        alone.look(number, point)
    without = (tried.emits(c.plan) for c in alone.kept if tried.emits)
    refusal = next((x for x in without if x), None) or alone.furthest.get(None)
    if refusal is not None:
        return refusal.error()
    have = " ".join(f"{link.level}={link.size}" for link in asked.spanned)
    fitting = [n for n in patterns.names() if patterns.instances(n, asked.spanned)]
    return UserError(
        "design-does-not-fit",
        f"{name} needs a mesh of {roles} dimension{'s' if roles > 1 else ''}, "
        f"and the group {have} has no such mesh",
        help="a dimension has at least 2 ranks; fitting designs: " + (", ".join(fitting) or "none"),
    )


def _distance(refusal: Refusal) -> int:
    return _FURTHEST.index(refusal.slug) if refusal.slug in _FURTHEST else len(_FURTHEST)


def _nothing(tried: _Tried, asked: Asked) -> UserError:
    """The error if no schedule is legal, or none of them has a module."""
    if tried.unemitted is not None and tried.emits is not None:
        return tried.emits(tried.unemitted.plan).error()
    if not tried.refused:
        return _refusal_of(asked.design or "", tried, asked)
    counts, best = tried.counts(), tried.furthest[None]
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
