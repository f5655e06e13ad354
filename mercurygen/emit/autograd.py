"""The one autograd function of a differentiable module, as the interpreter runs it.

Its class has nothing but `forward` and `backward`. What its context keeps is known: tensors through
`save_for_backward`, groups and numbers as attributes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from mercurygen.emit.handles import Group
from mercurygen.emit.python_expressions import Complaint, Host, Keeper
from mercurygen.emit.values import Tensor

BASE = "torch.autograd.Function"
ONCE = "torch.autograd.function.once_differentiable"
OPAQUE = "torch.compiler.disable"
DECORATORS = {"forward": ["staticmethod"], "backward": ["staticmethod", "once_differentiable"]}


class Context(Keeper):
    """What a forward leaves for its backward.

    Attributes:
        given: number of arguments of the call.
        saved: the tensors that are kept, once they are.
        contents: what they then held, as their storages count it.
        plain: the tensors that have no gradient.
        kept: groups and numbers, by attribute.
        saved_tensors: what the backward finds.
    """

    own = frozenset({"save_for_backward", "mark_non_differentiable", "saved_tensors"})

    def __init__(self, given: int, kept: dict[str, Any], saved_tensors: tuple[Any, ...]) -> None:
        self.given, self.kept, self.saved_tensors = given, kept, saved_tensors
        self.saved: tuple[Tensor, ...] | None = None
        self.contents: list[int] = []
        self.plain: tuple[Tensor, ...] = ()

    @property
    def visible(self) -> frozenset[str]:
        """Its own attributes, and those that the text has set."""
        return self.own | self.kept.keys()

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["kept"][name]

    def keep(self, name: str, value: Any) -> None:
        """Set an attribute: to a group, a number, or several of these."""
        if name in vars(self) or hasattr(type(self), name) or name in self.kept:
            raise Complaint(f"sets {name} of what is kept, which it has")
        if not all(isinstance(x, Group | int | float) for x in _flat(value)):
            raise Complaint(f"keeps as {name} what is no group and no number")
        self.kept[name] = value

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors, once."""
        if self.saved is not None or not all(isinstance(x, Tensor) for x in tensors):
            raise Complaint("saves tensors twice, or something else")
        for x in tensors:
            if x.storage.arriving:
                raise Complaint("saves what a transfer is still writing to")
        self.saved, self.contents = tensors, [x.storage.contents for x in tensors]

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Say that tensors have no gradient."""
        self.plain = tensors


def _flat(value: Any) -> list[Any]:
    return [y for x in value for y in _flat(x)] if isinstance(value, tuple | list) else [value]


class Function(Host):
    """The class.

    Attributes:
        forward: called with a context and what `apply` is given.
        backward: called with a context and gradients.
        contexts: of all calls.
    """

    visible = frozenset({"apply"})

    def __init__(self, forward: Callable, backward: Callable) -> None:
        self.forward, self.backward = forward, backward
        self.contexts: list[Context] = []

    def apply(self, *args: Any) -> Any:
        """Run the forward."""
        context = Context(len(args), {}, ())
        self.contexts.append(context)
        result = self.forward(context, *args)
        if not isinstance(result, tuple) or len(result) != 2:
            raise Complaint("the forward returns something else than out and lse")
        if not any(x is result[1] for x in context.plain) or len(context.plain) != 1:
            raise Complaint("the forward marks something else than lse as without gradient")
        return result


def plainly(node: ast.FunctionDef, imports: dict[str, str]) -> bool:
    """Whether a function does no more than its lines say: at most, it is not to be compiled."""
    match node.decorator_list:
        case []:
            return True
        case [ast.Call(name, [], [ast.keyword("reason", ast.Constant(str()))])]:
            return ast.unparse(name) == OPAQUE and imports.get("torch") == "torch"
    return False


def methods(node: ast.ClassDef, imports: dict[str, str], known: set[str]) -> dict[str, Any]:
    """The two functions of such a class, by name.

    Args:
        node: the class.
        imports: of the module.
        known: every name that the module defines.

    Raises:
        Complaint: it is something else.
    """
    found = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
    fits = len(found) + bool(ast.get_docstring(node)) == len(node.body) and not node.keywords
    fits = fits and not node.decorator_list and "staticmethod" not in known
    fits = fits and imports.get("torch") == "torch" and imports.get("once_differentiable") == ONCE
    decorators = {name: [ast.unparse(x) for x in f.decorator_list] for name, f in found.items()}
    if not fits or decorators != DECORATORS:
        raise Complaint(f"not understood: class {node.name}")
    return found
