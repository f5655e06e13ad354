"""Emitted text of the self-check of a user's operator."""

from __future__ import annotations

from mercurygen.emit.operator_words import Words
from mercurygen.emit.templates import render
from mercurygen.ir.expr import print_expr


def self_check(words: Words) -> str:
    op, program = words.operator, words.program
    sizes = _check_sizes(words)
    made = []
    for tensor in op.inputs:
        sizes_of = [" * ".join(dim) for dim in tensor.dims]
        shape = f"({', '.join(sizes_of)}{',' if len(sizes_of) == 1 else ''})"
        if tensor.dtype == "integer":
            made.append(f'"{tensor.name}": torch.randint(0, 2, {shape}, generator=random)')
            continue
        wide = tensor.dtype == "accumulator"
        dtype = "torch.promote_types(dtype, torch.float32)" if wide else "dtype"
        drawn = f"torch.randn({shape}, generator=random, dtype=torch.float64)"
        made.append(f'"{tensor.name}": {drawn}.to({dtype})')
    alone = [f'whole["{name}"]' for name in program.body]
    alone += [f"torch.arange({axis})" for axis in words.placed]
    numbers = ["0.5" if s.default is None else print_expr(s.default) for s in op.scalars]
    alone += [f"torch.tensor({number}, dtype=torch.float64)" for number in numbers]
    alone += words.extents
    required = [s.name for s in op.scalars if s.default is None]
    return render(
        "operator_self_check",
        world=program.mesh.size,
        operator=op.name,
        extents=", ".join(sizes),
        sizes=", ".join(str(size) for size in sizes.values()),
        made=made,
        alone=", ".join(alone),
        outputs=", ".join(f'"{name}"' for name in words.outputs)
        + ("," if len(words.outputs) == 1 else ""),
        scalars="".join(f", {name}=0.5" for name in required),
    )


def _check_sizes(words: Words) -> dict[str, int]:
    """Extents for the self-check: small, and different where they may be."""
    program, sizes = words.program, {}
    for number, axis in enumerate(program.axes):
        count = words.plan.atoms.count[axis.name]
        sizes[axis.name] = count * (2 + number % 3) if count > 1 else 3 + number
    if program.mask_axes:
        rows, cols = program.mask_axes
        sizes[cols] = sizes[rows] = 4 * words.plan.atoms.count[rows]
    return sizes
