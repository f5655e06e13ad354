"""The module of a user's own operator: its lines on tiles, and what brings and merges them."""

from __future__ import annotations

import ast

from mercurygen.emit import operator_body, operator_entry, operator_header, operator_home
from mercurygen.emit.operator_nest import Nest
from mercurygen.emit.operator_words import Words
from mercurygen.emit.templates import render
from mercurygen.ir.operator import Operator
from mercurygen.ir.program import Program
from mercurygen.lower.events import Kernel
from mercurygen.lower.plan import Gather, Plan, walk_levels
from mercurygen.lower.trace import trace
from mercurygen.schedule.schedule import Schedule

_STANDARD = (  # (what the text mentions, the import), in the order of the module
    ("inspect", "import inspect"),
    ("sys", "import sys"),
    ("Iterable", "from collections.abc import Iterable"),
    ("Iterator", "from collections.abc import Iterator"),
    ("timedelta", "from datetime import timedelta"),
    ("product", "from itertools import product"),
    ("prod", "from math import prod"),
)
_TORCH = (
    ("torch", "import torch"),
    ("dist", "import torch.distributed as dist"),
    ("Tensor", "from torch import Tensor"),
    ("DeviceMesh", "from torch.distributed import DeviceMesh"),
    ("P2POp", "from torch.distributed import P2POp"),
    ("Placement", "from torch.distributed.tensor import Placement"),
    ("Replicate", "from torch.distributed.tensor import Replicate"),
    ("Shard", "from torch.distributed.tensor import Shard"),
)
LONGEST_LINE = 100


def text(schedule: Schedule, plan: Plan, operator: Operator) -> str:
    """The module below its first lines, not formatted yet."""
    words = Words(plan, operator)
    code = "\n\n\n".join([_constants(words), operator_entry.function(words), *_sections(words)])
    doc = f'"""{operator_header.docstring(schedule, words)}"""'
    long = any(len(line) + 12 > LONGEST_LINE for line in _their_lines(words))
    note = ["# ruff: noqa: E501 - the operator's own lines are as long as they are"] if long else []
    return "\n\n".join([doc, *note, _imports(code, words), code]) + "\n"


def _their_lines(words: Words) -> list[str]:
    sources = [words.operator.source, *operator_body.user_merges(words)]
    return [line for source in sources for line in source.split("\n")]


# --- what is not emitted --------------------------------------------------------------------


def not_emitted(plan: Plan, operator: Operator) -> str | None:
    """What of a plan has no text yet."""
    words = Words(plan, operator)
    return _no_lines(words) or _no_movement(words) or _no_results(words) or _no_cuts(words)


def _no_lines(words: Words) -> str | None:
    """What of the operator."""
    op = words.operator
    if op.derivations:
        return "a derived tensor"
    if not words.floating:
        return "an operator whose inputs are all integers"
    if len(words.positioned) > 1 and set(words.positioned) & set(words.points):
        return "`position` of a single index beside another"
    over = [a for loop in op.loops if loop.kind == "points" for a in loop.axes]
    for tensor in op.outputs:
        if set(over) - set(tensor.axes):
            return f"{tensor.name}, which does not carry every axis of `points`,"
    reads = [words.program.tensor(name) for name in words.program.body]
    for axis in words.placed:
        if not any((axis,) in t.dims for t in reads):
            return f"positions along {axis}, which has no dimension of its own"
        if axis not in words.program.mask_axes and _split_twice(words, axis):
            return f"positions along {axis}, which tensors split in two ways"
    split = {a for a in words.program.parallel if a} | {a for t in words.program.tensors for a in t.pin}
    for tensor in words.program.tensors:
        for dim in tensor.dims:
            minor = next((a for a in dim[1:] if a in split), None)
            if minor:
                return f"a split of {minor}, which shares a dimension of {tensor.name}"
    named = next((a for a in words.values if a in split and a in words.points), None)
    return f"the extent of {named}, which is split, in a line" if named else None


def _split_twice(words: Words, axis: str) -> bool:
    """Whether tensors split an axis over different dimensions."""
    tensors = [t for t in words.program.tensors if t.carries(axis)]
    return len({words.plan.atoms.split(t, axis) for t in tensors} - {()}) > 1


