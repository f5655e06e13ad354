"""What is not in the operator language is refused in words, and nothing is ever executed."""

from __future__ import annotations

import pytest
import torch

from mercurygen.dsl.interpret import interpret
from mercurygen.dsl.parse import parse_operator
from mercurygen.errors import UserError

GOOD = """\
from mercurygen.dsl import Axis, Input, Mask, Output, Scalar, accumulator, causal, combine, exp
from mercurygen.dsl import integer, operator, points, softmax, sum, tiles, together, where

B, M, N, K = Axis("batch"), Axis("row", tile=2), Axis("column"), Axis("inner")
L = Axis("alone")


def add(x, y):
    total = x + y
    return total


@operator
def gemm(
    a: Input[B, M, K],
    b: Input[B, K, N],
    c: Output[B, M, N],
    scale: Scalar = 1 / K,
    mask: Mask[M, K] = causal,
):
    \"\"\"c = a b.\"\"\"
    combine(c, by=add, identity=0)
    for p in points(B):
        for m, n, k in tiles(M, N, K):
            x = where(mask[m, k], a[p, m, k], 0)
            c[p, m, n] = scale * x @ b[p, k, n]
"""
LINE = "            x = where(mask[m, k], a[p, m, k], 0)"
LAST = "            c[p, m, n] = scale * x @ b[p, k, n]"
COMBINE = "    combine(c, by=add, identity=0)"
A, B, C = "    a: Input[B, M, K],", "    b: Input[B, K, N],", "    c: Output[B, M, N],"
LOOP = "        for m, n, k in tiles(M, N, K):"
AXES = 'L = Axis("alone")'


def lines(value):
    """An expression put into the body."""
    return LINE, f"            x = {value}"


