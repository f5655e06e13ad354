"""The closed subset of Python that emitted modules use, interpreted from its syntax tree.

Nothing is imported, compiled or executed: values are plain Python ones, names of other packages
(`External`), and objects of the caller that say which of their attributes there are (`Host`).
Whatever is outside raises `TextMismatch` with its line.
"""

from __future__ import annotations

import ast
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, product
from math import inf, prod
from typing import Any, ClassVar, NamedTuple

MOST_STEPS = 5_000_000  # statements and rounds of one call: what runs longer has no end


class Complaint(Exception):
    """What is wrong, in words; the interpreter adds where."""


class TextMismatch(Exception):
    """The text does not do what the plan says.

    Attributes:
        line: of the module.
        function: that it is in.
        words: what is wrong.
    """

    def __init__(self, line: int, function: str, words: str, callers: str = "") -> None:
        super().__init__(f"line {line}, in {function}: {words}{callers}")
        self.line, self.function, self.words = line, function, words


class Host:
    """An object that interpreted code may use: only these attributes."""

    visible: ClassVar[frozenset[str]] = frozenset()


class External(NamedTuple):
    """A name of another package, `torch.distributed.isend`."""

    path: str


class Native(NamedTuple):
    """A function that the text may call."""

    call: Callable[..., Any]


@dataclass(slots=True)
class Frame:
    """A function that runs, and its line."""

    function: str
    line: int


@dataclass(slots=True)
class Scope:
    """Variables, those around them, and whose they are."""

    names: dict[str, Any]
    outer: Scope | None
    frame: Frame


class Function(NamedTuple):
    """A function of the text, with the scope around it; or a method with its instance."""

    node: ast.FunctionDef
    outer: Scope | None
    bound: tuple[Any, ...] = ()


class Record(NamedTuple):
    """An instance of a NamedTuple class of the text."""

    cls: ast.ClassDef
    values: dict[str, Any]


@dataclass
class Module:
    """A module's definitions.

    Attributes:
        imports: local name to the full one.
        functions: by name.
        classes: by name.
        constants: by name, as expressions.
    """

    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)


BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda x, y: x in y,
    ast.NotIn: lambda x, y: x not in y,
}
UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_BUILTINS = (range, len, zip, reversed, enumerate, min, max, sum, list, tuple, sorted, next, iter)
BUILTINS = {f.__name__: Native(f) for f in (*_BUILTINS, abs, divmod, slice, any, all, dict)}
EXTERNALS = {
    "bisect.bisect_left": Native(bisect_left),
    "bisect.bisect_right": Native(bisect_right),
    "itertools.groupby": Native(groupby),
    "itertools.product": Native(product),
    "itertools.chain": Native(chain),
    "math.prod": Native(prod),
    "math.inf": inf,
}
METHODS = {
    list: {"append", "extend", "index"},
    tuple: {"index"},
    dict: {"keys", "values", "items", "get"},
}
NUMBERS = (bool, int, float)
PLAIN = (*NUMBERS, str, type(None), list, tuple, dict, range)
_END = object()


