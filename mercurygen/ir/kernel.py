"""Options of the local kernel: tile sizes of the Triton kernel, in schedules and programs alike.

    patch body with triton(rows=128, cols=64, warps=8, stages=2)

Which tiles are fast depends on the GPU; which fit it can be seen without one. `DEFAULTS` were
compiled for both kinds of GPU and neither run nor timed there.
"""

from __future__ import annotations

from mercurygen.errors import UserError
from mercurygen.ir.lexer import Line

ATEN, TRITON = "aten", "triton"

# Of which operators a kernel computes the body. torch's gradient makes delta of out itself.
OPERATORS = {
    ATEN: ("attention", "attention_backward_out"),
    TRITON: ("attention", "attention_backward"),
}

Options = tuple[tuple[str, int], ...]  # (name, value), in the order of `RANGES`

RANGES = {
    "rows": (16, 32, 64, 128, 256),  # of queries in a tile
    "cols": (16, 32, 64, 128, 256),  # of keys
    "warps": (1, 2, 4, 8, 16),  # of a program
    "stages": (1, 2, 3, 4, 5, 6, 7, 8),  # tiles of keys on their way from memory
}

FORWARD, BACKWARD = "forward", "backward"

DEFAULTS: dict[tuple[str, str], dict[str, int]] = {  # by GPU and pass
    ("sm_80", FORWARD): {"rows": 128, "cols": 64, "warps": 8, "stages": 2},
    ("sm_80", BACKWARD): {"rows": 64, "cols": 64, "warps": 8, "stages": 2},
    ("sm_90", FORWARD): {"rows": 128, "cols": 64, "warps": 8, "stages": 3},
    ("sm_90", BACKWARD): {"rows": 64, "cols": 64, "warps": 8, "stages": 2},
}
CAPABILITY = {"A100": "sm_80", "A800": "sm_80", "H100": "sm_90", "H800": "sm_90", "H200": "sm_90"}
SMALLEST = "sm_80"  # its defaults fit the others too: those of a schedule that says none

# Sizes of D and E together, as the kernel reads them, up to which the tiles are as large as said.
WIDTH = {FORWARD: 320, BACKWARD: 256}


def kernels_of(operator: str) -> tuple[str, ...]:
    """The kernels that compute an operator's body; none of one whose body is its own lines."""
    return tuple(kernel for kernel, known in OPERATORS.items() if operator in known)


def options_for(kernel: str, gpu: str, way: str) -> Options:
    """The options of a kernel on a kind of GPU; none of a kernel that takes none, or for others.

    Args:
        kernel: that runs the body.
        gpu: its name, as in topologies: "A100-SXM4-80GB".
        way: "forward" or "backward".
    """
    sm = CAPABILITY.get(gpu.partition("-")[0])
    return tuple(DEFAULTS[sm, way].items()) if kernel == TRITON and sm else ()


def completed(options: Options, way: str) -> dict[str, int]:
    """The options with the defaults of those that are not given.

    Args:
        options: as a schedule gives them.
        way: "forward" or "backward".
    """
    return {**DEFAULTS[SMALLEST, way], **dict(options)}


def shown(kernel: str, options: Options) -> str:
    """A kernel as a line has it."""
    return f"{kernel}({', '.join(f'{k}={v}' for k, v in options)})" if options else kernel


def read_kernel(line: Line) -> tuple[str, Options]:
    """A kernel and, in brackets, its options in any order, each once.

    Raises:
        UserError: `syntax`, `named-twice`, `kernel-option-not-legal`.
    """
    kernel = line.name("a kernel")
    if not line.take("("):
        return kernel, ()
    found: dict[str, int] = {}
    while not found or line.take(","):
        start = line.place
        name = line.word(*RANGES)
        if name in found:
            message = f"the option {name!r} is given twice"
            raise UserError("named-twice", message, span=line.span(start))
        line.mark("=")
        found[name] = line.number_("a number")
        if found[name] not in RANGES[name]:
            raise _not_legal(name, found[name]).at(line.span(start))
    line.mark(")")
    return kernel, tuple((name, found[name]) for name in RANGES if name in found)


def _not_legal(name: str, value: int) -> UserError:
    legal = RANGES[name]
    nearest = min(legal, key=lambda x: abs(x - value))
    return UserError(
        "kernel-option-not-legal",
        f"{name}={value}: the kernel is made for {', '.join(map(str, legal))}",
        help=f"the nearest is {name}={nearest}",
    )
