"""Where a group's ranks sit, which links a transfer occupies, and for how long.

A transfer occupies every resource on its way for bytes / bandwidth, and is complete a latency
later (the split of TACCL's alpha and beta). Where a link has a protocol for little data, which
arrives sooner at half the bandwidth, a transfer goes by the one that is done first. Resources of a
level are the way out of and into
each GPU, and the ports that several GPUs share. The groups beside ours (the rest of the machine,
and tensor-parallel siblings) do the same at the same time: on a shared port our bytes count as
many times as it has GPUs for each of ours.
"""

from __future__ import annotations

from collections import Counter
from math import inf, prod

from mercurygen.cost.loads import Load, Path, Price
from mercurygen.cost.topology import Level, Topology
from mercurygen.ir.mesh import Mesh

Key = tuple  # (level, what, which)
Ranks = tuple[int, ...]
SMALL = 2.0  # LL sends a flag beside as much data (NCCL src/graph/tuning.cc: half the bandwidth)


class Network:
    """The links of a topology as a group's ranks use them."""

    def __init__(
        self,
        topology: Topology,
        group: tuple[int, ...],
        tp: int = 1,
        seats: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            topology: the machine.
            group: ranks per level, outermost first.
            tp: tensor-parallel ranks beside each rank, on the innermost level.
            seats: of every rank its place in the group, row-major; by default its number.
        """
        self.topology, self.group, self.tp = topology, group, tp
        self.size = prod(group)
        self.places = [self._place(seat) for seat in seats or range(self.size)]
        self.gpus = [self._gpu(place) for place in self.places]
        self.resources: dict[Key, int] = {}
        self.levels: list[int] = []  # of each resource
        self.shared: list[int] = []  # of each, how many of our ranks have it in common
        self._members = [
            Counter(self._port(index, gpu) for gpu in self.gpus)
            for index in range(len(topology.levels))
        ]
        self._paths: dict[tuple[int, int], Path] = {}
        self._loads: dict[tuple[str, tuple[int, ...]], Load] = {}
        self._prices: dict[tuple[str, Mesh, str, int], Price] = {}
        self._spreads: dict[tuple[str, Mesh, str, int], tuple] = {}
        self._ports: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        self.alike = not seats and all(map(self._alike, range(len(topology.levels))))
        self.spanned = tuple(
            (i, level.name) for i, level in enumerate(topology.levels) if group[i] > 1
        )

    def _place(self, seat: int) -> tuple[int, ...]:
        """Index on every level; siblings of tensor parallelism lie between our ranks."""
        place = []
        for size in reversed(self.group):
            seat, index = divmod(seat, size)
            place.append(index)
        place[0] *= self.tp
        return tuple(reversed(place))

    def _gpu(self, place: tuple[int, ...]) -> int:
        number = 0
        for level, index in zip(self.topology.levels, place, strict=True):
            number = number * level.size + index
        return number

    def _alike(self, index: int) -> bool:
        """Whether a level looks the same from every rank: a switch, with as many at every port."""
        level = self.topology.levels[index]
        even = len(set(self._members[index].values())) == 1 and not level.lost_port
        return level.fabric == "switch" and level.duplex == "full" and even

    def _resource(self, level: int, what: str, which: object) -> int:
        key = (level, what, which)
        number = self.resources.setdefault(key, len(self.resources))
        if number == len(self.levels):
            self.levels.append(level)
            self.shared.append(self._members[level][which] if what == "port out" else 1)
        return number

    def ports(self, index: int) -> list[tuple[tuple[int, ...], float]]:
        """The ports to a level: our ranks at each, and how often their bytes count there."""
        found = self._ports.get(index)
        if found is None:
            ranks: dict[int, list[int]] = {}
            for rank, gpu in enumerate(self.gpus):
                ranks.setdefault(self._port(index, gpu), []).append(rank)
            found = [
                (tuple(ours), self._behind(index, port) / len(ours)) for port, ours in ranks.items()
            ]
            self._ports[index] = found
        return found

    def _port(self, index: int, gpu: int) -> int:
        """The port by which a GPU reaches a level: the second, if it has lost the first."""
        level = self.topology.levels[index]
        port = gpu // level.port_gpus
        return 1 if level.lost_port and port == 0 else port

    def _behind(self, index: int, port: int) -> int:
        """How many GPUs, ours or not, share a port."""
        level = self.topology.levels[index]
        return level.port_gpus * (2 if level.lost_port and port == 1 else 1)

    def path(self, source: int, target: int) -> Path:
        """The way from one rank of the group to another."""
        found = self._paths.get((source, target))
        if found is None:
            here, there = self.places[source], self.places[target]
            crossed = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
            seconds = self._crossing(crossed, source, target) + self._tree(crossed, source, target)
            waits = self._latency([crossed], [crossed])
            found = Path(crossed, *waits, tuple(seconds), self.share(crossed))
            self._paths[source, target] = found
        return found

    def _latency(self, hops: list[int], crossed: list[int], times: int = 1) -> tuple[float, float]:
        """Of hops over some levels, one after the other; and by the protocol for little data."""
        levels = self.topology.levels
        base = max(levels[i].base_latency for i in crossed)
        slow = [levels[i].latency for i in hops]
        if any(levels[i].small_latency is None for i in crossed):
            return base + times * sum(slow), inf
        quick = sum(levels[i].small_latency or 0.0 for i in hops)
        return base + times * sum(slow), base + times * quick

    def share(self, index: int) -> float:
        """Part of a GPU's SMs that transfers over a level keep busy."""
        return self.topology.levels[index].sms / self.topology.gpu.sms

    def _crossing(self, index: int, source: int, target: int) -> list[tuple[int, float]]:
        """What a transfer occupies of the level that it crosses."""
        level = self.topology.levels[index]
        rate = level.bandwidth * level.efficiency
        a, b = self.gpus[source], self.gpus[target]
        if level.fabric == "full-mesh":  # one wire for each pair
            pair = (min(a, b), max(a, b)) if level.duplex == "half" else (a, b)
            found = [(self._resource(index, "wire", pair), (level.size - 1) / rate)]
        else:
            hops = _hops(level, self.places[source][index], self.places[target][index])
            found = self._ways(index, a, b, hops / rate)
        if level.port_gpus > 1 or level.lost_port:
            found += self._through_ports(index, a, b)
        return found

    def _through_ports(self, index: int, a: int, b: int) -> list[tuple[int, float]]:
        """The port out of one GPU and the one into another, which others use at the same time."""
        level, found = self.topology.levels[index], []
        rate = level.port_bandwidth * level.efficiency
        for what, gpu in (("port out", a), ("port in", b)):
            port = self._port(index, gpu)
            shared = self._behind(index, port) / self._members[index][port]
            what = "port" if level.duplex == "half" else what
            found.append((self._resource(index, what, port), shared / rate))
        return found

    def _tree(self, crossed: int, source: int, target: int) -> list[tuple[int, float]]:
        """The links below that it passes: those of a tree of PCIe switches, and of the same link.

        What leaves a rack over InfiniBand leaves its GPU by the port that joins nodes too.
        """
        outer, found = self.topology.levels[crossed], []
        for index in range(crossed + 1, len(self.topology.levels)):
            inner = self.topology.levels[index]
            alike = outer.fabric == "pcie-tree" or outer.link == inner.link
            if alike and outer.fabric == inner.fabric and outer.fabric in ("pcie-tree", "switch"):
                rate = inner.bandwidth * inner.efficiency
                found += self._ways(index, self.gpus[source], self.gpus[target], 1 / rate)
                if inner.lost_port:
                    found += self._through_ports(index, self.gpus[source], self.gpus[target])
        return found

    def _ways(self, index: int, a: int, b: int, seconds: float) -> list[tuple[int, float]]:
        """The way out of one GPU and the way into another; one each where they are the same."""
        if self.topology.levels[index].duplex == "half":
            both = (self._resource(index, "way", a), self._resource(index, "way", b))
            return [(one, seconds) for one in both]
        out, into = self._resource(index, "out", a), self._resource(index, "in", b)
        return [(out, seconds), (into, seconds)]

    # --- collectives --------------------------------------------------------------------------

    def load(self, kind: str, members: tuple[int, ...]) -> Load:
        """A collective of these ranks."""
        found = self._loads.get((kind, members))
        if found is None:
            found = self._swap(members) if kind == "all-to-all" else self._ring(kind, members)
            self._loads[kind, members] = found
        return found

    def _ring(self, kind: str, members: tuple[int, ...], of: Ranks = ()) -> Load:
        """What goes around NCCL's rings, as parts of what an all-gather of the same buffer does.

        A reduce-scatter sends a rank's part of its buffer where an all-gather sends all of it; an
        all-reduce is both, one after the other. A broadcast is a chain in pieces: every rank but
        the last sends the buffer on once (who is last changes with the root: bytes are spread).
        """
        whole, n = self._gather(members, of), len(members)
        if kind == "all-gather":
            return whole
        times = 2 if kind == "all-reduce" else 1
        fill = n - 1 if kind == "broadcast" else n / times
        seconds = tuple((resource, per_byte / fill) for resource, per_byte in whole.seconds)
        sent = tuple((rank, level, share * times // n) for rank, level, share in whole.sent)
        waits = self._hops([self.path(a, b).level for a, b in _ring(members)], times)
        return Load(*waits, seconds, sent, whole.share)

    def _hops(self, levels: list[int], times: int) -> tuple[float, float]:
        """Latencies of so many times around a ring, but for its most expensive edge."""
        dearest = max(levels, key=lambda i: self.topology.levels[i].latency)
        hops = list(levels)
        hops.remove(dearest)
        return self._latency(hops, levels, times)

    def _gather(self, members: tuple[int, ...], of: Ranks = ()) -> Load:
        """NCCL's ring (src/graph/tuning.cc): n - 1 steps, and n - 1 latencies; what some ranks (by
        default all) send.

        NCCL lays several rings, which leave a node through different GPUs: the edges of a level
        are spread evenly over the ranks. Its latency counts the most expensive edge once less
        than there are.
        """
        n, of = len(members), of or members
        edges = [self.path(a, b) for a, b in _ring(members)]
        seconds: Counter[int] = Counter()
        sent: Counter[tuple[int, int]] = Counter()
        for index in sorted({edge.level for edge in edges}):
            count = sum(edge.level == index for edge in edges)
            pairs = [
                (a, b) for a in of for b in members if a != b and self.path(a, b).level == index
            ]
            if self.topology.levels[index].fabric == "ring":  # only to the neighbour
                pairs = [
                    (a, members[(i + 1) % n])
                    for i, a in enumerate(members)
                    if edges[i].level == index
                ]
            share = (n - 1) * count / (len(pairs) * n // len(of))
            for a, b in pairs:
                for resource, per_byte in self.path(a, b).seconds:
                    seconds[resource] += share * per_byte
            for a in of:
                sent[a, index] += (n - 1) * count * (self.size // n) * self.size
        share = max(edge.share for edge in edges)
        waits = self._hops([edge.level for edge in edges], 1)
        return Load(*waits, tuple(sorted(seconds.items())), _flat(sent), share)

    def _swap(self, members: tuple[int, ...], of: Ranks = ()) -> Load:
        """Every pair directly, all at the same time (NCCL's all-to-all: grouped sends); what some
        ranks (by default all) send."""
        n = len(members)
        left = [x.swap_efficiency if n > 2 else 1.0 for x in self.topology.levels]
        latency = small = share = 0.0
        seconds: Counter[int] = Counter()
        sent: Counter[tuple[int, int]] = Counter()
        for a in of or members:
            for b in members:
                if a != b:
                    path = self.path(a, b)
                    latency, share = max(latency, path.latency), max(share, path.share)
                    small = max(small, path.small)
                    sent[a, path.level] += self.size // n * self.size
                    for resource, per_byte in path.seconds:
                        seconds[resource] += per_byte / n / left[self.levels[resource]]
        return Load(latency, small, tuple(sorted(seconds.items())), _flat(sent), share)

    # --- along a dimension --------------------------------------------------------------------

    def price(self, kind: str, mesh: Mesh, dim: str, distance: int = 1) -> Price:
        """An operation along a dimension by all ranks: a collective's kind, or "shift".

        A shift goes from every rank to the one that many places further.
        """
        key = kind, mesh, dim, distance
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._price(kind, groups(mesh, dim), distance)
        return found

    def spread(
        self, kind: str, mesh: Mesh, dim: str, distance: int = 1
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Per level that such an operation crosses, the share that every rank sends over it."""
        key = kind, mesh, dim, distance
        found = self._spreads.get(key)
        if found is None:
            totals: dict[int, list[int]] = {}
            for rank, level, share in self.price(*key).sent:
                totals.setdefault(level, [0] * self.size)[rank] += share
            found = tuple((level, tuple(shares)) for level, shares in sorted(totals.items()))
            self._spreads[key] = found
        return found

    def _price(self, kind: str, members: list[tuple[int, ...]], distance: int) -> Price:
        if self.alike and kind != "shift":
            return self._of_one(kind, members[0])
        latency = small = share = 0.0
        seconds: Counter[int] = Counter()
        sent: list[tuple[int, int, int]] = []
        for group in members:
            shift = kind == "shift"
            for load in self._shift(group, distance) if shift else (self.load(kind, group),):
                latency, share = max(latency, load.latency), max(share, load.share)
                small = max(small, load.small)
                sent += load.sent
                for resource, per_byte in load.seconds:
                    seconds[resource] += per_byte
        worst: dict[int, float] = {}
        for resource, per_byte in seconds.items():
            level = self.levels[resource]
            worst[level] = max(per_byte, worst.get(level, 0.0))
        return Price(latency, small, tuple(sorted(worst.items())), tuple(sent), share)

    def _of_one(self, kind: str, members: tuple[int, ...]) -> Price:
        """The same of a collective where all ranks are alike: by what one of them sends.

        Its own ways are as busy as any; what it has in common with others, as they make it too.
        """
        one = members[:1]
        load = self._swap(members, one) if kind == "all-to-all" else self._ring(kind, members, one)
        worst: dict[int, float] = {}
        for resource, per_byte in load.seconds:
            level = self.levels[resource]
            worst[level] = max(per_byte * self.shared[resource], worst.get(level, 0.0))
        sent = tuple((rank, level, n) for rank in range(self.size) for _, level, n in load.sent)
        return Price(load.latency, load.small, tuple(sorted(worst.items())), sent, load.share)

    def _shift(self, members: tuple[int, ...], distance: int) -> list[Load]:
        """Each rank to the one that many places further."""
        loads = []
        for i, a in enumerate(members):
            path = self.path(a, members[(i + distance) % len(members)])
            sent = ((a, path.level, self.size**2),)
            loads.append(Load(path.latency, path.small, path.seconds, sent, path.share))
        return loads


def regime(load: Path | Load | Price, nbytes: float) -> tuple[float, float]:
    """Latency, and how many times as long the bytes take, by the protocol that is done first."""
    if load.small == inf:
        return load.latency, 1.0
    most = 0.0
    for _, per_byte in load.seconds:  # a loop: it is done for every transfer of a search
        if per_byte > most:
            most = per_byte
    if load.small + (SMALL - 1) * most * nbytes < load.latency:
        return load.small, SMALL
    return load.latency, 1.0


def _ring(members: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(members, (*members[1:], members[0]), strict=True))


def groups(mesh: Mesh, dim: str) -> list[tuple[int, ...]]:
    """The groups along a dimension, each in its order."""
    firsts = (r for r in range(mesh.size) if mesh.coordinate(r)[dim] == 0)
    return [mesh.group(rank, dim) for rank in firsts]


def _hops(level: Level, a: int, b: int) -> int:
    """Links of a ring between two of its places; 1 on other fabrics."""
    if level.fabric != "ring":
        return 1
    return min((a - b) % level.size, (b - a) % level.size)


def _flat(sent: Counter[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((rank, level, share) for (rank, level), share in sent.items())
