"""What the ranks of a plan compute at every step, and for how long.

It depends on who has what (the program's layout), on the walks of the nest and on the kernel, not
on how tiles come by, nor on how results go: many schedules of a search share a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mercurygen.cost.common import Common
from mercurygen.cost.kernels import NOTHING, Spent, added, seconds
from mercurygen.cost.steps import Call, classes_of, steps_of, telling, walked
from mercurygen.lower.plan import Plan
from mercurygen.lower.sizes import scratch_bytes, share_bytes
from mercurygen.lower.visible import EVERY


class Calls:
    """The body's calls of every kind of step: merged into results, or for a result of their own.

    Attributes:
        spent: what each kind spends.
        scratch: bytes beside.
        shares: of a kind of one call its bytes of every output, as the body leaves them.
        present: per step the kinds that any class has.
        regions: the same in what they are merged in, of as much as the block covers.
        longest: per step, seconds of the class that takes longest.
        hosts: per step, those of the host of the class that has most.
        highest: per step, scratch bytes of the class that needs most.
    """

    def __init__(self, shape: Shape, plan: Plan, common: Common, merge: bool) -> None:
        self.steps = shape.steps
        kinds = [(None,)] if shape.steps is None else shape.steps.kinds
        each = map(_kinds(shape, plan, common, merge).__getitem__, kinds)
        self.spent, times, self.scratch, self.shares, self.regions = zip(*each, strict=True)
        one = frozenset((0,))
        self.present = shape.steps.present if shape.steps is not None else (one,) * shape.length
        of = {kinds: max([times[kind] for kind in kinds]) for kinds in set(self.present)}
        self.longest = list(map(of.__getitem__, self.present))
        of = {kinds: max([self.spent[kind][3] for kind in kinds]) for kinds in of}
        self.hosts = list(map(of.__getitem__, self.present))
        of = {kinds: max([self.scratch[kind] for kind in kinds]) for kinds in of}
        self.highest = list(map(of.__getitem__, self.present))
        self._each: dict[int, list[int]] = {}

    def share(self, step: int) -> tuple[int, ...] | None:
        """Bytes of every output at a step, of classes that have any; None if these differ."""
        found = {self.shares[kind] for kind in self.present[step]} - {None}
        return found.pop() if len(found) == 1 else None

    def scratch_each(self, step: int) -> list[int]:
        """Scratch bytes of every class at a step."""
        found = self._each.get(step)
        if found is None:
            row = (0,) if self.steps is None else self.steps.row(step)
            found = self._each[step] = [self.scratch[kind] for kind in row]
        return found


class Shape:
    """What plans with one layout and the same walks share.

    Attributes:
        classes: the ranks that do the same.
        steps: the body's calls; None of an operator without a mask.
        strides: per walk, how many steps of the nest one of its own is.
        length: steps of the nest.
        local: indices of every axis that a call on a whole tile is given.
        elements: of partial results, by which of them go home, and along what.
    """

    def __init__(self, plan: Plan, common: Common) -> None:
        program, mesh = plan.program, common.mesh
        walks = walked(plan)
        self.common = common
        self.classes = classes_of(program, telling(program, walks))
        self.steps = steps_of(program, walks, self.classes) if program.mask_axes else None
        self.strides = [prod(walk.size for walk in walks[i + 1 :]) for i in range(len(walks))]
        self.length = prod(walk.size for walk in walks)
        self.local = dict(program.extents)
        for dim, axis in zip(mesh.names, program.parallel, strict=True):
            if axis is not None:
                self.local[axis] //= mesh.extent(dim)
        for walk in walks:
            self.local[walk.axis] //= walk.extent
        self.elements: dict[tuple, tuple[int, ...]] = {}
        self._calls: dict[bool, Calls] = {}
        self._busiest: dict[str, tuple[Spent, float]] = {}

    def calls(self, plan: Plan, merge: bool) -> Calls:
        """The body's calls; of a kind of a single unmerged call, the bytes of its share too."""
        found = self._calls.get(merge)
        if found is None:
            found = self._calls[merge] = Calls(self, plan, self.common, merge)
        return found

    def busiest(self, plan: Plan) -> tuple[Spent, float]:
        """What the calls of the rank that is busy longest spend, and its compute over the mean."""
        begin = plan.nest.begin
        found = self._busiest.get(begin)
        if found is None:
            rest = self.calls(plan, begin != "only").spent
            first = rest if begin == "empty" else self.calls(plan, False).spent
            found = self._busiest[begin] = self._longest(first, rest)
        return found

    def _longest(self, begin: Sequence[Spent], rest: Sequence[Spent]) -> tuple[Spent, float]:
        if self.steps is None:
            one, times = rest[0], self.length
            return (one[0] * times, one[1] * times, one[2] * times, one[3] * times), 1.0
        most, compute, ranks, longest = 0.0, 0.0, 0, NOTHING
        for first, others, count in self.steps.sums:
            a, b, c, d = begin[first]
            for kind, times in others:
                one = rest[kind]
                a, b, c, d = (
                    a + one[0] * times,
                    b + one[1] * times,
                    c + one[2] * times,
                    d + one[3] * times,
                )
            spent = a, b, c, d
            compute += a * count
            ranks += count
            most = max(most, a)
            if (seconds(spent), spent) > (seconds(longest), longest):
                longest = spent
        return longest, most * ranks / compute


