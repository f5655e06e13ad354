"""Which tile loops are worth a try: those that some transfer is pipelined by."""

from __future__ import annotations

from math import prod

from mercurygen.cost.decide import LARGE
from mercurygen.ir.program import Program
from mercurygen.schedule.directives import Directive, Join, Tile
from mercurygen.search.nests import Groups, Kinds

PARTS = (2, 4, 8)  # of a loop
HEADS, QUERIES = "H", "G"  # key/value heads, and queries of one: what a loop can run over


def loops(
    program: Program, groups: Groups, split: dict[str, str], kinds: Kinds
) -> tuple[tuple[Directive, ...], ...]:
    """The lines of every tile loop, and none at all.

    A loop of n parts runs over the key/value heads that a rank has, over the queries of each, or,
    where it has fewer than n key/value heads and more than one, over both joined. Part i + 1 of
    what carries the axis is gathered, or resharded, under the body of part i; so some of these
    must be there. What comes by must carry the axis, or it would come by for every part.

    Args:
        program: on a mesh.
        groups: its tensors.
        split: per dimension the axis whose iterations it splits.
        kinds: of the nest.
    """
    if program.mesh.size > LARGE or not {HEADS, QUERIES} <= set(program.extents):
        return ((),)
    have = {axis: _local(program, split, axis) for axis in (HEADS, QUERIES)}
    resharded = _resharded(program, groups.rows, split)
    both = kinds.lead or kinds.rows or resharded or _resharded(program, groups.columns, split)
    queries = (kinds.rows or resharded) and not kinds.walk
    found: list[tuple[Directive, ...]] = [()]
    for parts in PARTS:
        rest, more = divmod(parts, have[HEADS])
        if both and have[HEADS] % parts == 0:
            found.append((Tile(HEADS, parts),))
        if queries and have[QUERIES] % parts == 0:
            found.append((Tile(QUERIES, parts),))
        joined = 1 < have[HEADS] < parts and not more and have[QUERIES] % rest == 0
        if both and not kinds.walk and joined:
            found.append((Join((HEADS, QUERIES)), Tile(f"{HEADS}_{QUERIES}", parts)))
    return tuple(found)


def _local(program: Program, split: dict[str, str], axis: str) -> int:
    """What a rank has of an axis."""
    dims = (dim for dim, each in split.items() if each == axis)
    return program.extent(axis) // prod(program.mesh.extent(dim) for dim in dims)


def _resharded(program: Program, tensors: tuple[str, ...], split: dict[str, str]) -> bool:
    """Whether tensors that are pinned by their sequence are stored split along another axis."""
    tensor = program.tensor(tensors[0])
    return any(axis not in program.mask_axes and tensor.carries(axis) for axis in split.values())