# (what is replaced, by what, slug, what the caret stands under)
CASES = {
    # statements
    "while": ((LINE, "            while x:\n                pass"), "dsl-statement", "while"),
    "import inside": ((LINE, "            import os"), "dsl-statement", "import os"),
    "import": ((AXES, "import os"), "dsl-import|dsl-statement", "import os"),
    "import os from": ((AXES, "from os import system"), "dsl-import", "from os"),
    "import star": ((AXES, "from mercurygen.dsl import *"), "dsl-import", "from"),
    "import as": ((AXES, "from mercurygen.dsl import inf as i"), "dsl-import", "inf as i"),
    "import unknown": ((AXES, "from mercurygen.dsl import sun"), "dsl-import", "sun"),
    "relative import": ((AXES, "from .mercurygen.dsl import inf"), "dsl-import", "from"),
    "main": ((AXES, 'if __name__ == "__main__":\n    pass'), "dsl-statement", "if"),
    "class": ((AXES, "class X:\n    pass"), "dsl-statement", "class"),
    "two on a line": ((LINE, "            x = 1; y = 2"), "dsl-statement", "x = 1"),
    "augmented": ((LAST, "            c[p, m, n] += x"), "dsl-statement", "c["),
    "annotated": ((LINE, "            x: int = 1"), "dsl-statement", "x: int"),
    "chained": ((LINE, "            x = y = 1"), "dsl-statement", "x = y"),
    "unpacked": ((LINE, "            x, y = 1, 2"), "dsl-statement", "x, y"),
    "star unpacked": ((LINE, "            *x, y = 1, 2"), "dsl-statement", "*x"),
    "attribute target": ((LINE, "            x.y = 1"), "dsl-statement", "x.y"),
    "bare call": ((LINE, "            exp(1)"), "dsl-statement", "exp(1)"),
    "print": ((COMBINE, COMBINE + "\n    print(1)"), "dsl-statement", "print"),
    "if": ((LINE, "            if p:\n                x = 1"), "dsl-statement", "if p"),
    "def inside": ((COMBINE, COMBINE + "\n    def f(): pass"), "dsl-statement", "def f"),
    "return": ((LAST, LAST + "\n            return"), "dsl-statement", "return"),
    "no body": (("    combine(", "    '''x'''\n    combine("), "dsl-statement", "'''x'''"),
    "line between loops": ((LOOP, "        y = 1\n" + LOOP), "dsl-statement", "y = 1"),
    "for else": ((LAST, LAST + "\n        else:\n            y = 1"), "dsl-statement", "else"),
    "async": (("def gemm", "async def gemm"), "dsl-statement", "gemm"),
    # expressions
    "lambda": (lines("lambda: 1"), "dsl-expression", "lambda"),
    "os.system": (lines("os.system('x')"), "dsl-call", "os.system"),
    "attribute": (lines("a.data"), "dsl-expression", "a.data"),
    "dunder": (lines("a.__class__"), "dsl-expression", "a.__class__"),
    "comprehension": (lines("[y for y in a]"), "dsl-expression", "["),
    "list": (lines("[1]"), "dsl-expression", "["),
    "text": (lines("'1'"), "dsl-expression", "'1'"),
    "f-string": (lines("f'{1}'"), "dsl-expression", "f'"),
    "f-string prefix": (lines("Rf'{1}'"), "dsl-expression", "Rf'"),
    "star": (lines("exp(*a)"), "dsl-expression", "*a"),
    "double star": (lines("exp(**a)"), "dsl-expression", "**a"),
    "walrus": (lines("(y := 1)"), "dsl-expression", "y := 1"),
    "ternary": (lines("1 if p else 2"), "dsl-expression", "1 if"),
    "and": (lines("1 and 2"), "dsl-expression", "1 and"),
    "not": (lines("not 1"), "dsl-expression", "not"),
    "chained comparison": (lines("1 < 2 < 3"), "dsl-expression", "1 < 2"),
    "in": (lines("1 in a"), "dsl-expression", "1 in"),
    "shift": (lines("1 << 9"), "dsl-expression", "1 << 9"),
    "True": (lines("True"), "dsl-expression", "True"),
    "complex": (lines("1j"), "dsl-expression", "1j"),
    "await": (lines("await x"), "dsl-expression", "await"),
    "slice": (lines("a[p, 0:2, k]"), "dsl-expression", "0:2"),
    "call of call": (lines("exp(1)(2)"), "dsl-call", "exp(1)(2)"),
    "huge number": (lines("1e999"), "dsl-number", "1e999"),
    "huge integer": (lines("9" * 5000), "dsl-number", "999"),
    # names
    "unknown name": (lines("y"), "dsl-unknown-name", "y"),
    "not imported": (lines("log(1)"), "dsl-unknown-name", "log"),
    "inf not imported": (lines("inf"), "dsl-unknown-name", "inf"),
    "builtin": (lines("max(1, 2)"), "dsl-unknown-name", "max"),
    "eval": (lines("eval(1)"), "dsl-unknown-name", "eval"),
    "shadowed function": ((LINE, "            exp = 1"), "dsl-duplicate-name", "exp"),
    "shadowed loop": ((LINE, "            m = 1"), "dsl-duplicate-name", "m"),
    "shadowed tensor": ((LINE, "            a = 1"), "dsl-duplicate-name", "a"),
    "function value": (lines("exp"), "dsl-call", "exp"),
    "use before": (lines("x"), "dsl-unknown-name", "x"),
    "non-ASCII name": (lines("ｅxp(1)"), "dsl-identifier", "ｅxp"),
    "cyrillic": ((A, "    а: Input[B, M, K],"), "dsl-identifier", "а"),
    # arguments
    "too few": (lines("where(1)"), "dsl-argument", "where"),
    "too many": (lines("exp(1, 2)"), "dsl-argument", "exp"),
    "twice": (lines("exp(1, input=2)"), "dsl-argument", "exp"),
    "unknown keyword": (lines("exp(inputs=2)"), "dsl-argument", "exp"),
    "dim": (lines("sum(a[p, m, k], dim=p)"), "dsl-argument", "p"),
    # subscripts
    "too few indices": (lines("a[p, m]"), "dsl-index", "a[p, m]"),
    "too many indices": (lines("a[p, m, k, k]"), "dsl-index", "a["),
    "wrong order": (lines("a[p, k, m]"), "dsl-index", "k, m"),
    "number index": (lines("a[0, m, k]"), "dsl-index", "0"),
    "offset index": (lines("a[p, m + 1, k]"), "dsl-index", "m + 1"),
    "bare tensor": (lines("a"), "dsl-index", "a"),
    "bare mask": (lines("mask"), "dsl-index", "mask"),
    "bare tile": (lines("m + 1"), "dsl-index", "m"),
    "mask order": (lines("mask[k, m]"), "dsl-index", "mask"),
    "mask arity": (lines("mask[m]"), "dsl-index", "mask"),
    "indexed value": (lines("(a[p, m, k])[0]"), "dsl-index", "(a["),
    "output index": ((LAST, "            c[p, n, m] = x"), "dsl-index", "n"),
    # axes
    "axis without text": ((AXES, "L = Axis()"), "dsl-axis", "Axis()"),
    "axis f": ((AXES, 'L = Axis("x", tile=0)'), "dsl-axis", "tile=0"),
    "axis other": ((AXES, 'L = Axis("x", size=3)'), "dsl-axis", "Axis"),
    "not an axis": ((AXES, "L = 3"), "dsl-axis", "3"),
    "open": ((AXES, 'L = open("x", "w")'), "dsl-axis", "open"),
    "axes count": ((AXES, 'L, P = Axis("x")'), "dsl-axis", "L, P"),
    "axis attribute": ((AXES, 'B.x = Axis("x")'), "dsl-axis", "B.x"),
    "axis twice": ((AXES, 'B = Axis("x")'), "dsl-duplicate-name", "B"),
    # decorators and signatures
    "decorator arguments": (("@operator", "@operator()"), "dsl-decorator", "@operator()"),
    "other decorator": (("@operator", "@cache"), "dsl-decorator", "@cache"),
    "two decorators": (("@operator", "@operator\n@operator"), "dsl-decorator", "@operator"),
    "no operator": (("@operator\n", ""), "dsl-no-operator", ""),
    "star parameter": ((A, A + "\n    *rest,"), "dsl-parameter", "gemm"),
    "kwargs": (("= causal,", "= causal,\n    **rest,"), "dsl-parameter", "gemm"),
    "keyword only": ((A, "    *,\n" + A), "dsl-parameter", "gemm"),
    "positional only": ((A, A + "\n    /,"), "dsl-parameter", "gemm"),
    "no annotation": ((A, "    a,"), "dsl-parameter", "a"),
    "other annotation": ((A, "    a: int,"), "dsl-parameter", "int"),
    "call annotation": ((A, "    a: Input[f()],"), "dsl-parameter", "f()"),
    "duplicate parameter": ((A, A + "\n" + A), "dsl-duplicate-name", "a: "),
    "parameter is an axis": ((A, "    B: Input[B, M, K],"), "dsl-duplicate-name", "B: "),
    "reserved": ((A, "    tiles: Input[B, M, K],"), "dsl-reserved-name", "tiles"),
    "undeclared axis": ((A, "    a: Input[B, M, J],"), "dsl-unknown-name", "J"),
    "axis in a tensor twice": ((A, "    a: Input[B, M, M],"), "dsl-parameter", "a: "),
    "unbound axis": ((B, "    b: Input[B, K],"), "dsl-unbound-axis", "gemm"),
    "tensor default": ((C, "    c: Output[B, M, N] = 1,"), "dsl-parameter", "c: "),
    "scalar default": (("= 1 / K", "= exp(1)"), "dsl-parameter", "exp(1)"),
    "mask default": (("= causal", "= casual"), "dsl-parameter", "casual"),
    "mask axes": (("Mask[M, K]", "Mask[M]"), "dsl-parameter", "mask: "),
    "default order": ((A, "    s: Scalar = 1,\n" + A), "dsl-syntax", ""),
    "unused input": ((B, B + "\n    d: Input[B, K],"), "dsl-unused", "d: "),
    "unused mask": ((LINE, "            x = a[p, m, k]"), "dsl-unused", "mask"),
    # loops
    "undeclared loop axis": ((LOOP, LOOP.replace("(M, N", "(J, N")), "dsl-loop", "J"),
    "loop twice": ((LOOP, LOOP.replace("(M, N", "(B, N")), "dsl-loop", "tiles"),
    "loop over range": ((LOOP, LOOP.replace("tiles(M, N, K)", "range(3)")), "dsl-loop", "range"),
    "loop count": ((LOOP, LOOP.replace("m, n, k", "m, n")), "dsl-loop", "m, n"),
    "loop target": ((LOOP, LOOP.replace("m, n, k", "m, n, k.x")), "dsl-loop", "k.x"),
    "loop name twice": ((LOOP, LOOP.replace("m, n, k", "m, n, p")), "dsl-duplicate-name", "tiles"),
    # outputs and combine
    "never written": ((LAST, "            y = scale * x @ b[p, k, n]"), "dsl-output", "c: "),
    "written twice": ((LAST, LAST + "\n" + LAST), "dsl-output", "c"),
    "output read": (lines("c[p, m, n]"), "dsl-output", "c["),
    "input written": ((LINE, "            a[p, m, k] = 1"), "dsl-output", "a["),
    "unknown output": ((LINE, "            z[p, m, k] = 1"), "dsl-output", "z["),
    "combine missing": ((COMBINE, "    together(a, b)"), "dsl-combine-missing", "c: "),
    "combine input": ((COMBINE, "    combine(a, by=sum)"), "dsl-combine", "combine"),
    "combine twice": ((COMBINE, COMBINE + "\n" + COMBINE), "dsl-combine", "combine"),
    "combine rule": ((COMBINE, "    combine(c, by=plus)"), "dsl-unknown-name", "by=plus"),
    "combine no rule": ((COMBINE, "    combine(c)"), "dsl-combine", "combine"),
    "combine word": ((COMBINE, "    combine(c, bye=sum)"), "dsl-argument", "bye=sum"),
    "no identity": ((COMBINE, "    combine(c, by=add)"), "dsl-combine", "combine"),
    "identity of sum": ((COMBINE, "    combine(c, by=sum, identity=1)"), "dsl-combine", "identity"),
    "identity call": ((COMBINE, "    combine(c, by=add, identity=exp(1))"), "dsl-combine", "exp"),
    "identities": ((COMBINE, "    combine(c, by=add, identity=(0, 1))"), "dsl-combine", "combine"),
    "softmax of one": ((COMBINE, "    combine(c, by=softmax)"), "dsl-combine", "combine"),
    "merge parameters": (("def add(x, y)", "def add(x, y, z)"), "dsl-combine", "combine"),
    "merge annotated": (("def add(x, y)", "def add(x, y: int)"), "dsl-parameter", "y: int"),
    "merge without return": (("    return total", "    z = total"), "dsl-statement", "z ="),
    "merge reads": (("total = x + y", "total = x + z"), "dsl-unknown-name", "z"),
    "merge writes": (("total = x + y", "total[x] = y"), "dsl-statement", "total"),
    "together unknown": ((COMBINE, COMBINE + "\n    together(a, z)"), "dsl-together", ""),
    "together alone": ((COMBINE, COMBINE + "\n    together(a)"), "dsl-together", ""),
    "together mixed": ((COMBINE, COMBINE + "\n    together(a, c)"), "dsl-together", ""),
    "together call": ((COMBINE, COMBINE + "\n    together(f())"), "dsl-argument", "f()"),
    # texts that are not Python, or not a text
    "syntax": ((LINE, "            x = = 1"), "dsl-syntax", ""),
    "unclosed": ((LAST, LAST + "\n            y = ("), "dsl-syntax", ""),
    "unclosed text": ((LINE, "            x = 'a"), "dsl-syntax", ""),
    "indentation": ((LAST, LAST + "\n      y = 1"), "dsl-syntax", ""),
    "question": ((LINE, "            x = ?"), "dsl-syntax", ""),
    "NUL": ((LINE, LINE + "  # \0"), "dsl-character", "\0"),
    "tab": ((LINE, LINE + "  # \t"), "dsl-character", "\t"),
    "bidi": ((LINE, LINE + "  # \u202e"), "dsl-character", "\u202e"),
    "form feed": ((LINE, LINE + "\n\x0c"), "dsl-character", "\x0c"),
    "deep brackets": (lines("(" * 10000 + "1" + ")" * 10000), "dsl-too-deep", "("),
    "deep minus": (lines("-" * 10000 + "1"), "dsl-too-deep", "-"),
    "less deep minus": (lines("-" * 500 + "1"), "dsl-too-deep", ""),
    "deep sum": (lines("1" + " + 1" * 200), "dsl-too-deep", "1"),
    "deep power": (lines("1" + " ** 1" * 200), "dsl-too-deep", "1"),
    "deep elif": ((AXES, "if x:\n    pass\n" + "elif x:pass\n" * 10000), "dsl-too-deep", "elif"),
    "deep lambda": (lines("lambda: " * 250 + "1"), "dsl-too-deep", ""),
    "deep ternary": (lines("1 if 1 else " * 140 + "1"), "dsl-expression", "1 if"),
    "deep text": (lines("'a' " * 590), "dsl-too-deep", ""),
    "deep subscript": (lines("a" + "[:]" * 150), "dsl-too-deep", "a"),
    "deep transpose": (lines("a" + ".T" * 150), "dsl-too-deep", "a"),
    "deep indent": (("x", "x"), "dsl-too-deep", ""),
    "10 MB": ((LINE, "#" * 10_000_000), "dsl-too-large", ""),
}


