"""What the plans of one operator, problem, mesh and machine have in common, worked out once.

A search prices thousands of schedules that differ in how tensors move. Three things are shared:
a `Wire` depends on the network, the mesh and the transfer; `Partials` on how many elements of the
outputs a rank works out at a time; a `Shape` (`mercurygen.cost.shape`) on who has what and on the
walks. All are pure functions of these, made by the formulas of `kernels`, `links` and `sizes`, and
live as long as the programs of the search, in `Program.shared`.
"""

from __future__ import annotations

from typing import NamedTuple

from mercurygen.cost.kernels import Kernels, Spent
from mercurygen.cost.links import Network
from mercurygen.cost.report import Traffic
from mercurygen.errors import InternalError
from mercurygen.ir.kernel import ATEN
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.operator import Operator
from mercurygen.lower.plan import Plan

Shares = tuple[int, ...]  # of every rank


class Part(NamedTuple):
    """A result: bytes of its buffer, of what it has of the output, and of an element."""

    live: int
    nbytes: int
    item: int


class Parts(dict[str, Part]):
    """Results by output.

    Attributes:
        live: bytes of their buffers.
        wide: whether all are in what they are merged in.
    """

    __slots__ = ("live", "wide")

    def __init__(self, common: Common, parts: dict[str, Part]) -> None:
        super().__init__(parts)
        self.live, self.wide = 0, True
        for name, part in parts.items():
            self.live += part.live
            self.wide = self.wide and part.item == common.wide[name]

    def gone(self, new: Parts) -> int:
        """Bytes of the buffers of which others have taken the place."""
        if new is self:
            return 0
        return sum([part.live for name, part in self.items() if new[name] is not part])


class Route(NamedTuple):
    """Which ranks a transfer takes over which level; of many distances along a dimension one.

    Attributes:
        place: index of the dimension.
        levels: each level, and whether every rank sends over it; None if all do.
    """

    place: int
    levels: tuple[tuple[int, tuple[bool, ...] | None], ...]


class Wire:
    """A transfer of all ranks along a dimension.

    Attributes:
        place: index of the dimension; one operation after the other along it.
        latency: s.
        small: s, by the protocol for little data.
        seconds: (level, s per byte) of each that it occupies.
        share: part of a GPU's SMs that it keeps busy.
        sent: (level, share of every rank, or None if they differ, the shares).
        even: the share of every rank over all levels.
        route: which ranks it takes over which level.
    """

    __slots__ = ("place", "latency", "small", "seconds", "share", "sent", "even", "route")

    def __init__(self, network: Network, mesh: Mesh, kind: str, dim: str, distance: int) -> None:
        price = network.price(kind, mesh, dim, distance)
        self.place, self.seconds, self.share = mesh.index(dim), price.seconds, price.share
        self.latency, self.small = price.latency, price.small
        spread = network.spread(kind, mesh, dim, distance)
        self.sent = tuple(
            (level, shares[0] if len(set(shares)) == 1 else None, shares)
            for level, shares in spread
        )
        self.even, *others = {sum(each) for each in zip(*(s for _, s in spread), strict=True)}
        if others:
            raise InternalError(f"ranks send different shares in a {kind} along {dim}")
        levels = tuple(
            (level, None if all(shares) else tuple(map(bool, shares))) for level, shares in spread
        )
        self.route = Route(self.place, levels)


class Ports:
    """The ports to a level.

    Attributes:
        ranks: our ranks at each, and how often their bytes count there.
        kinds: how many these are, and how often they count; each pair once.
    """

    __slots__ = ("ranks", "kinds")

    def __init__(self, network: Network, level: int) -> None:
        self.ranks = network.ports(level)
        self.kinds = tuple(dict.fromkeys((len(ranks), times) for ranks, times in self.ranks))


