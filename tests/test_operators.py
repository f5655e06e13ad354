"""The shipped operators against torch, derived tensors, and windows."""

from __future__ import annotations

import pytest
import torch
from reference import attention as reference
from reference import causal, full

from mercurygen import operators
from mercurygen.dsl import window as window_of
from mercurygen.dsl.interpret import derive, interpret
from mercurygen.dsl.parse import parse_operator
from mercurygen.errors import UserError
from mercurygen.ir.operator import Domain
from mercurygen.operators.attention import attention
from mercurygen.operators.attention_backward import attention_backward
from mercurygen.operators.matmul import matmul

MASKS = {"full": full, "causal": causal}
BACKWARD = operators.load("attention_backward")
INPUTS = ("q", "k", "v", "out", "lse", "do")


def window(width):
    """A mask of the reference: a row sees itself and the width - 1 positions before it."""
    return lambda q, k: (k <= q) & (q - k < width)


def test_what_is_shipped():
    assert operators.shipped() == (
        "attention",
        "attention_backward",
        "attention_backward_out",
        "matmul",
    )
    for name in operators.shipped():
        assert operators.load(name).name == name and operators.load(name).doc


@pytest.mark.parametrize("tiles", [{}, {"M": 1, "N": 4, "K": 3}, {"K": 5}, {"M": 7}], ids=str)
@pytest.mark.parametrize("sizes", [(7, 10, 9), (1, 1, 1), (4, 0, 3), (0, 2, 3)], ids=str)
def test_matmul(tiles, sizes):
    torch.manual_seed(0)
    m, k, n = sizes
    a, b = torch.randn(m, k).double(), torch.randn(k, n).double()
    c = matmul(a, b, tiles=tiles)
    torch.testing.assert_close(c, a @ b, rtol=0, atol=1e-12)
    got = interpret(operators.load("matmul"), {"a": a, "b": b}, tiles=tiles)
    assert list(got) == ["c"] and torch.equal(got["c"], c)


def test_matmul_sums_in_float32_and_gives_the_inputs_dtype():
    torch.manual_seed(0)
    a, b = torch.randn(3, 300).bfloat16(), torch.randn(300, 4).bfloat16()
    c = matmul(a, b, tiles={"K": 10})
    assert c.dtype == torch.bfloat16
    torch.testing.assert_close(c, (a.double() @ b.double()).bfloat16())
    op = operators.load("matmul")
    assert op.reduced_axes("c") == ("K",) and op.tensor("c").dtype == "inputs"


