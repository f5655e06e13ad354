"""Rows of published measurements: what a CSV's columns mean, read strictly."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mercurygen.errors import UserError, closest, shorten
from mercurygen.ir.problem import Problem

COLUMNS = (
    *("source", "hardware", "n_gpus", "n_nodes", "op", "algorithm", "batch", "seq_total", "heads"),
    *("kv_heads", "head_dim", "causal", "dtype", "metric", "value", "unit", "note", "design"),
    *("ulysses", "ring", "order"),
)
PASSES = ("fwd", "bwd", "fwd_bwd")
OPERATORS = ("attention", "attention_varlen")
METRICS = ("throughput", "time", "latency")
ORDERS = ("contiguous", "zigzag", "striped")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16"}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
RATES = ("iter/s", "it/s", "iters/s")
TFLOPS = ("TFLOP/s", "TFLOPs/s", "TFLOPS")
PER_GPU = tuple(f"{unit}/GPU" for unit in TFLOPS)
UNITS = (*SECONDS, *RATES, *TFLOPS, *PER_GPU, "tokens/s")
WORK = {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5}  # products, in those of a forward


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of one of our designs.

    Attributes:
        place: file and line.
        source, hardware, algorithm: as the row says.
        gpus: number of them.
        nodes: that they are on.
        problem: sizes over all ranks.
        documents: whether several are packed in a sequence.
        live: part of the whole sequence's scores that is left by them, if the note has their
            ends (`[0,4096,8192]`; of several lists in turn the mean); else None.
        way: "fwd", "bwd" or "fwd_bwd".
        seconds: of one pass.
        design: a name of ours, or "local".
        ulysses, ring: degrees.
        order: of the tokens.
        words: algorithm and note, which may name a kernel.
    """

    place: str
    source: str
    hardware: str
    algorithm: str
    gpus: int
    nodes: int
    problem: Problem
    documents: bool
    live: float | None
    way: str
    seconds: float
    design: str
    ulysses: int
    ring: int
    order: str
    words: str

    @property
    def asked(self) -> tuple:
        """What rows that can be ranked against one another have in common."""
        same = self.source, self.hardware, self.gpus, self.nodes
        return *same, self.problem, self.documents, self.way

    @property
    def configuration(self) -> tuple:
        """What it is ranked by: where no ring goes around, every order is the same schedule."""
        order = self.order if self.ring > 1 else ""
        return self.design, self.ulysses, self.ring, order


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that has no prediction, and why."""

    place: str
    source: str
    algorithm: str
    reason: str


def read(path: Path) -> Iterator[Row | Skipped]:
    """The rows of a file that name a design of ours.

    Raises:
        UserError: `no-such-file`, `published-column`, `published-value`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("no-such-file", f"cannot read {path}: {error}") from None
    table = csv.DictReader(text.splitlines())
    names = tuple(table.fieldnames or ())
    way = next((name for name in names if name == "pass" or name.startswith("pass(")), None)
    missing = [name for name in COLUMNS if name not in names] + ["pass"] * (way is None)
    if missing:
        raise UserError("published-column", f"{path} has no column {', '.join(missing)}")
    for fields in table:
        place = f"{path.name}:{table.line_num}"
        if None in fields or None in fields.values():
            message = f"{place}: {'more' if None in fields else 'fewer'} values than columns"
            raise UserError("published-value", message)
        if fields["design"].strip():
            yield _row(place, {key: value.strip() for key, value in fields.items()}, way)


def _row(place: str, fields: dict[str, str], way: str) -> Row | Skipped:
    def of(key: str, known: tuple[str, ...]) -> str:
        value = fields[key]
        if value not in known:
            raise UserError(
                "published-value", f"{place}: {key} {value!r}", help=closest(value, known)
            )
        return value

    of(way, PASSES)
    of("op", OPERATORS)
    of("metric", METRICS)
    of("unit", UNITS)
    said = fields["source"], fields["algorithm"]
    if fields["value"].upper() == "OOM":
        return Skipped(place, *said, "measured: out of memory")
    number = {key: _count(place, key, fields[key]) for key in COUNTS}
    problem = Problem(
        batch=number["batch"],
        seq=number["seq_total"],
        heads=number["heads"],
        kv_heads=number["kv_heads"],
        head_dim=number["head_dim"],
        v_head_dim=number["head_dim"],
        dtype=DTYPES[of("dtype", tuple(DTYPES))],
        mask="causal" if of("causal", ("True", "False")) == "True" else "full",
    )
    if number["ulysses"] * number["ring"] != number["n_gpus"]:
        message = f"{place}: ulysses {number['ulysses']} x ring {number['ring']} is not n_gpus"
        raise UserError("published-value", f"{message} {number['n_gpus']}")
    return Row(
        place=place,
        source=fields["source"],
        hardware=fields["hardware"],
        algorithm=fields["algorithm"],
        gpus=number["n_gpus"],
        nodes=number["n_nodes"],
        problem=problem,
        documents=fields["op"] == "attention_varlen",
        live=live_of(fields["note"]) if fields["op"] == "attention_varlen" else 1.0,
        way=fields[way],
        seconds=_seconds(place, fields, problem, fields[way], number["n_gpus"]),
        design=fields["design"].replace("_", "-"),
        ulysses=number["ulysses"],
        ring=number["ring"],
        order=of("order", ORDERS),
        words=f"{fields['algorithm']} {fields['note']}",
    )


def live_of(note: str) -> float | None:
    """Part of the scores of a sequence that its documents leave, by lists of their ends."""
    shares = []
    for ends in re.findall(r"\[(0(?:,\d+)+)\]", note.replace(" ", "")):
        places = [int(end) for end in ends.split(",")]
        if sorted(set(places)) != places:
            return None
        sizes = [b - a for a, b in zip(places, places[1:], strict=False)]
        shares.append(sum(size * size for size in sizes) / places[-1] ** 2)
    return sum(shares) / len(shares) if shares else None


COUNTS = (
    *("n_gpus", "n_nodes", "batch", "seq_total", "heads", "kv_heads", "head_dim"),
    *("ulysses", "ring"),
)


def _count(place: str, key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value) < 2**40:
        message = f"{place}: {key} is {shorten(repr(value))}, not a whole number above 0"
        raise UserError("published-value", message)
    return int(value)


def _seconds(place: str, fields: dict[str, str], problem: Problem, way: str, gpus: int) -> float:
    """Of one pass, from a time or a rate."""
    try:
        value = float(fields["value"])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        message = f"{place}: value {shorten(repr(fields['value']))} is no number above 0"
        raise UserError("published-value", message)
    unit = fields["unit"]
    if (unit in SECONDS) != (fields["metric"] != "throughput"):
        raise UserError("published-value", f"{place}: {fields['metric']} in {unit}")
    if unit in SECONDS:
        return value * SECONDS[unit]
    if unit in RATES:
        return 1 / value
    if unit == "tokens/s":
        return problem.batch * problem.seq / value
    whole = value * 1e12 * (gpus if unit in PER_GPU else 1)
    return flops(problem) * WORK[way] / whole


def flops(problem: Problem) -> float:
    """Of a forward: 4 S^2 H D for each sequence, half of it if causal."""
    whole = 4 * problem.batch * problem.seq**2 * problem.heads * problem.head_dim
    return whole / 2 if problem.mask == "causal" else whole
