"""README and constraints.txt say what is true: excerpt, commands, versions, paths."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

import mercurygen

ROOT = Path(mercurygen.__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def block(marker: str) -> str:
    """The fenced block after a comment `<!-- marker -->`."""
    found = re.search(rf"^<!-- {re.escape(marker)} -->\n```\w*\n(.*?)\n```$", README, re.M | re.S)
    assert found, f"README.md has no block after <!-- {marker} -->"
    return found[1]


def test_excerpt() -> None:
    """The excerpt is what stands in the generated file, function after function."""
    marker = re.search(r"^<!-- (excerpt: (\S+) (.*)) -->$", README, re.M)
    assert marker
    text = (ROOT / marker[2]).read_text(encoding="utf-8")
    lines, wanted = text.splitlines(), marker[3].split()
    spans = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    now = "\n\n\n".join(spans[name] for name in wanted)
    assert block(marker[1]) == now, f"README's excerpt is old; it is now:\n{now}"
    assert now in text and len(now.splitlines()) <= 26


def test_errors_of_the_cost_model() -> None:
    """What the benchmark prints, line by line."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cost_model.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert block("cost model") == ran.stdout.rstrip("\n"), f"it is now:\n{ran.stdout}"


def test_commands_of_the_table() -> None:
    """The table has every command, and no other; nothing of the last list exists."""
    from mercurygen.cli.main import cli

    context = click.Context(cli)
    table = README.split("## Commands")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`mercurygen ([a-z]+)", row)}
    assert named == set(cli.list_commands(context))
    missing = re.search(r"\* ((?:`[a-z ]+`,? ?(?:and )?)+)do not exist", README)
    assert missing
    later = {name.split()[0] for name in re.findall(r"`([a-z ]+)`", missing[1])} - {"topo"}
    assert later and not later & named


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[a-z-]+)", README))))
def test_options_exist(option: str) -> None:
    """Each option that README names is in the help of some command."""
    from mercurygen.cli.main import cli

    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    options = {one for c in commands for param in c.params for one in names_of(param)}
    assert option in options


def names_of(param: click.Parameter) -> list[str]:
    """`--run`, and `--no-run` as well."""
    return [*param.opts, *param.secondary_opts]


def test_paths_exist() -> None:
    """Every path that README and the design notes name in backquotes is there."""
    notes = (ROOT / "docs" / "design-notes.md").read_text(encoding="utf-8")
    tops = "mercurygen|tests|docs|benchmarks|templates|generated|examples"
    for path in re.findall(rf"`((?:{tops})/[\w./*-]*)`", README + notes):
        assert list(ROOT.glob(path.rstrip("/"))), path
    assert len(notes.splitlines()) <= 60


def test_ci_runs_the_test_command(tmp_path: Path) -> None:
    """`.ci/run` takes README's command: here with other programs for python3, which say so."""
    fake = '#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p $3/bin && : >$3/bin/activate; fi\n'
    fake += f'echo "$*" >>{tmp_path}/calls\necho "== 7 passed in 0.1s =="\n'
    (tmp_path / "python3").write_text(fake)
    (tmp_path / "python3").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ROOT / ".ci" / "run"
    ran = subprocess.run([script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "tests: == 7 passed" in ran.stdout.splitlines()[-1]
    calls = (tmp_path / "calls").read_text().splitlines()
    command = block("ci: tests")
    assert [f"python3 {call}" for call in calls[2:]] == command.replace('"', "").split(" && ")


def test_constraints_pin_what_is_required() -> None:
    """Every requirement is pinned, and the pin is inside its range; black is the same twice."""
    pins = {name.lower().replace("_", "-"): pin for name, pin in PINS.items()}
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *extras["torch"], *extras["test"]]:
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[requirement.name]), line
    assert f"black=={pins['black']}" in PROJECT["dependencies"]
    for name, text in (("torch", f"torch {pins['torch']}"), ("black", f"{pins['black']}")):
        assert text in README, f"README does not name the version of {name} that was run"


def test_versions_are_the_pinned_ones() -> None:
    """The tests run with what is pinned; where they do not, this is skipped, and says so."""
    differ = []
    for name, pin in PINS.items():
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            found = "not installed"
        differ += [f"{name} {found}, not {pin}"] if found != pin else []
    if differ:
        pytest.skip("; ".join(differ))


def test_core_needs_no_torch() -> None:
    """torch stands in an extra only."""
    assert not any(Requirement(line).name == "torch" for line in PROJECT["dependencies"])
    assert mercurygen.__version__ == "0.1.0" and "version" in PROJECT["dynamic"]


def test_licence_is_whole() -> None:
    """Apache-2.0 with its appendix, by SPDX name in the metadata."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10)) and len(text) > 11000
