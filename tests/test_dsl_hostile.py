"""Operators' files that are wrong on purpose: each is refused in words, at a place, quickly.

`test_dsl_errors` has the rules of the language one by one; here are derived tensors, masks, names,
and texts that attack the parser or what is emitted.
"""

from __future__ import annotations

import random
import re
import warnings

import pytest
import torch
from test_dsl import as_written
from test_dsl_errors import AXES, COMBINE, GOOD, LAST, LINE, LOOP, A

from mercurygen import operators
from mercurygen.dsl.parse import parse_operator
from mercurygen.errors import UserError
from mercurygen.ir.names import MODULE

DERIVED = """\
from mercurygen.dsl import Axis, Derived, Input, Mask, Output, Scalar, accumulator, causal, combine
from mercurygen.dsl import integer, operator, points, position, sum, tiles, together, where, window

B, G, H = Axis("batch"), Axis("in a group"), Axis("group")
N, M = Axis("row"), Axis("column")


@operator
def scaled(
    x: Input[B, N, H * G, M],
    w: Input[H, N, M],
    norm: Derived[B, H * G, N, accumulator],
    y: Output[B, N, H * G],
    mask: Mask[N, M] = window(4),
):
    together(x, norm)
    combine(y, by=sum)
    for b, h, g in points(B, H, G):
        for i in tiles(N):
            t = x[b, i, h * G + g]
            norm[b, h * G + g, i] = sum(t, dim=-1)
    for b, h, g in points(B, H, G):
        for i, j in tiles(N, M):
            t = where(mask[i, j], x[b, i, h * G + g, j] * w[h, i, j], 0)
            y[b, i, h * G + g] = sum(t, dim=-1) / norm[b, h * G + g, i]
"""
WRITE = "            norm[b, h * G + g, i] = sum(t, dim=-1)"
NEST = "    for b, h, g in points(B, H, G):\n        for i in tiles(N):\n"
NEST += "            t = x[b, i, h * G + g]\n" + WRITE + "\n"
NORM = "    norm: Derived[B, H * G, N, accumulator],"
T = "            t = x[b, i, h * G + g]"
MASK = "    mask: Mask[N, M] = window(4),"

