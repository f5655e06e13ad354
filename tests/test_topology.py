"""Topology files: what is shipped, what is read, and what a hostile file meets."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mercurygen.cost import topology

GOOD = (Path(__file__).parent / "data" / "two_boxes.toml").read_text(encoding="utf-8")
FIRST_LEVEL = GOOD.index("[[level]]")
SECOND_LEVEL = GOOD.rindex("[[level]]")


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "machine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_shipped_names() -> None:
    expected = ("a100x16", "a100x32", "a100x8", "h100x16", "h100x8", "l20x8", "l40x8")
    assert topology.shipped() == expected


@pytest.mark.parametrize("name", topology.shipped())
def test_shipped_file(name: str) -> None:
    machine = topology.load(name)
    assert machine.name == name
    assert machine.size == int(name.partition("x")[2])
    rates = [level.bandwidth for level in machine.levels]
    assert rates == sorted(rates), "outermost, which is the slowest, first"
    assert all(level.port_gpus == 1 or level.port_gpus == 4 for level in machine.levels)
    gpu = machine.gpu
    assert gpu.matmul_flops_16 > gpu.matmul_flops_32 >= gpu.matmul_flops_64


@pytest.mark.parametrize("name", topology.shipped())
def test_every_number_has_a_source_and_is_described(name: str) -> None:
    machine, rows = topology.load(name), topology.sources(name)
    assert len(rows) == len(topology.GPU_NUMBERS) + len(machine.levels) * len(
        topology.LEVEL_NUMBERS
    )
    text = topology.describe(machine, rows)
    for key, value, source in rows:
        assert key.rpartition(".")[2] in text and value in text and source in text
    assert machine.digest in text and machine.gpu.name in text


def test_header_values_of_the_design() -> None:
    node, gpu = topology.load("a100x16").levels
    assert (node.name, node.size, node.link, node.bandwidth) == ("node", 2, "InfiniBand", 25e9)
    assert (gpu.name, gpu.size, gpu.link, gpu.bandwidth) == ("gpu", 8, "NVLink", 300e9)
    assert [level.name for level in topology.load("a100x8").levels] == ["gpu"]
    assert [level.bandwidth for level in topology.load("h100x16").levels] == [50e9, 450e9]


def test_the_two_pcie_boxes_have_one_structure() -> None:
    l20, l40 = topology.load("l20x8"), topology.load("l40x8")
    assert l20.levels == l40.levels
    assert [(level.name, level.size) for level in l20.levels] == [("switch", 2), ("gpu", 4)]
    assert l20.gpu != l40.gpu


def test_attention_efficiency_of_h100_is_the_published_row() -> None:
    iterations, tokens, heads, head_dim = 591.5, 8192, 32, 128
    causal_flop = 4 * tokens**2 * heads * head_dim / 2
    gpu = topology.load("h100x8").gpu
    measured = iterations * causal_flop / gpu.matmul_flops_16
    assert math.isclose(gpu.attention_efficiency, measured, rel_tol=2e-3)


def test_efficiencies_are_what_their_sources_say() -> None:
    node, nvlink = topology.load("a100x16").levels
    assert math.isclose(nvlink.bandwidth * nvlink.efficiency, 12 * 20e9)  # NCCL: links x GB/s
    assert math.isclose(node.bandwidth * node.efficiency, 2 * 12e9)  # 12 GB/s for 100 Gb
    nvlink = topology.load("h100x8").levels[0]
    assert math.isclose(nvlink.bandwidth * nvlink.efficiency, 16 * 20e9, rel_tol=1e-3)
    upi, pcie = topology.load("l20x8").levels
    assert math.isclose(upi.port_bandwidth * upi.efficiency, 10e9, rel_tol=2e-3)
    assert math.isclose(pcie.bandwidth * pcie.efficiency, 24e9)


def test_units(tmp_path: Path) -> None:
    machine = topology.load(write(tmp_path, GOOD))
    gpu, (box, inner) = machine.gpu, machine.levels
    assert gpu.memory_bytes == 25_769_803_776 and isinstance(gpu.memory_bytes, int)
    assert gpu.hbm_bandwidth == 1_500_000_000_000
    assert gpu.matmul_flops_16 == 10**14
    assert gpu.matmul_flops_32 == 20_500_000_000_000
    assert gpu.matmul_flops_64 == 5 * 10**11
    assert gpu.launch_latency == 7e-6
    assert (gpu.sms, gpu.attention_efficiency) == (80, 0.5)
    assert box.bandwidth == box.port_bandwidth == 12_500_000_000  # 100 Gbit/s
    assert math.isclose(box.latency, 2e-5) and math.isclose(inner.latency, 5e-6)
    assert inner.port_bandwidth == inner.bandwidth == 32_000_000_000
    assert isinstance(inner.size, int) and inner.duplex == "half"
    assert machine.size == 8


def test_frozen_and_slotted() -> None:
    machine = topology.load("a100x8")
    for thing in (machine, machine.gpu, machine.levels[0]):
        assert not hasattr(thing, "__dict__")
        with pytest.raises(dataclasses.FrozenInstanceError):
            thing.name = "other"
    assert hash(machine) == hash(topology.load("a100x8"))


def test_digest_ignores_line_ends_only(tmp_path: Path) -> None:
    digest = topology.load(write(tmp_path, GOOD)).digest
    assert digest == "sha256:56b4ed8f9708c8d6"
    assert topology.load(write(tmp_path, GOOD.replace("\n", "\r\n"))).digest == digest
    assert topology.load(write(tmp_path, GOOD + "# more\n")).digest != digest


def test_levels_of_one_and_six_levels_are_fine(tmp_path: Path) -> None:
    inner = GOOD[SECOND_LEVEL:].replace("value = 4,", "value = 1,")
    levels = "".join(inner.replace('"gpu"', f'"level{i}"') for i in range(6))
    machine = topology.load(write(tmp_path, GOOD[:FIRST_LEVEL] + levels))
    assert (machine.size, len(machine.levels)) == (1, 6)


def test_load_is_fast_and_needs_no_torch() -> None:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        topology.load("a100x16")
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3
    check = (
        "import sys, mercurygen.cost.topology as t; t.load('l20x8'); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(topology.__file__).parents[2],
    )
    assert done.stdout.strip() == "False"
