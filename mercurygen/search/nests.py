"""Every way in which tensors can come to the ranks, and results go, along some dimensions.

The story of one dimension is a word; that of a tensor group is a sequence of them, outermost
first. `nests` makes the sequences that the rules allow, each once; `count` says how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, permutations, product
from math import factorial

from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Along, Directive, Shard, Shift

GATHER, RELAYED, DIRECT, BOTH = "gather", "relayed", "direct", "both"
LEAST_BOTH = 3  # ranks: on two, both ways around are one

Story = tuple[str, str]  # (dimension, how)
Sequence = tuple[Story, ...]  # outermost first


@dataclass(frozen=True, slots=True)
class Groups:
    """The tensors of an operator with a mask that move alike.

    Attributes:
        rows, columns: inputs that carry the axis of the mask's rows, and of its columns.
        results: outputs; they carry what `rows` do.
        row_axis, column_axis: those axes.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    results: tuple[str, ...]
    row_axis: str
    column_axis: str

    @classmethod
    def of(cls, program: Program) -> Groups:
        """Those of a program."""
        rows, columns = program.mask_axes
        return cls(
            tuple(t.name for t in program.inputs if t.carries(rows)),
            tuple(t.name for t in program.inputs if t.carries(columns)),
            tuple(t.name for t in program.outputs),
            rows,
            columns,
        )


@dataclass(frozen=True, slots=True)
class Nest:
    """How everything moves.

    Attributes:
        columns, rows: of the inputs.
        homes: of the results, per dimension of `rows`, in its order: "scatter" where the rows are
            gathered, "relayed" or "direct" where they are walked.
        rows_first: whether the walks of the rows are outside those of the columns.
    """

    columns: Sequence
    rows: Sequence
    homes: tuple[str, ...]
    rows_first: bool = False

    @property
    def kinds(self) -> Kinds:
        """What of it tile loops depend on."""
        return Kinds(_leads(self.columns), _walks(self.columns), _leads(self.rows))


@dataclass(frozen=True, slots=True)
class Kinds:
    """What tile loops depend on.

    Attributes:
        lead: whether columns are gathered outside every walk of them.
        walk: whether columns are walked.
        rows: whether rows are gathered outside every walk of them.
    """

    lead: bool
    walk: bool
    rows: bool


def _leads(stories: Sequence) -> bool:
    return bool(stories) and stories[0][1] == GATHER


def _walks(stories: Sequence) -> bool:
    return any(how != GATHER for _, how in stories)


def nests(
    columns: tuple[tuple[str, int], ...],
    rows: tuple[tuple[str, int], ...],
    trims: bool,
    large: bool = False,
) -> Iterator[Nest]:
    """Every nest.

    Args:
        columns: (dimension, its size) along which the columns have to come to the ranks.
        rows: the same for the rows, whose results have to go.
        trims: whether the mask leaves parts of tiles: what was trimmed cannot be gathered.
        large: whether there are too many ranks for more than this: nothing is direct, or goes both
            ways.
    """
    if large:
        yield from (nest for nest in nests(columns, rows, trims) if _relayed(nest))
        return
    for inner in _sequences(columns, trims):
        for outer, homes in _with_homes(rows, trims):
            if trims and _walks(inner) and any(how == DIRECT for _, how in outer):
                continue
            yield Nest(inner, outer, homes)
            if _walks(inner) and _walks(outer):
                yield Nest(inner, outer, homes, rows_first=True)


def _relayed(nest: Nest) -> bool:
    """Whether all that moves is gathered, or goes around step by step."""
    hows = {how for _, how in (*nest.columns, *nest.rows)} | set(nest.homes)
    return not hows & {DIRECT, BOTH}


def _sequences(dims: tuple[tuple[str, int], ...], trims: bool) -> Iterator[Sequence]:
    """Every order of the dimensions with every story; no gather of what is trimmed."""
    for order in permutations(dims):
        for hows in product(*(_hows(size) for _, size in order)):
            if trims and DIRECT in hows and GATHER in hows[hows.index(DIRECT) :]:
                continue
            yield tuple((dim, how) for (dim, _), how in zip(order, hows, strict=True))


def _hows(size: int) -> tuple[str, ...]:
    return (GATHER, RELAYED, DIRECT) + (BOTH,) * (size >= LEAST_BOTH)


ROWS = (
    (GATHER, "scatter"),
    (RELAYED, RELAYED),
    (RELAYED, DIRECT),
    (DIRECT, RELAYED),
    (DIRECT, DIRECT),
)