def text_of(name):
    old, new = CASES[name][0]
    if name == "deep indent":
        return "".join(" " * n + "if x:\n" for n in range(200)) + " " * 200 + "pass\n"
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def test_the_good_one_is_good():
    op = parse_operator(GOOD, "good.py")
    assert op.combines[0].merge.name == "add" and op.combines[0].identity == (0,)
    assert parse_operator("\ufeff" + GOOD.replace("\n", "\r\n"), "good.py", "gemm") == op


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_place(name):
    text = text_of(name)
    with pytest.raises(UserError) as caught:
        parse_operator(text, "bad.py")
    error, (_, slugs, under) = caught.value, CASES[name]
    assert error.slug in slugs.split("|"), error.render()
    span = error.span
    assert span.file == "bad.py" and span.text.rstrip("\n")[:100] in text
    assert span.text == text.split("\n")[span.line - 1] or name == "10 MB"
    assert span.text[span.column - 1 :].startswith(under), error.render()
    assert "^" in error.render() and len(error.render()) < 3000


def test_an_error_reads_well():
    with pytest.raises(UserError) as caught:
        parse_operator(text_of("too few indices"), "bad.py")
    assert caught.value.render() == (
        "error[dsl-index]: `a` takes 3 indices here, got 2\n"
        "   --> bad.py:25:17\n"
        " 25 |             x = a[p, m]\n"
        "    |                 ^^^^^^^\n"
        "help: `a[B, M, K]`: write `a[p, m, k]`"
    )


