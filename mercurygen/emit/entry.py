"""Emitted text of the public function, and of the checks on what it is given."""

from __future__ import annotations

from math import prod
from textwrap import wrap

from mercurygen.emit import border, nest, results
from mercurygen.emit.words import variable
from mercurygen.lower.plan import Plan


def local_multiple(plan: Plan) -> int:
    """Tokens of one rank must be a multiple of this."""
    return plan.program.order.halves


def global_multiple(plan: Plan) -> int:
    """Tokens of the whole sequence must be a multiple of this."""
    return plan.program.order.chunks(plan.program.mesh)


def head_split(plan: Plan) -> int:
    """Key/value heads must be a multiple of this."""
    return prod(plan.program.mesh.extent(dim) for dim in plan.head_dims)


def function(plan: Plan) -> str:
    """The public function."""
    mesh = plan.program.mesh
    signature = "mesh: DeviceMesh" if mesh.dims else "mesh: None = None"
    sizes = ", ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)
    what = f"device mesh, as made by `make_mesh`: {sizes}" if sizes else "not needed"
    held = "this rank's slice, as cut by `shard`" if mesh.dims else "the whole sequence"
    seq = "length of the whole sequence: S is checked against it if given"
    lines = [
        f"def attention(q: Tensor, k: Tensor, v: Tensor, {signature}, *, "
        "scale: float | None = None, seq: int | None = None, return_lse: bool = False,"
        ") -> Tensor | tuple[Tensor, Tensor]:",
        '    """Attend over the whole sequence. Forward only: refuses inputs that want a gradient.',
        "",
        "    Args:",
        f"        q: [B, S, H, D], {held}.",
        "        k: [B, S, K, D], likewise.",
        "        v: [B, S, K, E], likewise.",
        *wrap(f"mesh: {what}.", 98, initial_indent=" " * 8, subsequent_indent=" " * 12),
        "        scale: softmax scale; 1 / sqrt(D) if None.",
        f"        seq: {seq}.",
        "        return_lse: also return the log-sum-exp of the scores; the same on all ranks.",
        "",
        "    Returns:",
        "        out [B, S, H, E] in q's dtype; with return_lse, also lse [B, H, S] in float32",
        "        (float64 if q is).",
        "",
        "    Raises:",
        "        ValueError: the mesh or an argument does not fit this schedule.",
        "        RuntimeError: a gradient would be needed.",
        '    """',
        f"    _check(q, k, v, {'mesh, ' if mesh.dims else ''}seq)",
        "    scale = q.shape[3] ** -0.5 if scale is None else scale",
    ]
    return "\n".join([*lines, *(f"    {line}" if line else "" for line in _body(plan))])


def _body(plan: Plan) -> list[str]:
    names = plan.program.mesh.names
    groups = [variable(name) for name in names]
    lines = []
    if len(names) == 1:
        lines.append(f'{groups[0]} = mesh.get_group("{names[0]}")')
    elif names:
        lines.append(f"{', '.join(groups)} = (mesh.get_group(name) for name in MESH)")
    lines += ["", *border.before(plan)]
    if plan.nest.stages or plan.program.replicated:
        dims = results.group_dims(plan) if results.partial(plan) else plan.row_dims
        given = "".join(f", {variable(dim)}" for dim in dims)
        lines.append(f"out, lse = _attend(q, k, v{given}, scale)")
    else:
        causal = plan.program.mask == "causal"
        lines.append(f"out, lse = _block_forward(q, k, v, scale, causal={causal})")
    return [*lines, *border.after(plan)]


def check(plan: Plan) -> str:
    """`_check`: refusals, first of what all ranks see alike."""
    mesh = plan.program.mesh
    lines = [
        "def _check(q: Tensor, k: Tensor, v: Tensor, "
        f"{'mesh: DeviceMesh, ' if mesh.dims else ''}seq: int | None) -> None:",
        '    """Refuse what this schedule cannot do; facts that all ranks share come first."""',
    ]
    if mesh.dims:
        lines.append(_CHECK_MESH)
    return "\n".join([*lines, _CHECK_TENSORS, *_check_sizes(plan)])


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

_CHECK_TENSORS = """\
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("emitted without backward: call it under torch.no_grad()")
    names = f"q is {q.dtype}, k {k.dtype}, v {v.dtype}"
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"{names}: must be one floating dtype")
    if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{names}: on CUDA the kernel takes float16 and bfloat16")
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}: must be one")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(f"{shapes}: must be [B, S, H, D], [B, S, K, D], [B, S, K, E]")
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2] or not q.numel() or not v.numel():
        raise ValueError(f"{shapes}: must agree in D and K, and no size is 0")
    if q.is_cuda and max(q.shape[3], v.shape[3]) > 256:
        raise ValueError(f"{shapes}: on CUDA the kernel takes D and E up to 256")"""


def _check_sizes(plan: Plan) -> list[str]:
    split, chunks = head_split(plan), local_multiple(plan)
    lines = []
    if split > 1:
        lines += [
            f"    if k.shape[2] % {split} or q.shape[2] % k.shape[2]:",
            f'        raise ValueError(f"{{shapes}}: K must be a multiple of {split}, and H of K")',
        ]
    else:
        lines += [
            "    if q.shape[2] % k.shape[2]:",
            '        raise ValueError(f"{shapes}: H must be a multiple of K")',
        ]
    world = "WORLD_SIZE" if plan.program.mesh.dims else "1"
    total = f"q.shape[1] * {world}" if plan.program.mesh.dims else "q.shape[1]"
    if chunks > 1:
        lines += [
            f"    if q.shape[1] % {chunks}:",
            '        raise ValueError(f"{shapes}: S must be even, two chunks of tokens")',
        ]
    if nest.mask_form(plan) == "stripes" and head_split(plan) == 1:
        lines += [
            "    if q.shape[1] < 2:",
            '        raise ValueError(f"{shapes}: S must be at least 2, or stripes are no squares")',
        ]
    where = f" on {{{world}}} ranks" if plan.program.mesh.dims else ""
    lines += [
        f"    if seq is not None and {total} != seq:",
        f'        raise ValueError(f"{{shapes}}: S is not that of a sequence of {{seq}}{where}")',
    ]
    return lines
