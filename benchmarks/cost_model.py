"""What the cost model predicts of published measurements, and how far off it is.

    python benchmarks/cost_model.py [CSV...] [--json]

Builds the design that each row names, on a machine composed for the row's hardware, and simulates
the plan. Prints by source, and over all rows: how many; median and 90th percentile of the relative
error, and its median with the sign (bias); Kendall's tau of the configurations within a problem,
with the pairs that tie (predicted alike + measured within 0.5 %, which do not count / that count);
how often the measured best one is picked; what is lost by what is picked, on average and at most.
Rows that have no prediction are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

import machines
import named
from published import Row, Skipped, read

from mercurygen.cost.links import Network
from mercurygen.cost.simulate import simulate
from mercurygen.cost.validated import outside
from mercurygen.errors import Refusal, UserError, closest
from mercurygen.ir.problem import Problem
from mercurygen.operators import load

DATA = Path(__file__).parent / "data" / "published_attention.csv"
ALIKE = 0.005  # of two measured times: charts are read to +-1.5 of some 600 TFLOP/s


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row with the model's time, s."""

    row: Row
    seconds: float

    @property
    def error(self) -> float:
        """Of the time, relative to the measured one."""
        return self.seconds / self.row.seconds - 1


def predict(rows: Iterable[Row | Skipped]) -> tuple[list[Predicted], list[Skipped]]:
    """Every row that has a prediction, and every other with the reason."""
    rows = list(rows)
    done: list[Predicted] = []
    skipped = [row for row in rows if isinstance(row, Skipped)]
    kernels = _kernels([row for row in rows if isinstance(row, Row)])
    for row in rows:
        if isinstance(row, Skipped):
            continue
        found = _predicted(row, kernels[row])
        if isinstance(found, str):
            skipped.append(Skipped(row.place, row.source, row.algorithm, found))
        else:
            done.append(Predicted(row, found))
    return done, skipped


def _kernels(rows: list[Row]) -> dict[Row, str | None]:
    """The kernel of each row: the one that it names, else the one that its source names."""
    by_source: dict[str, str | None] = {}
    for row in rows:
        by_source[row.source] = machines.kernel_of(row.words) or by_source.get(row.source)
    return {row: machines.kernel_of(row.words) or by_source[row.source] for row in rows}


def _predicted(row: Row, kernel: str | None) -> float | str:
    if row.live is None:
        return "packed documents, whose lengths are not given"
    if row.design not in named.known():
        return f"no design {row.design!r}; {closest(row.design, named.known())}"
    key = row.hardware, row.gpus, row.nodes, kernel
    design = row.design, row.ulysses, row.ring, row.order
    return priced(key, design, row.problem, row.way, row.live)


@cache
def priced(
    machine: tuple[str, int, int, str | None],
    design: tuple[str, int, int, str],
    problem: Problem,
    way: str,
    live: float,
) -> float | str:
    """Seconds of one pass, or why there are none.

    Documents leave a part of the scores alive: the kernels are that much quicker, what moves is
    the same.
    """
    name, ulysses, ring, order = design
    try:
        topology = machines.machine(*machine)
    except UserError as error:
        return error.message
    gpu = topology.gpu
    quicker = {"attention_efficiency", "gradient_efficiency", "softmax_rate"}
    gpu = replace(gpu, **{name: getattr(gpu, name) / live for name in quicker})
    topology = replace(topology, gpu=gpu)
    found = named.named(name, ulysses, ring, order, problem.kv_heads, machine[2])
    if isinstance(found, str):
        return found
    group = tuple(level.size for level in topology.levels)
    network, total = Network(topology, group, seats=found.seats), 0.0
    for plan in named.plans(found, problem, order, way):
        if isinstance(plan, Refusal):
            return f"{plan.slug}: {plan.explain()[0]}"
        total += simulate(plan, network, load(plan.program.operator)).time
    return total


# --- ranking ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranking:
    """Configurations of one problem against one another.

    Attributes:
        agree, disagree: pairs in the same order, and in the other.
        tied: pairs that are predicted alike, which count as neither.
        alike: pairs that the measurements do not tell apart, which do not count at all.
        picked: whether the predicted best is the measured best, or not told apart from it.
        regret: how much longer it takes than the measured best, relative.
    """

    agree: int
    disagree: int
    tied: int
    alike: int
    picked: bool
    regret: float


def rankings(rows: Sequence[Predicted]) -> list[Ranking]:
    """Of every problem with several configurations; the fastest implementation stands for one."""
    problems: dict[tuple, dict[tuple, Predicted]] = {}
    for one in rows:
        best = problems.setdefault(one.row.asked, {})
        old = best.get(one.row.configuration)
        if old is None or one.row.seconds < old.row.seconds:
            best[one.row.configuration] = one
    return [_ranked(list(best.values())) for best in problems.values() if len(best) > 1]


