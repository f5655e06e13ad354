"""Modules on virtual ranks: those emitted pass, and what is wrong is found, with check and line.

Most of the planted bugs pass on real gloo processes, or hang there without a word.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import mutate
import numeric_cases
import pytest
import torch
from command import ROOT, run
from emitted import ATTENTION, Emitted, instances, one, written
from equivalent import acting_functions, reason

from mercurygen.cli import virtual
from mercurygen.cli.read import load
from mercurygen.errors import UserError
from mercurygen.virtual.report import Played, VirtualError
from mercurygen.virtual.run import play

torch.set_num_threads(1)

GENERATED = sorted((ROOT / "generated").glob("*.py"))


@cache
def module(
    name: str, sizes: tuple[int, ...], order: str = "zigzag", causal: bool = True
) -> Emitted:
    """A named design; its sizes do not matter."""
    problem = numeric_cases.Problem(3840, 16, 8, causal=causal, order=order)
    return one(name, sizes, problem)


RING = "ring", (4,)
DOUBLE, UNIFIED = ("double-ring", (2, 3)), ("unified", (2, 2))
GATHER, ULYSSES = ("allgather-kv", (4,)), ("ulysses", (4,))


def played(emitted: Emitted, text: str | None = None) -> Played:
    """A module, edited or not, on virtual ranks."""
    return play(text or emitted.text, emitted.schedule, ATTENTION, "edited.py")


def found(case: tuple, *edits: tuple[str, str]) -> tuple[VirtualError, str]:
    """What is wrong with an edited module, and the line where."""
    emitted, text = module(*case), module(*case).text
    for old, new in edits:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    with pytest.raises(VirtualError) as caught:
        played(emitted, text)
    error = caught.value
    print(error)
    assert error.message.isprintable()
    return error, text.splitlines()[error.where.line - 1] if error.where.line else ""


# --- what is right passes -------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_generated(path: Path) -> None:
    """Every module of the repository, with another number of operations at most by design."""
    loaded = load(path)
    ran = play(loaded.module, loaded.schedule, ATTENTION, path.name)
    assert ran.ranks == loaded.schedule.mesh.size and ran.operations and ran.error <= 1e-12


@pytest.mark.parametrize("case", [("unified", (8, 8)), ("allgather-kv", (8, 8))])
def test_many_ranks(case: tuple) -> None:
    """64 in one process."""
    assert played(module(*case)).ranks == 64


def test_other_schedules() -> None:
    """One rank; gathers inside walks; no mask; token order as it is."""
    alone = next(instances(None, (1,), numeric_cases.Problem(480, 12, 6, order="contiguous")))
    assert played(alone).operations == 0
    shift, gather = "shift k, v: S_kv along", "shard k, v: S_kv over"
    for order, causal in (("zigzag", True), ("contiguous", False), ("contiguous", True)):
        problem = numeric_cases.Problem(480, 12, 6, order=order, causal=causal)
        for body in (f"{shift} node\n{gather} gpu", f"{gather} gpu\n{shift} node"):
            made = written("node=2 gpu=3", f"parallelize S_q over node, gpu\n{body}\n", problem)
            assert played(made).ranks == 6


def test_restyled_text_passes() -> None:
    """Other names, layout, comments and imports: only behaviour counts."""
    import black

    text = module(*UNIFIED).text
    for old, new in (
        (r"\barriving\b", "transfer"),
        (r"\b_shift\b", "_start"),
        (r"import torch.distributed as dist\n", "import torch.distributed\n"),
        (r"\bdist(?=[.,])", "torch.distributed"),
        (r"P2POp\n", "P2POp as Message\n"),
        (r"\bP2POp\(", "Message("),
        (r"(\n +)(works = )", r"\1# on its way\1\2"),
        (r"\b_block_forward\b", "_block"),
    ):
        assert re.search(old, text), old
        text = re.sub(old, new, text)
    played(module(*UNIFIED), black.format_str(text, mode=black.Mode(line_length=70)))


def test_the_real_torch_distributed_is_left_alone() -> None:
    """Nobody else's import finds the double, during the run or after it."""
    import sys

    import torch.distributed as dist

    before = dist.all_reduce, sys.modules["torch.distributed"], torch.distributed
    old = "    _check(q, k, v, mesh, seq)\n"
    edit = old + "    assert sys.modules['torch.distributed'].all_reduce is not dist.all_reduce\n"
    text = module(*RING).text
    assert text.count(old) == 1
    played(module(*RING), text.replace(old, edit))
    assert before == (dist.all_reduce, sys.modules["torch.distributed"], torch.distributed)
    assert not dist.is_initialized()


