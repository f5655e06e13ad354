"""The examples of docs/errors: read from the text, run, and written back with what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from command import ROOT, folder, run

from mercurygen import operators
from mercurygen.cli import virtual
from mercurygen.cli.build import plans_of
from mercurygen.cost import topology
from mercurygen.dsl.parse import parse_operator
from mercurygen.errors import Refusal, UserError
from mercurygen.ir.text import parse as parse_commir
from mercurygen.lower.lower import lower
from mercurygen.schedule.apply import apply
from mercurygen.schedule.text import HEADER, parse
from mercurygen.virtual.report import VirtualError
from mercurygen.virtual.run import Ranks, play

FOLDER = ROOT / "docs" / "errors"
FILES = {"sched": "my.sched", "operator": "my_operator.py", "topology": "my.toml"}
FILES |= {"commir": "my.commir", "python module": "my.py", "python ranks": "my.py"}
KINDS = (*FILES, "python", "console")


@dataclass(frozen=True)
class Example:
    """An example, and the error that the page shows.

    Attributes:
        page, line: where it stands; of its last block.
        slug: of the section.
        blocks: (kind, text), the last of which is what is run; those before are files.
        shown: the error, or None if there is no text block yet.
        span: lines of the text block, or where it belongs.
    """

    page: Path
    line: int
    slug: str
    blocks: tuple[tuple[str, str], ...]
    shown: str | None
    span: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line} {self.slug}"


def pages() -> list[Path]:
    """Those with slugs."""
    return sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


def sections(page: Path) -> list[str]:
    """The slugs of a page, in its order."""
    return re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.M)


def examples(page: Path) -> Iterator[Example]:
    """The examples of a page."""
    lines = page.read_text(encoding="utf-8").split("\n")
    slug, blocks, at, number = "", [], 0, 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("## "):
            assert not blocks, f"{page.name}:{number}: the example before has no text block"
            slug = line[3:]
        if not line.startswith("```"):
            continue
        kind, begin = line[3:], number
        while lines[number] != "```":
            number += 1
        text = "\n".join(lines[begin:number])
        number += 1
        if kind == "text":
            assert blocks, f"{page.name}:{begin}: a text block without an example"
            yield Example(page, at, slug, tuple(blocks), text, (begin - 1, number))
            blocks = []
        elif slug:
            assert kind in KINDS, f"{page.name}:{begin}: a block of kind {kind!r}"
            blocks.append((kind, text))
            at = begin
            after = "\n".join(lines[number : number + 2]).strip()
            if not after.startswith("```") or after == f"```{kind}":
                yield Example(page, at, slug, tuple(blocks), None, (number, number))
                blocks = []


def printed(example: Example) -> str | None:
    """What mercurygen prints for an example; None if it refuses nothing."""
    with tempfile.TemporaryDirectory() as where, folder(Path(where)):
        for kind, text in example.blocks:
            if kind in FILES:
                Path(FILES[kind]).write_text(whole(kind, text), encoding="utf-8")
        kind, text = example.blocks[-1]
        try:
            return _RUNS[kind](whole(kind, text))
        except UserError as error:
            return error.render()
        except VirtualError as error:
            task = virtual.Task(text, None, None, FILES[kind])
            return virtual.failure(error, task).render()


def whole(kind: str, text: str) -> str:
    """A block with the lines that a page may leave out."""
    if kind == "sched":
        return _schedule(text)
    return _topology(text) if kind == "topology" else text + "\n"


# --- what is left out -------------------------------------------------------------------------


@cache
def defaults(kind: str) -> str:
    """The block of the introduction that says what is meant by lines that are left out."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^```{kind}\n(.*?)\n```$", text, re.M | re.S)
    assert found, kind
    return found[1]


def _schedule(text: str) -> str:
    header = {line.split()[0]: line for line in defaults("sched").split("\n")}
    assert tuple(header) == HEADER
    directives = []
    for line in text.split("\n"):
        word = (line.split() or [""])[0]
        if word in HEADER and not directives:
            header[word] = line
        else:
            directives.append(line)
    return "\n".join([*header.values(), *directives]) + "\n"


def _topology(text: str) -> str:
    """Every section of the text over the default one of the same name."""
    usual = dict(_tables(defaults("topology")))
    given = _tables(text)
    order = [("", [])] if not given or given[0][0] else []
    order += given
    for name in ("[gpu]", "[[level]]"):
        if name not in [head for head, _ in order]:
            order.append((name, []))
    lines = []
    for head, body in sorted(order, key=lambda table: list(usual).index(table[0])):
        own = {line.split("=")[0].strip(): line for line in body}
        keys = {line.split("=")[0].strip(): line for line in usual[head]}
        lines += [head] * bool(head) + list({**keys, **own}.values()) + [""]
    return "\n".join(lines)


def _tables(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in filter(None, text.split("\n")):
        if line.startswith("["):
            found.append((line, []))
        else:
            found = found or [("", [])]
            found[-1][1].append(line)
    return found


# --- running ----------------------------------------------------------------------------------


def _run_schedule(text: str) -> None:
    source = parse(text, FILES["sched"])
    operator = operators.load(source.schedule.operator)
    plan = lower(apply(operator, source.schedule, source.spans))
    if isinstance(plan, Refusal):
        raise plan.error()
    if source.schedule.backward is not None:
        plans_of(source.schedule, source.spans)


def _run_python(text: str) -> None:
    exec(compile(text, "<example>", "exec"), {"torch": torch})


def _run_ranks(text: str) -> None:
    """On two virtual ranks."""
    ranks = Ranks(text, operators.load("attention"), FILES["python ranks"], 2)
    ranks.play(lambda rank: exec(ranks.code, ranks.spaces[rank.number]))


def _run_module(text: str) -> None:
    """As a module of attention on one rank."""
    alone = parse(_schedule("group gpu=1\nmesh\npatch body with aten")).schedule
    play(text, alone, operators.load("attention"), FILES["python module"])


def _run_console(text: str) -> str | None:
    error = None
    for line in text.splitlines():
        assert line.startswith("$ "), line
        words = shlex.split(line[2:])
        if words[0] == "mercurygen":
            ran = run(*words[1:])
            error = ran.err.rstrip("\n") if ran.code else None
        else:
            environment = {**os.environ, "LC_ALL": "C"}
            subprocess.run(line[2:], shell=True, check=True, env=environment, timeout=20)
    return error


_RUNS = {
    "sched": _run_schedule,
    "operator": lambda text: parse_operator(text, FILES["operator"]),
    "topology": lambda _: topology.load(FILES["topology"]),
    "commir": lambda text: parse_commir(text, FILES["commir"]),
    "python": _run_python,
    "python ranks": _run_ranks,
    "python module": _run_module,
    "console": _run_console,
}


def write() -> None:
    """Put what is printed into every text block; say which examples do not give their slug."""
    for page in pages():
        lines = page.read_text(encoding="utf-8").split("\n")
        for example in reversed(list(examples(page))):
            try:
                text = printed(example)
            except Exception as error:
                print(f"{example}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if text is None or not text.startswith(f"error[{example.slug}]: "):
                print(f"{example}: {text and text.splitlines()[0]}")
                continue
            block = ["```text", *text.split("\n"), "```"]
            if example.shown is None:
                block = ["", *block]
            lines[slice(*example.span)] = block
        page.write_text("\n".join(lines), encoding="utf-8")
