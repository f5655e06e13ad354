"""What would change the choice: for one quantity after the other the first value that does.

Found by pricing again the schedules that came near, and settled by the whole search: it was run at
both values of every change, the last that keeps the choice and the first that does not, and at the
end of every range in which nothing changed. Ranges are looked at in octaves first: what changes and
changes back within one is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

from mercurygen import operators
from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost, together
from mercurygen.cost.rings import NoForm
from mercurygen.cost.simulate import Played, play, simulate
from mercurygen.errors import Refusal, UserError
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower_aligned
from mercurygen.lower.plan import Plan
from mercurygen.schedule.apply import Attempts, start
from mercurygen.schedule.directives import Directive, Reshard
from mercurygen.schedule.gradient import gradient as gradient_of
from mercurygen.schedule.schedule import Schedule
from mercurygen.search.candidate import Candidate, fastest
from mercurygen.search.collect import seldom_collected
from mercurygen.search.knobs import Case, Knob, knobs
from mercurygen.search.result import Result
from mercurygen.search.search import simulated
from mercurygen.search.space import Point, settle

Ask = Callable[[Case], Result]  # the whole search; raises UserError
Progress = Callable[[str, int, int], None]

CONTEND = 0.1  # behind the fastest of a search: what is looked at elsewhere
OCTAVE = 2.0


@dataclass(frozen=True, slots=True)
class Change:
    """Another choice, or none.

    Attributes:
        knob: the quantity.
        up: with more of it, or with less.
        kept: the last value with the choice as it is: the whole search says so.
        value: the first with another one, next to `kept` of those that are tried; None: `kept` is
            the end of the range, and nothing changes.
        result: of the whole search at `value`; None if nothing is legal there.
        error: why nothing is.
        old: what was chosen, at `value`; None if it is not legal there.
    """

    knob: Knob
    up: bool
    kept: float
    value: float | None = None
    result: Result | None = None
    error: UserError | None = None
    old: Candidate | None = None


def identity(schedule: Schedule) -> tuple:
    """What two schedules for different sizes or machines have in common if they are one."""
    below = schedule.backward.directives if schedule.backward is not None else ()
    lines = [d for d in (*schedule.directives, *below) if not isinstance(d, Reshard)]
    return schedule.mesh, tuple(map(str, lines))


def changes(result: Result, ask: Ask, progress: Progress | None = None) -> tuple[Change, ...]:
    """What would change a choice.

    Args:
        result: of a search.
        ask: the same search of another case.
        progress: called with what is done, how many are, of how many.
    """
    case = Case(result.problem, result.topology, result.memory_limit)
    looked, found = _Looked(result, ask), []
    given = knobs(case, result.group, result.best.cost.peak_memory)
    every = [(knob, up) for knob in given for up in (False, True)]
    with seldom_collected():
        for done, (knob, up) in enumerate(every):
            if progress is not None:
                progress("directions in which the choice may change", done, len(every))
            values = knob.values(case, result.group, up)
            if values:
                found.append(_first(looked, case, knob, up, values))
    return tuple(found)


def _first(looked: _Looked, case: Case, knob: Knob, up: bool, values: tuple) -> Change:
    """The first change in one direction; every round settles one value by the whole search."""
    low, high = -1, len(values)  # the choice is known to be kept at one, and to change at the other
    while high - low > 1:
        guess = _guess(looked, case, knob, values, low, high)
        place = guess - 1 if guess - 1 > low else guess
        if looked.kept(knob.on(case, values[place])):
            low = place
        else:
            high = place
    kept = values[low] if low >= 0 else knob.now
    if high == len(values):
        return Change(knob, up, kept)
    beyond = knob.on(case, values[high])
    there, error = looked.whole(beyond)
    old = looked.old(beyond, there) if there is not None else None
    return Change(knob, up, kept, values[high], there, error, old)


def _guess(
    looked: _Looked, case: Case, knob: Knob, values: tuple[float, ...], low: int, high: int
) -> int:
    """By the schedules that came near, the first value that changes the choice; `high` if none."""

    def alike(place: int) -> bool:
        return looked.near(knob.on(case, values[place]))

    before = low
    for place in _octaves(values, knob.now, low, high):
        if alike(place):
            before = place
            continue
        while place - before > 1:
            middle = (place + before) // 2
            before, place = (middle, place) if alike(middle) else (before, middle)
        return place
    return high


def _octaves(values: tuple[float, ...], now: float, low: int, high: int) -> Iterator[int]:
    """Places between two others that are at most an octave apart, or neighbours; then the last."""
    edge = values[low] if low >= 0 else now
    for place in range(low + 1, high):
        after = values[place + 1] if place + 1 < high else None
        if after is None or max(after, edge) > OCTAVE * min(after, edge):
            yield place
            edge = values[place]


class _Looked:
    """What is known so far: whole searches by case, and the schedules that came near in them."""

    def __init__(self, result: Result, ask: Ask) -> None:
        self.result, self.ask = result, ask
        self.choice = identity(result.best.schedule)
        self.contenders: dict[tuple, Candidate] = {}
        self._whole: dict[Case, tuple[Result | None, UserError | None]] = {}
        self._ways: dict[tuple, tuple[_Way, ...]] = {}
        self._networks: dict[tuple, Network] = {}
        self._priced: dict[tuple, Candidate | None] = {}
        self._begun: dict[tuple[str, Problem, Mesh], Attempts] = {}
        self._remember(result)

    def _remember(self, result: Result) -> None:
        most = (1 + CONTEND) * result.ranked[0].cost.time
        for candidate in result.ranked:
            if candidate.cost.time <= most or result.objective == "memory":
                self.contenders.setdefault(identity(candidate.schedule), candidate)

    def whole(self, case: Case) -> tuple[Result | None, UserError | None]:
        """The whole search of a case, or why nothing is legal."""
        if case not in self._whole:
            try:
                self._whole[case] = self.ask(case), None
            except UserError as error:
                self._whole[case] = None, error
            else:
                self._remember(self._whole[case][0])
        return self._whole[case]

    def kept(self, case: Case) -> bool:
        """Whether the whole search of a case makes the same choice."""
        found, _ = self.whole(case)
        return found is not None and identity(found.best.schedule) == self.choice

    def old(self, case: Case, result: Result) -> Candidate | None:
        """What was chosen, as it is priced in another case; None if it is not legal there."""

        def ours(every: Iterable[Candidate]) -> Candidate | None:
            return next((c for c in every if identity(c.schedule) == self.choice), None)

        known = ours(result.ranked)
        if known is None:  # too far behind to be simulated by the search
            priced = ours(self.priced(case))
            network = self._networks[case.problem, case.topology]
            known = simulated(priced, network) if priced is not None else None
        return known

    def near(self, case: Case) -> bool:
        """Whether the choice is the same among the schedules that came near in any search.

        For the robust objective it is guessed from the machine as planned.
        """
        try:
            priced = list(self.priced(case))
        except UserError:  # sizes that cannot be
            return False
        if not priced:
            return False
        least = min(priced, key=lambda c: c.key("memory"))
        best = least if self.result.objective == "memory" else fastest(priced)
        return identity(best.schedule) == self.choice

    def priced(self, case: Case) -> Iterator[Candidate]:
        """They, by the closed form, each scaled to what the simulation said where it was found."""
        where = case.problem, case.topology
        if where not in self._networks:
            self._networks[where] = Network(case.topology, self.result.group, self.result.tp)
        for key, known in self.contenders.items():
            if (where, key) not in self._priced:
                self._priced[where, key] = self._price(case.problem, known, self._networks[where])
            found = self._priced[where, key]
            if found is not None and found.cost.peak_memory <= case.limit:
                yield found

    def _price(self, problem: Problem, known: Candidate, network: Network) -> Candidate | None:
        schedule = replace(known.schedule, problem=problem)
        key = problem, identity(schedule)
        if key not in self._ways:
            self._ways[key] = self._lowered(schedule)
        ways = self._ways[key]
        if not ways:
            return None
        cost = reduce(together, (way.cost(network) for way in ways))
        total = cost.time * known.cost.time / known.closed.time
        scaled = replace(cost, times=replace(cost.times, total=total))
        plan, *below = (way.plan for way in ways)
        gradient = below[0] if below else None
        found = replace(known, schedule=schedule, plan=plan, gradient=gradient)
        return replace(found, closed=cost, simulated=scaled)

    def _lowered(self, schedule: Schedule) -> tuple[_Way, ...]:
        """The forward and the backward of a schedule; none if it is not legal."""
        forward = self._plan(schedule, schedule.directives)
        if forward is None or schedule.backward is None:
            return () if forward is None else (_Way(forward),)
        alone = gradient_of(schedule, forward.program)
        backward = self._plan(alone, alone.directives)
        return () if backward is None else (_Way(forward), _Way(backward))

    def _plan(self, schedule: Schedule, lines: tuple[Directive, ...]) -> Plan | None:
        local, mesh = schedule.local_problem, schedule.mesh
        key = schedule.operator, local, mesh
        if key not in self._begun:
            self._begun[key] = Attempts(start(operators.load(schedule.operator), local, mesh))
        plain = tuple(d for d in lines if not isinstance(d, Reshard))
        settled = settle(Point(self._begun[key], plain, None))
        if isinstance(settled, Refusal):
            return None
        plan = lower_aligned(settled[0])
        return None if isinstance(plan, Refusal) else plan


class _Way:
    """A plan, to be priced on several machines."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.played: Played | None = None

    def cost(self, network: Network) -> Cost:
        """In lock step; of what has no such form the ranks are played once."""
        if self.played is None:
            try:
                if not self.plan.tiles:
                    return closed.closed_form(self.plan, network)
            except NoForm:
                pass
            self.played = play(self.plan)
        return simulate(self.plan, network, played=self.played)