# (what is replaced, by what, slug, what the caret stands under)
DERIVED_CASES = {
    "never written": ((NEST, ""), "dsl-derived", "norm: "),
    "written twice": ((NEST, NEST + NEST), "dsl-derived", "points"),
    "twice in a nest": ((WRITE, WRITE + "\n" + WRITE), "dsl-derived", "norm["),
    "never read": ((" / norm[b, h * G + g, i]", ""), "dsl-unused", "norm: "),
    "reads itself": ((WRITE, WRITE + " / norm[b, h * G + g, i]"), "dsl-derived", "norm["),
    "before it is written": (
        (NORM, NORM + "\n    m: Derived[B, N],"),
        "dsl-derived",
        "m: ",
    ),
    "written in the last nest": (
        ("            y[b", WRITE + "\n            y[b"),
        "dsl-output",
        "norm[",
    ),
    "an output before the last nest": (
        (WRITE, "            y[b, i, h * G + g] = t"),
        "dsl-derived",
        "y[",
    ),
    "an unknown one": ((WRITE, "            nrm[b, i] = t"), "dsl-derived", "nrm["),
    "an input": ((WRITE, "            x[b, i, h * G + g] = t"), "dsl-derived", "x["),
    "nothing": ((WRITE, "            s = t"), "dsl-derived", "points"),
    "an axis that it does not carry": (
        ("for i in tiles(N)", "for i, j in tiles(N, M)"),
        "dsl-derived|dsl-index",
        "",
    ),
    "too few axes": ((NORM, "    norm: Derived[B, H * G, accumulator],"), "dsl-index", "norm["),
    "depends on the mask": (
        (T, "            t = where(mask[i, i], 1, 0)"),
        "dsl-derived",
        "mask",
    ),
    "depends on positions": ((T, T + " + position(i)"), "dsl-derived", "position(i)"),
    "reads an output": ((T, T + " + y[b, i, h * G + g]"), "dsl-output", "y["),
    "an extent that it cannot know": ((T, T + " / G"), "dsl-derived", "points"),
    "an axis that it cannot know": (
        (NORM, NORM.replace("H * G", "H * G, M")),
        "dsl-index|dsl-derived",
        "",
    ),
    "a default": ((NORM, NORM.replace("],", "] = 0,")), "dsl-syntax", ""),  # y has none
    "combined": (
        ("combine(y", "combine(norm, by=sum)\n    combine(y"),
        "dsl-combine",
        "combine(norm",
    ),
    "together with an output": (("together(x, norm)", "together(y, norm)"), "dsl-together", ""),
    "a directive behind a nest": ((NEST, NEST + "    together(x, w)\n"), "dsl-statement", "tog"),
    "not imported": (("Axis, Derived,", "Axis,"), "dsl-unknown-name", "Derived"),
    "a local of another nest": (
        ("            t = where(mask[i, j], ", "            u = t + where(mask[i, j], "),
        "dsl-unknown-name",
        "t",
    ),
    # masks
    "window of nothing": ((MASK, MASK.replace("(4)", "(0)")), "dsl-parameter", "window(0)"),
    "window before": ((MASK, MASK.replace("(4)", "(-4)")), "dsl-parameter", "window(-4)"),
    "window of a part": ((MASK, MASK.replace("(4)", "(0.5)")), "dsl-parameter", "window"),
    "window without width": ((MASK, MASK.replace("(4)", "")), "dsl-parameter", "window"),
    "window by name": ((MASK, MASK.replace("4", "width=4")), "dsl-parameter", "window"),
    "window of an axis": ((MASK, MASK.replace("4", "N")), "dsl-parameter", "window(N)"),
    "two widths": ((MASK, MASK.replace("4", "4, 4")), "dsl-parameter", "window"),
    "widest": ((MASK, MASK.replace("4", "9" * 4000)), "dsl-parameter", "window"),
    "causal with a width": ((MASK, MASK.replace("window", "causal")), "dsl-parameter", "causal"),
    "window not imported": ((", window\n", "\n"), "dsl-parameter", "window"),
}


def refused(text, slugs, under):
    """The text is refused with a slug and a place; nothing is printed, and nothing warned of."""
    with warnings.catch_warnings(), pytest.raises(UserError) as caught:
        warnings.simplefilter("error")
        parse_operator(text, "bad.py")
    error = caught.value
    assert error.slug in slugs.split("|"), error.render()
    assert error.span.file == "bad.py" and "^" in error.render()
    assert error.span.text[error.span.column - 1 :].startswith(under), error.render()
    assert error.render().isprintable() or "\n" in error.render()
    return error


def test_the_derived_one_is_good():
    op = parse_operator(DERIVED, "good.py")
    assert op.derivation("norm").reads == ("x",) and op.together == (("x", "norm"),)
    two = DERIVED.replace(NEST, NEST.replace("norm", "m") + NEST.replace("+ g]", "+ g]"))
    two = two.replace(NORM, NORM + NORM.replace("norm", "m"))
    two = two.replace(" / norm", " / m[b, h * G + g, i] / norm")
    assert [d.name for d in parse_operator(two, "good.py").derivations] == ["m", "norm"]


@pytest.mark.parametrize("name", DERIVED_CASES)
def test_derived_tensors_and_masks(name):
    (old, new), slugs, under = DERIVED_CASES[name]
    assert old in DERIVED
    refused(DERIVED.replace(old, new, 1), slugs, under)


