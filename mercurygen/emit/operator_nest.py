"""Emitted text of a user's operator: how tiles come by, and what becomes of their results."""

from __future__ import annotations

import re

from mercurygen.emit import operator_body
from mercurygen.emit.operator_results import nothing
from mercurygen.emit.operator_words import State, Words
from mercurygen.lower.plan import Gather, Loop, Walk, walk_levels


class Nest:
    """The lines of `_results`.

    Attributes:
        words: about the plan.
        tile: per tensor the variable that holds what the body is given.
    """

    def __init__(self, words: Words) -> None:
        self.words, self.plan, self.program = words, words.plan, words.program
        self.tile = {name: name for name in self.program.body}
        self.walked = tuple(loop for loop in self.plan.nest.loops if loop.walks)
        self.masked = bool(self.program.mask_axes) and self.program.mask != "full"

    # --- the function ---------------------------------------------------------------------------

    def groups(self) -> list[str]:
        """Dimensions whose groups the function is given."""
        dims = {s.dim for s in self.plan.nest.stages}
        for axis in self.words.placed:
            dims |= {d for d, who in self.words.here(axis).items() if who == "mine"}
        return list(self.program.mesh.in_order(dims))

    def parameters(self) -> list[str]:
        """Tensors, groups, scalars, extents."""
        op = self.words.operator
        return [
            *(f"{name}: Tensor" for name in self.program.body),
            *(f"{self.words.group(dim)}: dist.ProcessGroup" for dim in self.groups()),
            *(f"{scalar.name}: Tensor" for scalar in op.scalars),
            *(f"{axis}: int" for axis in self.words.extents),
        ]

    def arguments(self) -> list[str]:
        """What the public function calls it with."""
        return [parameter.partition(":")[0] for parameter in self.parameters()]

    def function(self) -> str:
        """`_results`."""
        kind = operator_body.results_type(self.words)
        lines = [*self.before(), *(self.walking() if self.walked else self.once())]
        what = "of all tiles" if self.walked else "of everything that is here"
        head = [
            f"def _results({', '.join(self.parameters())}) -> {kind}:",
            f'    """The results {what}, merged, in the dtypes that they are merged in."""',
        ]
        return "\n".join([*head, *(f"    {line}" if line else "" for line in lines)])

    def before(self) -> list[str]:
        """What is done before any tile comes: gathers, positions that stay."""
        still = (line for axis in self.words.placed for line in self.place(axis, False))
        return [*self.leading(), *still]

    # --- tiles ----------------------------------------------------------------------------------

    def dims(self, names: tuple[str, ...], axis: str) -> str:
        """The dimension of every tensor that carries an axis, as a tuple."""
        found = [str(self.program.tensor(name).dimension(axis)) for name in names]
        return f"({', '.join(found)}{',' if len(found) == 1 else ''})"

    def leading(self) -> list[str]:
        """The gathers outside every walk."""
        lines = []
        for loop in self.plan.nest.loops:
            for depth, stage in enumerate(loop.leading):
                given = [name if depth else f"{name}.contiguous()" for name in loop.tensors]
                call = self.gather("_gather", f"({_tuple(given)})", loop, stage)
                lines.append(f"{_tuple(loop.tensors, True)} = {call}")
        return lines

    def gather(self, function: str, tiles: str, loop: Loop, stage: Gather) -> str:
        """A call of `_gather` or `_gather_ahead`."""
        outer = f", {stage.join.outer}" if self.runs() else ""
        dims, group = self.dims(loop.tensors, loop.axis), self.words.group(stage.dim)
        return f"{function}({tiles}, {dims}, {group}{outer})"

    def runs(self) -> bool:
        """Whether a gather joins parts that hold several runs."""
        return any(stage.join.outer > 1 for stage in self.words.gathers)

    def own(self, loop: Loop) -> str:
        """The variable of our own tiles of a loop."""
        first = self.walked.index(loop)
        return self.words.free("own" if len(self.walked) == 1 else f"own_{first}")

    def own_line(self, loop: Loop) -> str:
        """Our own tiles, dense."""
        given = [name if loop.leading else f"{name}.contiguous()" for name in loop.tensors]
        return f"{self.own(loop)} = ({_tuple(given)})"

    def trimmed(self, loop: Loop) -> bool:
        """Whether only what is read of a tile comes."""
        return loop.walks[0].direct and self.masked and loop.axis in self.program.mask_axes

    def walk(self, loop: Loop, walk: Walk, tiles: str, spare: str) -> str:
        """A call of the generator of one ring."""
        group = self.words.group(walk.dim)
        if walk.direct:
            dims = f", {self.dims(loop.tensors, loop.axis)}" if self.trimmed(loop) else ""
            return f"_walk_direct({tiles}{dims}, {group})"
        function = "_walk_both_ways" if walk.both else "_walk_ring"
        return f"{function}({tiles}, {spare}, {group})"

    def headers(self, loop: Loop) -> tuple[list[str], list[str]]:
        """(lines before, `for` lines without their indent) of a loop."""
        levels, own = walk_levels(loop.walking), self.own(loop)
        before, loops, tiles = [self.own_line(loop)], [], own
        for depth, (walk, gathers) in enumerate(levels):
            group = self.words.group(walk.dim)
            spare = f"_spare({own}, {group})"
            if len(levels) > 1:
                name = self.words.free(f"spare_{walk.dim}")
                before.append(f"{name} = {spare}")
                spare = name
            call = self.walk(loop, walk, tiles, spare)
            for stage in gathers:
                call = self.gather("_gather_ahead", call, loop, stage)
            last = depth + 1 == len(levels)
            tiles = f"({_tuple(self.tiles(loop))})" if last else self.words.free(f"of_{walk.dim}")
            run = f", {self.words.free('run')}" if self.trimmed(loop) else ""
            loops.append(f"for {self.words.owner(walk.dim)}{run}, {tiles} in {call}")
        return before, loops

    def tiles(self, loop: Loop) -> list[str]:
        """Variables of a loop's tiles; from here on they are what the body is given."""
        for name in loop.tensors:
            self.tile[name] = self.words.free(f"{name}_tile")
        return [self.tile[name] for name in loop.tensors]

    # --- positions ------------------------------------------------------------------------------

    def place(self, axis: str, moves: bool) -> list[str]:
        """Chunks and global positions of an axis, of those that move (or do not) with the tiles."""
        here = self.words.here(axis)
        if any(who not in ("mine", None) for who in here.values()) != moves:
            return []
        lines, chunks = [], self.words.chunks(axis, here)
        run = next((x for x in self.walked if self.trimmed(x) and x.axis == axis), None)
        if run is not None:
            chunks = f"{chunks}[{self.words.free('run')}]"
        if self.masked and axis in self.program.mask_axes:
            lines.append(f"{self.chunks_name(axis)} = {chunks}")
            chunks = self.chunks_name(axis)
        device = f"{self.words.floating[0]}.device"
        count = self.words.count(axis, here)
        length = self.length(axis)
        if chunks == "[0]":
            lines.append(f"{self.words.at(axis)} = torch.arange({length}, device={device})")
            return lines
        size = self.words.free("length")
        if self.masked and axis in self.program.mask_axes:
            if axis == self.sized():
                lines.append(f"{size} = {_divided(length, count)}")
            length, count = size, 1
        text = f"_positions({chunks}, {_divided(length, count)}, {device})"
        return [*lines, f"{self.words.at(axis)} = {text}"]

    def sized(self) -> str:
        """The axis of the mask from whose tensors the length of a chunk is taken."""
        rows, cols = self.program.mask_axes
        still = [
            axis
            for axis in self.words.placed
            if axis in (rows, cols)
            and all(who in ("mine", None) for who in self.words.here(axis).values())
        ]
        return still[0] if still else next(a for a in self.words.placed if a in (rows, cols))

    def chunks_name(self, axis: str) -> str:
        """The variable of the chunks of an axis of the mask that are here."""
        return self.words.free("row_chunks" if axis == self.program.mask_axes[0] else "col_chunks")

    def length(self, axis: str) -> str:
        """Text of how long what is here of an axis is."""
        here = self.words.here(axis)
        found = [t for t in self.program.read if (axis,) in t.dims]
        found.sort(key=lambda t: self.held(t, axis) != here)  # best one that is cut to it already
        tensor, held = found[0], self.held(found[0], axis)
        text = f"{self.tile[tensor.name]}.shape[{tensor.dims.index((axis,))}]"
        for dim, who in here.items():
            text += f' // MESH["{dim}"]' if who and held[dim] is None else ""
        return text

    def held(self, tensor, axis: str) -> State:
        """Whose part of an axis of a tensor is here when the body runs."""
        state = self.words.stored(tensor, axis)
        for loop in self.plan.nest.loops:
            if tensor.name in loop.tensors and loop.axis == axis:
                for stage in (s for s in loop.stages if s.dim in state):
                    walked = isinstance(stage, Walk)
                    state[stage.dim] = self.words.owner(stage.dim) if walked else None
        return state

    # --- the body -------------------------------------------------------------------------------

    def call(self) -> str:
        """`_body` on what is here, cut to what the mask leaves."""
        words = self.words
        given = [self.part(name) + self.index(name) for name in self.program.body]
        given += [words.at(axis) + self.index_of((axis,)) for axis in words.placed]
        given += [scalar.name for scalar in words.operator.scalars]
        return f"_body({', '.join([*given, *words.extents])})"

    def part(self, name: str) -> str:
        """A tensor, cut to the owner's part where all of it is here."""
        tensor, text = self.program.tensor(name), self.tile[name]
        for number, (axis, *_) in enumerate(tensor.dims):
            here, held = self.words.here(axis), self.held(tensor, axis)
            if here != held:
                size = self.length(axis)
                size = f"({size})" if "//" in size else size
                text += f".narrow({number}, {self.number(here, held)} * {size}, {size})"
        return text

    def index(self, name: str) -> str:
        """Subscript that cuts a tensor to what the mask leaves."""
        return self.index_of(tuple(a for dim in self.program.tensor(name).dims for a in dim[:1]))

    def index_of(self, axes: tuple[str, ...]) -> str:
        """The same for a tensor with these axes."""
        if not self.masked:
            return ""
        names = dict(zip(self.program.mask_axes, self.block_names(), strict=True))
        items = [names.get(axis, ":") for axis in axes]
        while items and items[-1] == ":":
            items.pop()
        return f"[{', '.join(items)}]" if items else ""

    def block_names(self) -> tuple[str, str]:
        """Variables of the rows and the columns that the mask leaves."""
        return self.words.free("rows"), self.words.free("cols")

    def visible(self) -> str:
        """What the mask leaves of what is here."""
        rows, cols = (self.chunks_name(axis) for axis in self.program.mask_axes)
        return f"_visible({rows}, {cols}, {self.words.free('length')})"

    def merged(self) -> str:
        """The body on what is here, merged into the results."""
        results = [self.cut(name) + self.index(name) for name in self.words.outputs]
        star = "*" if len(results) > 1 else ""
        return f"_merge({', '.join(results)}, {star}{self.call()})"

    def cut(self, name: str) -> str:
        """The part of a result that the tile is of."""
        tensor, text = self.program.tensor(name), name
        for number, (axis, *_) in enumerate(tensor.dims):
            here, whole = self.words.here(axis), self.words.result(tensor, axis)
            if here == whole:
                continue
            place = self.number(here, whole)
            size = self.length(axis)
            size = f"({size})" if "//" in size else size
            text += f".narrow({number}, {place} * {size}, {size})"
        return text

    def number(self, here: State, whole: State) -> str:
        """The place of a part among those of a result, row-major."""
        text = ""
        for dim, who in here.items():
            if who is None or who == whole[dim]:
                continue
            text = f"({text})" if " " in text else text
            text = f'{text} * MESH["{dim}"] + {who}' if text else who
        return f"({text})" if " " in text else text

    # --- what is done with the tiles ------------------------------------------------------------

    def once(self) -> list[str]:
        """All there is, in one call."""
        if self.plan.nest.begin == "empty":
            return [*nothing(self.words), *self.block(), f"return {', '.join(self.words.outputs)}"]
        lines = [f"{', '.join(self.block_names())} = {self.visible()}"] if self.masked else []
        return [*lines, f"return {self.call()}"]

    def block(self) -> list[str]:
        """The body on what the mask leaves of what is here, merged."""
        moved = [line for axis in self.words.placed for line in self.place(axis, True)]
        if not self.masked:
            return [*moved, self.merged()]
        seen = self.words.free("seen")
        chunks = [
            line
            for line in moved
            if not line.startswith(tuple(map(self.words.at, self.words.placed)))
        ]
        rest = [line for line in moved if line not in chunks]
        return [
            *chunks,
            f"{seen} = {self.visible()}",
            f"if {seen} is not None:",
            f"    {', '.join(self.block_names())} = {seen}",
            *(f"    {line}" for line in rest),
            f"    {self.merged()}",
        ]

    def walking(self) -> list[str]:
        """Tiles come by, and are merged."""
        first = self.plan.nest.begin == "first"
        headers = [self.headers(loop) for loop in self.walked]
        lines = [line for before, _ in headers[:1] for line in before]
        if first:
            (_, loops), *more = headers
            return [*lines, *self.first(loops), f"return {', '.join(self.words.outputs)}"]
        lines = [*nothing(self.words), *lines]
        depth = 0
        for number, (before, loops) in enumerate(headers):
            if number:
                lines += ["    " * depth + line for line in before]
            for header in loops:
                lines.append("    " * depth + header + ":")
                depth += 1
        lines += ["    " * depth + line for line in self.block()]
        owners = [self.words.owner(walk.dim) for loop in self.walked for walk in loop.walks]
        return [*_asked_for(lines, owners), f"return {', '.join(self.words.outputs)}"]

    def first(self, loops: list[str]) -> list[str]:
        """The first tile is one block of all rows: the others are merged into its results."""
        tiles, targets = self.words.free("tiles"), [x[4:].partition(" in ")[0] for x in loops]
        calls = [x.partition(" in ")[2] for x in loops]
        if len(loops) == 1:
            target, source = targets[0], calls[0]
        else:
            last = targets[-1].partition(", (")
            tile = self.words.free("tile")
            owners = [x.partition(",")[0] for x in targets]
            target = f"{', '.join(owners)}, ({last[2]}"
            heads = [*loops[:-1], f"for {owners[-1]}, {tile} in {calls[-1]}"]
            source = f"(({', '.join(owners)}, {tile}) {' '.join(heads)})"
        moved = [line for axis in self.words.placed for line in self.place(axis, True)]
        results = ", ".join(self.words.outputs)
        seen = [f"{', '.join(self.block_names())} = {self.visible()}"] if self.masked else []
        return [
            f"{tiles} = {source}",
            f"{target} = next({tiles})  # our own",
            *moved,
            *seen,
            f"{results} = {self.call()}",
            f"for {target} in {tiles}:",
            *(f"    {line}" for line in self.block()),
        ]


def _asked_for(lines: list[str], owners: list[str]) -> list[str]:
    """The lines, with `_` in the place of owners that stand in one place only: where they come."""
    text = "\n".join(lines)
    for owner in owners:
        if len(re.findall(rf"\b{owner}\b", text)) == 1:
            text = re.sub(rf"\b{owner}\b", "_", text)
    return text.split("\n")


def _tuple(names: list[str] | tuple[str, ...], bare: bool = False) -> str:
    """Names as the inside of a tuple; as a target with its parentheses if it is one name."""
    if len(names) == 1:
        return f"({names[0]},)" if bare else f"{names[0]},"
    return ", ".join(names)


def _divided(text: str, count: int) -> str:
    return text if count == 1 else f"{text} // {count}"