def _no_movement(words: Words) -> str | None:
    """What of the tiles' way."""
    plan, program = words.plan, words.program
    if plan.before or plan.after:
        return "a reshard between the pins and the schedule"
    if plan.tiles:
        return "a tile loop"
    if program.order.kind == "striped" and any(g.join.outer > 1 for g in words.gathers):
        return "a striped order that several gathers join"
    for loop in plan.nest.loops:
        if loop.partner:
            return "a skewed pair of shifts"
        levels = walk_levels(loop.walking)
        for walk, gathers in levels:
            if walk.ahead != 1:
                return f"the prefetch of the shift along {walk.dim}"
            if gathers and (len(levels) > 1 or walk.direct):
                return "a gather inside of rings in rings, or of direct tiles"
            if (walk.direct or walk.both) and len(levels) > 1:
                return f"the option of the shift along {walk.dim} beside another"
            trims = walk.direct and program.mask != "full" and loop.axis in program.mask_axes
            if trims and len(program.order.dims) > 1:
                return "a direct shift of a sequence that several dimensions split"
    ways = {walk.reverse for walk in words.walks if not walk.direct}
    if len(ways) > 1 or (True in ways and any(w.both for w in words.walks)):
        return "rings of both directions beside each other"
    return None


def _no_results(words: Words) -> str | None:
    """What of the results' way."""
    plan, program = words.plan, words.program
    walked = [loop for loop in plan.nest.loops if loop.walks]
    if any(loop.outputs for loop in walked):
        return operator_home.not_emitted(words)
    if plan.nest.begin == "first" and len(walked) > 1:
        return "several loops of tiles under a mask"
    single = len(operator_body.groups(words)) == 1
    for reduce in plan.nest.reduces:
        if reduce.dtype:
            return f"results that cross links as {reduce.dtype}"
        if reduce.kind == "softmax" and reduce.axis is None:
            return "a softmax that is all-reduced"
        if reduce.kind != "sum" and not single:
            return "results of several combines that are merged over ranks"
        if reduce.axis and (reduce.join.outer > 1 or program.order.kind != "contiguous"):
            return "results that are scattered in runs"
    return None


def _no_cuts(words: Words) -> str | None:
    """Tiles that are longer than what the body is given of them, and no run of it."""
    nest = Nest(words)
    cut = {
        (tensor.name, axis)
        for tensor in words.program.read
        for axis in tensor.axes
        if nest.held(tensor, axis) != words.here(axis)
    }
    for rank in range(words.program.mesh.size):
        for event in trace(words.plan, rank).events:
            if not isinstance(event, Kernel):
                continue
            for tensor, operand in zip(words.program.read, event.inputs, strict=True):
                if any((tensor.name, axis) not in cut for axis, _, _ in operand.cuts):
                    return f"a tile of {tensor.name} of which the body is given a part"
    for tensor in (*words.program.read, *words.program.outputs):
        for dim in tensor.dims:
            for axis in dim:
                here = words.here(axis)
                output = tensor.role == "output"
                whole = words.result(tensor, axis) if output else nest.held(tensor, axis)
                moved = [i for i, d in enumerate(here) if here[d] != whole[d]]
                between = any(here[d] is None for d in list(here)[: max(moved, default=0)])
                if moved and (between or len(dim) > 1 or _masked_zigzag(words, axis)):
                    return f"a part of {tensor.name} that is no run along {axis}"
    return None


def _masked_zigzag(words: Words, axis: str) -> bool:
    return axis in words.program.mask_axes and words.program.order.kind != "contiguous"


# --- constants ------------------------------------------------------------------------------


