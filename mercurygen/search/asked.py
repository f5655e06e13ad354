"""What a search is asked for: an operator, a problem, the levels, and which schedules of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod

from mercurygen.cost.decide import LARGE
from mercurygen.designs import patterns
from mercurygen.errors import UserError
from mercurygen.ir.mesh import Link
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem
from mercurygen.schedule.directives import Patch
from mercurygen.search.space import Point, points
from mercurygen.search.space import size as space_size

LARGEST_SPACE = 100_000  # schedules: a minute or so on one core


@dataclass(frozen=True, slots=True)
class Asked:
    """What the space is of.

    Attributes:
        operator: to schedule.
        problem: of one group.
        spanned: the levels as the group occupies them.
        order: as asked for.
        design: whose instances are searched, or None.
        axes: that are split; None: all. Of designs with others the instances are searched too.
        patch: which kernel runs the body.
    """

    operator: Operator
    problem: Problem
    spanned: tuple[Link, ...]
    order: str | None
    design: str | None
    axes: tuple[str, ...] | None
    patch: Patch

    def points(self, design: str | None) -> Iterator[Point]:
        """The space, or the instances of a design."""
        what = self.operator, self.problem, self.spanned
        how = {"order": self.order, "patch": self.patch}
        yield from points(*what, design=design, axes=self.axes, **how)
        if design is None and self.axes is not None:
            for name in patterns.names():
                if not set(patterns.get(name).axes) <= set(self.axes):
                    yield from points(*what, design=name, **how)

    def size(self) -> int:
        """How many points there are to look at.

        Raises:
            UserError: `space-too-large`, before anything is priced.
        """
        if self.design is not None:
            return sum(1 for _ in self.points(self.design))
        if self.axes is None and prod(link.size for link in self.spanned) <= LARGE:
            size = space_size(self.operator, self.problem, self.spanned, self.order)
        else:
            size = sum(1 for _ in islice(self.points(None), LARGEST_SPACE + 1))
        if size > LARGEST_SPACE:
            raise UserError(
                "space-too-large",
                f"more than {LARGEST_SPACE} schedules to search, which is as many as are looked at",
                help="name a design with --schedule NAME, place the operator on a part of the "
                "machine with --group, or write a topology with fewer levels",
            )
        return size
