"""What an interpreted module works on: tensors without elements.

A tensor is a view (shape, strides) of a storage. A storage knows how it was made, of which
storage it is a copy, and which of the plan's buffers it turned out to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from mercurygen.emit.python_bounds import MOST_PARTS, Complaint
from mercurygen.emit.python_expressions import External, Host

CONTIGUOUS = External("torch.contiguous_format")
MOST_DIMS = 16  # of a tensor; modules have 6


class Dtype(NamedTuple):
    """A dtype, as far as it matters here."""

    itemsize: int


class Storage:
    """A piece of memory.

    Attributes:
        shape: that it was made with.
        nbytes: its size.
        made: how: "input", "empty", "copy", "kernel", or filled with a number.
        source: what it is a copy of, and of which of its contents.
        contents: counts what was written to it.
        arriving: whether a transfer writes to it.
        buffer: number in the plan's trace, once known.
        picks: of a copy, the parts of its source that it was made from, where that is known.
        puts: what was copied into parts of it: from which storage, how many elements, and where.
    """

    def __init__(
        self, shape: Sequence[int], nbytes: int, made: Any, source: tuple[Storage, int] | None
    ) -> None:
        self.shape, self.nbytes, self.made, self.source = tuple(shape), nbytes, made, source
        self.contents, self.arriving = 0, False
        self.puts: list[tuple[Storage, int, Any]] = []
        self.picks: list[Tensor] = []
        self.buffer: int | None = None


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda x, y: x * y, initial=1))[::-1][
        -len(shape) :
    ]


def _sizes(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """A shape that is given as numbers, or as one tuple of them."""
    return shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape


class Tensor(Host):
    """A view of a storage.

    Attributes:
        base: the shape that it is seen as a cut of: the storage's own, or, of what lies dense at
            the storage's front, the shape that this was given.
        cuts: per dimension of the base the range that it views, while it is nothing but cut
            along them; else None.
        sure: whether the strides are known, not only likely, as those of the caller's inputs.
        part: of what `unbind` gave, which it is.
        turned: base and cuts of a view whose dimensions are those of its base in another order.
    """

    part: int | None = None
    turned: tuple[tuple[int, ...], tuple[tuple[int, int], ...]] | None = None

    visible = frozenset(
        "shape dtype ndim size numel contiguous clone to transpose permute movedim unsqueeze "
        "squeeze unflatten flatten chunk unbind copy_ new_empty new_zeros new_full "
        "__getitem__".split()
    )

    def __init__(
        self,
        storage: Storage,
        shape: Sequence[int],
        dtype: Dtype,
        strides: Sequence[int],
        sure: bool,
        cuts: tuple[tuple[int, int], ...] | None = None,
        base: Sequence[int] | None = None,
    ) -> None:
        if len(shape) > MOST_DIMS:
            raise Complaint(f"not understood: a tensor of {len(shape)} dimensions")
        self.storage, self.shape, self.dtype = storage, tuple(shape), dtype
        self.strides, self.sure, self.cuts = tuple(strides), sure, cuts
        self.base = storage.shape if base is None else tuple(base)

    @classmethod
    def new(
        cls, shape: Sequence[int], dtype: Dtype, made: Any, *, source: Any = None, sure: bool = True
    ) -> Tensor:
        """A tensor with a storage of its own."""
        least = 0 if made == "copy" else 1  # nothing of a tile may be read: an empty copy is made
        if any(type(size) is not int or size < least for size in shape):
            raise Complaint(f"a tensor of shape {tuple(shape)}")
        storage = Storage(shape, prod(shape) * dtype.itemsize, made, source)
        return cls(storage, shape, dtype, _dense(shape), sure, tuple((0, size) for size in shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is all of its storage."""
        return prod(self.shape) * self.dtype.itemsize == self.storage.nbytes

    @property
    def at_front(self) -> bool:
        """Whether it surely is a dense run from the first element of its storage on."""
        starts = self.cuts is not None and all(start == 0 for start, _ in self.cuts)
        return starts and self.is_dense and self.sure

    @property
    def is_run(self) -> bool:
        """Whether it is, for all that is known, such a run, or all of its storage in order."""
        return self.at_front or (self.whole and self.is_dense)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie one behind the other, for all that is known."""
        pairs = zip(self.shape, self.strides, _dense(self.shape), strict=True)
        return all(size == 1 or have == want for size, have, want in pairs)

    def size(self, dim: int) -> int:
        """Extent of a dimension."""
        return self.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def view(self, dims: Sequence[tuple[int, int]], sure: bool | None = None) -> Tensor:
        """Another view of its storage, with these sizes and strides."""
        sure = self.sure if sure is None else sure
        return Tensor(self.storage, [n for n, _ in dims], self.dtype, [s for _, s in dims], sure)

    def dims(self) -> list[tuple[int, int]]:
        """Sizes and strides."""
        return list(zip(self.shape, self.strides, strict=True))

    def contiguous(self) -> Tensor:
        """Itself if it surely is dense, else a copy."""
        if not self.is_dense:
            return copied([self], self.shape, self.dtype)
        return Tensor(
            self.storage, self.shape, self.dtype, self.strides, True, self.cuts, self.base
        )

    def clone(self, *, memory_format: object, dtype: Dtype | None = None) -> Tensor:
        """A dense copy, whatever it is."""
        if memory_format is not CONTIGUOUS:
            raise Complaint("not understood: a copy that may keep strides")
        return copied([self], self.shape, dtype or self.dtype)

    def to(self, dtype: Dtype, *, copy: bool = False, memory_format: object = None) -> Tensor:
        """Itself if it has the dtype already and no copy is wanted, else a copy."""
        if copy:
            return self.clone(memory_format=memory_format, dtype=dtype)
        return self if dtype == self.dtype else copied([self], self.shape, dtype)

    def permute(self, *order: int) -> Tensor:
        """The dimensions in another order; no copy."""
        if sorted(order) != list(range(self.ndim)):
            raise Complaint(f"permute{order} of {self.ndim} dimensions")
        view = self.view([self.dims()[i] for i in order])
        if seen := self.seen:
            view.turned = tuple(tuple(each[i] for i in order) for each in seen)
            if view.strides == _dense(view.turned[0]):  # in the order of the base again
                view.base, view.cuts = view.turned
        return view

    @property
    def seen(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]] | None:
        """Base and cuts, in the order of its own dimensions."""
        return self.turned if self.cuts is None else (self.base, self.cuts)

    def movedim(self, source: int, target: int) -> Tensor:
        """One dimension at another place; no copy."""
        order = list(range(self.ndim))
        order.insert(target % self.ndim, order.pop(source))
        return self.permute(*order)

    def transpose(self, first: int, second: int) -> Tensor:
        """Two dimensions exchanged; no copy."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self.permute(*order)

    def unsqueeze(self, dim: int) -> Tensor:
        """A new dimension of size 1; no copy."""
        dims = self.dims()
        dim = dim if dim >= 0 else dim + self.ndim + 1
        dims.insert(dim, (1, 1))
        view = self.view(dims)
        if seen := self.seen:
            base, cuts = ([*each] for each in seen)
            base.insert(dim, 1)
            cuts.insert(dim, (0, 1))
            view.turned = tuple(base), tuple(cuts)
            if view.turned[0] == view.storage.shape:  # in the order of the base again
                view.base, view.cuts = view.turned
        return view

    def squeeze(self, dim: int) -> Tensor:
        """Without a dimension of size 1; no copy."""
        if self.shape[dim] != 1:
            return self
        view = self.select(dim, 0)
        if (seen := self.seen) and seen[0][dim] == 1:
            view.turned = tuple((*each[:dim], *each[dim + 1 :]) for each in seen)
        return view

    def select(self, dim: int, index: int) -> Tensor:
        """One index of a dimension, which goes."""
        dims = self.dims()
        if dims.pop(dim)[0] <= index:
            raise Complaint(f"index {index} of {self.shape}")
        return self.view(dims)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """One dimension as several, of which one size may be -1; no copy."""
        size, stride = self.dims()[dim]
        known = prod(n for n in sizes if n != -1)
        sizes = [size // known if n == -1 else n for n in sizes]
        if prod(sizes) != size:
            raise Complaint(f"unflatten of {size} into {sizes}")
        inner = [(n, s * stride) for n, s in zip(sizes, _dense(sizes), strict=True)]
        dim %= self.ndim
        view = self.view([*self.dims()[:dim], *inner, *self.dims()[dim + 1 :]])
        return view.as_base() if self.is_run else view

    def as_base(self) -> Tensor:
        """Itself, as what cuts are seen from."""
        self.base, self.cuts = self.shape, tuple((0, size) for size in self.shape)
        return self

    def flatten(self, first: int = 0, last: int = -1) -> Tensor:
        """Several dimensions as one; a copy where strides do not allow a view."""
        first, last = first % self.ndim, last % self.ndim
        dims = self.dims()
        run = [each for each in dims[first : last + 1] if each[0] > 1] or [(1, 1)]
        size = prod(n for n, _ in run)
        if any(a[1] != b[0] * b[1] for a, b in zip(run, run[1:], strict=False)):
            shape = [*self.shape[:first], size, *self.shape[last + 1 :]]
            return copied([self], shape, self.dtype)
        view = self.view([*dims[:first], (size, run[-1][1]), *dims[last + 1 :]])
        return view.as_base() if self.is_run else view

    def chunk(self, count: int, dim: int) -> tuple[Tensor, ...]:
        """Equal parts along a dimension; no copy."""
        size, at = self.shape[dim], (slice(None),) * (dim % self.ndim)
        step = -(-size // count)
        if size > MOST_PARTS * step:
            raise Complaint(f"not understood: {count} chunks")
        return tuple(self[(*at, slice(i, i + step))] for i in range(0, size, step))

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """Every index of a dimension; no copy."""
        if self.shape[dim] > MOST_PARTS:
            raise Complaint(f"not understood: {self.shape[dim]} parts")
        views = tuple(self.select(dim, i) for i in range(self.shape[dim]))
        for i, view in enumerate(views):
            view.part = i
        return views

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        base, cuts = self.seen or ((), ())
        dims, cuts = self.dims(), list(cuts)
        for i, each in enumerate(index):
            if not isinstance(each, slice) or each.step not in (None, 1):
                raise Complaint(f"not understood: the index {each}")
            taken = range(self.shape[i])[each]
            dims[i] = (len(taken), dims[i][1])
            if cuts:
                cuts[i] = (cuts[i][0] + taken.start, cuts[i][0] + taken.stop)
        view = self.view(dims)
        if self.cuts is not None:
            view.cuts, view.base = tuple(cuts), self.base
        elif cuts:
            view.turned = base, tuple(cuts)
        return view

    def copy_(self, source: Tensor) -> None:
        """Elements of another tensor, into a part of a buffer."""
        if source.shape != self.shape or source.dtype != self.dtype:
            raise Complaint(f"copies {source.shape} into {self.shape}")
        if source.storage.arriving or self.storage.arriving:
            raise Complaint("copies what a transfer is still writing to")
        if self.cuts is not None and any(self.cuts == at for _, _, at in self.storage.puts):
            raise Complaint("copies into a part that has been written already")
        self.storage.contents += 1
        self.storage.puts.append((source.storage, self.numel(), self.cuts))

    def new_empty(self, *shape: Any, dtype: Dtype | None = None) -> Tensor:
        """A new buffer."""
        return Tensor.new(_sizes(shape), dtype or self.dtype, "empty")

    def new_zeros(self, *shape: Any, dtype: Dtype | None = None) -> Tensor:
        """A new buffer."""
        return Tensor.new(_sizes(shape), dtype or self.dtype, 0.0)

    def new_full(self, shape: Sequence[int], value: float, dtype: Dtype | None = None) -> Tensor:
        """A new buffer."""
        return Tensor.new(shape, dtype or self.dtype, float(value))


def copied(parts: Sequence[Tensor], shape: Sequence[int], dtype: Dtype) -> Tensor:
    """A new tensor with the elements of others, which nothing may be writing to."""
    storages = {part.storage for part in parts}
    if any(storage.arriving for storage in storages):
        raise Complaint("copies a buffer that a transfer is still writing to")
    one, *others = storages
    source = None if others else (one, one.contents)
    made = Tensor.new(shape, dtype, "copy", source=source)
    if all(part.cuts is not None for part in parts):
        made.storage.picks = list(parts)
    return made


def cat(parts: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """`torch.cat`."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    made = copied(parts, shape, parts[0].dtype)
    if out is None:
        return made
    if tuple(shape) != out.shape or made.dtype != out.dtype or out.storage.arriving:
        raise Complaint(f"joins {shape} into {out.shape}")
    storage = out.storage  # whose parts are copies of one and the same, or not known at all
    known = storage.source if storage.made == "copy" else made.storage.source
    storage.source, storage.made = (known if known == made.storage.source else None), "copy"
    return out


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.stack`."""
    shape = list(parts[0].shape)
    shape.insert(dim, len(parts))
    return copied(parts, shape, parts[0].dtype)


def empty_like(x: Tensor, *, memory_format: object = None) -> Tensor:
    """`torch.empty_like`: as dense as x, or dense whatever x is."""
    sure = memory_format is CONTIGUOUS or (x.sure and x.is_dense)
    return Tensor.new(x.shape, x.dtype, "empty", sure=sure)


EXTERNALS: dict[str, Any] = {
    "torch.cat": cat,
    "torch.stack": stack,
    "torch.empty_like": empty_like,
    "torch.contiguous_format": CONTIGUOUS,
    "torch.promote_types": max,
    "torch.float32": Dtype(4),
    "torch.inf": float("inf"),
}
