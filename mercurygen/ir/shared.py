"""What programs of one operator, problem and mesh have in common: a search makes thousands."""

from __future__ import annotations


class Shared(dict[object, object]):
    """What was worked out for the programs of one operator, problem and mesh, by its key.

    A key says all that the value depends on beside these; to forget a value only costs time. So
    that a search does not grow for ever, all are forgotten once there are too many.
    """

    MOST = 50_000

    def __setitem__(self, key: object, value: object) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(key, value)


class Layout:
    """Who has what of which tensor: what much of a plan, and of its price, depends on alone.

    Programs of one operator, problem and mesh with the same token order, split iterations, pins,
    storage and tile loops have the same one, so it is compared by identity.

    Attributes:
        stored: per tensor the axis along which the schedule works from it split, per dimension.
    """

    __slots__ = ("stored",)

    def __init__(self, stored: dict[str, tuple[str | None, ...]]) -> None:
        self.stored = stored


class Routes:
    """Along what tensors move, over which dimensions, in whatever way.

    Attributes:
        axes: per (tensor, dimension) the axis of the outermost stage that moves it there.
        layout: what they make of the program.
        told: whether every tensor is known to have one story along every dimension.
    """

    __slots__ = ("axes", "layout", "told")

    def __init__(self, axes: dict[tuple[str, str], str], layout: Layout) -> None:
        self.axes, self.layout = axes, layout
        self.told = False
