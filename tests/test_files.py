"""The two files of a module: written both or not at all, and never over a person's work."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command import SMALL, SMALL_NAME, UNIFIED, folder, run, tree

from mercurygen.cli import files
from mercurygen.cli.files import read_text, state, write_pair
from mercurygen.emit.module import DIGEST_PREFIX, FIRST_LINE, digest
from mercurygen.errors import UserError

NAME = SMALL_NAME


def module(body: str, schedule: str = "operator attention\n") -> str:
    """A module as far as its head goes."""
    lines = "".join(f"    {line}\n" for line in schedule.splitlines())
    body = f'"""Doc.\n\nSchedule\n{lines}\n{body}\n"""\n'
    return f"{FIRST_LINE}\n#   mercurygen emit\n{DIGEST_PREFIX}{digest(body)}\n{body}"


PAIR = {"x.sched": "operator attention\n", "x.py": module("one")}
NEXT = {"x.sched": "operator other\n", "x.py": module("two", "operator other\n")}


def refused(slug: str, *args, **options) -> UserError:
    """The error of a write that must fail."""
    with pytest.raises(UserError) as caught:
        write_pair(*args, **options)
    assert caught.value.slug == slug, caught.value.render()
    return caught.value


def test_written_then_unchanged(tmp_path: Path) -> None:
    """The second time nothing is touched."""
    there = tmp_path / "a" / "b"
    assert [one.changed for one in write_pair(there, PAIR)] == [True, True]
    os.utime(there / "x.py", (1, 1))
    assert [one.changed for one in write_pair(there, PAIR)] == [False, False]
    assert (there / "x.py").stat().st_mtime == 1
    assert [one.changed for one in write_pair(there, NEXT)] == [True, True]
    assert tree(there) == {name: text.encode() for name, text in NEXT.items()}


def test_umask_holds(tmp_path: Path) -> None:
    """As readable as any new file."""
    write_pair(tmp_path, PAIR)
    other = tmp_path / "other"
    other.write_text("")
    assert (tmp_path / "x.py").stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    "there", [module("one").replace("one", "mine"), "print('mine')\n", "", FIRST_LINE + "\nx"]
)
def test_person_keeps_module(tmp_path: Path, there: str) -> None:
    """Edited, foreign, empty or cut off: it stays, and so does the schedule."""
    (tmp_path / "x.py").write_text(there)
    before = tree(tmp_path)
    refused("edited-by-hand", tmp_path, NEXT)
    assert tree(tmp_path) == before
    write_pair(tmp_path, NEXT, force=True)
    assert (tmp_path / "x.py").read_text() == NEXT["x.py"]


def test_person_keeps_schedule(tmp_path: Path) -> None:
    """A schedule that its module was not made from is a person's, unless it is the source."""
    write_pair(tmp_path, PAIR)
    edited = tmp_path / "x.sched"
    edited.write_text("operator edited\n")
    refused("edited-by-hand", tmp_path, NEXT)
    assert edited.read_text() == "operator edited\n"
    write_pair(tmp_path, NEXT, source=edited)
    assert edited.read_text() == NEXT["x.sched"]


def test_other_comments_are_no_edit(tmp_path: Path) -> None:
    """The command that searched is a comment, and may change."""
    write_pair(
        tmp_path,
        {**PAIR, "x.sched": "# mercurygen emit attention\n# why: it is\n" + PAIR["x.sched"]},
    )
    write_pair(tmp_path, NEXT)
    assert (tmp_path / "x.sched").read_text() == NEXT["x.sched"]


def test_comments_are_not_lost(tmp_path: Path) -> None:
    """A person's comments are theirs: of the whole line, or behind a directive."""
    for old in ("# mine\noperator attention\n", "operator attention  # mine\n"):
        write_pair(tmp_path, PAIR, force=True)
        schedule = tmp_path / "x.sched"
        schedule.write_text(old)
        for source in (None, schedule):
            error = refused("edited-by-hand", tmp_path, PAIR, source=source)
            assert error.note == "the first: # mine" and schedule.read_text() == old
        write_pair(tmp_path, {**PAIR, "x.sched": "# mine\n" + PAIR["x.sched"]})
        write_pair(tmp_path, PAIR, force=True)
        assert schedule.read_text() == PAIR["x.sched"]


