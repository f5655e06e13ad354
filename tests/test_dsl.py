"""The operator language: it runs as written, it is parsed, and both mean the same."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from mercurygen import operators
from mercurygen.dsl.functions import FUNCTIONS
from mercurygen.dsl.interpret import interpret
from mercurygen.dsl.parse import parse_operator
from mercurygen.errors import UserError
from mercurygen.operators.attention import attention

MATMUL = '''
from mercurygen.dsl import Axis, Input, Output, combine, matmul, operator, sum, tiles

M, N, K = Axis("row", tile=16), Axis("column", tile=16), Axis("inner", tile=16)


@operator
def gemm(a: Input[M, K], b: Input[K, N], c: Output[M, N]):
    """c = a b."""
    combine(c, by=sum)
    for m, n, k in tiles(M, N, K):
        c[m, n] = matmul(a[m, k], b[k, n])
'''

NEAREST = '''
from mercurygen.dsl import (
    Axis, Input, Output, accumulator, amin, argmin, combine, inf, integer, operator, position,
    sum, take, tiles, where,
)

N, M, D = Axis("query"), Axis("candidate"), Axis("coordinate")


def nearer(distance, index, other_distance, other_index):
    """The nearer of two candidates; on a tie the lower index."""
    # strictly
    better = other_distance < distance
    better = better | (other_distance == distance) & (other_index < index)
    return where(better, other_distance, distance), where(better, other_index, index)


@operator
def nearest(
    x: Input[N, D],
    y: Input[M, D],
    distance: Output[N, accumulator],
    index: Output[N, integer],
):
    """Squared distance to the nearest candidate, and which it is."""
    combine(distance, index, by=nearer, identity=(inf, 2**40))
    for i in tiles(N):
        for j in tiles(M):
            # the square of each difference
            d = sum((x[i][:, None] - y[j][None]) ** 2, dim=-1)  # [i, j]

            distance[i] = amin(d, dim=-1)
            index[i] = take(position(j), argmin(d, dim=-1))
            # done
'''.replace("2**40", "1099511627776")

DECAY = '''
from mercurygen.dsl import Axis, Input, Mask, Output, Scalar, combine, exp, operator
from mercurygen.dsl import points, position, sum, tiles, where

B, I, J, D = Axis("batch"), Axis("to"), Axis("from"), Axis("channel")


@operator
def decay(x: Input[B, J, D], like: Input[B, I], y: Output[B, D, I], rate: Scalar, m: Mask[I, J]):
    """y[i] = sum of exp(-rate (i - j)) x[j] over what i sees."""
    combine(y, by=sum)
    for b in points(B):
        for i, j in tiles(I, J):
            lag = position(i)[:, None] - position(j)
            y[b, :, i] = (where(m[i, j], exp(-rate * lag), 0) @ x[b, j]).T + 0 * like[b, i]
'''

BACKWARD = """
from mercurygen.dsl import Axis, Input, Mask, Output, Scalar, accumulator, causal, combine, exp
from mercurygen.dsl import operator, points, sum, tiles, together, where

B, H, G, D, E = Axis("batch"), Axis("head"), Axis("query head"), Axis("of q"), Axis("of v")
S_q, S_kv = Axis("query", tile=8), Axis("key", tile=8)


@operator
def attention_backward(
    q: Input[B, S_q, H * G, D],
    k: Input[B, S_kv, H, D],
    v: Input[B, S_kv, H, E],
    out: Input[B, S_q, H * G, E],
    do: Input[B, S_q, H * G, E],
    lse: Input[B, H * G, S_q, accumulator],
    dq: Output[B, S_q, H * G, D],
    dk: Output[B, S_kv, H, D],
    dv: Output[B, S_kv, H, E],
    scale: Scalar = D**-0.5,
    mask: Mask[S_q, S_kv] = causal,
):
    together(k, v)
    together(dk, dv)
    combine(dq, by=sum)
    combine(dk, dv, by=sum)
    for b, h, g in points(B, H, G):
        for i, j in tiles(S_q, S_kv):
            delta = sum(do[b, i, h * G + g] * out[b, i, h * G + g], dim=-1)
            scores = scale * (q[b, i, h * G + g] @ k[b, j, h].T)
            p = where(mask[i, j], exp(scores - lse[b, h * G + g, i][:, None]), 0)
            ds = p * (do[b, i, h * G + g] @ v[b, j, h].T - delta[:, None])
            dv[b, j, h] = p.T @ do[b, i, h * G + g]
            dq[b, i, h * G + g] = scale * ds @ k[b, j, h]
            dk[b, j, h] = scale * ds.T @ q[b, i, h * G + g]