def _is_generator(node: ast.FunctionDef) -> bool:
    todo: list[ast.AST] = list(node.body)
    while todo:
        inner = todo.pop()
        if isinstance(inner, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(inner, ast.FunctionDef):
            todo += ast.iter_child_nodes(inner)
    return False


class Interpreter:
    """Runs functions of a module.

    Attributes:
        seen: ids of the nodes that named something of another package.
    """

    def __init__(
        self,
        module: Module,
        externals: dict[str, Any],
        hooks: dict[str, Callable[[dict[str, Any]], Any]],
    ) -> None:
        """Set up.

        Args:
            module: whose functions.
            externals: values of other packages' names.
            hooks: what is called, with arguments by name, instead of functions of the module.
        """
        self.module, self.hooks = module, hooks
        self.externals = {**EXTERNALS, **externals}
        self.frames = [Frame("the module", 1)]
        self.top = Scope({}, None, self.frames[0])
        self.seen: set[int] = set()
        self.generators: dict[int, bool] = {}
        self.steps = 0

    # --- functions ----------------------------------------------------------------------------

    def call(self, function: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Call a value."""
        if isinstance(function, External):
            function = self.externals.get(function.path, function)
        match function:
            case Function():
                return self.invoke(function, args, keywords)
            case Native(call):
                return call(*map(self.python, args), **{k: self.python(v) for k, v in keywords.items()})
            case ast.ClassDef():
                names = [x.target.id for x in function.body if isinstance(x, ast.AnnAssign)]
                values = {**dict(zip(names, args, strict=False)), **keywords}
                if len(args) + len(keywords) != len(names) or set(values) != set(names):
                    raise Complaint(f"{function.name} takes {', '.join(names)}")
                return Record(function, values)
            case _ if isinstance(getattr(function, "__self__", None), (Host, *METHODS)):
                return function(*args, **keywords)
        raise Complaint(f"not understood: a call of {getattr(function, 'path', function)}")

    def python(self, value: Any) -> Any:
        """A function of the text as one that Python can call; else the value."""
        return (lambda *args: self.call(value, list(args), {})) if isinstance(value, Function) else value

    def invoke(self, function: Function, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Call a function of the text."""
        node = function.node
        names = self.bind(function, [*function.bound, *args], keywords)
        if function.outer is self.top and not function.bound and node.name in self.hooks:
            return self.hooks[node.name](names)
        frame = Frame(node.name, node.lineno)
        body = self.block(node.body, Scope(names, function.outer, frame))
        if id(node) not in self.generators:
            self.generators[id(node)] = _is_generator(node)
        if self.generators[id(node)]:
            return self.resumed(body, frame)
        self.frames.append(frame)
        signal = next(self.returned(body))
        self.frames.pop()
        return signal[1] if signal else None

    @staticmethod
    def returned(body: Iterator[Any]) -> Iterator[Any]:
        """What a body without yields returns."""
        yield (yield from body)

    def resumed(self, body: Iterator[Any], frame: Frame) -> Iterator[Any]:
        """What a generator yields; while it runs, its frame is the innermost."""
        while True:
            self.frames.append(frame)
            value = next(body, _END)
            self.frames.pop()
            if value is _END:
                return
            yield value

    def bind(self, function: Function, args: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """Parameters with their values."""
        node, spec = function.node, function.node.args
        if node.decorator_list or spec.vararg or spec.kwarg:
            raise Complaint(f"not understood: the signature of {node.name}")
        positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(reversed(positional), reversed(spec.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d}
        given = dict(zip(positional, args, strict=False))
        if len(args) > len(positional) or given.keys() & keywords.keys():
            raise Complaint(f"too many arguments for {node.name}")
        given |= keywords
        for name, default in defaults.items():
            if name not in given:
                given[name] = self.eval(default, function.outer or self.top)
        if given.keys() != {*positional, *(a.arg for a in spec.kwonlyargs)}:
            raise Complaint(f"the arguments of {node.name} are {', '.join(given)}")
        return given

    # --- statements ---------------------------------------------------------------------------

    def guarded(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run, and say where what goes wrong goes wrong."""
        try:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise Complaint("does not come to an end")
            return run(*args)
        except TextMismatch:
            raise
        except Exception as error:  # whatever it is, the text is not what it must be
            words = str(error) if isinstance(error, Complaint) else f"fails: {error!r}"
            *rest, top = self.frames[1:] or self.frames
            callers = [f"line {frame.line} of {frame.function}" for frame in reversed(rest)]
            called = f" [called from {', '.join(callers)}]" if callers else ""
            raise TextMismatch(top.line, top.function, words, called) from error

    def block(self, body: list[ast.stmt], scope: Scope) -> Iterator[Any]:
        """Run statements, yield what they yield, return how they end: None or (how, value)."""
        for stmt in body:
            scope.frame.line = stmt.lineno
            match stmt:
                case ast.For(target, values, inner, []):
                    signal = yield from self.loop(target, values, inner, scope)
                case ast.If(test, yes, no):
                    chosen = yes if self.guarded(self.truth, test, scope) else no
                    signal = yield from self.block(chosen, scope)
                case ast.Expr(ast.Yield(value)) if value:
                    yield self.guarded(self.eval, value, scope)
                    continue
                case ast.Expr(ast.YieldFrom(value)):
                    values = self.guarded(self.iterate, value, scope)
                    while (item := self.guarded(next, values, _END)) is not _END:
                        yield item
                    continue
                case ast.Return(value):
                    return "return", self.guarded(self.eval, value, scope) if value else None
                case ast.Break() | ast.Continue():
                    return type(stmt).__name__, None
                case _:
                    signal = self.guarded(self.simple, stmt, scope)
            if signal:
                return signal
        return None

    def loop(
        self, target: ast.expr, values: ast.expr, inner: list[ast.stmt], scope: Scope
    ) -> Iterator[Any]:
        """A for loop."""
        line = scope.frame.line
        iterator = self.guarded(self.iterate, values, scope)
        while (item := self.guarded(next, iterator, _END)) is not _END:
            self.guarded(self.assign, target, item, scope)
            signal = yield from self.block(inner, scope)
            scope.frame.line = line
            if signal and signal[0] == "return":
                return signal
            if signal and signal[0] == "Break":
                break
        return None

    def simple(self, stmt: ast.stmt, scope: Scope) -> None:
        """A statement without others in it."""
        match stmt:
            case ast.Expr(value):
                self.eval(value, scope)
            case ast.Assign(targets, value):
                result = self.eval(value, scope)
                for target in targets:
                    self.assign(target, result, scope)
            case ast.AnnAssign(target, value=value) if value:
                self.assign(target, self.eval(value, scope), scope)
            case ast.AugAssign(ast.Name(name), op, value):
                other = self.eval(value, scope)
                scope.names[name] = self.binary(op, scope.names[name], other)
            case ast.FunctionDef(name):
                scope.names[name] = Function(stmt, scope)
            case ast.Pass():
                pass
            case _:
                raise Complaint(f"not understood: {ast.unparse(stmt)}")

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Bind a name, or the names of a tuple."""
        match target:
            case ast.Name(name):
                scope.names[name] = value
            case ast.Tuple(targets) | ast.List(targets):
                values = list(self.items(value))
                star = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
                if star is not None:
                    rest = len(values) - len(targets) + 1
                    if rest < 0:
                        raise Complaint(f"{len(values)} values for {ast.unparse(target)}")
                    values[star : star + rest] = [values[star : star + rest]]
                    targets = [*targets[:star], targets[star].value, *targets[star + 1 :]]
                if len(values) != len(targets):
                    raise Complaint(f"{len(values)} values for {ast.unparse(target)}")
                for inner, each in zip(targets, values, strict=True):
                    self.assign(inner, each, scope)
            case _:
                raise Complaint(f"not understood: assignment to {ast.unparse(target)}")
