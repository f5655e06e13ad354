"""`benchmarks/search.py --artifact`: the enumeration of a checkout is counted and timed.

The checkout here is a stand-in with the entry points of the paper's artifact; its programs are
numbers, every other one twice the same.
"""

from __future__ import annotations

from pathlib import Path

import artifact
import pytest
import search

FILES = {
    "utils/flash_attn_dsl.py": """
import flash_attn  # is not there: the file is not run
flash_attn_manage_reduction = \"\"\"
def attention(q):
    B = Axis("B", {BATCH}); S = Axis("S_q", {SEQ_LEN}); H = Axis("H", {HEADS})
    load(q, [{HEAD_DIM}, {RED_DIM}])
\"\"\"
""",
    "mercury/__init__.py": "",
    "mercury/frontend/__init__.py": "",
    "mercury/frontend/parser.py": """
class IRBuilder:
    def visit(self, node):
        return node.name
""",
    "mercury/ir/__init__.py": "",
    "mercury/ir/distributed.py": """
class DeviceMesh:
    def __init__(self, devices, shape):
        assert shape == (len(devices),)
        self.devices = devices
""",
    "mercury/ir/loop_eliminating.py": """
def eliminate_loops(program):
    program.append("eliminated")
""",
    "mercury/backend/__init__.py": "",
    "mercury/backend/pytorch/__init__.py": "",
    "mercury/backend/pytorch/codegen.py": """
def generate_pytorch_code(program):
    name, number, done = program
    return f"{name} {number // 2} {done}"
""",
    "mercury/search/__init__.py": "",
    "mercury/search/search.py": """
def search(program, mesh, split):
    assert split == ["S_q", "S_kv"]
    for number in range(10 * len(mesh.devices)):
        yield [program, number]
""",
}


def checkout(folder: Path, **changed: str) -> Path:
    """A stand-in; files of it by name without folder and ending may be changed."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text), encoding="utf-8")
    return folder


def test_programs_are_counted(tmp_path: Path) -> None:
    """All, and the different texts among them."""
    found = artifact.enumerated(checkout(tmp_path), 4)
    assert found[:3] == (4, 40, 20)
    assert found.seconds > 0 and found.mib > 1


def test_what_is_not_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without it, and code that fails: a line that says so, and no figure."""
    with pytest.raises(artifact.NotRun, match="is no checkout"):
        artifact.enumerated(tmp_path / "nothing", 4)
    broken = checkout(tmp_path, search="def search(*_):\n    raise OSError('no GPU')\n")
    monkeypatch.setattr(search, "ARTIFACT", (4,))
    search.searches(broken, most=0)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "artifact      4  not run: the artifact's own code failed: OSError: no GPU"
