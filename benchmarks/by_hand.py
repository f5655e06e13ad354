"""Ring, Ulysses, unified and all-gather KV by formulas on paper: bytes and times, no schedule.

After the descriptions of the hand-written designs (who sends what when), apart from plans, search
and simulation, so that these can be held against it. Of a causal forward with zigzag tokens. For
the time the busiest rank is played: its kernels one after the other, a transfer beside them, and a
host that starts both in order. The numbers are those of the topology's file.

Symbols, of one rank: `q` bytes of its queries, `kv` of its keys and values together; `s` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from mercurygen.cost.topology import Level, Topology
from mercurygen.ir.problem import Problem

TILE, WIDE, ELEMENT = 128, 4, 2  # rows of a thread block; bytes of float32 and of bfloat16
MESSAGES = 4  # of a step: k and v, sent and received


@dataclass(frozen=True)
class Figures:
    """What a design costs.

    Attributes:
        seconds: of a call.
        sent: per level, bytes out of the busiest port, for all GPUs that share it.
    """

    seconds: float
    sent: dict[str, float]


class Clock:
    """When a rank's host, its kernels and its transfers are done with what they have, in s."""

    def __init__(self, machine: Machine) -> None:
        self.gpu, self.host, self.now, self.link = machine.gpu, 0.0, 0.0, 0.0

    def kernels(self, *seconds: float) -> None:
        """One after the other; the host launches them."""
        for one in seconds:
            self.host += self.gpu.host_launch
            self.now = max(self.now + max(one, self.gpu.launch_latency), self.host)

    def send(self, seconds: float, messages: int = 1) -> float:
        """A transfer that starts now; when it is over."""
        self.host += messages * self.gpu.host_transfer
        begin = max(self.host, self.now, self.link) + self.gpu.launch_latency
        self.link = begin + seconds
        return self.link

    def wait(self, end: float) -> None:
        """Kernels go on when a transfer is over."""
        self.now = max(self.now, end)


