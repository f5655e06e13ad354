"""The one printer of expressions: its text parses as what was printed, and Python agrees.

An expression has three meanings that must be one: its structure, evaluated by the interpreter; its
text, parsed by the operator language; and its text, run by Python with torch, as it stands in a
user's file and in an emitted module.
"""

from __future__ import annotations

import math
import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercurygen.dsl.functions import FUNCTIONS
from mercurygen.dsl.interpret import Evaluator
from mercurygen.dsl.parse import parse_expression
from mercurygen.errors import UserError
from mercurygen.ir import expr as ir

NAMES = st.sampled_from(["a", "b", "x_1", "inf", "G"])
MARKS = st.sampled_from(ir.MARKS).map(ir.Mark)
LEAVES = NAMES.map(ir.Name) | st.builds(
    ir.Number,
    st.integers(0, 10**20) | st.floats(0, allow_nan=False, allow_infinity=False),
)
REPRODUCIBLE = settings(derandomize=True, deadline=None, database=None)


def deeper(inner):
    """Every kind of node, whether or not it has a value."""
    some = st.lists(inner, max_size=3).map(tuple)
    words = st.dictionaries(st.sampled_from(["dim", "other"]), inner, max_size=2)
    return (
        st.builds(ir.Unary, st.sampled_from(ir.UNARY), inner)
        | st.builds(ir.Binary, st.sampled_from(list(ir.PRECEDENCE)), inner, inner)
        | st.builds(ir.Call, NAMES, some, words.map(lambda d: tuple(d.items())))
        | st.builds(ir.Index, inner, st.lists(inner | MARKS, min_size=1, max_size=3).map(tuple))
        | st.builds(ir.Transpose, inner)
    )


@settings(REPRODUCIBLE, max_examples=600)
@given(st.recursive(LEAVES, deeper, max_leaves=20))
def test_an_expression_prints_as_what_it_is(expr):
    text = ir.print_expr(expr)
    assert parse_expression(text) == expr
    assert ir.print_expr(parse_expression(text)) == text


@settings(REPRODUCIBLE, max_examples=300)
@given(st.recursive(LEAVES, deeper, max_leaves=12))
def test_no_pair_of_parentheses_can_be_left_out(expr):
    """Except where the language wants them: of a call, and around a number before `[` or `.T`."""
    text = ir.print_expr(expr)
    stack = []
    for place, letter in enumerate(text):
        if letter == "(":
            stack.append(place)
        elif letter == ")":
            start = stack.pop()
            inside, after = text[start + 1 : place], text[place + 1 :]
            called = start and (text[start - 1].isalnum() or text[start - 1] == "_")
            if called or re.fullmatch(r"[\d.e+-]+", inside) and after.startswith(("[", ".")):
                continue
            without = f"{text[:start]} {inside} {after}"
            try:
                assert parse_expression(without.strip()) != expr, without
            except UserError:
                pass


# --- values: trees of matrices, vectors, truth values and integers ---------------------------

CHANCE = torch.Generator().manual_seed(0)
VALUES = {
    **{name: torch.randn(3, 3, dtype=torch.float64, generator=CHANCE) for name in ("a", "b", "c")},
    **{name: torch.randn(3, dtype=torch.float64, generator=CHANCE) for name in ("u", "v")},
    **{name: torch.rand(3, 3, generator=CHANCE) < 0.5 for name in ("p", "q")},
    **{name: torch.randint(-4, 5, (3, 3), generator=CHANCE) for name in ("i", "j")},
    **{"m": 3, "n": -2, "inf": math.inf},
}
WHOLE = ir.Mark(":")


def name(text):
    """One of these names."""
    return st.sampled_from(text.split()).map(ir.Name)


def binary(ops, left, right=None):
    """One of these operations."""
    return st.builds(
        ir.Binary, st.sampled_from(ops.split()), left, left if right is None else right
    )


def call(function, *args, **keywords):
    """A call, with integers by name."""
    words = tuple((word, number(value)) for word, value in keywords.items())
    return st.tuples(*args).map(lambda given: ir.Call(function, given, words))


def number(value):
    """A literal as the parser gives it."""
    return ir.Unary("-", ir.Number(-value)) if value < 0 else ir.Number(value)


def index(base, *items):
    """A subscript."""
    return base.map(lambda x: ir.Index(x, items))


def negated(ops, inner):
    """A prefix."""
    return st.builds(ir.Unary, st.sampled_from(ops.split()), inner)


@cache
def numbers(depth):
    """Python's integers and floats."""
    leaves = st.integers(0, 5).map(ir.Number) | st.sampled_from([0.5, 1e-07, 2.0]).map(ir.Number)
    if not depth:
        return leaves | name("m n")
    inner = numbers(depth - 1)
    return inner | binary("+ - * / // % ** & | ^ < == !=", inner) | negated("- ~", inner)


