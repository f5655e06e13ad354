"""CommIR's text from somebody else: refused as a user's mistake, with the place, and fast."""

from __future__ import annotations

import random
import time

import pytest
from plans import SCHEDULES, problem_of, program_of
from test_commir import ATTENTION, SEED, UNIFIED, both_ways, schedule

from mercurygen.errors import UserError
from mercurygen.ir.program import Program
from mercurygen.ir.text import parse, show
from mercurygen.schedule.apply import apply


def good() -> str:
    source = schedule("node=2 gpu=4", UNIFIED)
    return show(apply(ATTENTION, source.schedule))


def others() -> list[str]:
    """Programs with every kind of line."""
    texts = []
    for name in ("backward: ring, straight home", "matmul: 2.5D of SUMMA", "smooth, direct"):
        operator, meshes, body, changes = SCHEDULES[name]
        program = program_of(operator, problem_of(operator, **changes), meshes[0], body)
        assert isinstance(program, Program)
        texts.append(show(program))
    return texts


@pytest.mark.parametrize(
    ("old", "new", "slug"),
    [
        ("program attention", "program import", "not-a-name"),
        ("program attention", "program " + "a" * 200, "not-a-name"),
        ("program attention\n", "", "incomplete"),
        ("program attention", "program attention 3", "syntax"),
        ("gpu=4", "gpu=1", "size-out-of-range"),
        ("gpu=4", "gpu=99999999999999999999", "syntax"),
        ("gpu=4", "node=4", "named-twice"),
        ("gpu=4", "_x=4", "not-a-name"),
        ("mesh node=2", "mesh " + " ".join(f"d{i}=2" for i in range(99)), "too-large"),
        ("bfloat16", "int4", "syntax"),
        ("axis B = 2", "axis B = 0", "size-out-of-range"),
        ("axis B = 2", "axis B = 2 over gpu, node", "out-of-order"),
        ("axis B = 2", "axis B = 2 over gpu", "split-twice"),
        ("axis B = 2", "axis H = 2", "named-twice"),
        ("over S_q, S_kv", "over S_q", "syntax"),
        ("over S_q, S_kv", "over S_q, S_x", "unknown-name"),
        ("[B, S_q, H * G, D]", "[B, S_q, H * X, D]", "unknown-name"),
        ("[B, S_q, H * G, D]", "[B, S_q, H * , D]", "syntax"),
        ("[B, S_q, H * G, D]", "[B, S_q", "syntax"),
        ("input k", "input q", "named-twice"),
        ("input k", "input eval()", "syntax"),
        ("D] pinned S_q over node", "D] pinned S_kv over node", "unknown-name"),
        ("D] pinned S_q over node", "D] pinned S_q over node and D over node", "split-twice"),
        ("together k, v", "together k, k", "named-twice"),
        ("together k, v", "together k, w", "unknown-name"),
        ("zigzag over", "spiral over", "syntax"),
        ("zigzag over node", "zigzag over nude", "unknown-name"),
        ("order S", "order S: zigzag\norder S", "incomplete"),
        ("walk k", "jump k", "incomplete"),
        ("along node\n", "over node\n", "syntax"),
        ("  body with aten\n", "", "incomplete"),
        ("with aten", "with _aten", "not-a-name"),
        ("with aten", "with exec", None),
        ("reshard out", "order S: zigzag\nreshard out", "syntax"),
        ("S_q along gpu", "S_q along gpu, node", "syntax"),
        ("combine out, lse by", "combine q by", "unknown-name"),
        ("by softmax", "by mean", "syntax"),
        ("loops B", "loops B, B", "named-twice"),
        ("mask causal", "mask window", "syntax"),
        ("mask causal", "mask window 0", "size-out-of-range"),
        ("mask causal", "mask causal 3", "syntax"),
        ("output out", "derived out", "syntax"),
        ("reshard q", "tile H * by 2\nreshard q", "unknown-name"),
        ("reshard q", "tile H by 1\nreshard q", "size-out-of-range"),
        ("reshard q", "join H, X\nreshard q", "unknown-name"),
        ("reshard q", "replicated q over gpu, gpu\nreshard q", "named-twice"),
        ("reshard q", "replicated q over gpu\nreplicated q over gpu\nreshard q", "named-twice"),
        ("reshard q", "replicated q over gpu as int\nreshard q", "syntax"),
        ("along node\n", "along node dirct\n", "syntax"),
        ("along node\n", "along node direct direct\n", "named-twice"),
        ("along node\n", "along node prefetch\n", "syntax"),
        ("along node\n", "along node prefetch 1 prefetch 2\n", "named-twice"),
        ("walk k, v: S_kv along node", "gather k, v: S_kv over node direct", "syntax"),
        ("with aten", "reads out with aten", "unknown-name"),
        ("with aten", "reads q, k with aten", None),
        ("with aten", "reads with aten", None),
        ("S_kv to H", "replicated to H", None),
        ("along node\n", "along node direct prefetch 2 reverse\n", None),
        ("mask causal", "mask window 9", None),
        ("program", "program\x00", "not-text"),
        ("program", "program\r", "not-text"),
        ("program", "\u202eprogram", "not-text"),
        ("program", "#" * 70000 + "\nprogram", "too-large"),
    ],
)
def test_refused(old: str, new: str, slug: str | None) -> None:
    text = good()
    assert old in text
    changed = text.replace(old, new, 1)
    if slug is None:
        assert show(parse(changed)) == changed
        return
    with pytest.raises(UserError) as caught:
        parse(changed, "x")
    assert caught.value.slug == f"commir-{slug}", caught.value.render()
    assert caught.value.render().isprintable() or "\n" in caught.value.render()
    if slug not in ("too-large", "incomplete"):
        assert caught.value.span is not None


def test_never_another_error() -> None:
    """Cut, doubled and exchanged characters: parsed, or refused as a user's mistake."""
    print("seed", SEED)
    rng, texts = random.Random(SEED), [good(), *others()]
    for _ in range(3000):
        text = rng.choice(texts)
        at, size = rng.randrange(len(text)), rng.randrange(1, 9)
        piece = rng.choice(["", text[at : at + size] * 2, rng.choice(" ,=*[]#:\n\x00é٣_0S")])
        changed = text[:at] + piece + text[at + size :]
        try:
            both_ways(parse(changed))
        except UserError as error:
            assert error.slug.startswith("commir-")


@pytest.mark.parametrize(
    "text",
    [
        "program a\nmesh\ndtype float32\n" + "".join(f"axis a{i}=1\n" for i in range(4600)),
        "program a\nmesh\ndtype float32\naxis a=1\nmask full over " + "a, " * 20000,
        "program a\nmesh\ndtype float32\naxis a=1\nmask full over "
        + ", ".join(map(str, range(9999))),
        "\n" * 65000,
        "program " * 8000,
        "[" * 65000,
    ],
)
def test_large_is_fast(text: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(UserError):
        parse(text)
    assert time.perf_counter() - begin < 5