class Machine:
    """Some ranks of a topology, row-major, and what moves between them."""

    def __init__(self, topology: Topology, group: tuple[int, ...]) -> None:
        self.gpu, self.group = topology.gpu, group
        pairs = zip(topology.levels, group, strict=True)
        self.levels = [(level, n) for level, n in pairs if n > 1]
        self.size = prod(group)

    # --- kernels --------------------------------------------------------------------------------

    def flash(
        self, problem: Problem, heads: float, rows: float, cols: float, causal: bool
    ) -> float:
        """Seconds of flash attention: waves of thread blocks, each over its columns."""
        gpu, heads = self.gpu, heads * problem.batch
        flops = 2 * (problem.head_dim + problem.v_head_dim)
        score = flops / (gpu.matmul_flops_16 * gpu.attention_efficiency) + 1 / gpu.softmax_rate
        blocks, longest = heads * ceil(rows / TILE), ceil(cols / TILE) * TILE + gpu.block_start
        loops = ceil(blocks / gpu.sms) * longest
        if causal:
            mean = (cols + TILE) / 2 + gpu.block_start
            loops = min(loops, max(longest, blocks * mean / gpu.sms + gpu.causal_tail * longest))
        return loops * TILE * gpu.sms * score

    def copy(self, nbytes: float) -> float:
        """Seconds of an element-wise kernel that reads and writes so many bytes in all."""
        return nbytes / (self.gpu.hbm_bandwidth * self.gpu.hbm_efficiency)

    def merge(self, out: float, rows: float) -> list[float]:
        """Kernels that merge a block's result of so many elements and rows into a float32 one.

        The difference of lse, its sigmoid, the widened result, the sum by weight, the new lse.
        """
        lse = rows * WIDE
        sizes = (3 * lse, 2 * lse, out * (ELEMENT + WIDE), 3 * out * WIDE + lse, 3 * lse)
        return [self.copy(size) for size in sizes]

    # --- links ----------------------------------------------------------------------------------

    def _seconds(self, level: Level, each: float, port: float, several: bool = False) -> float:
        """Of bytes out of each GPU and out of each port over a level."""
        rate = level.efficiency * (level.swap_efficiency if several else 1.0)
        shared = port / (level.port_bandwidth * rate) if level.port_gpus > 1 else 0.0
        return max(each / (level.bandwidth * rate), shared)

    def _latency(self, level: Level) -> float:
        return level.base_latency + level.latency

    def step(self, first: int, nbytes: float) -> float:
        """A ring's step: every rank sends to the rank `first` places further, all at a time."""
        slowest = 0.0
        for index, (level, _) in enumerate(self.levels):
            inside = prod(n for _, n in self.levels[index + 1 :])
            if first < inside * self.levels[index][1]:
                crossing = min(first, inside)  # of each group inside, so many ranks cross
                port = min(crossing, level.port_gpus) * nbytes
                seconds = self._latency(level) + self._seconds(level, nbytes, port)
                slowest = max(slowest, seconds)
        return slowest

    def ring_sent(self, stride: int, steps: int, nbytes: float) -> dict[str, float]:
        """Bytes out of the busiest port of each level, of a ring with that stride."""
        found = {}
        for index, (level, size) in enumerate(self.levels):
            inside = prod(n for _, n in self.levels[index + 1 :])
            if stride < inside * size:
                found[level.name] = min(stride, inside, level.port_gpus) * steps * nbytes
        return found

    def swap(self, ranks: int, nbytes: float) -> tuple[float, dict[str, float]]:
        """An all-to-all of the innermost ranks: each keeps its part of so many bytes.

        In a tree of PCIe switches what goes further leaves its GPU by the same link.
        """
        spans, left, inside = [], ranks, 1
        for level, size in reversed(self.levels):
            here = min(size, left)
            left //= here
            if here > 1:
                spans.append((level, nbytes * (here - 1) * inside / ranks, inside))
            inside *= here
        slowest, sent, through = 0.0, {}, 0.0
        for level, each, inside in reversed(spans):
            port = min(level.port_gpus, inside) * each if level.port_gpus > 1 else each
            through = through + each if level.fabric == "pcie-tree" else each
            seconds = self._seconds(level, through, port, ranks > 2)
            slowest = max(slowest, seconds + self._latency(level))
            sent[level.name] = port
            through = through if level.fabric == "pcie-tree" else 0.0
        return slowest, sent

    def gather(self, nbytes: float) -> tuple[float, dict[str, float]]:
        """An all-gather of all ranks by NCCL's rings, which leave a node through all its GPUs."""
        slowest, sent, waits, edges = 0.0, {}, 0.0, self.size
        for index, (level, _) in enumerate(self.levels):
            groups = prod(n for _, n in self.levels[: index + 1])
            inside = self.size // groups
            crossing = groups if index == 0 else groups - prod(n for _, n in self.levels[:index])
            each = (self.size - 1) * nbytes * crossing / self.size
            port = each * min(level.port_gpus, inside) if level.port_gpus > 1 else each
            slowest = max(slowest, self._seconds(level, each, port))
            sent[level.name] = port
            waits += crossing * level.latency
            edges -= crossing
        dearest = max(level.latency for level, _ in self.levels)
        base = max(level.base_latency for level, _ in self.levels)
        return slowest + waits - dearest + base, sent


