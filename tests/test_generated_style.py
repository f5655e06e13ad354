"""Emitted modules read like code that was written by hand: every file, every kind of schedule."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import black
import pytest

import mercurygen
from mercurygen.cost.topology import load as load_topology
from mercurygen.emit.module import FIRST_LINE, digest, emit, refuse, split_digest
from mercurygen.errors import Refusal
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load as load_operator
from mercurygen.schedule.directives import Parallelize, Shard, Shift
from mercurygen.schedule.schedule import Schedule
from mercurygen.search.place import links, place, target
from mercurygen.search.space import Point, points, settle

ROOT = Path(mercurygen.__file__).parent.parent
FILES = sorted((ROOT / "generated").glob("*.py"))
LONGEST_FUNCTION = 59
SHORTEST, LONGEST = 300, 560
LONGEST_OF_THREE = 580  # three mesh dimensions need the functions of three levels
OF_GRADIENTS = 180  # lines more of a differentiable module
OF_DOCUMENTS = 90  # of a module for packed documents
OF_WINDOW = 70  # of a window: the blocks that it leaves, and what is sent of them
OF_TRITON = 640  # and of one that holds kernels: the functions of both directions
SHORTEST_SINGLE = 150  # one rank: no mesh, no border, no nest

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While | ast.comprehension


# --- the modules ----------------------------------------------------------------------------


def spaces() -> Iterator[tuple[tuple[int, ...], str, str, int]]:
    """(group on a100x16, mask, order, most mesh dimensions) of the modules that are emitted."""
    for mask in ("causal", "full"):
        for order in ("zigzag", "contiguous"):
            yield (2, 4), mask, order, 3 if (mask, order) == ("causal", "zigzag") else 2
        yield (1, 1), mask, "contiguous", 0


def varieties() -> dict[str, tuple[Schedule, Plan]]:
    """A readable id, and (schedule, plan), of one schedule of every kind."""
    found = {}
    operator, topology = load_operator("attention"), load_topology("a100x16")
    for group, mask, order, most in spaces():
        group = place(topology, group, 1)
        problem = replace(Problem(), mask=mask)
        header = Schedule("attention", problem, target(topology), group, 1, None, ())
        kinds = set()
        spanned = links(topology, group)
        for point in points(operator, problem, spanned, order=order, axes=("S_q", "H")):
            settled = settle(point)
            if len(point.mesh.dims) > most or kind(point) in kinds or isinstance(settled, Refusal):
                continue
            program, directives = settled
            plan = lower(program)
            if not isinstance(plan, Refusal) and refuse(plan) is None:
                kinds.add(kind(point))
                schedule = replace(header, mesh=point.mesh, directives=directives)
                found[title(point, mask, order)] = schedule, plan
    return found


def kind(point: Point) -> tuple:
    """What makes a module's text: the axis of each dimension, and the nest of two dimensions.

    Of three, in which order they nest makes no new text.
    """
    axes, nest = {}, []
    for directive in point.directives:
        match directive:
            case Parallelize(axis, dims):
                axes |= dict.fromkeys(dims, axis)
            case Shard(_, _, dims):
                nest += [("gather", dim) for dim in dims]
            case Shift(_, _, along):
                nest += [("walk", one.dim) for one in along]
    names = point.mesh.names
    stages = [(word, names.index(dim) if len(names) < 3 else 0) for word, dim in nest]
    return tuple(axes[name] for name in names), tuple(stages)


def title(point: Point, mask: str, order: str) -> str:
    """What a failing test shows: the mesh, and the directives that make the variety."""
    mesh = "x".join(str(dim.size) for dim in point.mesh.dims) or "1"
    body = []
    for directive in point.directives:
        match directive:
            case Parallelize(axis, dims):
                body.append(f"{axis} {' '.join(dims)}")
            case Shard(_, _, dims):
                body.append(f"gather {' '.join(dims)}")
            case Shift(_, _, along):
                body.append(f"walk {' '.join(one.dim for one in along)}")
    return ", ".join([mask, order, mesh, *body])


VARIETIES = varieties()
MODULES = [*(file.name for file in FILES), *VARIETIES]


@cache
def text_of(name: str) -> str:
    """A module's text: of a file in generated/, or emitted now."""
    if name in VARIETIES:
        schedule, plan = VARIETIES[name]
        return emit(schedule, plan, "variety")
    return (ROOT / "generated" / name).read_text(encoding="utf-8")


@cache
def tree_of(name: str) -> ast.Module:
    """A module, parsed."""
    return ast.parse(text_of(name))


def functions(name: str) -> list[Function]:
    """All functions of a module."""
    return [node for node in ast.walk(tree_of(name)) if isinstance(node, Function)]


every_module = pytest.mark.parametrize("name", MODULES, ids=str)


# --- the text -------------------------------------------------------------------------------


