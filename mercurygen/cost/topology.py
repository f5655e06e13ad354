"""Machines as the cost model sees them: levels of links, outermost first, and one kind of GPU.

Every number of a topology file names its source. Base units throughout: bytes, seconds, FLOP.
"""

from __future__ import annotations

import hashlib
import keyword
import math
import os
from dataclasses import dataclass
from typing import Any

from mercurygen.cost import topology_file as file
from mercurygen.cost.topology_file import Quantity, Section
from mercurygen.errors import UserError, closest, shorten

MAX_LEVELS = 6
MAX_GPUS = 1_000_000
FABRICS = ("switch", "full-mesh", "ring", "pcie-tree")
DUPLEX = ("full", "half")

_BYTES = {"GiB": (2**30, 1), "MiB": (2**20, 1), "TiB": (2**40, 1), "GB": (10**9, 1)}
_RATE = {"GB/s": (10**9, 1), "MB/s": (10**6, 1), "TB/s": (10**12, 1), "Gb/s": (10**9, 8)}
_FLOPS = {"TFLOP/s": (10**12, 1), "GFLOP/s": (10**9, 1), "PFLOP/s": (10**15, 1)}
_TIME = {"us": (1, 10**6), "ns": (1, 10**9), "ms": (1, 10**3), "s": (1, 1)}
_PLAIN = {"1": (1, 1)}

_bandwidth = Quantity(_RATE, 1e3, 1e15, "above 0, from 1e3 to 1e15 bytes/s")
_flops = Quantity(_FLOPS, 1e6, 1e18, "above 0, from 1e6 to 1e18 FLOP/s")
_latency = Quantity(_TIME, 0.0, 1.0, "above 0 and at most 1 s")
_fraction = Quantity(_PLAIN, 0.01, 1.0, "from 0.01 to 1")
_attention_fraction = Quantity(_PLAIN, 0.001, 1.0, "from 0.001 to 1")
_count = Quantity(_PLAIN, 1, 65536, "a whole number from 1 to 65536", whole=True)
_rate = Quantity({"1/s": (1, 1)}, 1e6, 1e18, "above 0, from 1e6 to 1e18 a second")

GPU_NUMBERS = {
    "memory": Quantity(_BYTES, 2**20, 100 * 2**40, "from 1 MiB to 100 TiB", whole=True),
    "hbm_bandwidth": _bandwidth,
    "matmul_flops_16": _flops,
    "matmul_flops_32": _flops,
    "matmul_flops_64": _flops,
    "sms": _count,
    "launch_latency": _latency,
    "attention_efficiency": _attention_fraction,
}
GPU_OPTIONAL = {
    "gradient_efficiency": _attention_fraction,
    "softmax_rate": _rate,
    "block_start": _count,
    "gradient_start": _count,
    "causal_tail": Quantity(_PLAIN, 0.01, 1.0, "from 0.01 to 1"),
    "matmul_efficiency": _fraction,
    "hbm_efficiency": _fraction,
    "host_launch": _latency,
    "host_transfer": _latency,
}
LEVEL_NUMBERS = {
    "size": _count,
    "bandwidth": _bandwidth,
    "efficiency": _fraction,
    "latency": _latency,
    "port_gpus": _count,
    "port_bandwidth": _bandwidth,
}
LEVEL_OPTIONAL = {
    "sms": _count,
    "base_latency": _latency,
    "small_latency": _latency,
    "swap_efficiency": _fraction,
}

