"""The text of schedules: every directive, and the header of any operator, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import OPERATORS, mesh_of

from mercurygen.errors import UserError
from mercurygen.ir.layout import ORDERS
from mercurygen.ir.lexer import Line
from mercurygen.ir.options import WALK_OPTIONS
from mercurygen.ir.problem import DTYPES, LARGEST, Problem, Sizes
from mercurygen.schedule.apply import start
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.directives import (
    Along,
    Directive,
    Join,
    OrderTokens,
    Parallelize,
    Patch,
    Pin,
    Reorder,
    Replicate,
    Reshard,
    Shard,
    Shift,
    Tile,
)
from mercurygen.schedule.text import parse, show

# Names that files may have, words of the directives among them.
WORDS = "q k v out lse dq S S_q S_kv H G m n gpu node _x x1 over along to by direct prefetch pin"
NAMES = st.sampled_from([*WORDS.split(), "shift", "float32", "with_", "window", "causal", "full"])
LISTS = st.lists(NAMES, min_size=1, max_size=4, unique=True).map(tuple)
DTYPE = st.none() | st.sampled_from(list(DTYPES))
NUMBERS = st.integers(0, 10**12)
OPTION = st.sampled_from([word for word in WALK_OPTIONS if word != "prefetch"])
OPTIONS = st.tuples(st.sets(OPTION), st.none() | NUMBERS).map(
    lambda drawn: tuple(
        sorted([*drawn[0], *([] if drawn[1] is None else [f"prefetch {drawn[1]}"])])
    )
)
ALONG = LISTS.flatmap(
    lambda dims: st.tuples(*(st.builds(Along, st.just(dim), OPTIONS) for dim in dims))
)
DIRECTIVES = st.one_of(
    st.builds(OrderTokens, NAMES, st.sampled_from(ORDERS), LISTS | st.just(())),
    st.builds(Pin, LISTS, st.none() | NAMES, LISTS | st.just(())),
    st.builds(Reshard, LISTS, st.none() | NAMES, st.none() | NAMES, NAMES),
    st.builds(Parallelize, NAMES, LISTS),
    st.builds(Shard, LISTS, NAMES, LISTS, DTYPE),
    st.builds(Replicate, LISTS, LISTS, DTYPE),
    st.builds(Shift, LISTS, NAMES, ALONG, DTYPE),
    st.builds(Tile, NAMES, NUMBERS),
    st.builds(Join, LISTS),
    st.builds(Reorder, LISTS),
    st.builds(Patch, NAMES, NAMES),
)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(DIRECTIVES)
def test_every_directive_both_ways(directive: Directive) -> None:
    line = str(directive)
    assert parse_directive(Line("x", 1, line)) == directive, line


@pytest.mark.parametrize(
    ("line", "slug"),
    [
        ("shift k, v: S_kv along m dirct", "syntax"),
        ("shift k, v: S_kv along m direct direct", "named-twice"),
        ("shift k, v: S_kv along m prefetch", "syntax"),
        ("shift k, v: S_kv along m prefetch 1 prefetch 2", "named-twice"),
        ("shift k, v: S_kv along m direct, m", "named-twice"),
        ("shift k, v: S_kv along m as", "syntax"),
        ("shard c: M over m as int8", "syntax"),
        ("shard c: M over m as bfloat16 twice", "syntax"),
        ("tile H by many", "syntax"),
        ("reshard q: S to along m", "syntax"),
        ("slice q: S over m", "unknown-directive"),
    ],
)
def test_directives_refused(line: str, slug: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_directive(Line("x", 7, line))
    assert caught.value.slug == slug, caught.value.render()
    assert caught.value.span is not None and caught.value.span.line == 7


# --- the header ---------------------------------------------------------------------------------

TEXT = """operator {0}
problem {1}
topology t sha256:0123456789abcdef gpu=4 wire 25GB/s
group gpu=4
tp 1
mesh gpu=4
"""
SIZED = "batch=1 seq=64 heads=8 kv_heads=4 head_dim=16 float32"
SIZES_OF = st.builds(
    lambda extents, dtype, mask: Sizes(tuple(extents.items()), dtype, *mask),
    st.dictionaries(NAMES, st.integers(1, LARGEST), max_size=5),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([("full", None), ("causal", None)])
    | st.integers(1, LARGEST).map(lambda width: ("window", width)),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(SIZES_OF)
def test_any_problem_both_ways(problem: Sizes) -> None:
    schedule = parse(TEXT.format("matmul", "M=1 float32")).schedule
    changed = type(schedule)(
        schedule.operator, problem, schedule.target, (4,), 1, schedule.mesh, schedule.directives
    )
    assert parse(show(changed)).schedule == changed, show(changed)


@pytest.mark.parametrize(
    ("operator", "problem", "want"),
    [
        ("matmul", "M=1024 N=512 K=256 float32", Sizes((("M", 1024), ("N", 512), ("K", 256)))),
        (
            "docs/smooth.py::smooth",
            "T=64 S=64 C=3 float32 window=128",
            Sizes((("T", 64), ("S", 64), ("C", 3)), "float32", "window", 128),
        ),
        ("x.py::f", "S=64 bfloat16 causal", Sizes((("S", 64),), "bfloat16", "causal")),
        ("x.py::windowed", "window=2 float64", Sizes((("window", 2),), "float64")),
        (
            "attention_backward",
            "batch=1 seq=64 heads=8 kv_heads=4 head_dim=16 bfloat16 full",
            Problem(1, 64, 8, 4, 16, 16, "bfloat16", "full"),
        ),
        (
            "attention",
            "batch=1 seq=64 heads=8 kv_heads=4 head_dim=16 v_head_dim=8 float32 causal sbhd",
            Problem(1, 64, 8, 4, 16, 8, "float32", "causal", "sbhd"),
        ),
    ],
)
def test_problem_lines(operator: str, problem: str, want: Problem | Sizes) -> None:
    text = TEXT.format(operator, problem)
    source = parse(text)
    assert source.schedule.problem == want
    assert show(source.schedule) == text
    assert parse(text.replace("tp 1", "tp 1 # a comment")).schedule == source.schedule


@pytest.mark.parametrize(
    ("operator", "problem", "slug"),
    [
        ("matmul", "M=1 N=2 K=3", "header-incomplete"),
        ("matmul", "", "header-incomplete"),
        ("matmul", "M=1 M=2 float32", "named-twice"),
        ("matmul", "M=0 float32", "size-out-of-range"),
        ("matmul", "M= float32", "syntax"),
        ("matmul", "M=1 float8", "syntax"),
        ("matmul", "M=1 float32 windw=3", "syntax"),
        ("matmul", "M=1 float32 window", "syntax"),
        ("matmul", "M=1 float32 window=0", "unknown-mask"),
        ("matmul", "M=1 float32 causal full", "syntax"),
        ("matmul", "float32 M=1", "syntax"),
        ("attention", "M=1 N=2 K=3 float32", "unknown-option"),
        ("attention", "batch=1 float32 causal", "header-incomplete"),
        ("attention", "batch=1 float32 causal sbhd bhsd", "named-twice"),
        ("attention", f"{SIZED} causal thd", "unknown-layout"),
        ("attention", f"{SIZED} causal bhsd=1", "syntax"),
        ("matmul", "M=1 float32 bhsd", "syntax"),
    ],
)
def test_problems_refused(operator: str, problem: str, slug: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(TEXT.format(operator, problem))
    assert caught.value.slug == slug, caught.value.render()
    assert caught.value.span is not None and caught.value.span.line == 2


@pytest.mark.parametrize(
    ("operator", "problem", "slug"),
    [
        ("matmul", Sizes((("M", 4), ("N", 4), ("K", 4), ("L", 4))), "unknown-axis"),
        ("matmul", Sizes((("M", 4), ("N", 4))), "operator-not-bound"),
        ("matmul", Sizes((("M", 4), ("N", 4), ("K", 4)), mask="causal"), "operator-without-mask"),
        (
            "nearest",
            Sizes((("N", 4), ("M", 4), ("C", 2)), mask="window", window=2),
            "operator-without-mask",
        ),
    ],
)
def test_what_the_operator_does_not_have(operator: str, problem: Sizes, slug: str) -> None:
    with pytest.raises(UserError) as caught:
        start(OPERATORS[operator], problem, mesh_of("m=2"))
    assert caught.value.slug == slug


def test_tensor_parallel_ranks_share_heads_only() -> None:
    schedule = parse(TEXT.format("matmul", "M=4 N=4 K=4 float32").replace("tp 1", "tp 2")).schedule
    with pytest.raises(UserError) as caught:
        _ = schedule.local_problem
    assert caught.value.slug == "tp-without-heads"
