"""The named designs of `designs.txt`: patterns over roles, and their instances on a topology."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from mercurygen.designs.meshes import meshes
from mercurygen.errors import InternalError, UserError, closest, shorten
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Link, Mesh
from mercurygen.schedule.backward_text import BACKWARD
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import (
    Along,
    Directive,
    OrderTokens,
    Parallelize,
    Replicate,
    Shard,
    Shift,
    Tile,
)

ANY_PARTS = " by *"  # of a tile line: the number of parts is searched

Stage = tuple[str, str, str]  # (kind, axis, dimension and its options)
Stories = frozenset[tuple[tuple[str, ...], tuple[Stage, ...]]]  # per tensors that move together
Core = tuple[frozenset[tuple[str, str]], Stories, str | None]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A design over roles.

    Attributes:
        name: what `--schedule` takes.
        roles: of the mesh dimensions, outermost first.
        directives: over the roles.
        tile: an axis that is looped over, in any number of parts, or None.
        order: the token order that is part of the design, or None.
        backward: over the roles, what moves for the gradients.
    """

    name: str
    roles: tuple[str, ...]
    directives: tuple[Directive, ...]
    tile: str | None = None
    order: str | None = None
    backward: tuple[Directive, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes whose iterations are split."""
        return tuple(d.axis for d in self.directives if isinstance(d, Parallelize))

    def on(self, mesh: Mesh) -> tuple[Directive, ...]:
        """The directives on a mesh with as many dimensions as there are roles.

        Not those of `tile` and `order`, which say no dimensions.
        """
        dim = dict(zip(self.roles, mesh.names, strict=True))
        return tuple(_renamed(directive, dim) for directive in self.directives)

    def backward_on(self, mesh: Mesh) -> tuple[Directive, ...]:
        """What moves for the gradients on a mesh with as many dimensions as there are roles."""
        dim = dict(zip(self.roles, mesh.names, strict=True))
        return tuple(_renamed(directive, dim) for directive in self.backward)


@cache
def patterns() -> tuple[Pattern, ...]:
    """The designs, in the order of their text."""
    text = Path(__file__).with_name("designs.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    blocks = "\n".join(lines).strip().split("\n\n")
    return tuple(_pattern(block.strip().splitlines()) for block in blocks)


def names(passes: str = "fwd") -> tuple[str, ...]:
    """Names of the designs, in the order of their text.

    Args:
        passes: "train": also of those that only their backward tells from another.
    """
    every = tuple(pattern.name for pattern in patterns())
    return every if passes == "train" else tuple(x for x in every if alike(x)[0] == x)


def alike(name: str) -> tuple[str, ...]:
    """Names of the designs that have this one's forward, in the order of their text."""

    def forward(pattern: Pattern) -> tuple:
        return pattern.roles, pattern.directives, pattern.tile, pattern.order

    own = forward(get(name))
    return tuple(pattern.name for pattern in patterns() if forward(pattern) == own)


def get(name: str) -> Pattern:
    """The design of this name.

    Raises:
        UserError: `unknown-design`.
    """
    for pattern in patterns():
        if pattern.name == name:
            return pattern
    help = closest(name, names("train"))
    raise UserError("unknown-design", f"no design {shorten(name)!r}", help=help)


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
    """The design that a schedule is an instance of; pins and reshards do not matter.

    Nor does the token order, unless a design has one of its own: then that is the name.
    """
    kind = next((d.kind for d in directives if isinstance(d, OrderTokens)), None)
    alike = _by_core(mesh).get(_core(directives), ())
    fitting = [pattern for pattern in alike if pattern.order in (None, kind)]
    named = sorted(fitting, key=lambda pattern: pattern.order is None)  # stable
    return named[0].name if named else None


@lru_cache(maxsize=256)
def _by_core(mesh: Mesh) -> dict[Core, tuple[Pattern, ...]]:
    """The designs with as many roles as a mesh has dimensions, by what makes them."""
    found: dict[Core, tuple[Pattern, ...]] = {}
    for pattern in patterns():
        if len(pattern.roles) == len(mesh.dims):
            split, stories, _ = _core(pattern.on(mesh))
            core = split, stories, pattern.tile
            found[core] = (*found.get(core, ()), pattern)
    return found


def _pattern(lines: list[str]) -> Pattern:
    head, roles, *body = lines
    at = body.index(BACKWARD)
    body, below = body[:at], body[at + 1 :]
    if not head.startswith("design ") or not roles.startswith("roles "):
        raise InternalError(f"designs.txt: {head!r}, {roles!r}")
    loops = [line for line in body if line.endswith(ANY_PARTS)]
    directives = _directives([line for line in body if line not in loops])
    orders = [d.kind for d in directives if isinstance(d, OrderTokens)]
    return Pattern(
        head.removeprefix("design ").strip(),
        tuple(role.strip() for role in roles.removeprefix("roles ").split(",")),
        tuple(d for d in directives if not isinstance(d, OrderTokens)),
        loops[0].removeprefix("tile ").removesuffix(ANY_PARTS) if loops else None,
        orders[0] if orders else None,
        _directives(below),
    )


def _directives(lines: list[str]) -> tuple[Directive, ...]:
    return tuple(parse_directive(Line("designs.txt", 0, line)) for line in lines)


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
    """What makes a design: who splits what, how everything moves, and the axis of a tile loop."""
    split: set[tuple[str, str]] = set()
    moves: dict[tuple[str, ...], list[Stage]] = {}
    tile = None
    for directive in directives:
        match directive:
            case Parallelize(axis, dims):
                split |= {(dim, axis) for dim in dims}
            case Shard(tensors, axis, dims):
                moves.setdefault(tensors, []).extend(("shard", axis, dim) for dim in dims)
            case Replicate(tensors, dims):
                moves.setdefault(tensors, []).extend(("replicate", "", dim) for dim in dims)
            case Shift(tensors, axis, along):
                stages = (("shift", axis, str(one)) for one in along)
                moves.setdefault(tensors, []).extend(stages)
            case Tile(axis):
                tile = axis if tile is None else f"{tile}, {axis}"
    stories = frozenset((tensors, tuple(stages)) for tensors, stages in moves.items())
    return frozenset(split), stories, tile
