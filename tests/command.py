"""The command line in this process: its exit code, what it prints, and good texts to spoil."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mercurygen
from mercurygen.cli.main import main

ROOT = Path(mercurygen.__file__).parent.parent
os.environ["MERCURYGEN_CACHE"] = ""  # tests work everything out, and leave nothing behind

# Small enough for a proof in milliseconds; a ring around two ranks inside two.
UNIFIED = """# a comment
operator attention
problem batch=1 seq=1024 heads=8 kv_heads=2 head_dim=64 bfloat16 causal
topology a100x16 sha256:f8f4432b8ba23c35 node=2 InfiniBand 25GB/s gpu=8 NVLink 300GB/s
group node=2 gpu=2
tp 1
mesh node=2 gpu=2
order S: zigzag over node, gpu
pin q, k, v, out, lse: S over node, gpu
parallelize S_q over node
parallelize H over gpu
shift k, v: S_kv along node
patch body with aten
"""
ANY_SMALL = ("attention", "--topo", "a100x16", "--seq", "1k", "--group", "node=2,gpu=2")
SMALL = (*ANY_SMALL[:3], "--schedule", "double-ring", *ANY_SMALL[3:])
SMALL_NAME = "attention_gqa_causal_s1024_group_node2_gpu2_double_ring_a100x16"  # how it is called


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str

    def refused(self, slug: str, *words: str, code: int = 2) -> None:
        """One readable error with this slug, nothing else."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.err.startswith(f"error[{slug}]: "), self.err
        assert self.err.count("error[") == 1 and "Traceback" not in self.err, self.err
        assert all(line.isprintable() for line in self.err.splitlines()), self.err
        for word in words:
            assert word in self.err, (word, self.err)

    def done(self) -> str:
        """Its output; it must have gone well."""
        assert self.code == 0 and not self.err, (self.code, self.out, self.err)
        return self.out


def run(*args: str | Path) -> Ran:
    """`mercurygen ARGS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in args])
    return Ran(code, out.getvalue(), err.getvalue())


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield path
    finally:
        os.chdir(before)


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a folder, empty folders included."""
    return {
        str(one.relative_to(path)): one.read_bytes() if one.is_file() else b""
        for one in sorted(path.rglob("*"))
    }


def spawn(*args: str, cwd: Path, seed: str = "0", **options) -> subprocess.CompletedProcess[str]:
    """`python -m mercurygen ARGS` in a process of its own."""
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mercurygen", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, **options)
