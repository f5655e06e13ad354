"""The signature of an operator: what each parameter's annotation says."""

from __future__ import annotations

import libcst as cst

from mercurygen.dsl.grammar_expr import Expressions, Places
from mercurygen.errors import closest
from mercurygen.ir.expr import Binary, Name, Number, Unary, walk
from mercurygen.ir.operator import (
    DOMAINS,
    WIDEST,
    AxisDecl,
    Domain,
    MaskDecl,
    ScalarDecl,
    TensorDecl,
)

DTYPES = ("accumulator", "integer")
ROLES = {"Input": "input", "Derived": "derived", "Output": "output"}


class SignatureReader:
    """Reads signatures of one file.

    Args:
        at: for errors and spans.
        imported: words of the language that the file imported.
        axes: declared in the file.
    """

    def __init__(self, at: Places, imported: set[str], axes: dict[str, AxisDecl]) -> None:
        self.at, self.imported, self.axes = at, imported, axes
        self.expressions = Expressions(at)

    def plain(self, node: cst.FunctionDef) -> tuple[str, ...]:
        """The parameters of a merge function: bare names."""
        found = self._parameters(node)
        for parameter in found:
            if parameter.annotation or parameter.default:
                self.at.fail("dsl-parameter", "a merge's parameters are bare names", parameter)
        return tuple(parameter.name.value for parameter in found)

    def read(
        self, node: cst.FunctionDef
    ) -> tuple[tuple[TensorDecl, ...], tuple[ScalarDecl, ...], MaskDecl | None]:
        """The declarations of an operator's parameters."""
        tensors: list[TensorDecl] = []
        scalars: list[ScalarDecl] = []
        masks: list[MaskDecl] = []
        for parameter in self._parameters(node):
            kind, items = self._annotation(parameter)
            if kind in ROLES:
                tensors.append(self._tensor(parameter, kind, items))
            elif kind == "Scalar":
                scalars.append(self._scalar(parameter))
            elif masks:
                self.at.fail("dsl-parameter", "an operator has at most one mask", parameter)
            else:
                masks.append(self._mask(parameter, items))
        return tuple(tensors), tuple(scalars), masks[0] if masks else None

    def _parameters(self, node: cst.FunctionDef) -> list[cst.Param]:
        parameters = node.params
        star = parameters.star_arg
        if (
            isinstance(star, (cst.Param, cst.ParamStar))
            or parameters.star_kwarg
            or parameters.kwonly_params
            or parameters.posonly_params
        ):
            message = "parameters are plain: no `*`, `**` or `/`"
            self.at.fail("dsl-parameter", message, node.name)
        if node.returns and not _is_none(node.returns.annotation):
            message = "a function returns nothing that is annotated"
            self.at.fail("dsl-parameter", message, node.returns)
        seen: set[str] = set()
        for parameter in parameters.params:
            name = parameter.name.value
            if name in seen:
                self.at.fail("dsl-duplicate-name", f"two parameters `{name}`", parameter)
            seen.add(name)
        return list(parameters.params)

    def _annotation(self, parameter: cst.Param) -> tuple[str, list[cst.CSTNode]]:
        help = "`Input[...]`, `Derived[...]`, `Output[...]`, `Scalar` or `Mask[rows, columns]`"
        if parameter.annotation is None:
            message = f"`{parameter.name.value}` needs an annotation"
            self.at.fail("dsl-parameter", message, parameter, help)
        node = parameter.annotation.annotation
        match node:
            case cst.Name(value="Scalar"):
                kind, items = "Scalar", []
            case cst.Subscript(value=cst.Name(value=kind)) if kind in (*ROLES, "Mask"):
                items = [self._item(element) for element in node.slice]
            case _:
                self.at.fail("dsl-parameter", "unknown annotation", node, help)
        if kind not in self.imported:
            self.at.fail("dsl-unknown-name", f"`{kind}` is not imported", node)
        return kind, items

    def _item(self, element: cst.SubscriptElement) -> cst.CSTNode:
        match element.slice:
            case cst.Index(star=None, value=value):
                return value
        self.at.fail("dsl-parameter", "axes go here", element)

    def _tensor(self, parameter: cst.Param, kind: str, items: list[cst.CSTNode]) -> TensorDecl:
        name = parameter.name.value
        if parameter.default:
            self.at.fail("dsl-parameter", f"tensor `{name}` cannot have a default", parameter)
        dtype = "inputs"
        match items[-1]:
            case cst.Name(value=word) if word in DTYPES and word in self.imported:
                dtype, items = word, items[:-1]
        if not items:
            self.at.fail("dsl-parameter", f"tensor `{name}` has no dimensions", parameter)
        dims = tuple(self._axes(item) for item in items)
        carried = [axis for dim in dims for axis in dim]
        twice = next((axis for axis in carried if carried.count(axis) > 1), None)
        if twice:
            self.at.fail("dsl-parameter", f"`{name}` carries `{twice}` twice", parameter)
        return TensorDecl(name, ROLES[kind], dims, dtype, self.at.span(parameter))

    def _axes(self, node: cst.CSTNode) -> tuple[str, ...]:
        """`B` or `H * G`."""
        match node:
            case cst.Name(value=name) if name in self.axes:
                return (name,)
            case cst.Name(value=name):
                help = closest(name, self.axes)
                self.at.fail("dsl-unknown-name", f"no axis `{name}`", node, help)
            case cst.BinaryOperation(operator=cst.Multiply(), left=left, right=cst.Name() as right):
                return (*self._axes(left), *self._axes(right))
        self.at.fail("dsl-parameter", "a dimension is an axis, or axes joined by `*`", node)

    def _scalar(self, parameter: cst.Param) -> ScalarDecl:
        span = self.at.span(parameter)
        if parameter.default is None:
            return ScalarDecl(parameter.name.value, None, span)
        default = self.expressions.convert(parameter.default)
        for node in walk(default):
            match node:
                case Name(id=id) if id in self.axes:
                    pass
                case Number() | Unary(op="-"):
                    pass
                case Binary(op="+" | "-" | "*" | "/" | "//" | "%" | "**"):
                    pass
                case _:
                    message = "a default is made of numbers and extents of axes"
                    self.at.fail("dsl-parameter", message, parameter.default)
        return ScalarDecl(parameter.name.value, default, span)

    def _mask(self, parameter: cst.Param, items: list[cst.CSTNode]) -> MaskDecl:
        name = parameter.name.value
        axes = [self._axes(item) for item in items]
        if len(axes) != 2 or any(len(a) != 1 for a in axes) or axes[0] == axes[1]:
            message = f"mask `{name}` is over two axes: rows, columns"
            self.at.fail("dsl-parameter", message, parameter)
        default = None if parameter.default is None else self._domain(parameter.default)
        return MaskDecl(name, (axes[0][0], axes[1][0]), default, self.at.span(parameter))

    def _domain(self, node: cst.BaseExpression) -> Domain:
        """`full`, `causal` or `window(128)`."""
        match node:
            case cst.Name(value=("full" | "causal") as kind) if kind in self.imported:
                return Domain(kind)
            case cst.Call(
                func=cst.Name(value="window"),
                args=[cst.Arg(keyword=None, star="", value=cst.Integer(value=width))],
            ) if (
                "window" in self.imported
            ):
                if len(width) <= 13 and width.isdecimal() and 0 < int(width) <= WIDEST:
                    return Domain("window", int(width))
                message = f"a window has from 1 to {WIDEST} positions, the row itself included"
                self.at.fail("dsl-parameter", message, node)
        known = "known, if imported: " + ", ".join(DOMAINS[:-1]) + ", window(128)"
        self.at.fail("dsl-parameter", "this is no mask", node, known)


def _is_none(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"