class Kinds(dict[tuple, tuple]):
    """What the calls of one kind of step need, on tiles that are alike but for the mask's axes.

    Of several calls: what they spend, that in seconds, the scratch bytes of the most; of a single
    unmerged one the bytes of its share and its region too. Made when it is asked for.
    """

    def __init__(self, plan: Plan, common: Common, local: dict[str, int], merge: bool) -> None:
        super().__init__()
        self.plan, self.common, self.local, self.merge = plan, common, local, merge
        self._calls: dict[Call | None, tuple] = {}

    def __missing__(self, calls: tuple[Call | None, ...]) -> tuple:
        total, most, share, region = NOTHING, 0, None, None
        for call in calls:
            if call not in self._calls:
                self._calls[call] = self._call(call)
            one, more, share, region = self._calls[call]
            total, most = added(total, one), max(most, more)
        found = self[calls] = total, seconds(total), most, share, region
        return found

    def _call(self, call: Call | None) -> tuple:
        """One call: what it spends, scratch bytes, and unmerged the bytes of share and region."""
        extents, band, less, documents = dict(self.local), EVERY, 0, ()
        common = self.common
        rows, columns = self.plan.program.mask_axes or (None, None)
        if call is not None:
            extents[rows], extents[columns], band, less, documents = call
        spent = common.kernels.call(tuple(extents.values()), band, self.merge, documents)
        scratch, share, region = scratch_bytes(self.plan, extents, self.merge), None, None
        if not self.merge:
            share = share_bytes(self.plan, extents)
            if call is not None:
                extents |= {rows: extents[rows] + less, columns: extents[columns] + less}
            region = tuple(
                prod(extents[axis] for axis in t.axes) * common.wide[t.name] for t in common.outputs
            )
        return spent, scratch, share, region


def _kinds(shape: Shape, plan: Plan, common: Common, merge: bool) -> Kinds:
    """What calls need in a shape: of the axes of the mask every call has its own extents."""
    masked = plan.program.mask_axes
    key = tuple([n for axis, n in shape.local.items() if axis not in masked]), merge
    found = common.kinds.get(key)
    if found is None:
        found = common.kinds[key] = Kinds(plan, common, shape.local, merge)
    return found


def shape_of(plan: Plan, common: Common) -> Shape:
    """The shape of a plan."""
    key = plan.program.layout, tuple([loop.paces for loop in plan.nest.loops if loop.walks])
    found = common.shapes.get(key)
    if found is None:
        found = common.shapes[key] = Shape(plan, common)
    return found
