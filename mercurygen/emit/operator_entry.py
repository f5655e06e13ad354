"""Emitted text around a user's operator: the public function, its checks, where tensors lie."""

from __future__ import annotations

from textwrap import wrap

from mercurygen.emit import operator_body
from mercurygen.emit.operator_nest import Nest
from mercurygen.emit.operator_words import Words
from mercurygen.ir.expr import names, print_expr
from mercurygen.ir.operator import ScalarDecl
from mercurygen.ir.program import Tensor
from mercurygen.lower.plan import Reduce


def plain(text: str) -> str:
    """Somebody's text for a docstring: ASCII, no quote that could end it, no escape."""
    kept = "".join(c if c.isascii() and c.isprintable() else "?" for c in text.replace("\n", " "))
    return " ".join(kept.replace("\\", "/").replace('"', "'").split())


def function(words: Words) -> str:
    """The public function."""
    op, mesh = words.operator, words.program.mesh
    given = [f"{t.name}: Tensor" for t in op.inputs]
    given.append("mesh: DeviceMesh" if mesh.dims else "mesh: None = None")
    scalars = [
        f"{s.name}: float{'' if s.default is None else ' | None = None'}" for s in op.scalars
    ]
    given += ["*", *scalars] if scalars else []
    return "\n".join(
        [
            f"def {op.name}({', '.join(given)}) -> {operator_body.results_type(words)}:",
            *_docstring(words),
            *(f"    {line}" if line else "" for line in _lines(words)),
        ]
    )


def _docstring(words: Words) -> list[str]:
    op, mesh = words.operator, words.program.mesh
    about = plain(op.doc.partition("\n\n")[0]) or "The operator, over all ranks."
    first, *more = wrap(about, 92, break_long_words=True, break_on_hyphens=False)
    sizes = ", ".join(f"{dim.name}={dim.size}" for dim in mesh.dims)
    shapes = {t.name: f"{words.shape(t)}{_held(words, t)}" for t in words.program.tensors}
    what = f"device mesh, as made by `make_mesh`: {sizes}" if sizes else "not needed"
    lines = [f'"""{first}', *more, "", "Forward only: refuses inputs that want a gradient.", ""]
    lines += ["Args:"]
    for tensor in op.inputs:
        lines += _item(f"{tensor.name}: {shapes[tensor.name]}.")
    lines += _item(f"mesh: {what}.")
    for scalar in op.scalars:
        default = "" if scalar.default is None else f"; {print_expr(scalar.default)} if None"
        lines += _item(f"{scalar.name}: a number{default}.")
    lines += ["", "Returns:"]
    for tensor in words.program.outputs:
        lines += _item(f"{tensor.name} {shapes[tensor.name]}, {_dtype_words(words, tensor)}.")
    lines += ["", "Raises:", "    ValueError: the mesh or an argument does not fit this schedule."]
    lines += ["    RuntimeError: a gradient would be needed.", '"""']
    return [f"    {line}" if line else "" for line in lines]


def _item(text: str) -> list[str]:
    return wrap(text, 92, initial_indent="    ", subsequent_indent=" " * 8, break_long_words=False)


def _held(words: Words, tensor: Tensor) -> str:
    """How a tensor's dimensions are split, in words."""
    names = words.program.mesh.names
    parts: dict[str, list[str]] = {}
    for dim, axis in zip(names, tensor.pin, strict=True):
        if axis is not None:
            parts.setdefault(axis, []).append(dim)
    if not names:
        return ""
    split = [f"{axis} split over {' and '.join(dims)}" for axis, dims in parts.items()]
    whole = [d for d in names if all(d not in dims for dims in parts.values())]
    split += [f"the same along {' and '.join(whole)}"] if whole and split else []
    return f", {', '.join(split)}" if split else ", all of it on every rank"


def _dtype_words(words: Words, tensor: Tensor) -> str:
    if tensor.dtype == "integer":
        return "int64"
    return "in the inputs' dtype" if tensor.dtype == "inputs" else "at least float32"


def _lines(words: Words) -> list[str]:
    """The body of the public function."""
    op, mesh, nest = words.operator, words.program.mesh, Nest(words)
    given = ", ".join(t.name for t in op.inputs)
    lines = [f"_check({given}{', mesh' if mesh.dims else ''})"]
    used = set(nest.groups()) | {r.dim for r in words.plan.nest.reduces}
    for dim in mesh.in_order(used):
        lines.append(f'{words.group(dim)} = mesh.get_group("{dim}")')
    lines += _extents(words)
    for scalar in op.scalars:
        lines += _scalar(words, scalar)
    if words.plan.nest.stages or words.placed:
        lines.append(f"{', '.join(words.outputs)} = _results({', '.join(nest.arguments())})")
    else:
        lines.append(f"{', '.join(words.outputs)} = {nest.call()}")
    lines += [line for reduce in words.plan.nest.reduces for line in _reduce(words, reduce)]
    results = [
        f"{t.name}.to({words.floating[0]}.dtype)" if t.dtype == "inputs" else t.name
        for t in words.program.outputs
    ]
    return [*lines, f"return {', '.join(results)}"]


