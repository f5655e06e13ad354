"""Partial results: which functions a nest with some prints as, and what they are given."""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.emit import kernels, windows
from mercurygen.emit.loops import every_chunk, part_counts
from mercurygen.emit.needed import may_be_empty, rows_are_cut
from mercurygen.emit.words import letters, variable
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Loop, Plan

PAIR = "tuple[Tensor, Tensor]"


def partial(plan: Plan) -> bool:
    """Whether ranks have results for others' queries."""
    return bool(plan.nest.reduces) or any(loop.outputs for loop in plan.nest.loops)


def blind_rows(plan: Plan) -> bool:
    """Whether partial results have rows that see no key of theirs."""
    return partial(plan) and plan.program.mask != "full" and plan.nest.begin != "only"


def merged(plan: Plan) -> bool:
    """Whether partial results are merged here, not by a sum over the ranks."""
    return any(r.axis for r in plan.nest.reduces) or any(x.outputs for x in plan.nest.loops)


@dataclass(frozen=True)
class Level:
    """One function of the nest.

    Attributes:
        gathers: loops whose tensors are gathered first.
        loop: whose tiles come by; None: of the innermost, which may have none.
        last: whether the body runs inside it.
    """

    gathers: tuple[Loop, ...]
    loop: Loop | None
    last: bool

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions along which its tiles come by, outermost first."""
        return tuple(walk.dim for walk in self.loop.walks) if self.loop else ()

    @property
    def home(self) -> str | None:
        """How the results of the loop go to the owners of its tiles, if they do."""
        return self.loop.home if self.loop else None


def levels(plan: Plan) -> tuple[Level, ...]:
    """The functions of the nest, outermost first."""
    found: list[Level] = []
    gathers: tuple[Loop, ...] = ()
    for loop in plan.nest.loops:
        if not loop.walks:
            if not part_counts(plan):  # else a part comes gathered
                gathers = (*gathers, loop)
            continue
        found.append(Level(gathers, loop, False))
        gathers = ()
    last = found[-1] if found else None
    if last is None or last.home:
        return (*found, Level(gathers, None, True))
    return (*found[:-1], Level(last.gathers, last.loop, True))


class Names:
    """How the functions of a plan's nest are called, and what they are given."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program = plan, plan.program
        self.letters = letters(plan.program.mesh.dims)
        self.levels = levels(plan)
        self.causal = plan.program.mask != "full" or bool(plan.program.documents)
        self.raw = plan.nest.begin == "only"  # results are as the kernel leaves them
        self.rounded = self.raw and plan.program.kernel != TRITON  # of the inputs' dtype, strided
        self.trimmed = self.raw and self.causal
        direct = any(loop.home == "direct" for loop in plan.nest.loops)
        self.blank = not self.trimmed and direct and rows_are_cut(plan) and may_be_empty(plan)

    def function(self, index: int) -> str:
        """The name of a level's function."""
        if index == 0 and not self.plan.nest.reduces:
            return "_attend"
        level = self.levels[index]
        return "_partial" if level.last else f"_attend_along_{'_'.join(level.dims)}"

    def is_block(self, index: int) -> bool:
        """Whether a level is nothing but one call of the kernel."""
        level = self.levels[index]
        return self.raw and not self.causal and not level.loop and not level.gathers

    def places(self, index: int) -> list[str]:
        """Dimensions whose owner the loops around a level have fixed."""
        if not self.causal:
            return []
        return [dim for level in self.levels[:index] for dim in level.dims]

    def groups(self, index: int) -> list[str]:
        """Dimensions whose communicator a level or what is inside it needs."""
        used = set(self.own_places()) if self.causal else set()
        for level in self.levels[index:]:
            for loop in (*level.gathers, *([level.loop] if level.loop else [])):
                stages = loop.walking if part_counts(self.plan) else loop.stages
                used |= {stage.dim for stage in stages}
        return [dim for dim in self.program.mesh.names if dim in used]

    def own_places(self) -> list[str]:
        """Dimensions along which a rank's own place says what it works on."""
        rows, cols = self.program.mask_axes
        own = []
        for dim in self.program.order.dims:
            axis = self.program.parallel_axis(dim)
            if axis in (rows, cols) and not (axis == rows and self.walked(rows, dim)):
                if axis == rows or not self.walked(cols, dim):
                    own.append(dim)
        return own

    def walked(self, axis: str, dim: str) -> bool:
        """Whether tiles along an axis come by, or go home, along a dimension."""
        return any(
            loop.axis == axis and any(walk.dim == dim for walk in loop.walks)
            for loop in self.plan.nest.loops
        )

    def chunks(self, axis: str, **other: str) -> str:
        """The chunks of a tile's tokens along an axis of the mask, as the text has them."""
        if not self.program.order.dims:
            return every_chunk(self.plan)
        held = []
        for dim in self.program.order.dims:
            if dim in other:
                held.append(f"[{other[dim]}]")
            elif self.walked(axis, dim):
                held.append(f"[{self.letters[dim]}]")
            elif self.program.parallel_axis(dim) == axis:
                held.append(f"[{variable(dim)}.rank()]")
            else:
                held.append(f'range(MESH["{dim}"])')
        return f"_chunks({', '.join(held)})"

    def owner(self, index: int) -> str:
        """Whose tile comes by at a level: one index, or one along every ring of its nest."""
        names = [self.letters[dim] for dim in self.levels[index].dims]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"

    def call(self, index: int, q: str = "q", k: str = "k", v: str = "v") -> str:
        """A call of a level, on these tensors."""
        if self.is_block(index):
            return kernels.call(self.plan, f"{q}, {k}, {v}", False)
        places = [self.letters[dim] for dim in self.places(index)]
        groups = [variable(dim) for dim in self.groups(index)]
        given = ", ".join([q, k, v, *places, *groups, "scale"]) + windows.argument(self.plan)
        return f"{self.function(index)}({given})"

    def signature(self, name: str, places: list[str], groups: list[str], result: str) -> str:
        """The first line of a function."""
        given = [f"{self.letters[dim]}: int" for dim in places]
        given += [f"{variable(dim)}: dist.ProcessGroup" for dim in groups]
        more = "".join(f", {each}" for each in given)
        more += f", scale: float{windows.parameter(self.plan)}"
        return f"def {name}(q: Tensor, k: Tensor, v: Tensor{more}) -> {result}:"


def with_owner(plan: Plan) -> bool:
    """Whether a walk says whose tile it yields."""
    masked = plan.program.mask != "full" or bool(plan.program.documents)
    direct = any(loop.home == "direct" for loop in plan.nest.loops)
    return masked or direct or queries_stay(plan)


def queries_stay(plan: Plan) -> bool:
    """Whether results of queries that come by are not sent home."""
    return any(loop.walks and "q" in loop.tensors and not loop.home for loop in plan.nest.loops)
