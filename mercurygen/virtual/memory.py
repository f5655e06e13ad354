"""Buffers in flight: poisoned, fingerprinted, and watched at every operation of torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mercurygen.virtual.report import Where

if TYPE_CHECKING:
    from torch import Tensor

    from mercurygen.virtual.rank import Rank

PATTERN = 0xA5  # every byte of an integer that is on its way
# Read nothing of the tensor that they are given: only its shape, dtype and device.
SHAPES_ONLY = {
    f"aten::{name}"
    for name in (
        *("empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("zeros_like", "ones_like", "full_like", "_unsafe_view"),
    )
}
# Write a tensor in place without adding to what it holds.
OVERWRITE = {f"aten::{name}" for name in ("copy_", "fill_", "zero_", "set_", "resize_")}
KERNELS = "_scaled_dot_product"  # their names begin so; some divide by the number of rows
OVERWRITE |= {"aten::masked_fill_", "aten::index_copy_", "aten::index_put_"}


@dataclass(slots=True, eq=False)
class Flight:
    """A buffer of a transfer, from its start to the wait.

    Attributes:
        way: what happens to it.
        start: address of its first byte.
        stop: address after its last.
        tensor: it, or an alias: keeps the memory.
        copy: what it held when the transfer began; of a receive, the poison.
        name: for people.
        where: the transfer was called.
    """

    way: Literal["receive", "send"]
    start: int
    stop: int
    tensor: Tensor
    copy: Tensor
    name: str
    where: Where


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte, and after its last; equal if it has no elements."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


def dense(tensor: Tensor) -> bool:
    """Whether the elements lie together, in some order of the dimensions."""
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in pairs if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: a view [bytes]."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def poison(tensor: Tensor) -> None:
    """NaN, or of integers a pattern that is none of anybody's."""
    raw(tensor).fill_(0xFF if tensor.is_floating_point() else PATTERN)


def touches(tensor: Tensor, flight: Flight) -> bool:
    """Whether a tensor has a byte of a buffer: exact, also of strided views."""
    start, stop = extent(tensor)
    if stop <= flight.start or flight.stop <= start or start == stop:
        return False
    if tensor.is_contiguous():
        return True
    import torch

    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    first = start + places * tensor.element_size()
    return bool(((first < flight.stop) & (first + tensor.element_size() > flight.start)).any())


@functools.cache
def _facts(func: Any) -> tuple[bool, tuple[bool, ...], dict[str, bool], bool]:
    """Of an operator: reads nothing; which arguments, and which by name, it writes; adds to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False, (), {}, False
    writes = [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments]
    names = {a.name: write for a, write in zip(schema.arguments, writes, strict=True)}
    silent = getattr(func, "is_view", False) or schema.name in SHAPES_ONLY
    adds = any(writes) and schema.name.endswith("_") and schema.name not in OVERWRITE
    return bool(silent), tuple(writes), names, adds


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "data_ptr"):
        yield value


def inspect(rank: Rank, func: Any, args: tuple, kwargs: dict) -> None:
    """Report an operation that touches what is in flight, or accumulates in 16 bits."""
    silent, writes, names, adds = _facts(func)
    if silent:
        return
    if func.__name__.startswith(KERNELS):
        _check_kernel(rank, func, [x.shape for x in args[:3]])
    given = [(value, i < len(writes) and writes[i]) for i, value in enumerate(args)]
    given += [(value, names.get(name, False)) for name, value in kwargs.items()]
    for value, writing in given:
        for tensor in _tensors(value):
            if writing and adds and rank.low and tensor.element_size() == 2:
                raise rank.fail(
                    "precision",
                    f"`{func}` adds to a tensor of {tensor.dtype}: partial results are float32 at "
                    "least",
                )
            for flight in rank.flights:
                if (writing or flight.way == "receive") and touches(tensor, flight):
                    raise _touched(rank, func, flight, writing)


def _check_kernel(rank: Rank, func: Any, shapes: list[Any]) -> None:
    """Refuse shapes for which some versions of torch divide by zero, which ends the process."""
    fit = len(shapes) == 3 and all(len(shape) == 4 and 0 not in shape for shape in shapes)
    if fit:
        q, k, v = shapes
        fit = q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[3] == k[3] and q[1] % k[1] == 0
    if not fit:
        words = ", ".join(str(list(shape)) for shape in shapes)
        raise rank.fail("misuse", f"`{func}` of q, k, v [B, heads, tokens, D]: {words}")


def _touched(rank: Rank, func: Any, flight: Flight, writing: bool) -> BaseException:
    verb, check = ("writes", "in-flight-write") if writing else ("reads", "in-flight-read")
    way = "being received" if flight.way == "receive" else "being sent"
    return rank.fail(
        check,
        f"`{func}` {verb} the buffer `{flight.name}` which is {way} (since {flight.where}) and "
        "was not waited for",
    )


@functools.cache
def _watch_class() -> type:
    """The mode, as a class: torch is imported only when something runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        """Every operation of a rank's thread passes here."""

        def __init__(self, rank: Rank) -> None:
            super().__init__()
            self.rank = rank

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            rank = self.rank
            if not rank.quiet:
                rank.tick()
                if rank.flights or rank.low or func.__name__.startswith(KERNELS):
                    inspect(rank, func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Watch


def watch(rank: Rank) -> Any:
    """A context in which a rank's operations are watched."""
    return _watch_class()(rank)
