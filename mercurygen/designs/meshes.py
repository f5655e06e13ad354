"""All meshes on the levels of a group, named and in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as numbers

from mercurygen.errors import UserError
from mercurygen.ir.mesh import Dim, Link, Mesh, check_name

Piece = tuple[tuple[int, ...], int, int]  # (indices of levels, size, which part of its level or -1)


def meshes(levels: tuple[Link, ...], most: int) -> tuple[Mesh, ...]:
    """Every mesh of at most `most` dimensions, those with fewer dimensions first.

    Args:
        levels: as the group occupies them, outermost first; those of size 1 vanish.
        most: dimensions.

    Returns:
        Each dimension is a part of one level (`gpu0`), a whole level (`gpu`), several whole
        adjacent ones (`rack_node`) or all of them (`all`).
    """
    active = tuple(i for i, level in enumerate(levels) if level.size > 1)
    found = [_mesh(pieces, levels, active) for pieces in _cut(levels, active, most)]
    return tuple(sorted(found, key=lambda mesh: [len(mesh.dims), *(d.size for d in mesh.dims)]))


def _cut(levels: tuple[Link, ...], active: tuple[int, ...], most: int) -> Iterator[list[Piece]]:
    """Every way to cover the active levels with at most `most` pieces."""
    if not active:
        yield []
        return
    first, size = active[0], levels[active[0]].size
    for parts in _factors(size, most):
        whole = len(parts) == 1
        here = [((first,), part, -1 if whole else i) for i, part in enumerate(parts)]
        for rest in _cut(levels, active[1:], most - len(parts)):
            yield [*here, *rest]
    for count in range(2, len(active) + 1 if most else 2):
        size *= levels[active[count - 1]].size
        for rest in _cut(levels, active[count:], most - 1):
            yield [(active[:count], size, -1), *rest]


def _factors(size: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factors greater than 1 with this product, at most `most` of them."""
    if most < 1:
        return
    yield (size,)
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            for rest in _factors(size // first, most - 1):
                yield (first, *rest)


def _mesh(pieces: list[Piece], levels: tuple[Link, ...], active: tuple[int, ...]) -> Mesh:
    dims: list[Dim] = []
    for place, (covered, size, part) in enumerate(pieces):
        names = [levels[i].level for i in covered]
        if len(covered) > 1 and covered == active:
            name = "all"
        else:
            name = "_".join(names) + (str(part) if part >= 0 else "")
        used = {dim.name for dim in dims}
        taken = used | {x.level for x in levels if x.level not in names}
        if not _fits(name) or name in taken:
            name = _other(place, used | {x.level for x in levels})
        dims.append(Dim(name, size))
    return Mesh(tuple(dims))


def _other(place: int, taken: set[str]) -> str:
    """A name by the dimension's place, or the first after it that is free."""
    return next(name for i in numbers(place) if (name := f"dim{i}") not in taken)


def _fits(name: str) -> bool:
    """Whether a schedule takes the name; joined ones can be too long."""
    try:
        check_name(name, "mesh dimension")
    except UserError:
        return False
    return True