Rows = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; all of a topology are alike.

    Attributes:
        name: as people call it.
        memory_bytes: nominal memory, bytes.
        hbm_bandwidth: nominal memory bandwidth, bytes/s.
        matmul_flops_16: dense peak of a bfloat16 or float16 matmul, FLOP/s.
        matmul_flops_32: dense peak of a float32 matmul (no TF32), FLOP/s.
        matmul_flops_64: dense peak of a float64 matmul, FLOP/s.
        sms: number of streaming multiprocessors.
        launch_latency: least time of any kernel, s.
        attention_efficiency: fraction of matmul_flops_16 at which the matrix products of torch's
            flash attention run.
        gradient_efficiency: the same of those of its gradient; by default 0.8 of that.
        softmax_rate: scores a second that its softmax does beside the products (the part that they
            do not hide); by default 3e10 for each SM.
        block_start: what a thread block of that attention does before and after its loop over keys,
            in keys; by default 100.
        gradient_start: the same of its gradient, in queries; by default 258.
        causal_tail: the part of its longest thread block that a causal one waits for in the end; by
            default 1: the longest blocks are launched last.
        matmul_efficiency: fraction of a peak at which any other matrix product runs; by default
            0.7.
        hbm_efficiency: fraction of hbm_bandwidth that element-wise kernels reach; by default 0.9.
        host_launch: time of the host for one kernel, s; by default launch_latency.
        host_transfer: time of the host for one message of a batch, or one collective, s; by
            default launch_latency.
    """

    name: str
    memory_bytes: int
    hbm_bandwidth: float
    matmul_flops_16: float
    matmul_flops_32: float
    matmul_flops_64: float
    sms: int
    launch_latency: float
    attention_efficiency: float
    gradient_efficiency: float
    softmax_rate: float
    block_start: int
    gradient_start: int
    causal_tail: float
    matmul_efficiency: float
    hbm_efficiency: float
    host_launch: float
    host_transfer: float


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links: `size` groups of what is inside it, joined by one fabric.

    Attributes:
        name: an identifier; schedules call mesh dimensions after it.
        size: number of groups (of GPUs on the innermost level).
        link: what people call the link, plain words.
        fabric: "switch", "full-mesh", "ring" or "pcie-tree".
        bandwidth: nominal, bytes/s of one GPU in one direction.
        efficiency: fraction of `bandwidth` and `port_bandwidth` that large transfers reach.
        latency: of one transfer, s.
        port_gpus: how many GPUs share one port to this level; 1: none is shared.
        port_bandwidth: nominal, bytes/s of that port in one direction.
        duplex: "full", or "half" if the two directions share the bandwidth.
        sms: streaming multiprocessors that a rank's transfers keep busy; by default none.
        base_latency: of one operation, whatever its number of steps, s; by default none.
        small_latency: of one transfer by a protocol for little data, at half the bandwidth (NCCL's
            LL), s; by default there is none.
        swap_efficiency: fraction of that bandwidth that is left when a GPU sends to several others
            at a time, as in an all-to-all of more than two; by default all of it.
        lost_port: whether the first port of the first group is gone, and the GPUs behind it use the
            next one: of no file, but of a scenario (`mercurygen.cost.scenario`).
    """

    name: str
    size: int
    link: str
    fabric: str
    bandwidth: float
    efficiency: float
    latency: float
    port_gpus: int
    port_bandwidth: float
    duplex: str
    sms: int = 0
    base_latency: float = 0.0
    small_latency: float | None = None
    swap_efficiency: float = 1.0
    lost_port: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine.

    Attributes:
        name: what `--topology` takes and schedules name.
        about: one line of plain words.
        levels: outermost, which is the slowest, first.
        gpu: the kind of GPU.
        digest: "sha256:" and 16 hex digits of the file's text, line ends normalised.
    """

    name: str
    about: str
    levels: tuple[Level, ...]
    gpu: Gpu
    digest: str

    @property
    def size(self) -> int:
        """Number of GPUs."""
        return math.prod(level.size for level in self.levels)


def shipped() -> tuple[str, ...]:
    """Names of the topologies that come with mercurygen, sorted."""
    names = (entry.name for entry in _shipped_folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load(name_or_path: str) -> Topology:
    """A shipped topology, or one from a file.

    Args:
        name_or_path: a name of `shipped()`, or a path: it ends in .toml or has a separator.

    Raises:
        UserError: there is none of that name, or the file is wrong.
    """
    return _read(name_or_path)[0]


def read(name: str, text: str) -> Topology:
    """A topology from the text of a file.

    Args:
        name: what errors call it.
        text: in the form of a topology file.
    """
    return _topology(name, text)[0]


def sources(name_or_path: str) -> Rows:
    """Every number of a topology: (key, value with its unit as written, source)."""
    return _read(name_or_path)[1]


def _shipped_folder() -> Any:
    from importlib.resources import files  # here: its import takes longer than reading a file

    return files("mercurygen").joinpath("topologies")


def _read(name_or_path: str) -> tuple[Topology, Rows]:
    separators = [separator for separator in (os.sep, os.altsep, "/") if separator]
    if name_or_path.endswith(".toml") or any(one in name_or_path for one in separators):
        return _topology(name_or_path, file.read_text(name_or_path))
    known = shipped()
    if name_or_path not in known:
        message = f"no topology {shorten(name_or_path)!r}"
        own = "a file of your own: a path that ends in .toml"
        help = f"{closest(name_or_path, known)}; {own}"
        raise UserError("unknown-topology", message, help=help)
    entry = f"{name_or_path}.toml"
    return _topology(entry, file.decode(entry, _shipped_folder().joinpath(entry).read_bytes()))


def _topology(path: str, text: str) -> tuple[Topology, Rows]:
    top = file.parse(path, text)
    path = top.file  # fit to print
    top.only(("name", "about", "gpu", "level"))
    name = top.words("name", file.NAME, 41, "a letter, then letters, digits, `_` and `-`")
    about = top.words("about", file.PLAIN, 200, "plain ASCII, no quotes, backslashes or #")
    tables = _level_tables(top)
    gpu_table = top.table.get("gpu", {})
    if not isinstance(gpu_table, dict) or not gpu_table:
        raise top.error("missing", "gpu", "the table `gpu` is missing", "write [gpu]")
    gpu, rows = _gpu(Section(path, text, "gpu", 0, gpu_table))
    levels: list[Level] = []
    for index, table in enumerate(tables):
        level, more = _level(Section(path, text, "level", index, table), levels)
        levels.append(level)
        rows += more
    for index, level in enumerate(levels):
        _check_level(Section(path, text, "level", index, tables[index]), level, levels, index)
    digest = "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    return Topology(name, about, tuple(levels), gpu, digest), tuple(rows)


def _level_tables(top: Section) -> list[dict[str, object]]:
    tables = top.table.get("level", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise top.error("type", "level", "`level` is not an array of tables", "write [[level]]")
    if not 1 <= len(tables) <= MAX_LEVELS:
        message = f"{len(tables)} tables `level`"
        help = f"from 1 to {MAX_LEVELS} tables [[level]], outermost first"
        raise top.error("levels", "level", message, help)
    return tables


def _gpu(section: Section) -> tuple[Gpu, list[tuple[str, str, str]]]:
    section.only(("name", *GPU_NUMBERS, *GPU_OPTIONAL))
    name = section.words("name", file.PLAIN, 60, "plain ASCII, no quotes, backslashes or #")
    numbers = {key: section.number(key, quantity) for key, quantity in GPU_NUMBERS.items()}
    defaults = {
        "gradient_efficiency": 0.8 * numbers["attention_efficiency"],
        "softmax_rate": 3e10 * numbers["sms"],
        "block_start": 100,
        "gradient_start": 258,
        "causal_tail": 1.0,
        "matmul_efficiency": 0.7,
        "hbm_efficiency": 0.9,
        "host_launch": numbers["launch_latency"],
        "host_transfer": numbers["launch_latency"],
    }
    given = {key: section.number(key, GPU_OPTIONAL[key]) for key in section.given(GPU_OPTIONAL)}
    rows = [(f"gpu.{key}", *section.row(key)) for key in (*GPU_NUMBERS, *given)]
    memory = numbers.pop("memory")
    return Gpu(name, memory_bytes=memory, **numbers, **defaults | given), rows  # type: ignore[arg-type]


def _level(section: Section, before: list[Level]) -> tuple[Level, list[tuple[str, str, str]]]:
    section.only(("name", "link", "fabric", "duplex", *LEVEL_NUMBERS, *LEVEL_OPTIONAL))
    name = section.words("name", file.NAME, 20, "a Python identifier")
    if not name.isidentifier() or keyword.iskeyword(name):
        message = f"{section.label('name')} is {name!r}, not a Python identifier"
        near = name.replace("-", "_") + "_" * keyword.iskeyword(name)
        raise section.error("name", "name", message, f"for instance `{near}`")
    if name in (level.name for level in before):
        message = f"{section.label('name')} is {name!r}, and so is an earlier one"
        raise section.error("duplicate", "name", message, f"for instance `{name[:19]}2`")
    words = {
        "link": section.words("link", file.LINK, 60, "words of letters, digits and . _ / + -"),
        "fabric": section.choice("fabric", FABRICS),
        "duplex": section.choice("duplex", DUPLEX),
    }
    known = LEVEL_NUMBERS | {key: LEVEL_OPTIONAL[key] for key in section.given(LEVEL_OPTIONAL)}
    numbers = {key: section.number(key, quantity) for key, quantity in known.items()}
    rows = [(f"level.{name}.{key}", *section.row(key)) for key in known]
    return Level(name=name, **words, **numbers), rows  # type: ignore[arg-type]


def _check_level(section: Section, level: Level, levels: list[Level], index: int) -> None:
    """What a level's numbers must be to one another and to those of the levels inside it."""
    inner = math.prod(one.size for one in levels[index + 1 :])
    if level.size * inner > MAX_GPUS:
        message = f"{section.label('size')} is {level.size}, which makes {level.size * inner} GPUs"
        raise section.error("size", "size", message, f"at most {MAX_GPUS} GPUs in all")
    if inner % level.port_gpus:
        message = f"{section.label('port_gpus')} is {level.port_gpus}, of {inner} GPUs inside"
        nearest = min(
            (count for count in range(1, min(inner, level.port_gpus) + 1) if inner % count == 0),
            key=lambda count: abs(count - level.port_gpus),
        )
        raise section.error("port", "port_gpus", message, f"must divide {inner}: {nearest}")
    if level.port_bandwidth < level.bandwidth:
        message = f"{section.label('port_bandwidth')} is less than `bandwidth`"
        help = "a GPU cannot send faster than its port: lower `bandwidth` to it"
        raise section.error("port", "port_bandwidth", message, help)
    most = level.port_gpus * level.bandwidth
    if level.port_bandwidth > most * (1 + 1e-9):
        message = (
            f"{section.label('port_bandwidth')} is more than its port_gpus={level.port_gpus} of "
            f"{level.bandwidth / 1e9:g} GB/s can use"
        )
        help = f"at most {most / 1e9:g} GB/s, or more GPUs for the port"
        raise section.error("port", "port_bandwidth", message, help)
