"""The benchmark of the cost model: its figures, its machines, what it refuses, and report B59."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import cost_model
import machines
import named
import published
import pytest

from mercurygen.cost import validated
from mercurygen.cost.links import Network, regime
from mercurygen.cost.simulate import simulate
from mercurygen.cost.topology import Topology
from mercurygen.errors import UserError
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.operators import load
from mercurygen.search.search import search

ROOT = Path(__file__).resolve().parents[1]

DATA = cost_model.DATA


@cache
def predicted() -> tuple[list, list]:
    """Every row of the published measurements."""
    return cost_model.predict(published.read(DATA))


def written(tmp_path: Path, **changes: str) -> Path:
    """The first row with a ring, changed."""
    with DATA.open(encoding="utf-8", newline="") as stream:
        table = csv.DictReader(stream)
        row = next(row for row in table if row["design"] == "ring")
        names = table.fieldnames
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerow(row | changes)
    return path


# --- what is claimed ----------------------------------------------------------------------------


def test_errors_where_the_model_is_validated() -> None:
    """README claims a median error below 10 % there; nothing in the machines is set from a row."""
    done, _ = predicted()
    inside = [
        one
        for one in done
        if not one.row.documents
        and not validated.outside(one.row.problem, machine_of(one.row), one.row.gpus)
    ]
    figures = cost_model.summary(inside)
    assert figures["rows"] > 90
    assert figures["median_error"] < 0.10 and figures["tau"] > 0.8
    assert figures["mean_regret"] < 0.03


def machine_of(row: published.Row) -> str:
    """Name of the GPU of a row."""
    return machines.machine(row.hardware, row.gpus, row.nodes).gpu.name


def test_every_row_is_predicted_or_says_why() -> None:
    """As many as have a design; only documents and a run out of memory are left out."""
    done, skipped = predicted()
    with DATA.open(encoding="utf-8", newline="") as stream:
        rows = sum(bool(row["design"]) for row in csv.DictReader(stream))
    assert len(done) + len(skipped) == rows
    assert {row.reason for row in skipped} == {
        "packed documents, whose lengths are not given",
        "measured: out of memory",
    }


def test_one_gpu_is_predicted_from_other_sources() -> None:
    """H800, 8192 tokens: from the charts of another paper on another box."""
    done, _ = predicted()
    alone = [one for one in done if one.row.gpus == 1 and not one.row.documents]
    assert len(alone) == 2 and all(abs(one.error) < 0.03 for one in alone)


def test_documents_leave_a_part_of_the_scores() -> None:
    """By their ends, of several lists in turn the mean."""
    assert published.live_of("lists [0,8192], [0,4096,8192] (x world)") == (1 + 0.5) / 2
    assert published.live_of("no lists") is None
    assert published.live_of("[0,5,3]") is None


def test_ranking_counts_pairs() -> None:
    """Three configurations, two of them in the wrong order: tau is 1/3, the loss is the best's."""
    done, _ = predicted()
    base = next(one for one in done if one.row.design == "ring").row
    times = ((8, 1.0, 3.0), (4, 2.0, 2.5), (2, 3.0, 4.0))
    rows = []
    for ring, measured, model in times:
        fields = {name: getattr(base, name) for name in base.__slots__}
        row = published.Row(**fields | {"ring": ring, "seconds": measured})
        rows.append(cost_model.Predicted(row, model))
    figures = cost_model.summary(rows)
    assert figures["tau"] == pytest.approx(1 / 3)
    assert (figures["pairs"], figures["best_picked"]) == (3, 0)
    assert figures["mean_regret"] == pytest.approx(1.0)
    assert figures["median_error"] == pytest.approx(1 / 3)


# --- other machines and other rows --------------------------------------------------------------

OTHERS = [
    ("8xA100 PCIe", 8, 1),
    ("16xA100 PCIe", 16, 2),
    ("8xB200", 8, 1),
    ("16xB200 NVLink", 16, 2),
    ("64xH100", 64, 8),
    ("8xH200", 8, 1),
    ("72xGB200 NVL72", 72, 1),
    ("8xMI300X", 8, 1),
    ("4xL40", 4, 1),
    ("32xL4", 32, 4),
    ("16xA800 NVLink", 16, 2),
    ("2xH20", 2, 1),
    ("8xH100 HBM3 SXM5", 8, 1),
    ("8xA100-SXM4-40GB NVLink", 8, 1),
]


