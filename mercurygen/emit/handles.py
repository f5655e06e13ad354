"""What an interpreted module communicates with: the mesh, its groups, and handles of transfers."""

from __future__ import annotations

from collections.abc import Callable

from mercurygen.emit.python_expressions import External, Host
from mercurygen.emit.values import Tensor
from mercurygen.ir.mesh import Mesh


class Group(Host):
    """The ranks along a dimension."""

    visible = frozenset({"size", "rank"})

    def __init__(self, dim: str, size: int, rank: int) -> None:
        self.dim, self.size, self.rank = dim, lambda: size, lambda: rank


class DeviceMesh(Host):
    """The device mesh, as one rank sees it."""

    visible = frozenset({"get_group"})

    def __init__(self, mesh: Mesh, rank: int) -> None:
        place = mesh.coordinate(rank)
        self.groups = {dim.name: Group(dim.name, dim.size, place[dim.name]) for dim in mesh.dims}

    def get_group(self, name: str) -> Group:
        """The communicator along a dimension."""
        return self.groups[name]


class Work(Host):
    """A handle: of one operation of a batch, or of a collective."""

    visible = frozenset({"wait"})

    def __init__(self, wait: Callable[[Work], None]) -> None:
        self.wait = lambda: wait(self)


class Operation(Host):
    """A `P2POp`."""

    def __init__(self, op: External, tensor: Tensor, *, group: Group, group_peer: int) -> None:
        self.path, self.tensor, self.group, self.peer = op.path, tensor, group, group_peer
