"""Emitted text of results that nothing is merged into yet."""

from __future__ import annotations

from mercurygen.emit import operator_body
from mercurygen.emit.operator_words import Words
from mercurygen.ir.program import Tensor


def nothing(words: Words) -> list[str]:
    """Results that nothing is merged into yet."""
    program, lines = words.program, []
    dtype, identity = words.free("dtype"), operator_body.identities(words)
    source = words.floating[0]
    if any(t.dtype != "integer" for t in program.outputs):
        lines.append(f"{dtype} = torch.promote_types({source}.dtype, torch.float32)")
    for tensor in program.outputs:
        kind = "torch.int64" if tensor.dtype == "integer" else dtype
        sizes = ", ".join(_size(words, tensor, dim) for dim in tensor.dims)
        shape = f"({sizes},)" if len(tensor.dims) == 1 else f"({sizes})"
        value = identity[tensor.name]
        fill = f"new_zeros({shape}, " if value == "0" else f"new_full({shape}, {value}, "
        lines.append(f"{tensor.name} = {source}.{fill}dtype={kind})")
    return lines


def _size(words: Words, tensor: Tensor, dim: tuple[str, ...]) -> str:
    """Text of how long a dimension of a result is, before any tile is here."""
    for name in words.program.body:
        source = words.program.tensor(name)
        if dim not in source.dims:
            continue
        text = f"{name}.shape[{source.dims.index(dim)}]"
        axis = dim[0]
        now = words.stored(source, axis)
        gathered = {
            s.dim for loop in words.plan.nest.loops if name in loop.tensors for s in loop.leading
        }
        now = {d: None if d in gathered else who for d, who in now.items()}
        want = words.result(tensor, axis)
        for d, who in want.items():
            if who is None and now[d]:
                text += f' * MESH["{d}"]'
            elif who and now[d] is None:
                text += f' // MESH["{d}"]'
        return text
    return " * ".join(_size(words, tensor, (axis,)) for axis in dim)
