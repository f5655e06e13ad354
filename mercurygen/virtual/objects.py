"""What a module holds of torch.distributed: groups, meshes, handles, point-to-point operations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mercurygen.virtual.memory import Flight
from mercurygen.virtual.network import Communicator, Op
from mercurygen.virtual.rank import Rank
from mercurygen.virtual.stage import Stop

if TYPE_CHECKING:
    from torch import Tensor


def missing(rank: Rank, owner: str, real: type, name: str) -> BaseException:
    """What to raise for an attribute that a stand-in has not."""
    if not name.startswith("__") and hasattr(real, name):
        return rank.fail("not-doubled", f"`{owner}.{name}` has no stand-in on virtual ranks")
    return AttributeError(f"{owner} has no attribute {name!r}")


class ProcessGroup:
    """A group as one of its ranks sees it."""

    def __init__(self, rank: Rank, comm: Communicator) -> None:
        self._rank, self.comm = rank, comm
        self.bound_device_id = None
        self.group_name = self.group_desc = comm.key

    def rank(self) -> int:
        """This rank's index in the group; -1 if it is no member."""
        ranks = self.comm.ranks
        return ranks.index(self._rank.number) if self._rank.number in ranks else -1

    def size(self) -> int:
        """Number of ranks."""
        return len(self.comm.ranks)

    def name(self) -> str:
        """Of the backend, as torch calls this."""
        return "gloo"

    def __getattr__(self, name: str) -> Any:
        from torch.distributed import ProcessGroup as real

        raise missing(self._rank, "ProcessGroup", real, name)


class Work:
    """A handle: of an operation, or of one message of a batch.

    Args:
        rank: whose.
        op: the operation.
        parts: the buffers that are free once this was waited for, with what makes the received.
        left: how many handles of the operation nobody has waited for, shared by them.
    """

    def __init__(
        self,
        rank: Rank,
        op: Op,
        parts: Sequence[tuple[Flight, Callable[[], Tensor | None]]],
        left: list[int],
    ) -> None:
        self._rank, self._op, self._parts, self._left = rank, op, list(parts), left
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        """Until the operation is over; its buffers may then be read and written."""
        rank, op = self._rank, self._op
        if rank.stage.unwinding(rank.number):
            return True
        rank.tick()
        closing = sys.exc_info()[1] is not None
        try:
            rank.network.wait(op)
        except Stop:
            if closing:  # a `finally`: what it was called for goes on
                return True
            raise
        if not self._waited:
            self._waited = True
            with rank.silence():
                for flight, data in self._parts:
                    rank.land(flight, data())
            self._left[0] -= 1
            if not self._left[0]:
                rank.waited(op)
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over; lets the others go on before it looks."""
        self._rank.tick()
        self._rank.stage.let_others(self._rank.number)
        return self._op.done

    def __getattr__(self, name: str) -> Any:
        from torch.distributed import Work as real

        raise missing(self._rank, "Work", real, name)


class P2POp:
    """A message of a batch; what it is given is checked when the batch starts."""

    def __init__(
        self,
        op: Callable,
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        self.op, self.tensor, self.peer, self.group = op, tensor, peer, group
        self.tag, self.group_peer = tag, group_peer


class DeviceMesh:
    """A mesh as one of its ranks sees it, on groups that exist."""

    def __init__(
        self,
        groups: Sequence[ProcessGroup],
        device_type: str,
        mesh: Tensor,
        mesh_dim_names: tuple[str, ...] | None,
    ) -> None:
        self._groups, self.device_type, self.mesh = list(groups), device_type, mesh
        self.mesh_dim_names = mesh_dim_names
        self._number = groups[0]._rank.number

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | list[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """A mesh of groups, one for each dimension.

        Raises:
            ValueError: they do not fit the tensor of ranks.
        """
        import torch

        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        if mesh is None and len(groups) == 1:
            mesh = list(groups[0].comm.ranks)
        ranks = torch.as_tensor(mesh, dtype=torch.int).detach().cpu()
        if ranks.ndim != len(groups):
            raise ValueError(f"{len(groups)} groups for a mesh of {ranks.ndim} dimensions")
        return cls(groups, device_type, ranks, mesh_dim_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks, of all or along a dimension."""
        return self.mesh.numel() if mesh_dim is None else self.mesh.shape[mesh_dim]

    def get_coordinate(self) -> list[int] | None:
        """This rank's place; None if it has none."""
        found = (self.mesh == self._number).nonzero()
        return found[0].tolist() if len(found) else None

    def get_rank(self) -> int:
        """This rank's global number."""
        return self._number

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The group along a dimension."""
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError("a mesh of several dimensions: say which")
            mesh_dim = 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self.mesh_dim_names or ()):
                raise KeyError(f"no dimension {mesh_dim!r}, the mesh has {self.mesh_dim_names}")
            mesh_dim = self.mesh_dim_names.index(mesh_dim)
        return self._groups[mesh_dim]

    def get_all_groups(self) -> list[ProcessGroup]:
        """The groups of all dimensions."""
        return list(self._groups)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's index along a dimension."""
        return self.get_group(mesh_dim).rank()

    def __getattr__(self, name: str) -> Any:
        from torch.distributed import DeviceMesh as real

        groups = self.__dict__.get("_groups")
        if not groups:
            raise AttributeError(name)
        raise missing(groups[0]._rank, "DeviceMesh", real, name)

    def __repr__(self) -> str:
        names = self.mesh_dim_names or range(self.ndim)
        sizes = ", ".join(f"{n}={s}" for n, s in zip(names, self.shape, strict=True))
        return f"DeviceMesh({sizes})"