# --- planted bugs ---------------------------------------------------------------------------

BATCH = "return dist.batch_isend_irecv([*recvs, *sends])"
SHIFT = "            _wait(works)\n"
MERGED = "*_block_forward(q[:, rows], keys[:, cols], values[:, cols], scale, causal=False)"
YIELD = "            yield (me - step) % size, tiles\n"
ALL_TO_ALL = "    dist.all_to_all_single(received, parts, group=group)\n"
GATHERED = "return gather(parts.flatten(0, 1), x, group=group, async_op=True)"
PLANTED = {
    # what: module, edits, check, a part of the line, words of the message
    "no wait for messages": (
        RING,
        [(SHIFT, "            pass\n")],
        "in-flight-read",
        "batch_isend_irecv",
        "being received",
    ),
    "no wait for a collective": (
        ULYSSES,
        [(ALL_TO_ALL, ALL_TO_ALL.replace("group=group", "group=group, async_op=True"))],
        "in-flight-read",
        "torch.cat",
        "being received",
    ),
    "only the last is not waited for": (
        RING,
        [(SHIFT, "            if step < size - 2:\n                _wait(works)\n")],
        "in-flight-read",
        "",
        "being received",
    ),
    "one of several handles": (
        RING,
        [("    for work in works:\n", "    for work in works[:1]:\n")],
        "in-flight-read",
        "batch_isend_irecv",
        "into[1]",
    ),
    "read while it arrives": (
        RING,
        [(YIELD, "            arriving[0].sum()\n" + YIELD)],
        "in-flight-read",
        "arriving[0].sum()",
        "`into[0]` which is being received",
    ),
    "written while it is sent": (
        RING,
        [(YIELD, "            tiles[0].mul_(1)\n" + YIELD)],
        "in-flight-write",
        "tiles[0].mul_(1)",
        "which is being sent",
    ),
    "written behind torch's back": (
        RING,
        [
            (YIELD, "            tiles[0].detach().numpy()[0, 0] = 5\n" + YIELD),
        ],
        "in-flight-write",
        "work.wait()",
        "was written while it was being sent",
    ),
    "sent from where it arrives": (
        RING,
        [("arriving = spare[step % 2]", "arriving = tiles")],
        "in-flight-write",
        "batch_isend_irecv",
        "is being sent",
    ),
    "sends before receives, unbatched": (
        RING,
        [
            (
                BATCH,
                "return [*(dist.isend(x, group=group, group_dst=(me + 1) % size) for x in tiles),\n"
                "        *(dist.irecv(x, group=group, group_src=(me - 1) % size) for x in into)]",
            )
        ],
        "deadlock",
        "work.wait()",
        "closes the circle",
    ),
    "a log-sum-exp that is not dense": (
        RING,
        [
            (
                "return out.transpose(1, 2)[..., :v_dim], lse",
                "return out.transpose(1, 2)[..., :v_dim], torch.stack((lse, lse), -1)[..., 0]",
            )
        ],
        "not-contiguous",
        "torch.stack((lse, lse)",
        "lse that `_block_forward` returns",
    ),
    "another peer": (
        RING,
        [("group_peer=(me - 1) % size", "group_peer=(me + 1) % size")],
        "deadlock",
        "work.wait()",
        "send to rank",
    ),
    "another peer on both sides": (
        RING,
        [
            ("group_peer=(me - 1) % size", "group_peer=(me + 1) % size "),
            ("group_peer=(me + 1) % size)", "group_peer=(me - 1) % size)"),
        ],
        "calls",
        "batch_isend_irecv",
        "the plan has: batch along gpu",
    ),
    "to itself": (
        RING,
        [("group_peer=(me + 1) % size", "group_peer=me")],
        "order",
        "batch_isend_irecv",
        "to itself",
    ),
    "another group": (
        ("unified", (4, 2)),
        [
            (
                "    tiles = _walk_ring((k, v), node)",
                "    tiles = _walk_ring((k, v), dist.group.WORLD)",
            )
        ],
        "calls",
        "batch_isend_irecv",
        "batch along all ranks",
    ),
    "collectives of one rank in another order": (
        ULYSSES,
        [
            (
                "    q, k, v = (_sequence_to_heads(x, gpu) for x in (q, k, v))",
                "    early = k if gpu.rank() == 2 else q\n"
                "    _sequence_to_heads(early, gpu)\n"
                "    q, k, v = (_sequence_to_heads(x, gpu) for x in (q, k, v))",
            )
        ],
        "order",
        "all_to_all_single",
        "but on rank",
    ),
    "a merge too many": (
        RING,
        [
            (
                "        _merge(\n",
                "        _merge(out, lse, out.clone() * 2, lse.clone())\n        _merge(\n",
            )
        ],
        "result",
        "",
        "out is off by",
    ),
    "not merged": (
        RING,
        [("    out.lerp_(share_out.to(out.dtype), weight)\n", "")],
        "result",
        "",
        "out is off by",
    ),
    "another case of the mask": (
        RING,
        [("    if owner < me:", "    if owner > me:")],
        "result",
        "",
        "is off by",
    ),
    "a causal block that is no square": (
        RING,
        [("values[:, cols], scale, causal=False)", "values[:, cols], scale, causal=True)")],
        "misuse",
        "op(q, k, v",
        "causal for",
    ),
    "not contiguous": (
        RING,
        [("(k.contiguous(), v.contiguous())", "(k, v)")],
        "not-contiguous",
        "batch_isend_irecv",
        "of a receive is not contiguous",
    ),
    "a tile further": (
        RING,
        [("yield (me - step) % size, tiles", "yield (me - step - 1) % size, tiles")],
        "result",
        "",
        "is off by",
    ),
    "a send left over": (
        RING,
        [
            (
                "    yield (me + 1) % size, tiles",
                "    _shift(tiles, spare[0], group)\n    yield me, tiles",
            )
        ],
        "in-flight-",
        "",
        "being",
    ),
    "a send that nobody waits for": (
        RING,
        [
            (
                "    return out.to(q.dtype), lse\n",
                "    dist.isend(lse.contiguous(), group=gpu, group_dst=(gpu.rank() + 1) % 4)\n"
                "    return out.to(q.dtype), lse\n",
            )
        ],
        "not-waited",
        "dist.isend(lse.contiguous()",
        "nobody waited for the send of",
    ),
    "the first message of some members": (
        RING,
        [
            (
                "    tiles = _walk_ring(",
                "    if gpu.rank() < 2:\n"
                "        way = dist.isend if gpu.rank() else dist.irecv\n"
                "        way(q.clone(), 1 - gpu.rank(), gpu).wait()\n"
                "    tiles = _walk_ring(",
            )
        ],
        "calls",
        "",
        "batch along gpu",
    ),
    "a group that only some use": (
        RING,
        [
            (
                "    tiles = _walk_ring(",
                "    if gpu.rank() < 2:\n"
                "        way = dist.isend if gpu.rank() else dist.irecv\n"
                "        way(q.clone(), 1 - gpu.rank()).wait()\n"
                "    tiles = _walk_ring(",
            )
        ],
        "deadlock",
        "way(q.clone()",
        "the first on the communicator of all ranks, where all its members must come",
    ),
    "a kernel with an exception": (
        RING,
        [
            (
                "    v_dim = v.shape[3]\n",
                "    v_dim = v.shape[3] // (torch.tensor(q.shape[1]) - 3).item()\n",
            )
        ],
        "module-error",
        "v_dim = v.shape[3] //",
        "ZeroDivisionError",
    ),
    "an exception on one rank": (
        RING,
        [
            (
                "    size, me = group.size(), group.rank()\n    spare",
                "    size, me = group.size(), group.rank()\n    [][me - 3 or 9]\n    spare",
            )
        ],
        "module-error",
        "[][me - 3 or 9]",
        "IndexError",
    ),
    "a function without a double": (
        RING,
        [("    tiles = _walk_ring(", "    dist.all_gather_object([], 1)\n    tiles = _walk_ring(")],
        "not-doubled",
        "dist.all_gather_object([], 1)",
        "`torch.distributed.all_gather_object` has no stand-in",
    ),
    "accumulated in 16 bits": (
        RING,
        [("    out = out.to(lse.dtype)\n", "")],
        "precision",
        "out.lerp_",
        "adds to a tensor of torch.bfloat16",
    ),
    "the caller's tensors are used": (
        RING,
        [("    tiles = _walk_ring(", "    q.add_(1)\n    tiles = _walk_ring(")],
        "inputs",
        "",
        "changes its input q",
    ),
    "no end": (
        RING,
        [("    tiles = _walk_ring(", "    while True:\n        q.sum()\n    tiles = _walk_ring(")],
        "endless",
        "q.sum()",
        "does not end",
    ),
    "groups named by unlike counts": (
        RING,
        [("    _level_group_count(group, device_type)\n", "")],
        "deadlock",
        "dist.new_group",
        "makes the group of ranks",
    ),
    "groups in ascending order": (
        DOUBLE,
        [
            (
                "ranks = torch.tensor(dist.get_process_group_ranks(group)).view",
                "ranks = torch.tensor(dist.get_process_group_ranks(group)[::-1]).view",
            )
        ],
        "layout",
        "",
        "make_mesh gives",
    ),
    "other tokens": (
        RING,
        [("chunks[-1 - rank]", "chunks[-2 - rank]")],
        "layout",
        "",
        "`shard` of q gives another part",
    ),
    "other tokens, all there": (
        ("ring", (4,), "contiguous"),
        [("chunks[rank]", "chunks[-1 - rank]")],
        "layout",
        "",
        "another part than the pins say",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str) -> None:
    """Found by the right check, with the line."""
    case, edits, check, line, words = PLANTED[name]
    error, shown = found(case, *edits)
    assert error.check.startswith(check) and words in error.message and line in shown, error


# --- systematic edits -----------------------------------------------------------------------

# Refusals and self-checks are not run in a legal call, and meshes are tested on real groups
# (test_groups.py, and above).
ASIDE = {"_check", "check_inputs", "pad_sequence", "_reference", "_error", "_blind", "_self_check"}
ASIDE |= {"_autocast", "make_mesh", "_level_group_count", "_new_group"}
PLANES = {"_rank", "_from_all_ranks", "shard", "unshard"}  # need two dimensions to go wrong
EDITED = [RING, DOUBLE, (*ULYSSES, "contiguous"), GATHER, UNIFIED]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_systematic_edits_are_found() -> None:
    """At least 500 that may change behaviour, each found; the others are judged by a rule."""
    checks: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    same: Counter[str] = Counter()
    known: set[str] = set()
    passed = []
    for case in EDITED:
        emitted = module(*case)
        acting = acting_functions(emitted.text)
        aside = ASIDE | (PLANES if len(case[1]) == 1 else set())
        for mutant in mutate.mutants(emitted.text, aside, known):
            if why := reason(mutant, acting):
                same[why] += 1
                continue
            kinds[mutant.kind] += 1
            try:
                played(emitted, mutant.text)
            except VirtualError as error:
                checks[error.check] += 1
            else:
                passed.append(f"{case}: {mutant}")
    print(f"\n{checks.total()} edits found: {dict(checks)}\nby kind: {dict(kinds)}")
    print(f"{same.total()} change nothing: {dict(same)}")
    assert not passed, "\n".join(passed)
    assert checks.total() >= 500


# --- the command line -----------------------------------------------------------------------


def task(text: str) -> virtual.Task:
    """A ring with another text."""
    return virtual.Task(text, module(*RING).schedule, ATTENTION, "edited.py")


def test_a_failure_has_its_line() -> None:
    """One readable error, from a process of its own."""
    text = module(*RING).text.replace(SHIFT, "            pass\n")
    with pytest.raises(UserError) as caught:
        virtual.run(task(text), 60)
    shown = caught.value.render()
    assert shown.startswith("error[in-flight-read]: virtual rank "), shown
    assert (
        "return dist.batch_isend_irecv([*recvs, *sends])\n" in shown and "--> edited.py:" in shown
    )
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("line", "slug", "words"),
    [
        ("while True: pass", "endless", "did not end within 2 s"),
        ("import os; os._exit(3)", "module-error", "the process died"),
        ("raise SystemExit(3)", "module-error", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "module-error", "KeyboardInterrupt"),
        ("def f(): f()\n    f()", "module-error", "RecursionError"),
        ("import torch.distributed.rpc", "not-doubled", "`torch.distributed.rpc`"),
    ],
)
def test_hostile_modules(line: str, slug: str, words: str) -> None:
    """Each ends soon, in words."""
    old = "    _check(q, k, v, mesh, seq)\n"
    text = module(*RING).text.replace(old, f"{old}    {line}\n")
    with pytest.raises(UserError) as caught:
        virtual.run(task(text), 2)
    assert caught.value.slug == slug and words in caught.value.message, caught.value.render()


def test_verify_says_what_ran() -> None:
    """Also of a schedule, whose module is made for it."""
    out = run("verify", "--no-run", ROOT / "generated" / "attention_gqa_causal_h100x8.sched").done()
    assert re.search(r"virtual +8 virtual ranks: 3 calls, 112 operations, each the plan's", out)


def test_more_ranks_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and goes on."""
    monkeypatch.setattr("mercurygen.virtual.run.MOST_RANKS", 4)
    out = run("verify", "--no-run", ROOT / "generated" / "attention_gqa_causal_h100x8.py").done()
    assert re.search(r"virtual +not run: 8 ranks are more than 4\n", out)
