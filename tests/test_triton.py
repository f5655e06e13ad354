"""The Triton kernels: right in Triton's interpreter against float64, and compiled without a GPU.

They run nowhere else here: how fast they are, and that a GPU gives the same numbers, is not shown.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import black
import pytest

from mercurygen.emit.kernels import IMPORTS, backward, forward
from mercurygen.ir.kernel import DEFAULTS, FORWARD, RANGES, Options

RUNS = Path(__file__).with_name("triton_runs.py")
HEAD = "\n".join(
    [
        "from __future__ import annotations\n",
        *("import torch", *IMPORTS, "from torch import Tensor"),
    ]
)

# The interpreter multiplies bits of bfloat16: there products are of float32, rounded as before.
UPCAST = """

@triton.jit
def _product_in_float32(left, right, acc=None, input_precision: tl.constexpr = "ieee"):
    return tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
"""

SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # bytes that a program may have at most
SPILLED = 64  # bytes of a thread, of default tiles: a few scalars, no part of a tile

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def module(options: Options = (), backward_options: Options | None = None) -> str:
    """The kernels alone, as a file."""
    rest = options if backward_options is None else backward_options
    return "\n\n\n".join([HEAD, forward(options), backward(rest)]) + "\n"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict]:
    """What `triton_runs` prints, given what it does and a module's text."""
    folder = tmp_path_factory.mktemp("triton")

    def run(what: str, text: str) -> dict:
        path = folder / f"{what}.py"
        path.write_text(text, encoding="utf-8")
        settings = {"TRITON_CACHE_DIR": str(folder / "cache")}
        settings |= {"TRITON_INTERPRET": "1"} if what == "numbers" else {}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(RUNS), what, str(path)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def numbers(ran: Callable[[str, str], dict]) -> dict:
    """Errors of every case: small tiles, so that short sequences have many."""
    text = module((("rows", 128), ("cols", 64)))  # of float32 a quarter: 32 and 16
    text = text.replace("tl.dot(", "_product_in_float32(")
    return ran("numbers", text.replace(HEAD, HEAD + UPCAST))


@needs_triton
def test_numbers(numbers: dict) -> None:
    """Out, lse and gradients of every case are those of float64, and so is what runs on CPUs.

    Where scores are large, or of 16 bits, torch's kernel has errors too: at most 2.5 times those.
    B51: products of bfloat16 are made in float32, for the interpreter's are garbage.
    """
    cases = {name: x for name, x in numbers.items() if isinstance(x, dict) and "floor" in x}
    assert len(cases) >= 40
    for name, case in cases.items():
        for result, error in case["found"].items():
            single = case["one device"][result] if "one device" in case else 0.0
            assert error <= case["floor"] + 2.5 * single, (name, result, case)


@needs_triton
def test_blind_rows_keep_their_bits(numbers: dict) -> None:
    """A block that shows a row nothing leaves its (out, lse) as they were."""
    assert numbers["kept"] is True


@needs_triton
def test_unseen_tiles_are_not_read(numbers: dict) -> None:
    """Whole tiles of columns that the mask hides are skipped."""
    assert numbers["skipped"] is True


@needs_triton
def test_offsets_of_64_bits(numbers: dict) -> None:
    """B53: rows past what 32 bits count are read where they are."""
    assert max(numbers["far"].values()) <= 2e-3, numbers["far"]


@needs_triton
def test_compiles_without_a_gpu(ran: Callable[[str, str], dict]) -> None:
    """The default tiles fit both kinds of GPU, and next to nothing is spilled."""
    found = ran("compile", module())
    assert len(found) == 16
    for name, used in found.items():
        print(name, used)
        assert used["shared"] <= SHARED[name.split()[0]], (name, used)
        assert used["stack"] <= SPILLED, (name, used)


def test_text_is_formatted() -> None:
    """The text is black's at 100 columns, its functions have docstrings and at most 60 lines."""
    text = module()
    mode = black.Mode(line_length=100, target_versions={black.TargetVersion.PY311})
    assert black.format_str(text, mode=mode) == text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), node.name
            assert node.end_lineno - node.lineno + 1 <= 60, node.name


def test_defaults_are_legal() -> None:
    """Each is a value that a schedule may give, and is in the text."""
    for values in DEFAULTS.values():
        assert all(values[name] in RANGES[name] for name in RANGES)
    assert "rows=64, cols=32" in forward((("rows", 64), ("cols", 32)))
    assert f"num_stages={DEFAULTS['sm_80', FORWARD]['stages']}" in forward(())
