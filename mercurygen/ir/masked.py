"""What of a program says its mask: one band of columns for every row."""

from __future__ import annotations

from mercurygen.ir.documents import borders_of
from mercurygen.ir.operator import Domain


class Masked:
    """The mask of a program, by the fields of `Program` that are named here."""

    mask: str
    mask_axes: tuple[str, ...]
    window: int | None
    ahead: int
    align: str | None
    documents: tuple[int, ...]
    extents: dict[str, int]

    @property
    def domain(self) -> Domain | None:
        """The mask, as the operator takes it; None of one without."""
        borders = borders_of(self.documents) if self.documents else ()
        if not self.mask_axes:
            return None
        return Domain(self.mask, self.window, self.ahead, borders, self.offset)

    @property
    def offset(self) -> int:
        """The column that row 0 stands at."""
        if self.align != "bottom-right":
            return 0
        rows, columns = (self.extents[axis] for axis in self.mask_axes)
        return columns - rows

    @property
    def banded(self) -> bool:
        """Whether the mask is a band otherwise than that of one sequence up to the diagonal."""
        return self.mask == "window" or (self.mask == "causal" and self.align is not None)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many columns before and after its own number a row sees; None: all there are."""
        behind = self.window - 1 - self.offset if self.window is not None else None
        return behind, None if self.mask == "full" else self.ahead + self.offset
