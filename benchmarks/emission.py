"""Of the legal schedules of attention, how many have a module, and what keeps the others from it.

    python benchmarks/emission.py [--seed 1] [--points 200] [--draws 20000]

Two samples, of the forward. `searched`: points of the space that the search looks at, for every
configuration of levels, heads and mask below, in every order of tokens. `written`: schedules that
a person might write beyond that space, as `benchmarks/drawn.py` draws them: with pins of any axis
or of none, tile loops over any axis, all options. Prints, per configuration, how many were legal,
how many are emitted, and the rest by reason; the modules themselves are not written.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from drawn import draws

from mercurygen.emit.module import refuse
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Dim, Link, Mesh
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.text import Line
from mercurygen.search.space import points, settle

LEVELS = ((2,), (3,), (4,), (2, 2), (2, 4), (3, 2), (2, 2, 2))  # sizes, outermost first
HEADS = ((8, 8), (8, 2))  # with keys and values of their own, and of every four one
MASKS = ("causal", "full", "window")
SEQ, WINDOW = 192, 20
NAMES = ("rack", "node", "gpu")

Found = Iterator[tuple[str, Plan | Refusal]]  # a configuration, and a plan or what is not legal


def searched(seed: int, count: int) -> Found:
    """So many points of every configuration's space, or all if there are fewer."""
    operator = load("attention")
    for sizes, (heads, kv_heads), mask in product(LEVELS, HEADS, MASKS):
        problem = Problem(
            batch=2, seq=SEQ, heads=heads, kv_heads=kv_heads, head_dim=16, v_head_dim=16
        )
        problem = replace(problem, mask=mask, window=WINDOW if mask == "window" else None)
        names = NAMES[-len(sizes) :]
        links = tuple(Link(n, size, "wire", 1e9) for n, size in zip(names, sizes, strict=True))
        space = list(points(operator, problem, links, order="any"))
        kind = f"{' x '.join(map(str, sizes))} ranks, {heads} / {kv_heads} heads, {mask}"
        for point in random.Random(f"{seed} {kind}").sample(space, min(count, len(space))):
            settled = settle(point)
            yield kind, settled if isinstance(settled, Refusal) else lower(settled[0])


def written(seed: int, count: int) -> Found:
    """So many draws, by mask and the number of the mesh's dimensions."""
    operator = load("attention")
    for drawn, _ in zip(draws(seed, "attention"), range(count), strict=False):
        sizes = (word.split("=") for word in drawn.mesh.split())
        mesh = Mesh(tuple(Dim(name, int(size)) for name, size in sizes))
        lines = (Line("drawn", i, line) for i, line in enumerate(drawn.body.split("\n"), 1))
        program = attempt(start(operator, drawn.problem, mesh), tuple(map(parse_directive, lines)))
        kind = f"{len(mesh.dims)} dimensions, {drawn.problem.mask}"
        yield kind, program if isinstance(program, Refusal) else lower(program)


def counted(found: Found) -> dict[str, Counter[str]]:
    """Per configuration: "not legal", "emitted", and the others by what refuses them."""
    counts: dict[str, Counter[str]] = {}
    for kind, plan in found:
        refusal = None if isinstance(plan, Refusal) else refuse(plan)
        became = "not legal" if isinstance(plan, Refusal) else "emitted"
        if refusal is not None:
            words = refusal.explain()[0].partition(":")[0]
            pinned = (
                refusal.slug == "pin-not-supported"
            )  # of whichever tensor, over which dimension
            words = words.partition(" is ")[2].partition(" over ")[0] if pinned else words
            became = f"{refusal.slug}: {words}"
        counts.setdefault(kind, Counter())[became] += 1
    return counts


def show(title: str, counts: dict[str, Counter[str]]) -> None:
    """A line for every configuration, and the reasons."""
    print(f"{title}\n{'legal':>8}{'emitted':>9}{'not':>7}")
    for kind, each in (*sorted(counts.items()), ("all", sum(counts.values(), Counter()))):
        legal = each.total() - each["not legal"]
        print(f"{legal:8}{each['emitted']:9}{legal - each['emitted']:7}  {kind}")
    for became, count in sum(counts.values(), Counter()).most_common():
        if became not in ("not legal", "emitted"):
            print(f"{count:24}  {became}")


def main() -> None:
    """Print both samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, default=200, help="of every configuration's space")
    parser.add_argument("--draws", type=int, default=20000, help="of schedules that are written")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    show("searched", counted(searched(options.seed, options.points)))
    show("written", counted(written(options.seed, options.draws)))


if __name__ == "__main__":
    main()
