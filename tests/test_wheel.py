"""An installed wheel, run from another folder, emits the same bytes as the checkout; offline."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mercurygen

ROOT = Path(mercurygen.__file__).parent.parent
EMIT = ("attention", "--topo", "a100x16")

pytest.importorskip("hatchling")
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not run from a checkout", allow_module_level=True)


def run(*command: object, cwd: Path, path: Path | None = None) -> str:
    """Run a command with `path` as PYTHONPATH; its output, or what went wrong."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = clean | ({"PYTHONPATH": str(path)} if path else {})
    words = list(map(str, command))
    ran = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def wheel_of(source: Path, into: Path) -> Path:
    """Build a wheel with what is installed here."""
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", into)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=into.parent)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheels that the checkout and its source distribution give."""
    tmp = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp, cwd=ROOT)
    (archive,) = tmp.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp, filter="data")
    source = archive.with_name(archive.name.removesuffix(".tar.gz"))
    return wheel_of(ROOT, tmp / "from_checkout"), wheel_of(source, tmp / "from_sdist")


@pytest.fixture(scope="module")
def installed(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, which goes before what is installed in this Python."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--target", target)
    run(sys.executable, "-m", "pip", "install", *options, wheels[1], cwd=target)
    return target


def test_wheel_holds_what_is_read_at_run_time(wheels: tuple[Path, Path]) -> None:
    """Templates, topologies, designs and the mark of a typed package; no tests."""
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    package = ROOT / "mercurygen"
    data = {f for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    wanted = {str(file.relative_to(ROOT)) for file in data}
    wanted |= {f"mercurygen/templates/{file.name}" for file in (ROOT / "templates").iterdir()}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_distribution_gives_the_same_wheel(wheels: tuple[Path, Path]) -> None:
    """Same files, same bytes; it holds the tests as well."""
    one, other = map(zipfile.ZipFile, wheels)
    assert {n: one.read(n) for n in one.namelist()} == {n: other.read(n) for n in other.namelist()}
    source = wheels[1].parent.parent / "mercurygen-0.1.0"
    for name in ("tests/test_wheel.py", "constraints.txt", "pyproject.toml", "LICENSE"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()


def test_installed_wheel_emits_the_same_bytes(installed: Path, tmp_path: Path) -> None:
    """Search and emit through the installed command, and through the checkout's."""
    where = "import mercurygen; print(mercurygen.__file__)"
    found = run(sys.executable, "-c", where, cwd=tmp_path, path=installed)
    assert Path(found.strip()).is_relative_to(installed)
    wheel, checkout = tmp_path / "wheel", tmp_path / "checkout"
    script = installed / "bin" / "mercurygen"
    run(sys.executable, script, "emit", *EMIT, "-o", wheel, cwd=tmp_path, path=installed)
    main = "import sys; from mercurygen.cli.main import main; sys.exit(main())"
    run(sys.executable, "-c", main, "emit", *EMIT, "-o", checkout, cwd=ROOT, path=ROOT)
    written = sorted(file.name for file in wheel.iterdir())
    assert [name.rpartition(".")[2] for name in written] == ["py", "sched"]
    assert written == sorted(file.name for file in checkout.iterdir())
    for name in written:
        assert (wheel / name).read_bytes() == (checkout / name).read_bytes(), name


def test_installed_wheel_checks_what_is_checked_in(installed: Path) -> None:
    """Every file in generated/, emitted again by the wheel, is what the checkout has."""
    script = installed / "bin" / "mercurygen"
    run(sys.executable, script, "check", ROOT / "generated", cwd=installed, path=installed)
