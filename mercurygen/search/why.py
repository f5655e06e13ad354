"""Why a schedule was chosen, in one or two sentences made from the numbers alone."""

from __future__ import annotations

from mercurygen.cost.report import Cost
from mercurygen.cost.topology import Level
from mercurygen.lower.plan import Plan
from mercurygen.schedule.directives import Directive, Parallelize, Shard, Shift, Tile
from mercurygen.search.candidate import RESOLUTION, Candidate
from mercurygen.search.result import Result
from mercurygen.search.robust import Robustness

PARTS = {
    "compute": "computing on the busiest rank",
    "exposed": "waiting for transfers and other ranks",
    "copies": "copies and merges",
    "launch": "kernel launches",
}


def why(result: Result, *, brief: bool = False) -> str:
    """What tells the best schedule from the runner-up, and from the other named designs.

    Args:
        result: of a search.
        brief: leave out the other named designs.
    """
    if result.robustness is not None:
        return _robust(result, result.robustness)
    best, rest = result.best, result.others
    least = "needs the least memory" if result.objective == "memory" else "is the fastest"
    if best is not result.ranked[0]:
        least = f"is the simplest within {RESOLUTION:.0%} of the fastest"
    told = f"{figures(best, result.objective)} by the model"
    named = best.design and all(c.design == best.design for c in result.ranked)
    what = f"legal forms of {best.design}" if named else "legal schedules"
    if not rest:
        form = "form of the design" if named else "schedule"
        return f"{label(best)} is the only legal {form} here: {told}."
    slower = [c for c in rest if not _ties(result, best, c)]
    ties = len(rest) - len(slower)
    beside = f" ({_many(ties, 'other')} as good)" if ties else ""
    sentences = [f"{label(best)} {least} of {result.counts.legal} {what}{beside}: {told}."]
    if slower:
        sentences.append(f"The runner-up, {_against(result, best, slower[0])}.")
    others = [n.best for n in result.named if n.best and n.best in slower]
    others = sorted(
        (c for c in others if c is not slower[0]), key=lambda c: c.key(result.objective)
    )
    if others and not brief:
        told = list(dict.fromkeys((others[0].design, others[-1].design)))
        chosen = [next(c for c in others if c.design == design) for design in told]
        words = "; ".join(_against(result, best, c) for c in chosen)
        sentences.append(f"Of the other named designs, {words}.")
    if result.unemitted:
        other = f"{label(result.unemitted)}: {figures(result.unemitted, result.objective)}"
        sentences.append(f"The model prefers one that no module is emitted for yet, {other}.")
    return " ".join(sentences)


def _robust(result: Result, found: Robustness) -> str:
    """What the most robust schedule loses, and the fastest one as planned."""
    best, fastest = found.best, found.row(result.fastest)
    least = "the least of" if best is found.rows[0] else "within 1% of the least of"
    words = (
        f"{label(best.candidate)} loses at most {best.worst:.1%} to the best schedule of each of "
        f"{len(found.scenarios)} scenarios ({found.worst_of(best).name}), {least} "
        f"{len(found.rows)} that were simulated in all: {figures(best.candidate, 'time')} by the "
        "model as planned."
    )
    if fastest is None or fastest is best:
        return f"{words} It is the choice for time too."
    lost = f"loses up to {fastest.worst:.1%} ({found.worst_of(fastest).name})"
    time = ms(fastest.candidate.cost.time)
    return f"{words} The choice for time, {label(fastest.candidate)}, takes {time} and {lost}."


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _ties(result: Result, best: Candidate, other: Candidate) -> bool:
    """Whether the objective does not tell two candidates apart."""
    return other.key(result.objective)[0] == best.key(result.objective)[0]


def label(candidate: Candidate) -> str:
    """A schedule in a few words: its design, or what its mesh dimensions do."""
    mesh = " ".join(f"{dim.name}={dim.size}" for dim in candidate.schedule.mesh.dims)
    name = candidate.design or f"({what(candidate)})"
    order = candidate.plan.program.order.kind
    return f"{name} on {mesh} ({order})" if mesh else name


