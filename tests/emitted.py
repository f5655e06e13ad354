"""Schedules for the tests, with their plan and the text of their module.

emitted = one("double-ring", (2, 4), problem)      # a named design on 2 nodes of 4 ranks
RANKS.add("double-ring", check_forward, emitted.late, problem, torch.float64)
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from unittest.mock import patch

import numeric_cases

from mercurygen.emit.module import emit, refuse
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Link
from mercurygen.ir.problem import Problem
from mercurygen.lower.events import Batch, Collective, Message, Trace
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load
from mercurygen.schedule.apply import apply
from mercurygen.schedule.problem_text import show_problem
from mercurygen.schedule.schedule import Schedule, Target
from mercurygen.schedule.text import parse, show
from mercurygen.search.space import Point, points, settle

ATTENTION = load("attention")
LEVELS = ("rack", "node", "gpu")
DESIGNS = (
    "ring",
    "allgather-kv",
    "ulysses",
    "unified",
    "double-ring",
    "unified-double-ring",
)


_TEXTS: dict[tuple[object, ...], str] = {}  # most of a test's time would go into black


@dataclass(frozen=True)
class Emitted:
    """A schedule, its plan, and the module, made when its text is first asked for."""

    schedule: Schedule
    plan: Plan

    @property
    def text(self) -> str:
        """The module; of schedules that differ in sizes only, the one that was first asked for."""
        schedule, problem = self.schedule, self.schedule.problem
        mask = problem.mask, problem.window, problem.ahead, bool(problem.documents), problem.align
        mask = *mask, problem.seq_kv is None
        key = schedule.mesh, schedule.directives, mask, schedule.group, schedule.target
        if key not in _TEXTS:
            _TEXTS[key] = self.emit()
        return _TEXTS[key]

    def emit(self) -> str:
        """The module, made anew."""
        return emit(self.schedule, self.plan, "tested")

    @functools.cached_property
    def plain(self) -> str:
        """The module before black has formatted it, which takes longer than all the rest."""
        with patch("mercurygen.emit.module.format_text", str):
            return self.emit()

    @property
    def late(self) -> functools.partial[str]:
        """The module's text as an argument of `Ranks.add`: emitted just before the fork."""
        return functools.partial(self._compiled)

    def _compiled(self) -> str:
        numeric_cases.compiled(self.text, numeric_cases.named(self.text))
        return self.text

    @property
    def late_plain(self) -> functools.partial[str]:
        """`plain` likewise."""
        return functools.partial(getattr, self, "plain")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.schedule.mesh.size

    @property
    def shown(self) -> str:
        """The schedule, ready to paste."""
        return show(self.schedule)

    @property
    def mesh(self) -> str:
        """The mesh: `node=2 gpu=4`, without the names."""
        return "x".join(str(dim.size) for dim in self.schedule.mesh.dims)


def links(*sizes: int) -> tuple[Link, ...]:
    """Levels of these sizes, outermost first."""
    return tuple(
        Link(name, size, "wire", 25e9)
        for name, size in zip(LEVELS[-len(sizes) :], sizes, strict=True)
    )


def problem_of(problem: numeric_cases.Problem, dtype: str = "bfloat16") -> Problem:
    """The numeric problem as a schedule's header says it."""
    return Problem(
        batch=problem.batch,
        seq=problem.seq,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.value_dim or problem.head_dim,
        dtype=dtype,
        mask="window" if problem.window else "causal" if problem.causal else "full",
        window=problem.window[0] + 1 if problem.window else None,
        ahead=problem.window[1] if problem.window else 0,
        seq_kv=problem.seq_kv,
        align=problem.align,
    )


def realize(point: Point, levels: tuple[Link, ...], problem: Problem) -> Emitted | Refusal:
    """A point of the space, or what refuses it."""
    settled = settle(point)
    if isinstance(settled, Refusal):
        return settled
    program, directives = settled
    plan = lower(program)
    if isinstance(plan, Refusal):
        return plan
    target = Target("test", "sha256:0123456789abcdef", levels)
    group = tuple(level.size for level in levels)
    return Emitted(Schedule("attention", problem, target, group, 1, point.mesh, directives), plan)


def instances(
    design: str | None,
    sizes: tuple[int, ...],
    problem: numeric_cases.Problem,
    dtype: str = "bfloat16",
) -> Iterator[Emitted | Refusal]:
    """All instances of a design (None: the whole space) on levels of these sizes."""
    ours, levels = problem_of(problem, dtype), links(*sizes)
    for point in points(ATTENTION, ours, levels, design=design, order=problem.order):
        yield realize(point, levels, ours)


