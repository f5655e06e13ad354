"""Every mistake of the issue's list: exit 2, one readable error, nothing written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import UNIFIED, folder, run

import mercurygen
from mercurygen.cli.build import build, plan_of
from mercurygen.errors import UserError
from mercurygen.schedule.text import parse

TOPOLOGY = (Path(mercurygen.__file__).parent / "topologies" / "a100x16.toml").read_text()


@pytest.fixture(autouse=True)
def nothing_written(tmp_path: Path) -> Iterator[Path]:
    """Each test runs in an empty folder; what it puts there itself is all that is there after."""
    with folder(tmp_path):
        yield tmp_path
        assert not any(path.suffix in (".py", ".tmp") for path in tmp_path.rglob("*"))
        assert not (tmp_path / "generated").exists()


def emit(*args: str) -> tuple[str, ...]:
    """An `emit` on a100x16."""
    return ("emit", "attention", "--topo", "a100x16", *args)


CASES = {
    "seq by ranks": (emit("--seq", "131080"), "seq-not-divisible", "131072 or 131104"),
    "seq by zigzag": (emit("--seq", "131088"), "seq-not-divisible-zigzag", "131072 or 131104"),
    "heads": (emit("--heads", "30"), "heads-not-grouped", "24 or 32"),
    "kv heads by tp": (emit("--kv-heads", "2", "--tp", "4"), "heads-not-divisible", "1, 2"),
    "kv heads by a design": (emit("--schedule", "ulysses"), "heads-not-divisible", "kv_heads=8"),
    "topology": (("emit", "attention", "--topo", "a100x61"), "unknown-topology", "`a100x16`"),
    "no topology": (("emit", "attention"), "usage", "a100x8, a800x8"),
    "operator": (("emit", "atention", "--topo", "a100x8"), "unknown-operator", "`attention`"),
    "no operator": (("emit", "--topo", "a100x8"), "usage", "attention"),
    "operator file": (("emit", "no.py::f", "--topo", "a100x8"), "no-such-file", "no.py"),
    "operator is code": (
        ("emit", 'a"""; X = open("PWNED","w"); """.py::attention', "--topo", "a100x8"),
        "not-a-name",
        "letters, digits and . _ - /",
    ),
    "operator of other letters": (
        ("search", "é.py::f", "--topo", "a100x8"),
        "not-a-name",
        "rename",
    ),
    "design": (emit("--schedule", "double-rign"), "unknown-design", "`double-ring`"),
    "option": (emit("--sequence", "1"), "usage", "`--seq`"),
    "command": (("emti",), "usage", "`emit`"),
    "subcommand": (("topo", "lst"), "usage", "`list`"),
    "no command for later": (("timeline", "x.sched"), "usage", "not supported by this version"),
    "window of none": (emit("--window", "0"), "window-out-of-range", "a window of 0 is none"),
    "window below 0": (emit("--window", "-3"), "bad-value", "is not a width, as in 4096"),
    "window of all": (emit("--window", "128k"), "window-out-of-range", "the mask is causal"),
    "window, full": (emit("--full", "--window", "9"), "usage", "--window 8,8"),
    "window, causal": (emit("--causal", "--window", "9,3"), "usage", "--window 10"),
    "layout": (emit("--layout", "bhds"), "unknown-layout", "known: bshd, bhsd, sbhd"),
    "packed": (emit("--layout", "thd"), "unknown-layout", "for packed documents"),
    "pass": (emit("--pass", "trian"), "unknown-pass", "`train`"),
    "backward": (emit("--backward"), "usage", "not supported by this version"),
    "b69 dropout": (emit("--dropout-p", "0.1"), "usage", "no schedule has dropout"),
    "softcap": (emit("--softcap", "30"), "usage", "no schedule has a cap of the scores"),
    "alibi": (emit("--alibi"), "usage", "no schedule has a bias of the scores"),
    "sinks": (emit("--sinks"), "usage", "no schedule has attention sinks"),
    "fp8": (emit("--fp8"), "usage", "no schedule has products in 8 bits"),
    "value missing": (emit("--seq"), "usage", "--seq"),
    "extra": (emit("more"), "usage", "more"),
    "bad number": (emit("--seq", "12x"), "bad-value", "128k"),
    "negative": (emit("--batch", "-1"), "bad-value", "'-1'"),
    "zero": (emit("--batch", "0"), "size-out-of-range", "from 1"),
    "absurd": (emit("--heads", "800000000"), "size-out-of-range", "65536"),
    "long number": (emit("--seq", "9" * 5000), "bad-value", "..."),
    "dtype": (emit("--dtype", "bfloat61"), "unknown-dtype", "`bfloat16`"),
    "order": (emit("--order", "zigzig"), "unknown-order", "`zigzag`"),
    "order of none": (emit("--order", "stripes"), "unknown-order", "striped"),
    "objective": (emit("--objective", "tine"), "unknown-objective", "`time`"),
    "memory limit": (emit("--memory-limit", "40 gigs"), "bad-value", "40GiB"),
    "no memory": (emit("--memory-limit", "0"), "bad-value", "--memory-limit"),
    "group level": (emit("--group", "nodes=2,gpu=8"), "group-not-of-topology", "`node`"),
    "group half": (emit("--group", "gpu=8"), "group-not-of-topology", "node=2,gpu=8"),
    "group size": (emit("--group", "node=2,gpu=3"), "group-not-of-topology", "1, 2, 4, 8"),
    "group twice": (emit("--group", "gpu=2,gpu=2"), "bad-value", "each once"),
    "group words": (emit("--group", "all"), "bad-value", "node=2,gpu=4"),
    "tp": (emit("--tp", "3"), "tp-does-not-fit", "1, 2, 4, 8"),
    "tp zero": (emit("--tp", "0"), "tp-does-not-fit", "legal"),
    "name": (emit("--name", "my-attention"), "not-a-name", "--name my_attention"),
    "name is a path": (emit("--name", "../x"), "not-a-name", "--name x"),
    "name is code": (emit("--name", "x\n#"), "not-a-name", "--name x"),
    "name is a keyword": (emit("--name", "class"), "not-a-name", "attention_class"),
    "name hides torch": (emit("--name", "torch"), "not-a-name", "hides"),
    "name hides us": (emit("--name", "mercurygen"), "not-a-name", "hides"),
    "name that Python runs": (emit("--name", "sitecustomize"), "not-a-name", "_sitecustomize"),
    "name that pytest runs": (emit("--name", "conftest"), "not-a-name", "attention_conftest"),
    "name that pip runs": (emit("--name", "setup"), "not-a-name", "attention_setup"),
    "name of Python's": (emit("--name", "__main__"), "not-a-name", "--name main"),
    "folder": (emit("-o", "/proc/none"), "cannot-write", "/proc/none"),
    "folder in a file": (emit("-o", "/etc/passwd/x"), "cannot-write", "Not a directory"),
    "control characters": (emit("--schedule", "\x1b[31m"), "unknown-design", "\\x1b"),
    "file and options": (("emit", "--schedule", "x.sched", "--seq", "1"), "usage", "--seq"),
    "file and full": (("emit", "--schedule", "x.sched", "--full"), "usage", "edit it there"),
    "no file": (("emit", "--schedule", "./x"), "no-such-file", "x"),
    "file is a folder": (("emit", "--schedule", "./"), "not-a-file", "regular"),
    "search": (("search", "attention", "--topo", "a100x61", "--json"), "unknown-topology", "x16"),
    "check": (("check", "none"), "no-such-folder", "none"),
    "check what is too long": (("check", "a" * 5000), "cannot-read", "File name too long"),
    "show": (("show", "/dev/zero"), "not-a-file", "/dev/zero"),
    "verify": (("verify", "/etc/hostname.sched"), "no-such-file", "hostname"),
    "topo": (("topo", "show", "h100"), "unknown-topology", "`h100x"),
}


@pytest.mark.parametrize("case", CASES)
def test_command_lines(case: str) -> None:
    """The slug, and the closest legal thing."""
    args, slug, word = CASES[case]
    run(*args).refused(slug, word)


def test_nothing_fits() -> None:
    """Good use, and no schedule: exit 1 with the least that would do."""
    run(*emit("--memory-limit", "100MB")).refused("nothing-fits", "the least", code=1)


# --- schedules --------------------------------------------------------------------------------

LINES = {
    "unknown axis": ("parallelize H over gpu", "parallelize X over gpu", "unknown-axis"),
    "unknown dimension": ("parallelize H over gpu", "parallelize H over gpus", ""),
    "unknown tensor": ("shift k, v:", "shift k, w:", ""),
    "unknown directive": ("shift k", "shfit k", "unknown-directive"),
    "mesh too small": ("mesh node=2 gpu=2", "mesh node=2", "mesh-not-of-topology"),
    "mesh of another": ("mesh node=2 gpu=2", "mesh node=2 gpu=4", "mesh-not-of-topology"),
    "mesh enormous": ("mesh node=2 gpu=2", "mesh node=1000000 gpu=2", "mesh-not-of-topology"),
    "group": ("group node=2 gpu=2", "group node=2 gpu=3", "group-not-of-topology"),
    "tp": ("tp 1", "tp 8", "tp-does-not-fit"),
    "too many ranks": (
        "gpu=8 NVLink 300GB/s\ngroup node=2 gpu=2",
        "gpu=8000 NVLink 300GB/s\ngroup node=2 gpu=8000",
        "too-many-ranks",
    ),
    "twice as many": (
        "gpu=8 NVLink 300GB/s\ngroup node=2 gpu=2",
        "gpu=4096 NVLink 300GB/s\ngroup node=2 gpu=4096",
        "too-many-ranks",
    ),
    "many levels": (
        "gpu=8 NVLink 300GB/s",
        "gpu=8 NVLink 300GB/s" + "".join(f" x{i}=1 wire 1GB/s" for i in range(5)),
        "topology-levels",
    ),
    "twice": ("patch", "parallelize S_q over gpu\npatch", ""),
    "trailing": ("patch body with aten", "patch body with aten; import os", "syntax"),
    "trailing line": ("patch body with aten\n", "patch body with aten\n}\n", "syntax"),
    "not a name": ("mesh node=2 gpu=2", "mesh class=2 gpu=2", "not-a-name"),
    "quotes": ("operator attention", 'operator """', "not-a-name"),
    "code in a level": ("node=2 InfiniBand", 'node=2 """+x+"""', "syntax"),
    "code in a name": ("topology a100x16", "topology a100x16\\n", "syntax"),
    "nul": ("shift", "shi\0ft", "not-text"),
    "escape": ("shift", "shi\x1bft", "not-text"),
    "line separator": ("# a comment", "# a\u2028import os", "not-text"),
    "huge size": ("seq=1024", "seq=" + "9" * 400, "syntax"),
    "huge heads": ("heads=8 kv_heads=2", f"heads={2**40} kv_heads={2**40}", "size-out-of-range"),
    "zero size": ("batch=1", "batch=0", "size-out-of-range"),
    "seq": ("seq=1024", "seq=1020", "seq-not-divisible-zigzag"),
    "kv heads": ("kv_heads=2", "kv_heads=1", "heads-not-divisible"),
    "header": ("tp 1\n", "", "header-incomplete"),
    "empty": (UNIFIED, "", "header-incomplete"),
    "kernel": ("with aten", "with magic", ""),
    "operator": ("operator attention", "operator atention", "unknown-operator"),
    "operator file": ("operator attention", "operator no.py::f", "no-such-file"),
}