def _constants(words: Words) -> str:
    program = words.program
    mesh = program.mesh
    sizes = ", ".join(f'"{dim.name}": {dim.size}' for dim in mesh.dims)
    lines = [f"MESH: dict[str, int] = {{{sizes}}}", f"WORLD_SIZE = {mesh.size}"]
    if not mesh.dims:
        names = ", ".join(f'"{t.name}"' for t in _held(program))
        lines.append(f"PLACEMENTS: dict[str, tuple] = dict.fromkeys(({names},), ())")
    else:
        if program.order.kind != "contiguous":
            lines.append("# Of the ordered axes in storage order: unshard puts them into global order.")
        lines.append("PLACEMENTS: dict[str, tuple[Placement, ...]] = {")
        for tensor in _held(program):
            placed = [
                "Replicate()" if axis is None else f"Shard({tensor.dimension(axis)})"
                for axis in tensor.pin
            ]
            lines.append(f'    "{tensor.name}": ({", ".join(placed)},),')
        lines.append("}")
        lines += ["# Of every dimension of a tensor: what splits it, the most significant first."]
        lines.append("_SPLIT: dict[str, tuple[tuple[str, ...], ...]] = {")
        for tensor in _held(program):
            split = (_quoted(_split(words, tensor, dim)) for dim in tensor.dims)
            lines.append(f'    "{tensor.name}": ({", ".join(split)},),')
        lines.append("}")
        if program.order.kind != "contiguous":
            pairs = ", ".join(
                f'"{t.name}": {t.dimension(program.sequence(t))}'
                for t in _held(program)
                if program.sequence(t) in t.pin
            )
            lines.append(f"_ORDERED: dict[str, int] = {{{pairs}}}  # the dimension that is {program.order.kind}")
    if program.mask == "window":
        lines.append(f"_WINDOW = {program.window}  # positions that a row sees, its own included")
    return "\n".join(lines)


def _held(program: Program) -> tuple:
    """What the caller holds: all but derived tensors."""
    return (*program.inputs, *program.outputs)


def _split(words: Words, tensor, dim: tuple[str, ...]) -> tuple[str, ...]:
    pinned = {d for d, axis in zip(words.program.mesh.names, tensor.pin, strict=True) if axis == dim[0]}
    order = words.plan.atoms.order(tensor, dim[0]).dims
    return tuple(d for d in order if d in pinned)


def _quoted(names: tuple[str, ...]) -> str:
    inside = ", ".join(f'"{name}"' for name in names)
    return f"({inside}{',' if len(names) == 1 else ''})"


# --- sections -------------------------------------------------------------------------------


def _sections(words: Words) -> list[str]:
    """Everything after the public function, each group under a heading of its own."""
    program, plan = words.program, words.plan
    mesh = program.mesh
    single = not mesh.dims
    layout = render(
        "operator_layout",
        world=mesh.size,
        mesh_type="None = None" if single else "DeviceMesh",
        kind=program.order.kind if mesh.dims else "contiguous",
    )
    above = ["def make_mesh(group: None = None, device_type: str | None = None) -> None:\n"
             '    """One rank needs no mesh."""'] if single else [render("mesh", world=mesh.size), render("groups")]
    sections = [("layout: what a rank holds of every tensor", [*above, layout])]
    texts = []
    if plan.nest.stages or words.placed:
        texts.append(Nest(words).function())
        texts += operator_home.functions(words)
    texts += _movers(words)
    if texts:
        sections.append(("how tiles come by", texts))
    reduce = _reducers(words)
    if reduce:
        sections.append(("partial results of several ranks", [reduce]))
    lines = [operator_body.body(words), *_helpers(words)]
    if _merges(words):
        lines += [operator_body.merge(words), *operator_body.user_merges(words)]
    sections.append((f"the lines of {words.operator.name}", lines))
    sections.append(("checks", [operator_entry.check(words)]))
    where = "python NAME.py" if single else f"torchrun on {mesh.size} ranks, with GPUs or without"
    sections.append((f"self-check: {where}", [_self_check(words)]))
    return [f"{_heading(title)}\n\n\n" + "\n\n\n".join(each) for title, each in sections]


def _heading(title: str) -> str:
    return f"# --- {title} ".ljust(95, "-")


def _merges(words: Words) -> bool:
    nest = words.plan.nest
    kinds = {reduce.kind for reduce in nest.reduces}
    return nest.begin != "only" or bool(kinds - {"sum"}) or any(x.outputs for x in nest.loops)


def _movers(words: Words) -> list[str]:
    """What brings tiles, callers first."""
    loops = words.plan.nest.loops
    texts = []
    rings = [w for x in loops if x.tensors for w in x.walks if not w.direct]
    if rings:
        both, ring = any(w.both for w in rings), any(not w.both for w in rings)
        reverse, most = any(w.reverse for w in rings), 4 if both else 2
        texts.append(render("operator_ring", both=both, ring=ring, most=most, reverse=reverse))
    texts += _direct(words)
    if rings or any(x.home == "relayed" for x in loops):
        both, reverse = any(w.both for w in rings), any(w.reverse for w in words.walks)
        texts.append(render("operator_shift", both=both, reverse=reverse))
    texts += _gathering(words)
    if words.plan.nest.stages:
        texts.append(render("wait"))
    return texts


