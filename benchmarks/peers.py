"""Emitted modules beside what others run: same inputs, same ranks, error and time side by side.

    python benchmarks/peers.py [--ranks 4] [--shape 1,2048,8,8,64] [--dtype float32] [--repeats 3]

Forks gloo ranks on this machine's CPUs, one thread each. The shape is batch, tokens, query heads,
key/value heads, head size; the mask is causal. Errors are the largest over all ranks, of the output
and of the gradients of q, k and v, against one process in float64. Seconds are the least of the
repeats, of the slowest rank. CPUs and gloo say nothing about GPUs: what can be compared is how much
each system adds around the same kernel, torch's for CPUs, on the same ranks.

Peers that are not installed are named and left out:

    python3 -m pip install --no-deps ring-flash-attn==0.1.8 yunchang==0.6.4

They import flash_attn, which needs CUDA to install; `stand_in.py` stands in for it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import stand_in
import torch
import torch.distributed as dist
from peer_systems import PEERS, Peer, System, ours
from torch import Tensor

DESIGNS = ("ring", "ulysses", "allgather-kv", "unified")
SEED = 20251


class Shape(NamedTuple):
    """Sizes of the whole problem."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int


class Measured(NamedTuple):
    """One system: largest errors of out, dq, dk, dv; seconds forward, and with backward."""

    errors: tuple[float, ...]
    forward: float
    both: float


def emitted(
    folder: Path, shape: Shape, ranks: int, dtype: str, designs: Sequence[str] = DESIGNS
) -> list[Peer]:
    """Modules with backward of the designs that fit so many GPUs of a DGX H100."""
    sizes = {f"--{name.replace('_', '-')}": str(x) for name, x in shape._asdict().items()}
    options = [word for pair in sizes.items() for word in pair]
    found = []
    for design in designs:
        name = design.replace("-", "_")
        command = [sys.executable, "-m", "mercurygen", "emit", "attention", "--topo", "h100x8"]
        command += ["--group", f"gpu={ranks}", "--pass", "train", "--schedule", design]
        command += [*options, "--dtype", dtype, "--name", name, "-o", str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"mercurygen {design}: {run.stderr.strip().splitlines()[0]}")
        else:
            found.append(ours(f"mercurygen {design}", folder / f"{name}.py"))
    return found


def whole(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of out, [B, S, heads, D], the same on every rank."""
    made = torch.Generator().manual_seed(SEED)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [
        torch.randn(shape.batch, shape.seq, n, shape.head_dim, generator=made).to(dtype)
        for n in heads
    ]


def reference(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv in float64, one query head at a time."""
    *given, grad_out = (x.double() for x in whole(shape, dtype))
    out, grads = torch.empty_like(grad_out), [torch.zeros_like(x) for x in given]
    group, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5
    for head in range(shape.heads):
        at = head, head // group, head // group
        leaves = [x[:, :, i].detach().requires_grad_() for x, i in zip(given, at, strict=True)]
        q, k, v = leaves
        scores = q @ k.mT * scale
        hidden = torch.ones(shape.seq, shape.seq, dtype=torch.bool).triu(1)
        found = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        out[:, :, head] = found.detach()
        for into, i, x in zip(
            grads, at, torch.autograd.grad(found, leaves, grad_out[:, :, head]), strict=True
        ):
            into[:, :, i] += x
    return [out, *grads]


def measure(
    system: System, given: Sequence[Tensor], exact: Sequence[Tensor], repeats: int
) -> Measured:
    """Errors and times of one system, the largest of all ranks."""
    *inputs, grad_out = (system.cut(x) for x in given)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]

    def both() -> tuple[Tensor, ...]:
        out = system.attend(*inputs)
        return out, *torch.autograd.grad(out, inputs, grad_out)

    def forward() -> None:
        with torch.no_grad():
            system.attend(*inputs)

    errors = [
        float((found.detach().double() - system.cut(x)).abs().max())
        for found, x in zip(both(), exact, strict=True)
    ]
    times = [min(_seconds(call) for _ in range(repeats)) for call in (forward, both)]
    worst = torch.tensor([*errors, *times], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    *errors, first, second = worst.tolist()
    return Measured(tuple(errors), first, second)


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _rank(
    rank: int,
    ranks: int,
    port: int,
    peer: Peer,
    shape: Shape,
    dtype: str,
    exact: Sequence[Tensor],
    repeats: int,
    pipe: Connection,
) -> None:
    """One process: measures a peer; rank 0 tells."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that the peers still use
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    given = whole(shape, getattr(torch, dtype))
    found = measure(peer.make(), given, exact, repeats)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def run(
    peer: Peer, ranks: int, shape: Shape, dtype: str, exact: Sequence[Tensor], repeats: int
) -> Measured | str:
    """A peer on ranks of its own; the words to print if it failed."""
    fork = multiprocessing.get_context("fork")
    ours_end, theirs = fork.Pipe(duplex=False)
    given = (ranks, _free_port(), peer, shape, dtype, exact, repeats, theirs)
    processes = [fork.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    for process in processes:
        if process.exitcode is None:
            process.kill()
    codes = [process.exitcode for process in processes]
    if any(codes) or not ours_end.poll():
        return f"failed: exit codes {codes}"
    return ours_end.recv()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", default="1,2048,8,8,64", help="batch,seq,heads,kv_heads,size")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shape, dtype = Shape(*map(int, options.shape.split(","))), options.dtype
    torch.set_num_threads(1)
    stands = stand_in.install()
    print(f"{options.ranks} gloo ranks, {os.cpu_count()} CPUs, {dtype}, causal, {shape}")
    print(f"torch {torch.__version__}, flash_attn: {'a stand-in' if stands else 'installed'}")
    exact = reference(shape, getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'':26}{'out':>9}{'dq':>9}{'dk':>9}{'dv':>9}{'forward':>10}{'+ backward':>11}")
        for peer in (*emitted(Path(folder), shape, options.ranks, dtype), *PEERS):
            if peer.needs and find_spec(peer.needs) is None:
                print(f"{peer.name:26}not installed: {peer.needs}")
                continue
            found = run(peer, options.ranks, shape, dtype, exact, options.repeats)
            print(_line(peer, found, dtype), flush=True)


def _line(peer: Peer, found: Measured | str, dtype: str) -> str:
    if isinstance(found, str):
        return f"{peer.name:26}{found}"
    errors = "".join(f"{x:9.1e}" for x in found.errors)
    note = "" if dtype in peer.dtypes else f"  {peer.why}"
    return f"{peer.name:26}{errors}{found.forward:9.3f}s{found.both:10.3f}s{note}"


if __name__ == "__main__":
    main()