def what(candidate: Candidate) -> str:
    """What the mesh dimensions do: `S_q over node; H over gpu; walk node`.

    Of queries and results it says so: `walk q node; home node direct`.
    """
    words = _what(candidate.plan, candidate.schedule.directives)
    if candidate.gradient is not None:
        below = _what(candidate.gradient, candidate.schedule.backward.directives)
        words.append(f"backward {'; '.join(below) or 'alike'}")
    return "; ".join(words) or "one rank"


def _what(plan: Plan, directives: tuple[Directive, ...]) -> list[str]:
    program, words = plan.program, []
    for directive in directives:
        match directive:
            case Parallelize(axis, dims):
                words.append(f"{axis} over {', '.join(dims)}")
            case Shard(tensors, _, dims):
                home = program.tensor(tensors[0]).role == "output"
                way = "scatter" if home else "gather" + _queries(tensors)
                words.append(f"{way} {', '.join(dims)}")
            case Shift(tensors, _, along):
                home = program.tensor(tensors[0]).role == "output"
                dims = ", ".join(map(str, along))
                words.append(f"{'home' if home else 'walk' + _queries(tensors)} {dims}")
            case Tile():
                words.append(str(directive))
    return words


def _queries(tensors: tuple[str, ...]) -> str:
    """The name of the queries where they move; keys and values go without saying."""
    return f" {tensors[0]}" if tensors[0] == "q" else ""


def figures(candidate: Candidate, objective: str) -> str:
    """Time and memory, what the objective asks for first."""
    cost = candidate.cost
    time, memory = ms(cost.time), gib(cost.peak_memory)
    return f"{memory}, {time}" if objective == "memory" else f"{time}, {memory}"


def _against(result: Result, best: Candidate, other: Candidate) -> str:
    """By how much the other is behind, and where the difference is."""
    a, b = best.cost, other.cost
    if result.objective == "memory" and a.peak_memory != b.peak_memory:
        more = gib(b.peak_memory - a.peak_memory)
        return f"{label(other)}, needs {more} more, and takes {ms(b.time)}"
    slower = b.time - a.time
    if round(slower, 12) == 0:
        return f"{label(other)}, takes as long, with {gib(b.peak_memory)}"
    words = f"{label(other)}, takes {abs(slower) / a.time:.1%} {'more' if slower > 0 else 'less'}"
    return f"{words}: {', '.join([*_parts(a, b, slower), *_bytes(result, a, b)])}"


def _parts(a: Cost, b: Cost, slower: float) -> list[str]:
    """The parts that move the total in its direction, by at least a tenth of the difference."""
    moved = {part: getattr(b.times, part) - getattr(a.times, part) for part in PARTS}
    told = [part for part in moved if moved[part] / slower >= 0.1]
    told.sort(key=lambda part: -abs(moved[part]))
    words = []
    for part in told:
        detail = ""
        theirs, ours = f"{b.imbalance:.3g}", f"{a.imbalance:.3g}"
        if part == "compute" and theirs != ours:
            detail = f" (its busiest rank has {theirs} times the mean work, not {ours})"
        change = "more" if moved[part] > 0 else "less"
        words.append(f"{ms(abs(moved[part]))} {change} {PARTS[part]}{detail}")
    return words


def _bytes(result: Result, a: Cost, b: Cost) -> list[str]:
    """What the two send over the slowest link, if it differs."""
    slowest = _slowest(result)
    if slowest is None:
        return []
    ours, theirs = (next(x for x in cost.links if x.name == slowest.name) for cost in (a, b))
    if ours.port == theirs.port:
        return []
    where = f"the busiest {slowest.link} port"
    return [f"{mib(theirs.port)} instead of {mib(ours.port)} through {where}"]


def _slowest(result: Result) -> Level | None:
    """The level with the least bandwidth per GPU, of those that the group spans."""
    spanned = [x for x, n in zip(result.topology.levels, result.group, strict=True) if n > 1]

    def rate(level: Level) -> float:
        port = level.port_bandwidth / level.port_gpus
        return min(level.bandwidth, port) * level.efficiency

    return min(spanned, key=rate, default=None)


def ms(seconds: float) -> str:
    """Milliseconds, or seconds, with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def gib(nbytes: float) -> str:
    """Gibibytes with three digits, or mebibytes."""
    return f"{nbytes / 2**30:.3g} GiB" if nbytes >= 2**30 else mib(nbytes)


def mib(nbytes: float) -> str:
    """Mebibytes with four digits."""
    return f"{nbytes / 2**20:.4g} MiB"
