"""How emitted text names things: dimensions, sizes, counts."""

from __future__ import annotations

import builtins

from mercurygen.ir.mesh import Dim, Link
from mercurygen.ir.names import MODULE

_PLURALS = {"gpu": "GPUs", "half": "halves", "switch": "switches"}


def called(name: str) -> str:
    """What emitted functions call a tensor of the operator."""
    return "grad_out" if name == "do" else name


def plural(name: str) -> str:
    """A level's name, for several of it."""
    return _PLURALS.get(name, f"{name}s")


def arrangement(links: tuple[Link, ...]) -> str:
    """`2 nodes x 8 GPUs`."""
    sizes = [(link.size, link.level) for link in links if link.size > 1]
    if not sizes:
        return "1 GPU"
    return " x ".join(f"{size} {plural(level)}" for size, level in sizes)


def mib(nbytes: float) -> str:
    """A size in the unit that reads best, to three digits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            value = nbytes / size
            return (
                f"{value:.0f} {unit}"
                if value >= 100 or value == int(value)
                else f"{value:.3g} {unit}"
            )
    return f"{nbytes:.0f} B"


def times(count: int, noun: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def variable(dim: str, suffix: str = "group") -> str:
    """A dimension's name as a variable: itself, unless emitted functions use the name already."""
    plain = dim == dim.lower() and len(dim.rstrip("0123456789")) > 1
    taken = dim in _RESERVED or dim in dir(builtins)
    ours = dim.startswith(("of_", "at_", "i_", "rows_", "cols_")) or dim.endswith(
        ("_group", "_places")
    )
    return dim if plain and not taken and not ours else f"{dim}_{suffix}"


def letters(dims: tuple[Dim, ...]) -> dict[str, str]:
    """A short variable for an index along every dimension, each different."""
    names: dict[str, str] = {}
    taken = {"k", "v", "q", "x"}  # tensors of the functions where these are used
    for dim in dims:
        digits = dim.name[len(dim.name.rstrip("0123456789")) :]
        name = dim.name[0].lower() + digits
        if name in taken:
            name = f"i_{dim.name}"
        taken.add(name)
        names[dim.name] = name
    return names


_RESERVED = MODULE | frozenset(
    "attention scale out lse name tile slot keys values me owner rows cols causal mine size dtype "
    "band window steps hops ranks rank group self borders documents own first start stop".split()
)