@cache
def integers(depth):
    """Matrices of integers."""
    if not depth:
        return name("i j")
    inner = integers(depth - 1)
    return (
        inner
        | binary("+ - * // % & | ^", inner)
        | binary("+ - * ** & | ^", inner, numbers(0))
        | binary("+ - * // %", numbers(0), inner)
        | negated("- ~", inner)
        | inner.map(ir.Transpose)
    )


@cache
def truths(depth):
    """Matrices of truth values."""
    if not depth:
        return name("p q")
    inner, reals = truths(depth - 1), matrices(depth - 1)
    return (
        inner
        | binary("& | ^ == !=", inner)
        | negated("~", inner)
        | binary("< <= > >= == !=", reals)
        | binary("< <= > >= == !=", integers(depth - 1))
        | inner.map(ir.Transpose)
    )


@cache
def vectors(depth):
    """Vectors of floats, and what picks and reduces them from matrices."""
    if not depth:
        return name("u v")
    inner, reals = vectors(depth - 1), matrices(depth - 1)
    return (
        inner
        | binary("+ - * / **", inner)
        | binary("@", reals, inner)
        | negated("-", inner)
        | call("sum", reals, dim=-1)
        | call("amax", reals, dim=0)
        | index(reals, ir.Number(1))
        | index(reals, ir.Mark("..."), number(-1))
        | index(index(inner, WHOLE, ir.Mark("None")), WHOLE, ir.Number(0))
    )


@cache
def matrices(depth):
    """Matrices of floats."""
    if not depth:
        return name("a b c")
    inner, lines = matrices(depth - 1), vectors(depth - 1)
    return (
        inner
        | binary("+ - * / // % @ **", inner)
        | binary("+ - * / ** @", inner, numbers(1))
        | binary("+ - * / **", numbers(1), inner)
        | negated("-", inner)
        | inner.map(ir.Transpose)
        | call("where", truths(depth - 1), inner, st.just(ir.Name("inf")) | inner)
        | st.sampled_from(["exp", "abs", "tanh"]).flatmap(lambda f: call(f, inner))
        | call("maximum", inner, inner)
        | binary("* - +", index(lines, WHOLE, ir.Mark("None")), lines)
        | index(inner, ir.Mark("None"), WHOLE).map(lambda x: ir.Index(x, (ir.Number(0),)))
    )


def same(x, y):
    """Equal bit for bit, dtype and shape too; nan is nan."""
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        alike = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        alike = alike and x.dtype == y.dtype and x.shape == y.shape
        return alike and torch.equal(x.nan_to_num(7.25), y.nan_to_num(7.25))
    return type(x) is type(y) and (x == y or (x != x and y != y))


def check_value(expr):
    """The interpreter's value of the structure is Python's of the text; so are refusals."""
    text = ir.print_expr(expr)
    assert parse_expression(text) == expr
    try:
        value = Evaluator(None, dict(VALUES)).value(expr)
    except UserError as error:
        if error.message != "the power is too large":  # the only thing that Python would do
            with pytest.raises((RuntimeError, TypeError, ValueError, ArithmeticError, IndexError)):
                eval(text, {**FUNCTIONS, **VALUES})
        return False
    assert same(eval(text, {**FUNCTIONS, **VALUES}), value), text
    return True


def test_a_tensors_text_has_its_value():
    """And most of the trees have one."""
    seen = {True: 0, False: 0}

    @settings(REPRODUCIBLE, max_examples=500)
    @given(st.integers(1, 3).flatmap(lambda d: matrices(d) | vectors(d) | truths(d) | integers(d)))
    def check(expr):
        seen[check_value(expr)] += 1

    check()
    assert seen[True] > 5 * seen[False], seen


@settings(REPRODUCIBLE, max_examples=500)
@given(numbers(4))
def test_a_numbers_text_has_its_value(expr):
    check_value(expr)


