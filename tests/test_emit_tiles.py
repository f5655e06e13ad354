"""Tile loops, and splits of query heads and batch, as emitted: numbers, memory, calls, text."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from math import prod
from typing import NamedTuple

import pytest
import torch
from emitted import ATTENTION, Emitted, expected, links, problem_of, resized, written
from numeric_cases import (
    Call,
    PeakBytes,
    Problem,
    check_forward,
    check_refusals,
    check_single,
    load_module,
    peak_bytes,
    record_call,
)
from ranks import Ranks

from mercurygen.emit.callsites import check_text
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.errors import UserError
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Mesh
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.schedule.apply import apply
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.schedule import Schedule, Target

RING = "parallelize S_q over {m}\nshift k, v: S_kv along {m}"
GATHER = "parallelize S_q over {m}\nshard k, v: S_kv over {m}"
HEADS = "parallelize H over {m}"
QUERIES = "parallelize G over {m}\nshard k, v: S_kv over {m}"
BATCH = "parallelize B over {m}"
TOKENRING = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m direct"
SPLIT_KV = "parallelize S_kv over m\nshard q: S_q over m\nshard out, lse: S_q over m"
MQA, GQA, WIDE = (8, 1), (8, 4), (24, 8)


class Case(NamedTuple):
    """A schedule, and what it is run on."""

    mesh: str
    body: str
    heads: tuple[int, int] = GQA  # of queries, of keys and values
    batch: int = 2
    causal: bool = True
    order: str = "zigzag"

    @property
    def problem(self) -> Problem:
        """No two sizes alike, head sizes that are padded."""
        ranks = prod(int(word.partition("=")[2]) for word in self.mesh.split())
        return Problem(
            seq=16 * ranks,
            heads=self.heads[0],
            kv_heads=self.heads[1],
            head_dim=12,
            value_dim=20,
            batch=self.batch,
            causal=self.causal,
            order=self.order if self.causal else "contiguous",
        )

    def emitted(self) -> Emitted:
        """Its module."""
        return written(self.mesh, self.body, self.problem)


def lines(*texts: str) -> str:
    """A schedule's lines."""
    return "\n".join(texts)


def over(text: str, dim: str) -> str:
    """Directives along a dimension."""
    return text.replace("{m}", dim)


