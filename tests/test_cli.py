"""The command line: what its commands print, write and answer; the same bytes everywhere."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import ANY_SMALL, ROOT, SMALL, SMALL_NAME, UNIFIED, folder, run, spawn, tree

import mercurygen
from mercurygen.cli import names, request
from mercurygen.designs import patterns
from mercurygen.emit.module import digest, split_digest

NAME = SMALL_NAME
RANKS = ("ring", "allgather-kv", "ulysses", "unified", "double-ring", "unified-double-ring")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small pair in `generated/`."""
    path = tmp_path_factory.mktemp("emitted")
    with folder(path):
        run("emit", *SMALL).done()
    return path


# --- emit -------------------------------------------------------------------------------------


def test_emit_says_what_decides(emitted: Path) -> None:
    """Every figure that a person decides by."""
    own = NAME.replace("_double_ring", "")
    with folder(emitted):
        out = run("emit", *ANY_SMALL).done()
    for word in (
        *("chosen", "time", "compute", "copies", "launches", "waiting", "links", "InfiniBand"),
        *("mean", "busiest", "memory", "work", "proof", "4 ranks", "exactly once", "collectives"),
        *("runner-up", "best named", "why", "searched", "legal", "refused", "torchrun", own),
    ):
        assert word in out, word
    assert len(out.splitlines()) <= 42
    assert max(map(len, out.splitlines())) <= 140


def test_same_bytes_everywhere(tmp_path: Path) -> None:
    """Under three hash seeds, from another folder, and from the schedule that was written."""
    trees = []
    for seed in "012":
        there = tmp_path / seed / "deep"
        there.mkdir(parents=True)
        done = spawn("emit", *SMALL, "-o", "out", cwd=there, seed=seed)
        assert done.returncode == 0, done.stderr
        trees.append(tree(there / "out"))
    assert trees[0] == trees[1] == trees[2] and len(trees[0]) == 2
    other = tmp_path / "other"
    with folder(tmp_path):
        run("emit", "--schedule", f"0/deep/out/{NAME}.sched", "-o", other).done()
    assert tree(other) == trees[0]


def test_pair_is_well_formed(emitted: Path) -> None:
    """The command in the schedule's first line, the digest, and no path or time in either."""
    schedule = (emitted / "generated" / f"{NAME}.sched").read_text()
    module = (emitted / "generated" / f"{NAME}.py").read_text()
    first = schedule.splitlines()[0]
    assert first == "# mercurygen " + " ".join(("emit", *SMALL)).replace("1k", "1024")
    assert schedule.splitlines()[1].startswith("# why: ")
    claimed, body = split_digest(module)
    assert claimed == digest(body)
    ast.parse(module)
    for word in (str(emitted), os.uname().nodename, "/tmp"):
        assert word not in module + schedule


def test_designs(tmp_path: Path) -> None:
    """Every named design emits, or says why not."""
    with folder(tmp_path):
        for design in RANKS:
            ran = run("emit", *SMALL, "--heads", "16", "--schedule", design)
            if ran.code:
                ran.refused("design-does-not-fit")
        names = sorted(path.stem for path in Path("generated").glob("*.sched"))
        assert f"{NAME.replace('s1024', 's1024_h16')}" in names
        assert len(names) == 5
        run("check").done()


def test_one_rank(tmp_path: Path) -> None:
    """No mesh, no process group."""
    with folder(tmp_path):
        out = run("emit", *ANY_SMALL[:-1], "node=1,gpu=1", "--name", "alone").done()
        assert "nothing is sent" in out and "python generated/alone.py" in out
        assert "mesh\n" in Path("generated/alone.sched").read_text()
        run("check").done()


def test_own_topology_and_operator(tmp_path: Path) -> None:
    """Files of the user's own; their folders reach neither file."""
    toml = (ROOT / "mercurygen/topologies/a100x8.toml").read_text()
    own = toml.replace('name = "a100x8"', 'name = "my-box"', 1)
    (tmp_path / "box.toml").write_text(own)
    operator = (ROOT / "mercurygen/operators/attention.py").read_text()
    (tmp_path / "mine.py").write_text(operator)
    with folder(tmp_path):
        where = (str(tmp_path / "box.toml"), "--seq", "4k")
        run("emit", "mine.py::attention", "--topo", *where).done()
        text = Path("generated/attention_gqa_causal_s4096_my_box.sched").read_text()
        assert text.startswith("# mercurygen emit mine.py::attention --topo box.toml --seq 4096\n")
        out = run("emit", "--schedule", "generated/attention_gqa_causal_s4096_my_box.sched").done()
        assert "not priced" in out
        (tmp_path / "mine.py").write_text(operator.replace("D**-0.5", "1.0"))
        run("emit", "mine.py::attention", "--topo", "a100x8").refused("operator-not-supported")


