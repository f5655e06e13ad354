"""A set of schedules and the module that chooses among them: its files, and what it chooses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from command import folder, run, tree
from ranks import run_ranks

from mercurygen.cli.check_command import _orphans
from mercurygen.emit.envelope import parse

ASKED = ("attention", "--topo", "h100-pcie-x8", "--group", "socket=2,gpu=2", "--envelope")
NAMES = ("three", "three_fast", "three_robust", "three_lean")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set of three."""
    path = tmp_path_factory.mktemp("made")
    out = run("emit", *ASKED, "--name", "three", "-o", path).done()
    assert all(word in out for word in ("fast", "robust", "lean", "with socket slow", "three.py"))
    return path


# --- files ------------------------------------------------------------------------------------


def test_files(made: Path) -> None:
    """Three pairs and the module; they are as emitted, and another run changes nothing."""
    files = {*(f"{name}.py" for name in NAMES), *(f"{name}.sched" for name in NAMES[1:])}
    before = tree(made)
    assert set(before) == files
    told = parse("three", before["three.py"].decode())
    times = {member.role: (member.ms, dict(member.slow)) for member in told.members}
    assert times["fast"][0] < times["robust"][0] < times["lean"][0]
    assert times["robust"][1]["socket"] < times["fast"][1]["socket"]


def test_what_is_wrong_with_a_set(made: Path, tmp_path: Path) -> None:
    """A hand edit, a lost member, another number, another line; and all or nothing is written."""

    def copied(old: str = "", new: str = "") -> Path:
        there = tmp_path / str(len(list(tmp_path.iterdir())))
        there.mkdir()
        for name, text in tree(made).items():
            (there / name).write_bytes(text)
        (there / "three.py").write_text((made / "three.py").read_text().replace(old, new))
        return there

    def wrong(there: Path) -> str:
        (finding,) = _orphans(there, set(NAMES[1:]))
        assert finding.file.name == "three.py" and "--envelope" in finding.fix
        return finding.what

    assert not _orphans(made, set(NAMES[1:]))
    edited = copied("most = ALIKE", "most = 2 * ALIKE")
    assert wrong(edited).startswith("edited by hand")
    run("verify", "--no-run", edited / "three.py").refused("text-mismatch", code=1)
    (edited / "three_fast.sched").unlink()
    before = tree(edited)
    run("emit", *ASKED, "--name", "three", "-o", edited).refused("edited-by-hand")
    assert tree(edited) == before
    assert "no-such-file" in wrong(edited) and "three_fast.sched" in wrong(edited)
    assert "no line of its set" in wrong(copied(" as planned,", " or so,"))


def test_one_schedule_is_written_once(tmp_path: Path) -> None:
    """Of a design with one instance all three are the same."""
    with folder(tmp_path):
        out = run("emit", *ASKED, "--schedule", "ulysses", "--name", "one").done()
        assert out.count("the same schedule as fast") == 2
        assert set(tree(tmp_path / "generated")) == {"one.py", "one_fast.py", "one_fast.sched"}
        assert "1 schedules and their modules are as this" in run("check").done()
        out = run("verify", "--no-run", "generated/one.py").done()
        assert "chooses among 1 schedule," in out and "one_fast.py" in out and "proved" in out
        run("emit", *ASKED, "--order", "any").refused("usage", "--order any")
        run("emit", *ASKED, "--objective", "memory").refused("usage", "--objective")
        run("emit", *ASKED, "--probe").refused("usage", "--probe")
        run("emit", *ASKED, "--packed").refused("usage", "packed documents")
        for option in ("--probe", "--envelope"):
            run("emit", *ASKED[:4], "socket=1,gpu=1", option).refused("usage", "of one rank")


# --- the choice -------------------------------------------------------------------------------


def choices(rank: int, world: int, where: str) -> dict[str, tuple[str, str]]:
    """What is chosen, by case: its name and why, or the error."""
    sys.path.insert(0, where)
    import three as chooser

    meshes = chooser.make_meshes(check=False)
    q, k = torch.ones(1, 16, 8, 8), torch.ones(1, 16, 8, 8)
    sizes = dict(zip("BSHKDE", (1, 16, 8, 8, 8, 8), strict=True))
    need = {name: chooser._need(each, sizes, 4) for name, each in chooser.MEMBERS.items()}
    assert need["lean"] < need["robust"] < need["fast"]
    inputs = 2 * 32768 * (32 + 8 + 8) * 128
    assert all(
        chooser._need(x, chooser.SIZES, 2) == x.peak - inputs for x in chooser.MEMBERS.values()
    )
    few = torch.ones(1, 16, 4, 8)
    odd = torch.ones(1, 15, 8, 8)
    cases = {
        "as planned": ((q, k, k), {}),
        "slow sockets": ((q, k, k), {"speeds": {"socket": 0.5}}),
        "measured": ((q, k, k), {"speeds": chooser.measure(meshes, 2**10)}),
        "little memory": ((q, k, k), {"free": need["lean"] if rank else 1e12}),
        "no memory": ((q, k, k), {"free": 1e12 if rank else 1.0}),
        "few heads, little memory": ((few, few, few), {"free": 1.0}),
        "odd": ((odd, odd, odd), {}),
        "one has slow sockets": ((q, k, k), {"speeds": {"socket": 0.5 if rank == 2 else 1.0}}),
        "no level": ((q, k, k), {"speeds": {"rack": 0.5}}),
        "ranks differ": ((q[:, rank:], k[:, rank:], k[:, rank:]), {}),
    }
    said = {}
    for case, (tensors, options) in cases.items():
        try:
            chosen = chooser.choose(meshes, *tensors, **options)
            assert chosen.mesh is meshes[chosen.name]
            said[case] = chosen.name, chosen.why
        except ValueError as error:
            said[case] = "error", str(error)
    with torch.no_grad():
        chosen = chooser.choose(meshes, q, k, k)
        out = chooser.attention(q, k, k, chosen, seq=64)
        assert torch.allclose(out, torch.ones_like(out))
    return said


def test_choices(made: Path) -> None:
    """Alike on all ranks, whatever one of them has; in the order of the times; with reasons."""
    said, *others = run_ranks(4, choices, str(made))
    assert all(other == said for other in others)
    name = {case: chosen for case, (chosen, _) in said.items()}
    why = {case: words for case, (_, words) in said.items()}
    assert name["as planned"] == "fast" and "fast 128.5, robust 128.6" in why["as planned"]
    assert name["slow sockets"] == "robust" and "fast 144.8, robust 129.2" in why["slow sockets"]
    assert said["one has slow sockets"] == said["slow sockets"]
    assert "must be of ('socket', 'gpu')" in why["no level"]
    assert name["measured"] in NAMES[2] and "ms, by the model" in why["measured"]
    assert name["little memory"] == "lean" and "not fast: it needs" in why["little memory"]
    for case in ("no memory", "few heads, little memory", "odd", "ranks differ"):
        assert name[case] == "error", case
    assert why["no memory"].count("and 1 are left") == 3
    assert "not lean: it needs a sequence of a multiple of 8, B of 1, K of 8" in (
        why["few heads, little memory"]
    )
    assert "multiple of 8" in why["odd"] and "differ" in why["ranks differ"]