@pytest.mark.parametrize("case", LINES)
def test_schedules(case: str) -> None:
    """By slug (empty: any), with exit code 2, from every command that reads one."""
    old, new, slug = LINES[case]
    assert old in UNIFIED
    Path("bad.sched").write_text(UNIFIED.replace(old, new, 1))
    for command in (("emit", "--schedule"), ("explain",), ("show",)):
        ran = run(*command, "bad.sched")
        ran.refused(slug or ran.err[6:].partition("]")[0])
    assert "internal" not in ran.err


def test_enormous_file() -> None:
    """10 MB of text, and 200 kB of good lines too many, in no time."""
    Path("big.sched").write_text(UNIFIED + "# x\n" * 2_500_000)
    run("emit", "--schedule", "big.sched").refused("file-too-large", "262144")
    Path("many.sched").write_text(UNIFIED + "parallelize H over gpu\n" * 10_000)
    assert run("emit", "--schedule", "many.sched").code == 2
    Path("name.sched").write_text(UNIFIED.replace("gpu=2\n", "g" * 200_000 + "=2\n"))
    ran = run("emit", "--schedule", "name.sched")
    assert ran.code == 2 and len(ran.err) < 2000


def test_operator_file_with_code_in_its_name() -> None:
    """The file is there; it is refused all the same, and nothing of its name is run."""
    path = Path('a"; X = open("PWNED"); ".py')
    path.write_text((Path(mercurygen.__file__).parent / "operators" / "attention.py").read_text())
    run("emit", f"{path}::attention", "--topo", "a100x8").refused("not-a-name")
    path.unlink()


