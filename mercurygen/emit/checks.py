"""Emitted text of the checks on what the public function is given."""

from __future__ import annotations

import re
from math import lcm, prod

from mercurygen.emit import border, held, masks, outside, ring_kinds
from mercurygen.emit.differentiable import Both
from mercurygen.emit.loops import runs_of_chunk
from mercurygen.ir.caller import PACKED, exchanged
from mercurygen.ir.kernel import TRITON
from mercurygen.lower.plan import Plan

_AUTOCAST = """\
def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    \"\"\"Cast to the dtype of torch.autocast, if it is on, what torch's own attention would.\"\"\"
    device, narrow = q.device.type, (torch.float32, torch.float16, torch.bfloat16)
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in narrow else x for x in (q, k, v))


"""


def local_multiple(plan: Plan) -> int:
    """Tokens of one rank must be a multiple of this."""
    return plan.program.order.halves * runs_of_chunk(plan)


def global_multiple(plan: Plan) -> int:
    """Tokens of the whole sequence must be a multiple of this."""
    return plan.program.order.chunks(plan.program.mesh) * runs_of_chunk(plan)


def split_of(plan: Plan, axis: str, both: Both | None = None) -> int:
    """An axis that is not the sequence must be a multiple of this: its ranks times its parts."""
    ranks = prod(plan.program.mesh.extent(dim) for dim in plan.program.parallel_dims(axis))
    ways = lcm(ranks * plan.atoms.parts(axis), border.splits(plan, axis))
    return lcm(ways, split_of(both.backward, axis)) if both else ways


def seqs(plan: Plan, typed: str = "") -> str:
    """Arguments, or parameters of a type, that say how long all is."""
    names = ["seq", *(["seq_kv"] * (plan.program.align is not None))]
    return ", ".join(name + typed for name in names)


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
        f"mesh: {'DeviceMesh' if mesh.dims else 'None'}, {seqs(plan, ': int | None')}"
        f"{', window: tuple[int, int]' if plan.program.mask == 'window' else ''}) -> None:",
        '    """Refuse what this schedule cannot do; facts that all ranks share come first."""',
    ]
    lines.append(_CHECK_MESH if mesh.dims else _CHECK_NO_MESH)
    if plan.program.mask == "window":
        lines += [_CHECK_WINDOW, *_one_way(plan, both)]
    if both is None:
        lines.append(_CHECK_GRADIENT)
    lines += [_check_tensors(plan, layout)]
    sizes = "\n".join(_check_sizes(plan, both, layout))
    if not held.sliced(plan.program):  # of the whole tensors, which all parts must agree on
        sizes = re.sub(r"\b([qkv])\.shape\[", r"\1_sizes[", sizes)
    lines.append(sizes)
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


def _check_tensors(plan: Plan, layout: str) -> str:
    """The checks of dtypes, devices and shapes."""
    b, s, h, d = outside.places(layout)
    sliced = held.sliced(plan.program)
    tokens = {name: held.length(plan, name) for name in "qkv"}
    at = "::2" if (b, s) == (0, 2) else f":{h}" if layout == PACKED else ":2"  # B and S
    both = f"q.shape[{at}] == k.shape[{at}] == v.shape[{at}]"
    same = both if tokens["q"] == tokens["k"] else f"k.shape[{at}] == v.shape[{at}]"
    q, k, v = (outside.shape(layout, *held.sizes(plan.program, name)) for name in "qkv")
    name = f"layout {layout}, " if exchanged(layout) else ""
    count = d + 1
    lines = [
        _CHECK_DTYPES,
        *([] if plan.program.kernel == TRITON else [_CHECK_DTYPE_OF_ATEN]),
        _CHECK_DEVICES,
        f'    shapes = f"{name}q {{tuple(q.shape)}}, k {{tuple(k.shape)}}, v {{tuple(v.shape)}}"',
        f"    if not q.ndim == k.ndim == v.ndim == {count}{f' or not {same}' * sliced}:",
        f'        raise ValueError(f"{{shapes}}: must be {q}, {k}, {v}")',
    ]
    if not sliced:
        of_whole = re.sub(r"\.shape\[", "_sizes[", both)
        lines += [
            '    named = zip("qkv", (q, k, v), strict=True)',
            "    q_sizes, k_sizes, v_sizes = (_full_sizes(name, x.shape) for name, x in named)",
            f"    if not {of_whole}:",
            '        full = f"parts of a q {q_sizes}, k {k_sizes}, v {v_sizes}"',
            '        raise ValueError(f"{shapes} are {full}: must agree in B and N")',
        ]
    elif plan.program.align is not None:
        lines += [
            f"    if q.shape[{b}] != k.shape[{b}]:",
            '        raise ValueError(f"{shapes}: must agree in B")',
        ]
    elif same != both:
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
    if not sliced:
        last = re.sub(r"\b([qkv])\.shape\[", r"\1_sizes[", last)
    return "\n".join([*lines, last])


def _check_sequence(plan: Plan, s: int) -> list[str]:
    """Of pins of other axes, too: the length of the whole sequence."""
    multiple, lines = global_multiple(plan), []
    if multiple > 1:
        lines += [
            f"    if q.shape[{s}] % {multiple}:",
            f'        raise ValueError(f"{{shapes}}: N must be a multiple of {multiple}")',
        ]
    if _of_single_stripes(plan):
        lines += [
            f"    if q.shape[{s}] < {2 * multiple}:",
            f'        raise ValueError(f"{{shapes}}: N must be at least {2 * multiple}")',
        ]
    return [
        *lines,
        f"    if seq is not None and q.shape[{s}] != seq:",
        '        raise ValueError(f"{shapes}: N is not that of a sequence of {seq}")',
    ]


def _of_single_stripes(plan: Plan) -> bool:
    """Whether tiles are single stripes, of which a causal square loses a row and a column."""
    form, order = masks.mask_form(plan), plan.program.order
    if form not in ("stripes", "spaced") or (plan.before and held.sliced(plan.program)):
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
    if plan.program.align is not None:
        return [*lines, *_check_both(plan, f"shape[{s}]")]
    world = "WORLD_SIZE" if plan.program.mesh.dims else "1"
    cut = next((x for x in "qk" if not held.whole(plan.program, x)), None)
    at = f"shape[{s}]"
    if not held.sliced(plan.program):
        return [*lines, *_check_sequence(plan, s)]
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


def _check_both(plan: Plan, at: str) -> list[str]:
    """Whether queries, and keys, are as many as the schedule takes, and as are said to be."""
    chunks, lines = local_multiple(plan), []
    for name, seq in (("q", "seq"), ("k", "seq_kv")):
        whole, letter = held.whole(plan.program, name), held.length(plan, name)
        multiple = global_multiple(plan) if whole else chunks
        if multiple > 1:
            must = "even, two chunks of tokens" if multiple == 2 else f"a multiple of {multiple}"
            lines += [
                f"    if {name}.{at} % {multiple}:",
                f'        raise ValueError(f"{{shapes}}: {letter} must be {must}")',
            ]
        cut = plan.program.mesh.dims and not whole
        total = f"{name}.{at} * WORLD_SIZE" if cut else f"{name}.{at}"
        where = " on {WORLD_SIZE} ranks" if cut else ""
        lines += [
            f"    if {seq} is not None and {total} != {seq}:",
            f'        raise ValueError(f"{{shapes}}: {letter} is not that of {{{seq}}}{where}")',
        ]
    return lines
