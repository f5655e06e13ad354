"""The closed subset of Python that emitted modules use, interpreted from its syntax tree.

Nothing is imported, compiled or executed. Whatever is outside the subset is a `TextMismatch` with
its line.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mercurygen.emit import autograd
from mercurygen.emit.python_bounds import MOST_CALLS, MOST_STEPS
from mercurygen.emit.python_expressions import (
    Bodies,
    Complaint,
    Expressions,
    External,
    Record,
    Scope,
    unknown,
)
from mercurygen.errors import printable, shorten

_END = object()


class TextMismatch(Exception):
    """The text does not do what the plan says: the line and function where, what in words."""

    def __init__(self, line: int, function: str, words: str, callers: str = "") -> None:
        words = shorten(printable(words), 400)
        super().__init__(f"line {line}, in {function}: {words}{callers}")
        self.line, self.function, self.words = line, function, words


class Module(NamedTuple):
    """A module's definitions, each by its name; of an import, the full name."""

    imports: dict[str, str]
    functions: dict[str, ast.FunctionDef]
    classes: dict[str, ast.ClassDef]
    constants: dict[str, Any]


class Interpreter(Expressions):
    """Runs functions of a module.

    Attributes:
        seen: ids of the nodes that named something of another package.
    """

    def __init__(
        self,
        module: Module,
        externals: dict[str, Any],
        hooks: dict[str, Callable],
        bodies: Bodies,
        budget: int = MOST_STEPS,
    ) -> None:
        """`externals` stand for other packages' names, `hooks` are called for its functions.

        `bodies` is shared by all runs of the module.
        """
        self.budget, self.bodies, self.names = budget, bodies, self.builtins()
        self.module, self.hooks, self.imports = module, hooks, module.imports
        own = {"bisect.bisect_left": bisect_left, "itertools.groupby": self.groups}
        own["itertools.product"] = self.products
        self.externals = {**own, **externals}
        self.frames: list[list[Any]] = [["the module", 1]]  # function and line
        self.top = Scope({}, self.definition)
        self.seen: set[int] = set()

    def definition(self, name: str) -> Any:
        """What a name means in the whole module."""
        functions, classes, constants = self.module[1:]
        if name in functions:
            value: Any = self.function(functions[name], self.top, self.hooks.get(name))
        elif name in classes:
            is_function = [ast.unparse(x) for x in classes[name].bases] == [autograd.BASE]
            value = (self.autograd if is_function else self.record)(classes[name])
        elif name in constants:
            value = constants[name]
        elif name in self.module.imports:
            value = self.external(self.module.imports[name])
        elif name in self.names:
            value = self.names[name]
        else:
            raise Complaint(f"not understood: the name {name}")
        self.top[name] = value
        return value

    def external(self, path: str) -> Any:
        """What stands for a name of another package."""
        return self.externals[path] if path in self.externals else External(path)

    def mismatch(self, error: Exception) -> TextMismatch:
        """An error with its place."""
        words = str(error) if isinstance(error, Complaint) else f"fails: {error!r}"
        if isinstance(error, RecursionError | MemoryError):
            words = "not understood: nested too deeply"
        *callers, (function, line) = self.frames
        nearest = [f"line {line} of {name}" for name, line in reversed(callers[1:])]
        chain = ", ".join([*nearest[:6], *(["..."] if nearest[6:] else [])])
        return TextMismatch(line, function, words, f" [called from {chain}]" if chain else "")

    # --- functions and records ----------------------------------------------------------------

    def function(
        self, node: ast.FunctionDef, outer: Scope, hook: Callable | None, method: bool = False
    ) -> Callable:
        """A function of the text, as one of Python; method: whose decorators are known."""
        spec = node.args
        known = method or autograd.plainly(node, self.imports)
        if not known or spec.vararg or spec.kwarg:
            raise Complaint(f"not understood: the signature of {node.name}")
        positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        every = [*positional, *(a.arg for a in spec.kwonlyargs)]
        pairs = [*zip(reversed(positional), reversed(spec.defaults), strict=False)]
        pairs += [(a.arg, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d]
        defaults = {name: self.eval(default, outer) for name, default in pairs}
        local, yields = self.bodies[node]

        def called(*args: Any, **keywords: Any) -> Any:
            given = dict(zip(positional, args, strict=False))
            doubly = len(args) > len(positional) or given.keys() & keywords.keys()
            given = {**defaults, **given, **keywords}
            if doubly or given.keys() != set(every):
                raise Complaint(f"{node.name} takes {', '.join(every)}")
            if hook:
                return hook({name: given[name] for name in every})
            run = self.block(node.body, Scope(given, outer.__getitem__, local))
            return (self.resumed if yields else self.returned)(run, [node.name, node.lineno])

        return called

    def enter(self, frame: list[Any]) -> None:
        """Make a frame the innermost."""
        if len(self.frames) > MOST_CALLS:
            raise Complaint("not understood: calls too deep")
        self.frames.append(frame)

    def returned(self, run: Iterator[Any], frame: list[Any]) -> Any:
        """What a function without yields returns."""
        self.enter(frame)
        try:
            next(run)
        except StopIteration as stop:
            self.frames.pop()
            return stop.value and stop.value[0]

    def resumed(self, run: Iterator[Any], frame: list[Any]) -> Iterator[Any]:
        """What a generator yields; while it runs, its frame is the innermost."""
        while True:
            self.enter(frame)
            value = next(run, _END)
            self.frames.pop()
            if value is _END:
                return
            yield value

    def autograd(self, node: ast.ClassDef) -> autograd.Function:
        """The autograd function of the text."""
        known = {name for table in self.module for name in table}
        found = autograd.methods(node, self.imports, known)
        both = (self.function(found[x], self.top, None, True) for x in ("forward", "backward"))
        return autograd.Function(*both)

    def record(self, node: ast.ClassDef) -> Callable:
        """A NamedTuple class of the text, as the function that makes one."""
        fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and not x.value]
        functions = [x for x in node.body if isinstance(x, ast.FunctionDef)]
        methods = {x.name: self.function(x, self.top, None) for x in functions}
        known = len(fields) + len(methods) + bool(ast.get_docstring(node)) == len(node.body)
        if (
            [ast.unparse(x) for x in node.bases] != ["NamedTuple"]
            or node.decorator_list
            or not known
        ):
            raise Complaint(f"not understood: class {node.name}")

        def made(*args: Any, **keywords: Any) -> Record:
            values = {**dict(zip(fields, args, strict=False)), **keywords}
            if len(args) + len(keywords) != len(fields) or values.keys() != set(fields):
                raise Complaint(f"{node.name} takes {', '.join(fields)}")
            return Record({name: values[name] for name in fields}, methods)

        return made

    # --- statements ---------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], scope: Scope) -> Iterator[Any]:
        """Run statements and yield what they yield; return (value,) if they return."""
        for stmt in body:
            self.frames[-1][1] = stmt.lineno
            try:
                signal = yield from self.statement(stmt, scope)
            except TextMismatch:
                raise
            except Exception as error:  # whatever it is, the text is not what it must be
                raise self.mismatch(error) from error
            if signal:
                return signal
        return None

    def statement(self, stmt: ast.stmt, scope: Scope) -> Iterator[Any]:
        """Run one."""
        match stmt:
            case ast.For(target, values, inner, []):
                for item in self.items(self.eval(values, scope)):
                    self.assign(target, item, scope)
                    if signal := (yield from self.block(inner, scope)):
                        return signal
                    self.frames[-1][1] = stmt.lineno
            case ast.Try(inner, [], [], last):
                signal = yield from self.block(inner, scope)
                return (yield from self.block(last, scope)) or signal
            case ast.If(test, yes, no):
                return (yield from self.block(yes if self.plain(test, scope) else no, scope))
            case ast.Return(value):
                return (value and self.eval(value, scope),)
            case ast.Expr(ast.Yield(value)) if value:
                yield self.eval(value, scope)
            case ast.Expr(ast.YieldFrom(value)):
                yield from self.items(self.eval(value, scope))
            case ast.Expr(value):
                self.eval(value, scope)
            case ast.Assign([target], value) | ast.AnnAssign(target, value=ast.expr() as value):
                self.assign(target, self.eval(value, scope), scope)
            case ast.FunctionDef(name):
                scope[name] = self.function(stmt, scope, None)
            case ast.Delete(targets) if all(isinstance(x, ast.Name) for x in targets):
                for name in [x.id for x in targets]:
                    if dict.pop(scope, name, self) is self:
                        raise unknown(stmt)
            case _:
                raise unknown(stmt)
        return None
