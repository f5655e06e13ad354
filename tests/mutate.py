"""Systematic edits of a module's text, by its syntax tree: one small change each.

for mutant in mutants(text, skip={"_self_check"}):
    mutant.kind, mutant.words, mutant.text      # "drop", "line 40: del `_wait(works)`", ...
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Mutant:
    """An edited text.

    Attributes:
        kind: of the edit.
        function: where.
        old: the statement or expression as it was.
        new: as it is now.
        text: the module.
    """

    kind: str
    function: str
    old: str
    new: str
    text: str
    statements: tuple[ast.stmt, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} in {self.function}: `{self.old}` -> `{self.new}`"


class Edit(NamedTuple):
    """A change of the tree that can be made and taken back."""

    kind: str
    old: str
    new: str
    do: Callable[[], None]
    undo: Callable[[], None]
    statements: tuple[ast.stmt, ...] = ()


def mutants(text: str, skip: Collection[str], known: set[str]) -> Iterator[Mutant]:
    """All edits of the functions of a module.

    Args:
        text: the module.
        skip: functions to leave alone.
        known: functions, as text, that were edited before in another module: they are left alone,
            and those edited here are added. Numbers in it (of ranks, in docstrings) do not count.
    """
    tree = ast.parse(text)
    parts = [ast.unparse(part) for part in tree.body]
    for number, function in enumerate(tree.body):
        if not isinstance(function, ast.FunctionDef) or function.name in skip:
            continue
        shape = re.sub(r"\d+", "0", parts[number])
        if shape in known:
            continue
        known.add(shape)
        for edit in [*_statements(function), *_expressions(function)]:
            edit.do()
            try:
                changed = [*parts[:number], ast.unparse(function), *parts[number + 1 :]]
            finally:
                edit.undo()
            words = edit.kind, function.name, edit.old, edit.new
            yield Mutant(*words, "\n".join(changed), edit.statements)


def _shown(node: ast.AST | list[ast.stmt]) -> str:
    text = "; ".join(map(ast.unparse, node)) if isinstance(node, list) else ast.unparse(node)
    return " ".join(text.split())[:200]


# --- statements ---------------------------------------------------------------------------------


def _bodies(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def _statements(function: ast.FunctionDef) -> Iterator[Edit]:
    for body in list(_bodies(function)):
        whole = list(body)

        def put(new: list[ast.stmt], body: list = body) -> Callable[[], None]:
            def do() -> None:
                body[:] = new

            return do

        for i, stmt in enumerate(whole):
            if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant):
                continue  # a docstring
            rest, undo = [*whole[:i], ast.Pass(), *whole[i + 1 :]], put(whole)
            if not isinstance(stmt, ast.Pass):
                yield Edit("drop", _shown(stmt), "pass", put(rest), undo, (stmt,))
            if not isinstance(stmt, ast.Return):
                twice = [*whole[: i + 1], copy.deepcopy(stmt), *whole[i + 1 :]]
                yield Edit("twice", _shown(stmt), "twice", put(twice), undo, (stmt,))
            if i + 1 < len(whole) and not isinstance(stmt, ast.Return):
                swapped = [*whole[:i], whole[i + 1], stmt, *whole[i + 2 :]]
                pair = tuple(whole[i : i + 2])
                yield Edit("swap", _shown(list(pair)), "the reverse", put(swapped), undo, pair)


# --- expressions --------------------------------------------------------------------------------


def _expressions(function: ast.FunctionDef) -> Iterator[Edit]:
    groups = [
        each.arg
        for each in function.args.args
        if each.annotation and "ProcessGroup" in ast.unparse(each.annotation)
    ]
    aside = {id(inner) for node in ast.walk(function) for inner in _aside(node)}
    for stmt in ast.walk(function):
        if isinstance(stmt, ast.stmt):
            for node in _own(stmt):
                if id(node) not in aside:
                    for kind, fields in _fields(node, groups):
                        yield _edit(stmt, node, kind, fields)


def _own(stmt: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of statements inside it."""
    todo: list[ast.AST] = [stmt]
    while todo:
        node = todo.pop()
        yield node
        todo += [x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.stmt)]


def _aside(node: ast.AST) -> Iterator[ast.AST]:
    """What is not run in a legal call: types, refusals, and checks of equal lengths."""
    tops = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.If) and all(isinstance(inner, ast.Raise) for inner in node.body):
        tops.append(node)
    if isinstance(node, ast.keyword) and node.arg == "strict":
        tops.append(node)
    for top in tops:
        if top is not None:
            yield from ast.walk(top)


def _edit(stmt: ast.stmt, node: ast.AST, kind: str, fields: dict[str, object]) -> Edit:
    """Some fields of a node of a statement, changed and changed back."""
    before = {name: getattr(node, name) for name in fields}

    def put(values: dict) -> Callable[[], None]:
        def do() -> None:
            for name, value in values.items():
                setattr(node, name, value)

        return do

    old = _shown(stmt)
    put(fields)()
    new = _shown(stmt)
    put(before)()
    return Edit(kind, old, new, put(fields), put(before))


REPLACED = {
    "isend": "irecv",
    "irecv": "isend",
    "logaddexp": "maximum",
    "sigmoid": "tanh",
    "rank": "size",
    "size": "rank",
    "MAX": "SUM",
}


def _fields(node: ast.AST, groups: list[str]) -> Iterator[tuple[str, dict]]:
    match node:
        case ast.BinOp(op=(ast.Add() | ast.Sub()) as op):
            other = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield "sign", {"op": other}
        case ast.BinOp(op=ast.Mod()):
            yield "modulo", {"op": ast.FloorDiv()}
        case ast.Compare(ops=[ast.Lt()]):
            yield "compare", {"ops": [ast.GtE()]}
        case ast.Constant(bool() as value):
            yield "flag", {"value": not value}
        case ast.Constant(int() as value):
            yield "one off", {"value": value + 1}
            if value > 0:
                yield "one off", {"value": value - 1}
        case ast.Name(id, ast.Load()) if id in groups and len(groups) > 1:
            for other in groups:
                if other != id:
                    yield "group", {"id": other}
        case ast.Name("k", ast.Load()):
            yield "tensor", {"id": "v"}
        case ast.Name("keys", ast.Load()):
            yield "tensor", {"id": "values"}
        case ast.Name("rows", ast.Load()):
            yield "tensor", {"id": "cols"}
        case ast.Attribute(attr=attr) if attr in REPLACED:
            yield "name", {"attr": REPLACED[attr]}
        case ast.Call(ast.Attribute(value, "contiguous" | "clone" | "to")):
            yield "copy", {
                "func": ast.parse("(lambda x: x)", mode="eval").body,
                "args": [value],
                "keywords": [],
            }
        case ast.Call(ast.Name("reversed"), [value]):
            yield "order", {"func": ast.Name("list", ast.Load())}
        case ast.IfExp(body=body, orelse=orelse):
            yield "branch", {"body": orelse, "orelse": body}
        case ast.Slice(lower, upper) if (lower is None) != (upper is None):
            yield "slice", {"lower": upper, "upper": lower}
        case ast.List([ast.Starred(), ast.Starred()] as elts):
            for i in (0, 1):
                yield "dropped", {"elts": elts[i : i + 1]}
        case ast.For(iter=inner):
            head = ast.parse("__import__('itertools').islice(x, 1)", mode="eval").body
            head.args[0] = inner
            yield "steps", {"iter": head}
