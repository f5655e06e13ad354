"""What every rank computes at every step of the nest, without a trace for each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from mercurygen.cost.kernels import NOTHING, Kernels, Spent, added
from mercurygen.ir.layout import Order
from mercurygen.ir.mesh import Mesh
from mercurygen.lower.events import Trace
from mercurygen.lower.plan import Plan
from mercurygen.lower.sizes import scratch_bytes
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import Block, visible


@dataclass(frozen=True, slots=True)
class Live:
    """What the mask leaves of every tile, for every rank.

    Attributes:
        kinds: the different sets of blocks.
        table: per place along the dimensions that split the rows (row-major), and per place of
            the tile's owner along the walks (row-major in mesh order), an index of `kinds`.
    """

    kinds: tuple[tuple[Block, ...], ...]
    table: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def live(
    mask: str, order: Order, mesh: Mesh, rows: tuple[str, ...], walks: tuple[str, ...]
) -> Live:
    """The blocks of every rank and tile; many schedules share them.

    Args:
        mask: "full" or "causal".
        order: of the tokens.
        mesh: the mesh.
        rows: dimensions that split the rows, in mesh order.
        walks: dimensions that are walked, in mesh order.
    """
    kinds: dict[tuple[Block, ...], int] = {}
    owners = [order.owned(mesh, held) for held in _places(mesh, walks)]
    table = []
    for held in _places(mesh, rows):
        mine = order.owned(mesh, held)
        tiles = [visible(mask, mine, theirs) for theirs in owners]
        table.append(tuple(kinds.setdefault(blocks, len(kinds)) for blocks in tiles))
    return Live(tuple(kinds), tuple(table))


def _places(mesh: Mesh, dims: tuple[str, ...]) -> list[dict[str, tuple[int, ...]]]:
    spans = (range(mesh.extent(dim)) for dim in dims)
    return [dict(zip(dims, ((i,) for i in place), strict=True)) for place in product(*spans)]


@dataclass(frozen=True, slots=True)
class Work:
    """The nest's kernels, step by step.

    Attributes:
        longest: per step, seconds of the rank that takes longest.
        scratch: per step, most bytes that a kernel needs beside what it leaves behind.
        busiest: what the rank that is busy longest spends in all.
        imbalance: most compute of a rank over the mean of all ranks.
    """

    longest: tuple[float, ...]
    scratch: tuple[int, ...]
    busiest: Spent
    imbalance: float


def work(plan: Plan, kernels: Kernels) -> Work:
    """The kernels of all ranks; the first tile of a nest that begins with it is not merged."""
    program = plan.program
    walks = program.mesh.in_order(plan.nest.walks)
    found = live(program.mask, program.order, program.mesh, plan.row_dims, walks)
    spent, scratch = _of_kinds(plan, kernels, found.kinds, True)
    spent_first, scratch_first = spent, scratch
    if plan.nest.begin != "empty":
        spent_first, scratch_first = _of_kinds(plan, kernels, found.kinds, False)
    longest, most, sums = [], [], [NOTHING] * len(found.table)
    for step, owners in enumerate(_owners(plan, walks)):
        seconds, nbytes = (spent, scratch) if step else (spent_first, scratch_first)
        slowest = room = 0
        for place, owner in enumerate(owners):
            kind = found.table[place][owner]
            sums[place] = added(sums[place], seconds[kind])
            slowest, room = max(slowest, sum(seconds[kind])), max(room, nbytes[kind])
        longest.append(slowest)
        most.append(room)
    compute = [one[0] for one in sums]
    busiest = max(sums, key=lambda one: (sum(one), one))
    return Work(tuple(longest), tuple(most), busiest, max(compute) * len(compute) / sum(compute))


def _of_kinds(plan: Plan, kernels: Kernels, kinds: tuple, merge: bool) -> tuple[list, list]:
    """Seconds, and most scratch bytes, of every set of blocks."""
    spent, scratch = [], []
    for blocks in kinds:
        whole = merge or len(blocks) == 1  # others are never the first, unmerged tile
        spent.append(kernels.blocks(blocks, merge) if whole else NOTHING)
        needs = (scratch_bytes(plan, block, merge) for block in blocks)
        scratch.append(max(needs, default=0))
    return spent, scratch


def _owners(plan: Plan, walks: tuple[str, ...]) -> list[list[int]]:
    """Per step, for every place of the rows, which tile is there: that of (mine - t) mod size."""
    mesh, rows = plan.program.mesh, plan.row_dims
    stride = {d: prod(mesh.extent(x) for x in walks[i + 1 :]) for i, d in enumerate(walks)}
    places = list(product(*(range(mesh.extent(dim)) for dim in rows)))
    columns = {dim: [place[rows.index(dim)] for place in places] for dim in walks}
    steps = []
    for times in product(*(range(mesh.extent(dim)) for dim in plan.nest.walks)):
        owners = [0] * len(places)
        for dim, t in zip(plan.nest.walks, times, strict=True):
            size, step = mesh.extent(dim), stride[dim]
            owners = [o + (i - t) % size * step for o, i in zip(owners, columns[dim], strict=True)]
        steps.append(owners)
    return steps


def outline(plan: Plan) -> Trace:
    """What all ranks have in common: the trace with one kernel for each tile, mask or not.

    Buffers and transfers do not depend on the mask once the plan is made; blocks do.
    """
    return trace(replace(plan, program=replace(plan.program, mask="full")), 0)
