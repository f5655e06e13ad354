"""An operator's file: imports, axes, operators and merge functions. The grammar is closed.

    file      = docstring? import* axes* function*
    import    = "from mercurygen.dsl import" NAME, ...
    axes      = NAME, ... "=" "Axis(" TEXT ["," "tile=" INTEGER] ")", ...
    function  = "@operator" def, or a plain def that a `combine` names

`grammar_function` has the inside of a function, `grammar_expr` expressions, and `check` what
must hold beyond the grammar.
"""

from __future__ import annotations

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from mercurygen import dsl
from mercurygen.dsl.check import check_operator
from mercurygen.dsl.grammar_expr import Expressions, Places
from mercurygen.dsl.grammar_function import FunctionReader
from mercurygen.dsl.source import Source
from mercurygen.errors import UserError, closest
from mercurygen.ir.expr import Expr
from mercurygen.ir.operator import AxisDecl, Operator

MAX_NODES_DEEP = 250


class File:
    """A parsed file.

    Args:
        source: checked already.
    """

    def __init__(self, source: Source) -> None:
        module, self.at = _parse(source)
        self.source = source
        self.taken: dict[str, cst.CSTNode] = {}
        self.imported: set[str] = set()
        self.axes: dict[str, AxisDecl] = {}
        self.operators: dict[str, cst.FunctionDef] = {}
        self.functions: dict[str, cst.FunctionDef] = {}
        for number, statement in enumerate(module.body):
            self._statement(statement, first=number == 0)

    def operator(self, name: str | None) -> Operator:
        """One operator of the file, checked."""
        operators = list(self.operators)
        if name is None and len(operators) != 1:
            listed = ", ".join(operators) or "none"
            message = f"the file must hold one operator, or its name be given; it holds: {listed}"
            raise UserError("dsl-no-operator", message, span=self.source.span(1, 1))
        if name is not None and name not in self.operators:
            known = closest(name, operators, "mark a function with `@operator`")
            message = f"no operator `{name}`"
            raise UserError("dsl-no-operator", message, span=self.source.span(1, 1), help=known)
        node = self.operators[name or operators[0]]
        reader = FunctionReader(self.at, self.imported, self.axes, self.functions)
        operator = reader.operator(node)
        check_operator(operator, frozenset(self.imported), frozenset(self.taken))
        return operator

    def _statement(self, node: cst.CSTNode, first: bool) -> None:
        match node:
            case cst.SimpleStatementLine(body=[cst.ImportFrom() as small]):
                return self._import(small)
            case cst.SimpleStatementLine(body=[cst.Assign() as small]):
                return self._axes(small)
            case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString())]) if first:
                return None
            case cst.FunctionDef():
                return self._function(node)
        self.at.fail(
            "dsl-statement",
            "this statement is not part of an operator's file",
            node,
            "a file holds `from mercurygen.dsl import ...`, axes and functions; "
            "run and test it from another file",
        )

    def _import(self, node: cst.ImportFrom) -> None:
        module = node.module
        match module:
            case cst.Attribute(value=cst.Name(value="mercurygen"), attr=cst.Name(value="dsl")):
                pass
            case _:
                help = "write `from mercurygen.dsl import ...`"
                self.at.fail("dsl-import", "only mercurygen.dsl can be imported", node, help)
        if node.relative or isinstance(node.names, cst.ImportStar):
            self.at.fail("dsl-import", "name what is imported", node)
        for alias in node.names:
            if alias.asname or not isinstance(alias.name, cst.Name):
                self.at.fail("dsl-import", "words of the language keep their names", alias)
            word = alias.name.value
            if word not in dsl.__all__:
                help = closest(word, dsl.__all__)
                self.at.fail("dsl-import", f"mercurygen.dsl has no `{word}`", alias, help)
            self._take(word, alias)
            self.imported.add(word)

    def _axes(self, node: cst.Assign) -> None:
        help = 'write `N = Axis("what one index is")`'
        if len(node.targets) != 1:
            self.at.fail("dsl-axis", "one `=` a line", node, help)
        targets, values = self.at.parts(node.targets[0].target), self.at.parts(node.value)
        if len(targets) != len(values):
            self.at.fail("dsl-axis", f"{len(targets)} names for {len(values)} axes", node, help)
        for target, value in zip(targets, values, strict=True):
            if not isinstance(target, cst.Name):
                self.at.fail("dsl-axis", "an axis needs a name", target, help)
            self._take(target.value, target)
            self.axes[target.value] = self._axis(target.value, value, target, help)

    def _axis(self, name: str, node: cst.CSTNode, target: cst.CSTNode, help: str) -> AxisDecl:
        span = self.at.span(target)
        match node:
            case cst.Call(
                func=cst.Name(value="Axis"),
                args=[cst.Arg(keyword=None, star="", value=cst.SimpleString() as text), *rest],
            ) if (
                "Axis" in self.imported
            ):
                doc = self.at.text(text)
                match rest:
                    case []:
                        return AxisDecl(name, doc, 1, span)
                    case [cst.Arg(keyword=cst.Name(value="tile"), value=cst.Integer(value=size))]:
                        if len(size) <= 9 and size.isdecimal() and int(size) > 0:
                            return AxisDecl(name, doc, int(size), span)
                        self.at.fail("dsl-axis", "a tile has from 1 to 999999999 indices", rest[0])
        self.at.fail("dsl-axis", "only axes can be declared here", node, help)

    def _function(self, node: cst.FunctionDef) -> None:
        self._take(node.name.value, node.name)
        if node.asynchronous or node.type_parameters:
            self.at.fail("dsl-statement", "a function is a plain `def`", node.name)
        match node.decorators:
            case []:
                self.functions[node.name.value] = node
            case [cst.Decorator(decorator=cst.Name(value="operator"))] if (
                "operator" in self.imported
            ):
                self.operators[node.name.value] = node
            case [first, *_]:
                help = "imported from mercurygen.dsl, without arguments"
                self.at.fail("dsl-decorator", "`@operator` is the only decorator", first, help)

    def _take(self, name: str, node: cst.CSTNode) -> None:
        if name in self.taken:
            line = self.at.span(self.taken[name]).line
            message = f"`{name}` is taken since line {line}"
            self.at.fail("dsl-duplicate-name", message, node)
        self.taken[name] = node


def parse_expression(source: Source) -> Expr:
    """The file as one expression."""
    module, at = _parse(source)
    match module.body:
        case [cst.SimpleStatementLine(body=[cst.Expr(value=value)])]:
            return Expressions(at).convert(value)
    raise source.fail("dsl-expression", "not one expression", 1, 1)


def _parse(source: Source) -> tuple[cst.Module, Places]:
    try:
        module = cst.parse_module(source.text)
    except cst.ParserSyntaxError as error:
        line, column = error.raw_line, error.raw_column + 1
        raise source.fail("dsl-syntax", "not Python", line, column) from None
    _check_depth(module)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    return module, Places(source, wrapper.resolve(PositionProvider))


def _check_depth(module: cst.Module) -> None:
    """Refuse what libcst's positions, which recurse, could not reach (`parse` says it)."""
    level: list[cst.CSTNode] = [module]
    for _ in range(MAX_NODES_DEEP):
        level = [child for node in level for child in node.children]
    if level:
        raise RecursionError