def test_nothing_is_executed(tmp_path):
    path = tmp_path / "made"
    for line in (
        f"open({str(path)!r}, 'w')",
        f"L = Axis(open({str(path)!r}, 'w').name)",
        f"L = Axis('x', tile=len(open({str(path)!r}, 'w').name))",
    ):
        with pytest.raises(UserError):
            parse_operator(GOOD.replace(AXES, line), "bad.py")
        assert not path.exists()
    exec(line, {"Axis": lambda doc, tile: None})  # it would have been made
    assert path.exists()


@pytest.mark.parametrize("text", ["", "\n", "# nothing", '"""doc"""', "x", "\\", "@operator"])
def test_files_without_an_operator(text):
    with pytest.raises(UserError) as caught:
        parse_operator(text, "bad.py")
    assert caught.value.slug.startswith("dsl-") and caught.value.span
    caught.value.render()


def test_every_prefix_and_every_missing_token_is_a_user_error():
    """Cut and damaged files end in words, never in a traceback."""
    cuts = [GOOD[:n] for n in range(0, len(GOOD), 7)]
    words = GOOD.split(" ")
    cuts += [" ".join(words[:n] + words[n + 1 :]) for n in range(len(words))]
    for text in cuts:
        try:
            parse_operator(text, "bad.py")
        except UserError as error:
            assert error.slug.startswith("dsl-") and error.span, error.render()
            error.render()