def test_a_derived_tensor_reads_only_what_is_written_before():
    late = DERIVED.replace(NORM, NORM + "\n    m: Derived[B, H * G, N],")
    other = NEST.replace(WRITE, "            m[b, h * G + g, i] = norm[b, h * G + g, i]")
    late = late.replace(" / norm", " / m[b, h * G + g, i] / norm")
    op = parse_operator(late.replace(NEST, NEST + other), "good.py")
    assert op.derivation("m").reads == ("x", "norm")
    refused(late.replace(NEST, other + NEST), "dsl-derived", "norm[")


STATEMENTS = {
    "try": "try:\n    pass\nexcept Exception:\n    pass",
    "try star": "try:\n    pass\nexcept* Exception:\n    pass",
    "global": "global x",
    "nonlocal": "nonlocal x",
    "with": "with open('x') as f:\n    pass",
    "async with": "async with x:\n    pass",
    "async for": "async for x in y:\n    pass",
    "match": "match x:\n    case 1:\n        pass",
    "while": "while 1:\n    pass",
    "class": "class X:\n    pass",
    "async def": "async def f():\n    pass",
    "del": "del x",
    "assert": "assert x",
    "raise": "raise x",
    "pass": "pass",
    "yield": "yield 1",
    "await": "await x",
    "type": "type X = int",
    "import": "import os",
    "from": "from mercurygen.dsl import *",
    "text": "'text'",
    "walrus": "(x := 1)",
    "bare": "x",
    "call": "__import__('os')",
    "deleted": "c[p, m, n]: int = 1",
    "starred": "*x, = 1, 2",
}


PLACES = [(name, where) for name in STATEMENTS for where in ("file", "function", "body", "merge")]
PLACES.remove(("text", "merge"))  # it is the docstring there


@pytest.mark.parametrize(("name", "where"), PLACES)
def test_statements_outside_the_language(name, where):
    if where == "file":
        old, indent = AXES, ""
    elif where == "merge":
        old, indent = "    total = x + y", "    "
    else:
        old, indent = (COMBINE, "    ") if where == "function" else (LINE, " " * 12)
    new = "\n".join(indent + line for line in STATEMENTS[name].split("\n"))
    under = new.split("\n")[0].strip().split(" ")[0][:1]
    under = "" if name in ("async def", "async for", "async with", "deleted") else under
    slugs = "dsl-statement|dsl-import|dsl-syntax|dsl-axis|dsl-expression"
    refused(GOOD.replace(old, new + "\n" + old, 1), slugs, under)


