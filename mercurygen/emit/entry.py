"""Emitted text of the public function, and of the checks on what it is given."""

from __future__ import annotations

from textwrap import wrap

from mercurygen.emit import (
    border,
    checks,
    differentiable,
    held,
    nest,
    outside,
    tiles,
    windows,
)
from mercurygen.emit.differentiable import Both
from mercurygen.emit.loops import part_counts
from mercurygen.emit.words import variable
from mercurygen.ir.caller import INSIDE, PACKED, exchanged
from mercurygen.lower.plan import Plan

_PROMISE = "; differentiable in q, k and v."
_NO_PROMISE = ". Forward only: refuses inputs that want a gradient."
_LSE = " (no gradient)"
_OPAQUE = """\
@torch.compiler.disable(reason="its transfers cannot be traced; compile without fullgraph=True")
"""
_CU_SEQLENS = """\
        cu_seqlens: [documents + 1], int32 or int64, on the CPU, the same on all ranks: where in
            the whole sequence each document begins, and the end.""".split("\n")
_WINDOW_APART = [
    "        window: keys before and after the one that a query stands at that it sees; the same",
    "            on all ranks. Transfers are as long as it makes them.",
]
_WINDOW = [
    "        window: keys before and after itself that a query sees, as in flash-attention; the",
    "            same on all ranks. Transfers are as long as it makes them.",
]


def function(plan: Plan, both: Both | None = None, layout: str = INSIDE) -> str:
    """The public function; both: of a differentiable module; layout: of the caller's tensors."""
    mesh = plan.program.mesh
    signature = "mesh: DeviceMesh" if mesh.dims else "mesh: None = None"
    sizes = ", ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)
    what = f"device mesh, as made by `make_mesh`: {sizes}" if sizes else "not needed"
    given = {name: _given(plan, name) for name in "qkv"}
    before = {"q": "", "k": given["q"], "v": given["k"]}
    inputs = [
        f"        {name}: {outside.shape(layout, *held.sizes(plan.program, name))}, "
        f"{'likewise' if given[name] == before[name] else given[name]}."
        for name in given
    ]
    rows = outside.shape(layout, *held.sizes(plan.program, "out"))
    rows += ", a view," if exchanged(layout) else ""
    window = plan.program.mask == "window"
    packed = bool(plan.program.documents)
    given_documents, more = ("cu_seqlens: Tensor, ", "cu_seqlens, ") if packed else ("", "")
    lines = [
        f"{_OPAQUE if both and mesh.dims else ''}"
        f"def attention(q: Tensor, k: Tensor, v: Tensor, {given_documents}{signature}, *, "
        f"scale: float | None = None, {'window: tuple[int, int] = WINDOW, ' if window else ''}"
        f"{checks.seqs(plan, ': int | None = None')}, return_lse: bool = False,"
        ") -> Tensor | tuple[Tensor, Tensor]:",
        f'    """{_what(plan)}{_PROMISE if both else _NO_PROMISE}',
        "",
        "    Args:",
        *inputs,
        *(_CU_SEQLENS if packed else []),
        *wrap(f"mesh: {what}.", 98, initial_indent=" " * 8, subsequent_indent=" " * 12),
        "        scale: softmax scale; 1 / sqrt(D) if None.",
        *((_WINDOW if plan.program.align is None else _WINDOW_APART) if window else []),
        *_seq_words(plan),
        f"        return_lse: also return the log-sum-exp of the scores{_LSE if both else ''}; "
        "the same on all ranks.",
        "",
        "    Returns:",
        f"        out {rows} in q's dtype; with return_lse, also lse "
        f"{_lse(plan, layout)} in float32",
        "        (float64 if q is). Under torch.autocast q, k and v are cast to its dtype first.",
        "",
        "    Raises:",
        "        ValueError: the mesh or an argument does not fit this schedule.",
        *([] if both else ["        RuntimeError: a gradient would be needed."]),
        '    """',
        "    q, k, v = _autocast(q, k, v)",
        f"    _check(q, k, v, {more}mesh, {checks.seqs(plan)}{', window' if window else ''})",
        *(f"    {line}" for line in outside.into(layout)),
        *windows.placed(plan, _in_all(plan, "q"), _in_all(plan, "k")),
        "    scale = q.shape[3] ** -0.5 if scale is None else scale",
        *(["    borders = _borders(cu_seqlens)"] if packed else []),
    ]
    work = differentiable.apply(both, layout) if both else _work(plan, layout)
    body = [*_groups(plan), *work]
    return "\n".join([*lines, *(f"    {line}" if line else "" for line in body)])


def _what(plan: Plan) -> str:
    """What the function does."""
    if plan.program.align is None:
        return "Attend over the whole sequence"
    return "Attend to the keys of another sequence"


def _seq_words(plan: Plan) -> list[str]:
    """What the docstring says of lengths that are only checked."""
    if plan.program.align is None:
        letter = "S" if held.sliced(plan.program) else "N"
        return [
            f"        seq: length of the whole sequence: {letter} is checked against it if given."
        ]
    return [
        "        seq: how many queries there are in all: S is checked against it if given.",
        "        seq_kv: how many keys: T is checked likewise.",
    ]


def _in_all(plan: Plan, name: str) -> str:
    """The tokens that a tensor has over all ranks."""
    one = held.whole(plan.program, name) or not plan.program.mesh.dims
    return f"{name}.shape[1]{'' if one else ' * WORLD_SIZE'}"


def _lse(plan: Plan, layout: str) -> str:
    """Shape of lse."""
    axes = held.sizes(plan.program, "lse")
    return f"[{', '.join(axes[1:] if layout == PACKED else axes)}]"


def _given(plan: Plan, name: str) -> str:
    """What a rank's caller gives of a tensor."""
    if held.whole(plan.program, name):
        return "all of it, the same on every rank"
    if not held.sliced(plan.program):
        return "this rank's part, as cut by `shard`"
    return (
        "this rank's slice, as cut by `shard`" if plan.program.mesh.dims else "the whole sequence"
    )


def _groups(plan: Plan) -> list[str]:
    """Lines that name the groups, and a blank one."""
    names = plan.program.mesh.names
    groups = [variable(name) for name in names]
    lines = []
    if len(names) == 1:
        lines.append(f'{groups[0]} = mesh.get_group("{names[0]}")')
    elif names:
        lines.append(f"{', '.join(groups)} = (mesh.get_group(name) for name in MESH)")
    return [*lines, ""]


def _work(plan: Plan, layout: str) -> list[str]:
    """What is done with q, k and v."""
    if part_counts(plan):
        *lines, result = tiles.body(plan)
        return [*lines, *outside.back(layout), result]
    lines = [*border.before(plan), f"out, lse = {nest.attend_call(plan, 'q, k, v')}"]
    return [*lines, *border.after(plan, layout)]