def test_folders_are_not_left_behind(tmp_path: Path) -> None:
    """Where writing fails, the folders that were made for it go."""
    (tmp_path / "file").write_text("")
    before = tree(tmp_path)
    refused("cannot-write", tmp_path / "file" / "deeper", PAIR)
    refused("cannot-write", tmp_path / ("x" * 300), PAIR)
    refused("cannot-write", tmp_path / "nul\0", PAIR)
    assert tree(tmp_path) == before
    (tmp_path / "x.py").mkdir()
    refused("not-a-file", tmp_path, PAIR)
    assert not (tmp_path / "x.sched").exists()


def test_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rename did is undone."""
    write_pair(tmp_path, PAIR)
    before, real = tree(tmp_path), os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).suffix == ".py":
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    assert "Input/output error" in refused("cannot-write", tmp_path, NEXT).message
    assert tree(tmp_path) == before
    refused("cannot-write", tmp_path / "new", NEXT)
    assert tree(tmp_path) == before


def test_disk_full(tmp_path: Path) -> None:
    """A real limit on the size of files: nothing is half-written."""
    code = f"""
import resource, sys
from pathlib import Path
from mercurygen.cli.files import write_pair
from mercurygen.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
try:
    write_pair(Path({str(tmp_path)!r}), {{"x.sched": "a", "x.py": "b" * 5000}})
except UserError as error:
    print(error.slug, error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("cannot-write") and "File too large" in done.stdout, done
    assert tree(tmp_path) == {}


def test_reading(tmp_path: Path) -> None:
    """Only text, only files, only so much."""

    def slug(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_text(path, 100)
        return caught.value.slug

    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "nul").write_bytes(b"a\0b")
    (tmp_path / "large").write_bytes(b"a" * 101)
    os.mkfifo(tmp_path / "fifo")
    assert slug(tmp_path / "binary") == slug(tmp_path / "nul") == "not-text"
    assert slug(tmp_path / "large") == "file-too-large"
    assert slug(tmp_path) == slug(tmp_path / "fifo") == slug(Path("/dev/zero")) == "not-a-file"
    assert slug(tmp_path / "none") == "no-such-file"
    assert slug(tmp_path / "nul\0") == "cannot-read"
    (tmp_path / "good").write_text("héllo\n")
    assert read_text(tmp_path / "good") == "héllo\n"


def test_state() -> None:
    """By first line and digest."""
    good = module("one")
    assert state(good) == "ours"
    assert state(good.replace("one", "two")) == state(FIRST_LINE + "\n") == "edited"
    assert state(good[1:]) == state("") == "foreign"


def test_emit_after_an_edit(tmp_path: Path) -> None:
    """The command line: refused with what to do; done with --force."""
    with folder(tmp_path):
        run("emit", *SMALL).done()
        path = Path("generated", f"{NAME}.py")
        emitted = path.read_text()
        path.write_text(emitted.replace("return out", "return 1 * out"))
        before = tree(tmp_path)
        schedule = path.with_suffix(".sched")
        schedule_text = schedule.read_text()
        run("emit", "--schedule", schedule).refused("edited-by-hand", "--force", "--name")
        assert tree(tmp_path) == before
        run("emit", *SMALL, "--force").done()
        assert path.read_text() == emitted and schedule.read_text() == schedule_text


def test_hand_written_schedule(tmp_path: Path) -> None:
    """It is emitted to `generated`; from its normal form come the same bytes, in place."""
    with folder(tmp_path):
        text = UNIFIED.replace("parallelize H over gpu\n", "# why\nparallelize H over gpu  # so\n")
        Path("mine.sched").write_text(text)
        run("emit", "--schedule", "mine.sched").done()
        assert Path("mine.sched").read_text() == text
        made = Path("generated", "mine.sched").read_text()
        assert made.startswith("# a comment\n# why\n# so\noperator")
        assert "\nreshard out, lse: H to S along gpu\n" in made
        before = tree(Path("generated"))
        assert "(unchanged)" in run("emit", "--schedule", "generated/mine.sched").done()
        with folder(tmp_path / "generated"):
            assert "(unchanged)" in run("emit", "--schedule", "mine.sched").done()
        assert tree(Path("generated")) == before
        run("check").done()