@pytest.mark.parametrize("hardware, gpus, nodes", OTHERS)
def test_other_machines(hardware: str, gpus: int, nodes: int, tmp_path: Path) -> None:
    """GPUs and numbers of nodes that no published row has."""
    path = written(
        tmp_path,
        hardware=hardware,
        n_gpus=str(gpus),
        n_nodes=str(nodes),
        ring=str(gpus),
        seq_total=str(2 * gpus * 4096),
        order="zigzag",
    )
    (one,), skipped = cost_model.predict(published.read(path))
    assert not skipped and 1e-4 < one.seconds < 10


def test_kernels_by_their_names() -> None:
    """What the baselines run counts, then the newest that is named."""
    assert machines.kernel_of("flash_attn2 single GPU") == "FA2"
    assert machines.kernel_of("baselines cuDNN; magi FFA_FA4") == "cuDNN"
    assert machines.kernel_of("mask=full; baselines FA3; magi FFA") == "FA3"
    assert machines.kernel_of("ring (basic)") is None
    quick = machines.machine("B200", 8, 1, "FA4").gpu
    assert quick.attention_efficiency > machines.machine("B200", 8, 1).gpu.attention_efficiency
    with pytest.raises(UserError, match="no figures of FA4 on A100"):
        machines.machine("A100", 8, 1, "FA4")


