"""The lines of a program's text, read one by one; every name is checked against those before it."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from typing import TypeVar

from mercurygen.errors import UserError, closest, shorten
from mercurygen.ir.documents import read as read_lengths
from mercurygen.ir.kernel import Options, read_kernel
from mercurygen.ir.layout import ORDERS, Order
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Dim, Mesh, check_name
from mercurygen.ir.names import REPLICATED
from mercurygen.ir.options import read_options
from mercurygen.ir.problem import ALIGNS, DTYPES, LARGEST, MASKS
from mercurygen.ir.program import (
    COMBINES,
    SEQUENCE,
    Axis,
    BorderStep,
    Combine,
    Program,
    Stage,
    Tensor,
    TileLoop,
)

ALIGNED = tuple(align.replace("-", "_") for align in ALIGNS)  # of a mask that compares positions
APART = ("apart",)  # and of one that does not
NO_MASK = ("full", (None, 0, None), ())
MOVES = {"gather": "over", "walk": "along", "scatter": "over"}
TENSOR_DTYPES = ("accumulator", "integer")  # beside that of the inputs, which is not written
LONGEST_NAME = 100  # of what the operator names
LARGEST_MESH = 2**20  # ranks along a dimension; parts of a tile loop
MOST_DIMS = 32

T = TypeVar("T")


class Reader:
    """The lines of a program, in order, and the names that they have made known."""

    def __init__(self, file: str, lines: list[Line]) -> None:
        self.file, self.lines, self.next = file, lines, 0
        self.mesh = Mesh(())
        self.axes: list[Axis] = []
        self.tensors: list[Tensor] = []
        self.parallel: list[str | None] = []
        self.replicated: dict[tuple[str, str], str | None] = {}

    def program(self) -> Program:
        """All lines."""
        operator = self.one("program", lambda line: self.fresh(line, "operator", ()))
        self.mesh = self.one("mesh", self.read_mesh)
        self.parallel = [None for _ in self.mesh.dims]
        dtype = self.one("dtype", lambda line: line.word(*DTYPES))
        self.many("axis", self.read_axis)
        masks = self.many("mask", self.read_mask, most=1)
        mask, (window, ahead, align), mask_axes = masks[0] if masks else NO_MASK
        documents = self.many("documents", self.read_documents, most=1)
        for role in ("input", "derived", "output"):
            self.many(role, lambda line, role=role: self.read_tensor(line, role))
        together = self.many("together", self.tensor_names)
        combines = self.many("combine", self.read_combine)
        loops = self.many("loops", self.axis_names, most=1)
        order = self.many("order", self.read_order, most=1)
        self.many("replicated", self.read_replicated)
        joins = self.many("join", self.axis_names)
        tiles = self.many("tile", self.read_tile)
        border = self.many("reshard", self.read_reshard)
        stages, (body, kernel, options) = self.read_nest()
        border += self.many("reshard", self.read_reshard)
        if self.next < len(self.lines):
            raise self.lines[self.next].error("syntax", "the line stands too late, or is unknown")
        return Program(
            operator=operator,
            dtype=dtype,
            mask=mask,
            mask_axes=mask_axes,
            mesh=self.mesh,
            axes=tuple(self.axes),
            tensors=tuple(self.tensors),
            together=tuple(together),
            order=order[0] if order else None,
            parallel=tuple(self.parallel),
            replicated=tuple(self.replicated),
            stages=stages,
            border=tuple(step for steps in border for step in steps),
            kernel=kernel,
            kernel_options=options,
            combines=tuple(combines),
            window=window,
            ahead=ahead,
            align=align,
            documents=documents[0] if documents else (),
            loops=loops[0] if loops else (),
            body=body,
            joins=tuple(joins),
            tiles=tuple(tiles),
            reduce_dtype=tuple((*pair, x) for pair, x in self.replicated.items() if x is not None),
        )

    # --- lines --------------------------------------------------------------------------------

    def one(self, word: str, read: Callable[[Line], T]) -> T:
        """What the next line says, which must begin with this word."""
        if self.next == len(self.lines):
            raise UserError("incomplete", f"{self.file}: the line `{word} …` is missing")
        found = self.many(word, read, most=1)
        if not found:
            raise self.lines[self.next].error("incomplete", f"expected the line `{word} …`")
        return found[0]

    def many(self, word: str, read: Callable[[Line], T], most: int | None = None) -> list[T]:
        """What the next lines say that begin with this word."""
        found: list[T] = []
        while self.next < len(self.lines) and len(found) != most:
            line = self.lines[self.next]
            if not line.take(word):
                break
            self.next += 1
            found.append(read(line))
            line.end()
        return found

    # --- names --------------------------------------------------------------------------------

    def fresh(self, line: Line, what: str, taken: Iterable[str]) -> str:
        """A new name of the operator's: any but a Python keyword."""
        start = line.place
        name = line.name(f"a name ({what})")
        if keyword.iskeyword(name) or len(name) > LONGEST_NAME:
            message = f"{what} {shorten(name)!r} is not a name"
            raise UserError("not-a-name", message, span=line.span(start))
        if name in set(taken):
            raise UserError("named-twice", f"{what} {name!r} is there twice", span=line.span(start))
        return name

    def known(self, line: Line, what: str, names: Iterable[str]) -> tuple[str, ...]:
        """A list of names that are all among these."""
        start, known = line.place, list(names)
        found = line.names(what)
        for name in found:
            if name not in known:
                message = f"no {what} {shorten(name)!r}"
                help = closest(name, known)
                raise UserError("unknown-name", message, span=line.span(start), help=help)
        return found

    def single(self, line: Line, what: str, names: Iterable[str]) -> str:
        """One such name."""
        start = line.place
        found = self.known(line, what, names)
        if len(found) > 1:
            message = f"expected one {what}, found {len(found)}"
            raise UserError("syntax", message, span=line.span(start))
        return found[0]

    def axis(self, line: Line) -> str:
        """An axis."""
        return self.single(line, "axis", (axis.name for axis in self.axes))

    def axis_names(self, line: Line) -> tuple[str, ...]:
        """A list of axes."""
        return self.known(line, "axis", (axis.name for axis in self.axes))

    def split_axis(self, line: Line) -> str | None:
        """An axis, or None where all of a tensor is on every rank."""
        return None if line.take(REPLICATED) else self.axis(line)

    def reads(self, line: Line) -> tuple[str, ...]:
        """A list of tensors that are no outputs."""
        return self.known(line, "input", (t.name for t in self.tensors if t.role != "output"))

    def dtype(self, line: Line) -> str | None:
        """`as bfloat16`, or nothing."""
        return line.word(*DTYPES) if line.take("as") else None

    def tensor_names(self, line: Line) -> tuple[str, ...]:
        """A list of tensors."""
        return self.known(line, "tensor", (tensor.name for tensor in self.tensors))

    def dim(self, line: Line) -> str:
        """A mesh dimension."""
        return self.single(line, "mesh dimension", self.mesh.names)

    def dims(self, line: Line) -> tuple[str, ...]:
        """A list of mesh dimensions, in mesh order."""
        start = line.place
        dims = self.known(line, "mesh dimension", self.mesh.names)
        if dims != self.mesh.in_order(dims):
            message = "mesh dimensions stand in mesh order"
            help = f"write `{', '.join(self.mesh.in_order(dims))}`"
            raise UserError("out-of-order", message, span=line.span(start), help=help)
        return dims

    def size(self, line: Line, what: str, least: int, most: int) -> int:
        """A number in a range."""
        start = line.place
        size = line.number_(what)
        if not least <= size <= most:
            message = f"{what} is {size}, must be {least} to {most}"
            raise UserError("size-out-of-range", message, span=line.span(start))
        return size

    def split(self, line: Line, split: list[str | None], axis: str) -> None:
        """Note that some dimensions, which come next, split an axis."""
        start = line.place
        for dim in self.dims(line):
            index = self.mesh.names.index(dim)
            if split[index] is not None:
                message = f"{dim} splits {split[index]} already"
                raise UserError("split-twice", message, span=line.span(start))
            split[index] = axis

    # --- one line each ------------------------------------------------------------------------

    def read_mesh(self, line: Line) -> Mesh:
        """`mesh node=2 gpu=8`."""
        dims: list[Dim] = []
        while not line.done():
            start = line.place
            name = self.fresh(line, "mesh dimension", (dim.name for dim in dims))
            try:
                check_name(name, "mesh dimension")
            except UserError as error:
                raise error.at(line.span(start)) from None
            line.mark("=")
            dims.append(Dim(name, self.size(line, f"the size of {name}", 2, LARGEST_MESH)))
            if len(dims) > MOST_DIMS:
                message = f"a mesh has at most {MOST_DIMS} dimensions"
                raise UserError("too-large", message, span=line.span(start))
        return Mesh(tuple(dims))

    def read_axis(self, line: Line) -> None:
        """`axis H = 8 over gpu`."""
        name = self.fresh(line, "axis", (axis.name for axis in self.axes))
        line.mark("=")
        self.axes.append(Axis(name, self.size(line, f"the extent of {name}", 1, LARGEST)))
        if line.take("over"):
            self.split(line, self.parallel, name)

    def read_mask(
        self, line: Line
    ) -> tuple[str, tuple[int | None, int, str | None], tuple[str, ...]]:
        """`mask causal over S_q, S_kv` or `mask window 128 ahead 8 top_left over S_q, S_kv`."""
        mask = line.word(*MASKS, "window")
        width = self.size(line, "the width of the window", 1, LARGEST) if mask == "window" else None
        ahead, align = 0, None
        words = ALIGNED if mask != "full" else APART
        word = line.word("over", *words, *(["ahead"] * (width is not None)))
        if word == "ahead":
            ahead = self.size(line, "how far a row sees ahead", 1, LARGEST)
            word = line.word("over", *words)
        if word != "over":
            align = word.replace("_", "-")
            line.word("over")
        start = line.place
        axes = self.axis_names(line)
        if len(axes) != 2:
            message = "a mask is over two axes: its rows and its columns"
            raise UserError("syntax", message, span=line.span(start))
        return mask, (width, ahead, align), axes

    def read_documents(self, line: Line) -> tuple[int, ...]:
        """`documents 4096,128x3`."""
        start = line.place
        lengths = read_lengths(line.rest())
        extents = {axis.extent for axis in self.axes}
        if lengths is None or min(lengths) < 1 or sum(lengths) not in extents:
            message = "expected lengths that add up to the sequence, as in `4096,128x3`"
            raise UserError("syntax", message, span=line.span(start))
        return lengths

    def read_tensor(self, line: Line, role: str) -> None:
        """`input q [B, S_q, H * G, D] pinned S_q over node and H over gpu`."""
        name = self.fresh(line, role, (tensor.name for tensor in self.tensors))
        line.mark("[")
        dims: list[tuple[str, ...]] = []
        while not line.take("]"):
            if dims:
                line.mark(",")
            dims.append(self.read_dim(line))
        dtype = next((word for word in TENSOR_DTYPES if line.take(word)), "inputs")
        reads: tuple[str, ...] = ()
        if role == "derived":
            line.word("from")
            reads = self.reads(line)
        pin: list[str | None] = [None for _ in self.mesh.dims]
        more = line.take("pinned")
        while more:
            axis = self.single(line, "axis of the tensor", (axis for dim in dims for axis in dim))
            line.word("over")
            self.split(line, pin, axis)
            more = line.take("and")
        self.tensors.append(Tensor(name, role, tuple(dims), dtype, tuple(pin), reads))

    def read_dim(self, line: Line) -> tuple[str, ...]:
        """`H * G`."""
        known = [axis.name for axis in self.axes]
        found: list[str] = []
        while not found or line.take("*"):
            start = line.place
            name = line.name("an axis")
            if name not in known:
                message = f"no axis {shorten(name)!r}"
                help = closest(name, known)
                raise UserError("unknown-name", message, span=line.span(start), help=help)
            found.append(name)
        return tuple(found)

    def read_combine(self, line: Line) -> Combine:
        """`combine out, lse by softmax`."""
        outputs = self.known(line, "output", (t.name for t in self.tensors if t.role == "output"))
        line.word("by")
        return Combine(outputs, line.word(*COMBINES))

    def read_tile(self, line: Line) -> TileLoop:
        """`tile H * G by 4`."""
        axes = self.read_dim(line)
        line.word("by")
        return TileLoop(axes, self.size(line, "the number of parts", 2, LARGEST_MESH))

    def read_order(self, line: Line) -> Order:
        """`order S: zigzag over node, gpu`."""
        line.word(SEQUENCE)
        line.mark(":")
        kind = line.word(*ORDERS)
        return Order(kind, self.dims(line) if line.take("over") else ())

    def read_replicated(self, line: Line) -> None:
        """`replicated k over gpu`, of an output perhaps `as bfloat16`."""
        name = self.single(line, "tensor", (tensor.name for tensor in self.tensors))
        line.word("over")
        start = line.place
        dims = self.known(line, "mesh dimension", self.mesh.names)
        for dim in dims:
            if (name, dim) in self.replicated:
                message = f"{name} is replicated over {dim} already"
                raise UserError("named-twice", message, span=line.span(start))
        self.replicated |= dict.fromkeys(((name, dim) for dim in dims), self.dtype(line))

    def read_reshard(self, line: Line) -> list[BorderStep]:
        """`reshard k, v: S_kv to H along gpu`; all of it is `replicated`."""
        names = self.tensor_names(line)
        line.mark(":")
        source = self.split_axis(line)
        line.word("to")
        target = self.split_axis(line)
        line.word("along")
        dim = self.dim(line)
        return [BorderStep(name, source, target, dim) for name in names]

    def read_nest(self) -> tuple[tuple[Stage, ...], tuple[tuple[str, ...], str | None]]:
        """`walk k, v: S_kv along node`, `gather …` and `scatter …`, then `body with aten`."""
        stages: list[Stage] = []
        while True:
            count = len(stages)
            for kind in MOVES:
                stages += self.many(kind, lambda line, kind=kind: self.read_stage(line, kind))
            if len(stages) == count:
                return tuple(stages), self.one("body", self.read_body)

    def read_stage(self, line: Line, kind: str) -> Stage:
        """What follows `walk`, `gather` or `scatter`."""
        names = self.tensor_names(line)
        line.mark(":")
        axis = self.axis(line)
        line.word(MOVES[kind])
        dim = self.dim(line)
        options = read_options(line) if kind == "walk" else ()
        return Stage(names, kind, axis, dim, options, self.dtype(line))

    def read_body(self, line: Line) -> tuple[tuple[str, ...], str | None, Options]:
        """What follows `body`: what it reads, if not everything, and its kernel."""
        body = tuple(tensor.name for tensor in self.tensors if tensor.role != "output")
        if line.take("reads"):
            body = () if line.done() or line.ahead("with") else self.reads(line)
        if not line.take("with"):
            return body, None, ()
        start = line.place
        name, options = read_kernel(line)
        try:
            check_name(name, "kernel")
        except UserError as error:
            raise error.at(line.span(start)) from None
        return body, name, options
