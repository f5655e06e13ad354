"""Machines of parts: topologies for a benchmark's rows, and the files that mercurygen ships.

    python benchmarks/machines.py [--write]

Composes every topology that `machines.toml` names and says which file of mercurygen/topologies
differs from it; writes them with --write.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mercurygen.cost import topology
from mercurygen.cost.topology import Topology
from mercurygen.errors import UserError

SHIPPED = Path(topology.__file__).parents[1] / "topologies"
GPU_KEYS = (*topology.GPU_NUMBERS, *topology.GPU_OPTIONAL)
LEVEL_KEYS = (*topology.LEVEL_NUMBERS, *topology.LEVEL_OPTIONAL)
KERNELS = {  # what calls an attention kernel so, the oldest first
    "cuDNN": ("cudnn",),
    "FA2": ("fa2", "flash_attn2", "flashattention-2"),
    "FA3": ("fa3", "flashattention-3"),
    "FA4": ("fa4", "flashattention-4"),
}
SAME_CORE = {"H100": ("H800", "H200"), "B200": ("GB200",)}
NO_MATTER = {  # words beside a GPU's name that say what its box has anyway
    *("nvlink", "nvswitch", "sxm", "sxm4", "sxm5", "80gb", "80", "dgx", "hgx", "infiniband", "ib"),
    *("infinity", "fabric", "nvl72", "hbm2e", "hbm3", "hbm3e", "multi", "node", "nodes"),
}

Part = dict[str, Any]
Placed = tuple[str, int, str, int]  # name, size, link, GPUs that share a port


@cache
def parts() -> dict[str, dict[str, Part]]:
    """The tables of machines.toml, with what each takes from another."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for kind in ("gpu", "link"):
        for name in found[kind]:
            found[kind][name] = _whole(found[kind], name)
    return found


def _whole(tables: dict[str, Part], name: str) -> Part:
    own = dict(tables[name])
    base = own.pop("like", None)
    return (_whole(tables, base) if base else {}) | own


def box_of(hardware: str) -> str:
    """The box that hardware's words mean: `8xA100-SXM4-80GB NVLink`.

    Raises:
        UserError: `unknown-gpu`.
    """
    words = re.sub(r"^\s*\d+\s*x\s*", "", hardware)
    for name, box in parts()["box"].items():
        if _plain(words) in map(_plain, box["names"]):
            return name
    known = ", ".join(name for box in parts()["box"].values() for name in box["names"][:1])
    raise UserError("unknown-gpu", f"no such GPU: {words}; known: {known}")


def _plain(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[\s_-]+", name.strip().lower())) - NO_MATTER


def kernel_of(text: str) -> str | None:
    """The attention kernel that some words name, the newest of several.

    Where they say what the baselines run, it is that.
    """
    text = text.lower()
    baselines = re.search(r"\bbaselines? ([\w-]+)", text)
    for said in ([baselines[1]] if baselines else []) + [text]:
        found = [kernel for kernel, words in KERNELS.items() if any(w in said for w in words)]
        if found:
            return found[-1]
    return None


def machine(hardware: str, gpus: int, nodes: int, kernel: str | None = None) -> Topology:
    """A machine with so many GPUs on so many nodes, whose attention runs this kernel.

    Raises:
        UserError: `unknown-gpu`, `unknown-kernel`, `box-too-small`.
    """
    name = box_of(hardware)
    box = parts()["box"][name]
    each, rest = divmod(gpus, nodes)
    most = 1
    for level in box["levels"]:
        most *= level[1]
    if rest or each > most:
        message = f"{gpus} GPUs on {nodes} nodes: a box of {name} has {most}"
        raise UserError("box-too-small", message)
    levels: list[Placed] = []
    for level, size, link, port in reversed(box["levels"]):
        here = min(size, each)
        if each % here:
            raise UserError("box-too-small", f"{each} GPUs do not fill the levels of {name} evenly")
        each //= here
        levels.insert(0, (level, here, link, port))
    if nodes > 1:
        level, link, port = box["across"]
        levels.insert(0, (level, nodes, link, min(port, gpus // nodes)))
    return topology.read("row.toml", text_of("row", hardware_words(hardware), name, levels, kernel))


def hardware_words(hardware: str) -> str:
    """Words that a topology's title may have."""
    return re.sub(r"[^A-Za-z0-9 ._-]+", " ", hardware).strip() or "a machine"


def text_of(
    name: str, about: str, box: str, levels: list[Placed], kernel: str | None = None
) -> str:
    """A topology file."""
    kind = parts()["box"][box]["gpu"]
    gpu = parts()["gpu"][kind] | _kernel(kernel, kind)
    lines = [f'name = "{name}"', f'about = "{about}"', "", "[gpu]", f'name = "{kind}"']
    lines += [_number(key, gpu[key]) for key in GPU_KEYS if key in gpu]
    for level, size, link, shared in levels:
        lines += ["", *_level(level, size, parts()["link"][link], shared)]
    return "\n".join(lines) + "\n"


def _kernel(kernel: str | None, kind: str) -> Part:
    """What a kernel changes of a GPU; torch's is FlashAttention-2."""
    if kernel in (None, "FA2"):
        return {}
    for like, numbers in parts()["kernel"].get(kernel, {}).items():
        if kind.startswith((like, *SAME_CORE.get(like, ()))):
            return numbers
    raise UserError("unknown-kernel", f"no figures of {kernel} on {kind}")


def _level(name: str, size: int, link: Part, shared: int) -> list[str]:
    numbers = link | {
        "size": [size, "1", "the shape that this file describes"],
        "port_gpus": [shared, "1", link["port"][2]],
        "port_bandwidth": link["port"],
    }
    head = [f'name = "{name}"', f'link = "{link["link"]}"', f'fabric = "{link["fabric"]}"']
    duplex = f'duplex = "{link.get("duplex", "full")}"'
    rows = [_number(key, numbers[key]) for key in LEVEL_KEYS if key in numbers]
    return ["[[level]]", *head, duplex, *rows]


def _number(key: str, entry: list[Any]) -> str:
    value, unit, source = entry
    return f'{key} = {{ value = {value}, unit = "{unit}", source = "{source}" }}'


def shipped() -> dict[str, str]:
    """The text of every topology that is shipped, by name."""
    found = {}
    for name, spec in parts()["topology"].items():
        box = parts()["box"][spec["box"]]
        levels: list[Placed] = [tuple(level) for level in box["levels"]]
        if "nodes" in spec:
            level, link, port = spec.get("across", box["across"])
            levels.insert(0, (level, spec["nodes"], link, port))
        if "racks" in spec:
            levels.insert(0, tuple(spec["racks"]))
        found[name] = text_of(name, spec["about"], spec["box"], levels)
    return found


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the files that differ")
    write, differ = parser.parse_args().write, 0
    for name, text in shipped().items():
        path = SHIPPED / f"{name}.toml"
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        differ += 1
        print(f"{'wrote' if write else 'differs:'} {path.name}")
        if write:
            path.write_text(text, encoding="utf-8")
    sys.exit(bool(differ) and not write)


if __name__ == "__main__":
    main()
