"""Every operation of torch on a rank's thread: what it does to buffers in flight."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from mercurygen.virtual.memory import Flight, touches
from mercurygen.virtual.rank import Rank

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
        first = "backward" in func.__name__  # of which the gradient of out comes first
        shapes = [x.shape for x in args[first : first + 3]]
        _check_kernel(rank, func, shapes, any(each is True for each in args[3:]))
        if first and not args[5].is_contiguous():
            words = f"the lse that `{func}` is given has strides {list(args[5].stride())}"
            raise rank.fail("not-contiguous", f"{words}: CUDA's kernel takes it for dense")
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


def _check_kernel(rank: Rank, func: Any, shapes: list[Any], causal: bool) -> None:
    """Refuse shapes for which torch divides by zero, which ends the process, and unclear masks."""
    fit = len(shapes) == 3 and all(len(shape) == 4 and 0 not in shape for shape in shapes)
    if fit:
        q, k, v = shapes
        fit = q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[3] == k[3] and q[1] % k[1] == 0
    if not fit:
        words = ", ".join(str(list(shape)) for shape in shapes)
        raise rank.fail("misuse", f"`{func}` of q, k, v [B, heads, tokens, D]: {words}")
    if causal and q[2] != k[2]:
        raise rank.fail(
            "misuse",
            f"`{func}` is causal for {q[2]} queries and {k[2]} keys: CPUs and GPUs align the "
            "diagonal of what is not square differently",
        )


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
