"""Emitted text of a user's own lines: the body on one tile, and how contributions are merged."""

from __future__ import annotations

import math
from textwrap import indent, wrap

from mercurygen.emit.operator_source import body_lines, merge_lines
from mercurygen.emit.operator_words import Words
from mercurygen.ir.expr import Binary, Call, Expr, Name, Unary
from mercurygen.ir.operator import Combine, Loop
from mercurygen.ir.operator import Merge as UserMerge

TENSORS = "tuple[Tensor, ...]"


def results_type(words: Words) -> str:
    """Of a function that returns all outputs."""
    count = len(words.outputs)
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def parameters(words: Words) -> list[str]:
    """What the body is given, in order: tensors, positions, scalars, extents."""
    op = words.operator
    return [
        *(f"{name}: Tensor" for name in words.program.body),
        *(f"{words.at(axis)}: Tensor" for axis in words.placed),
        *(f"{scalar.name}: Tensor" for scalar in op.scalars),
        *(f"{axis}: int" for axis in words.extents),
    ]


def body(words: Words) -> str:
    """`_body`: the operator's lines, on tiles."""

    def said(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} {words.shape(words.program.tensor(name))}" for name in names)

    given, made = said(words.program.body), said(words.outputs)
    doc = wrap(
        f"{given} -> {made}, each dimension as long as its tile.", 92, break_long_words=False
    )
    lines = [
        f"def _body({', '.join(parameters(words))}) -> {results_type(words)}:",
        '    """The contributions of one tile, computed by the operator\'s own lines.',
        "",
        *(f"    {line}" for line in doc),
        '    """',
        *_widened(words),
        *(f"    {line}" for line in _made(words)),
        *_indices(words),
        *_positions(words),
        *_mask(words),
        *_loops(words),
        f"    return {', '.join(words.outputs)}",
    ]
    return "\n".join(lines)


def _widened(words: Words) -> list[str]:
    """Tiles in the dtype of accumulators, as every line of an operator has them."""
    names = [n for n in words.program.body if words.operator.tensor(n).dtype != "integer"]
    dtype = words.free("dtype")
    lines = [f"    {dtype} = torch.promote_types({words.floating[0]}.dtype, torch.float32)"]
    if not names:
        return lines
    if len(names) == 1:
        return [*lines, f"    {names[0]} = {names[0]}.to({dtype})"]
    each = words.free("tile")
    listed = ", ".join(names)
    return [*lines, f"    {listed} = ({each}.to({dtype}) for {each} in ({listed}))"]


def size(words: Words, axis: str, seen: tuple[str, ...] = ()) -> str | None:
    """Text of how long an axis is in the tiles that are given."""
    for name in words.program.body:
        tensor = words.program.tensor(name)
        for number, dim in enumerate(tensor.dims):
            if dim == (axis,):
                return f"{name}.shape[{number}]"
    for name in words.program.body:
        tensor = words.program.tensor(name)
        for number, dim in enumerate(tensor.dims):
            if axis in dim and axis not in seen:
                others = [size(words, a, (*seen, axis)) for a in dim if a != axis]
                if all(others):
                    product = " * ".join(others)
                    product = f"({product})" if len(others) > 1 else product
                    return f"{name}.shape[{number}] // {product}"
    return None


def _made(words: Words) -> list[str]:
    """Tensors that the lines write their contributions to."""
    source, dtype, lines = words.floating[0], words.free("dtype"), []
    for tensor in words.program.outputs:
        kind = "torch.int64" if tensor.dtype == "integer" else dtype
        sizes = [_dim_size(words, dim) for dim in tensor.dims]
        lines.append(f"{tensor.name} = {source}.new_empty({', '.join(sizes)}, dtype={kind})")
    return lines


def _dim_size(words: Words, dim: tuple[str, ...]) -> str:
    for name in words.program.body:
        for number, other in enumerate(words.program.tensor(name).dims):
            if other == dim:
                return f"{name}.shape[{number}]"
    return " * ".join(
        f"({text})" if "//" in text else text for text in (size(words, a) for a in dim)
    )


def _indices(words: Words) -> list[str]:
    """Loop variables over tiles: the whole tile that is given."""
    names = [v for v in words.axis_of if v not in words.points]
    if not names:
        return []
    values = ", ".join(["slice(None)"] * len(names))
    return [f"    {', '.join(names)} = {values}  # all of the tile"]


def _positions(words: Words) -> list[str]:
    """`position`, as the lines call it."""
    found = words.positioned
    if not found:
        return []
    index = words.free("index")
    kind = "int" if found[0] in words.points else "slice"
    first, *more = found
    if not more:
        value = f"{words.at(words.axis_of[first])}[{index}]"
    else:
        value = words.at(words.axis_of[found[-1]])
        for name in reversed(found[:-1]):
            value = f"{words.at(words.axis_of[name])} if {index} is {name} else {value}"
    return [
        "",
        f"    def position({index}: {kind}) -> Tensor:",
        '        """Global positions of what a loop variable stands for."""',
        f"        return {value}",
        "",
    ]