class Common:
    """What is worked out for any plan of a program's operator, problem, mesh and kernel.

    Attributes:
        kernels: prices of what a rank does by itself.
        launch: s before any transfer.
        items: per output, bytes of an element.
        wide: the same, of what partial results are merged in.
        aten: whether torch's attention runs the body.
        spanned: index and name of every level that the group spans.
        ports: of each.
        kinds: what calls of the body need; see `mercurygen.cost.shape`.
        shapes: by what they depend on; see there too.
        begun: per layout, all ranks after the border before the nest.
    """

    def __init__(self, plan: Plan, network: Network, operator: Operator | None) -> None:
        program = plan.program
        self.network, self.mesh = network, program.mesh
        self.kernels = Kernels(plan, network.topology.gpu, operator)
        self.launch = network.topology.gpu.launch_latency
        self.outputs, self.combines = program.outputs, program.combines
        self.names = tuple(tensor.name for tensor in program.outputs)
        self.items = {t.name: plan.itemsize(t.dtype) for t in program.outputs}
        self.wide = {t.name: plan.itemsize(plan.partial(t)) for t in program.outputs}
        self.accumulator = plan.itemsize("accumulator")
        self.width = program.extents.get("D_v", 1)
        self.aten = program.kernel == ATEN
        self.spanned = network.spanned
        self.ports = {index: Ports(network, index) for index, _ in network.spanned}
        self.kinds: dict = {}
        self.shapes: dict = {}
        self.begun: dict = {}
        self._wires: dict[tuple[str, str, int], Wire] = {}
        self._routes: dict[Route, Route] = {}
        self._traffic: dict[tuple[str, int, int | None], Traffic] = {}
        self._rings: dict[tuple[str, bool, bool], tuple[Wire, ...]] = {}
        self._partials: dict[tuple[int, ...], Partials] = {}

    def wire(self, kind: str, dim: str, distance: int = 1) -> Wire:
        """A transfer of all ranks: a collective's kind, or a shift so many places further."""
        key = kind, dim, distance
        found = self._wires.get(key)
        if found is None:
            found = self._wires[key] = Wire(self.network, self.mesh, *key)
            found.route = self._routes.setdefault(found.route, found.route)
        return found

    def traffic(
        self, name: str, even: int, each: list[int] | None, level: int | None = None
    ) -> Traffic:
        """Bytes over a level or (None) along a dimension.

        Args:
            name: of it.
            even: what every rank sends, in parts of which there are whole ones.
            each: what each sends beside that.
            level: of the links.
        """
        size, parts = self.network.size, self.network.size**2
        if each is None:
            key = name, even, level
            found = self._traffic.get(key)
            if found is None:
                kinds = self.ports[level].kinds if level is not None else ((1, 1.0),)
                port = max(many * even * times for many, times in kinds)
                found = Traffic(name, even * size / (size * parts), even / parts, port / parts)
                self._traffic[key] = found
            return found
        each = [n + even for n in each] if even else each
        most = max(each)
        port = most * 1.0
        if level is not None:
            ports = self.ports[level].ranks
            port = max([sum([each[rank] for rank in ranks]) * times for ranks, times in ports])
        return Traffic(name, sum(each) / (size * parts), most / parts, port / parts)

    def ring(self, dim: str, direct: bool, reverse: bool) -> tuple[Wire, ...]:
        """Of a walk, what brings the tile of step 1, 2, ...: a step further each, or one place."""
        key = dim, direct, reverse
        found = self._rings.get(key)
        if found is None:
            size = self.mesh.extent(dim)
            further = [step if direct else 1 for step in range(1, size)]
            found = tuple(self.wire("shift", dim, size - n if reverse else n) for n in further)
            self._rings[key] = found
        return found

    def partials(self, elements: tuple[int, ...]) -> Partials:
        """Partial results of so many elements of every output."""
        found = self._partials.get(elements)
        if found is None:
            found = self._partials[elements] = Partials(self, elements)
        return found


class Partials:
    """What partial results of some sizes need: to begin them, merge them, and hand them on.

    Attributes:
        sizes: bytes of each, in what they are merged in.
    """

    def __init__(self, common: Common, elements: tuple[int, ...]) -> None:
        self.common = common
        named = dict(zip(common.names, elements, strict=True))
        self.sizes = {name: count * common.wide[name] for name, count in named.items()}
        self._nothing: dict[tuple[str, ...], tuple[Parts, Spent]] = {}
        self._merges: dict[tuple[str, ...], tuple[int, tuple[Spent, ...]]] = {}
        self._shares: dict[tuple[int, ...], Parts] = {}

    def nothing(self, staying: tuple[str, ...]) -> tuple[Parts, Spent]:
        """What merges to nothing, and what filling it spends.

        Args:
            staying: outputs that are those of other tiles so far: no buffers of their own.
        """
        found = self._nothing.get(staying)
        if found is None:
            fresh = {name: n for name, n in self.sizes.items() if name not in staying}
            parts = {
                name: Part(fresh.get(name, 0), n, self.common.wide[name])
                for name, n in self.sizes.items()
            }
            fill = self.common.kernels.copies(list(fresh.values()))
            found = self._nothing[staying] = Parts(self.common, parts), fill
        return found

    def share(self, made: tuple[int, ...]) -> Parts:
        """Results as the body leaves them, in buffers of so many bytes."""
        found = self._shares.get(made)
        if found is None:
            common, parts = self.common, {}
            items = common.items if common.aten else common.wide
            for name, nbytes in zip(common.names, made, strict=True):
                own = self.sizes[name] // common.wide[name] * items[name]
                parts[name] = Part(nbytes, own, items[name])
            found = self._shares[made] = Parts(common, parts)
        return found

    def merge(self, names: tuple[str, ...]) -> tuple[int, tuple[Spent, ...]]:
        """To merge those of some names into others: bytes beside them, what each kernel spends."""
        found = self._merges.get(names)
        if found is None:
            scratch, spent = 0, []
            for combine in self.common.combines:
                out = combine.outputs[0]
                if combine.kind == "softmax" and out in names:
                    scratch = max(scratch, merge_scratch(self.common, self.sizes[out], out))
                sizes = [self.sizes[name] for name in combine.outputs if name in names]
                if sizes:
                    spent.append(self.common.kernels.merge(sizes))
            found = self._merges[names] = scratch, tuple(spent)
        return found


def merge_scratch(common: Common, nbytes: int, out: str) -> int:
    """Bytes beside a softmax merge of partial results of so many bytes: two vectors like lse."""
    rows = nbytes // common.wide[out] // common.width
    return 2 * rows * common.accumulator


def common_of(plan: Plan, network: Network, operator: Operator | None) -> Common:
    """What a plan shares with the others of its operator, problem, mesh, kernel and network."""
    key = "common", network, plan.program.kernel, operator
    found = plan.program.shared.get(key)
    if found is None:
        found = plan.program.shared[key] = Common(plan, network, operator)
    return found
