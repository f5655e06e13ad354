"""Buffers in flight: where they lie, what they hold, and whether a tensor touches one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mercurygen.virtual.report import Where

if TYPE_CHECKING:
    from torch import Tensor

PATTERN = 0xA5  # every byte of an integer that is on its way


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
