"""What may compute blocks and merge them in the plan interpreter, in the operator's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mercurygen.check.tensors import Held, join_axes, split_axes

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class Body:
    """A module's own kernel and merge: the interpreter then gives the module's results to the bit.

    Attributes:
        block: of the inputs by name, shaped as declared, and whether the diagonal cuts the block:
            the outputs by name.
        merge: fold outputs into others, in place: (outputs so far, those of a block), by name.
    """

    block: Callable[[Tensors, bool], Tensors]
    merge: Callable[[Tensors, Tensors], None]

    def fold(self, states: Mapping[str, Held], shares: Tensors) -> None:
        """Merge shares into views of outputs; both with one dimension for every axis."""
        old, new = {}, {}
        for name, state in states.items():
            old[name] = join_axes(state.tensor, state.data)
            new[name] = join_axes(state.tensor, shares[name])
        self.merge(old, new)
        for name, state in states.items():
            sizes = dict(zip(state.axes, state.data.shape, strict=True))
            state.data.copy_(split_axes(state.tensor, old[name], sizes.__getitem__))
