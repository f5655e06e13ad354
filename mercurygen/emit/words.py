"""How emitted text names things: dimensions, sizes, counts."""

from __future__ import annotations

from mercurygen.ir.mesh import Dim, Link

_PLURALS = {"gpu": "GPUs", "half": "halves", "switch": "switches"}


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
            return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.3g} {unit}"
    return f"{nbytes:.0f} B"


def times(count: int, noun: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def letters(dims: tuple[Dim, ...]) -> dict[str, str]:
    """A short variable for an index along every dimension, each different."""
    names: dict[str, str] = {}
    for dim in dims:
        name = dim.name[0].lower()
        taken = {*names.values(), "k", "v", "q", "x"}
        if name in taken:
            name = dim.name.lower() if dim.name.lower() not in taken else f"i_{dim.name}"
        names[dim.name] = f"{name}_" if name in _RESERVED else name
    return names


_RESERVED = {"as", "if", "in", "is", "or", "dist", "torch", "out", "lse", "scale", "tiles"}