def problem(b=2, sq=9, skv=9, kv_heads=2, group=2, d=6, dv=5, dtype=torch.float64):
    """q, k, v and the gradient of out."""
    torch.manual_seed(0)
    heads = kv_heads * group
    shapes = ((b, sq, heads, d), (b, skv, kv_heads, d), (b, skv, kv_heads, dv), (b, sq, heads, dv))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def gradients(q, k, v, do, mask, positions=None, scale=None):
    """The backward operator's inputs and, from torch's autograd in float64, its outputs."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    where = positions or {}
    out, lse = reference(
        *leaves, mask, scale=scale, q_positions=where.get("S_q"), k_positions=where.get("S_kv")
    )
    expected = torch.autograd.grad(out, leaves, do.double())
    given = dict(zip(INPUTS, (q, k, v, out.detach(), lse.detach(), do), strict=True))
    return given, dict(zip(("dq", "dk", "dv"), expected, strict=True))


SHAPES = [
    {},
    {"group": 1},
    {"kv_heads": 1, "group": 4},
    {"sq": 5, "skv": 12},
    {"sq": 12, "skv": 5},
    {"sq": 1, "skv": 1, "b": 1, "d": 1, "dv": 1},
    {"dv": 9},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", Domain("window", 3)], ids=str)
def test_backward_is_autograds_and_interpreted_is_as_written(shape, mask):
    q, k, v, do = problem(**shape)
    see = MASKS[mask] if isinstance(mask, str) else window(mask.width)
    given, expected = gradients(q, k, v, do, see)
    for tiles in ({}, {"S_q": 1, "S_kv": 4}, {"S_q": 5, "S_kv": 2}):
        written = attention_backward(**given, mask=mask, tiles=tiles)
        got = interpret(BACKWARD, given, {}, mask, tiles)
        assert list(got) == list(expected)
        for value, name in zip(written, expected, strict=True):
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
            assert torch.equal(got[name], value)


@pytest.mark.parametrize("mask", ["full", "causal", Domain("window", 4)], ids=str)
def test_backward_at_permuted_positions(mask):
    q, k, v, do = problem(sq=10, skv=13)
    see = MASKS[mask] if isinstance(mask, str) else window(mask.width)
    positions = {"S_q": torch.randperm(20)[:10], "S_kv": torch.randperm(20)[:13]}
    given, expected = gradients(q, k, v, do, see, positions, scale=0.3)
    tiles = {"S_q": 3, "S_kv": 4}
    got = interpret(BACKWARD, given, {"scale": 0.3}, mask, tiles, positions)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_rows_that_see_nothing_have_no_gradient():
    q, k, v, do = problem(sq=6, skv=8)
    positions = {"S_q": torch.tensor([0, 1, 9, 2, 11, 3]), "S_kv": torch.arange(4, 12)}
    given, expected = gradients(q, k, v, do, causal, positions)
    assert given["lse"][..., positions["S_q"] < 4].isinf().all()
    for tiles in ({}, {"S_q": 2, "S_kv": 3}):
        got = interpret(BACKWARD, given, {}, "causal", tiles, positions)
        assert (got["dq"][:, positions["S_q"] < 4] == 0).all()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)  # no NaN in either


def test_backward_in_lower_precision():
    q, k, v, do = problem(dtype=torch.bfloat16)
    given, expected = gradients(q, k, v, do, causal)
    given |= {"out": given["out"].bfloat16(), "lse": given["lse"].float()}
    for name, value in interpret(BACKWARD, given).items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), expected[name], rtol=0.02, atol=0.05)


def test_the_parsed_backward():
    op = BACKWARD
    assert [t.name for t in op.derived] == ["delta"] and op.tensor("delta").role == "derived"
    assert [t.name for t in op.inputs] == list(INPUTS)
    delta = op.derivation("delta")
    assert delta.reads == ("out", "do") and delta.source.startswith("delta[b, h * G + g, i] = sum(")
    assert [loop.axes for loop in delta.loops] == [("B", "H", "G"), ("S_q",)]
    assert op.reduced_axes("dq") == ("S_kv",) and op.reduced_axes("dk") == ("G", "S_q")
    assert op.together == (("k", "v"), ("dk", "dv"))


def test_a_derived_tensor_alone_from_a_part_and_given():
    q, k, v, do = problem(b=2, sq=8)
    given, _ = gradients(q, k, v, do, causal)
    whole = derive(BACKWARD, "delta", given)
    assert whole.shape == (2, 4, 8) and whole.dtype == torch.float64
    torch.testing.assert_close(whole, (do * given["out"]).sum(-1).mT, rtol=0, atol=1e-12)
    parts = {name: given[name][:1, 2:5, 1:2] for name in ("do", "out")}  # no q: heads as one
    assert torch.equal(derive(BACKWARD, "delta", parts), whole[:1, 1:2, 2:5])
    computed = interpret(BACKWARD, given)
    for name, value in interpret(BACKWARD, {**given, "delta": whole}).items():
        assert torch.equal(value, computed[name])
    wrong = interpret(BACKWARD, {**given, "delta": whole + 1})
    assert not torch.allclose(wrong["dq"], computed["dq"])  # it is the given one that is read
    with pytest.raises(UserError, match="dsl-shape"):
        interpret(BACKWARD, {**given, "delta": whole[..., :-1]})
    with pytest.raises(UserError, match="dsl-argument"):
        derive(BACKWARD, "dleta", given)
    with pytest.raises(UserError, match="dsl-argument"):
        derive(BACKWARD, "delta", {"do": do})
    with pytest.raises(TypeError):  # callers never pass it
        attention_backward(**given, delta=whole)


CHAIN = """
from mercurygen.dsl import Axis, Derived, Input, Output, Scalar, amax, combine, integer, operator
from mercurygen.dsl import accumulator, argmax, sum, tiles, where

N, C = Axis("row"), Axis("column")


@operator
def chain(
    x: Input[N, C],
    top: Derived[N],
    first: Derived[N, integer],
    scaled: Derived[N, C, accumulator],
    y: Output[N],
    z: Output[C],
    rate: Scalar = 1 / C,
):
    combine(z, by=sum)
    for i in tiles(N):
        # the same local as below
        t = amax(x[i], dim=-1)
        top[i] = t
    for i in tiles(N):
        first[i] = argmax(x[i], dim=-1)
    for i, c in tiles(N, C):
        scaled[i, c] = rate * x[i, c] / top[i][:, None]
    for r in tiles(N):
        t = scaled[r]
        y[r] = sum(t, dim=-1) + first[r]
        z[:] = sum(where(t > 0, t, 0), dim=0)
