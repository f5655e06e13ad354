"""The named designs of `designs.txt`: patterns over roles, and their instances on a topology."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mercurygen.designs.meshes import meshes
from mercurygen.errors import InternalError, UserError, closest, shorten
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Link, Mesh
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import Along, Directive, Parallelize, Replicate, Shard, Shift

Stage = tuple[str, tuple[str, ...], str, str]  # (kind, tensors, axis, dimension and its options)
Core = tuple[frozenset[tuple[str, str]], tuple[Stage, ...]]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A design over roles.

    Attributes:
        name: what `--schedule` takes.
        roles: of the mesh dimensions, outermost first.
        directives: over the roles.
    """

    name: str
    roles: tuple[str, ...]
    directives: tuple[Directive, ...]

    def on(self, mesh: Mesh) -> tuple[Directive, ...]:
        """The directives on a mesh with as many dimensions as there are roles."""
        dim = dict(zip(self.roles, mesh.names, strict=True))
        return tuple(_renamed(directive, dim) for directive in self.directives)


@cache
def patterns() -> tuple[Pattern, ...]:
    """The designs, in the order of their text."""
    text = Path(__file__).with_name("designs.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    blocks = "\n".join(lines).strip().split("\n\n")
    return tuple(_pattern(block.strip().splitlines()) for block in blocks)


def names() -> tuple[str, ...]:
    """Names of the designs, in the order of their text."""
    return tuple(pattern.name for pattern in patterns())


def get(name: str) -> Pattern:
    """The design of this name.

    Raises:
        UserError: `unknown-design`.
    """
    for pattern in patterns():
        if pattern.name == name:
            return pattern
    raise UserError("unknown-design", f"no design {shorten(name)!r}", help=closest(name, names()))


def most_roles() -> int:
    """Roles of the design that has most."""
    return max(len(pattern.roles) for pattern in patterns())


def instances(
    name: str, levels: tuple[Link, ...]
) -> tuple[tuple[Mesh, tuple[Directive, ...]], ...]:
    """Every mesh with exactly as many dimensions as the design has roles, with the directives.

    Args:
        name: of a design.
        levels: as the group occupies them, outermost first.

    Returns:
        Nothing if the group cannot be cut into that many dimensions.

    Raises:
        UserError: `unknown-design`.
    """
    pattern = get(name)
    count = len(pattern.roles)
    found = (mesh for mesh in meshes(levels, count) if len(mesh.dims) == count)
    return tuple((mesh, pattern.on(mesh)) for mesh in found)


def name_of(mesh: Mesh, directives: tuple[Directive, ...]) -> str | None:
    """The design that a schedule is an instance of; order, pins and reshards do not matter."""
    for pattern in patterns():
        if len(pattern.roles) == len(mesh.dims) and _core(pattern.on(mesh)) == _core(directives):
            return pattern.name
    return None


def _pattern(lines: list[str]) -> Pattern:
    head, roles, *body = lines
    if not head.startswith("design ") or not roles.startswith("roles "):
        raise InternalError(f"designs.txt: {head!r}, {roles!r}")
    directives = tuple(parse_directive(Line("designs.txt", 0, line)) for line in body)
    names = tuple(role.strip() for role in roles.removeprefix("roles ").split(","))
    return Pattern(head.removeprefix("design ").strip(), names, directives)


def _renamed(directive: Directive, dim: dict[str, str]) -> Directive:
    match directive:
        case Parallelize(axis, dims):
            return Parallelize(axis, tuple(dim[role] for role in dims))
        case Shard(tensors, axis, dims):
            return Shard(tensors, axis, tuple(dim[role] for role in dims))
        case Shift(tensors, axis, along):
            return Shift(tensors, axis, tuple(Along(dim[a.dim], a.options) for a in along))
        case _:
            raise InternalError(f"designs.txt: `{directive}` cannot be in a design")


def _core(directives: tuple[Directive, ...]) -> Core:
    """What makes a design: who splits what, and the nest."""
    split: set[tuple[str, str]] = set()
    nest: list[Stage] = []
    for directive in directives:
        match directive:
            case Parallelize(axis, dims):
                split |= {(dim, axis) for dim in dims}
            case Shard(tensors, axis, dims):
                nest += [("shard", tensors, axis, dim) for dim in dims]
            case Replicate(tensors, dims):
                nest += [("replicate", tensors, "", dim) for dim in dims]
            case Shift(tensors, axis, along):
                nest += [("shift", tensors, axis, str(one)) for one in along]
    return frozenset(split), tuple(nest)
