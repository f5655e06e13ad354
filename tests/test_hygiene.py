"""What keeps the code readable: sizes, docstrings, nothing hidden, one format."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import black
import jinja2
import pytest

import mercurygen

ROOT = Path(mercurygen.__file__).parent.parent
PACKAGE = ROOT / "mercurygen"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EVERYWHERE = [
    *SOURCES,
    *(
        path
        for top in ("tests", "benchmarks", "docs")
        for path in sorted(ROOT.glob(f"{top}/**/*.py"))
    ),
]
TEMPLATES = sorted((ROOT / "templates").iterdir())

LONGEST_FUNCTION = 60
LONGEST_FILE = 400
# A template is one thing to read. `layout`, `layout_pinned` and `self_check` are the helpers of the
# module's contract, several functions of fixed text each.
LONGEST_TEMPLATE = 40
LONGER_TEMPLATES = {
    "layout.py.j2": 100,
    "layout_pinned.py.j2": 125,
    "self_check.py.j2": 50,
    "to_owners.py.j2": 50,
    "operator_layout.py.j2": 100,
    "operator_self_check.py.j2": 60,
    "operator_land.py.j2": 45,
    "check_inputs.py.j2": 50,  # facts of all ranks, positions, sums: each with its message
    "envelope.py.j2": 180,  # a module of its own
    # The Triton kernels: signatures take a line for each argument.
    "triton_block.py.j2": 115,
    "triton_block_backward.py.j2": 90,
    "triton_forward.py.j2": 190,
    "triton_backward.py.j2": 280,
}
ALL_TEMPLATES = 2835

# `mercurygen verify` runs the module that it is given, on processes of its own: its purpose.
# `build` compiles what was emitted, and runs nothing of it.
RUNS_A_FILE = {
    PACKAGE / "cli" / "ranks.py": {"exec", "compile"},
    PACKAGE / "virtual" / "run.py": {"exec", "compile"},
    PACKAGE / "cli" / "build.py": {"compile"},
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    """A file's name as a failing test shows it."""
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    """A parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def size(node: ast.AST) -> int:
    """Lines of a definition, its decorators not counted."""
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sizes(path: Path) -> None:
    """No function over 60 lines, no file over 400."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    functions = (node for node in ast.walk(tree(path)) if isinstance(node, Function))
    assert not [f.name for f in functions if size(f) > LONGEST_FUNCTION]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings(path: Path) -> None:
    """Every file with code, and every public class, function and method, says what it is."""
    module = tree(path)
    if module.body:
        assert ast.get_docstring(module), "the file has no docstring"
    assert not [node.name for node in public(module) if not ast.get_docstring(node)]


def public(node: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """Public definitions of a file, and of its public classes; not those inside functions."""
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_hidden(path: Path) -> None:
    """No code from text, no pickles, no environment; printing is the command line's."""
    module = tree(path)
    calls = [n.func.id for n in ast.walk(module) if isinstance(n, ast.Call) and named(n.func)]
    forbidden = {"exec", "eval", "compile", "__import__"} - RUNS_A_FILE.get(path, set())
    assert not forbidden & set(calls)
    assert "print" not in calls or PACKAGE / "cli" in path.parents
    imported = {n.module or "" for n in ast.walk(module) if isinstance(n, ast.ImportFrom)}
    for node in ast.walk(module):
        imported |= {x.name for x in node.names} if isinstance(node, ast.Import) else set()
    assert not {"pickle", "marshal", "shelve", "ctypes"} & {name.split(".")[0] for name in imported}
    assert not [n for n in ast.walk(module) if isinstance(n, ast.ExceptHandler) and n.type is None]
    assert not [n.lineno for n in ast.walk(module) if isinstance(n, ast.Global)]


def named(node: ast.AST) -> bool:
    """A plain name: `re.compile` is none."""
    return isinstance(node, ast.Name)


@pytest.mark.parametrize("path", [*EVERYWHERE, *TEMPLATES], ids=relative)
def test_text(path: Path) -> None:
    """Nothing left to do, no tabs, no blanks at the ends of lines, a line end at the end."""
    text = path.read_text(encoding="utf-8")
    marks = re.findall("TO" + r"DO|FIX" + r"ME|X" + "XX", text)
    assert not marks and "\t" not in text
    assert not [n for n, line in enumerate(text.splitlines(), 1) if line != line.rstrip()]
    assert not text or text.endswith("\n")


@pytest.mark.parametrize("path", EVERYWHERE, ids=relative)
def test_black(path: Path) -> None:
    """Formatted by the pinned black."""
    text = path.read_text(encoding="utf-8")
    mode = black.Mode(line_length=100, target_versions={black.TargetVersion.PY311})
    assert not text.strip() or black.format_str(text, mode=mode) == text


def test_ruff() -> None:
    """No unused name or import, sorted imports, and what else pyproject.toml selects."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    command = [ruff, "check", "--no-cache", "--output-format=concise", *map(str, EVERYWHERE)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# --- templates ------------------------------------------------------------------------------


def test_template_sizes() -> None:
    """Templates are short, and few."""
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in TEMPLATES}
    long = {n: x for n, x in lines.items() if x > LONGER_TEMPLATES.get(n, LONGEST_TEMPLATE)}
    assert not long
    assert sum(lines.values()) <= ALL_TEMPLATES


@pytest.mark.parametrize("path", TEMPLATES, ids=relative)
def test_templates_hold_fixed_text(path: Path) -> None:
    """Loops and communication come from Python: a template has values, and `if` at most."""
    parsed = jinja2.Environment().parse(path.read_text(encoding="utf-8"))
    nodes = {type(node).__name__ for node in parsed.find_all(jinja2.nodes.Node)}
    assert nodes <= {"Output", "TemplateData", "Name", "If", "CondExpr", "Const", "Not"}, path.name


def test_templates_are_used() -> None:
    """Each is named in the emitter."""
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.glob("emit/*.py"))
    assert not [path.name for path in TEMPLATES if not used(path.name.split(".")[0], code)]


def used(name: str, code: str) -> bool:
    """Named whole, or as a stem that an f-string in the code completes."""
    stem = name.split("_")[0]
    return f'"{name}"' in code or f'f"{stem}_' in code
