"""Schedules drawn from the whole space of an operator: legal ones and others."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from random import Random
from typing import NamedTuple

from mercurygen.ir.problem import Problem, Sizes
from mercurygen.operators import load

SEQUENCES = ("S_q", "S_kv")
GROUPS = {  # what moves as one
    "attention": (("q",), ("k", "v"), ("out", "lse")),
    "attention_backward": (
        ("q",),
        ("k", "v"),
        ("lse",),
        ("do",),
        ("delta",),
        ("dq",),
        ("dk", "dv"),
    ),
    "matmul": (("a",), ("b",), ("c",)),
}
PARALLEL = {  # how often an axis is split
    "attention": {"B": 1, "H": 3, "G": 1, "S_q": 4, "S_kv": 4},
    "attention_backward": {"B": 1, "H": 3, "G": 1, "S_q": 4, "S_kv": 4},
    "matmul": {"M": 3, "N": 3, "K": 4},
}
OPTIONS = ("direct", "reverse", "both", "prefetch 0", "prefetch 2", "direct prefetch 2")


class Drawn(NamedTuple):
    """A schedule, and the sizes that it is for; printed, it can be pasted into a test."""

    operator: str
    problem: Problem | Sizes
    mesh: str
    body: str


class _Draw:
    """One schedule in the making."""

    def __init__(self, rng: Random, operator: str) -> None:
        self.rng, self.operator = rng, operator
        tensors = load(operator).tensors
        self.tensors = {t.name: t.axes for t in tensors}
        self.outputs = {t.name for t in tensors if t.role == "output"}
        sizes: list[int] = []
        for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
            sizes.append(rng.choice([n for n in (2, 3, 4) if n * prod(sizes) <= 16] or [0]))
        self.mesh = {f"d{i}": n for i, n in enumerate(n for n in sizes if n)}
        weights = PARALLEL[operator]
        self.parallel = {
            dim: rng.choices(list(weights), list(weights.values()))[0] for dim in self.mesh
        }
        self.tiles: dict[tuple[str, ...], int] = {}
        self.whole: set[tuple[tuple[str, ...], str]] = set()  # (group, dim) replicated
        self.options = {dim: self.drawn_options() for dim in self.mesh}
        self.homes = {dim: rng.choice(("", " direct")) for dim in self.mesh}

    def drawn_options(self) -> str:
        """Of the inputs' walk along a dimension."""
        if self.rng.random() < 0.5:
            return ""
        return " " + self.rng.choice(OPTIONS)

    def along(self, group: tuple[str, ...]) -> str:
        """The axis along which a group is stored split: its sequence, or seldom another."""
        axes = [a for a in self.tensors[group[0]] if all(a in self.tensors[t] for t in group)]
        loops = [a for a in axes if a in PARALLEL[self.operator]]
        sequence = [a for a in loops if a in SEQUENCES]
        if sequence and self.rng.random() < 0.95:
            return sequence[0]
        return self.rng.choice(loops)

    def stories(self) -> list[str]:
        """How every group comes to the ranks, or goes; each group's lines next to each other."""
        blocks = []
        dims = list(self.mesh)
        self.rng.shuffle(dims)
        same = {dim: self.rng.choice(("shift", "shift", "shard")) for dim in dims}
        for group in GROUPS[self.operator]:
            lines, axis = [], self.along(group)
            for dim in dims:
                if self.parallel[dim] in self.tensors[group[0]]:
                    continue
                lines.append(self.story(group, axis, dim, same[dim]))
            blocks.append(lines)
        self.rng.shuffle(blocks)
        return [line for block in blocks for line in block if line]

    def story(self, group: tuple[str, ...], axis: str, dim: str, usual: str) -> str:
        """One group along one dimension."""
        names, rng = ", ".join(group), self.rng
        kind = usual if rng.random() < 0.8 else rng.choice(("shift", "shard", "replicate", ""))
        if kind == "replicate":
            self.whole.add((group, dim))
            return f"replicate {names} over {dim}"
        if kind == "shard":
            return f"shard {names}: {axis} over {dim}"
        if kind == "shift":
            ends = self.homes if group[0] in self.outputs else self.options
            return f"shift {names}: {axis} along {dim}{ends[dim]}"
        return ""

    def pins(self) -> list[str]:
        """None, mostly; what is replicated must be given, or wanted, whole."""
        if self.operator == "matmul" or not self.whole and self.rng.random() < 0.85:
            return []
        lines = []
        for group in GROUPS[self.operator]:
            if group == ("delta",):
                continue
            for dim in self.mesh:
                axis = self.rng.choices(("S", "H", "B", None), (8, 1, 1, 1))[0]
                if self.parallel[dim] in self.tensors[group[0]] and self.rng.random() < 0.3:
                    axis = self.parallel[dim]
                if axis is not None and (group, dim) not in self.whole:
                    names = ("out", "do") if group == ("do",) else group  # delta is made of both
                    lines.append(f"pin {', '.join(names)}: {axis} over {dim}")
        return lines

    def loops(self) -> list[str]:
        """Tile loops, seldom."""
        lines: list[str] = []
        rng = self.rng
        if rng.random() < 0.7:
            return lines
        axes = list(PARALLEL[self.operator])
        if self.operator != "matmul" and rng.random() < 0.25:
            parts = rng.choice((2, 4, 6))
            self.tiles["H", "G"] = parts
            lines += ["join H, G", f"tile H_G by {parts}"]
            axes = ["B", *SEQUENCES]
        for axis in rng.sample(axes, rng.choice((1, 1, 2))):
            parts = rng.choice((2, 2, 3, 4))
            self.tiles[axis,] = parts
            lines.append(f"tile {axis} by {parts}")
        if len(self.tiles) > 1 and rng.random() < 0.5:
            names = ["_".join(loop) for loop in self.tiles]
            rng.shuffle(names)
            lines.append(f"reorder {', '.join(names)}")
        return lines

    def order(self) -> list[str]:
        """None, mostly."""
        if self.operator == "matmul" or self.rng.random() < 0.5:
            return []
        kind = self.rng.choice(("contiguous", "zigzag", "striped"))
        return [f"order S: {kind} over {', '.join(self.mesh)}"]

    def extent(self, axis: str) -> int:
        """What the schedule divides an axis into, so that it is seldom refused for that."""
        ways = prod(n for dim, n in self.mesh.items() if self.parallel[dim] == axis)
        parts = prod(n for loop, n in self.tiles.items() if axis in loop)
        return ways * parts

    def problem(self) -> Problem | Sizes:
        """Small sizes that are divided so."""
        rng, ranks = self.rng, prod(self.mesh.values())
        if self.operator == "matmul":
            extents = ((a, self.extent(a) * ranks * rng.choice((1, 2))) for a in "MNK")
            return Sizes(tuple(extents), "float64")
        more = prod(self.extent(axis) for axis in SEQUENCES)
        seq = 2 * ranks * rng.choice((1, 2, 3))
        seq *= prod(n for loop, n in self.tiles.items() if set(loop) & set(SEQUENCES))
        heads = self.extent("H") * (1 if more > 8 else rng.choice((1, 1, 2)))
        return Problem(
            batch=self.extent("B"),
            seq=seq,
            heads=heads * self.extent("G"),
            kv_heads=heads,
            head_dim=2,
            v_head_dim=3,
            dtype="float64",
            mask=rng.choice(("causal", "full")),
        )


def draw(rng: Random, operator: str) -> Drawn:
    """A schedule from the whole space."""
    made = _Draw(rng, operator)
    if operator == "matmul" and len(made.mesh) == 2 and rng.random() < 0.15:
        return _cannon(rng)
    split = [f"parallelize {axis} over {dim}" for dim, axis in made.parallel.items()]
    stories, loops = made.stories(), made.loops()
    body = [*made.order(), *made.pins(), *split, *stories, *loops]
    mesh = " ".join(f"{dim}={size}" for dim, size in made.mesh.items())
    return Drawn(operator, made.problem(), mesh, "\n".join(body))


def _cannon(rng: Random) -> Drawn:
    size = rng.choice((2, 3, 4))
    body = (
        "parallelize M over row\nparallelize N over col\n"
        "shift a: K along col skewed\nshift b: K along row skewed"
    )
    extents = tuple((axis, size * rng.choice((1, 2, 3))) for axis in "MNK")
    return Drawn("matmul", Sizes(extents, "float64"), f"row={size} col={size}", body)


def draws(seed: int, operator: str) -> Iterator[Drawn]:
    """Without end."""
    rng = Random(seed)
    while True:
        yield draw(rng, operator)