def _with_homes(
    dims: tuple[tuple[str, int], ...], trims: bool
) -> Iterator[tuple[Sequence, tuple[str, ...]]]:
    """Gathered and their results scattered, or walked and theirs going home.

    Results that go home from trimmed rows stand alone: nothing else is walked, or gathered after.
    """
    for order in permutations(name for name, _ in dims):
        for stories in product(ROWS, repeat=len(order)):
            hows = [how for how, _ in stories]
            others = [how for how in hows if how in (RELAYED, DIRECT)]
            if trims and DIRECT in hows and (len(others) > 1 or hows[-1] != DIRECT):
                continue
            yield tuple(zip(order, hows, strict=True)), tuple(home for _, home in stories)


def count(columns: tuple[int, ...], rows: tuple[int, ...], trims: bool) -> dict[Kinds, int]:
    """How many nests of each kind there are, on dimensions of these sizes, by a formula."""
    large = sum(size >= LEAST_BOTH for size in columns)
    small = len(columns) - large
    gathered = factorial(len(columns))
    led = small * _orders(small - 1, large, trims) if small else 0
    led += large * _orders(small, large - 1, trims) if large else 0
    ways = {(bool(columns), False): gathered}
    if columns:
        ways[True, True] = led - gathered
        ways[False, True] = _orders(small, large, trims) - led
    found: Counter[Kinds] = Counter()
    for (lead, walk), many in ways.items():
        for (first, walked), more in _rows(len(rows), trims, walk).items():
            found[Kinds(lead, walk, first)] += many * more * (2 if walk and walked else 1)
    return dict(found)


def _rows(dims: int, trims: bool, beside: bool) -> dict[tuple[bool, bool], int]:
    """Stories of the rows, by whether they begin with a gather, and whether they walk.

    Args:
        dims: of them.
        trims: as of `nests`.
        beside: whether columns are walked.
    """
    if not dims:
        return {(False, False): 1}
    orders, walks = factorial(dims), 2 if trims else 4  # relayed; and direct
    led, others = (walks + 1) ** (dims - 1) - 1, walks * (walks + 1) ** (dims - 1)
    found = {(True, False): orders, (True, True): orders * led, (False, True): orders * others}
    if trims and not beside:  # one that is direct, the innermost
        found[dims > 1, True] += 2 * orders
    return found


@lru_cache(maxsize=1024)
def _orders(small: int, large: int, trims: bool, trimmed: bool = False) -> int:
    """Sequences of some dimensions of two ranks and some larger ones."""
    if not small and not large:
        return 1
    total = 0
    for many, one, hows in ((small, (1, 0), 2), (large, (0, 1), 3)):
        if many:
            rest = small - one[0], large - one[1]
            undirected = hows - 1 + (not (trims and trimmed))  # relayed, both, gather
            total += many * undirected * _orders(*rest, trims, trimmed)
            total += many * _orders(*rest, trims, True)
    return total


def directives(nest: Nest, groups: Groups, names: tuple[str, ...]) -> tuple[Directive, ...]:
    """The lines of a nest: gathers, walks, then results. Adjacent ones of a kind share a line.

    Args:
        nest: the nest.
        groups: whose tensors move.
        names: of the mesh's dimensions, in order.
    """
    columns = _lines(groups.columns, groups.column_axis, nest.columns)
    rows = _lines(groups.rows, groups.row_axis, nest.rows)
    if nest.rows_first:
        lead = int(_leads(nest.columns))  # one line; it is done once, outside the rows' walks
        columns = (*columns[:lead], *rows, *columns[lead:])
    else:
        columns = (*columns, *rows)
    return (*columns, *_results(nest, groups, names))


def _lines(tensors: tuple[str, ...], axis: str, stories: Sequence) -> tuple[Directive, ...]:
    found: list[Directive] = []
    for gathers, each in groupby(stories, key=lambda story: story[1] == GATHER):
        if gathers:
            found.append(Shard(tensors, axis, tuple(dim for dim, _ in each)))
        else:
            along = (Along(dim, () if how == RELAYED else (how,)) for dim, how in each)
            found.append(Shift(tensors, axis, tuple(along)))
    return tuple(found)


def _results(nest: Nest, groups: Groups, names: tuple[str, ...]) -> tuple[Directive, ...]:
    """Those that go home, then those that are scattered.

    The latter in mesh order: they are reduced innermost first whatever order is written.
    """
    told = [(dim, home) for (dim, _), home in zip(nest.rows, nest.homes, strict=True)]
    homes = tuple((dim, home) for dim, home in told if home != "scatter")
    found = _lines(groups.results, groups.row_axis, homes)
    scattered = {dim for dim, home in told if home == "scatter"}
    if scattered:
        over = tuple(name for name in names if name in scattered)
        found += (Shard(groups.results, groups.row_axis, over),)
    return found
