"""How the tile loops of a plan cut its tensors, as the emitted text says it."""

from __future__ import annotations

from mercurygen.emit import border
from mercurygen.emit.loops import part_counts
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Gather, Plan, Swap

INDEX = {"B": "b", "H": "h", "G": "g", "S_q": "i"}  # of a part of an axis
WORDS = {"B": "the batch", "H": "the heads", "G": "the query heads", "S_q": "the rows"}
DENSE = ".clone(memory_format=torch.contiguous_format)"
FLIGHTS = "list[tuple[Tensor, dist.Work]]"


class Parts:
    """How the tile loops of a plan cut its tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program = plan, plan.program
        self.counts = part_counts(plan)
        self.indices = [INDEX[axis] for axis in self.counts]
        self.tensors = [t.name for t in self.program.read]
        self.moving = [t for t in self.tensors if self.tiled(t) and self.story(t) != ((), ())]
        self.lying = [t for t in self.tensors if self.tiled(t) and t not in self.moving]
        self.home = [s for s in plan.after if not s.optional]  # steps of out; lse has the same

    @property
    def grouped(self) -> bool:
        """Whether query heads are told apart by their key/value head."""
        dealt = [border.dealt_axis(s) for s in (*self.plan.before, *self.plan.after)]
        return "G" in self.counts or "G" in dealt

    @property
    def single(self) -> bool:
        """Whether one axis is looped over."""
        return len(self.counts) == 1

    @property
    def number(self) -> int:
        """Parts of a single axis."""
        (count,) = self.counts.values()
        return count

    def tiled(self, name: str) -> bool:
        """Whether the loops cut a tensor."""
        return any(self.program.tensor(name).carries(axis) for axis in self.counts)

    def story(self, name: str) -> tuple[tuple[Swap, ...], tuple[Gather, ...]]:
        """The reshards of an input, and its gathers outside every walk."""
        steps = tuple(step for step in self.plan.before if name in step.tensors)
        gathers = [g for loop in self.plan.nest.loops if name in loop.tensors for g in loop.leading]
        return steps, tuple(gathers)

    def walked(self, name: str) -> bool:
        """Whether a tensor comes by."""
        return any(name in loop.tensors for loop in self.plan.nest.loops if loop.walks)

    def iterations(self) -> str:
        """An iterable of the indices of all parts."""
        if self.single:
            return f"range({self.number})"
        return f"product({', '.join(f'range({n})' for n in self.counts.values())})"

    def parameters(self) -> str:
        """`h: int, g: int`."""
        return ", ".join(f"{index}: int" for index in self.indices)

    def what(self) -> str:
        """What a part is of, in words."""
        words = [WORDS[axis] for axis in self.counts]
        return " and ".join(dict.fromkeys(words))

    def of_what(self) -> str:
        """` of the heads`; nothing where it is long."""
        return f" of {self.what()}" if self.single else ""

    def kv_heads(self, dim: str) -> str:
        """Key/value heads of a part where a dimension deals query heads."""
        ways = border.heads_before(self.plan, dim) * self.counts.get("H", 1)
        return f"kv_heads // {ways}" if ways > 1 else "kv_heads"

    def cut(self, x: str, axes: list[str], dense: bool) -> str:
        """A part of x along some axes; dense: a copy."""
        text = x
        if "G" in axes:
            text += ".unflatten(2, (kv_heads, -1))"
        for axis, dim in (("B", 0), ("S_q", 1), ("H", 2), ("G", 3)):
            if axis in axes:
                text += f".chunk({self.counts[axis]}, dim={dim})[{INDEX[axis]}]"
        text += DENSE if dense else ""
        return text + (".flatten(2, 3)" if "G" in axes else "")

    def carried(self, name: str) -> list[str]:
        """The tiled axes of a tensor."""
        return [axis for axis in self.counts if self.program.tensor(name).carries(axis)]


def signature(names: list[str]) -> str:
    """Parameters of these names, each with its type."""
    kinds = {"kv_heads": "int", "count": "int", "result": "tuple[Tensor, Tensor]"}
    kinds |= {"whole": "tuple[Tensor, ...]", "received": "list[Tensor]"}
    kinds |= {"leaving": FLIGHTS, "results": "Iterator[tuple[Tensor, Tensor]]"}
    tensors = {"q", "k", "v"}
    return ", ".join(
        f"{x}: {'Tensor' if x in tensors else kinds.get(x, 'dist.ProcessGroup')}" for x in names
    )


def groups(plan: Plan, dims: list[str]) -> list[str]:
    """The variables of some dimensions' groups."""
    return [variable(dim) for dim in plan.program.mesh.in_order(dims)]