SIGNATURES = {
    "args": A + " *args,",
    "kwargs": A.rstrip(",") + ", **k,",
    "keyword only": A + " *,",
    "positional only": A + " /,",
    "default": A.rstrip(",") + " = f(),",
    "text annotation": "    a: 'Input[B, M, K]',",
    "starred axes": "    a: Input[*B, M, K],",
    "sliced axes": "    a: Input[B:M, K],",
    "no axes": "    a: Input[()],",
    "number": "    a: Input[B, M, 3],",
    "sum": "    a: Input[B, M + K],",
    "dtype alone": "    a: Input[accumulator],",
    "dtype first": "    a: Input[accumulator, B, M, K],",
    "two dtypes": "    a: Input[B, M, K, integer, accumulator],",
    "attribute": "    a: dsl.Input[B, M, K],",
    "subscript of a call": "    a: Input()[B, M, K],",
    "none": "    a: Input[None],",
    "walrus": "    a: (Input := Output)[B, M, K],",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    slugs = "dsl-parameter|dsl-unknown-name|dsl-syntax"
    refused(GOOD.replace(A, SIGNATURES[name], 1), slugs, "")


NESTED = {
    "decorated twice": ("@operator", "@operator\n@operator"),
    "other decorator": ("@operator", "@staticmethod"),
    "decorated merge": ("def add", "@cache\ndef add"),
    "decorator call": ("@operator", "@operator(exec('1'))"),
    "decorator expression": ("@operator", "@(lambda f: f)"),
    "nested": (COMBINE, COMBINE + "\n    def f(x):\n        return x"),
    "nested in a loop": (LINE, "            def f(x):\n                return x\n" + LINE),
    "nested in a merge": ("    total = x", "    def f(x):\n        return x\n    total = x"),
    "generic": ("def gemm(", "def gemm[T]("),
    "generic merge": ("def add(", "def add[T]("),
    "returns": ("):\n    total", ") -> exec('1'):\n    total"),
    "starred merge": ("add(x, y)", "add(*x)"),
    "returns twice": ("    return total", "    return total\n    return total"),
    "returns nothing": ("    return total", "    return"),
    "returns a star": ("    return total", "    return *total,"),
    "loops over a star": ("for p in points(B)", "for *p, in points(B)"),
    "identity of a star": ("identity=0", "identity=(*x,)"),
    "declares a star": ("B, M, N, K = ", "*B, M, N, K = "),
}


@pytest.mark.parametrize("name", NESTED)
def test_functions(name):
    old, new = NESTED[name]
    assert old in GOOD
    refused(
        GOOD.replace(old, new, 1), "dsl-statement|dsl-decorator|dsl-parameter|dsl-expression", ""
    )


NAMES = [
    "torch",
    "dist",
    "mesh",
    "make_mesh",
    "len",
    "range",
    "__builtins__",
    "_x",
    "MESH",
    "print",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_emitted_modules_use(name):
    local = f"            {name} = 1\n{LINE}"
    for old, new in (
        (LINE, local),
        (A, A.replace("a:", f"{name}:")),
        ("scale: Scalar", f"{name}: Scalar"),
        ("mask: Mask", f"{name}: Mask"),
        ("def gemm(", f"def {name}("),
        ("def add(x, y)", f"def add({name}, y)"),
        ("    total = x + y", f"    {name} = x\n    total = x + y"),
        (LOOP, LOOP.replace("m, n, k", f"{name}, n, k")),
    ):
        refused(GOOD.replace(old, new, 1), "dsl-reserved-name", "")
    merge = GOOD.replace("def add(", f"def {name}(").replace("by=add", f"by={name}")
    refused(merge, "dsl-reserved-name", name)
    refused(re.sub(r"\bM\b", name, GOOD), "dsl-reserved-name", name)


def test_the_list_of_names_is_that_of_the_modules():
    """What stands at the top of the emitted modules is on the list."""
    import ast
    from pathlib import Path

    import mercurygen

    folder = Path(mercurygen.__file__).parent.parent / "generated"
    for file in folder.glob("*.py"):
        top = set()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                top.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                top |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                top |= {target.id for target in targets if isinstance(target, ast.Name)}
        public = {name for name in top if not name.startswith("_")}
        assert public - MODULE == {"attention"}, file.name  # the operator itself


TEXTS = {
    "escape": ('"alone"', r'"\x41"'),
    "broken escape": ('"alone"', r'"\x"'),
    "broken name": ('"alone"', r'"\N{none}"'),
    "invalid escape": ('"alone"', r'"\d"'),
    "NUL": ('"alone"', r'"\0"'),
    "bidi": ('"alone"', r'"\u202e"'),
    "surrogate": ('"alone"', r'"\ud800"'),
    "quotes": ('"alone"', r'"\"\"\""'),
    "continued": ('"alone"', '"a\\\nb"'),
    "bytes": ('"alone"', 'b"alone"'),
    "joined": ('"alone"', '"a" "b"'),
    "doc escape": ("c = a b.", r"\x"),
    "doc quote": ("c = a b.", r"\"\"\" + exec('1')"),
    "doc bytes": ('"""c', 'b"""c'),
    "doc f": ('"""c', 'f"""c'),
    "latin-1": ("from", "# -*- coding: latin-1 -*-\nfrom"),
    "utf-7": ("from", "#!x\n# vim: fileencoding=utf-7\nfrom"),
    "long cookie": ("from", f"# coding={'x' * 9000}\nfrom"),
    "carriage return": ("x + y", "x\r + y"),
    "vertical tab": ("x + y", "x\x0b + y"),
    "next line": ("x + y", "x + y  # \x85"),
    "line separator": ("x + y", "x + y  # \u2028"),
    "zero width": ("x + y", "x + y  # \u200b"),
    "BOM inside": ("x + y", "x + y  # \ufeff"),
    "bidi isolate": ("x + y", "x + y  # \u2066"),
    "no-break space": ("x + y", "x\u00a0+ y"),
    "escape code": ("x + y", "x + y  # \x1b[31m"),
    "DEL": ("x + y", "x + y  # \x7f"),
    "unpaired": ("x + y", "x + y  # \ud800"),
    "tab": ("    total", "\ttotal"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_hide_something(name):
    old, new = TEXTS[name]
    assert old in GOOD
    slugs = "dsl-text|dsl-character|dsl-axis|dsl-expression|dsl-statement|dsl-syntax"
    refused(GOOD.replace(old, new, 1), slugs, "")


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa",
        "# fmt: off",
        "# type: ignore",
        "# coding: latin-1",
        '# """',
        "# '''",
        "# \\",
        "# {{ x }} {% raw %} {# #}",
        "# %s {0} $x `x`",
        "# ]})",
        "# é ü 漢",
        "#" * 500,
    ],
)
def test_comments_are_kept_as_they_are(comment):
    text = GOOD.replace(LINE, f"            {comment}\n{LINE}  {comment}")
    op = parse_operator(text, "good.py")
    assert op == parse_operator(GOOD, "good.py")
    lines = op.source.split("\n")
    assert lines[0] == comment and lines[1] == f"{LINE.strip()}  {comment}"
    crlf = parse_operator("\ufeff" + text.replace("\n", "\r\n"), "good.py")
    assert crlf == op and crlf.source == op.source


@pytest.mark.parametrize(
    "doc", ["'''a \"\"\" b'''", 'r"""a\\x"""', '"{{ x }} %s"', '"""\n    a\n    b"""']
)
def test_docstrings_are_kept_as_they_are(doc):
    op = parse_operator(GOOD.replace('"""c = a b."""', doc), "good.py")
    assert (
        op.doc == {"'": 'a """ b', "r": "a\\x", '"': "{{ x }} %s"}.get(doc[0], "")
        or op.doc == "a\nb"
    )


def test_large_ones():
    """Within the limits a file is parsed, beyond them refused; never a RecursionError."""
    many = "\n".join(f"            x{n} = x * {n}" for n in range(5000))
    op = parse_operator(GOOD.replace(LAST, many + "\n" + LAST), "good.py")
    assert len(op.body) == 5002
    comments = GOOD.replace(LINE, "            # a comment\n" * 5000 + LINE)
    assert parse_operator(comments, "good.py").source.count("\n") == 5001
    for text in (
        GOOD.replace(LINE, "            x = " + " + ".join(["1"] * 2000)),
        GOOD.replace(LINE, "            x = (" + "\n+ ".join(["1"] * 2000) + ")"),
        GOOD.replace(LINE, "            x = " + " ** ".join(["1"] * 200)),
        GOOD.replace(LINE, "            x = " + "(" * 10_000 + "1" + ")" * 10_000),
        GOOD.replace(LINE, "            x = " + "(\n" * 10_000 + "1" + ")\n" * 10_000),
        GOOD.replace(LINE, "            x = " + "exp(" * 10_000 + "1" + ")" * 10_000),
        GOOD.replace(LINE, "            x = a" + "[a" * 10_000 + "]" * 10_000),
        GOOD.replace(A, "    a: Input[" + " * ".join(["B"] * 250) + "],"),
        GOOD.replace(A, "    a: Input[" + "(" * 100 + "B" + ")" * 100 + "],"),
        GOOD.replace("1 / K", " / ".join(["K"] * 250)),
        GOOD.replace("identity=0", "identity=" + "-" * 1000 + "0"),
        GOOD.replace(A, A + "\n" + "".join(f"    a{n}: Input[B],\n" for n in range(3000))),
    ):
        refused(text, "dsl-too-deep", "")
    refused("#" * 200_001, "dsl-too-large", "")
    refused(GOOD + "x" * 10_000_000, "dsl-too-large", "")


def test_files(tmp_path):
    """Not UTF-8, empty, a folder, too large: by the loader."""
    cases = {
        "latin.py": (GOOD.encode().replace(b"alone", b"\xe9"), "dsl-character"),
        "utf16.py": (GOOD.encode("utf-16"), "dsl-character"),
        "nul.py": (b"\0" * 100, "dsl-character"),
        "binary.py": (bytes(range(256)) * 10, "dsl-character"),
        "empty.py": (b"", "no-such-function"),
        "huge.py": (b"#" * 10_000_000, "dsl-too-large"),
    }
    for name, (data, slug) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError) as caught:
            operators.load(f"{tmp_path}/{name}::gemm")
        assert caught.value.slug == slug, name
        caught.value.render()
    with pytest.raises(UserError) as caught:
        operators.load(f"{tmp_path}/latin.py::gemm")
    assert caught.value.span.line == 5 and caught.value.span.column == 11
    (tmp_path / "dos.py").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert operators.load(f"{tmp_path}/dos.py::gemm") == parse_operator(GOOD, "good.py")


PIECES = [
    *(
        "(",
        ")",
        "[",
        "]",
        ":",
        ",",
        "'",
        '"',
        '"""',
        "\\",
        "#",
        "\n",
        "    ",
        "=",
        "*",
        "**",
        "@",
        ";",
    ),
    *("for", "in", "def f():", "lambda x:", "x", "0", "1e9", "None", "...", ".T", "-", "~", "if"),
    *("else", "yield", "await", "class", "import", "\t", "\0", "\u202e", "é", "points(", "tiles("),
    *("combine(", "Input[", "Derived[", "Axis(", "@operator", "window(", "return", "async", ":="),
]


def test_pieces_put_anywhere():
    """Texts with a piece put in, taken out or doubled parse, or are refused in words."""
    seed = 20260101
    chance, refusals = random.Random(seed), 0
    texts = [GOOD, DERIVED, operators.source_of("attention_backward")[1]]
    for n in range(400):
        text = chance.choice(texts)
        for _ in range(chance.randint(1, 3)):
            place, end = sorted(chance.randrange(len(text)) for _ in range(2))
            end = min(end, place + chance.choice([0, 0, 1, 5, 40]))
            text = text[:place] + chance.choice([*PIECES, text[place:end] * 2]) + text[end:]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                parse_operator(text, "bad.py")
        except UserError as error:
            assert error.slug.startswith("dsl-") and error.span, (seed, n)
            assert len(error.render()) < 5000, (seed, n)
            refusals += 1
    assert 200 < refusals < 400


TOTAL = """
from mercurygen.dsl import Axis, Input, Output, combine, operator, tiles

N = Axis("row")


def add(a, b):
    return a + b


@operator
def total(x: Input[N], y: Output[N]):
    combine(y, by=add)
    for i in tiles(N):
        y[i] = x[i]
"""


@pytest.mark.parametrize("identity", ["", ", identity=(0, 1)", ", identity=None"])
def test_a_combine_as_written_demands_its_identities(identity, tmp_path):
    text = TOTAL.replace("by=add", f"by=add{identity}")
    with pytest.raises(UserError, match="dsl-combine"):
        as_written(text, "total", tmp_path)(torch.ones(3))


def test_annotations_as_written_are_evaluated(tmp_path):
    for text in (
        "from __future__ import annotations\n" + TOTAL,
        TOTAL.replace("x: Input[N]", "x"),
        TOTAL.replace("x: Input[N]", "x: int"),
    ):
        with pytest.raises(UserError, match="dsl-parameter"):
            as_written(text, "total", tmp_path)
