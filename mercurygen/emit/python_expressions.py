"""Expressions of the subset of Python that emitted modules use, and their values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

from mercurygen.emit.python_bounds import MOST_PARTS, Bounded, Complaint, weigh
from mercurygen.errors import shorten

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda x, y: x in y,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_PLAIN = (int, float, str, list, tuple, dict, range, type(None))  # bool is an int


class Host:
    """An object that interpreted code may use: these attributes, nothing else."""

    visible: ClassVar[frozenset[str]] = frozenset()


class Keeper(Host):
    """An object whose attributes interpreted code may set."""

    def keep(self, name: str, value: Any) -> None:
        """Set one."""
        raise NotImplementedError


class External(Host):
    """A name of another package that nothing stands for here."""

    def __init__(self, path: str) -> None:
        self.path = path


class Record(Host):
    """An instance of a NamedTuple class of the text."""

    def __init__(self, values: dict[str, Any], methods: dict[str, Callable]) -> None:
        self.values = values
        self.names = values | {name: partial(method, self) for name, method in methods.items()}


class Scope(dict):
    """Variables, and where to look for others; not for `local` ones, which are unset yet."""

    def __init__(
        self,
        names: dict[str, Any],
        missing: Callable[[str], Any],
        local: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(names)
        self.missing, self.local = missing, local

    def __missing__(self, name: str) -> Any:
        if name in self.local:
            raise Complaint(f"{name} is used before it has a value here")
        return self.missing(name)


def unknown(node: ast.AST) -> Complaint:
    """Something outside the subset."""
    return Complaint(f"not understood: {shorten(ast.unparse(node), 100)}")


def local_names(node: ast.FunctionDef | ast.GeneratorExp | ast.ListComp) -> frozenset[str]:
    """Names that are assigned anywhere in a function or comprehension: local throughout it."""
    todo: list[ast.AST]
    if isinstance(node, ast.FunctionDef):
        todo = [*node.body, *(x for x in ast.walk(node.args) if isinstance(x, ast.arg))]
    else:
        todo = [loop.target for loop in node.generators]
    names: set[str | None] = set()
    while todo:
        one = todo.pop()
        match one:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                names.add(name)
                continue
            case ast.Lambda():
                continue
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                inner = [x.target for x in ast.walk(one) if isinstance(x, ast.NamedExpr)]
                todo += inner
                continue
            case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
                names.add(name)
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name):
                names.add(name)
            case ast.MatchMapping(rest=name):
                names.add(name)
        todo += ast.iter_child_nodes(one)
    return frozenset(name for name in names if name)


class Body(NamedTuple):
    """What is known of a function or comprehension from its syntax tree.

    Attributes:
        local: names that are assigned anywhere in it.
        yields: whether it is a generator function.
    """

    local: frozenset[str]
    yields: bool


class Bodies(dict[ast.AST, Body]):
    """Of each one what is known, found once: every run of a module asks for all of them."""

    def __missing__(self, node: Any) -> Body:
        yields = isinstance(node, ast.FunctionDef) and any(
            isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node)
        )
        body = self[node] = Body(local_names(node), yields)
        return body


class Expressions(Bounded):
    """Evaluates them: a method for each kind, named as in `ast`."""

    seen: set[int]
    frames: list[list[Any]]
    imports: dict[str, str]
    methods: ClassVar[dict[type, Callable | None]] = {}
    bodies: Bodies

    def external(self, path: str) -> Any:
        """What stands for a name of another package."""
        raise NotImplementedError

    def eval(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression."""
        self.spend(1)
        kind = type(node)
        method = self.methods.get(kind)
        if method is None:
            method = self.methods[kind] = getattr(type(self), f"_{kind.__name__}", None)
            if method is None:
                raise unknown(node)
        return method(self, node, scope)

    def plain(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression, one that Python may compare, add and test."""
        value = self.eval(node, scope)
        if not isinstance(value, _PLAIN):
            raise unknown(node)
        if type(value) is not bool:
            self.spend(weigh(value))
        return value

    def _Name(self, node: ast.Name, scope: Scope) -> Any:
        if node.id in self.imports:
            self.seen.add(id(node))
        return scope[node.id]

    def _Constant(self, node: ast.Constant, scope: Scope) -> Any:
        return node.value

    def _Tuple(self, node: Any, scope: Scope) -> Any:
        return tuple(self._List(node, scope))

    def _List(self, node: Any, scope: Scope) -> list[Any]:
        values: list[Any] = []
        for each in node.elts:
            value = self.eval(
                getattr(each, "value", each) if type(each) is ast.Starred else each, scope
            )
            values += self.items(value) if type(each) is ast.Starred else (value,)
        return values

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        return self.attribute(self.eval(node.value, scope), node.attr, node)

    def attribute(self, value: Any, name: str, node: ast.expr) -> Any:
        """An attribute of a value."""
        if isinstance(value, External):
            self.seen.add(id(node))
            return self.external(f"{value.path}.{name}")
        if isinstance(value, Record) and name in value.names:
            return value.names[name]
        if isinstance(value, Host) and name in value.visible:
            return getattr(value, name)
        if isinstance(value, slice | range) and name in ("start", "stop"):
            return getattr(value, name)
        raise unknown(node)

    def _Call(self, node: ast.Call, scope: Scope) -> Any:
        match node:
            case ast.Call(ast.Name("getattr"), [base, ast.Constant(str(name)), ast.Constant(None)]):
                return self.attribute(self.eval(base, scope), name, node)
        function = self.eval(node.func, scope)
        args = self._List(ast.List(node.args), scope)
        keywords = {word.arg: self.eval(word.value, scope) for word in node.keywords}
        if not callable(function) or None in keywords:
            raise unknown(node)
        self.frames[-1][1] = node.lineno
        return self.call(function, *args, **keywords)

    def _BinOp(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self.plain(node.left, scope), self.plain(node.right, scope)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        match node.op:
            case ast.Pow() if isinstance(left, int) and isinstance(right, int):
                large = right * left.bit_length() > 64
            case ast.Mult() if not numbers:
                times = right if isinstance(right, int) else left
                large = isinstance(times, int) and times * weigh((left, right)) > MOST_PARTS
            case ast.Mod() if not numbers:
                raise unknown(node)
            case _:
                large = False
        if large:
            raise Complaint(f"not understood: {shorten(ast.unparse(node), 100)}: so large")
        return self.operator(node.op, node)(left, right)

    def operator(self, op: ast.AST, node: ast.expr) -> Callable:
        """What an operator does."""
        if type(op) not in _OPERATORS:
            raise unknown(node)
        return _OPERATORS[type(op)]

    def _UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Any:
        return self.operator(node.op, node)(self.plain(node.operand, scope))

    def _Compare(self, node: ast.Compare, scope: Scope) -> Any:
        same = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
        value = self.eval if same else self.plain
        values = [value(each, scope) for each in (node.left, *node.comparators)]
        pairs = zip(node.ops, values, values[1:], strict=False)
        return all(self.operator(op, node)(left, right) for op, left, right in pairs)

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Any:
        value = self.eval(node.values[0], scope)
        if callable(value):  # one function under several names
            if all(self.eval(each, scope) == value for each in node.values[1:]):
                return value
            raise unknown(node)
        for each in node.values:
            value = self.plain(each, scope)
            if bool(value) is isinstance(node.op, ast.Or):
                break
        return value

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Any:
        return self.eval(node.body if self.plain(node.test, scope) else node.orelse, scope)

    def _Slice(self, node: ast.Slice, scope: Scope) -> Any:
        ends = (node.lower, node.upper, node.step)
        return slice(*(None if end is None else self.eval(end, scope) for end in ends))

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        value, index = self.eval(node.value, scope), self.eval(node.slice, scope)
        if isinstance(value, Host) and "__getitem__" not in value.visible:
            raise unknown(node)
        self.spend(weigh(index))
        return value[index]

    def _GeneratorExp(self, node: Any, scope: Scope) -> Any:
        first = self.items(self.eval(node.generators[0].iter, scope))
        inner = Scope({}, scope.__getitem__, self.bodies[node].local)
        return self.rounds(node.elt, node.generators, first, inner)

    def _ListComp(self, node: Any, scope: Scope) -> Any:
        return list(self._GeneratorExp(node, scope))

    def _SetComp(self, node: Any, scope: Scope) -> Any:
        return set(self._GeneratorExp(node, scope))

    def rounds(self, value: Any, loops: Any, items: Iterator[Any], scope: Scope) -> Iterator[Any]:
        """What a comprehension gives."""
        for item in items:
            self.assign(loops[0].target, item, scope)
            if not all(self.plain(test, scope) for test in loops[0].ifs):
                continue
            if loops[1:]:
                inner = self.items(self.eval(loops[1].iter, scope))
                yield from self.rounds(value, loops[1:], inner, scope)
            else:
                yield self.eval(value, scope)

    # --- names and loops ------------------------------------------------------------

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Bind a name, or the names of a tuple."""
        self.spend(weigh(value))
        match target:
            case ast.Name(name) | ast.Starred(ast.Name(name)):
                scope[name] = value
            case ast.Tuple(targets):
                values = list(self.items(value))
                for i, each in enumerate(targets):
                    if isinstance(each, ast.Starred):
                        rest = len(values) - len(targets) + 1
                        values[i : i + rest] = [values[i : i + rest]]
                for inner, each in zip(targets, values, strict=True):
                    self.assign(inner, each, scope)
            case ast.Attribute(ast.Name(name), attribute) if isinstance(scope[name], Keeper):
                scope[name].keep(attribute, value)
            case _:
                raise unknown(target)

    def items(self, value: Any) -> Iterator[Any]:
        """The items of a value that has some."""
        values = value.values.values() if isinstance(value, Record) else value
        if isinstance(value, Host):
            raise Complaint(f"not understood: the items of {type(value).__name__}")
        for item in values:
            self.spend(1)
            yield item
