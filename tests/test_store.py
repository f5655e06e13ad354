"""Kept answers: the same bytes, by a key of all that they depend on, whatever files there are."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
from command import run

from mercurygen import operators
from mercurygen.cli import request, store
from mercurygen.cli.options import NAMES, split

ASKED = ("search", "attention", "--topo", "a100x8", "--group", "gpu=2", "--seq", "1k")


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of answers; all of them are kept, however soon they are there."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(store, "KEPT_FROM", 0.0)
    return tmp_path / "kept"


def wanted(**options) -> request.Request:
    """A small search."""
    given = dict.fromkeys(NAMES) | {"group": {"gpu": 2}, "seq": 1024} | options
    return request.make("attention", "a100x8", split(given))


def test_a_kept_answer_is_the_answer(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, as text and as JSON, and nothing is searched; not with --no-cache."""
    first = {args: run(*ASKED, *args).done() for args in ((), ("--json",))}
    assert len(list(where.iterdir())) == 2
    fresh = {args: run(*ASKED, *args, "--no-cache").done() for args in first}
    assert fresh == first

    def searched(*_) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(request, "run", searched)
    assert {args: run(*ASKED, *args).done() for args in first} == first
    assert "searched" in run(*ASKED, "--no-cache").err
    assert "searched" in run(*ASKED[:-1], "2k").err


@pytest.mark.parametrize(
    "spoilt", ["", "{", "[]", "null", "cut", "text", "key", "\\udcff", "folder"]
)
def test_what_is_not_whole_is_written_again(where: Path, spoilt: str) -> None:
    """Truncated files, those of others, and those under another's name."""
    name, text = store.key("search", wanted(), ()), "answer\n"
    store.put(where, name, text)
    path = where / f"{name}.json"
    good = path.read_text(encoding="utf-8")
    kept = json.loads(good)
    match spoilt:
        case "cut":
            path.write_text(good[:-9], encoding="utf-8")
        case "text" | "key":
            path.write_text(json.dumps({**kept, spoilt: "another"}), encoding="utf-8")
        case "folder":
            path.unlink()
            path.mkdir()
        case _:
            path.write_text(spoilt, encoding="utf-8", errors="surrogateescape")
    assert store.get(where, name) is None
    assert store.answer("search", wanted(), (), lambda: text) == text
    assert store.get(where, name) == (None if spoilt == "folder" else text)


def test_everything_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of a request, every number of problem and topology, operator and package."""
    asked = wanted()
    level = replace(asked.topology.levels[0], latency=1.0)
    others = [replace(asked, problem=replace(asked.problem, seq=2048))]
    others.append(replace(asked, topology=replace(asked.topology, levels=(level,))))
    names = [field.name for field in fields(asked)]
    source = operators.source_of("attention")
    monkeypatch.setattr(operators, "source_of", lambda ref: source)
    others += [replace(asked, **{name: f"another {name}"}) for name in names]
    known = {store.key("search", one, ()) for one in (asked, *others)}
    known |= {store.key("explain", asked, ()), store.key("search", asked, (True,))}
    monkeypatch.setattr(operators, "source_of", lambda ref: (source[0], "another text"))
    known.add(store.key("search", asked, ()))
    monkeypatch.setattr(store, "package", lambda: "another version")
    known.add(store.key("search", asked, ()))
    assert len(known) == len(others) + 5


def _use(where: Path, name: str, text: str) -> None:
    for _ in range(100):
        store.put(where, name, text)
        assert store.get(where, name) == text


def test_processes_at_a_time(where: Path) -> None:
    """What is read is whole, while four processes write it; nothing is left over."""
    workers = [
        multiprocessing.get_context("fork").Process(target=_use, args=(where, "a", "x" * 50_000))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [path.name for path in where.iterdir()] == ["a.json"]


def test_the_oldest_go(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is bounded."""
    monkeypatch.setattr(store, "MOST", 3000)
    for number in range(6):
        store.put(where, f"{number}", "x" * 800)
        os.utime(where / f"{number}.json", (number, number))
    store.put(where, "last", "x" * 800)
    assert sorted(path.stem for path in where.iterdir()) == ["4", "5", "last"]


def test_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, one that is a file, none asked for: the answer is worked out."""
    monkeypatch.setattr(store, "KEPT_FROM", 0.0)
    (tmp_path / "file").write_text("mine")
    for value in ("", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        monkeypatch.setenv(store.VARIABLE, value)
        assert store.answer("search", wanted(), (), lambda: "text") == "text"
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "base"))
    assert store.folder() == tmp_path / "base" / "mercurygen"