def test_some_modules_are_checked_in() -> None:
    """generated/ holds modules, each with its schedule."""
    assert FILES
    assert [f.stem for f in FILES] == sorted(f.stem for f in (ROOT / "generated").glob("*.sched"))


@every_module
def test_first_lines(name: str) -> None:
    """Do not edit; the command; the digest of all that follows; then the docstring."""
    first, command, third, fourth, *_ = text_of(name).split("\n")
    claimed, body = split_digest(text_of(name))
    stem = "variety" if name in VARIETIES else name.removesuffix(".py")
    assert first == FIRST_LINE
    assert command == f"#   mercurygen emit --schedule {stem}.sched"
    assert third == f"# body: sha256:{claimed}" and claimed == digest(body)
    assert fourth.startswith('"""')


@every_module
def test_length_and_text(name: str) -> None:
    """A length that is read in one sitting, 100 columns, ASCII, nothing from the generator."""
    text = text_of(name)
    dims = len(re.findall(r'"\w+": \d+', re.search(r"^MESH: .*$", text, re.M)[0]))
    longest = LONGEST_OF_THREE if dims > 2 else LONGEST
    longest += OF_GRADIENTS * ("class _Attention" in text) + OF_TRITON * ("import triton" in text)
    longest += OF_DOCUMENTS * ("cu_seqlens" in text) + OF_WINDOW * ("WINDOW: " in text)
    assert (SHORTEST if dims else SHORTEST_SINGLE) <= len(text.splitlines()) <= longest
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii() and text.endswith("\n") and "\t" not in text
    assert "{{" not in text and "{%" not in text and str(ROOT) not in text


@pytest.mark.parametrize("name", [*MODULES[: len(FILES)], *MODULES[len(FILES) :: 4]], ids=str)
def test_black(name: str) -> None:
    """The pinned black at 100 columns changes nothing, whatever Python it guesses; some of all."""
    mode = black.Mode(line_length=100)
    assert black.format_str(text_of(name), mode=mode) == text_of(name)


def test_ruff(tmp_path: Path) -> None:
    """Ruff finds nothing: with its defaults, and with what a strict project selects."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    for number, name in enumerate(MODULES):
        (tmp_path / f"module_{number}.py").write_text(text_of(name), encoding="utf-8")
    common = ["--isolated", "--no-cache", "--output-format=concise", "--target-version=py310"]
    for rules in ([], ["--select=E,F,I,W,B,UP,C4,RET,SIM", "--line-length=100"]):
        command = [ruff, "check", *common, *rules, str(tmp_path)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


# --- imports --------------------------------------------------------------------------------


@every_module
def test_imports(name: str) -> None:
    """The standard library and torch at the top, each used; nothing of mercurygen."""
    nodes = [n for n in ast.walk(tree_of(name)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert all(node in tree_of(name).body for node in nodes), "an import inside a function"
    sources = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    packages = {source.split(".")[0] for source in sources}
    kernels = {"triton"} if "@triton.jit" in text_of(name) else set()
    assert packages - set(sys.stdlib_module_names) == {"torch"} | kernels
    assert "mercurygen" not in text_of(name).split('"""', 2)[2], "named outside the docstring"
    used = {node.id for node in ast.walk(tree_of(name)) if isinstance(node, ast.Name)}
    bound = {alias.asname or alias.name for node in nodes for alias in node.names}
    assert bound - {"annotations"} <= used
    assert not {"os", "pickle", "ctypes", "importlib"} & packages
    assert "environ" not in text_of(name) and "getenv" not in text_of(name)


# --- functions ------------------------------------------------------------------------------


@every_module
def test_functions(name: str) -> None:
    """Each under 60 lines, with a docstring, annotated, at most three blocks deep."""
    for function in functions(name):
        assert function.end_lineno - function.lineno + 1 <= LONGEST_FUNCTION, function.name
        assert ast.get_docstring(function), function.name
        arguments = [*function.args.args, *function.args.kwonlyargs]
        bare = [x.arg for x in arguments if x.annotation is None and x.arg != "self"]
        kernel = any(ast.unparse(each).startswith("triton.jit") for each in function.decorator_list)
        if not kernel:  # Triton's own have pointers and constants, and give nothing
            assert not bare and function.returns is not None, function.name
        assert depth(function) <= 3, function.name


def depth(node: ast.AST) -> int:
    """How deep blocks nest inside a function; `elif` counts as its `if`."""
    blocks = ast.For | ast.While | ast.If | ast.With | ast.Try
    deepest = 0
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and node.orelse == [child]
        own = isinstance(child, blocks) and not (chained and isinstance(child, ast.If))
        deepest = max(deepest, own + depth(child))
    return deepest


