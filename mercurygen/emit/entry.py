"""Emitted text of the public function, and of the checks on what it is given."""

from __future__ import annotations

import re
from math import lcm, prod
from textwrap import wrap

from mercurygen.emit import (
    border,
    differentiable,
    held,
    masks,
    nest,
    outside,
    ring_kinds,
    tiles,
    windows,
)
from mercurygen.emit.differentiable import Both
from mercurygen.emit.loops import part_counts, runs_of_chunk
from mercurygen.emit.words import variable
from mercurygen.ir.caller import INSIDE, PACKED, exchanged
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Plan

_PROMISE = "; differentiable in q, k and v."
_NO_PROMISE = ". Forward only: refuses inputs that want a gradient."
_LSE = " (no gradient)"
_OPAQUE = """\
@torch.compiler.disable(reason="its transfers cannot be traced; compile without fullgraph=True")
"""
_AUTOCAST = """\
def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    \"\"\"Cast to the dtype of torch.autocast, if it is on, what torch's own attention would.\"\"\"
    device, narrow = q.device.type, (torch.float32, torch.float16, torch.bfloat16)
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in narrow else x for x in (q, k, v))


"""
_WINDOW = [
    "        window: keys before and after itself that a query sees, as in flash-attention; the",
    "            same on all ranks. Transfers are as long as it makes them.",
]
_HEADS = ("HD", "KD", "KE")  # of q, k and v, behind B and S


def local_multiple(plan: Plan) -> int:
    """Tokens of one rank must be a multiple of this."""
    return plan.program.order.halves * runs_of_chunk(plan)


def global_multiple(plan: Plan) -> int:
    """Tokens of the whole sequence must be a multiple of this."""
    return plan.program.order.chunks(plan.program.mesh) * runs_of_chunk(plan)


def split_of(plan: Plan, axis: str, both: Both | None = None) -> int:
    """An axis that is not the sequence must be a multiple of this: its ranks times its parts."""
    ranks = prod(plan.program.mesh.extent(dim) for dim in plan.program.parallel_dims(axis))
    ways = ranks * plan.atoms.parts(axis)
    return lcm(ways, split_of(both.backward, axis)) if both else ways


def function(plan: Plan, both: Both | None = None, layout: str = INSIDE) -> str:
    """The public function; both: of a differentiable module; layout: of the caller's tensors."""
    mesh = plan.program.mesh
    signature = "mesh: DeviceMesh" if mesh.dims else "mesh: None = None"
    sizes = ", ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)
    what = f"device mesh, as made by `make_mesh`: {sizes}" if sizes else "not needed"
    axes = dict(zip("qkv", _HEADS, strict=True))
    given = {name: _given(plan, name) for name in axes}
    before = {"q": "", "k": given["q"], "v": given["k"]}
    inputs = [
        f"        {name}: {outside.shape(layout, 'B', held.length(plan, name), *axes[name])}, "
        f"{'likewise' if given[name] == before[name] else given[name]}."
        for name in axes
    ]
    rows = outside.shape(layout, "B", held.length(plan, "out"), "H", "E")
    rows += ", a view," if exchanged(layout) else ""
    window = plan.program.mask == "window"
    seq = "length of the whole sequence: S is checked against it if given"
    packed = bool(plan.program.documents)
    given_documents, more = ("cu_seqlens: Tensor, ", "cu_seqlens, ") if packed else ("", "")
    lines = [
        f"{_OPAQUE if both and mesh.dims else ''}"
        f"def attention(q: Tensor, k: Tensor, v: Tensor, {given_documents}{signature}, *, "
        f"scale: float | None = None, {'window: tuple[int, int] = WINDOW, ' if window else ''}"
        "seq: int | None = None, return_lse: bool = False,"
        ") -> Tensor | tuple[Tensor, Tensor]:",
        f'    """Attend over the whole sequence{_PROMISE if both else _NO_PROMISE}',
        "",
        "    Args:",
        *inputs,
        *(_CU_SEQLENS if packed else []),
        *wrap(f"mesh: {what}.", 98, initial_indent=" " * 8, subsequent_indent=" " * 12),
        "        scale: softmax scale; 1 / sqrt(D) if None.",
        *(_WINDOW if window else []),
        f"        seq: {seq}.",
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
        f"    _check(q, k, v, {more}mesh, seq{windows.argument(plan)})",
        *(f"    {line}" for line in outside.into(layout)),
        "    scale = q.shape[3] ** -0.5 if scale is None else scale",
        *(["    borders = _borders(cu_seqlens)"] if packed else []),
    ]
    work = differentiable.apply(both, layout) if both else _work(plan, layout)
    body = [*_groups(plan), *work]
    return "\n".join([*lines, *(f"    {line}" if line else "" for line in body)])


def _lse(plan: Plan, layout: str) -> str:
    """Shape of lse."""
    axes = ("H",) if layout == PACKED else ("B", "H")
    return f"[{', '.join((*axes, held.length(plan, 'lse')))}]"


