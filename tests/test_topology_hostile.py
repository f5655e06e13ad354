"""Topology files that are wrong, by accident or on purpose: each meets a clear refusal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mercurygen.cost import topology
from mercurygen.errors import UserError

GOOD = (Path(__file__).parent / "data" / "two_boxes.toml").read_text(encoding="utf-8")
FIRST_LEVEL = GOOD.index("[[level]]")
SECOND_LEVEL = GOOD.rindex("[[level]]")


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "machine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(name_or_path: str) -> UserError:
    with pytest.raises(UserError) as caught:
        topology.load(name_or_path)
    rendered = caught.value.render()
    assert "Traceback" not in rendered
    assert len(rendered) < 2000
    return caught.value


def swapped(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def test_unknown_name() -> None:
    error = refused("a100x61")
    assert error.slug == "unknown-topology"
    assert "a100x61" in error.message and "a100x16" in str(error.help)
    for strange in ("", "a100x16\0", "\ud800", "..", "x" * 10_000, "\x1b[31m"):
        assert refused(strange).slug == "unknown-topology"


def test_paths_that_are_no_topology(tmp_path: Path) -> None:
    assert refused(str(tmp_path / "none.toml")).slug == "no-such-file"
    assert refused(f"{tmp_path}/").slug == "topology-file"
    assert "directory" in refused(str(tmp_path)).message
    assert refused("/dev/zero").slug == "topology-file"
    assert refused("/tmp/a\0b.toml").slug == "topology-file"
    assert refused("/tmp/\ud800.toml").slug in ("topology-file", "no-such-file")
    assert refused("/" + "x" * 5000 + ".toml").slug == "topology-file"


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"name = '\0'", "NUL"),
        (b'name = "\xff"', "UTF-8"),
        (b"#" * 1_100_000, "KiB"),
        (GOOD.encode("utf-16"), ""),
    ],
)
def test_bytes_that_are_no_topology(tmp_path: Path, data: bytes, word: str) -> None:
    error = refused(write(tmp_path, data))
    assert error.slug == "topology-file" and word in error.message


@pytest.mark.parametrize(
    "text",
    [
        "name = ",
        "name",
        "[gpu",
        "name = 'a'\nname = 'b'",
        '"""',
        "a = " + "[" * 30_000,
        "a = " + "9" * 6000,
        "a = {" * 5000,
        ".".join("a" * 20_000) + "=1",
        "a = {" + ".".join(["'='"] * 10_000) + "=1}",
        "[" + ".".join("a" * 20_000) + "]",
        "a = 2020-13-45",
        "\ufeff" + GOOD,
    ],
)
def test_broken_toml_is_placed(tmp_path: Path, text: str) -> None:
    start = time.perf_counter()
    error = refused(write(tmp_path, text))
    assert time.perf_counter() - start < 1
    assert error.slug == "topology-syntax"
    assert "machine.toml:" in error.render()


def test_syntax_error_has_line_and_column(tmp_path: Path) -> None:
    error = refused(write(tmp_path, swapped('unit = "GiB", source', 'unit = "GiB" source')))
    assert error.span is not None and error.span.line == 6
    assert error.span.text.startswith("memory = ")


