"""The proof against mistakes: every altered trace is caught, by the check that should."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from mutants import Mutant, Traces, mutants
from plans import SCHEDULES, links_of, plan_of, problem_of, traces_of

from mercurygen.check.prove import prove_traces
from mercurygen.check.report import ProofError
from mercurygen.lower.plan import Plan

SEED = 5
MOST = 4  # of one name, of one plan: drawn
BASES = {  # name of the schedule: (mesh, mask)
    "attention: ring": (0, "causal"),
    "attention: Ulysses": (1, "causal"),
    "attention: unified": (0, "causal"),
    "attention: Ulysses in two stages": (0, "causal"),
    "attention: double ring": (1, "full"),
    "attention: striped double ring": (0, "causal"),
    "attention: gather, ring inside": (1, "full"),
    "attention: ring of gathers": (0, "causal"),
    "attention: direct": (0, "causal"),
    "attention: direct contiguous": (0, "causal"),
    "attention: direct twice": (1, "full"),
    "attention: both": (0, "full"),
    "attention: striped ring": (1, "causal"),
    "attention: TokenRing": (0, "full"),
    "attention: q ring": (1, "full"),
    "attention: split-KV": (1, "full"),
    "attention: split-KV of replicas": (1, "causal"),
    "attention: TokenRing, k and v inside": (0, "full"),
    "attention: pipelined all-gather": (1, "causal"),
    "attention: chunked Ulysses": (0, "full"),
    "attention: tiles of queries and keys": (0, "causal"),
    "backward: ring": (1, "full"),
    "backward: direct, straight home": (1, "full"),
    "backward: all-gather and reduce-scatter": (1, "causal"),
    "backward: burst": (1, "full"),
    "backward: pipelined": (1, "full"),
    "matmul: ring reduce-scatter": (0, "full"),
    "matmul: direct reduce-scatter": (0, "full"),
    "matmul: reduce-scatter": (0, "full"),
    "matmul: all-reduce": (0, "full"),
    "matmul: both ways": (0, "full"),
    "matmul: SUMMA": (0, "full"),
    "matmul: Cannon": (1, "full"),
    "matmul: 2.5D": (0, "full"),
    "nearest, reduce-scatter": (1, "full"),
    "nearest, straight home": (1, "full"),
}
COUNTED: Counter = Counter()
SAME: Counter = Counter()


def base_of(name: str) -> tuple[Plan, Traces]:
    operator, meshes, body, changes = SCHEDULES[name]
    number, mask = BASES[name]
    problem = problem_of(operator, mask, **changes)
    plan = plan_of(operator, problem, meshes[number], body)
    return plan, traces_of(plan, with_lse=False)


def drawn(plan: Plan, traces: Traces, rng: Random) -> list[Mutant]:
    """A few of every name; those that change nothing are counted, and left out."""
    by_name: dict[str, list[Mutant]] = {}
    for mutant in mutants(plan, traces):
        if mutant.traces == traces:
            SAME[mutant.name] += 1
        else:
            by_name.setdefault(mutant.name, []).append(mutant)
    return [m for each in by_name.values() for m in rng.sample(each, min(MOST, len(each)))]


@pytest.mark.parametrize("name", BASES)
def test_every_mutant_is_caught(name: str) -> None:
    print("seed", SEED)
    plan, traces = base_of(name)
    links, missed = links_of(plan.program.mesh), []
    prove_traces(plan, traces, links)
    for mutant in drawn(plan, traces, Random(SEED)):
        try:
            prove_traces(plan, mutant.traces, links)
            missed.append(f"{mutant.name}: not caught")
        except ProofError as error:
            COUNTED[mutant.name, error.check] += 1
            if error.check not in mutant.checks:
                missed.append(f"{mutant.name}: {error}")
    assert not missed, f"{len(missed)} missed: " + "\n".join(missed[:40])


def test_mutants_were_many() -> None:
    for (name, check), count in sorted(COUNTED.items()):
        print(f"{count:5} {name}: {check}")
    print(f"{sum(COUNTED.values()):5} in all; the same as the plan: {dict(SAME)}")
    if set(BASES) and len(COUNTED) > 40:
        assert sum(COUNTED.values()) >= 1000