"""


def as_written(text, name, tmp_path):
    """Import an operator's text as its author would."""
    path = tmp_path / "user_operator.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("user_operator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def reference(q, k, v, causal, scale=None):
    """out [B, S_q, Hq, D_v] and lse [B, Hq, S_q] in float64, one row at a time."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                n = min(i + 1, k.shape[1]) if causal else k.shape[1]
                scores = k[b, :n, h // group] @ q[b, i, h] * (scale or q.shape[3] ** -0.5)
                if n:
                    lse[b, h, i] = scores.logsumexp(0)
                    out[b, i, h] = scores.softmax(0) @ v[b, :n, h // group]
    return out, lse


def qkv(b=2, sq=13, skv=13, heads=4, kv_heads=2, d=8, dv=8, dtype=torch.float64):
    torch.manual_seed(0)
    q = torch.randn(b, sq, heads, d, dtype=dtype)
    k, v = (torch.randn(b, skv, kv_heads, x, dtype=dtype) for x in (d, dv))
    return q, k, v


SHAPES = [
    {"kv_heads": 4},
    {},
    {"kv_heads": 1},
    {"dv": 5},
    {"sq": 7, "skv": 19},
    {"sq": 19, "skv": 7},
    {"sq": 1, "skv": 1, "b": 1},
    {"sq": 5, "skv": 0},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("tile", [(1, 1), (4, 3), (5, 64), (128, 128)])
def test_attention_is_attention_and_interpreted_is_as_written(shape, mask, tile):
    q, k, v = qkv(**shape)
    tiles = dict(zip(("S_q", "S_kv"), tile, strict=True))
    out, lse = attention(q, k, v, mask=mask, tiles=tiles)
    expected = reference(q, k, v, mask == "causal")
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=1e-12)
    got = interpret(operators.load("attention"), {"q": q, "k": k, "v": v}, {}, mask, tiles)
    assert torch.equal(got["out"], out) and torch.equal(got["lse"], lse)


def test_attention_in_lower_precision_and_with_a_scale():
    q, k, v = qkv(dtype=torch.float32)
    out, lse = attention(q, k, v, 0.3, "full")
    assert out.dtype == lse.dtype == torch.float32
    expected = reference(q, k, v, False, 0.3)
    torch.testing.assert_close((out.double(), lse.double()), expected, rtol=0, atol=1e-5)
    half, lse = attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert half.dtype == torch.bfloat16 and lse.dtype == torch.float32


def test_rows_that_see_nothing_are_zero_and_never_nan():
    q, k, v = qkv(sq=6, skv=8)
    positions = {"S_q": torch.tensor([0, 1, 9, 2, 11, 3]), "S_kv": torch.arange(4, 12)}
    op = operators.load("attention")
    for tiles in ({}, {"S_q": 2, "S_kv": 3}):
        got = interpret(op, {"q": q, "k": k, "v": v}, {}, "causal", tiles, positions)
        blind = positions["S_q"] < 4
        assert (got["out"][:, blind] == 0).all() and (got["lse"][..., blind] == -torch.inf).all()
        assert got["lse"][..., ~blind].isfinite().all() and not got["out"].isnan().any()
        whole = attention(q[:, 4:5], k, v, mask="full")[0]
        torch.testing.assert_close(got["out"][:, 4:5], whole, rtol=0, atol=1e-12)


def test_attention_gradients_as_written():
    inputs = [x.requires_grad_() for x in qkv(sq=4, skv=4, b=1, d=3, dv=2)]
    tiles = {"S_q": 2, "S_kv": 2}
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, tiles=tiles)[0], inputs)


def both(text, name, tmp_path, tensors, scalars=None, mask=None, tiles=None):
    """As written and interpreted, which must be equal bit for bit; a tuple."""
    keywords = {**(scalars or {}), **({"m": mask} if mask else {})}
    written = as_written(text, name, tmp_path)(**tensors, **keywords, tiles=tiles)
    written = written if isinstance(written, tuple) else (written,)
    got = interpret(parse_operator(text, "x.py", name), tensors, scalars, mask, tiles)
    for a, b in zip(written, got.values(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    return written


@pytest.mark.parametrize("tiles", [None, {"M": 3, "N": 5, "K": 2}])
def test_matmul(tmp_path, tiles):
    a, b = torch.randn(10, 7).double(), torch.randn(7, 9).double()
    (c,) = both(MATMUL, "gemm", tmp_path, {"a": a, "b": b}, tiles=tiles)
    torch.testing.assert_close(c, a @ b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tiles", [None, {"M": 4, "N": 3}, {"M": 1}])
def test_user_defined_combine(tmp_path, tiles):
    x, y = torch.randn(11, 3).double(), torch.randn(9, 3).double()
    y[7] = y[2]  # a tie
    x[0] = y[2]
    distance, index = both(NEAREST, "nearest", tmp_path, {"x": x, "y": y}, tiles=tiles)
    expected = ((x[:, None] - y[None]) ** 2).sum(-1)
    torch.testing.assert_close(distance, expected.amin(1))
    assert index.tolist() == expected.argmin(1).tolist() and index[0] == 2
    op = parse_operator(NEAREST, "x.py")
    assert op.combine_of("index").merge.parameters[2] == "other_distance"
    assert op.source.startswith("# the square of each difference\nd = sum(")
    assert op.source.endswith("\n# done") and "# [i, j]\n\ndistance[i]" in op.source


@pytest.mark.parametrize("tiles", [None, {"I": 4, "J": 3}])
def test_weighted_sum_over_positions(tmp_path, tiles):
    x, like = torch.randn(2, 10, 3).double(), torch.zeros(2, 10).double()
    (y,) = both(DECAY, "decay", tmp_path, {"x": x, "like": like}, {"rate": 0.3}, "causal", tiles)
    lag = torch.arange(10)[:, None] - torch.arange(10)
    weights = torch.where(lag >= 0, torch.exp(-0.3 * lag.double()), 0)
    torch.testing.assert_close(y, (weights @ x).mT, rtol=0, atol=1e-12)


def test_attention_backward(tmp_path):
    q, k, v = (x.requires_grad_() for x in qkv(sq=12, skv=12, dv=5))
    out, lse = attention(q, k, v)
    do = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), do)
    given = {"q": q, "k": k, "v": v, "out": out, "do": do, "lse": lse}
    tensors = {name: x.detach() for name, x in given.items()}
    got = both(BACKWARD, "attention_backward", tmp_path, tensors)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    op = parse_operator(BACKWARD, "x.py")
    assert op.reduced_axes("dq") == ("S_kv",) and op.reduced_axes("dk") == ("G", "S_q")


def test_the_parsed_attention():
    op = operators.load("attention")
    assert op.tensor("q").dims == (("B",), ("S_q",), ("H", "G"), ("D",))
    assert op.axes_of("k") == ("B", "S_kv", "H", "D") and op.loop_axes[:3] == ("B", "H", "G")
    assert op.reduced_axes("out") == op.reduced_axes("lse") == ("S_kv",)
    assert ("k", "v") in op.together and not any("q" in group for group in op.together)
    assert op.mask.axes == ("S_q", "S_kv") and op.axis("S_q").tile == 128
    text = operators.source_of("attention")[1]
    assert all(line.strip() in text for line in op.source.split("\n"))
    assert op == parse_operator("\n\n" + text.replace("  # [i, j]", ""), "other.py")
    assert hash(op) == hash(operators.load("attention"))


def test_loading_needs_no_torch_and_running_no_libcst():
    code = "import sys; from mercurygen import operators; import mercurygen.dsl.interpret; "
    code += "assert 'libcst' not in sys.modules; operators.load('attention'); "
    code += "assert 'torch' not in sys.modules; import mercurygen.operators.attention; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_function_is_exported_and_torchs_own():
    from mercurygen import dsl

    for name, function in FUNCTIONS.items():
        assert getattr(dsl, name) is function and name in dsl.__all__ and hasattr(torch, name)


def test_load_refuses(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MATMUL)
    assert operators.load(f"{path}::gemm").name == "gemm"
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "big.py").write_bytes(b"#" * 10_000_000)
    for ref, slug in {
        "atention": "unknown-operator",
        "": "unknown-operator",
        f"{path}::gem": "no-such-function",
        f"{path}::": "no-such-function",
        f"{tmp_path}/none.py::gemm": "no-such-file",
        f"{tmp_path}::gemm": "no-such-file",
        "a\0b.py::gemm": "no-such-file",
        "a" * 5000 + ".py::gemm": "no-such-file",
        f"{tmp_path}/latin.py::gemm": "dsl-character",
        f"{tmp_path}/big.py::gemm": "dsl-too-large",
    }.items():
        with pytest.raises(UserError) as error:
            operators.load(ref)
        assert error.value.slug == slug, ref
        error.value.render()
    with pytest.raises(UserError, match="unknown-operator") as error:
        operators.load("atention")
    assert "did you mean `attention`?" in error.value.help
