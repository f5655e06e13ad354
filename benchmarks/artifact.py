"""The search of the paper's open artifact, timed on this machine.

The artifact (Mercury, SOSP 2025: github.com/ChandlerGuan/mercury_artifact) enumerates the programs
of an operator on a mesh of one dimension and prices none: it runs them on GPUs. This times the
enumeration alone, with the text of every program, in a process of its own, whose code is that of
the checkout. Its files are read as they were at commit d90da1f.
"""

from __future__ import annotations

import argparse
import ast
import json
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

TEMPLATES, NAME = "utils/flash_attn_dsl.py", "flash_attn_manage_reduction"
SIZES = {"BATCH": 4, "SEQ_LEN": 32768, "HEADS": 32, "HEAD_DIM": 128, "RED_DIM": 129}
SPLIT = ["S_q", "S_kv"]  # axes that it may lay over two dimensions, as its own benchmark does
LIMIT = 600  # s


class Enumerated(NamedTuple):
    """What an enumeration of attention gave.

    Attributes:
        ranks: of the mesh.
        programs: yielded.
        distinct: different texts among them.
        seconds: of processor time.
        mib: of the process at its peak.
    """

    ranks: int
    programs: int
    distinct: int
    seconds: float
    mib: float


class NotRun(Exception):
    """There is no figure; says why."""


def enumerated(checkout: Path, ranks: int) -> Enumerated:
    """Time the artifact's enumeration of attention.

    Raises:
        NotRun: the folder is no checkout, or its code fails or takes too long.
    """
    if not (checkout / TEMPLATES).is_file() or not (checkout / "mercury").is_dir():
        raise NotRun(f"{checkout} has no {TEMPLATES} and mercury/: it is no checkout of it")
    command = [sys.executable, str(Path(__file__).resolve()), str(checkout.resolve()), str(ranks)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise NotRun(f"{ranks} ranks took more than {LIMIT} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise NotRun(f"the artifact's own code failed: {last[0]}")
    return Enumerated(*json.loads(done.stdout.splitlines()[-1]))


def template(checkout: Path) -> str:
    """Attention in the artifact's language; the file is read and not run: it needs flash_attn."""
    tree = ast.parse((checkout / TEMPLATES).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == NAME:
            return textwrap.dedent(ast.literal_eval(node.value))
    raise NotRun(f"{TEMPLATES} has no {NAME}")


def _enumerate(checkout: Path, ranks: int) -> Enumerated:
    """In a process of its own: the artifact's modules are loaded here."""
    sys.path.insert(0, str(checkout))
    from mercury.backend.pytorch.codegen import generate_pytorch_code
    from mercury.frontend.parser import IRBuilder
    from mercury.ir.distributed import DeviceMesh
    from mercury.ir.loop_eliminating import eliminate_loops
    from mercury.search.search import search

    function = ast.parse(template(checkout).format(**SIZES)).body[0]
    program = IRBuilder().visit(function)
    began, texts, count = time.process_time(), set(), 0
    for found in search(program, DeviceMesh(list(range(ranks)), (ranks,)), list(SPLIT)):
        eliminate_loops(found)
        texts.add(generate_pytorch_code(found))
        count += 1
    seconds = time.process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Enumerated(ranks, count, len(texts), seconds, mib)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("ranks", type=int)
    options = parser.parse_args()
    print(json.dumps(_enumerate(options.checkout, options.ranks)))
