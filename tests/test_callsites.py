"""The emitted text against its plan: every module passes, every altered one does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from math import prod

import pytest

from mercurygen.emit.callsites import Summary, check_text, sample
from mercurygen.emit.module import emit
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.operators import load
from mercurygen.schedule.apply import apply
from mercurygen.schedule.text import parse

SHIFT, GATHER = "shift k, v: S_kv along", "shard k, v: S_kv over"


def heads(dims: str) -> str:
    return f"parallelize H over {dims}\n"


def queries(dims: str, *stages: str) -> str:
    return "\n".join([f"parallelize S_q over {dims}", *stages, ""])


CASES = {
    "one": ("", ""),
    "ring": ("gpu=4", queries("gpu", f"{SHIFT} gpu")),
    "gather": ("gpu=4", queries("gpu", f"{GATHER} gpu")),
    "ulysses": ("gpu=4", heads("gpu")),
    "ulysses2": ("node=2 gpu=3", heads("node, gpu")),
    "unified": ("node=3 gpu=2", heads("gpu") + queries("node", f"{SHIFT} node")),
    "inverse": ("node=2 gpu=3", heads("node") + queries("gpu", f"{SHIFT} gpu")),
    "inverse gather": ("node=2 gpu=2", heads("node") + queries("gpu", f"{GATHER} gpu")),
    "double ring": ("node=2 gpu=3", queries("node, gpu", f"{SHIFT} node, gpu")),
    "outside in": ("node=3 gpu=2", queries("node, gpu", f"{SHIFT} gpu, node")),
    "walk gather": ("node=3 gpu=2", queries("node, gpu", f"{SHIFT} node", f"{GATHER} gpu")),
    "gather walk": ("node=2 gpu=3", queries("node, gpu", f"{GATHER} gpu", f"{SHIFT} node")),
    "gather gather": ("node=2 gpu=2", queries("node, gpu", f"{GATHER} gpu, node")),
    "walk gather walk": (
        "a=2 b=2 c=3",
        queries("a, b, c", f"{SHIFT} a", f"{GATHER} b", f"{SHIFT} c"),
    ),
    "three rings": ("a=2 b=2 c=2", queries("a, b, c", f"{SHIFT} a, b, c")),
    "walk and gathers": ("a=2 b=2 c=2", queries("a, b, c", f"{SHIFT} b", f"{GATHER} c, a")),
    "heads inside": ("a=3 b=2 c=2", heads("b") + queries("a, c", f"{SHIFT} a, c")),
    "heads around": ("a=2 b=3 c=2", heads("a, c") + queries("b", f"{SHIFT} b")),
}
KINDS = [(mask, order) for mask in ("causal", "full") for order in ("zigzag", "contiguous")]
TWO = (KINDS[::3], KINDS[1:3])  # both masks, both orders: of one case after the other


def module(
    mesh: str, body: str, mask: str, order: str, dtype: str = "bfloat16"
) -> tuple[str, Plan]:
    """Text and plan of a schedule."""
    sizes = dict(each.split("=") for each in mesh.split())
    over, ranks = ", ".join(sizes), prod(map(int, sizes.values()))
    links = " ".join(f"{each} NVLink 25GB/s" for each in mesh.split()) or "gpu=1 NVLink 25GB/s"
    where = f"order S: {order} over {over}\npin q, k, v, out, lse: S over {over}\n" if mesh else ""
    text = (
        "operator attention\n"
        f"problem batch=2 seq={ranks * 24} heads=24 kv_heads=12 head_dim=24 v_head_dim=40 "
        f"{dtype} {mask}\n"
        f"topology test sha256:0123456789abcdef {links}\ngroup {mesh or 'gpu=1'}\ntp 1\n"
        f"{f'mesh {mesh}' if mesh else 'mesh'}\n{where}{body}"
    )
    parsed = parse(text)
    plan = lower(apply(load("attention"), parsed.schedule, parsed.spans))
    assert isinstance(plan, Plan)
    return emit(parsed.schedule, plan, "test"), plan


def passes(case: str, mask: str, order: str, dtype: str = "bfloat16") -> Summary:
    return check_text(*module(*CASES[case], mask, order, dtype))


# --- what emit writes passes ----------------------------------------------------------------


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=CASES)
def test_emitted_modules_pass(number: int, case: str) -> None:
    for mask, order in TWO[number % 2]:
        summary = passes(case, mask, order)
        assert summary.ranks == tuple(range(summary.of))
        assert summary.events > 2 * summary.of


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_pass(dtype: str) -> None:
    for case in ("ring", "gather", "unified", "ulysses2"):
        passes(case, "causal", "zigzag", dtype)


def test_call_sites_are_counted() -> None:
    sites = passes("walk gather", "causal", "zigzag").sites
    assert Counter(sites["_shift"]) == {"P2POp": 2, "isend": 1, "irecv": 1, "batch_isend_irecv": 1}
    assert sites["_all_gather"] == ("all_gather_single", "all_gather_into_tensor")
    assert "attention" not in sites


def test_a_large_mesh_is_sampled() -> None:
    text, plan = module(
        "node=16 gpu=8", queries("node, gpu", f"{SHIFT} node, gpu"), "causal", "zigzag"
    )
    summary = check_text(text, plan)
    assert summary.of == 128
    assert {0, 1, 8, 9, 127} < set(summary.ranks) == set(sample(plan.program.mesh))


def test_another_plan_is_refused() -> None:
    text, _ = module(*CASES["walk gather"], "causal", "zigzag")
    for number, case in enumerate(("double ring", "outside in", "gather walk", "unified")):
        for mask, order in TWO[number % 2]:
            with pytest.raises(TextMismatch):
                check_text(text, module("node=3 gpu=2", CASES[case][1], mask, order)[1])


def test_restyled_text_passes() -> None:
    text, plan = module(*CASES["unified"], "causal", "zigzag")
    for old, new in (
        (r"\barriving\b", "transfer"),
        (r"\b_shift\b", "_start"),
        (r"import torch.distributed as dist", "import torch.distributed as td"),
        (r"\bdist\.", "td."),
        (
            r"from torch.distributed import DeviceMesh, P2POp",
            "from torch.distributed import DeviceMesh",
        ),
        (r"\bP2POp\(", "td.P2POp("),
        (r"\[\*recvs, \*sends\]", "sends + recvs"),
        (
            r"q\[:, rows\], keys\[:, cols\], values\[:, cols\], scale, ",
            "k=keys[:, cols], v=values[:, cols], q=q[:, rows], scale=scale, ",
        ),
    ):
        changed = re.sub(old, new, text)
        assert changed != text, old
        text = changed
    check_text(text, plan)


def test_records_are_understood() -> None:
    text, plan = module(*CASES["ring"], "full", "zigzag")
    for old, new in (
        (
            "return dist.batch_isend_irecv([*recvs, *sends])",
            "return _Sent(dist.batch_isend_irecv([*recvs, *sends]), into)",
        ),
        ("for work in works:", "for work in works.all():"),
        ("import sys\n", "import sys\nfrom typing import NamedTuple\n"),
        (
            "def _shift(",
            "class _Sent(NamedTuple):\n    works: list\n    into: tuple\n\n"
            "    def all(self):\n        return self.works\n\n\ndef _shift(",
        ),
    ):
        assert old in text
        text = text.replace(old, new)
    check_text(text, plan)
    with pytest.raises(TextMismatch, match="not understood"):
        check_text(text.replace("return self.works", "return self.work"), plan)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, test_callsites as t; t.passes('walk gather', 'causal', 'zigzag');"
        "assert not any(name.partition('.')[0] == 'torch' for name in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd="tests", env={"PYTHONPATH": "..:."}
    )


# --- altered modules do not -----------------------------------------------------------------

MUTATIONS = {  # what is altered, and how: each place on its own
    "peer": [
        (r"\(me - 1\) % size(?=\))", "(me + 1) % size"),
        (r"\(me \+ 1\) % size(?=\))", "(me - 1) % size"),
    ],
    "one further": [(r"\(me - 1\) % size(?=\))", "(me - 2) % size")],
    "owner": [(r"yield \(me - step\)", "yield (me + step)"), (r"yield \(me \+ 1\)", "yield (me)")],
    "direction": [("dist.irecv", "dist.isend"), ("dist.isend", "dist.irecv")],
    "no wait": [
        (r"work\.wait\(\)", "pass"),
        (r"for work in works", "for work in works[:1]"),
        (r"_finish_gather\(parts, works\)$", "tuple(parts)"),
        (r"_finish_gather\(parts, works\)$", "gathered"),
    ],
    "wait twice": [(r"work\.wait\(\)", "work.wait(), work.wait()")],
    "copy before the wait": [
        (
            r"( +)_wait\(works\)\n +return (tuple\(.*\))",
            r"\1done = \2\n\1_wait(works)\n\1return done",
        )
    ],
    "no overlap": [
        (r"( +)try:\n( +yield .*tiles\n)(.*\n)( +_wait\(works\)\n)", r"\1try:\n\4\3\2"),
        (r"( +yield (?:owner, )?gathered\n)( +.*gathered = .*\n)(?= +yield)", r"\2\1"),
    ],
    "k and v": [
        (r"\(k\.contiguous\(\), v\.contiguous\(\)\)", "(v.contiguous(), k.contiguous())"),
        (r"for x in into\]", "for x in reversed(into)]"),
        (r"for x in tiles\]\n    return dist", "for x in reversed(tiles)]\n    return dist"),
        (r"for into, x in zip\(parts, tiles,", "for into, x in zip(reversed(parts), tiles,"),
        (r"k, v = _gather", "v, k = _gather"),
        (r"\(k, v\) in tiles", "(v, k) in tiles"),
        (r"for k, v in tiles", "for v, k in tiles"),
        (r"(\(k, v\)|k, v) = next\(tiles\)", "(v, k) = next(tiles)"),
        (
            r"_block_forward\(q, k, v, scale, causal=(True|False)\)\n",
            r"_block_forward(q, v, k, scale, causal=\1)\n",
        ),
        (r"q, k, v = \(_sequence_to_heads", "q, v, k = (_sequence_to_heads"),
        (r"(_sequence_to_heads\(.* for x in )\(q, k, v\)", r"\1(q, v, k)"),
        (r"(_sequence_to_heads\(.* for x in )\(q, k, v\)", r"\1(k, k, v)"),
    ],
    "contiguous": [
        (r"k\.contiguous\(\)", "k"),
        (r"v\.contiguous\(\)", "v"),
        (r"parts = parts\.contiguous\(\)\n", "pass\n"),
    ],
    "steps": [
        (r"range\(size - 1\):", "range(size - 2):"),
        (r"range\(size - 1\):", "range(size):"),
        (r"range\(size - 1\):", "range(1, size - 1):"),
    ],
    "buffers": [
        (r"spare\[step % 2\]", "tiles"),
        (r"spare\[step % 2\]", "spare[0]"),
        (r"        tiles = arriving\n", ""),
        (r"works = _shift\(tiles, arriving", "works = _shift(arriving, tiles"),
        (r"_spare\(tiles, (\w+)", r"_spare(tiles[:1], \1"),
        (r"x\.shape\[0\], longer", "x.shape[0], 2 * longer"),
        (
            r"parts = \[x\.new_empty\(group\.size\(\), \*x\.shape\) for x in tiles\]",
            "parts = tiles",
        ),
        (
            r"(works = _start_gather\(tiles, )parts",
            r"\1[x.new_empty(group.size(), *x.shape) for x in tiles]",
        ),
        (r"received = torch\.empty_like\(parts\)", "received = parts"),
        (r"return received", "return parts"),
    ],
    "group": [
        (r"\bnode_group, gpu_group = \(mesh", "gpu_group, node_group = (mesh"),
        (r"\ba_group, b_group, c_group = \(mesh", "a_group, c_group, b_group = (mesh"),
        (r"for name in MESH\)\n\n", "for name in reversed(MESH))\n\n"),
        (r"(?<=[xtesn_], )gpu_group", "node_group"),
        (r"(?<=[xtesn_], )node_group", "gpu_group"),
        (r"(?<=_gpu, )gpu_group", "node_group"),
        (r"(?<=, v\)\), )node_group, gpu_group", "gpu_group, node_group"),
        (r"(?<=\)\), )gpu_group(?=\))", "node_group"),
        (r"(?<=\), )b_group(?=\))", "c_group"),
        (r"group=group(?=, group_peer)", "group=mesh"),
    ],
    "dropped": [
        (r"\*recvs, \*sends", "*sends"),
        (r"\*recvs, \*sends", "*recvs"),
        (r"\*recvs, \*sends", "*recvs, *sends[1:]"),
        (r"( +)dist\.all_to_all_single\(.*", r"\1pass"),
        (r"( +)q, k, v = \(_sequence_to_heads.*\n", ""),
        (r"( +)(out|lse) = _heads_to_sequence.*\n", ""),
        (r"(?s)_merge\(\s*(?=out\[)", "("),
        (r"out\.to\(q\.dtype\), lse", "out.to(q.dtype), q"),
        (r"    out = out\.to\(lse\.dtype\)\n", ""),
        (r"return out\.to\(q\.dtype\)", "return out"),
    ],
    "twice": [
        (r"\*recvs, \*sends", "*recvs, *sends, *sends"),
        (r"( +works = _shift.*\n)", r"\1\1"),
        (r"(    dist\.all_to_all_single\(.*\n)", r"\1\1"),
        (r"(    +out = _heads_to_sequence.*\n)", r"\1\1"),
        (r"( +)(_merge\(out, lse, .*)", r"\1\2\n\1\2"),
        (r"( +works = _start_gather.*\n)", r"\1\1"),
    ],
    "extra": [
        (r"(    out, lse = _(?:attend|block).*\n)", r"\1    dist.barrier()\n"),
        (r"(    size, me = group.*\n)", r"\1    dist.broadcast(size, 0)\n"),
        (r"(    received = torch.*\n)", r"\1    dist.all_reduce(parts, group=group)\n"),
        (r"(    v_dim = v.*\n)", r"\1    dist.barrier()\n"),
        (r"(    weight = torch.*\n)", r"\1    dist.all_reduce(lse)\n"),
        (r"(    shapes = f.*\n)", r"\1    dist.barrier()\n"),
        (r"(    shapes = f.*\n)", r"\1    _from_all_ranks(q, mesh)\n"),
        (r"(    size, me = group.*\n)", r"\1    if size > 99:\n        dist.barrier()\n"),
        (r"(    size, me = group.*\n)", r"\1    group.barrier()\n"),
        (r"(    size, me = group.*\n)", r"\1    if size > 99:\n        group.barrier()\n"),
        (r"\Z", "\n\ndef _more(x):\n    dist.all_reduce(x)\n"),
        (r"\Z", "\n\nattention = None\n"),
        (r"\Z", "\n\ndist.init_process_group()\n"),
    ],
    "collective": [
        (r"dist\.all_to_all_single\(received, parts", "dist.all_to_all_single(parts, received"),
        (r"dist\.all_to_all_single", "dist.all_gather_into_tensor"),
        (r"(dist\.all_to_all_single\(.*)\)", r"\1, async_op=True)"),
        (r'"all_gather_single"', '"all_reduce"'),
        (r"dist\.all_gather_into_tensor", "dist.all_to_all_single"),
        (r"gather\(parts\.flatten\(0, 1\), x", "gather(x, parts.flatten(0, 1)"),
        (r"x, group=group, async_op=True", "x, group=group"),
    ],
    "kernel": [
        (r"slice\(0, seq // 2\)", "slice(seq // 2, None)"),
        (r"slice\(0, seq // 2\)", "slice(None)"),
        (r"slice\(0, seq // 2\)", "slice(0, seq // 3)"),
        (r"slice\(seq // 2, None\), ", "slice(0, seq // 2), "),
        (r"if owner < me", "if owner > me"),
        (r"if owner < me", "if owner <= me + 1"),
        (r"causal=False\)\)", "causal=True))"),
        (r"scale, causal\)", "scale, not causal)"),
        (r"(_block_forward\(q, k, v, scale, causal=)True", r"\1False"),
        (r"(out, lse = _block_forward\(.*causal=)False", r"\1True"),
        (r"\[\*early, \*late\]|\[\*ranks, .*\]$", "ranks"),
        (r"(?<=_chunks\()\[gpu_group\.rank\(\)\]", "[0]"),
        (r"before \* size\), False", "before * size), True"),
        (r"len\(rest\)\) \* size\), True", "len(rest)) * size), False"),
        (r"yield span, slice\(0, before", "yield span, slice(0, (before + 1)"),
        (r"out\[:, rows\],", "out,"),
        (r"lse\[:, :, rows\],", "lse,"),
        (r"q\[:, rows\]", "q"),
        (r"keys\[:, cols\], values\[:, cols\]", "keys[:, cols], values[:, rows]"),
        (r"-torch\.inf, dtype", "0.0, dtype"),
        (r"\*\* -0\.5 if scale is None else scale", "** -0.5"),
        (r"    lse = q\.new_full", "    lse = q.new_empty"),
        (r"\bq\.new_zeros", "q.new_empty"),
        (r"\* MESH\[\"\w+\"\] \+", "* 1 +"),
    ],
}
MUTATED = [
    ("ring", "causal", "zigzag"),
    ("ring", "causal", "contiguous"),
    ("gather", "causal", "zigzag"),
    ("ulysses2", "causal", "zigzag"),
    ("unified", "causal", "zigzag"),
    ("walk gather walk", "causal", "zigzag"),
    ("heads around", "full", "zigzag"),
]


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Each altered text, and how it was altered."""
    gathers = "_start_gather" in text  # else `_all_gather` is for the layout helpers only
    parts = ("def attention(", "# --- layout"), ("def _all_gather", "# --- self-check")
    places = [range(*map(text.index, part)) for part in parts]
    if not gathers:
        places[1] = range(text.index("def _rank"), places[1].stop)
    for kind, changes in MUTATIONS.items():
        for old, new in changes:
            for match in re.finditer(old, text, re.MULTILINE):
                if match.start() < len(text) and not any(match.start() in x for x in places):
                    continue
                changed = text[: match.start()] + match.expand(new) + text[match.end() :]
                if changed != text:
                    line = text.count("\n", 0, match.start()) + 1
                    yield kind, f"{old} -> {new} (line {line})", changed


def test_altered_modules_are_refused() -> None:
    caught: Counter[str] = Counter()
    passed = []
    for case, mask, order in MUTATED:
        text, plan = module(*CASES[case], mask, order)
        for kind, words, changed in mutants(text):
            try:
                check_text(changed, plan)
            except TextMismatch as mismatch:
                assert mismatch.line > 0 and mismatch.function and mismatch.words
                caught[kind] += 1
            else:
                passed.append((case, mask, order, kind, words))
    print(f"\n{caught.total()} mutants caught: {dict(caught)}")
    assert not passed, "\n".join(map(str, passed))
    assert caught.total() > 100 and caught.keys() == MUTATIONS.keys()