CASES = {
    # --- a gather of the next heads under this one's compute
    "gather-heads": Case("gpu=4", lines(over(GATHER, "gpu"), "tile H by 2")),
    "gather-heads-full": Case("gpu=2", lines(over(GATHER, "gpu"), "tile H by 4"), causal=False),
    "gather-queries": Case("gpu=2", lines(over(GATHER, "gpu"), "tile G by 2"), batch=1),
    "gather-queries-mqa": Case("gpu=2", lines(over(GATHER, "gpu"), "tile G by 4"), heads=MQA),
    "gather-both": Case("gpu=2", lines(over(GATHER, "gpu"), "tile H by 2", "tile G by 2")),
    "gather-batch": Case("gpu=2", lines(over(GATHER, "gpu"), "tile B by 2"), batch=4),
    "gather-twice": Case(
        "node=2 gpu=2",
        "parallelize S_q over node, gpu\nshard k, v: S_kv over gpu, node\ntile H by 2",
        order="contiguous",
    ),
    # --- head-chunked Ulysses
    "ulysses": Case("gpu=2", lines(over(HEADS, "gpu"), "tile H by 2")),
    "ulysses-4": Case("gpu=2", lines(over(HEADS, "gpu"), "tile H by 4"), heads=WIDE, batch=1),
    "ulysses-contiguous": Case(
        "gpu=4", lines(over(HEADS, "gpu"), "tile H by 2"), heads=WIDE, order="contiguous"
    ),
    "ulysses-full": Case("gpu=4", lines(over(HEADS, "gpu"), "tile H by 2"), (8, 8), causal=False),
    "ulysses-queries": Case("gpu=2", lines(over(HEADS, "gpu"), "tile G by 3"), heads=WIDE),
    "ulysses-joined": Case(
        "gpu=2", lines(over(HEADS, "gpu"), "join H, G", "tile H_G by 12"), heads=WIDE
    ),
    "ulysses-reordered": Case(
        "gpu=2",
        lines(over(HEADS, "gpu"), "tile H by 2", "tile G by 2", "reorder G, H"),
        heads=(16, 4),
        batch=1,
    ),
    "ulysses-batch": Case("gpu=2", lines(over(HEADS, "gpu"), "tile B by 2")),
    "ulysses-twice-queries": Case("node=2 gpu=2", lines(over(HEADS, "node, gpu"), "tile G by 2")),
    # --- parts of the rows, and of the columns
    "rows": Case("gpu=2", lines(over(GATHER, "gpu"), "tile S_q by 2")),
    "rows-4": Case("gpu=2", lines(over(GATHER, "gpu"), "tile S_q by 4"), order="contiguous"),
    "rows-full": Case("gpu=2", lines(over(GATHER, "gpu"), "tile S_q by 2"), causal=False),
    "heads-and-rows": Case("gpu=2", lines(over(GATHER, "gpu"), "tile H by 2", "tile S_q by 2")),
    # --- rings in a tile loop, and with heads
    "ring": Case("gpu=4", lines(over(RING, "gpu"), "tile H by 2")),
    "ring-full": Case("gpu=2", lines(over(RING, "gpu"), "tile H by 4"), causal=False, batch=1),
    "ring-batch": Case("gpu=2", lines(over(RING, "gpu"), "tile B by 2"), order="contiguous"),
    "double-ring": Case(
        "node=2 gpu=2",
        "parallelize S_q over node, gpu\nshift k, v: S_kv along node, gpu\ntile H by 2",
    ),
    "ring-of-gathers": Case(
        "node=2 gpu=2",
        "parallelize S_q over node, gpu\nshift k, v: S_kv along node\nshard k, v: S_kv over gpu\n"
        "tile H by 2",
    ),
    "gather-of-rings": Case(
        "node=2 gpu=2",
        "parallelize S_q over node, gpu\nshard k, v: S_kv over gpu\nshift k, v: S_kv along node\n"
        "tile H by 2",
    ),
    "unified": Case(
        "node=2 gpu=2", lines(over(RING, "node"), over(HEADS, "gpu"), "tile H by 2"), batch=1
    ),
    "unified-gather": Case(
        "node=2 gpu=2", lines(over(GATHER, "node"), over(HEADS, "gpu"), "tile H by 2")
    ),
    # --- splits of the queries of a key/value head
    "queries": Case("gpu=2", over(QUERIES, "gpu")),
    "queries-4": Case("gpu=4", over(QUERIES, "gpu"), heads=MQA, batch=1),
    "queries-contiguous": Case("gpu=2", over(QUERIES, "gpu"), heads=(12, 6), order="contiguous"),
    "queries-full": Case("gpu=2", over(QUERIES, "gpu"), causal=False),
    "queries-ring": Case("gpu=2", "parallelize G over gpu\nshift k, v: S_kv along gpu"),
    "queries-ring-full": Case(
        "gpu=4", "parallelize G over gpu\nshift k, v: S_kv along gpu", heads=(8, 2), causal=False
    ),
    "heads-queries": Case("node=2 gpu=2", lines(over(HEADS, "node"), over(QUERIES, "gpu"))),
    "queries-heads": Case("node=2 gpu=2", lines(over(QUERIES, "node"), over(HEADS, "gpu"))),
    "queries-heads-full": Case(
        "node=2 gpu=2", lines(over(QUERIES, "node"), over(HEADS, "gpu")), causal=False
    ),
    "queries-and-ring": Case(
        "node=2 gpu=2",
        "parallelize S_q over node\nparallelize G over gpu\nshift k, v: S_kv along node\n"
        "shard k, v: S_kv over gpu",
    ),
    "queries-in-double-ring": Case(
        "node=2 gpu=2",
        "parallelize S_q over node\nparallelize G over gpu\nshift k, v: S_kv along node, gpu",
        order="contiguous",
    ),
    "queries-tiled": Case("gpu=2", lines(over(QUERIES, "gpu"), "tile H by 2")),
    "queries-tiled-queries": Case(
        "gpu=2", lines(over(QUERIES, "gpu"), "tile G by 2"), heads=(16, 4)
    ),
    "heads-queries-tiled": Case(
        "node=2 gpu=2", lines(over(HEADS, "node"), over(QUERIES, "gpu"), "tile H by 2")
    ),
    # --- splits of the batch
    "batch": Case("gpu=2", over(BATCH, "gpu")),
    "batch-4": Case("gpu=4", over(BATCH, "gpu"), batch=4, causal=False),
    "batch-contiguous": Case("gpu=2", over(BATCH, "gpu"), order="contiguous"),
    "batch-heads": Case("node=2 gpu=2", lines(over(BATCH, "node"), over(HEADS, "gpu"))),
    "heads-batch": Case("node=2 gpu=2", lines(over(HEADS, "node"), over(BATCH, "gpu"))),
    "batch-ring": Case("node=2 gpu=2", lines(over(BATCH, "node"), over(RING, "gpu"))),
    "ring-batch-inside": Case("node=2 gpu=2", lines(over(RING, "node"), over(BATCH, "gpu"))),
    "batch-queries": Case("node=2 gpu=2", lines(over(BATCH, "node"), over(QUERIES, "gpu"))),
    "batch-tiled": Case("gpu=2", lines(over(BATCH, "gpu"), "tile B by 2"), batch=4),
    "batch-tiled-heads": Case("gpu=2", lines(over(BATCH, "gpu"), "tile H by 4")),
    "batch-tokenring": Case("a=2 m=2", lines(over(BATCH, "a"), TOKENRING)),
    "queries-split-kv": Case("m=2 a=2", lines(SPLIT_KV, over(QUERIES, "a")), causal=False, batch=1),
    # --- tokens dealt one by one
    "striped-ulysses": Case("gpu=2", lines(over(HEADS, "gpu"), "tile H by 2"), order="striped"),
    "striped-queries": Case(
        "node=2 gpu=2", lines(over(HEADS, "node"), over(QUERIES, "gpu")), order="striped"
    ),
    "striped-batch": Case("gpu=2", over(BATCH, "gpu"), order="striped"),
    "striped-batch-tiled": Case("gpu=2", lines(over(BATCH, "gpu"), "tile H by 4"), order="striped"),
    "striped-ring": Case("gpu=4", lines(over(RING, "gpu"), "tile H by 2"), order="striped"),
    # --- other rings in a tile loop
    "both": Case("gpu=4", lines(f"{over(RING, 'gpu')} both", "tile H by 2")),
    "direct": Case("gpu=4", lines(f"{over(RING, 'gpu')} direct prefetch 2", "tile H by 2")),
    "direct-of-heads": Case(
        "node=2 gpu=2",
        lines(over(HEADS, "node"), f"{over(RING, 'gpu')} direct reverse", "tile H by 2"),
    ),
    "everything": Case(
        "a=2 b=2 c=2", lines(over(BATCH, "a"), over(HEADS, "b"), over(QUERIES, "c"))
    ),
}
RANKS = {world: Ranks(world) for world in (2, 4, 8)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
EMITTED = {name: case.emitted() for name, case in CASES.items()}
# Head sizes that the kernel takes and that are padded, of both itemsizes.
SIZES = (("bfloat16", 24, 40), ("float32", 12, 20), ("float64", 24, 24))
MEMORY = {
    f"{name}-{dtype}": (name, dtype, sizes, number % 2 == 0)
    for number, (name, (dtype, *sizes)) in enumerate(
        zip(EMITTED, itertools.cycle(SIZES), strict=False)
    )
}


def check_all(rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype) -> None:
    """out and lse in two dtypes, with as many heads as the schedule was made for, and twice."""
    for each in (torch.float64, dtype):
        check_forward(rank, world, text, problem, each)
    more = replace(problem, heads=2 * problem.heads, kv_heads=2 * problem.kv_heads, seed=3)
    check_forward(rank, world, text, more, torch.float64)
    check_forward(rank, world, text, replace(problem, batch=4, head_dim=16), torch.float64)


for (_name, _emitted), _dtype in zip(EMITTED.items(), itertools.cycle(DTYPES[1:])):
    _ranks = RANKS[_emitted.world]
    _ranks.add(_name, check_all, _emitted.late, CASES[_name].problem, _dtype)
    for _lse in (False, True):
        _problem = CASES[_name].problem
        _ranks.add(
            f"calls-{_name}-{_lse}", record_call, _emitted.late, _problem, torch.bfloat16, _lse
        )
for _case, (_name, _dtype, (_head, _value), _lse) in MEMORY.items():
    _problem = replace(CASES[_name].problem, head_dim=_head, value_dim=_value)
    _emitted = EMITTED[_name]
    _ranks = RANKS[_emitted.world]
    _ranks.add(_case, peak_bytes, _emitted.late, _problem, getattr(torch, _dtype), _lse)


for _name in ("ulysses", "queries", "batch", "rows"):
    _problem = replace(CASES[_name].problem, batch=4)
    RANKS[2].add(f"refusals-{_name}", check_refusals, EMITTED[_name].late, _problem)


def result(name: str, case: str) -> list:
    """A case's results on every rank; a failure shows the schedule."""
    try:
        return RANKS[EMITTED[name].world].result(case)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{EMITTED[name].shown}") from None


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    """Every rank's out and lse against float64."""
    result(name, name)


@pytest.mark.parametrize("case", MEMORY)
def test_memory(case: str) -> None:
    """Every rank's peak, to the byte."""
    name, dtype, (head, value), lse = MEMORY[case]
    problem = replace(CASES[name].problem, head_dim=head, value_dim=value)
    plan = resized(EMITTED[name], problem, dtype).plan
    want = [trace(plan, rank, with_lse=lse).peak() for rank in range(EMITTED[name].world)]
    assert result(name, case) == want, EMITTED[name].shown


@pytest.mark.parametrize("lse", (False, True))
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, lse: bool) -> None:
    """Kind, group, peers, bytes and order of what every rank sends."""
    emitted = EMITTED[name]
    for rank, calls in enumerate(result(name, f"calls-{name}-{lse}")):
        want: list[Call] = expected(emitted.plan, trace(emitted.plan, rank, with_lse=lse))
        assert calls == want, f"rank {rank}\n{emitted.shown}"


