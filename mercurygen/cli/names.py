"""What a request is called: the normal form of its command, and the default name of its files."""

from __future__ import annotations

import keyword
import re
import sys

from mercurygen.cli.request import Request
from mercurygen.designs import patterns
from mercurygen.errors import UserError, printable, shorten
from mercurygen.ir import documents
from mercurygen.ir.kernel import ATEN
from mercurygen.ir.problem import Problem

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_DEFAULT = Problem()
_LETTERS = {"batch": "b", "seq": "s", "seq_kv": "keys", "heads": "h", "kv_heads": "kv"}
_LETTERS |= {"head_dim": "d"}
# An emitted module imports these: a file of that name would be imported in their place.
# The others are run by Python, pytest or pip where they lie.
_TAKEN = frozenset(sys.stdlib_module_names) | {"torch", "triton", "numpy", "mercurygen"}
_RUN = {"sitecustomize", "usercustomize", "conftest", "setup"}


def check_name(name: str, mend: str = "--name {}") -> str:
    """The name of a module.

    Args:
        name: to be checked.
        mend: what to do, with a place for the nearest name that is one.

    Raises:
        UserError: `not-a-name`, with the nearest that is one.
    """
    if not (why := _wrong(name)):
        return name
    near = re.sub(r"[^A-Za-z0-9_]+", "_", name.removesuffix(".py"))[:90].strip("_") or "attention"
    if _wrong(near):
        near = f"attention_{near}"
    raise UserError(
        "not-a-name",
        f"{shorten(printable(name))!r} {why}: NAME.py is to be imported",
        help=mend.format(near),
    )


def _wrong(name: str) -> str:
    """Why a module cannot be called so, or nothing."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        return "is not a Python identifier"
    if name in _TAKEN:
        return "hides another module"
    if name in _RUN or (name.startswith("__") and name.endswith("__")):
        return "has a meaning of its own to Python and its tools"
    return ""


def default_name(request: Request) -> str:
    """Operator, what differs from the defaults, the design if one was named, topology."""
    problem = request.problem
    kind = "mha" if problem.heads == problem.kv_heads else "gqa"
    kind = "mqa" if problem.kv_heads == 1 < problem.heads else kind
    parts = [request.operator.rpartition("::")[2], kind, _mask(problem)]
    told = "--order" if request.design and patterns.get(request.design).order else ""
    parts += [part for option, _, part in differences(request) if part and option != told]
    if request.design:
        parts.append(request.design)  # it says the order, if it has one of its own
    parts.append(request.topology.name)
    return check_name("_".join(parts).replace("-", "_"))


def command(request: Request, name: str) -> str:
    """The command of a request: what differs from the defaults, in a fixed order.

    No path is in it, only the names of files: it is the same from every folder.
    """
    words = ["mercurygen emit", _plain(request.operator), "--topo", _plain(request.topology_ref)]
    if request.design:
        words += ["--schedule", request.design]
    for option, value, _ in differences(request):
        words += [option, value] if value else [option]
    if name != default_name(request):
        words += ["--name", name]
    return " ".join(words)


def differences(request: Request) -> list[tuple[str, str, str]]:
    """What differs from the defaults: (option, value, part of the name), in a fixed order."""
    problem = request.problem
    found = []
    for size, letter in _LETTERS.items():
        value = str(getattr(problem, size))
        if value != str(getattr(_DEFAULT, size)):
            found.append((f"--{size.replace('_', '-')}", value, letter + value))
    if problem.v_head_dim != problem.head_dim:
        found.append(("--v-head-dim", str(problem.v_head_dim), f"v{problem.v_head_dim}"))
    if problem.dtype != _DEFAULT.dtype:
        found.append(("--dtype", problem.dtype, problem.dtype))
    if problem.documents:
        found.append(("--packed", "", "packed"))
        if problem.documents != documents.usual(problem.seq):
            found.append(("--documents", documents.show(problem.documents), ""))
    elif problem.layout != _DEFAULT.layout:
        found.append(("--layout", problem.layout, problem.layout))
    if problem.align:
        found.append(("--align", problem.align, problem.align))
    if problem.mask == "full":
        found.append(("--full", "", ""))  # the name has the mask always
    elif problem.mask == "window":
        both = f"{problem.window - 1},{problem.ahead}"
        found.append(("--window", both if problem.ahead else str(problem.window), ""))
    if request.order is not None:
        part = "any_order" if request.order == "any" else request.order
        found.append(("--order", request.order, part))
    if request.passes != "fwd":
        found.append(("--pass", request.passes, request.passes))
    if request.kernel != ATEN:
        found.append(("--kernel", request.kernel, request.kernel))
    if request.objective != "time":
        part = "robust" if request.objective == "robust" else f"least_{request.objective}"
        found.append(("--objective", request.objective, part))
    if request.whole:
        found.append(("--whole-space", "", "whole_space"))
    if request.memory_limit is not None:
        size = _size(request.memory_limit)
        found.append(("--memory-limit", size, f"within_{size}"))
    if request.group is not None:
        levels = [level.name for level in request.topology.levels]
        pairs = list(zip(levels, map(str, request.group), strict=True))
        value = ",".join(f"{level}={size}" for level, size in pairs)
        found.append(("--group", value, "_".join(["group", *map("".join, pairs)])))
    if request.probe:
        found.append(("--probe", "", "probed"))
    if request.envelope:
        found.append(("--envelope", "", "envelope"))
    if request.tp > 1:
        found.append(("--tp", str(request.tp), f"tp{request.tp}"))
    return found


def _mask(problem: Problem) -> str:
    """The mask in a name."""
    if problem.mask != "window":
        return problem.mask
    return f"window{problem.window}" + (f"_ahead{problem.ahead}" if problem.ahead else "")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 30}GiB" if nbytes % 2**30 == 0 else str(nbytes)


def _plain(reference: str) -> str:
    """A name, or a file's name without its folders, as a word of a shell."""
    return re.sub(r"[^A-Za-z0-9._:-]", "_", re.split(r"[/\\]", reference)[-1])