def _mask(words: Words) -> list[str]:
    mask = words.operator.mask
    if mask is None:
        return []
    return [f"    {mask.name} = _mask({', '.join(words.at(axis) for axis in mask.axes)})"]


def _loops(words: Words) -> list[str]:
    """Loops over single indices as loops; the lines within, as the user wrote them."""
    depth, lines = 1, [""]
    for loop in words.operator.loops:
        for name, axis in _over_points(loop):
            lines.append("    " * depth + f"for {name} in range({size(words, axis)}):")
            depth += 1
    return [*lines, indent(body_lines(words.operator), "    " * depth)]


def _over_points(loop: Loop) -> list[tuple[str, str]]:
    if loop.kind != "points":
        return []
    return list(zip(loop.variables, loop.axes, strict=True))


# --- merges ---------------------------------------------------------------------------------


def shares(words: Words) -> list[str]:
    """Names of what is merged in, one per output."""
    return [words.free(f"share_{name}") for name in words.outputs]


def merge(words: Words) -> str:
    """`_merge`: contributions into results, in place."""
    new = dict(zip(words.outputs, shares(words), strict=True))
    given = ", ".join(f"{name}: Tensor" for name in (*words.outputs, *new.values()))
    lines = [
        f"def _merge({given}) -> None:",
        '    """Merge shares into results, in place."""',
    ]
    for names, combine in groups(words):
        if combine is None or combine.kind == "sum":
            lines += [f"    {name} += {new[name]}" for name in names]
        elif combine.kind == "softmax":
            lines += _softmax(words, combine, new)
        else:
            lines.append(_user(combine, new))
    return "\n".join(lines)


def groups(words: Words) -> list[tuple[tuple[str, ...], Combine | None]]:
    """Outputs that are merged together, and how; None: each gets one contribution."""
    found = []
    for name in words.outputs:
        combine = words.operator.combine_of(name)
        if combine is None or combine.kind == "sum":
            found.append(((name,), combine))
        elif combine.outputs[0] == name:
            found.append((combine.outputs, combine))
    return found


def _user(combine: Combine, new: dict[str, str]) -> str:
    """The user's function; results that are its arguments themselves are copied first."""
    merge = combine.merge
    safe = all(_fresh(expr, merge) for expr in merge.result)
    old = [name if safe else f"{name}.clone()" for name in combine.outputs]
    given = ", ".join((*old, *(new[name] for name in combine.outputs)))
    into = ", ".join(f"{name}[...]" for name in combine.outputs)
    return f"    {into} = {merge.name}({given})"


def _fresh(expr: Expr, merge: UserMerge) -> bool:
    """Whether an expression is a new tensor, no part of an argument."""
    if isinstance(expr, Name):
        line = next((x for x in reversed(merge.body) if x.target == expr.id), None)
        return line is not None and _fresh(line.value, merge)
    return isinstance(expr, (Binary, Unary, Call))


def _softmax(words: Words, combine: Combine, new: dict[str, str]) -> list[str]:
    """The average by its weights, as of attention; a row over no keys stays 0 and -inf."""
    out, lse = combine.outputs
    floor, weight = words.free("floor"), words.free("weight")
    dims = words.operator.tensor(out).dims
    order = [words.operator.tensor(lse).dims.index(dim) for dim in dims[:-1]]
    turn = "" if order == sorted(order) else f".permute({', '.join(map(str, order))})"
    return [
        f"    {floor} = torch.finfo({lse}.dtype).min  # -inf less -inf is no number",
        f"    {weight} = torch.sigmoid({new[lse]} - {lse}.clamp(min={floor})){turn}",
        f"    {out}.lerp_({new[out]}.to({out}.dtype), {weight}.unsqueeze(-1))",
        f"    torch.logaddexp({lse}, {new[lse]}, out={lse})",
    ]


def user_merges(words: Words) -> list[str]:
    """The user's merge functions, as written."""
    found = {c.merge.name: merge_lines(c.merge) for c in words.operator.combines if c.merge}
    return list(found.values())


def identities(words: Words) -> dict[str, str]:
    """What merges to nothing, of every output, as text."""
    found = dict.fromkeys(words.outputs, "0")
    for combine in words.operator.combines:
        found |= dict(zip(combine.outputs, map(number, combine.identity), strict=True))
    return found


def number(value: int | float) -> str:
    """A number as Python text."""
    if isinstance(value, float) and math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    return repr(value)
