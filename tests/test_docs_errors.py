"""docs/errors has every slug, and its examples give exactly what it shows.

`python tests/test_docs_errors.py --write` puts what is printed now into the pages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from command import ROOT
from docs_errors import FOLDER, Example, examples, pages, printed, sections, whole, write

from mercurygen.virtual.report import Check

PACKAGE = ROOT / "mercurygen"
# What no example can provoke, and why.
WITHOUT_EXAMPLE = {
    "proof-failed": "a bug of mercurygen's",
    "ranks-failed": "real processes: their ports and times differ",
    "formatter-version": "needs another version of black",
    "no-torch": "needs a Python without torch",
    "over-memory-limit": "stands beside a design in a table; alone it is nothing-fits",
}
MAKERS = {"UserError", "Refusal"}
RELAYS = {"error", "fail"}  # functions with a parameter `slug`
COMMIR = {"ir/text.py", "ir/text_reader.py"}  # what is raised there gets a prefix
BOTH = {"ir/lexer.py", "ir/options.py"}  # and is raised both ways
OWN = ("virtual/", "check/", "emit/")  # have `fail` and `error` that say no slug
TOPOLOGY = {"cost/topology_file.py", "cost/topology.py"}  # `Section.error` has a prefix
SLUG = re.compile(r"[a-z]+(-[a-z]+)*")
# Lines that are legal one by one: an example shows both, the second in its note.
CONFLICTS = set(
    "already-local derived-pins gather-of-trimmed home-of-trimmed joined-twice not-its-pin "
    "options-clash order-dims order-twice parallelized-twice patched-twice pinned-twice "
    "reduce-then-slice reorder-breaks replicate-needs-pin reshard-order reshard-wrong "
    "shifts-disagree skewed-pair tile-of-moved tile-of-scattered tile-parts tile-repeats-shift "
    "tile-striped tiled-twice two-shifts-one-axis two-stories walks-interleave".split()
)


# --- the slugs of the code --------------------------------------------------------------------


def slugs() -> set[str]:
    """Every slug that the code can raise."""
    found: set[str] = set(get_args(Check))
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for slug, relayed in _of_file(name, ast.parse(path.read_text(encoding="utf-8"))):
            assert SLUG.fullmatch(slug), (name, slug)
            prefix = "topology-" if relayed and name in TOPOLOGY else ""
            if name not in COMMIR:
                found.add(prefix + slug)
            if name in COMMIR | BOTH:
                found.add("commir-" + slug)
    return found


def _of_file(name: str, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(slug, whether a relay makes the error) of every call."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        called = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if called not in MAKERS | RELAYS or not call.args:
            continue
        if called in RELAYS and (name.startswith(OWN) or _value(call.args[0]) is None):
            continue  # a refusal's `error(span)`
        inside = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
        for slug in _named(name, call.args[0], inside):
            yield slug, called in RELAYS


def _value(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _named(name: str, node: ast.expr, inside: list[ast.FunctionDef]) -> list[str]:
    """What an expression for a slug can be."""
    if slug := _value(node):
        return [slug]
    if isinstance(node, ast.IfExp):
        return _named(name, node.body, inside) + _named(name, node.orelse, inside)
    if isinstance(node, ast.Attribute) and node.attr in ("slug", "check"):
        return []  # handed on; or of a run on virtual ranks: `Check` has them
    if isinstance(node, ast.JoinedStr) and name in COMMIR | TOPOLOGY:
        return []  # the prefix of what is raised there
    if isinstance(node, ast.Name) and inside:
        function = inside[-1]
        if node.id in [arg.arg for arg in function.args.args]:
            assert function.name in RELAYS, f"{name}:{node.lineno}: a new relay of slugs"
            return []
        made = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
        values = [n.value for n in made if node.id in [getattr(t, "id", "") for t in n.targets]]
        found = [slug for value in values for slug in _named(name, value, inside)]
        if found or all(isinstance(value, ast.JoinedStr) for value in values) and values:
            return found
    raise AssertionError(f"{name}:{node.lineno}: which slug is `{ast.unparse(node)}`?")


# --- the pages --------------------------------------------------------------------------------

EXAMPLES = [example for page in pages() for example in examples(page)]


def test_every_slug_is_documented_once() -> None:
    """No more, no less."""
    documented = Counter(slug for page in pages() for slug in sections(page))
    assert len(documented) > 150 and set(documented.values()) == {1}, documented.most_common(3)
    existing = slugs()
    missing, gone = sorted(existing - set(documented)), sorted(set(documented) - existing)
    assert not missing and not gone, f"not documented: {missing}; not in the code: {gone}"


def test_every_slug_has_an_example() -> None:
    """But for a few, whose section says so in words."""
    shown = {example.slug for example in EXAMPLES}
    documented = {slug for page in pages() for slug in sections(page)}
    assert documented - shown == set(WITHOUT_EXAMPLE), (documented - shown) ^ set(WITHOUT_EXAMPLE)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_sections_are_in_order_and_say_something(page: Path) -> None:
    """By the alphabet, each with a sentence; the list of pages has this one."""
    assert sections(page) == sorted(sections(page))
    for body in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
        words = body.split("\n```")[0].split()[1:]
        assert 5 <= len(words) <= 80, body[:80]
    assert f"({page.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_example(example: Example) -> None:
    """It gives its slug, and exactly what is shown."""
    now = printed(example)
    assert now is not None, "nothing is refused"
    assert now.startswith(f"error[{example.slug}]: "), now
    assert now == example.shown, f"python tests/test_docs_errors.py --write; it is now:\n{now}"


def test_conflicts_show_both_lines() -> None:
    """The place is one line of the example, and the note quotes another as it stands there."""
    shown = set()
    for example in EXAMPLES:
        place = re.search(r"--> my\.sched:(\d+):", example.shown or "")
        note = re.search(r"^note: it conflicts with line (\d+): `(.*)`$", example.shown or "", re.M)
        if note and place:
            lines = whole(*example.blocks[-1]).split("\n")
            assert note[1] != place[1] and lines[int(note[1]) - 1] == note[2], example
            shown.add(example.slug)
    assert CONFLICTS <= shown, CONFLICTS - shown


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
