"""What the mask leaves of every pair of tiles of its rows and its columns.

Which tiles there are depends on the token order, on the dimensions that tell them apart and on the
tile loops; schedules that agree in these share the pairs (`Program.shared`).
"""

from __future__ import annotations

from itertools import product

from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.program import Program
from mercurygen.lower.visible import Block, visible

Atoms = tuple[int, ...]


class Cuts:
    """The blocks of every pair of tiles.

    Attributes:
        rows, columns: atoms of every tile, by the coordinates row-major, then parts of tile loops.
        kinds: the different blocks that a pair has.
        of: of every pair an index of `kinds`: the rows' tile is major.
        firsts: pairs of tiles of the same ranks: their results are begun with these.
    """

    def __init__(self, program: Program, rows: tuple[str, ...], columns: tuple[str, ...]) -> None:
        """
        Args:
            program: the program.
            rows: dimensions that tell tiles of the rows apart.
            columns: and of the columns.

        Raises:
            NotCuttable: the kernel cannot do what the mask leaves of some pair.
        """
        both = tuple(dim for dim in rows if dim in columns)
        row_axis, column_axis = program.mask_axes
        heres, self.rows = _tiles(program, row_axis, rows, both)
        theres, self.columns = _tiles(program, column_axis, columns, both)
        domain, kernel = atoms_of(program).domain, program.kernel
        numbers: dict[tuple[Block, ...], int] = {}
        self.of = [
            numbers.setdefault(visible(domain, kernel, mine, theirs), len(numbers))
            for mine in self.rows
            for theirs in self.columns
        ]
        self.kinds = list(numbers)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, there in enumerate(theres):
            alike.setdefault(there, []).append(number)
        width = len(self.columns)
        self.firsts = [i * width + j for i, here in enumerate(heres) for j in alike[here]]


def _tiles(
    program: Program, axis: str, dims: tuple[str, ...], both: tuple[str, ...]
) -> tuple[list[tuple[int, ...]], list[Atoms]]:
    """Coordinates along some dimensions of every tile of an axis, and its atoms."""
    atoms, places, found = atoms_of(program), [], []
    parts = atoms.parts(axis)
    for held in product(*(range(program.mesh.extent(dim)) for dim in dims)):
        place = dict(zip(dims, held, strict=True))
        owned = atoms.owned(program.order, axis, {dim: (i,) for dim, i in place.items()})
        size = len(owned) // parts
        found += [owned[i * size : (i + 1) * size] for i in range(parts)]
        places += [tuple([place[dim] for dim in both])] * parts
    return places, found


def cuts_of(program: Program, rows: tuple[str, ...], columns: tuple[str, ...]) -> Cuts:
    """The pairs of tiles that are told apart by these dimensions.

    Raises:
        NotCuttable: the kernel cannot do what the mask leaves of some pair.
    """
    atoms = atoms_of(program)
    parts = tuple(atoms.parts(axis) for axis in program.mask_axes)
    key = "cuts", program.kernel, program.order, atoms.domain, parts, rows, columns
    found = program.shared.get(key)
    if found is None:
        found = program.shared[key] = Cuts(program, rows, columns)
    return found
