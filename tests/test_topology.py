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
from mercurygen.cost.topology_words import contradictions, describe, tree
from mercurygen.errors import UserError

RANKED = ("mercury-h100x32", "mercury-a100x32", "mercury-l4x32")  # the paper's test beds
GOOD = (Path(__file__).parent / "data" / "two_boxes.toml").read_text(encoding="utf-8")
FIRST_LEVEL = GOOD.index("[[level]]")
SECOND_LEVEL = GOOD.rindex("[[level]]")


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "machine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_shipped_names() -> None:
    wanted = {*("a100x8", "a100x16", "a100x32", "a800x8", "a100-pcie-x8", "mi300x8"), *RANKED}
    wanted |= {"h100x8", "h100x16", "h100x64", "h100-pcie-x8", "h800x8", "h200x8", "l20x8", "l40x8"}
    wanted |= {"b200x8", "b200x16", "b200x64", "gb200x72", "gb200x144", "racks-h100x128"}
    wanted |= {"h100x1024", "pods-h100x4096"}
    assert topology.shipped() == tuple(sorted(wanted))


@pytest.mark.parametrize("name", topology.shipped())
def test_shipped_file(name: str) -> None:
    machine = topology.load(name)
    assert machine.name == name
    assert machine.size == int(name.rpartition("x")[2])
    rates = [level.bandwidth for level in machine.levels]
    assert rates == sorted(rates), "outermost, which is the slowest, first"
    assert all(level.port_gpus in (1, 4, 8, 32) for level in machine.levels)
    assert contradictions(machine) == []
    gpu = machine.gpu
    assert gpu.matmul_flops_16 > gpu.matmul_flops_32 >= gpu.matmul_flops_64


@pytest.mark.parametrize("name", topology.shipped())
def test_every_number_has_a_source_and_is_described(name: str) -> None:
    machine, rows = topology.load(name), topology.sources(name)
    found = {key for key, _, _ in rows}
    assert len(found) == len(rows)
    wanted = {f"gpu.{key}" for key in topology.GPU_NUMBERS}
    for level in machine.levels:
        wanted |= {f"level.{level.name}.{key}" for key in topology.LEVEL_NUMBERS}
    assert wanted <= found
    text = describe(machine, rows)
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


def test_attention_of_h100_is_what_its_sources_say() -> None:
    """FlashAttention-2 in the charts of FlashAttention-3's paper, 2048 blocks in 16 waves."""
    gpu = topology.load("h100x8").gpu
    for head_dim, measured in ((64, 324e12), (128, 370e12)):
        products = 4 * head_dim / (gpu.matmul_flops_16 * gpu.attention_efficiency)
        per_score = (products + 1 / gpu.softmax_rate) * 16 / (2048 / gpu.sms)
        assert math.isclose(4 * head_dim / per_score, measured, rel_tol=0.01)


def test_efficiencies_are_what_their_sources_say() -> None:
    node, nvlink = topology.load("a100x16").levels
    assert math.isclose(nvlink.bandwidth * nvlink.efficiency, 12 * 20e9)  # NCCL: links x GB/s
    assert math.isclose(node.bandwidth * node.efficiency, 2 * 12e9)  # 12 GB/s for 100 Gb
    nvlink = topology.load("h100x8").levels[0]
    assert math.isclose(nvlink.bandwidth * nvlink.efficiency, 16 * 20e9, rel_tol=1e-3)
    upi, pcie = topology.load("l20x8").levels
    assert math.isclose(upi.port_bandwidth * upi.efficiency, 7.9e9, rel_tol=2e-3)
    assert math.isclose(pcie.bandwidth * pcie.efficiency, 24e9)


def test_tree_of_three_levels() -> None:
    """Racks, nodes and GPUs, with the port that a rack's GPUs share."""
    assert tree(topology.load("racks-h100x128")) == [
        "racks-h100x128",
        "|  InfiniBand (switch): 50 GB/s a GPU, 32 GPUs share a port of 800 GB/s",
        "+- rack 0 .. rack 3",
        "   |  InfiniBand (switch): 50 GB/s a GPU",
        "   +- node 0 .. node 3",
        "      |  NVLink (switch): 450 GB/s a GPU",
        "      +- gpu 0 .. gpu 7  H100-SXM5-80GB",
    ]


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    """A file of before has neither a softmax rate nor a time of the host."""
    machine = topology.load(write(tmp_path, GOOD))
    gpu, level = machine.gpu, machine.levels[0]
    assert math.isclose(gpu.gradient_efficiency, 0.8 * gpu.attention_efficiency)
    assert (gpu.softmax_rate, gpu.host_transfer) == (3e10 * gpu.sms, gpu.launch_latency)
    assert (level.sms, level.base_latency, level.swap_efficiency) == (0, 0.0, 1.0)
    text = GOOD.replace(
        "[[level]]", 'softmax_rate = { value = 2e12, unit = "1/s", source = "x" }', 1
    )
    given = topology.load(write(tmp_path, text.replace('name = "box"', '[[level]]\nname = "box"')))
    assert given.gpu.softmax_rate == 2e12


def test_levels_that_rise_outwards_are_named(tmp_path: Path) -> None:
    """Legal, but rarely meant: the key and both levels are said."""
    text = GOOD.replace('value = 100, unit = "Gb/s"', 'value = 500, unit = "Gb/s"')
    (line,) = contradictions(topology.load(write(tmp_path, text)))
    assert line.startswith("`bandwidth` of [[level]] 1 (box, 62.5 GB/s) is more than")
    text = GOOD.replace('value = 20000, unit = "ns"', 'value = 2, unit = "us"')
    (line,) = contradictions(topology.load(write(tmp_path, text)))
    assert line.startswith("`latency` of [[level]] 1 (box, 2 us) is less than")


def test_a_port_that_its_gpus_cannot_fill(tmp_path: Path) -> None:
    """More NICs than GPUs can use."""
    head, tail = GOOD.split("port_bandwidth = { value = 100", 1)
    with pytest.raises(UserError, match="topology-port") as caught:
        topology.load(write(tmp_path, f"{head}port_bandwidth = {{ value = 500{tail}"))
    assert "`port_bandwidth` of [[level]] 1 is more than its port_gpus=4" in caught.value.message


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
