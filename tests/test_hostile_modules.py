"""Modules that a stranger wrote: each meets one readable mismatch, soon and in little memory."""

from __future__ import annotations

import time
import tracemalloc
from functools import cache

import pytest
from test_callsites import CASES, module

from mercurygen.emit.callsites import check_text
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.lower.plan import Plan

START = "    scale = q.shape[3] ** -0.5 if scale is None else scale\n"
MAIN = 'if __name__ == "__main__":\n    _self_check()\n'
SECONDS, MIB = 5, 100


@cache
def ring() -> tuple[str, Plan]:
    """A good module, and its plan."""
    return module(*CASES["ring"], "causal", "zigzag")


def refused(old: str, new: str) -> str:
    """What is said of the module with an edit."""
    text, plan = ring()
    assert text.count(old) == 1, old
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        with pytest.raises(TextMismatch) as caught:
            check_text(text.replace(old, new), plan)
        assert time.perf_counter() - begun < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MIB * 2**20
    finally:
        tracemalloc.stop()
    words = str(caught.value)
    assert len(words) < 1000 and words.isprintable()
    return words


DOUBLED = "; ".join(["x = (1, 2)"] + ["x = (x, x)"] * 60)
GREEDY = [
    "z = 10 ** 10 ** 9",
    "z = 2 ** 63 * 2 ** 63 * 2",
    "z = sum(range(10**12))",
    "z = list(range(10**11))",
    "z = [0] * 10**10",
    "z = 'a' * 10**10",
    "z = [[0] * 4000] * 4000",
    "z = '%1000000000d' % 1",
    "z = 0x" + "f" * 10_000,
    DOUBLED,
    DOUBLED + "; z = {x: 1}",
    "z = [a for a in range(9999) for b in range(9999)]",
    "z = [a for a in range(9999) if not 0.5 in range(9999)]",
    "z = [sum(range(999)) for a in range(9999)]",
    "z = sum([[1]] * 999, [])",
    "z = max(map(lambda a: a, [1]))",
    "z = list(zip(*[range(9999)] * 999))",
    "z = q.chunk(10**6, 1), q.new_empty(*[2**62] * 4000)",
    "z = q.new_empty(*[1] * 99)",
    "z = mesh.get_group([1])",
    "z = list(iter(mesh.get_group, 0))",
    "z = " + "-" * 100_000 + "1",
    "z = torch" + ".a" * 50_000,
    "z = torch" + ".a" * 60 + " + 1",
    "z = 1" + "+1" * 50_000,
    "z = " + "[" * 150 + "]" * 150,
    "z = ~1",
    "z = attention(q, k, v, mesh)",
]


@pytest.mark.parametrize("line", GREEDY, ids=lambda line: line[:30])
def test_greedy(line: str) -> None:
    """Not interpreted to the end, nor with an error that is mercurygen's own."""
    words = refused(START, f"{START}    {line}\n")
    for wrong in ("RecursionError", "MemoryError"):
        assert wrong not in words


def test_loops_have_an_end() -> None:
    """Rounds, and what each round does, are counted together."""
    for body in ("pass", "z = [a, b, a, b]", "z = max(a, b, a, b)"):
        loops = f"    for a in range(9999):\n        for b in range(9999):\n            {body}\n"
        assert "steps" in refused(START, START + loops) or body == "pass"


@pytest.mark.parametrize("value", ["5", "dict(gpu=4)", "{1: [2]}", "{'gpu': 4.5}", "[]", "None"])
def test_mesh_is_a_dictionary(value: str) -> None:
    """Any other constant is a mismatch."""
    assert "MESH is" in refused('= {"gpu": 4}', f"= {value}")


@pytest.mark.parametrize(
    "last",
    [
        'if __name__ != "__main__":\n    _self_check()\n',
        'if __name__ == "__main__":\n    print(1)\n',
        'if __name__ == "__main__":\n    _self_check()\n    print(1)\n',
        'if __name__ == "__main__":\n    _self_check()\nelse:\n    print(1)\n',
        'if __name__ == "__main__" or print(1):\n    _self_check()\n',
        "if __name__ < print(1):\n    _self_check()\n",
        "PLACEMENTS[_self_check()] = 1\n",
        "X = _self_check()\n",
        "def more(x=_self_check()):\n    return x\n",
        "@_self_check\ndef more(x):\n    return x\n",
        "class More:\n    x = _self_check()\n",
    ],
)
def test_nothing_else_runs_at_import(last: str) -> None:
    """The self-check, in a program of its own; nothing beside it."""
    assert "not understood" in refused(MAIN, last)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpu_group = mesh", "MESH, gpu_group = 1, mesh"),
        (START, START + "    MESH, z = ((name, name) for name in MESH)\n"),
        (START, START + "    z = len(MESH)\n    for MESH in ():\n        pass\n"),
        (START, START + "    z = torch.inf\n    if False:\n        torch: int = 1\n"),
        (START, START + "    z = [a for a in [1] if b for b in [2]]\n    b = 3\n"),
    ],
)
def test_assigned_names_are_local(old: str, new: str) -> None:
    """Throughout the function, as in Python: none of the module is read by that name."""
    text, plan = ring()
    if old != START:
        old, new = 'mesh.get_group("gpu")', 'mesh.get_group([*MESH][0])\n    MESH = ""'
    assert text.count(old) == 1
    assert "before it has a value" in refused(old, new)