"""


def test_several_derived_tensors(tmp_path):
    from test_dsl import as_written

    torch.manual_seed(0)
    x = torch.randn(11, 5).double()
    op = parse_operator(CHAIN, "chain.py")
    assert [d.reads for d in op.derivations] == [("x",), ("x",), ("x", "top")]
    scaled = x / x.amax(1)[:, None] / 5
    expected = scaled.sum(1) + x.argmax(1), scaled.clamp(min=0).sum(0)
    for tiles in ({}, {"N": 3, "C": 2}):
        written = as_written(CHAIN, "chain", tmp_path)(x, tiles=tiles)
        torch.testing.assert_close(written, expected, rtol=0, atol=1e-12)
        got = interpret(op, {"x": x}, tiles=tiles)
        assert all(torch.equal(a, b) for a, b in zip(written, got.values(), strict=True))
    torch.testing.assert_close(derive(op, "scaled", {"x": x}), scaled, rtol=0, atol=1e-12)
    half = derive(op, "scaled", {"x": x, "top": x.new_ones(11)}, {"rate": 0.5})
    torch.testing.assert_close(half, x / 2, rtol=0, atol=1e-12)
    # a derived tensor is stored in its own dtype, whoever computed it
    low = x.bfloat16()
    assert derive(op, "top", {"x": low}).dtype == torch.bfloat16
    assert derive(op, "first", {"x": low}).dtype == torch.int64
    given = {name: derive(op, name, {"x": low}) for name in ("top", "first", "scaled")}
    for name, value in interpret(op, {"x": low, **given}).items():
        assert torch.equal(value, interpret(op, {"x": low})[name])


@pytest.mark.parametrize("width", [1, 2, 5, 9, 100])
def test_a_window_sees_itself_and_what_is_before_it(width):
    q, k, v, _ = problem()
    expected = reference(q, k, v, window(width))
    for tiles in ({}, {"S_q": 2, "S_kv": 3}):
        found = attention(q, k, v, mask=window_of(width), tiles=tiles)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        mask = Domain("window", width)
        got = interpret(operators.load("attention"), {"q": q, "k": k, "v": v}, {}, mask, tiles)
        assert torch.equal(got["out"], found[0]) and torch.equal(got["lse"], found[1])
    if width == 1:
        torch.testing.assert_close(found[0], v.repeat_interleave(2, 2))
    if width == 9:
        torch.testing.assert_close(found, attention(q, k, v, mask="causal"))


def test_a_window_is_on_global_positions():
    q, k, v, _ = problem(sq=7, skv=11)
    positions = {
        "S_q": torch.tensor([25, 3, 0, 7, 19, 12, 8]),  # 0 and 25 see nothing
        "S_kv": torch.tensor([12, 1, 3, 18, 9, 15, 2, 6, 29, 14, 7]),
    }
    where = {"q_positions": positions["S_q"], "k_positions": positions["S_kv"]}
    expected = reference(q, k, v, window(6), **where)
    inputs, op = {"q": q, "k": k, "v": v}, operators.load("attention")
    got = interpret(op, inputs, {}, Domain("window", 6), {"S_q": 3, "S_kv": 4}, positions)
    torch.testing.assert_close((got["out"], got["lse"]), expected, rtol=0, atol=1e-12)
    assert got["lse"][0, 0].isinf().tolist() == [True, False, True] + [False] * 4


def test_a_window_in_a_signature(tmp_path):
    from test_dsl import as_written

    text = operators.source_of("attention")[1].replace("= causal", "= window(3)")
    text = text.replace("    causal,\n", "    window,\n")
    op = parse_operator(text, "windowed.py")
    assert op.mask.default == Domain("window", 3) and str(op.mask.default) == "window(3)"
    q, k, v, _ = problem()
    got = interpret(op, {"q": q, "k": k, "v": v})
    written = as_written(text, "attention", tmp_path)(q, k, v)
    assert torch.equal(written[0], got["out"])
    torch.testing.assert_close(written, reference(q, k, v, window(3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "bad", ["window", "sliding", "", ("window", 0), ("window", 2**41), ("window", True)], ids=str
)
def test_masks_that_are_none(bad):
    q, k, v, _ = problem()
    op = operators.load("attention")
    with pytest.raises(UserError, match="dsl-mask"):
        mask = bad if isinstance(bad, str) else Domain(*bad)
        interpret(op, {"q": q, "k": k, "v": v}, {}, mask)
    with pytest.raises(UserError, match="dsl-mask"):
        mask = bad if isinstance(bad, str) else window_of(bad[1])
        attention(q, k, v, mask=mask)
    with pytest.raises(UserError, match="dsl-mask"):
        Domain("causal", 3)