@pytest.mark.parametrize(
    ("options", "part", "command"),
    [
        ({}, "gqa_causal_a100x16", ""),
        ({"kv_heads": 32}, "mha_causal_kv32_a100x16", " --kv-heads 32"),
        ({"kv_heads": 1, "mask": "full"}, "mqa_full_kv1_a100x16", " --kv-heads 1 --full"),
        ({"batch": 2, "seq": 65536}, "gqa_causal_b2_s65536_a100x16", " --batch 2 --seq 65536"),
        ({"heads": 40}, "gqa_causal_h40_a100x16", " --heads 40"),
        ({"head_dim": 64}, "gqa_causal_d64_a100x16", " --head-dim 64"),
        ({"v_head_dim": 64}, "gqa_causal_v64_a100x16", " --v-head-dim 64"),
        ({"dtype": "float16"}, "gqa_causal_float16_a100x16", " --dtype float16"),
        ({"order": "zigzag"}, "gqa_causal_a100x16", ""),
        ({"order": "contiguous"}, "gqa_causal_contiguous_a100x16", " --order contiguous"),
        ({"order": "any"}, "gqa_causal_any_order_a100x16", " --order any"),
        ({"objective": "memory"}, "gqa_causal_least_memory_a100x16", " --objective memory"),
        ({"memory_limit": 80 * 2**30}, "gqa_causal_a100x16", ""),
        ({"memory_limit": 2**30}, "gqa_causal_within_1GiB_a100x16", " --memory-limit 1GiB"),
        ({"group": {"node": 2, "gpu": 8}}, "gqa_causal_a100x16", ""),
        ({"tp": 2}, "gqa_causal_tp2_a100x16", " --tp 2"),
        ({"tp": 2, "group": {"gpu": 4, "node": 2}}, "gqa_causal_tp2_a100x16", " --tp 2"),
        (
            {"group": {"gpu": 8, "node": 1}},
            "gqa_causal_group_node1_gpu8_a100x16",
            " --group node=1,gpu=8",
        ),
    ],
)
def test_default_names(options: dict, part: str, command: str) -> None:
    """What differs from the defaults, in the name and in the command."""
    wanted = request.make("attention", "a100x16", options)
    name = names.default_name(wanted)
    assert name == f"attention_{part}"
    assert names.command(wanted, name) == f"mercurygen emit attention --topo a100x16{command}"
    assert names.command(wanted, "other").endswith(" --name other")


def test_name_of_a_design() -> None:
    """The design stands before the topology, importable."""
    wanted = request.make("attention", "a100x16", {"design": "double-ring"})
    assert names.default_name(wanted) == "attention_gqa_causal_double_ring_a100x16"


def test_a_name_says_the_order_of_a_design_once() -> None:
    """A design that has an order of its own says it: a ring of that order is the same schedule."""
    for design, order, name in (
        ("striped-ring", "striped", "striped_ring"),
        ("ring", "striped", "striped_ring"),
        ("ring", "contiguous", "contiguous_ring"),
    ):
        wanted = request.make("attention", "h100x8", {"design": design, "order": order})
        assert names.default_name(wanted) == f"attention_gqa_causal_{name}_h100x8"


# --- search -----------------------------------------------------------------------------------


def test_search_table() -> None:
    """Ranks, Pareto set, every named design, refusals in words."""
    out = run("search", "attention", "--topo", "a100x16").done()
    for word in ("fastest", "pareto", "named designs", "heads-not-divisible", "cannot be split"):
        assert word in out, word
    for design in RANKS:
        assert f"  {design} " in out, design


def test_json_is_strict(tmp_path: Path) -> None:
    """Of the slowest machine that is legal, no time is infinite."""
    text = (ROOT / "tests" / "data" / "two_boxes.toml").read_text()
    for old, new in (("value = 0.9,", "value = 0.01,"), ("value = 0.5,", "value = 0.001,")):
        text = text.replace(old, new)
    (tmp_path / "slow.toml").write_text(text)
    out = run("search", "attention", "--topo", tmp_path / "slow.toml", "--json").done()
    assert not {"Infinity", "NaN"} & set(out.replace(",", " ").split())


