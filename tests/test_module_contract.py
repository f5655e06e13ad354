"""What users rely on in an emitted module: helpers, refusals, modes, dtypes and its self-check."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import DESIGNS, Emitted, instances, one
from numeric_cases import (
    Problem,
    assert_close,
    assert_refused,
    check_check_inputs,
    check_forward,
    check_layout,
    check_no_backward,
    check_refusals,
    check_single,
    check_views,
    load_module,
    own_inputs,
    recorded,
    setup,
)
from ranks import Ranks

SIZES = {
    "ring": (3,),
    "allgather-kv": (2, 2),
    "ulysses": (2,),
    "unified": (2, 2),
    "double-ring": (2, 2),
    "unified-double-ring": (2, 2, 2),
}
RANKS = {world: Ranks(world) for world in (2, 3, 4, 8)}
ALL: dict[str, tuple[Emitted, Problem]] = {}
for _name in DESIGNS:
    for _causal, _order in ((True, "zigzag"), (False, "contiguous")):
        _world = prod(SIZES[_name])
        _batch = 2 if _world == 3 else 3
        _problem = Problem(
            seq=20 * _world, batch=_batch, value_dim=36, causal=_causal, order=_order
        )
        _mask = "causal" if _causal else "full"
        ALL[f"{_name} {_mask}"] = one(_name, SIZES[_name], _problem), _problem


def add(check: Any, *args: Any) -> None:
    """The check of every design, under both masks."""
    for name, (emitted, problem) in ALL.items():
        case = f"{check.__name__} {name} {args}"
        RANKS[emitted.world].add(case, check, emitted.late, problem, *args)


def result(check: Any, name: str, *args: Any) -> list[Any]:
    """What it gave on every rank."""
    return RANKS[ALL[name][0].world].result(f"{check.__name__} {name} {args}")


def check_helpers(rank: int, world: int, text: str, problem: Problem) -> None:
    """`pad_sequence` goes to the next legal length; tokens of a rank come back in place."""
    module, mesh = setup(text)
    assert hasattr(module, "pad_sequence") == problem.causal
    assert module.positions(problem.seq, mesh).numel() * world == problem.seq
    assert prod(module.MESH.values()) == module.WORLD_SIZE == world
    if not problem.causal:
        return
    multiple = 2 * world
    for length in (1, multiple - 1, multiple, multiple + 1):
        x = torch.arange(1.0, 1 + 2 * length).view(2, length)
        padded = module.pad_sequence(x)
        assert padded.shape == (2, -(-length // multiple) * multiple)
        assert torch.equal(padded[:, :length], x) and not padded[:, length:].any()
        assert torch.equal(module.pad_sequence(x.T, dim=0).T, padded)
        assert torch.equal(module.pad_sequence(x, dim=-1, value=-100) == -100, padded == 0)
        assert module.shard_sequence(padded, mesh).shape[1] * world == padded.shape[1]
    q, k, v = (x[:, :-3] for x in problem.inputs(torch.float64))
    short = [module.shard_sequence(module.pad_sequence(x), mesh) for x in (q, k, v)]
    whole = [
        module.shard(n, x, mesh) for n, x in zip("qkv", problem.inputs(torch.float64), strict=True)
    ]
    outs = [module.unshard("out", module.attention(*x, mesh), mesh) for x in (short, whole)]
    assert_close(outs[0][:, :-3], outs[1][:, :-3], 1e-12, "padded", problem)


def check_more_refusals(rank: int, world: int, text: str, problem: Problem) -> None:
    """Devices, empty tensors, other numbers of dimensions, and a length that does not match."""
    module, mesh = setup(text)
    q, k, v = own_inputs(module, mesh, problem, torch.float32)
    bad = {
        "k on meta": ((q, k.to("meta"), v), None, ("k on", "meta", "cpu")),
        "q on meta": ((q.to("meta"), k, v), None, ("q is on meta", "cpu")),
        "no tokens": ((q[:, :0], k[:, :0], v[:, :0]), None, ("0",)),
        "no batch": ((q[:0], k[:0], v[:0]), None, ("0",)),
        "five dimensions": ((q[None], k[None], v[None]), None, ("[B, S, H, D]",)),
        "complex": (tuple(x.to(torch.complex64) for x in (q, k, v)), None, ("complex64",)),
        "seq of a rank": ((q, k, v), q.shape[1], (str(q.shape[1]),)),
        "seq of one more": ((q, k, v), problem.seq + 1, (str(problem.seq + 1), str(world))),
    }
    for name, (inputs, seq, words) in bad.items():
        with recorded(module) as calls:
            message = assert_refused(
                lambda x=inputs, s=seq: module.attention(*x, mesh, seq=s), *words
            )
        assert not calls, f"{name}: {message} only after {calls}"
    got = module.attention(q, k, v, mesh, seq=problem.seq)
    assert got.shape == (*q.shape[:3], v.shape[3])


def check_modes(rank: int, world: int, text: str, problem: Problem) -> None:
    """inference mode and no_grad give what plain inputs give, without a gradient."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    plain = module.attention(*local, mesh, return_lse=True)
    wanting = [x.clone().requires_grad_() for x in local]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for inputs in (local, wanting):
                got = module.attention(*inputs, mesh, return_lse=True)
                assert all(torch.equal(x, y) for x, y in zip(got, plain, strict=True))
                assert not any(x.requires_grad for x in got)
    for inputs in (wanting, [wanting[0], *local[1:]]):
        with recorded(module) as calls:
            assert_refused(
                lambda x=inputs: module.attention(*x, mesh),
                "emitted without backward",
                error=RuntimeError,
            )
        assert not calls, calls


