"""Which package of mercurygen may import which, what comes from outside, and what loads early.

    errors <- ir <- {dsl, schedule, lower} <- {check, cost} <- search <- cli
    check <- virtual <- cli, lower <- emit <- cli, dsl <- operators, schedule <- designs

Virtual ranks and proofs know the operator of gradients, which is shipped.

`operators` is text in the operator language and a loader, so it stands on `dsl`. `designs` is
text in the schedule language and a loader, so it stands on `schedule`. Neither is read by `emit`:
a module is made from a plan, whatever wrote its schedule.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import mercurygen

PACKAGE = Path(mercurygen.__file__).parent

# What a package may import directly, besides itself; the keys stand in an order without cycles.
ARROWS = {
    "errors": (),
    "ir": ("errors",),
    "dsl": ("errors", "ir"),
    "operators": ("errors", "ir", "dsl"),
    "schedule": ("errors", "ir"),
    "designs": ("errors", "ir", "schedule"),
    "lower": ("errors", "ir"),
    "check": ("errors", "ir", "dsl", "operators", "schedule", "lower"),
    "cost": ("errors", "ir", "dsl", "schedule", "lower"),
    "virtual": ("errors", "ir", "dsl", "operators", "schedule", "lower", "check"),
    "emit": ("errors", "ir", "schedule", "lower"),
    "search": ("errors", "ir", "operators", "schedule", "designs", "lower", "cost"),
    "cli": (
        *("errors", "ir", "dsl", "operators", "schedule", "designs"),
        *("lower", "check", "cost", "virtual", "emit", "search"),
    ),
}
# Libraries from outside; the core (everything not named) has only the standard library.
OUTSIDE = {
    "dsl": {"libcst", "torch"},
    "check": {"torch"},
    "virtual": {"torch"},
    "emit": {"jinja2", "black"},
    "cli": {"click", "black", "torch"},
}
LAZY = {"torch", "black"}  # imported inside functions only


class Import(NamedTuple):
    """One import statement, and whether importing its file runs it."""

    file: Path
    line: int
    module: str
    early: bool
    names: tuple[str, ...] = ()


def package_of(module: str) -> str:
    """The second part of a dotted name; what belongs to no package counts as `cli`."""
    part = module.split(".")[1]
    return "cli" if part == "__main__" else part


@cache
def imports() -> tuple[Import, ...]:
    """Every import of the package's files."""
    return tuple(found for file in sorted(PACKAGE.rglob("*.py")) for found in imports_of(file))


def imports_of(file: Path) -> Iterator[Import]:
    """The imports of a file; those for type checkers are not run, those in functions late."""
    waiting = [(ast.parse(file.read_text(encoding="utf-8")), True)]
    while waiting:
        node, early = waiting.pop()
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        waiting += [(n, early and not inside and not typing) for n in ast.iter_child_nodes(node)]
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(file, node.lineno, alias.name, early)
            case ast.ImportFrom(module="mercurygen"):
                for alias in node.names:
                    yield Import(file, node.lineno, f"mercurygen.{alias.name}", early)
            case ast.ImportFrom():
                module = "." * node.level + (node.module or "")
                yield Import(file, node.lineno, module, early, tuple(x.name for x in node.names))


def own(file: Path) -> str:
    """The package that a file belongs to."""
    return package_of(f"mercurygen.{file.relative_to(PACKAGE).parts[0].removesuffix('.py')}")


def test_every_package_has_its_arrows() -> None:
    """A new package is added to the table above, with a reason."""
    found = {own(file) for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py"}
    assert found <= set(ARROWS)
    assert {own(one.file) for one in imports() if one.file.name != "__init__.py"} <= set(ARROWS)


def test_arrows_have_no_cycle() -> None:
    """Each package stands behind all that it may import."""
    order = list(ARROWS)
    for package, below in ARROWS.items():
        assert all(order.index(other) < order.index(package) for other in below), package


def test_packages_import_along_the_arrows() -> None:
    """No import, early or late, for types or not, against an arrow or relative."""
    wrong = [
        f"{one.file}:{one.line}: {own(one.file)} imports {one.module}"
        for one in imports()
        if one.module.startswith("mercurygen.")
        and package_of(one.module) not in (own(one.file), *ARROWS[own(one.file)])
    ]
    wrong += [f"{x.file}:{x.line}: relative import" for x in imports() if x.module.startswith(".")]
    assert not wrong, "\n".join(wrong)


def test_modules_have_no_cycle() -> None:
    """Files inside a package import each other in one direction; late imports count too."""
    edges: dict[str, set[str]] = {}
    modules = {dotted(file): file for file in PACKAGE.rglob("*.py")}
    for module, file in modules.items():
        names = {target for one in imports_of(file) for target in targets(one)}
        edges[module] = {name for name in names if name in modules and name != module}
    while loose := [m for m, below in edges.items() if not below or not importers(m, edges)]:
        edges = {m: below - set(loose) for m, below in edges.items() if m not in loose}
    assert not edges, "a cycle goes through these"


def importers(module: str, edges: dict[str, set[str]]) -> list[str]:
    """Who imports a module."""
    return [other for other, below in edges.items() if module in below]


def dotted(file: Path) -> str:
    """A file's module."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(one: Import) -> Iterator[str]:
    """The modules that an import statement names: `from a.b import c` may mean `a.b.c`."""
    yield one.module
    yield from (f"{one.module}.{name}" for name in one.names)


def test_libraries_only_where_allowed() -> None:
    """The core imports the standard library; slow libraries are imported inside functions."""
    wrong = []
    for one in imports():
        library = one.module.split(".")[0]
        if library == "mercurygen" or library in sys.stdlib_module_names:
            continue
        if library not in OUTSIDE.get(own(one.file), ()):
            wrong.append(f"{one.file}:{one.line}: {own(one.file)} imports {library}")
        elif library in LAZY and one.early:
            wrong.append(f"{one.file}:{one.line}: {library} at the top of a file")
    assert not wrong, "\n".join(wrong)


CORE = [p for p in ARROWS if p not in ("dsl", "operators", "emit", "search", "cli")]


@pytest.mark.parametrize(
    ("packages", "absent"),
    [
        (CORE, ["torch", "libcst", "black", "jinja2", "click"]),
        (["dsl", "operators", "search"], ["torch", "libcst", "black", "jinja2", "click"]),
        (["emit"], ["torch", "libcst", "black", "click"]),
        (["cli"], ["torch", "libcst", "black"]),
    ],
    ids=["core", "search", "emit", "cli"],
)
def test_what_an_import_loads(packages: list[str], absent: list[str]) -> None:
    """Importing every file of a package that is not lazy itself loads none of these libraries."""
    modules = [dotted(file) for file in PACKAGE.rglob("*.py") if own(file) in packages]
    modules = [name for name in modules if name not in HEAVY and name != "mercurygen.__main__"]
    code = f"import sys, {', '.join(sorted(modules))}\n"
    code += f"print(*(name for name in {absent} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout.split(), ran.returncode) == ([], 0), ran.stderr


# The grammar is libcst, and is imported when an operator is parsed.
HEAVY = {
    f"mercurygen.dsl.{name}"
    for name in ("grammar", "grammar_expr", "grammar_function", "grammar_signature")
}
