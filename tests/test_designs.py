"""The named designs: what each is, on which meshes, and that a schedule is recognised."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from mercurygen.designs import patterns
from mercurygen.designs.meshes import meshes
from mercurygen.errors import UserError
from mercurygen.ir.mesh import Dim, Link, Mesh, cover
from mercurygen.schedule.directives import OrderTokens, Parallelize, Patch, Shard, Shift, Tile

DESIGNS = (
    *("ring", "direct-ring", "striped-ring", "allgather-kv", "allgather-kv-pipelined"),
    *("ulysses", "ulysses-chunked", "tokenring", "split-kv", "unified", "double-ring"),
    *("double-tokenring", "unified-double-ring"),
)


def levels(**sizes: int) -> tuple[Link, ...]:
    """Levels of these names and sizes, outermost first."""
    return tuple(Link(name, size, "link", 1e9) for name, size in sizes.items())


def named(mesh: Mesh) -> str:
    """A mesh as a schedule writes it."""
    return " ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)


def test_names() -> None:
    """The designs of the table, each once."""
    assert patterns.names() == DESIGNS
    assert patterns.most_roles() == 3


def test_meshes_of_two_levels() -> None:
    """Merged, whole and split levels, fewer dimensions first."""
    found = [named(mesh) for mesh in meshes(levels(node=2, gpu=8), 3)]
    assert found == [
        "all=16",
        "node=2 gpu=8",
        "node=2 gpu0=2 gpu1=4",
        "node=2 gpu0=4 gpu1=2",
    ]


def test_meshes_of_three_levels() -> None:
    """Adjacent whole levels merge; all of them are called `all`."""
    found = {named(mesh) for mesh in meshes(levels(rack=2, node=3, gpu=2), 3)}
    assert found == {"all=12", "rack_node=6 gpu=2", "rack=2 node_gpu=6", "rack=2 node=3 gpu=2"}


def test_levels_of_one_vanish() -> None:
    """A group inside one node has no node dimension."""
    found = [named(mesh) for mesh in meshes(levels(node=1, gpu=8), 1)]
    assert found == ["gpu=8"]
    assert meshes(levels(node=1, gpu=1), 3) == (Mesh(()),)


def test_names_do_not_clash() -> None:
    """A part is not called like another level, and no name is too long for a schedule."""
    for mesh in meshes(levels(gpu0=2, gpu=4), 3):
        assert len(set(mesh.names)) == len(mesh.names)
        assert not any(dim.name == "gpu0" and dim.size == 4 for dim in mesh.dims)
    long = "a_level_of_this_name"
    for mesh in meshes((*levels(**{long: 2}), *levels(node=2, gpu=4)), 3):
        assert all(len(name) <= 20 for name in mesh.names)


@pytest.mark.parametrize("sizes", [(8,), (2, 8), (4, 8), (2, 3, 4), (1, 6), (12,), (2, 2, 2)])
def test_meshes_are_all_that_cover(sizes: tuple[int, ...]) -> None:
    """Just the sequences of sizes that `cover` accepts, found here by trying all of them."""
    links = levels(**{f"level{i}": size for i, size in enumerate(sizes)})
    total, accepted = prod(sizes), set()
    divisors = [n for n in range(2, total + 1) if total % n == 0]
    for count in range(4):
        for dims in product(divisors, repeat=count):
            if prod(dims) != total:
                continue
            try:
                cover(Mesh(tuple(Dim(f"d{i}", n) for i, n in enumerate(dims))), links)
            except UserError:
                continue
            accepted.add(dims)
    found = [tuple(dim.size for dim in mesh.dims) for mesh in meshes(links, 3)]
    assert set(found) == accepted
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("sizes", [{"gpu": 8}, {"node": 2, "gpu": 8}, {"node": 4, "gpu": 8}])
def test_instances(name: str, sizes: dict[str, int]) -> None:
    """As many dimensions as roles, all of them, and recognised whatever stands around them."""
    links = levels(**sizes)
    pattern = patterns.get(name)
    roles = len(pattern.roles)
    found = patterns.instances(name, links)
    assert [mesh for mesh, _ in found] == [m for m in meshes(links, 3) if len(m.dims) == roles]
    for mesh, directives in found:
        frame = OrderTokens("S", pattern.order or "zigzag", mesh.names)
        loop = (Tile(pattern.tile, 4),) if pattern.tile else ()
        body = (frame, *directives, *loop)
        assert patterns.name_of(mesh, (*body, Patch("body", "aten"))) == name
        assert patterns.name_of(mesh, tuple(reversed(body))) == name


def test_what_they_say() -> None:
    """On two levels: a ring over all ranks, heads inside, rings of rings outside in."""
    links = levels(node=2, gpu=8)

    def text(name: str, index: int = 0) -> list[str]:
        mesh, directives = patterns.instances(name, links)[index]
        return [named(mesh), *map(str, directives)]

    assert text("ring") == ["all=16", "parallelize S_q over all", "shift k, v: S_kv along all"]
    assert text("allgather-kv")[2] == "shard k, v: S_kv over all"
    assert text("direct-ring")[2] == "shift k, v: S_kv along all direct"
    assert text("tokenring")[1:] == [
        "parallelize S_kv over all",
        "shift q: S_q along all",
        "shift out, lse: S_q along all direct",
    ]
    assert text("split-kv")[2:] == ["shard q: S_q over all", "shard out, lse: S_q over all"]
    assert text("ulysses") == ["all=16", "parallelize H over all"]
    assert text("unified") == [
        "node=2 gpu=8",
        "parallelize S_q over node",
        "parallelize H over gpu",
        "shift k, v: S_kv along node",
    ]
    assert text("double-ring")[2] == "shift k, v: S_kv along node, gpu"
    assert text("unified-double-ring", 1) == [
        "node=2 gpu0=4 gpu1=2",
        "parallelize S_q over node, gpu0",
        "parallelize H over gpu1",
        "shift k, v: S_kv along node, gpu0",
    ]


def test_other_schedules_have_no_name() -> None:
    """The inner ring outside, or a gather in place of a ring, is another schedule."""
    mesh, (split, shift) = patterns.instances("double-ring", levels(node=2, gpu=8))[0]
    swapped = Shift(shift.tensors, shift.axis, tuple(reversed(shift.along)))
    assert patterns.name_of(mesh, (split, swapped)) is None
    assert patterns.name_of(mesh, (split, Shard(shift.tensors, shift.axis, mesh.names))) is None
    assert patterns.name_of(mesh, (Parallelize("H", mesh.names),)) is None


def test_order_and_loop_are_part_of_a_design() -> None:
    """A ring in stripes is the striped ring; a loop over anything else is no design."""
    mesh, body = patterns.instances("ring", levels(gpu=8))[0]
    for kind, name in (("striped", "striped-ring"), ("zigzag", "ring"), ("contiguous", "ring")):
        assert patterns.name_of(mesh, (OrderTokens("S", kind, mesh.names), *body)) == name
    mesh, body = patterns.instances("allgather-kv", levels(gpu=8))[0]
    assert patterns.name_of(mesh, body) == "allgather-kv"
    for parts in (2, 4, 8):
        assert patterns.name_of(mesh, (*body, Tile("H", parts))) == "allgather-kv-pipelined"
    assert patterns.name_of(mesh, (*body, Tile("G", 2))) is None
    assert patterns.name_of(mesh, (*body, Tile("H", 2), Tile("G", 2))) is None


def test_no_instance() -> None:
    """A prime number of ranks cannot be cut in two."""
    assert patterns.instances("double-ring", levels(gpu=7)) == ()
    assert patterns.instances("ring", levels(gpu=1)) == ()


def test_unknown() -> None:
    """The nearest design is named."""
    with pytest.raises(UserError) as caught:
        patterns.get("double_ring")
    assert caught.value.slug == "unknown-design"
    assert "`double-ring`" in caught.value.help