RUNS = {
    "missing": ({"b": None}, {}, "dsl-argument"),
    "extra": ({"d": torch.ones(1)}, {}, "dsl-argument"),
    "dimensions": ({"a": torch.ones(2, 3)}, {}, "dsl-shape"),
    "disagree": ({"b": torch.ones(2, 5, 4)}, {}, "dsl-shape"),
    "dtypes": ({"b": torch.ones(2, 3, 4).double()}, {}, "dsl-dtype"),
    "scalar": ({}, {"scalars": {"scale": "x"}}, "dsl-argument"),
    "unknown scalar": ({}, {"scalars": {"skale": 1}}, "dsl-argument"),
    "mask": ({}, {"mask": "casual"}, "dsl-mask"),
    "tile axis": ({}, {"tiles": {"Q": 1}}, "dsl-axis"),
    "tile size": ({}, {"tiles": {"M": 0}}, "dsl-axis"),
    "positions": ({}, {"positions": {"M": torch.arange(9)}}, "dsl-shape"),
    "positions axis": ({}, {"positions": {"Q": torch.arange(9)}}, "dsl-axis"),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_refused(name):
    change, options, slug = RUNS[name]
    tensors = {"a": torch.ones(2, 5, 3), "b": torch.ones(2, 3, 4)} | change
    tensors = {name: x for name, x in tensors.items() if x is not None}
    with pytest.raises(UserError) as caught:
        interpret(parse_operator(GOOD, "good.py"), tensors, **options)
    assert caught.value.slug == slug


@pytest.mark.parametrize(
    ("line", "slug"),
    [
        ("9 ** 9 ** 9 ** 9 + a[p, m, k]", "dsl-run"),
        ("1 / 0 + a[p, m, k]", "dsl-run"),
        ("a[p, m, k] @ a[p, m, k]", "dsl-run"),
        ("exp(1) + a[p, m, k]", "dsl-run"),
        ("a[p, m, k].T", "dsl-run"),
        ("sum(a[p, m, k], dim=-1)[None]", "dsl-run"),
    ],
)
def test_a_line_that_cannot_run_has_a_place(line, slug):
    text = GOOD.replace(LINE, f"            x = where(mask[m, k], 1, 1) * ({line})")
    with pytest.raises(UserError) as caught:
        tensors = {"a": torch.ones(2, 5, 3), "b": torch.ones(2, 3, 4)}
        interpret(parse_operator(text, "good.py"), tensors)
    assert caught.value.slug == slug and caught.value.span.line in (25, 26)


def test_scalars_and_identities_that_no_tensor_holds():
    text = GOOD.replace("1 / K", "10**64 * 10**64 * 10**64 * 10**64 * 10**64 * K")
    with pytest.raises(UserError, match="dsl-argument"):
        tensors = {"a": torch.ones(2, 5, 3), "b": torch.ones(2, 3, 4)}
        interpret(parse_operator(text, "good.py"), tensors)
    text = GOOD.replace(C, C.replace("]", ", integer]")).replace("identity=0", "identity=0.5")
    with pytest.raises(UserError, match="dsl-combine"):
        parse_operator(text, "good.py")