def one(
    design: str, sizes: tuple[int, ...], problem: numeric_cases.Problem, dtype: str = "bfloat16"
) -> Emitted:
    """The first instance of a design; it must be legal."""
    found = next(instances(design, sizes, problem, dtype))
    if isinstance(found, Refusal):
        raise found.error()
    return found


def expected(plan: Plan, played: Trace) -> list[numeric_cases.Call]:
    """A trace's transfers as the recorder says them."""
    mesh, calls = plan.program.mesh, []

    def ops(way: str, messages: tuple[Message, ...]) -> list[tuple[str, int, int]]:
        found = []
        for message in messages:
            nbytes = played.buffers[message.buffer].nbytes
            found.append((way, message.peer, nbytes if message.nbytes is None else message.nbytes))
        return found

    for event in played.events:
        if isinstance(event, Batch):
            recvs, sends = ops("recv", event.recvs), ops("send", event.sends)
            sizes = [sum(op[2] for op in side) for side in (sends, recvs)]
            group = mesh.group(played.rank, event.dim)
            calls.append(numeric_cases.Call("p2p", group, (*recvs, *sends), *sizes))
        elif isinstance(event, Collective):
            sizes = [played.buffers[each].nbytes for each in (event.source, event.target)]
            group, kind = mesh.group(played.rank, event.dim), event.kind.replace("-", "_")
            adds = kind in ("all_reduce", "reduce_scatter")
            reduce = event.reduce.upper() if adds else ""
            calls.append(numeric_cases.Call(kind, group, (), *sizes, reduce))
    return calls


def written(
    mesh: str, body: str, problem: numeric_cases.Problem, dtype: str = "bfloat16", pins: str = ""
) -> Emitted:
    """A schedule on levels that are its mesh; without pins, the sequence is over all of it.

    Raises:
        UserError: it is refused.
    """
    dims = ", ".join(word.partition("=")[0] for word in mesh.split())
    pins = pins or f"pin q, k, v, out, lse: S over {dims}"
    order = f"order S: {problem.order} over {dims}"
    return of_lines(mesh, f"{order}\n{pins}\n{body}", problem_of(problem, dtype))


def of_lines(mesh: str, lines: str, problem: Problem) -> Emitted:
    """A schedule of these directives on levels that are its mesh.

    Raises:
        UserError: it is refused.
    """
    source = parse(f"""operator attention
problem {show_problem(problem)}
topology test sha256:0123456789abcdef {' '.join(f'{x} wire 25GB/s' for x in mesh.split())}
group {mesh}
tp 1
mesh {mesh}
{lines}
""")
    plan = lower(apply(ATTENTION, source.schedule, source.spans))
    if isinstance(plan, Refusal):
        raise plan.error()
    return Emitted(source.schedule, plan)


def resized(emitted: Emitted, problem: numeric_cases.Problem, dtype: str) -> Emitted:
    """The schedule for another problem: other figures in its plan, the same code."""
    schedule = replace(emitted.schedule, problem=problem_of(problem, dtype))
    plan = lower(apply(ATTENTION, schedule))
    assert isinstance(plan, Plan)
    return Emitted(schedule, plan)


def drawn(
    seed: int, count: int, shapes: tuple[tuple[int, ...], ...], local_seq: int = 20
) -> list[tuple[Emitted, numeric_cases.Problem]]:
    """Different schedules of rows and heads that have modules, any mask, order and heads."""
    rng = random.Random(seed)
    found: dict[str, tuple[Emitted, numeric_cases.Problem]] = {}
    while len(found) < count:
        sizes = rng.choice(shapes)
        heads, kv_heads = rng.choice(((8, 8), (8, 4), (16, 8), (12, 6), (8, 2), (6, 3)))
        problem = numeric_cases.Problem(
            seq=local_seq * prod(sizes),
            heads=heads,
            kv_heads=kv_heads,
            value_dim=rng.choice((None, 36)),
            causal=rng.random() < 0.7,
            order=rng.choice(("zigzag", "contiguous")),
            seed=rng.randrange(1000),
        )
        ours, levels = problem_of(problem), links(*sizes)
        axes = ("S_q", "H")
        space = list(points(ATTENTION, ours, levels, order=problem.order, axes=axes))
        emitted = realize(rng.choice(space), levels, ours)
        if isinstance(emitted, Emitted) and refuse(emitted.plan) is None:
            found[emitted.shown] = emitted, problem
    return list(found.values())
