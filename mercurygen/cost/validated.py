"""How far the model has been held against measurements, by `benchmarks/cost_model.py`.

Inside these ranges its published rows are predicted with the errors that README gives. Shorter
sequences are bound by the host, whose time differs from one implementation to the next.
"""

from __future__ import annotations

from mercurygen.ir.problem import Problem, Sizes

GPUS = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H800-SXM5-80GB", "L20")
RANKS = (8, 32)
SIZES = {"batch": (1, 2), "seq": (32768, 262144), "heads": (32, 64), "head_dim": (32, 128)}
DTYPES = ("bfloat16", "float16")


def outside(problem: Problem | Sizes, gpu: str | None, ranks: int) -> str:
    """What of a problem no measurement has shown the model right for, on one line, or nothing.

    Args:
        problem: of the operator.
        gpu: name of the kind of GPU, if it is known.
        ranks: of the operator's group.
    """
    found = []
    if isinstance(problem, Sizes):
        found.append("other operators than attention")
    else:
        for name, (least, most) in SIZES.items():
            value = getattr(problem, name)
            if not least <= value <= most:
                found.append(f"{name} {value} ({least} to {most})")
    if problem.seq_kv is not None:
        found.append("keys that are not the queries'")
    if problem.documents:
        found.append("packed documents")
    if problem.dtype not in DTYPES:
        found.append(problem.dtype)
    if not RANKS[0] <= ranks <= RANKS[1]:
        found.append(f"{ranks} GPUs ({RANKS[0]} to {RANKS[1]})")
    if gpu is not None and gpu not in GPUS:
        found.append(gpu)
    return f"outside validated range: {', '.join(found)}" if found else ""