def unified(machine: Machine, problem: Problem, ulysses: int) -> Figures:
    """Heads over the innermost ranks, a ring around what is outside: ring and Ulysses at its ends.

    All-to-alls of q, k and v; a ring of the groups; an all-to-all of the result. Step 0 of the ring
    is the causal square of a rank's two chunks; at every other one its queries meet half a tile,
    all of them the early keys or the late ones all keys: the busiest rank merges all rows.
    """
    ranks = machine.size // ulysses
    heads, s = problem.heads // ulysses, problem.seq // ranks
    rows = problem.batch * s * heads
    out = rows * problem.v_head_dim
    kv = problem.batch * s * problem.kv_heads // ulysses * 2 * problem.head_dim * ELEMENT
    clock, sent = Clock(machine), {}

    def swap(of: int) -> None:
        nbytes = problem.batch * problem.seq // machine.size * of * problem.head_dim * ELEMENT
        spent, more = machine.swap(ulysses, nbytes)
        clock.kernels(machine.copy(2 * nbytes))  # packed
        clock.wait(clock.send(spent))
        clock.kernels(machine.copy(2 * nbytes))  # unpacked
        _add(sent, more)

    if ulysses > 1:
        for of in (problem.heads, problem.kv_heads, problem.kv_heads):
            swap(of)
    square = machine.flash(problem, heads, s, s, True)
    if ranks == 1:
        clock.kernels(square)
    else:
        transfer = machine.step(ulysses, kv)
        widen = machine.copy(out * (ELEMENT + WIDE))
        half = machine.flash(problem, heads, s, s // 2, False), *machine.merge(out, rows)
        end = clock.send(transfer, MESSAGES)
        clock.kernels(square, widen)
        for step in range(1, ranks):
            clock.wait(end)
            end = clock.send(transfer, MESSAGES) if step < ranks - 1 else 0.0
            clock.kernels(*half)
        clock.kernels(widen)  # narrowed
        _add(sent, machine.ring_sent(ulysses, ranks - 1, kv))
    if ulysses > 1:
        swap(problem.heads)
    return Figures(clock.now, sent)


def _add(sent: dict[str, float], more: dict[str, float]) -> None:
    for name, nbytes in more.items():
        sent[name] = sent.get(name, 0.0) + nbytes


def allgather(machine: Machine, problem: Problem) -> Figures:
    """All keys and values to every rank, then one step.

    Each of a rank's two chunks meets its own square and what is before it: torch's kernel masks a
    square, so these are two blocks, merged into a result of zeros. (One with an offset mask, as
    FlashAttention's own, would do both at once.) The rank that has most to do counts.
    """
    chunk = problem.seq // (2 * machine.size)
    k = problem.batch * 2 * chunk * problem.kv_heads * problem.head_dim * ELEMENT
    rows = problem.batch * chunk * problem.heads
    out = rows * problem.v_head_dim
    spent, sent = machine.gather(k)
    sent = {name: 2 * nbytes for name, nbytes in sent.items()}
    ends = []
    for rank in range(machine.size):
        clock = Clock(machine)
        for end in [clock.send(spent), clock.send(spent)]:
            clock.wait(end)
            clock.kernels(machine.copy(2 * k * machine.size))  # into the order of the sequence
        clock.kernels(machine.copy(2 * out * WIDE), machine.copy(2 * rows * WIDE))
        for place in (rank, 2 * machine.size - 1 - rank):
            square = machine.flash(problem, problem.heads, chunk, chunk, True)
            clock.kernels(square, *machine.merge(out, rows))
            if place:
                before = machine.flash(problem, problem.heads, chunk, place * chunk, False)
                clock.kernels(before, *machine.merge(out, rows))
        clock.kernels(machine.copy(2 * out * (ELEMENT + WIDE)))
        ends.append(clock.now)
    return Figures(max(ends), sent)


def degrees(machine: Machine, problem: Problem) -> list[int]:
    """Ranks, the innermost ones, that may split the heads: whole levels, and a part of one."""
    found, inside = [1], 1
    for _, size in reversed(machine.levels):
        found += [inside * n for n in range(2, size + 1) if size % n == 0]
        inside *= size
    return [n for n in found if problem.kv_heads % n == 0]


def designs(machine: Machine, problem: Problem) -> dict[tuple[str, int], Figures]:
    """The four designs, with every degree that divides: (name, ranks that split the heads)."""
    found = {("allgather-kv", 1): allgather(machine, problem)}
    for n in degrees(machine, problem):
        name = {1: "ring", machine.size: "ulysses"}.get(n, "unified")
        found[name, n] = unified(machine, problem, n)
    return found
