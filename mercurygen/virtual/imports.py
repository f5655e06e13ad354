"""How a module gets the stand-in: by an import function of its own; nobody else sees it."""

from __future__ import annotations

import builtins
from types import ModuleType, SimpleNamespace
from typing import Any

from mercurygen.virtual.double import Double
from mercurygen.virtual.objects import DeviceMesh, P2POp, ProcessGroup, Work
from mercurygen.virtual.rank import Rank

NAME = "torch.distributed"
# Of the real one: types and constants that touch no process group.
REAL = ("ReduceOp", "Backend", "tensor", "DistError", "DistBackendError", "DistNetworkError")
SAME = (f"{NAME}.device_mesh", f"{NAME}.distributed_c10d")  # they hold names of NAME too


def namespace(rank: Rank, double: Double, name: str) -> dict[str, Any]:
    """An empty module of this name, whose imports find the stand-in as torch.distributed."""
    standin, proxy = _standin(rank, double), _torch()
    proxy.distributed = standin
    original = builtins.__import__

    def importing(name: str, globals=None, locals=None, fromlist=(), level: int = 0) -> Any:
        """What `import` calls."""
        found = original(name, globals, locals, fromlist, level)
        if level or name.partition(".")[0] != "torch":
            return found
        if not fromlist or name == "torch":
            if name.startswith(f"{NAME}."):
                _known(rank, name)
            return proxy
        if name == NAME or name in SAME:
            return standin
        if name.startswith(f"{NAME}."):
            _known(rank, name)
        return found

    return {"__name__": name, "__builtins__": {**vars(builtins), "__import__": importing}}


def _known(rank: Rank, name: str) -> None:
    """Only placements are used as they are."""
    if name not in SAME and not f"{name}.".startswith(f"{NAME}.tensor."):
        raise rank.fail("not-doubled", f"`{name}` has no stand-in on virtual ranks")


def _torch() -> ModuleType:
    """A module with all that torch has."""
    import torch

    proxy = ModuleType("torch")
    vars(proxy).update(vars(torch))
    return proxy


class _Standin(ModuleType):
    """torch.distributed; a name that only the real one has is an error with its line."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(NAME)
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        import torch.distributed as real

        if name.startswith("__") or not hasattr(real, name):
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        rank = self._rank
        raise rank.fail("not-doubled", f"`{NAME}.{name}` has no stand-in on virtual ranks")


def _standin(rank: Rank, double: Double) -> ModuleType:
    import torch.distributed as real
    import torch.distributed.tensor  # noqa: F401 - an attribute of the real one, once imported
    from torch.distributed import distributed_c10d

    module = _Standin(rank)
    for name in dir(double):
        # a name that this torch has not is not there either
        if not name.startswith("_") and hasattr(real, name):
            setattr(module, name, getattr(double, name))
    for name in REAL:
        setattr(module, name, getattr(real, name))
    for each in (ProcessGroup, DeviceMesh, P2POp, Work):
        setattr(module, each.__name__, each)
    world = SimpleNamespace(WORLD=double.everyone)
    module.group = module.GroupMember = world
    module.device_mesh = module.distributed_c10d = module
    module._world = double
    module._hash_ranks_to_str = distributed_c10d._hash_ranks_to_str
    return module