def _given(plan: Plan, name: str) -> str:
    """What a rank's caller gives of a tensor."""
    if held.whole(plan.program, name):
        return "all of it, the same on every rank"
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


def check(plan: Plan, both: Both | None, layout: str) -> str:
    """`_autocast`, and `_check`: refusals, first of what all ranks see alike.

    Args:
        plan: of the forward.
        both: of a differentiable module.
        layout: of the caller's tensors.
    """
    mesh = plan.program.mesh
    lines = [
        f"{_AUTOCAST}def _check(q: Tensor, k: Tensor, v: Tensor, "
        f"{'cu_seqlens: Tensor, ' if layout == PACKED else ''}"
        f"mesh: {'DeviceMesh' if mesh.dims else 'None'}, seq: int | None"
        f"{windows.parameter(plan)}) -> None:",
        '    """Refuse what this schedule cannot do; facts that all ranks share come first."""',
    ]
    lines.append(_CHECK_MESH if mesh.dims else _CHECK_NO_MESH)
    if plan.program.mask == "window":
        lines += [_CHECK_WINDOW, *_one_way(plan, both)]
    if both is None:
        lines.append(_CHECK_GRADIENT)
    lines += [_check_tensors(plan, layout), *_check_sizes(plan, both, layout)]
    if layout == PACKED:
        lines.append(_CHECK_DOCUMENTS.format(times=" * WORLD_SIZE" if mesh.dims else ""))
    return "\n".join(lines)


def _one_way(plan: Plan, both: Both | None) -> list[str]:
    """A short ring that passes tiles on brings those of one side: of others there are none."""
    plans = [plan, *([both.backward] if both else [])]
    found = [x for each in plans for x in ring_kinds.rings(each).values()]
    sides = {not x.reverse for x in found if x.short and not x.direct}
    where = ("after", "before")
    return [_CHECK_ONE_WAY.format(side=int(way), where=where[way]) for way in sorted(sides)]


_CHECK_MESH = """\
    if not isinstance(mesh, DeviceMesh) or mesh.get_coordinate() is None:
        raise ValueError(f"mesh is {mesh}: must be a DeviceMesh that holds this rank")
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if list(sizes.items()) != list(MESH.items()):
        raise ValueError(f"mesh is {sizes}, this attention is scheduled for {MESH}")
    place = mesh.get_coordinate()
    for dim, name in enumerate(MESH):
        line = mesh.mesh[(*place[:dim], slice(None), *place[dim + 1 :])].tolist()
        if dist.get_process_group_ranks(mesh.get_group(name)) != line:
            raise ValueError(f"mesh: {name} has {line}, its group another order; see make_mesh")
    if q.device.type != mesh.device_type:
        raise ValueError(f"q is on {q.device}, the mesh on {mesh.device_type}")"""

_CHECK_NO_MESH = """\
    if torch.is_tensor(mesh):
        raise ValueError("mesh is a tensor: must be None; this attention takes no cu_seqlens")"""

_CHECK_WINDOW = """\
    if len(window) != 2 or min(window) < 0:
        raise ValueError(f"window is {window}: must be two numbers of keys, 0 or more")"""

_CHECK_ONE_WAY = """\
    if window[{side}]:
        raise ValueError(f"window is {{window}}: this ring brings what is {where} a query only")"""

_CHECK_GRADIENT = """\
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("emitted without backward: call it under torch.no_grad()")"""

_CHECK_DTYPES = """\
    names = f"q is {q.dtype}, k {k.dtype}, v {v.dtype}"
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"{names}: must be one floating dtype")"""

_CHECK_DTYPE_OF_ATEN = """\
    if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{names}: on CUDA the kernel takes float16 and bfloat16")"""

_CHECK_DEVICES = """\
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}: must be one")"""

_CHECK_HEADS = """\
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2] or not q.numel() or not v.numel():
        raise ValueError(f"{shapes}: must agree in D and K, and no size is 0")"""

_CHECK_WIDTH = """\
    if q.is_cuda and max(q.shape[3], v.shape[3]) > 256:
        raise ValueError(f"{shapes}: on CUDA the kernel takes D and E up to 256")"""


_CHECK_DOCUMENTS = """\
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens is {{kind}}: must be an int32 or int64 tensor")
    if cu_seqlens.device.type != "cpu":  # what is sent depends on it, so the host has to know
        raise ValueError(f"cu_seqlens is on {{cu_seqlens.device}}: must be on the CPU")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens[0] != 0:
        given = f"cu_seqlens {{tuple(cu_seqlens.shape)}}"
        raise ValueError(f"{{given}}: must be [documents + 1], from 0 on")
    if (cu_seqlens.diff() < 0).any():
        raise ValueError("cu_seqlens decreases: must be where documents begin, one after the other")
    if cu_seqlens[-1] != q.shape[0]{times}:
        what = f"cu_seqlens ends at {{cu_seqlens[-1]}}"
        raise ValueError(f"{{what}}: must be the {{q.shape[0]{times}}} tokens of all ranks")"""