CORNERS = {
    "-a ** b": ir.Unary("-", ir.Binary("**", ir.Name("a"), ir.Name("b"))),
    "(-a) ** b": ir.Binary("**", ir.Unary("-", ir.Name("a")), ir.Name("b")),
    "a ** -b": ir.Binary("**", ir.Name("a"), ir.Unary("-", ir.Name("b"))),
    "a ** -b ** c": ir.Binary(
        "**", ir.Name("a"), ir.Unary("-", ir.Binary("**", ir.Name("b"), ir.Name("c")))
    ),
    "a ** (-b) ** c": ir.Binary(
        "**", ir.Name("a"), ir.Binary("**", ir.Unary("-", ir.Name("b")), ir.Name("c"))
    ),
    "(a ** b) ** c": ir.Binary("**", ir.Binary("**", ir.Name("a"), ir.Name("b")), ir.Name("c")),
    "a - (b - c)": ir.Binary("-", ir.Name("a"), ir.Binary("-", ir.Name("b"), ir.Name("c"))),
    "a - b - c": ir.Binary("-", ir.Binary("-", ir.Name("a"), ir.Name("b")), ir.Name("c")),
    "a - -b": ir.Binary("-", ir.Name("a"), ir.Unary("-", ir.Name("b"))),
    "a + (b + c)": ir.Binary("+", ir.Name("a"), ir.Binary("+", ir.Name("b"), ir.Name("c"))),
    "a @ b @ c": ir.Binary("@", ir.Binary("@", ir.Name("a"), ir.Name("b")), ir.Name("c")),
    "a @ (b @ c)": ir.Binary("@", ir.Name("a"), ir.Binary("@", ir.Name("b"), ir.Name("c"))),
    "a * (b @ c)": ir.Binary("*", ir.Name("a"), ir.Binary("@", ir.Name("b"), ir.Name("c"))),
    "a * (i % j)": ir.Binary("*", ir.Name("a"), ir.Binary("%", ir.Name("i"), ir.Name("j"))),
    "a / (b / c)": ir.Binary("/", ir.Name("a"), ir.Binary("/", ir.Name("b"), ir.Name("c"))),
    "~p & q": ir.Binary("&", ir.Unary("~", ir.Name("p")), ir.Name("q")),
    "~(p & q)": ir.Unary("~", ir.Binary("&", ir.Name("p"), ir.Name("q"))),
    "--a": ir.Unary("-", ir.Unary("-", ir.Name("a"))),
    "-a.T": ir.Unary("-", ir.Transpose(ir.Name("a"))),
    "(-a).T": ir.Transpose(ir.Unary("-", ir.Name("a"))),
    "a ** b.T": ir.Binary("**", ir.Name("a"), ir.Transpose(ir.Name("b"))),
    "(a ** b).T": ir.Transpose(ir.Binary("**", ir.Name("a"), ir.Name("b"))),
    "a.T.T @ b[None, :][0].T": ir.Binary(
        "@",
        ir.Transpose(ir.Transpose(ir.Name("a"))),
        ir.Transpose(ir.Index(ir.Index(ir.Name("b"), (ir.Mark("None"), WHOLE)), (ir.Number(0),))),
    ),
    "a[i[0, 0] % 3]": ir.Index(
        ir.Name("a"),
        (ir.Binary("%", ir.Index(ir.Name("i"), (ir.Number(0), ir.Number(0))), ir.Number(3)),),
    ),
    "where(a < b, a, -inf)": ir.Call(
        "where",
        (
            ir.Binary("<", ir.Name("a"), ir.Name("b")),
            ir.Name("a"),
            ir.Unary("-", ir.Name("inf")),
        ),
    ),
    "(a < b) == p": ir.Binary("==", ir.Binary("<", ir.Name("a"), ir.Name("b")), ir.Name("p")),
    "p == (a < b)": ir.Binary("==", ir.Name("p"), ir.Binary("<", ir.Name("a"), ir.Name("b"))),
    "p & q == p": ir.Binary("==", ir.Binary("&", ir.Name("p"), ir.Name("q")), ir.Name("p")),
    "p & (a < b)": ir.Binary("&", ir.Name("p"), ir.Binary("<", ir.Name("a"), ir.Name("b"))),
    "p | q ^ p & q": ir.Binary(
        "|",
        ir.Name("p"),
        ir.Binary("^", ir.Name("q"), ir.Binary("&", ir.Name("p"), ir.Name("q"))),
    ),
    "((p | q) ^ p) & q": ir.Binary(
        "&",
        ir.Binary("^", ir.Binary("|", ir.Name("p"), ir.Name("q")), ir.Name("p")),
        ir.Name("q"),
    ),
    "sum((a + b)[None], dim=-1)": ir.Call(
        "sum",
        (ir.Index(ir.Binary("+", ir.Name("a"), ir.Name("b")), (ir.Mark("None"),)),),
        (("dim", ir.Unary("-", ir.Number(1))),),
    ),
    "m - (n - 5) // -3 % 7": ir.Binary(
        "-",
        ir.Name("m"),
        ir.Binary(
            "%",
            ir.Binary(
                "//",
                ir.Binary("-", ir.Name("n"), ir.Number(5)),
                ir.Unary("-", ir.Number(3)),
            ),
            ir.Number(7),
        ),
    ),
}


@pytest.mark.parametrize("text", CORNERS)
def test_corners(text):
    assert ir.print_expr(CORNERS[text]) == text
    assert check_value(CORNERS[text])


@pytest.mark.parametrize(
    "text",
    [
        "x[5 * (i % 2)]",
        "5 * i % 2",
        "a - (b - c) - d",
        "(a ** b) ** c ** -d ** e",
        "-a ** 2 + (-a) ** 2",
        "~(a < b) & (c == d) | e",
        "(1).T @ (a @ b).T[:, None] @ f(x, dim=-1)",
        "(a < b) < c",
    ],
)
def test_parentheses_are_the_fewest(text):
    assert ir.print_expr(parse_expression(text)) == text