def check_failed_kernel(rank: int, world: int, text: str, problem: Problem) -> None:
    """A kernel that fails on all ranks leaves nothing in flight: the next call is right."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    want, kernel = module.attention(*local, mesh), module._block_forward

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    module._block_forward = fails
    try:
        with pytest.raises(MemoryError):
            module.attention(*local, mesh)
    finally:
        module._block_forward = kernel
    assert torch.equal(module.attention(*local, mesh), want)


CHECKS = [
    (check_failed_kernel,),
    (check_layout,),
    (check_helpers,),
    (check_refusals,),
    (check_more_refusals,),
    (check_check_inputs,),
    (check_no_backward,),
    (check_modes,),
    (check_forward, torch.float16),
    (check_forward, torch.bfloat16),
    (check_views, torch.float32),
]
for _check in CHECKS:
    add(*_check)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: " ".join([c[0].__name__, *map(str, c[1:])]))
def test_contract(name: str, check: tuple[Any, ...]) -> None:
    """What each check says, of every design."""
    result(check[0], name, *check[1:])


# --- modules beside each other, and alone ---------------------------------------------------


def check_two(rank: int, world: int, first: str, second: str, problem: Problem) -> None:
    """Calls of two modules in turn, each on its own mesh."""
    modules = [load_module(text, f"emitted_{n}") for n, text in enumerate((first, second))]
    meshes = [module.make_mesh() for module in modules]
    local = own_inputs(modules[0], meshes[0], problem, torch.float64)
    once = [m.attention(*local, mesh) for m, mesh in zip(modules, meshes, strict=True)]
    assert_close(*once, 1e-12, "two schedules", problem)
    for _ in range(3):
        for module, mesh, want in zip(modules, meshes, once, strict=True):
            assert torch.equal(module.attention(*local, mesh), want)


PAIR = Problem(seq=80, batch=3, value_dim=36)
PAIRS = [("ring", "ulysses"), ("unified", "double-ring"), ("allgather-kv", "unified")]
for _one, _other in PAIRS:
    _texts = [
        one(n, (2, 2) if n in ("unified", "double-ring") else (4,), PAIR).late
        for n in (_one, _other)
    ]
    RANKS[4].add(f"{_one} and {_other}", check_two, *_texts, PAIR)


@pytest.mark.parametrize("first, second", PAIRS)
def test_two_modules_in_one_process(first: str, second: str) -> None:
    """They share no state, and their groups do not meet."""
    RANKS[4].result(f"{first} and {second}")


ALONE = Problem(seq=21, batch=3, value_dim=36, order="contiguous")


@pytest.mark.parametrize("causal", [True, False])
def test_one_rank(causal: bool) -> None:
    """mesh=None; the helpers hand back what they get; refusals as on many ranks."""
    problem = replace(ALONE, causal=causal)
    found = next(x for x in instances(None, (1,), problem) if isinstance(x, Emitted))
    for dtype in (torch.float64, torch.float32, torch.float16):
        check_single(found.text, problem, dtype)
    check_layout(0, 1, found.text, problem)
    check_refusals(0, 1, found.text, problem)
    check_modes(0, 1, found.text, problem)
    check_views(0, 1, found.text, problem, torch.float32)
    assert _self_check(found.text, 1)[0] == [0]


# --- the self-check -------------------------------------------------------------------------


def _run_as_main(rank: int, world: int, port: int, text: str, output: Any) -> None:
    """What torchrun would start, in a fork that has torch already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    said, code = io.StringIO(), 99
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            exec(compile(text, "NAME.py", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            print(repr(error))
    output.send((code, said.getvalue()))


def _self_check(text: str, world: int, timeout: float = 40) -> tuple[list[int], str]:
    """Exit code of every rank, 98 if it hangs, and what rank 0 printed."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        args = (rank, world, port, text, theirs)
        processes.append(context.Process(target=_run_as_main, args=args, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        answers = [p.recv() if p.poll(timeout) else (98, "hangs") for p in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [code for code, _ in answers], answers[0][1]


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("ring", (2,)),
        ("ulysses", (2,)),
        ("ring", (4,)),
        ("allgather-kv", (4,)),
        ("unified", (2, 2)),
        ("double-ring", (2, 2)),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_self_check(name: str, sizes: tuple[int, ...], causal: bool) -> None:
    """Started as torchrun would, it says how many checks ran and the largest error."""
    world = prod(sizes)
    order = "zigzag" if causal else "contiguous"
    text = one(name, sizes, Problem(seq=20 * world, causal=causal, order=order)).text
    codes, said = _self_check(text, world)
    assert codes == [0] * world, said
    checks, ranks = re.findall(r"\d+", said)[:2]
    assert (int(checks), int(ranks)) == (3 + world, world) and "largest error" in said, said


def test_self_check_under_torchrun(tmp_path: Path) -> None:
    """The real thing, from another folder, with nothing of this project on the path."""
    module = tmp_path / "attention_2.py"
    module.write_text(one("ring", (2,), Problem(seq=40)).text)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env.pop("PYTHONPATH", None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*run, "--master-addr", "127.0.0.1", "--master-port", str(port), str(module)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"5 checks on .*2 ranks.*largest error", done.stdout), done.stdout


SABOTAGE = {  # design, ranks, what is replaced, by what
    "peers swapped": ("ring", 4, r"\(me ([-+]) 1\) % size\)", None),
    "merge dropped": ("ring", 4, r"    out\.lerp_\(.*\n", "    pass\n"),
    "lse not merged": ("ring", 4, r"    torch\.logaddexp\(.*\n", ""),
    "own tile only": ("ring", 4, r"        tiles = arriving\n", ""),
    "mask the other way": ("ring", 4, r"if owner < me:", "if owner > me:"),
    "another owner": ("ring", 4, r"yield \(me - step\) % size", "yield (me + step) % size"),
    "diagonal forgotten": ("ring", 4, r"scale, causal=True\)", "scale, causal=False)"),
    "late chunks in order": ("ulysses", 4, r"reversed\(late\.unbind\(\)\)", "late.unbind()"),
    "no all-to-all": (
        "ulysses",
        4,
        r"    dist\.all_to_all_single\(.*\n",
        "    received.copy_(parts)\n",
    ),
    "scale forgotten": ("ulysses", 4, r"q\.shape\[3\] \*\* -0\.5 if scale", "1.0 if scale"),
    "slices in another order": ("allgather-kv", 4, r"\*early\.un", "*early.flip(0).un"),
}


def sabotaged(text: str, pattern: str, by: str | None) -> str:
    """The text with a mistake; peers are exchanged if there is no replacement."""
    if by is None:
        other = {"-": "+", "+": "-"}
        changed, count = re.subn(pattern, lambda m: m[0].replace(m[1], other[m[1]]), text)
    else:
        changed, count = re.subn(pattern, by, text)
    assert count, f"{pattern} is not in the module"
    return changed


@pytest.mark.parametrize("name", SABOTAGE)
def test_self_check_sees_sabotage(name: str) -> None:
    """A module with one mistake exits with 1 and says how many checks are wrong."""
    design, world, pattern, by = SABOTAGE[name]
    text = one(design, (world,), Problem(seq=20 * world)).text
    codes, said = _self_check(sabotaged(text, pattern, by), world)
    assert codes == [1] * world, f"{codes} {said}"
    assert re.search(r"[1-9]\d* wrong", said), said