def _direct(words: Words) -> list[str]:
    """What brings tiles straight from their owners."""
    direct = [w for x in words.plan.nest.loops if x.tensors for w in x.walks if w.direct]
    trimmed, texts = trimmed_axis(words), []
    if direct:
        back, on = ("+", "-") if direct[0].reverse else ("-", "+")
        chunks = words.count(trimmed, words.here(trimmed)) if trimmed else 1
        values = {"trimmed": trimmed is not None, "chunks": chunks, "back": back, "on": on}
        texts.append(render("operator_direct", **values))
    home = operator_home.trimmed_axis(words)
    if trimmed or home:
        texts.append(_read(words, trimmed or home))
    return texts


def trimmed_axis(words: Words) -> str | None:
    """The axis along which only what is read of a tile comes."""
    maker = Nest(words)
    return next((x.axis for x in maker.walked if maker.trimmed(x)), None)


def _gathering(words: Words) -> list[str]:
    """What gathers tiles."""
    gathers, loops = words.gathers, words.plan.nest.loops
    if not gathers:
        return []
    runs = any(g.join.outer > 1 for g in gathers)
    return [
        render(
            "operator_gather",
            lead=any(x.leading for x in loops),
            ahead=any(isinstance(s, Gather) for x in loops for s in x.walking),
            runs=runs,
            parameter=", outer: int" if runs else "",
            argument=", outer" if runs else "",
            kind=_joined_kind(words),
        )
    ]


def _joined_kind(words: Words) -> str:
    """The order of what gathers join."""
    axes = {x.axis for x in words.plan.nest.loops if any(isinstance(s, Gather) for s in x.stages)}
    return words.program.order.kind if axes & set(words.program.mask_axes) else "contiguous"


def _read(words: Words, axis: str) -> str:
    """`_read`: the run of an owner's tile that a rank reads."""
    rows, cols = words.program.mask_axes
    own, other = ("rows", "cols") if axis == rows else ("cols", "rows")
    each, others = own[:-1], other[:-1]
    held = {
        own: words.chunks(axis, {d: who and "owner" for d, who in words.here(axis).items()}),
        other: words.chunks(
            cols if axis == rows else rows,
            {
                d: who and "reader"
                for d, who in words.here(cols if axis == rows else rows).items()
            },
        ),
    }
    return "\n".join(
        [
            "def _read(reader: int, owner: int, length: int) -> slice:",
            '    """The run of chunks of an owner\'s tile that a rank reads; chunks of `length`."""',
            f"    rows, cols = {held['rows']}, {held['cols']}",
            f"    read = [i for i, {each} in enumerate({own}) "
            f"if any(_live(row, col, length) for {others} in {other})]",
            "    return slice(read[0], read[-1] + 1) if read else slice(0, 0)",
        ]
    )


def _reducers(words: Words) -> str:
    found = [(r.kind == "sum", r.axis is None) for r in words.plan.nest.reduces]
    if not found:
        return ""
    fills = ", ".join(
        f"received[{i}].new_full(received[{i}].shape[1:], {value})"
        for i, value in enumerate(operator_body.identities(words).values())
    )
    return render(
        "operator_reduce",
        sum_all=(True, True) in found,
        sum_part=(True, False) in found,
        merge_all=(False, True) in found,
        merge_part=(False, False) in found,
        fills=fills,
    )


def _helpers(words: Words) -> list[str]:
    """The mask and positions, as far as the lines need them."""
    program, found = words.program, []
    kinds = {axis: words.chunks(axis, words.here(axis)) for axis in words.placed}
    if any(chunks != "[0]" for chunks in kinds.values()):
        found.append(_positions(words))
    if words.operator.mask:
        masked = program.mask != "full"
        found.append(
            render(
                "operator_mask",
                places=masked,
                live=masked,
                window=program.mask == "window",
                causal=program.mask == "causal",
                striped=program.order.kind == "striped",
                count=program.order.ranks(program.mesh),
            )
        )
    done: set[str] = set()
    for axis in words.placed:
        name = words.chunks_function(axis)
        if name not in done and name in "".join([*kinds.values(), *found, _reads(words)]):
            done.add(name)
            found.append(_chunks(words, axis))
    return found