def needed_extents(words: Words) -> tuple[str, ...]:
    """Axes whose extents over all ranks the public function works out."""
    named = set(words.extents)
    for scalar in words.operator.scalars:
        if scalar.default is not None:
            named |= set(names(scalar.default))
    return tuple(a.name for a in words.operator.axes if a.name in named)


def extent(words: Words, axis: str) -> str:
    """Text of an axis' extent over all ranks, from what the caller gives."""
    ways = {}
    for tensor in words.program.inputs:
        for number, dim in enumerate(tensor.dims):
            if axis in dim:
                count = _ways(words, tensor, axis)
                ways.setdefault(len(dim), []).append((f"{tensor.name}.shape[{number}]", count, dim))
    if 1 in ways:
        text, count, _ = ways[1][0]
        return text if count == 1 else f"{text} * {count}"
    text, count, dim = ways[min(ways)][0]
    others = " * ".join(extent_or_name(words, a) for a in dim if a != axis)
    others = f"({others})" if " " in others else others
    return f"{text} // {others}" if count == 1 else f"{text} * {count} // {others}"


def extent_or_name(words: Words, axis: str) -> str:
    """An extent as an operand."""
    text = extent(words, axis)
    return f"({text})" if " " in text else text


def _ways(words: Words, tensor: Tensor, axis: str) -> int:
    mesh = words.program.mesh
    found = 1
    for dim, pin in zip(mesh.dims, tensor.pin, strict=True):
        found *= dim.size if pin == axis else 1
    return found


def _extents(words: Words) -> list[str]:
    return [f"{axis} = {extent(words, axis)}" for axis in needed_extents(words)]


def _scalar(words: Words, scalar: ScalarDecl) -> list[str]:
    """A number as the lines have it: a tensor [] of the accumulators' dtype."""
    name, first = scalar.name, words.floating[0]
    value = name
    if scalar.default is not None:
        value = f"{print_expr(scalar.default)} if {name} is None else {name}"
    dtype = f"torch.promote_types({first}.dtype, torch.float32)"
    return [f"{name} = torch.tensor({value}, dtype={dtype}, device={first}.device)"]


def _reduce(words: Words, reduce: Reduce) -> list[str]:
    """Partial results of a dimension's ranks, as one."""
    group, outputs = words.group(reduce.dim), list(reduce.tensors)
    if reduce.kind == "sum":
        if reduce.axis is None:
            return [f"{name} = _sum_over({name}, {group})" for name in outputs]
        return [
            f"{name} = _sum_of_part({name}, "
            f"{words.program.tensor(name).dimension(reduce.axis)}, {group})"
            for name in outputs
        ]
    targets = ", ".join(outputs) if len(outputs) > 1 else f"({outputs[0]},)"
    given = f"({', '.join(outputs)}{',' if len(outputs) == 1 else ''})"
    if reduce.axis is None:
        return [f"{targets} = _merge_over({given}, {group})"]
    dims = [str(words.program.tensor(name).dimension(reduce.axis)) for name in outputs]
    cut = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
    return [f"{targets} = _merge_of_part({given}, {cut}, {group})"]


# --- checks ---------------------------------------------------------------------------------


def check(words: Words) -> str:
    """`_check`: refusals, first of what all ranks see alike."""
    op, mesh = words.operator, words.program.mesh
    given = [f"{t.name}: Tensor" for t in op.inputs] + (["mesh: DeviceMesh"] if mesh.dims else [])
    lines = [
        f"def _check({', '.join(given)}) -> None:",
        '    """Refuse what this schedule cannot do; facts that all ranks share come first."""',
    ]
    ours = {x: words.free(x) for x in ("given", "name", "x", "sizes", "place", "dim", "line")}
    first = op.inputs[0].name
    if mesh.dims:
        lines.append(_CHECK_MESH.format(first=first, operator=op.name, **ours))
    pairs = ", ".join(f'"{t.name}": {t.name}' for t in op.inputs)
    lines += [
        f"    {ours['given']} = {{{pairs}}}",
        _CHECK_GRADIENT.format(**ours),
        *_check_dtypes(words, ours),
        *_check_shapes(words),
    ]
    return "\n".join(lines)