def test_verify_checks_the_name() -> None:
    """A schedule's file name stands in the module that is run."""
    Path("x\nimport os\n#.sched").write_text(UNIFIED)
    run("verify", "--no-run", "x\nimport os\n#.sched").refused("not-a-name", "x_import_os.sched")


def test_emitted_text_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no Python is mercurygen's mistake, and is not written."""
    from mercurygen.emit import module

    good = module.emit
    monkeypatch.setattr(module, "emit", lambda *args: good(*args) + "return\n")
    Path("mine.sched").write_text(UNIFIED)
    ran = run("emit", "--schedule", "mine.sched")
    assert ran.code == 1 and "error[internal]" in ran.err and "is not Python" in ran.err


def test_other_line_ends_and_marks() -> None:
    """Windows' line ends are accepted; a byte order mark is named."""
    Path("mine.sched").write_bytes(UNIFIED.replace("\n", "\r\n").encode())
    run("show", "mine.sched").done()
    Path("mine.sched").write_bytes(b"\xef\xbb\xbf" + UNIFIED.encode())
    run("show", "mine.sched").refused("not-text", "byte order mark", "without BOM")


def test_bytes_that_are_no_text() -> None:
    """Named as such."""
    Path("bad.sched").write_bytes(b"\xff\xfe\x00")
    run("emit", "--schedule", "bad.sched").refused("not-text", "UTF-8")
    Path("bad-name.sched").write_text(UNIFIED)
    run("emit", "--schedule", "bad-name.sched").refused("not-a-name", "--name bad_name")