def _ranked(rows: list[Predicted]) -> Ranking:
    signs, alike = [], 0
    for a, b in combinations(rows, 2):
        if abs(a.row.seconds / b.row.seconds - 1) <= ALIKE:
            alike += 1
            continue
        signs.append((a.row.seconds - b.row.seconds) * (a.seconds - b.seconds))
    least = min(one.seconds for one in rows)
    fastest = min(one.row.seconds for one in rows)
    # several that are predicted alike: the slowest of them may be the one that is taken
    taken = max(one.row.seconds for one in rows if one.seconds <= least * (1 + 1e-9))
    agree, disagree = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    tied = len(signs) - agree - disagree
    lost = taken / fastest - 1
    return Ranking(agree, disagree, tied, alike, lost <= ALIKE, lost)


def summary(rows: Sequence[Predicted]) -> dict:
    """The figures of some rows."""
    errors = sorted(abs(one.error) for one in rows)
    found: dict = {"rows": len(rows)}
    if errors:
        found["median_error"] = median(errors)
        found["p90_error"] = errors[-(-9 * len(errors) // 10) - 1]
        found["bias"] = median(one.error for one in rows)
    ranked = rankings(rows)
    if ranked:
        agree, disagree = sum(r.agree for r in ranked), sum(r.disagree for r in ranked)
        tied = sum(r.tied for r in ranked)
        found["problems"] = len(ranked)
        found["pairs"], found["tied_pairs"] = agree + disagree + tied, tied
        found["pairs_measured_alike"] = sum(r.alike for r in ranked)
        found["tau"] = (agree - disagree) / max(1, found["pairs"])
        found["best_picked"] = sum(r.picked for r in ranked)
        found["mean_regret"] = sum(r.regret for r in ranked) / len(ranked)
        found["most_regret"] = max(r.regret for r in ranked)
    return found


# --- report -------------------------------------------------------------------------------------


def report(done: list[Predicted], skipped: list[Skipped]) -> dict:
    """All figures: by source, of one GPU, of several, of the range that is claimed, of all."""
    sources = dict.fromkeys(one.row.source for one in done)
    several = [one for one in done if one.row.gpus > 1]
    return {
        "sources": {s: summary([x for x in done if x.row.source == s]) for s in sources},
        "one GPU": summary([one for one in done if one.row.gpus == 1]),
        "several GPUs": summary(several),
        "validated range": summary([one for one in several if _inside(one.row)]),
        "overall": summary(done),
        "skipped": [
            {"row": x.place, "source": x.source, "algorithm": x.algorithm, "reason": x.reason}
            for x in skipped
        ],
    }


def _inside(row: Row) -> bool:
    """Whether `emit` and `search` say nothing beside a price like this one."""
    gpu = machines.machine(row.hardware, row.gpus, row.nodes).gpu.name
    return not row.documents and not outside(row.problem, gpu, row.gpus)


def lines(found: dict) -> Iterable[str]:
    """The report for a terminal."""
    head = f"{'rows':>5} {'median':>7} {'p90':>7} {'bias':>7} {'tau':>6} {'ties':>11} {'best':>7}"
    yield f"{head} {'regret':>7} {'most':>7}  source"
    names = [*found["sources"], "one GPU", "several GPUs", "validated range", "overall"]
    for name in names:
        figures = found["sources"].get(name) or found[name]
        if not figures["rows"]:
            continue
        error = (f"{figures[k]:7.1%}" for k in ("median_error", "p90_error", "bias"))
        line = f"{figures['rows']:5} {' '.join(error)}"
        if "tau" in figures:
            ties = f"{figures['tied_pairs']}+{figures['pairs_measured_alike']}/{figures['pairs']}"
            best = f"{figures['best_picked']}/{figures['problems']}"
            line += f" {figures['tau']:6.2f} {ties:>11} {best:>7}"
            line += f" {figures['mean_regret']:7.1%} {figures['most_regret']:7.1%}"
        else:
            line += " " * 43
        yield f"{line}  {_short(name)}"
    by_reason: dict[tuple[str, str], int] = {}
    for row in found["skipped"]:
        key = row["source"], row["reason"]
        by_reason[key] = by_reason.get(key, 0) + 1
    for (source, reason), count in by_reason.items():
        yield f"skipped {count}: {reason} ({_short(source)})"


def _short(source: str) -> str:
    """A repository, and the last folders of the file in it."""
    repository, _, rest = source.partition(" ")
    path = rest.partition("@")[0].split("/")
    return " ".join([repository, "/".join(path[-3:])]).strip() if rest else source


def main() -> None:
    """Predict the rows of some files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="CSV")
    parser.add_argument("--json", action="store_true", help="for programs, with every row")
    options = parser.parse_args()
    files = options.files or [DATA]
    try:
        done, skipped = predict(row for path in files for row in read(path))
    except UserError as error:
        sys.exit(error.render())
    found = report(done, skipped)
    if options.json:
        found["rows"] = [
            {
                "row": one.row.place,
                "source": one.row.source,
                "algorithm": one.row.algorithm,
                "measured_s": one.row.seconds,
                "predicted_s": one.seconds,
                "error": one.error,
            }
            for one in done
        ]
        print(json.dumps(found, indent=2))
        return
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
