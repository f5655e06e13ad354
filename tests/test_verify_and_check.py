"""`verify` and `check` on files that people have edited, moved or lost; the progress line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, SMALL, SMALL_NAME, folder, run, spawn, tree

from mercurygen.cli import formatter, progress
from mercurygen.emit.module import digest, split_digest

NAME = SMALL_NAME


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small pair in `generated/`."""
    path = tmp_path_factory.mktemp("emitted")
    with folder(path):
        run("emit", *SMALL).done()
    return path


# --- verify -----------------------------------------------------------------------------------


def test_verify_without_running(emitted: Path) -> None:
    """Proof, digest and call sites of a module and of a schedule."""
    paths = [emitted / "generated" / f"{NAME}{suffix}" for suffix in (".py", ".sched")]
    out = run("verify", "--no-run", *paths).done()
    for word in ("proved: 4 ranks", "exactly once", "as this version emits it", "call sites"):
        assert word in out, word


def edited(emitted: Path, tmp_path: Path, old: str, new: str) -> Path:
    """A copy of the small module with an edit."""
    text = (emitted / "generated" / f"{NAME}.py").read_text()
    assert text.count(old) == 1, old
    path = tmp_path / "edited.py"
    path.write_text(text.replace(old, new))
    return path


def test_verify_on_real_ranks(emitted: Path, tmp_path: Path) -> None:
    """In a process of its own that imports torch: a good file, and two that are refused before."""
    good = edited(emitted, tmp_path, "# --- checks", "# My checks\n# --- checks")
    done = spawn("verify", str(good), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "edited by hand" in done.stdout and "7 checks on each of 4" in done.stdout
    old = "weight = torch.sigmoid(share_lse - lse)"
    wrong = edited(emitted, tmp_path, old, old.replace("sigmoid", "tanh"))
    done = spawn("verify", str(wrong), cwd=tmp_path, timeout=100)
    assert done.returncode == 1 and "error[result]: virtual rank " in done.stderr, done
    assert "is allowed" in done.stderr and "Traceback" not in done.stderr
    old = "width = "
    bad = edited(emitted, tmp_path, old, "width = 1 // 0 + ")
    done = spawn("verify", str(bad), cwd=tmp_path, timeout=100)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr, done
    assert "_block_forward" in done.stderr and "Traceback" not in done.stderr


FAILING = """
import sys
from mercurygen.cli import ranks
from mercurygen.errors import UserError
good = open(sys.argv[1]).read()
for old, new in (("sigmoid(", "tanh("), ("width = ", "width = 1 // 0 + ")):
    assert good.count(old) == 1, old
    try:
        ranks.run(good.replace(old, new), good, "edited.py", 4, 90)
    except UserError as error:
        print(error.render())
"""


def test_what_real_ranks_say(emitted: Path, tmp_path: Path) -> None:
    """Of the same two, which do not come so far with `verify`."""
    command = [sys.executable, "-c", FAILING, str(emitted / "generated" / f"{NAME}.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("error[ranks-failed]: rank ") == 2, done
    assert "is allowed" in done.stdout and "ZeroDivisionError" in done.stdout
    assert "_block_forward" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_verify_catches_other_communication(emitted: Path, tmp_path: Path) -> None:
    """The text is compared before anything runs."""
    path = edited(emitted, tmp_path, "P2POp(dist.isend", "P2POp(dist.irecv")
    run("verify", path).refused("text-mismatch", code=1)


def test_verify_without_torch(emitted: Path, tmp_path: Path) -> None:
    """It says so; with --no-run it is not missed."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    file = str(emitted / "generated" / f"{NAME}.py")
    for options, code in (((), 1), (("--no-run",), 0)):
        command = [sys.executable, "-m", "mercurygen", "verify", file, *options]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done
        assert ("error[no-torch]" in done.stderr) == (code == 1)


def test_verify_without_numpy(emitted: Path, tmp_path: Path) -> None:
    """torch warns that it is not there; nobody needs to know."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy here')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    file = str(emitted / "generated" / f"{NAME}.py")
    command = [sys.executable, "-m", "mercurygen", "verify", file]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done


# --- check ------------------------------------------------------------------------------------


@pytest.fixture
def pair(emitted: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the small pair; the module."""
    for suffix in (".sched", ".py"):
        text = (emitted / "generated" / f"{NAME}{suffix}").read_text()
        (tmp_path / f"{NAME}{suffix}").write_text(text)
    return tmp_path / f"{NAME}.py"


def found(pair: Path, *words: str) -> str:
    """What `check` says, which is that something is wrong; it writes nothing."""
    before = tree(pair.parent)
    ran = run("check", pair.parent)
    assert ran.code == 1 and not ran.err, ran
    for word in words:
        assert word in ran.out, (word, ran.out)
    assert tree(pair.parent) == before
    return ran.out


def test_check_cases(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the command that mends it, which does mend it."""
    run("check", pair.parent).done()
    text = pair.read_text()
    command = f"mercurygen emit --schedule {pair.with_suffix('.sched')} -o {pair.parent}"
    pair.unlink()
    assert f"missing: its schedule is there\n  fix: {command}\n" in found(pair)
    run(*command.split()[1:]).done()
    pair.write_text(text.replace("return out", "return 1 * out"))
    found(pair, "edited by hand", f"{command} --force")
    diff = run("check", pair.parent, "--diff").out
    assert "return 1 * out" in diff
    claimed, body = split_digest(text)
    older = body.replace("Attend over", "Attend to")
    pair.write_text(text.replace(body, older).replace(claimed or "", digest(older)))
    found(pair, "out of date", command)
    run(*command.split()[1:]).done()
    pair.write_text("print()\n")
    found(pair, "not written by mercurygen")
    pair.write_text(text)
    run("check", pair.parent).done()


def test_check_schedules(pair: Path) -> None:
    """Orphans, other texts of one schedule, broken ones, a name that is none."""
    schedule, text = pair.with_suffix(".sched"), pair.with_suffix(".sched").read_text()
    schedule.write_text(text.replace("tp 1", "tp  1"))
    assert "out of date" not in found(pair, "not in normal form")
    schedule.write_text(text.replace("shift", "shfit"))
    found(pair, "error[unknown-directive]", "did you mean `shift`?")
    schedule.write_text(text.replace("seq=1024", "seq=2048"))
    found(pair, "out of date: its schedule or the generator changed")
    schedule.write_text(text.replace("tp 1", "tp  1"))
    module = pair.read_text()
    pair.write_text(module + "# mine\n")
    found(pair, "2 of the files of 1 schedules need attention")
    (pair.parent / f"{NAME}2.sched").write_text("?")
    found(pair, "3 of the files of 2 schedules need attention")
    (pair.parent / f"{NAME}2.sched").unlink()
    pair.write_text(module)
    schedule.unlink()
    found(pair, "orphaned")
    (pair.parent / "other.py").write_text("mine\n")
    schedule.write_text(text)
    run("check", pair.parent).done()
    (pair.parent / "a-b.sched").write_text(text)
    found(pair, "error[not-a-name]")


def test_check_needs_the_pinned_black(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version is named, instead of a difference in every file."""
    assert formatter.pinned() == formatter.installed()
    monkeypatch.setattr(formatter, "installed", lambda: "1.0")
    run("check", pair.parent).refused("formatter-version", "pip install black==", code=1)
    monkeypatch.setattr(formatter, "installed", lambda: None)
    run("check", pair.parent).refused("formatter-version", "not installed", code=1)


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal, after a second, and wiped afterwards; else nothing."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for watched, wanted in ((False, ""), (True, "\r2 of 3 schedules priced\033[K\r\033[K")):
        now[0] = 0.0
        monkeypatch.setattr(sys.stderr, "isatty", lambda watched=watched: watched, raising=False)
        with progress.Progress() as tell:
            tell("schedules priced", 1, 3)
            now[0] = 1.5
            tell("schedules priced", 2, 3)
            now[0] = 1.51
            tell("schedules priced", 3, 3)
        assert capsys.readouterr().err == wanted