def test_search_json() -> None:
    """The keys that programs read."""
    data = json.loads(run("search", *ANY_SMALL, "--json").done())
    assert data["operator"] == "attention" and data["problem"]["seq"] == 1024
    for key in ("problem", "topology", "counts", "best", "pareto", "named"):
        assert data[key], key
    for key in ("name", "schedule", "time", "time_parts", "bytes_per_link", "peak_memory"):
        assert key in data["best"] and key in data["named"][0], key
    counts = data["counts"]
    assert counts["candidates"] == counts["legal"] + sum(counts["refused"].values())
    assert [entry["name"] for entry in data["named"]] == list(patterns.names())
    refused = {entry["refused"]: entry for entry in data["named"] if "refused" in entry}
    assert refused["design-does-not-fit"]["message"]


# --- show, explain, topo, ops -----------------------------------------------------------------


def test_show_and_explain(emitted: Path, tmp_path: Path) -> None:
    """From a schedule and from a module, the same; after a directive; with reshards or without."""
    module = emitted / "generated" / f"{NAME}.py"
    complete = run("show", module).done()
    assert complete == run("show", module.with_suffix(".sched")).done()
    assert "walk k, v: S_kv along node" in complete
    assert "walk" not in run("show", module, "--after", "0").done()
    after = run("show", module, "--after", "shift").done()
    assert after.startswith("# after 4: shift k, v: S_kv along node, gpu\n")
    assert run("show", module, "--after", "4").done() == after
    assert run("show", module, "--after", "each").done().count("# after") == 5
    run("show", module, "--after", "p").refused("unknown-step", "which of them")
    run("show", module, "--after", "shfit k, v: S_kv along node, gpu").refused(
        "unknown-step", "mean"
    )
    (tmp_path / "mine.sched").write_text(UNIFIED)
    assert "reshard" in run("show", tmp_path / "mine.sched").done()
    words = run("explain", module).done()
    assert words == run("explain", module.with_suffix(".sched")).done()
    assert "node" in words and len(words.splitlines()) > 5


def test_topo_and_ops() -> None:
    """Lists of what is shipped."""
    out = run("topo", "list").done()
    for name in ("a100x8", "a100x16", "a100x32", "h100x8", "h100x16", "l20x8"):
        assert name in out
    assert "NVIDIA" in run("topo", "show", "a100x16").done()
    assert "attention: Softmax" in run("ops").done()
    assert run("--version").done() == f"mercurygen {mercurygen.__version__}\n"


# --- the whole --------------------------------------------------------------------------------


def test_nothing_heavy_is_imported() -> None:
    """Help needs click alone; emitting does without torch and numpy."""
    script = """
import sys
from mercurygen.cli.main import main
code = main({args})
print(code, sorted({{"torch", "numpy", "libcst", "black", "jinja2"}} & set(sys.modules)))
"""
    for args, heavy in (
        (["--help"], "0 []"),
        (["emit", "--help"], "0 []"),
        (["emit", *SMALL, "-o", "/proc/none"], "2 ['black', 'jinja2', 'libcst']"),
    ):
        code = script.format(args=args)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == heavy, done


def test_pipes_and_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed pipe is quiet, a full disk is named, Ctrl-C is 130."""
    command = f"{sys.executable} -m mercurygen topo show a100x16"
    shell = f"{command} | true; echo ${{PIPESTATUS[0]}}; {command} > /dev/full; echo $?"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True)
    assert done.stdout.split()[1] == "1" and done.stdout.split()[0] in ("0", "141"), done
    assert done.stderr == "error[cannot-write]: standard output: No space left on device\n"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(request, "make", interrupted)
    assert run("emit", *SMALL).code == 130


def test_bug_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback unless asked for."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(request, "make", broken)
    ran = run("emit", *SMALL)
    assert ran.code == 1 and ran.err.startswith("error[internal]: RuntimeError: on purpose\n")
    assert "Traceback" not in ran.err and "--traceback" in ran.err
    assert "Traceback" in run("--traceback", "emit", *SMALL).err


def test_failed_proof_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is not proved, or a text that is not its plan's, is never written."""
    from mercurygen.check import prove
    from mercurygen.check.report import ProofError
    from mercurygen.emit import callsites, module

    def unproved(*_: object) -> None:
        raise ProofError("lineage", 3, "a tile is incomplete")

    with folder(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(prove, "prove", unproved)
            run("emit", *SMALL).refused("proof-failed", "lineage of rank 3", code=1)
        good = module.emit
        with monkeypatch.context() as patch:
            patch.setattr(module, "emit", lambda *args: good(*args).replace("isend", "irecv"))
            run("emit", *SMALL).refused("text-mismatch", code=1)
        assert callsites and tree(tmp_path) == {}
