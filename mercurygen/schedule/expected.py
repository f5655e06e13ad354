"""The line `expect` of a schedule: what its module checks when it runs.

`expect hosts=2 node=24GB/s gpu=213.3GB/s`: the ranks lie on two machines, in order, as many on
each; along `node` a rank sends 24 GB/s while all others do, and so on for every mesh dimension.
Without `hosts=` it is not known how many machines there are, and the module does not look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mercurygen.errors import UserError
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Mesh

EXPECT = "expect"  # the line, below the header
_HOSTS = re.compile(r"\s*hosts=(\d{1,7})(?= |$)", re.ASCII)
_SPEED = re.compile(r"\s*([A-Za-z_]\w*)=(\d{1,6}(?:\.\d{1,6})?)GB/s(?= |$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the ranks should find.

    Attributes:
        hosts: machines that hold the ranks, in order, as many on each; None: not known.
        speeds: per mesh dimension, in its order, bytes/s that a rank sends along it while all do.
    """

    hosts: int | None
    speeds: tuple[tuple[str, float], ...]


def show_expected(expected: Expected) -> str:
    """The line; speeds to a MB/s."""
    hosts = [] if expected.hosts is None else [f"hosts={expected.hosts}"]
    speeds = [f"{dim}={gigabytes(speed)}GB/s" for dim, speed in expected.speeds]
    return " ".join([EXPECT, *hosts, *speeds])


def rounded(speed: float) -> float:
    """A speed as the line has it."""
    return float(gigabytes(speed)) * 1e9


def gigabytes(speed: float) -> str:
    """GB/s to a MB/s, as a plain decimal number."""
    text = f"{speed / 1e9:.3f}".rstrip("0").rstrip(".")
    return text if float(text) else "0.001"


def parse_expected(line: Line, mesh: Mesh) -> Expected:
    """Read the line.

    Raises:
        UserError: `expected-otherwise`, with the place.
    """
    line.word(EXPECT)
    hosts = None
    if found := _HOSTS.match(line.text, line.place):
        hosts, line.place = int(found[1]), found.end()
        if hosts < 1 or mesh.size % hosts:
            legal = [str(n) for n in range(1, mesh.size + 1) if mesh.size % n == 0]
            raise UserError(
                "expected-otherwise",
                f"{mesh.size} ranks do not lie evenly on hosts={hosts}",
                span=line.span(found.start()),
                help="legal: " + ", ".join(legal),
            )
    speeds: list[tuple[str, float]] = []
    while not line.done():
        found = _SPEED.match(line.text, line.place)
        if not found:
            raise line.error("syntax", "expected the speed of a mesh dimension, as in gpu=213GB/s")
        speeds.append((found[1], float(found[2]) * 1e9))
        line.place = found.end()
    if [dim for dim, _ in speeds] != list(mesh.names) or not all(x for _, x in speeds):
        raise UserError(
            "expected-otherwise",
            f"`{line.text.strip()}` is not of this mesh",
            span=line.span(),
            help=_wanted(mesh),
        )
    if not speeds:
        raise line.error("expected-otherwise", "one rank expects nothing", _wanted(mesh))
    return Expected(hosts, tuple(speeds))


def _wanted(mesh: Mesh) -> str:
    """The speeds that a mesh has."""
    if not mesh.dims:
        return "leave the line out"
    speeds = " ".join(f"{name}=…GB/s" for name in mesh.names)
    return f"a speed above 0 for every mesh dimension, in its order: {speeds}"
