"""The tutorial's operators against float64, and its page: each block is in a file, or runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dsl import as_written

import mercurygen
from mercurygen import operators
from mercurygen.dsl.interpret import Evaluator, interpret
from mercurygen.ir.operator import Domain

ROOT = Path(mercurygen.__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorial"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^(?:<!-- (\w+) -->\n)?```(\w*)\n(.*?)\n```$", PAGE, re.M | re.S)
LARGEST = 2**63 - 1


def both(name, tmp_path, tensors, **options):
    """As written and interpreted, which must be equal bit for bit."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    written = as_written(text, name, tmp_path)(**tensors, **options)
    written = written if isinstance(written, tuple) else (written,)
    got = interpret(operators.load(f"{FOLDER}/{name}.py::{name}"), tensors, **options)
    for a, b in zip(written, got.values(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    return written


@pytest.mark.parametrize("tiles", [{}, {"N": 4, "M": 3}, {"N": 1, "M": 1}, {"M": 5}], ids=str)
@pytest.mark.parametrize("sizes", [(11, 9), (1, 1), (3, 130)], ids=str)
def test_nearest(tmp_path, sizes, tiles):
    torch.manual_seed(0)
    # small integers: many points are equally near, and distances are exact
    x, y = (torch.randint(-2, 3, (size, 2)).double() for size in sizes)
    distance, index = both("nearest", tmp_path, {"x": x, "y": y}, tiles=tiles)
    squares = ((x[:, None] - y) ** 2).sum(-1)
    assert torch.equal(distance, squares.amin(1)) and distance.dtype == torch.float64
    smallest = [min(range(len(row)), key=lambda n, row=row: (row[n], n)) for row in squares]
    assert index.tolist() == smallest


def test_nearest_of_none_and_out_of_reach(tmp_path):
    x = torch.tensor([[0.0, 0.0], [3e38, 0.0]])
    distance, index = both("nearest", tmp_path, {"x": x, "y": torch.zeros(0, 2)})
    assert distance.tolist() == [torch.inf] * 2 and index.tolist() == [LARGEST] * 2
    # a distance too large for a float still has an index: the identity loses the tie
    y = torch.tensor([[-3e38, 0.0], [-3e38, 1.0]])
    distance, index = both("nearest", tmp_path, {"x": x, "y": y}, tiles={"M": 1})
    assert distance.tolist() == [torch.inf] * 2 and index.tolist() == [0, 0]


def test_nearest_at_any_positions():
    torch.manual_seed(0)
    y = torch.randint(-2, 3, (20, 2)).double()
    x, order = torch.randint(-2, 3, (7, 2)).double(), torch.randperm(20)
    op = operators.load(f"{FOLDER}/nearest.py::nearest")
    whole = interpret(op, {"x": x, "y": y})
    found = interpret(op, {"x": x, "y": y[order]}, tiles={"M": 3}, positions={"M": order})
    assert all(torch.equal(found[name], whole[name]) for name in whole)


STATES = st.tuples(st.sampled_from([0.0, 0.5, 1.0, torch.inf]), st.integers(0, 3))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(STATES, STATES, STATES)
def test_closer_is_a_merge(a, b, c):
    """Commutative, associative, and the identity changes nothing."""
    op = operators.load(f"{FOLDER}/nearest.py::nearest")
    combine = op.combine_of("distance")

    def merge(left, right):
        states = (torch.tensor(x) for x in (*left, *right))
        evaluator = Evaluator(None, dict(zip(combine.merge.parameters, states, strict=True)))
        for line in combine.merge.body:
            evaluator.assign(line)
        return tuple(evaluator.value(expr).item() for expr in combine.merge.result)

    assert merge(a, b) == merge(b, a)
    assert merge(a, merge(b, c)) == merge(merge(a, b), c)
    assert merge(a, combine.identity) == merge(combine.identity, a) == a


@pytest.mark.parametrize("tiles", [{}, {"T": 4, "S": 3}, {"T": 1, "S": 1}, {"S": 5}], ids=str)
@pytest.mark.parametrize("width", [1, 3, 12, 128])
def test_smooth(tmp_path, width, tiles):
    torch.manual_seed(0)
    x, rate = torch.randn(12, 3).double(), 40 * torch.rand(12).double()
    mask = {} if width == 128 else {"mask": Domain("window", width)}
    (out,) = both("smooth", tmp_path, {"x": x, "rate": rate}, tiles=tiles, **mask)
    expected = torch.zeros(12, 3, dtype=torch.float64)
    for i in range(12):
        for j in range(max(0, i - width + 1), i + 1):
            expected[i] += torch.exp(-rate[i] * (i - j)) * x[j]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_the_pages_excerpts_stand_in_nearest():
    text = (FOLDER / "nearest.py").read_text(encoding="utf-8")
    excerpts = [block for mark, _, block in BLOCKS if mark == "excerpt"]
    assert len(excerpts) == 5 and all(f"\n{block}\n" in text for block in excerpts)
    assert {mark for mark, _, _ in BLOCKS} == {"excerpt", "run", "output", "emit"}
    assert PAGE.count("```") == 2 * len(BLOCKS)


def test_the_page_prints_what_it_says():
    runs = [n for n, (mark, _, _) in enumerate(BLOCKS) if mark == "run"]
    assert len(runs) == 3
    for n in runs:
        command = [sys.executable, "-c", BLOCKS[n][2]]
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert BLOCKS[n + 1][0] == "output" and ran.stdout == BLOCKS[n + 1][2] + "\n", ran.stdout


def test_the_pages_commands_emit(tmp_path, monkeypatch):
    for name in ("nearest.py", "smooth.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = [line for mark, _, text in BLOCKS if mark == "emit" for line in text.split("\n")]
    assert len(commands) == 4
    for command in commands:
        program, *words = command.split()
        assert program == "mercurygen"
        run(*words).done()
    made = sorted(path.name for path in (tmp_path / "generated").iterdir())
    assert made == [f"{x}_a100x8.{end}" for x in ("nearest", "smooth") for end in ("py", "sched")]
    schedule = (tmp_path / "generated" / "nearest_a100x8.sched").read_text(encoding="utf-8")
    assert "parallelize N over gpu\nshard y: M over gpu\n" in schedule
    schedule = (tmp_path / "generated" / "smooth_a100x8.sched").read_text(encoding="utf-8")
    assert "shift x: S along gpu direct\n" in schedule and " window=1024\n" in schedule


def test_the_pages_paths_exist():
    for path in re.findall(r"`((?:docs|mercurygen)/[\w./]+)`", PAGE):
        assert (ROOT / path).is_file(), path