# (slug, key that the rendered error must contain, text that is replaced, by what)
HOSTILE = [
    ("unknown-key", "colour", 'name = "two', 'colour = 1\nname = "two'),
    ("unknown-key", "bandwith", "hbm_bandwidth = {", "hbm_bandwith = {"),
    ("unknown-key", "nics", 'link = "E', 'nics = 8\nlink = "E'),
    ("unknown-key", "soruce", '"GiB", source', '"GiB", soruce'),
    ("topology-missing", "name", 'name = "two-boxes"\n', ""),
    ("topology-missing", "gpu", GOOD[GOOD.index("[gpu]") : FIRST_LEVEL], ""),
    ("topology-missing", "sms", 'sms = { value = 80, unit = "1", source = "test" }\n', ""),
    ("topology-missing", "memory", "{ value = 24, ", "{ "),
    ("topology-missing", "memory", 'unit = "GiB", ', ""),
    ("topology-missing", "memory", '"GiB", source = "test"', '"GiB"'),
    ("topology-source", "memory", 'unit = "GiB", source = "test"', 'unit = "GiB", source = ""'),
    ("topology-source", "memory", '"GiB", source = "test"', '"GiB", source = "\\u001b[2J"'),
    ("topology-type", "memory", "value = 24", 'value = "24"'),
    ("topology-type", "memory", "value = 24", "value = true"),
    ("topology-type", "memory", "value = 24", "value = [24]"),
    ("topology-type", "memory", "value = 24", "value = 2020-01-01"),
    ("topology-type", "sms", '{ value = 80, unit = "1", source = "test" }', "80"),
    ("topology-type", "about", '"Two boxes of four"', "4"),
    ("topology-unit", "memory", '"GiB"', '"GB/s"'),
    ("topology-unit", "bandwidth", '"Gb/s"', '"Gib/s"'),
    ("topology-range", "memory", "value = 24", "value = -24"),
    ("topology-range", "memory", "value = 24", "value = 0"),
    ("topology-range", "memory", "value = 24", "value = nan"),
    ("topology-range", "memory", "value = 24", "value = inf"),
    ("topology-range", "memory", "value = 24", "value = 102401"),
    ("topology-range", "memory", "value = 24", "value = " + "9" * 4000),
    ("topology-range", "memory", "value = 24", "value = 0x" + "f" * 30_000),
    ("topology-range", "hbm_bandwidth", "value = 1.5", "value = 1001"),
    ("topology-range", "hbm_bandwidth", "value = 1.5", "value = 1e-10"),
    ("topology-range", "sms", "value = 80", "value = 80.5"),
    ("topology-range", "launch_latency", 'value = 7, unit = "us"', 'value = 1.5, unit = "s"'),
    ("topology-range", "attention_efficiency", "value = 0.5", "value = 1.01"),
    ("topology-range", "efficiency", "value = 0.9", "value = 0"),
    ("topology-range", "size", "size = { value = 2,", "size = { value = 65537,"),
    ("topology-range", "size", "size = { value = 2,", "size = { value = 0,"),
    ("topology-size", "size", "size = { value = 4,", "size = { value = 65536,"),
    ("topology-port", "port_gpus", "port_gpus = { value = 4", "port_gpus = { value = 3"),
    ("topology-port", "port_gpus", "port_gpus = { value = 1,", "port_gpus = { value = 2,"),
    ("topology-port", "port_bandwidth", "value = 32000", "value = 31000"),
    ("topology-range", "efficiency", "value = 0.9,", "value = 0.009,"),
    ("topology-range", "attention_efficiency", "value = 0.5,", "value = 9e-4,"),
    ("topology-choice", "fabric", '"switch"', '"swich"'),
    ("topology-choice", "duplex", '"full"', '"both"'),
    ("topology-duplicate", "name", 'name = "gpu"', 'name = "box"'),
    ("topology-name", "name", 'name = "gpu"', 'name = "class"'),
    ("topology-name", "name", 'name = "gpu"', 'name = "g-pu"'),
    ("topology-text", "name", 'name = "gpu"', 'name = "' + "g" * 21 + '"'),
    ("topology-text", "name", 'name = "gpu"', 'name = ""'),
    ("topology-levels", "level", GOOD[FIRST_LEVEL:], ""),
    ("topology-levels", "level", GOOD[FIRST_LEVEL:], GOOD[SECOND_LEVEL:] * 7),
    ("topology-type", "level", GOOD[FIRST_LEVEL:], "[level]\nsize = 2\n"),
    ("topology-type", "level", '[gpu]\nname = "Test', 'level = 3\n[gpu]\nname = "Test'),
]


@pytest.mark.parametrize(("slug", "key", "old", "new"), HOSTILE)
def test_hostile(tmp_path: Path, slug: str, key: str, old: str, new: str) -> None:
    text = swapped(old, new)
    if key == "level" and new.startswith("level"):
        text = text[: text.index("[[level]]")]
    if slug == "topology-size":
        text = text.replace("size = { value = 2,", "size = { value = 64,")
    error = refused(write(tmp_path, text))
    assert error.slug == slug
    assert key in error.message
    assert error.span is not None and "machine.toml:" in error.render()
    assert error.help


@pytest.mark.parametrize(
    "text",
    [
        '"""',
        "'''",
        "x\\",
        "x\nimport os",
        "x\r",
        "x # noqa",
        "x`",
        "\u201d",
        "\u0443",
        "\x1b[31m",
        "\u2028",
        "\u202e",
        "",
        " ",
        '" + __import__("os").system("true") + "',
    ],
)
@pytest.mark.parametrize(
    ("key", "old"),
    [
        ("name", '"two-boxes"'),
        ("about", '"Two boxes of four"'),
        ("name", '"Test GPU"'),
        ("name", '"box"'),
        ("link", '"Ethernet"'),
    ],
)
def test_no_code_through_words(tmp_path: Path, key: str, old: str, text: str) -> None:
    escaped = "".join(f"\\U{ord(character):08x}" for character in text)
    error = refused(write(tmp_path, swapped(old, f'"{escaped}"')))
    assert error.slug == "topology-text" and f"`{key}`" in error.message


@pytest.mark.parametrize("link", ["node=2", "25GB/s", "PCIe  4.0", "a(b)", "x" * 61, "{x}"])
def test_a_link_is_words(tmp_path: Path, link: str) -> None:
    assert refused(write(tmp_path, swapped("Ethernet", link))).slug == "topology-text"


def test_error_stands_at_the_right_level(tmp_path: Path) -> None:
    text = swapped('"ms"', '"fortnights"')
    error = refused(write(tmp_path, text))
    assert error.span is not None
    assert error.span.line == 1 + text[: text.index("latency = { value = 0.005")].count("\n")


def test_nearest_value_is_named(tmp_path: Path) -> None:
    assert "nearest: 65536" in str(refused(write(tmp_path, swapped("= 80,", "= 70000,"))).help)
    assert "nearest: 1000 TB/s" in str(refused(write(tmp_path, swapped("1.5", "1e9"))).help)
    error = refused(write(tmp_path, swapped("port_gpus = { value = 4", "port_gpus = { value = 5")))
    assert error.help == "must divide 4: 4"