_CHECK_MESH = """\
    if not isinstance(mesh, DeviceMesh) or mesh.get_coordinate() is None:
        raise ValueError(f"mesh is {{mesh}}: must be a DeviceMesh that holds this rank")
    {sizes} = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if list({sizes}.items()) != list(MESH.items()):
        raise ValueError(f"mesh is {{{sizes}}}, {operator} is scheduled for {{MESH}}")
    {place} = mesh.get_coordinate()
    for {dim}, {name} in enumerate(MESH):
        {line} = mesh.mesh[(*{place}[:{dim}], slice(None), *{place}[{dim} + 1 :])].tolist()
        if dist.get_process_group_ranks(mesh.get_group({name})) != {line}:
            raise ValueError(
                f"mesh: {{{name}}} has {{{line}}}, its group another order; see make_mesh"
            )
    if {first}.device.type != mesh.device_type:
        raise ValueError(f"{first} is on {{{first}.device}}, the mesh on {{mesh.device_type}}")"""

_CHECK_GRADIENT = """\
    if torch.is_grad_enabled() and any({x}.requires_grad for {x} in {given}.values()):
        raise RuntimeError("emitted without backward: call it under torch.no_grad()")"""


def _check_dtypes(words: Words, ours: dict[str, str]) -> list[str]:
    """One dtype and one device."""
    op, first = words.operator, words.floating[0]
    kinds = {"inputs": f"{first}.dtype", "integer": "torch.int64"}
    kinds["accumulator"] = f"torch.promote_types({first}.dtype, torch.float32)"
    if all(t.dtype == "accumulator" for t in op.inputs if t.dtype != "integer"):
        kinds["accumulator"] = f"{first}.dtype"
    x, name, given = ours["x"], ours["name"], ours["given"]
    lines = [
        f"    if not {first}.is_floating_point():",
        f'        raise ValueError(f"{first} is {{{first}.dtype}}: must be a floating dtype")',
    ]
    for tensor in op.inputs:
        if tensor.name == first:
            continue
        want = kinds[tensor.dtype]
        lines += [
            f"    if {tensor.name}.dtype != {want}:",
            f'        raise ValueError(f"{tensor.name} is {{{tensor.name}.dtype}}: '
            f'must be {{{want}}}")',
        ]
    if len(op.inputs) > 1:
        lines += [
            f"    for {name}, {x} in {given}.items():",
            f"        if {x}.device != {first}.device:",
            f'            raise ValueError(f"{{{name}}} is on {{{x}.device}}, {first} on '
            f'{{{first}.device}}")',
        ]
    return lines


def _check_shapes(words: Words) -> list[str]:
    """Every tensor's shape, from the extents over all ranks."""
    op, program = words.operator, words.program
    lines = []
    for tensor in op.inputs:
        lines += [
            f"    if {tensor.name}.ndim != {len(tensor.dims)} or not {tensor.name}.numel():",
            f'        raise ValueError(f"{tensor.name} is {{tuple({tensor.name}.shape)}}: must be '
            f'{words.shape(tensor)}, no size 0")',
        ]
    lines += [f"    {axis.name} = {extent(words, axis.name)}" for axis in op.axes]
    for tensor in program.inputs:
        sizes = []
        for dim in tensor.dims:
            ways = [_ways(words, tensor, a) for a in dim]
            text = " * ".join(
                a if w == 1 else f"{a} // {w}" for a, w in zip(dim, ways, strict=True)
            )
            sizes.append(text)
        want = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        name = tensor.name
        if _gives(words, tensor):
            continue
        lines += [
            f"    if tuple({name}.shape) != {want}:",
            f'        raise ValueError(f"{name} is {{tuple({name}.shape)}}: must be {{{want}}}")',
        ]
    for axis in op.axes:
        count, known = program_count(words, axis.name), _known_ways(words, axis.name)
        if known % count:
            lines += [
                f"    if {axis.name} % {count}:",
                f'        raise ValueError(f"{axis.name} is {{{axis.name}}}: must be a multiple of '
                f'{count}")',
            ]
    if program.mask_axes:
        rows, cols = program.mask_axes
        lines += [
            f"    if {rows} != {cols}:",
            f'        raise ValueError(f"{rows} is {{{rows}}}, {cols} is {{{cols}}}: '
            'the mask wants as many rows as columns")',
        ]
    return lines


def _gives(words: Words, tensor: Tensor) -> bool:
    """Whether every extent of a tensor is taken from its own shape."""
    wanted = {f"{tensor.name}.shape[{i}]" for i in range(len(tensor.dims))}
    return all(len(dim) == 1 for dim in tensor.dims) and wanted <= {
        extent(words, axis).split(" ")[0] for axis in tensor.axes
    }


def program_count(words: Words, axis: str) -> int:
    """Equal parts that an axis is cut into."""
    return words.plan.atoms.count[axis]


def _known_ways(words: Words, axis: str) -> int:
    """Ranks by which the extent is a multiple already: it is some ranks' parts together."""
    text = extent(words, axis)
    tail = text.rpartition(" * ")[2]
    return int(tail) if "//" not in text and tail.isdecimal() else 1
