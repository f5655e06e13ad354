"""A topology for a terminal: a tree, every number with its source, and what looks wrong in it."""

from __future__ import annotations

from mercurygen.cost.topology import (
    GPU_NUMBERS,
    GPU_OPTIONAL,
    LEVEL_NUMBERS,
    LEVEL_OPTIONAL,
    Level,
    Rows,
    Topology,
)


def describe(topology: Topology, sources: Rows) -> str:
    """The topology as a tree, then the numbers of every level and of the GPU with their sources."""
    head = f"{topology.name}: {topology.about}"
    lines = [head, f"{topology.size} GPUs, {topology.digest}", "", *tree(topology), ""]
    widest = max(len(value) for _, value, _ in sources)
    for level in topology.levels:
        share = "full duplex" if level.duplex == "full" else "half duplex"
        lines.append(f"{level.name}={level.size}  {level.link}, {level.fabric}, {share}")
        lines += _table(sources, f"level.{level.name}.", widest)
    return "\n".join([*lines, "", topology.gpu.name, *_table(sources, "gpu.", widest)])


def tree(topology: Topology) -> list[str]:
    """Levels inside one another: how many, joined by which link, and what of it is shared."""
    lines = [topology.name]
    for depth, level in enumerate(topology.levels):
        margin = "   " * depth
        name = level.name if level.size == 1 else f"{level.name} 0 .. {level.name} {level.size - 1}"
        if depth + 1 == len(topology.levels):
            name += f"  {topology.gpu.name}"
        lines += [f"{margin}|  {_wire(level)}", f"{margin}+- {name}"]
    return lines


def _wire(level: Level) -> str:
    rate = f"{level.bandwidth / 1e9:g} GB/s a GPU"
    if level.duplex == "half":
        rate += ", both directions together"
    if level.port_gpus > 1:
        rate += f", {level.port_gpus} GPUs share a port of {level.port_bandwidth / 1e9:g} GB/s"
    return f"{level.link} ({level.fabric}): {rate}"


def contradictions(topology: Topology) -> list[str]:
    """What a file says that is legal but rarely meant, one line each, with the key's name."""
    found = []
    levels = topology.levels
    for number, (outer, inner) in enumerate(zip(levels, levels[1:], strict=False), 1):
        if outer.bandwidth > inner.bandwidth:
            found.append(
                f"`bandwidth` of [[level]] {number} ({outer.name}, {outer.bandwidth / 1e9:g} GB/s) "
                f"is more than that of the level inside it ({inner.name}, "
                f"{inner.bandwidth / 1e9:g} GB/s): levels go from the slowest inwards"
            )
        if outer.latency < inner.latency:
            found.append(
                f"`latency` of [[level]] {number} ({outer.name}, {outer.latency * 1e6:g} us) is "
                f"less than that of the level inside it ({inner.name}, "
                f"{inner.latency * 1e6:g} us): levels go from the slowest inwards"
            )
    return found


def _table(sources: Rows, prefix: str, widest: int) -> list[str]:
    every = (*GPU_NUMBERS, *GPU_OPTIONAL, *LEVEL_NUMBERS, *LEVEL_OPTIONAL)
    width = max(map(len, every))
    return [
        f"  {key.removeprefix(prefix):{width}}  {value:>{widest}}  {source}"
        for key, value, source in sources
        if key.startswith(prefix)
    ]
