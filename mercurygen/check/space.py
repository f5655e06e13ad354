"""The space that a proof is about: chunks of sequence and heads, and what the mask asks of them."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import prod

from mercurygen.check.content import Content, brief
from mercurygen.check.report import span
from mercurygen.ir.program import Program, Tensor
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import Block


@lru_cache(maxsize=65536)
def bits(chunks: tuple[int, ...]) -> int:
    """A set of chunks as the bits of a number."""
    return sum(1 << chunk for chunk in chunks)


class Space:
    """Chunks of sequence and heads of a plan: what a caller gives and wants on every rank."""

    def __init__(self, plan: Plan) -> None:
        self.program = program = plan.program
        mesh = program.mesh
        self.chunks = program.order.chunks(mesh)
        split = [dim for dim in mesh.names if self._splits_heads(dim)]
        self.heads = prod(mesh.extent(dim) for dim in split)
        self.whole = {t.name: plan.nbytes(t.name, ()) for t in program.tensors}

    def _splits_heads(self, dim: str) -> bool:
        program = self.program
        axes = {program.parallel_axis(dim), *(program.pinned(t, dim) for t in program.tensors)}
        return bool(axes - {None, *program.mask_axes})

    def pinned(self, tensor: Tensor, rank: int) -> Content:
        """What the caller holds, or wants, of a tensor on a rank."""
        program, mesh = self.program, self.program.mesh
        here, held, part, ways = mesh.coordinate(rank), {}, 0, 1
        for dim in mesh.names:
            axis = program.pinned(tensor, dim)
            if axis == program.sequence(tensor):
                held[dim] = (here[dim],)
            elif axis is not None:
                part, ways = part * mesh.extent(dim) + here[dim], ways * mesh.extent(dim)
        size = self.heads // ways
        heads = tuple(range(part * size, (part + 1) * size))
        return Content(tensor.name, program.order.owned(mesh, held), heads)

    def nbytes(self, content: Content) -> Fraction:
        """How long a buffer with this content is; a head chunk may be a part of a head."""
        whole = self.whole[content.tensor] * content.cells
        return Fraction(whole, self.chunks * self.heads)

    def domain(self, row: int) -> int:
        """The columns that the mask leaves a row, as bits."""
        return (1 << (row + 1 if self.program.mask == "causal" else self.chunks)) - 1


def members(number: int) -> tuple[int, ...]:
    """The chunks whose bits a number has."""
    return tuple(i for i in range(number.bit_length()) if number >> i & 1)


@lru_cache(maxsize=65536)
def shares_of(block: Block, cols: tuple[int, ...]) -> tuple[int, ...]:
    """For each row of a block the columns that it gives, as bits."""
    start, stop = block.cols
    height = block.rows[1] - block.rows[0]
    if not block.causal:
        return (bits(cols[start:stop]),) * height
    return tuple(bits(cols[start : start + i + 1]) for i in range(height))


def fault_of(
    program: Program, block: Block, rows: tuple[int, ...], cols: tuple[int, ...]
) -> str | None:
    """Why the kernel cannot do a block, or must not."""
    for what, (start, stop), chunks in (("row", block.rows, rows), ("column", block.cols, cols)):
        if not 0 <= start < stop <= len(chunks):
            return f"{what} chunks {span((start, stop))} of {len(chunks)}"
    mine, theirs = rows[slice(*block.rows)], cols[slice(*block.cols)]
    if block.causal and program.mask != "causal":
        return "a causal block under a full mask"
    if block.causal and mine != theirs:
        return f"a causal block of rows {brief(mine)} and columns {brief(theirs)} is no square"
    if not block.causal and program.mask == "causal" and mine[0] <= theirs[-1]:
        return f"rows of chunk {mine[0]} would see columns of chunk {theirs[-1]}"
    return None