def _reads(words: Words) -> str:
    trimmed = trimmed_axis(words) or operator_home.trimmed_axis(words)
    return _read(words, trimmed) if trimmed else ""


def _positions(words: Words) -> str:
    striped = words.program.order.kind == "striped"
    lines = [
        "def _positions(chunks: list[int], length: int, device: torch.device) -> Tensor:",
    ]
    if striped:
        count = words.program.order.ranks(words.program.mesh)
        return "\n".join(
            [
                *lines,
                '    """Global positions of stripes of `length` positions each, ascending."""',
                f"    first = torch.arange(length, device=device) * {count}",
                "    return (first[:, None] + torch.tensor(chunks, device=device)).flatten()",
            ]
        )
    return "\n".join(
        [
            *lines,
            '    """Global positions of chunks of `length` positions each, in their order."""',
            "    first = torch.tensor(chunks, device=device) * length",
            "    return (first[:, None] + torch.arange(length, device=device)).flatten()",
        ]
    )


def _chunks(words: Words, axis: str) -> str:
    """`_chunks`: from coordinates to the chunks that their ranks own."""
    dims, mesh = words.order_dims(axis), words.program.mesh
    names = [f"{dim}_places" for dim in dims]
    letters = [f"i_{dim}" for dim in dims]
    number = ""
    for dim, letter in zip(dims, letters, strict=True):
        number = f"({number})" if " " in number else number
        number = f'{number} * MESH["{dim}"] + {letter}' if number else letter
    loops = " ".join(f"for {a} in {b}" for a, b in zip(letters, names, strict=True))
    given = ", ".join(f"{name}: Iterable[int]" for name in names)
    lines = [
        f"def {words.chunks_function(axis)}({given}) -> list[int]:",
        '    """Numbers of the chunks that the ranks at these places own, in global order."""',
    ]
    text = f"list({names[0]})" if len(dims) == 1 else f"[{number} {loops}]"
    if words.order_kind(axis) != "zigzag":
        return "\n".join([*lines, f"    return {text}"])
    last = words.program.order.chunks(mesh) - 1
    lines += [f"    ranks = {text}"]
    return "\n".join([*lines, f"    return [*ranks, *({last} - rank for rank in reversed(ranks))]"])


def _self_check(words: Words) -> str:
    op, program = words.operator, words.program
    sizes = _check_sizes(words)
    made = []
    for tensor in op.inputs:
        shape = "(" + "".join(f"{' * '.join(dim)}, " for dim in tensor.dims) + ")"
        if tensor.dtype == "integer":
            made.append(f'"{tensor.name}": torch.randint(0, 2, {shape}, generator=random)')
            continue
        wide = tensor.dtype == "accumulator"
        dtype = "torch.promote_types(dtype, torch.float32)" if wide else "dtype"
        made.append(f'"{tensor.name}": torch.randn({shape}, generator=random, dtype=torch.float64).to({dtype})')
    alone = [f'whole["{name}"]' for name in program.body]
    alone += [f"torch.arange({axis})" for axis in words.placed]
    alone += [
        f"torch.tensor({'0.5' if s.default is None else operator_entry.print_expr(s.default)}, dtype=torch.float64)"
        for s in op.scalars
    ]
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
        outputs=", ".join(f'"{name}"' for name in words.outputs),
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


# --- imports --------------------------------------------------------------------------------


def _imports(code: str, words: Words) -> str:
    """Exactly the imports that the code mentions."""
    mentioned = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    standard = [line for name, line in _STANDARD if name in mentioned]
    torch_lines = [line for name, line in _TORCH if name in mentioned]
    own = [word for word in words.dsl_words if word != "position"]
    if own:
        line = f"from torch import Tensor, {', '.join(own)}"
        torch_lines = [line if x == "from torch import Tensor" else x for x in torch_lines]
    groups = (["from __future__ import annotations"], standard, torch_lines)
    return "\n\n".join("\n".join(_merged(lines)) for lines in groups if lines)


def _merged(lines: list[str]) -> list[str]:
    """Imports from one module on one line."""
    merged: dict[str, list[str]] = {}
    for line in lines:
        source, _, name = line.partition(" import ")
        merged.setdefault(source if name else line, []).append(name)
    return [f"{k} import {', '.join(v)}" if v != [""] else k for k, v in merged.items()]