def test_unknown_hardware_is_said_with_what_is_known(tmp_path: Path) -> None:
    """A row of it is not guessed at."""
    done, (row,) = cost_model.predict(published.read(written(tmp_path, hardware="8xP100 PCIe")))
    assert not done
    assert row.reason.startswith("no such GPU: P100 PCIe; known: A100, ")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"unit": "furlongs"}, "unit 'furlongs'"),
        ({"metric": "memory"}, "metric 'memory'"),
        ({"unit": "ms"}, "throughput in ms"),
        ({"value": "fast"}, "value 'fast' is no number above 0"),
        ({"value": "nan"}, "value 'nan' is no number above 0"),
        ({"n_gpus": "8.0"}, "n_gpus is '8.0', not a whole number above 0"),
        ({"causal": "yes"}, "causal 'yes'"),
        ({"dtype": "fp8"}, "dtype 'fp8'"),
        ({"pass(fwd/fwd_bwd)": "both"}, "pass(fwd/fwd_bwd) 'both'"),
        ({"ring": "4"}, "ulysses 1 x ring 4 is not n_gpus 8"),
        ({"order": "random"}, "order 'random'"),
    ],
    ids=str,
)
def test_rows_are_read_strictly(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    """What a column cannot have is refused with the line, never read as something else."""
    with pytest.raises(UserError, match="published-value") as caught:
        list(published.read(written(tmp_path, **changes)))
    assert "rows.csv:2" in caught.value.message and said in caught.value.message


@pytest.mark.parametrize(
    "unit, metric, value, seconds",
    [
        ("iter/s", "throughput", "40", 0.025),
        ("ms", "time", "25", 0.025),
        ("us", "latency", "25000", 0.025),
        ("tokens/s", "throughput", str(65536 * 40), 0.025),
        ("TFLOPs/s/GPU", "throughput", "100", 4 * 65536**2 * 4096 / 2 / 8e14),
        ("TFLOP/s", "throughput", "800", 4 * 65536**2 * 4096 / 2 / 8e14),
    ],
)
def test_units(unit: str, metric: str, value: str, seconds: float, tmp_path: Path) -> None:
    """Times and rates, of all GPUs or of each."""
    path = written(tmp_path, unit=unit, metric=metric, value=value)
    (row,) = published.read(path)
    assert row.seconds == pytest.approx(seconds)


def test_the_command_prints_json(tmp_path: Path) -> None:
    """Of a file of one's own; and a line for a person where it cannot be read."""
    command = [sys.executable, str(ROOT / "benchmarks" / "cost_model.py")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    path = written(tmp_path)
    ran = subprocess.run(
        [*command, str(path), "--json"], capture_output=True, text=True, env=environment
    )
    found = json.loads(ran.stdout)
    assert found["overall"]["rows"] == len(found["rows"]) == 1
    path.write_text("source,hardware\nx,y\n", encoding="utf-8")
    ran = subprocess.run([*command, str(path)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 1 and "has no column n_gpus" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_shipped_topologies_are_composed_of_the_parts() -> None:
    """Every number has one home; `python benchmarks/machines.py --write` writes the files."""
    for name, text in machines.shipped().items():
        assert (machines.SHIPPED / f"{name}.toml").read_text(encoding="utf-8") == text
    assert {path.stem for path in machines.SHIPPED.glob("*.toml")} == set(machines.shipped())


NVLS_RATE = 16 * 20e9 * 0.85 * 15 / 16 * 2 * 8 / 14  # NCCL src/graph/tuning.cc, of the buffer
NVLS_LATENCY = 25e-6  # the same: hwLat of NVLS over NVLINK


def nccl(all_reduces: bool) -> Iterator[tuple[int, float, float]]:
    """Measured on 8 H100: bytes of the whole tensor, seconds, and those of the model."""
    network = Network(machines.machine("H100", 8, 1), (8,))
    with DATA.with_name("nccl_collectives.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            whole = int(row["M"]) * int(row["N"]) * 2
            if (row["op"] == "all-reduce") != all_reduces:
                continue
            load = network.load(row["op"], tuple(range(8)))
            sent = whole / 8 if row["op"] == "all-gather" else whole
            latency, slower = regime(load, sent)
            spent = latency + slower * sent * max(per_byte for _, per_byte in load.seconds)
            spent += network.topology.gpu.launch_latency
            yield whole, float(row["value"]) * 1e-6, spent


def test_nccl_on_eight_h100() -> None:
    """Gathers and reduce-scatters of 1 to 512 MiB."""
    errors = [abs(spent / seconds - 1) for _, seconds, spent in nccl(all_reduces=False)]
    assert len(errors) == 20
    assert sorted(errors)[10] < 0.07 and max(errors) < 0.25


def test_all_reduces_are_priced_as_rings() -> None:
    """Inside a node they go by NVLS, whose constants in NCCL are further off than its ring's."""
    rows = list(nccl(all_reduces=True))
    ring = [spent / seconds - 1 for _, seconds, spent in rows]
    nvls = [(NVLS_LATENCY + n / NVLS_RATE) / seconds - 1 for n, seconds, _ in rows]
    assert len(rows) == 10 and -0.17 < min(ring) and max(ring) < 0.26
    assert -0.44 < min(nvls) and max(nvls) < -0.19
    assert max(map(abs, ring)) < max(map(abs, nvls))


BACKWARD = {  # bytes that a rank sends: of K and V (16 bit), of their gradients (float32)
    "ring": lambda kv, q, n: (n - 1) * 2 * kv + n * 4 * kv,
    "allgather-kv": lambda kv, q, n: (n - 1) * 2 * kv + (n - 1) * 4 * kv,
    "ulysses": lambda kv, q, n: (n - 1) / n * (2 * 2 * q + 2 * kv),  # do, then dq, dk and dv
}


@pytest.mark.parametrize("design", BACKWARD)
def test_bytes_of_the_backward(design: str) -> None:
    """As in schedules.md 4.1, 4.4 and 4.7, with sums that cross links in float32."""
    problem = Problem(seq=65536, heads=32, kv_heads=8)
    degrees = (8, 1) if design == "ulysses" else (1, 8)
    found = named.named(design, *degrees, "zigzag", problem.kv_heads, 1)
    (plan,) = named.plans(found, problem, "zigzag", "bwd")
    network = Network(machines.machine("H100", 8, 1), (8,))
    cost = simulate(plan, network, load("attention_backward"))
    rows = problem.seq // 8 * problem.head_dim
    kv, q = 2 * rows * problem.kv_heads, rows * problem.heads
    delta = 7 / 8 * rows // problem.head_dim * problem.heads * 4 if design == "ulysses" else 0
    assert cost.links[0].most == pytest.approx(BACKWARD[design](kv, q, 8) + delta)
    assert cost.times.copies > 0  # what the gradients are merged and cast by


# --- the validated range ------------------------------------------------------------------------


def test_what_is_outside_is_named() -> None:
    """On one line, with the range."""
    assert validated.outside(Problem(), "A100-SXM4-80GB", 16) == ""
    text = validated.outside(Problem(seq=1024, dtype="float32"), "MI300X", 128)
    assert text == (
        "outside validated range: seq 1024 (32768 to 262144), float32, 128 GPUs (8 to 32), MI300X"
    )
    other = validated.outside(Sizes((("M", 4),), "bfloat16"), "L20", 8)
    assert other == "outside validated range: other operators than attention"


def test_the_range_is_that_of_the_rows() -> None:
    """Every bound is a row's."""
    done, _ = predicted()
    rows = [one.row for one in done if one.row.gpus > 1]
    assert {machine_of(row) for row in rows} == set(validated.GPUS)
    assert (min(r.gpus for r in rows), max(r.gpus for r in rows)) == validated.RANKS
    for name, (least, most) in validated.SIZES.items():
        values = {getattr(row.problem, name) for row in rows}
        assert {least, most} <= values and max(values) == most


# --- field report B59 ---------------------------------------------------------------------------

# Iterations a second of a forward on 8 H800: 8192 tokens and 5 heads a GPU, causal, head size 128.
# The figures that were promised: zhuzilin/ring-flash-attention README.md, when its benchmark was
# benchmark_qkvpacked_func.py; those that somebody got: its issue 55, of the same script.
PROMISED = {"local": 2418.4, "contiguous": 208.0, "zigzag": 283.0, "striped": 259.6}
REPORTED = {"local": 2470.3, "contiguous": 143.8, "zigzag": 170.6, "striped": 185.6}
SLOW_HOST = 180e-6  # s for a message: that of the report's zigzag ring, which is bound by its host


def iterations(topology: Topology, ring: str, order: str, problem: Problem) -> float:
    """Calls a second: of one GPU's part alone (`local`), or of a design."""
    network = Network(topology, tuple(level.size for level in topology.levels))
    found = named.named(ring, 1, network.size, order, 1, 1)
    (plan,) = named.plans(found, problem, order, "fwd")
    return 1 / simulate(plan, network, load("attention")).time


def h800(host: float | None = None, gpus: int = 8) -> Topology:
    """H800, with another time of the host for a message."""
    found = machines.machine("H800", gpus, 1)
    return found if host is None else replace(found, gpu=replace(found.gpu, host_transfer=host))


def test_b59_the_promise_is_predicted_and_so_is_the_report_by_its_host() -> None:
    """Promise and report are of the same shape and kernel, so the shape is not the reason.

    The model has the promise within 3 % in all four figures. In the report the three rings take
    about as long as one another, though one of them has half of the work more: none waits for its
    kernels. One number, what that host takes for a message, gives all three within 16 %.
    """
    whole = Problem(seq=65536, heads=5, kv_heads=5)
    alone = iterations(h800(gpus=1), "local", "contiguous", replace(whole, seq=8192))
    assert abs(alone / PROMISED["local"] - 1) < 0.03 and abs(alone / REPORTED["local"] - 1) < 0.05
    for order in ("contiguous", "zigzag", "striped"):
        fast = iterations(h800(), "ring", order, whole)
        slow = iterations(h800(SLOW_HOST), "ring", order, whole)
        assert abs(fast / PROMISED[order] - 1) < 0.03, (order, fast)
        assert abs(slow / REPORTED[order] - 1) < 0.16, (order, slow)
        if order == "zigzag":
            assert 8 * slow / alone < 0.59 and 8 * fast / alone > 0.93


def test_b59_another_schedule_where_the_host_is_slow() -> None:
    """On the promise's host the ring is the choice; on the report's one that starts less at once.

    Shorter work is bound by any host: there gathering the keys in one call is the better way.
    """
    whole = Problem(seq=65536, heads=5, kv_heads=5)
    assert search("attention", whole, h800()).best.design == "ring"
    slow = search("attention", whole, h800(SLOW_HOST))
    ring = next(one.best for one in slow.named if one.name == "ring")
    assert slow.best.design is None and slow.best.cost.time < 0.75 * ring.cost.time
    short = replace(whole, seq=16384)
    rates = [iterations(h800(), name, "zigzag", short) for name in ("ring", "allgather-kv")]
    assert rates[1] > 1.5 * rates[0]