MUTANTS = 300


def mutant(source: random.Random) -> str:
    """A good schedule with one to three slips, of letters, words or lines."""
    text = UNIFIED
    for _ in range(source.randint(1, 3)):
        lines = text.split("\n")
        i = source.randrange(len(lines))
        words = lines[i].split(" ")
        match source.randrange(6):
            case 0:
                at = source.randrange(len(text) or 1)
                text = text[:at] + source.choice(' ,:=#*\t"\\\0\x7f9Zé…') + text[at + 1 :]
                continue
            case 1:
                lines[i] = ""
            case 2:
                lines.insert(source.randrange(len(lines)), lines[i])
            case 3:
                other = source.choice(UNIFIED.split())
                words[source.randrange(len(words))] = other
                lines[i] = " ".join(words)
            case 4:
                j = source.randrange(len(lines))
                lines[i], lines[j] = lines[j], lines[i]
            case 5:
                number = source.choice(["0", "-1", "1", "3", "4", "7", "1000003", "9" * 30, "1e9"])
                lines[i] = "".join(number if c.isdigit() else c for c in lines[i])
        text = "\n".join(lines)
    return text


def test_mutants_of_a_good_schedule() -> None:
    """Each is a schedule that can be proved, or is refused; never anything else."""
    source, good = random.Random(20240601), 0
    for _ in range(MUTANTS):
        text = mutant(source)
        try:
            found = parse(text, "mutant.sched")
            settled, program, _ = plan_of(found.schedule, found.spans)
        except UserError as error:
            assert error.exit_code == 2 and len(error.render()) < 4000, text
            continue
        assert plan_of(settled)[:2] == (settled, program), text
        if found.schedule.mesh.size <= 4 and good < 8:
            build(found.schedule, "mutant", spans=found.spans)
        good += 1
    assert 5 < good < MUTANTS / 2


# --- topologies -------------------------------------------------------------------------------

TOPOLOGIES = {
    "missing": ('unit = "GiB"', 'units = "GiB"', "unknown-key"),
    "negative": ("value = 25,", "value = -25,", "topology-range"),
    "infinite": ("value = 25,", "value = inf,", "topology-range"),
    "absurd": ("value = 25,", "value = 1e300,", "topology-range"),
    "type": ("value = 25,", 'value = "25",', "topology-type"),
    "broken": ("[gpu]", "[gpu", "topology-syntax"),
    "code": ('name = "a100x16"', 'name = \'x"""\'', "topology-text"),
}


@pytest.mark.parametrize("case", TOPOLOGIES)
def test_topologies(case: str) -> None:
    """The command line shows what the reader refuses, with the line."""
    old, new, slug = TOPOLOGIES[case]
    assert old in TOPOLOGY, old
    Path("bad.toml").write_text(TOPOLOGY.replace(old, new, 1))
    ran = run("emit", "attention", "--topo", "bad.toml")
    ran.refused(slug, "bad.toml:")
    run("topo", "show", "bad.toml").refused(slug)
