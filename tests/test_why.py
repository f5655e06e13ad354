"""`--why`: every printed sentence holds on both sides of its value, by searches of our own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command import ROOT, run

from mercurygen.cli import request, why
from mercurygen.cli.options import NAMES, split
from mercurygen.cli.why import Why
from mercurygen.cost.topology import load
from mercurygen.ir.caller import PACKED
from mercurygen.ir.problem import Problem
from mercurygen.search import changes as module
from mercurygen.search.candidate import OBJECTIVES
from mercurygen.search.changes import changes, identity
from mercurygen.search.knobs import Case, knobs
from mercurygen.search.result import Result
from mercurygen.search.search import search
from mercurygen.search.why import label

ASKED = ("attention", "--topo", "h100x8", "--group", "gpu=4", "--seq", "16k")
NUMBER = r"([0-9.]+)(?: GB/s| us| GiB)?"


@pytest.fixture(scope="module")
def found() -> Why:
    """What speaks for the choice of one search."""
    options = dict.fromkeys(NAMES) | {"group": {"gpu": 4}, "seq": 16384}
    wanted = request.make("attention", "h100x8", split(options))
    return why.find(wanted, request.run(wanted))


def machine(where: Path, quantity: str, value: float) -> Path:
    """H100x8 as a file, with other numbers in it."""
    text = (ROOT / "mercurygen/topologies/h100x8.toml").read_text(encoding="utf-8")
    keys = {"host": ("host_transfer",), "bandwidth": ("bandwidth", "port_bandwidth")}[quantity]
    for key in keys:
        text, many = re.subn(rf"(?m)^({key} = {{ value = )[0-9.]+", rf"\g<1>{value}", text)
        assert many == 1, key
    path = where / f"{quantity}{value:g}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def chosen(where: Path, quantity: str, value: float) -> str:
    """What a search chooses if the quantity has the value."""
    asked = {"seq": 16384, "heads": 32, "kv_heads": 8, "batch": 1}
    topology, limit = load("h100x8"), None
    match quantity:
        case "bandwidth of gpu":
            topology = load(str(machine(where, "bandwidth", value)))
        case "the host's time for a message":
            topology = load(str(machine(where, "host", value)))
        case "memory limit":
            limit = int(value * 2**30)
        case _:
            name = {"tokens": "seq", "batch": "batch", "key/value heads": "kv_heads"}[quantity]
            asked[name] = int(value)
    problem = Problem(**asked)
    return label(search("attention", problem, topology, group=(4,), memory_limit=limit).best)


def test_every_sentence_is_true_on_both_sides(found: Why, tmp_path: Path) -> None:
    """At the value that keeps the choice it is the choice, at the next the other one."""
    joined = re.sub(r"\n {6}", " ", "\n".join(why.lines(found)))
    choice = re.search(r"choice: (.*? \(\w+\)),", joined)[1]
    quantity, kept, changed = "", 0, 0
    for line in joined[joined.index("what would change it") :].splitlines()[1:]:
        if head := re.fullmatch(rf"  (\S.*), now {NUMBER}", line):
            quantity = head[1]
            continue
        sentence = re.fullmatch(
            rf"    (?:still chosen at {NUMBER})?(?:; )?(?:at {NUMBER}: (.*? \(\w+\)), .*)?", line
        )
        assert sentence and (sentence[1] or sentence[2]), line
        if sentence[1]:
            kept += 1
            assert chosen(tmp_path, quantity, float(sentence[1])) == choice, line
        if sentence[2]:
            changed += 1
            other = chosen(tmp_path, quantity, float(sentence[2]))
            assert other == sentence[3] != choice, line
    assert kept >= 5 and changed >= 3, (kept, changed)


def test_what_is_said_beside_the_choice(found: Why) -> None:
    """The runner-up and every other named design, or its refusal, with differences that add up."""
    text, result = re.sub(r"\n {4}", " ", "\n".join(why.lines(found))), found.result.to_dict()
    best = result["best"]
    against = {one["name"]: one for one in found.to_dict()["against"]}
    given = {one.get("schedule") for one in against.values()} | {best["schedule"]}
    for named in result["named"]:
        one = against.get(named["name"])
        if "refused" in named:
            assert f"{named['name']}: refused, {named['refused']}: {named['message']}" in text
            continue
        assert named["schedule"] in given, named["name"]
        if one is None:
            continue
        assert one["time"] == named["time"] - best["time"]
        assert one["peak_memory"] == named["peak_memory"] - best["peak_memory"]
        assert abs(sum(one["time_parts"].values()) - one["time"]) < 1e-12
        percent = f"{abs(one['time']) / best['time']:.2%}"
        change = "more" if one["time"] > 0 else "less"
        assert re.search(rf"  {named['name']} on .*: takes {re.escape(percent)} {change}", text)


def fake(result: Result, edge: float) -> Result:
    """Another choice below a bandwidth, by the order alone."""
    first, second = result.best, result.others[-1]
    bandwidth = result.topology.levels[-1].bandwidth / 1e9
    return replace(result, ranked=(second,) if bandwidth < edge else (first, second))


@pytest.mark.parametrize("guess", [True, False])
def test_the_guess_is_never_believed(monkeypatch: pytest.MonkeyPatch, guess: bool) -> None:
    """Whatever the closed form says, the whole search decides, and is asked once for a value."""
    result = search("attention", Problem(seq=4096), load("h100x8"), group=(2,))
    seen = []

    def ask(case) -> Result:
        seen.append(case)
        return fake(replace(result, topology=case.topology), 263)

    monkeypatch.setattr(module._Looked, "near", lambda self, case: guess)
    down = changes(result, ask)[0]
    assert (down.kept, down.value) == (280, 250)
    assert identity(down.result.best.schedule) == identity(result.others[-1].schedule)
    assert len(set(seen)) == len(seen)


def test_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a search, and of a file: one that is not the choice says by how much."""
    monkeypatch.setattr(why, "changes", lambda *_: ())
    text = run("search", *ASKED, "--why").done()
    assert "choice: ring on gpu=4" in text and "what would change it" in text
    assert json.loads(run("search", *ASKED, "--why", "--json").done())["why"]["changes"] == []
    file = ROOT / "generated/attention_gqa_causal_ring_h100x8.sched"
    told = run("explain", file, "--why").done()
    assert told.startswith("  this schedule is not what is chosen: ring on gpu=8 (zigzag) takes ")
    chosen = run("explain", ROOT / "generated/attention_gqa_causal_h100x8.sched", "--why")
    assert chosen.done() == told[told.index("\n\n") + 2 :]
    run("explain", file, "--json").refused("usage", "--why")
    run("explain", file, "--why", "--topo", "a100x8").refused("another-topology", "emit it again")


def test_the_rule_of_every_objective() -> None:
    """Of one that needs less memory nothing is said of the fastest, though it takes longer."""
    result = search("attention", Problem(seq=4096), load("h100x8"), group=(2,))
    slow, fast = result.ranked[-1], result.ranked[0]
    told = {rule: why._old(slow, fast, rule).rpartition("; ")[2] for rule in OBJECTIVES}
    assert "the simplest" in told["time"] and "regretted" in told["robust"]
    assert "chosen" not in told["memory"]
    assert "chosen" not in why._old(fast, slow, "time")


def test_sizes_that_documents_fix_are_not_tried() -> None:
    """Their lengths add up to the sequence, of which there is one."""
    lengths = {"documents": (512, 512), "layout": PACKED}
    topology = load("h100x8")
    whole, packed = (
        Case(Problem(seq=1024, **more), topology, topology.gpu.memory_bytes)
        for more in ({}, lengths)
    )
    for case, many in ((whole, 2), (packed, 0)):
        every = {knob.name: knob for knob in knobs(case, (2,), 2**20)}
        tried = [every[name].values(case, (2,), True) for name in ("seq", "batch")]
        assert sum(map(bool, tried)) == many
        assert every["kv_heads"].values(case, (2,), False) == (4, 2)