_CU_SEQLENS = """\
        cu_seqlens: [documents + 1], int32 or int64, on the CPU, the same on all ranks: where in
            the whole sequence each document begins, and the end.""".split("\n")


def _check_tensors(plan: Plan, layout: str) -> str:
    """The checks of dtypes, devices and shapes."""
    b, s, h, d = outside.places(layout)
    tokens = {name: held.length(plan, name) for name in "qkv"}
    at = "::2" if (b, s) == (0, 2) else f":{h}" if layout == PACKED else ":2"  # B and S
    both = f"q.shape[{at}] == k.shape[{at}] == v.shape[{at}]"
    same = both if tokens["q"] == tokens["k"] else f"k.shape[{at}] == v.shape[{at}]"
    q, k, v = (
        outside.shape(layout, "B", tokens[x], *axes) for x, axes in zip("qkv", _HEADS, strict=True)
    )
    name = f"layout {layout}, " if exchanged(layout) else ""
    count = d + 1
    lines = [
        _CHECK_DTYPES,
        *([] if plan.program.kernel == TRITON else [_CHECK_DTYPE_OF_ATEN]),
        _CHECK_DEVICES,
        f'    shapes = f"{name}q {{tuple(q.shape)}}, k {{tuple(k.shape)}}, v {{tuple(v.shape)}}"',
        f"    if not q.ndim == k.ndim == v.ndim == {count} or not {same}:",
        f'        raise ValueError(f"{{shapes}}: must be {q}, {k}, {v}")',
    ]
    if same != both:
        whole, cut = ("q", "k") if tokens["q"] == "N" else ("k", "q")
        words = "q must" if whole == "q" else "k and v must"
        lines += [
            f"    if q.shape[{b}] != k.shape[{b}] or "
            f"{whole}.shape[{s}] != {cut}.shape[{s}] * WORLD_SIZE:",
            f'        raise ValueError(f"{{shapes}}: {words} have the N = {{WORLD_SIZE}} S tokens '
            'of all ranks")',
        ]
    at = {"shape[2]": f"shape[{h}]", "shape[3]": f"shape[{d}]"}
    last = re.sub(r"shape\[[23]\]", lambda match: at[match[0]], f"{_CHECK_HEADS}\n{_CHECK_WIDTH}")
    return "\n".join([*lines, last])


def _of_single_stripes(plan: Plan) -> bool:
    """Whether tiles are single stripes, of which a causal square loses a row and a column."""
    form, order = masks.mask_form(plan), plan.program.order
    if form not in ("stripes", "spaced") or plan.before:
        return False
    rows = plan.program.mask_axes[0]
    split = {*plan.program.parallel_dims(rows)}
    split |= {w.dim for loop in plan.nest.loops if loop.axis == rows for w in loop.walks}
    return split >= set(order.dims)


def _check_sizes(plan: Plan, both: Both | None, layout: str) -> list[str]:
    b, s, h, _ = outside.places(layout)
    split, grouped, batch = (split_of(plan, axis, both) for axis in ("H", "G", "B"))
    chunks = local_multiple(plan)
    of = f"({grouped} * k.shape[{h}])" if grouped > 1 else f"k.shape[{h}]"
    multiple = f"{grouped} K" if grouped > 1 else "K"
    lines = []
    if split > 1:
        lines += [
            f"    if k.shape[{h}] % {split} or q.shape[{h}] % {of}:",
            f'        raise ValueError(f"{{shapes}}: K must be a multiple of {split}, '
            f'and H of {multiple}")',
        ]
    else:
        lines += [
            f"    if q.shape[{h}] % {of}:",
            f'        raise ValueError(f"{{shapes}}: H must be a multiple of {multiple}")',
        ]
    if batch > 1:
        lines += [
            f"    if q.shape[{b}] % {batch}:",
            f'        raise ValueError(f"{{shapes}}: B must be a multiple of {batch}")',
        ]
    world = "WORLD_SIZE" if plan.program.mesh.dims else "1"
    cut = next((x for x in "qk" if not held.whole(plan.program, x)), None)
    at = f"shape[{s}]"
    total = f"{cut}.{at} * {world}" if cut and plan.program.mesh.dims else f"q.{at}"
    if chunks > 1 and (cut or not plan.program.mesh.dims):
        cut = cut or "q"
        must = "even, two chunks of tokens" if chunks == 2 else f"a multiple of {chunks}"
        lines += [
            f"    if {cut}.{at} % {chunks}:",
            f'        raise ValueError(f"{{shapes}}: S must be {must}")',
        ]
    plans = [plan, *([both.backward] if both else [])]
    if any(_of_single_stripes(each) for each in plans):
        lines += [
            f"    if q.{at} < 2:",
            '        raise ValueError(f"{shapes}: S must be at least 2")',
        ]
    where = f" on {{{world}}} ranks" if plan.program.mesh.dims else ""
    lines += [
        f"    if seq is not None and {total} != seq:",
        f'        raise ValueError(f"{{shapes}}: S is not that of a sequence of {{seq}}{where}")',
    ]
    return lines