ONE_RANK = {
    "heads": ("tile H by 2", True),
    "columns": ("tile S_kv by 4", True),
    "columns-full": ("tile S_kv by 2", False),
    "rows-columns": ("tile S_q by 2\ntile S_kv by 4", True),
    "columns-rows": ("tile S_kv by 3\ntile S_q by 2\nreorder S_q, S_kv", True),
    "batch-queries-rows": ("tile B by 2\ntile G by 2\ntile S_q by 2", True),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(name: str) -> None:
    """Tile loops without any transfer: numbers, memory, text."""
    body, causal = ONE_RANK[name]
    problem = Problem(seq=24, head_dim=12, value_dim=20, causal=causal, order="contiguous")
    emitted = alone(body, problem)
    assert check_text(emitted.text, emitted.plan).events > 3
    for dtype in DTYPES:
        check_single(emitted.text, problem, dtype)
    for dtype, sizes in (("bfloat16", (12, 20)), ("float32", (24, 40))):
        run = replace(problem, head_dim=sizes[0], value_dim=sizes[1])
        want = trace(resized(emitted, run, dtype).plan, 0, with_lse=True).peak()
        inputs = run.inputs(getattr(torch, dtype))
        with PeakBytes(*inputs) as memory:
            load_module(emitted.text).attention(*inputs, return_lse=True)
        assert memory.peak == want, (dtype, emitted.shown)


def alone(body: str, problem: Problem) -> Emitted:
    """A schedule for one rank."""
    ours = problem_of(problem)
    target = Target("test", "sha256:0123456789abcdef", links(1))
    directives = tuple(
        parse_directive(Line("test", number, text)) for number, text in enumerate(body.splitlines())
    )
    schedule = Schedule("attention", ours, target, (1,), 1, Mesh(()), directives)
    plan = lower(apply(ATTENTION, schedule))
    assert isinstance(plan, Plan), plan
    return Emitted(schedule, plan)


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    """The text communicates as the plan does."""
    emitted = EMITTED[name]
    assert check_text(emitted.text, emitted.plan).events > 10


MUTATIONS = {  # (of which case, what is replaced, by what): each communicates or copies otherwise
    "another part": ("ulysses", "dim=2)[h::2]), group)", "dim=2)[h - 1 :: 2]), group)"),
    "one part for all": ("ring", "into.chunk(2, dim=2)[h]", "into.chunk(2, dim=2)[0]"),
    "the same part again": ("ulysses", "gpu, h)\n        try", "gpu, 0)\n        try"),
    "no wait": ("ulysses", "    _wait([work for _, work in flights])\n", ""),
    "another part is gathered": (
        "gather-heads",
        "chunk(2, dim=2)[h].clone",
        "chunk(2, dim=2)[0].clone",
    ),
    "other query heads": ("ulysses-queries", "chunk(3, dim=3)[g]", "chunk(3, dim=3)[0]"),
    "q for k": ("gather-heads", "for x in (k, v)", "for x in (v, k)"),
    "rows of another part": ("rows", "q.chunk(2, dim=1)[i]", "q.chunk(2, dim=1)[i - 1]"),
    "not dense": ("ring", "[h].clone(memory_format=torch.contiguous_format)", "[h]"),
    "wrong group": ("unified", "_start_heads(x, gpu, h)", "_start_heads(x, node, h)"),
    "started later": ("gather-heads", "            yield tiles\n", "            pass\n"),
    "lost result": ("ring", "into.chunk(2, dim=2)[h].copy_(x)", "into.chunk(2, dim=2)[h]"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_of_the_text(mutation: str) -> None:
    """A module that does something else is told apart from its plan."""
    name, old, new = MUTATIONS[mutation]
    text = EMITTED[name].text
    assert old in text, text
    with pytest.raises(TextMismatch):
        check_text(text.replace(old, new), EMITTED[name].plan)


def test_sizes_are_said_and_checked() -> None:
    """What the sizes must be multiples of stands in the docstring and in `_check`."""
    text = EMITTED["everything"].text
    assert "B of 2, K of 2, H of 2 K" in " ".join(text.split())
    assert "B must be a multiple of 2" in text and "and H of 2 K" in text
    tiled = EMITTED["ulysses-4"].text
    assert "K of 8, H of K" in " ".join(tiled.split())
    assert "S must be a multiple of 4" in EMITTED["rows"].text


REFUSED = {
    "heads of two reshards": (
        "tile-of-moved",
        "node=2 gpu=2",
        lines(over(HEADS, "node, gpu"), "tile H by 2"),
    ),
    "parts of thirds": ("tile-parts", "gpu=2", lines(over(HEADS, "gpu"), "tile H by 3")),
    "shifts again": ("tile-repeats-shift", "gpu=2", lines(over(RING, "gpu"), "tile G by 2")),
    "keys that move": ("tile-of-moved", "gpu=2", lines(over(HEADS, "gpu"), "tile S_kv by 2")),
    "batch of thirds": ("not-divisible", "gpu=3", over(BATCH, "gpu")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Schedules that cannot be, before anything is written."""
    slug, mesh, body = REFUSED[case]
    with pytest.raises(UserError) as caught:
        written(mesh, body, Problem(seq=48, heads=24, kv_heads=8, batch=2))
    assert caught.value.slug == slug and caught.value.help


@pytest.mark.parametrize("name", ["ulysses", "queries", "batch", "rows"])
def test_bad_inputs(name: str) -> None:
    """Refused on all ranks before any message."""
    result(name, f"refusals-{name}")


@pytest.mark.parametrize("name", CASES)
def test_style(name: str) -> None:
    """Functions under 60 lines, lines of at most 100, nothing that is not used."""
    tree = ast.parse(EMITTED[name].text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
            assert ast.get_docstring(node), node.name
            assert node.name in used or not node.name.startswith("_"), node.name
    assert max(map(len, EMITTED[name].text.splitlines())) <= 100
