"""A schedule: the header that says what it is for, and the directives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mercurygen.ir.mesh import Link, Mesh
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.schedule.directives import Directive
from mercurygen.schedule.expected import Expected


@dataclass(frozen=True, slots=True)
class Target:
    """The topology that a schedule was made for, as its header names it.

    Attributes:
        name: of the topology.
        digest: "sha256:" and 16 hexadecimal digits of the topology's file.
        levels: all levels of the topology, outermost first.
    """

    name: str
    digest: str
    levels: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The section `backward`: how the gradients of attention are worked out.

    Attributes:
        directives: in written order, over the tensors of the gradient's operator. Mesh, order and
            pins are the forward's; so is what splits the iterations, if no line here does.
        save: what is kept of q, k, v, out and lse until then: "inner", as the body has them,
            after the border; or "outer", as the caller has them; None: inner if that can be.
    """

    directives: tuple[Directive, ...]
    save: Literal["inner", "outer"] | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that an emitted module is made from, besides the operator's source.

    Attributes:
        operator: name of a shipped operator or `path.py::function`.
        problem: over all tensor-parallel ranks.
        target: the topology.
        group: ranks of the operator per level, in the order of `target.levels`.
        tp: tensor-parallel ranks that share the heads; they run beside each other.
        mesh: the dimensions of the group's ranks.
        directives: in written order.
        comments: comment lines at the head of the file, without `# `.
        backward: of a module that is differentiable.
        expected: what a module that checks it should find when it runs; None: it does not look.
    """

    operator: str
    problem: Problem | Sizes
    target: Target
    group: tuple[int, ...]
    tp: int
    mesh: Mesh
    directives: tuple[Directive, ...]
    comments: tuple[str, ...] = ()
    backward: Backward | None = None
    expected: Expected | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        """The levels as the group occupies them."""
        return tuple(
            Link(level.level, size, level.name, level.bandwidth)
            for level, size in zip(self.target.levels, self.group, strict=True)
        )

    @property
    def local_problem(self) -> Problem | Sizes:
        """The problem of this group: the heads that tensor parallelism leaves it."""
        return self.problem.split_heads(self.tp)