@every_module
def test_functions_are_used(name: str) -> None:
    """A private function is called; a public one is the contract's."""
    public = {"attention", "make_mesh", "positions", "shard", "unshard", "shard_sequence"}
    public |= {"unshard_sequence", "pad_sequence", "check_inputs", "shard_labels"}
    packed = {"document_positions", "pad_documents", "imbalance"}
    names = {node.id for node in ast.walk(tree_of(name)) if isinstance(node, ast.Name)}
    top = {node.name for node in tree_of(name).body if isinstance(node, Function)}
    assert {x for x in top if x.startswith("_")} <= names
    documents = "_borders" in names
    assert {x for x in top if not x.startswith("_")} <= public | (packed if documents else set())
    assert public - {"pad_sequence", "check_inputs", "shard_labels"} <= top
    assert not documents or packed <= top
    assert ("shard_labels" in top) == ("_Attention" in names or documents)


@every_module
def test_no_print_and_no_code_from_text(name: str) -> None:
    """Only the self-check prints, and nothing is executed that cannot be read."""
    allowed = {n for f in functions(name) if f.name == "_self_check" for n in ast.walk(f)}
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Name) and node.id == "print":
            assert node in allowed
        assert not (isinstance(node, ast.Name) and node.id in ("exec", "eval", "compile"))
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None)


@every_module
def test_no_global_state(name: str) -> None:
    """Top level: definitions and constants. No function changes or caches anything outside."""
    constants = set()
    for node in tree_of(name).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=bound)]) | ast.AnnAssign(
                target=ast.Name(id=bound)
            ):
                assert bound.isupper() or bound == "Band", bound  # a type
                constants.add(bound)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="PLACEMENTS"))]):
                pass
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                pass
            case _:
                kinds = ast.Import | ast.ImportFrom | ast.Expr | ast.ClassDef | Function
                assert isinstance(node, kinds), ast.unparse(node)
    for function in functions(name):
        defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
        named = [x for x in defaults if isinstance(x, ast.Name) and x.id == "WINDOW"]  # a tuple
        values = [ast.literal_eval(default) for default in defaults if default not in named]
        assert all(isinstance(x, int | float | str | None) for x in values), function.name
        for node in ast.walk(function):
            assert not isinstance(node, ast.Global | ast.Nonlocal), function.name
            assert not (isinstance(node, ast.Name) and node.id in ("cache", "lru_cache", "globals"))
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node).split("[")[0].split(".")[0] not in constants


@every_module
def test_no_guard_on_a_step(name: str) -> None:
    """No loop asks which step it is at: what is special stands before it or after it."""
    for loop in ast.walk(tree_of(name)):
        if not isinstance(loop, Loop) or not (steps := counters(loop)):
            continue
        inside = [loop.ifs] if isinstance(loop, ast.comprehension) else [loop.body]
        for node in (n for block in inside for statement in block for n in ast.walk(statement)):
            if isinstance(node, ast.Compare):
                tested = node
            elif isinstance(node, ast.If | ast.IfExp | ast.While):
                tested = node.test
            else:
                continue
            seen = {n.id for n in ast.walk(tested) if isinstance(n, ast.Name)}
            assert not steps & seen, ast.unparse(tested)


def counters(loop: Loop) -> set[str]:
    """The names that count a loop's steps: over a range, or an enumeration's number."""
    if isinstance(loop, ast.While):
        changed = (n.target for n in ast.walk(loop) if isinstance(n, ast.AugAssign))
        return {node.id for node in changed if isinstance(node, ast.Name)}
    match loop.iter, loop.target:
        case ast.Call(func=ast.Name(id="range")), ast.Name(id=step):
            return {step}
        case ast.Call(func=ast.Name(id="enumerate")), ast.Tuple(elts=[ast.Name(id=step), *_]):
            return {step}
    return set()


@every_module
def test_nothing_assigned_only_in_a_branch(name: str) -> None:
    """Pylint's E0606: a name first assigned inside a loop is not read after it."""
    for function in functions(name):
        before = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        for statement in function.body:
            if isinstance(statement, ast.For | ast.While):
                fresh = stored(statement) - before
                later = {
                    node.id
                    for after in function.body[function.body.index(statement) + 1 :]
                    for node in ast.walk(after)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
                }
                rebound = {
                    x
                    for after in function.body[function.body.index(statement) + 1 :]
                    for x in stored(after)
                }
                assert not (fresh & later) - rebound, function.name
            before |= stored(statement)


def stored(node: ast.AST) -> set[str]:
    """Names that a statement assigns."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


# --- the docstring --------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIETIES)
def test_docstring_says_the_schedule(name: str) -> None:
    """Every directive of the schedule, the traffic, the memory, what shapes are legal."""
    doc = " ".join((ast.get_docstring(tree_of(name)) or "").split())
    schedule, plan = VARIETIES[name]
    for directive in schedule.directives:
        assert " ".join(str(directive).split()) in doc, directive
    assert "Memory at the peak" in doc and "Shapes on one rank" in doc
    assert not plan.program.mesh.dims or "What moves" in doc
