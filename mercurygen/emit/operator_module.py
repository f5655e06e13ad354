"""The module of a user's own operator: its lines on tiles, and what brings and merges them."""

from __future__ import annotations

import ast

from mercurygen.emit import (
    operator_body,
    operator_check,
    operator_entry,
    operator_header,
    operator_home,
    operator_positions,
    operator_tiles,
)
from mercurygen.emit.operator_nest import Nest
from mercurygen.emit.operator_words import Words
from mercurygen.emit.templates import render
from mercurygen.ir.operator import Operator
from mercurygen.ir.program import Program
from mercurygen.lower.plan import Plan
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


def text(schedule: Schedule, plan: Plan, operator: Operator) -> str:
    """The module below its first lines, not formatted yet."""
    words = Words(plan, operator)
    code = "\n\n\n".join([_constants(words), operator_entry.function(words), *_sections(words)])
    doc = f'"""{operator_header.docstring(schedule, words)}"""'
    return "\n\n".join([doc, _imports(code, words), code]) + "\n"


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
            lines.append(
                "# Of the ordered axes in storage order: unshard puts them into global order."
            )
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
            comment = f"# the dimension that is {program.order.kind}"
            lines.append(f"_ORDERED: dict[str, int] = {{{pairs}}}  {comment}")
    if program.mask == "window":
        lines.append(f"_WINDOW = {program.window}  # positions that a row sees, its own included")
    return "\n".join(lines)


def _held(program: Program) -> tuple:
    """What the caller holds: all but derived tensors."""
    return (*program.inputs, *program.outputs)


def _split(words: Words, tensor, dim: tuple[str, ...]) -> tuple[str, ...]:
    pinned = {
        d for d, axis in zip(words.program.mesh.names, tensor.pin, strict=True) if axis == dim[0]
    }
    order = words.plan.atoms.order(tensor, dim[0]).dims
    return tuple(d for d in order if d in pinned)


def _quoted(names: tuple[str, ...]) -> str:
    inside = ", ".join(f'"{name}"' for name in names)
    return f"({inside}{',' if len(names) == 1 else ''})"


def _sections(words: Words) -> list[str]:
    """Everything after the public function, each group under a heading of its own."""
    program, plan = words.program, words.plan
    mesh = program.mesh
    single = not mesh.dims
    layout = render(
        "operator_layout",
        world=mesh.size,
        mesh_type="None = None" if single else "DeviceMesh",
        many=mesh.size > 1,
        ordered=program.order.kind != "contiguous" and not single,
        zigzag=program.order.kind == "zigzag",
        striped=program.order.kind == "striped",
    )
    above = (
        [
            "def make_mesh(group: None = None, device_type: str | None = None) -> None:\n"
            '    """One rank needs no mesh."""'
        ]
        if single
        else [render("mesh", world=mesh.size, placed=False), render("groups")]
    )
    below = [] if single else [render("from_all_ranks", world=mesh.size)]
    sections = [("layout: what a rank holds of every tensor", [*above, layout, *below])]
    texts = []
    if plan.nest.stages or words.placed:
        nest = Nest(words)
        home = operator_home.moving(words) is not None
        texts.append(operator_home.shares(nest) if home else nest.function())
        texts += operator_home.functions(words)
    texts += operator_tiles.movers(words)
    if texts:
        sections.append(("how tiles come by", texts))
    reduce = _reducers(words)
    if reduce:
        sections.append(("partial results of several ranks", [reduce]))
    lines = [operator_body.body(words), *operator_positions.helpers(words)]
    if _merges(words):
        lines += [operator_body.merge(words), *operator_body.user_merges(words)]
    sections.append((f"the lines of {words.operator.name}", lines))
    sections.append(("checks", [operator_entry.check(words)]))
    where = "python NAME.py" if single else f"torchrun on {mesh.size} ranks, with GPUs or without"
    sections.append((f"self-check: {where}", [operator_check.self_check(words)]))
    return [f"{_heading(title)}\n\n\n" + "\n\n\n".join(each) for title, each in sections]


def _heading(title: str) -> str:
    return f"# --- {title} ".ljust(95, "-")


def _merges(words: Words) -> bool:
    nest = words.plan.nest
    kinds = {reduce.kind for reduce in nest.reduces}
    return nest.begin != "only" or bool(kinds - {"sum"}) or any(x.outputs for x in nest.loops)


def _reducers(words: Words) -> str:
    found = [(r.kind == "sum", r.axis is None) for r in words.plan.nest.reduces]
    if not found:
        return ""
    fills = ", ".join(
        f"received[{i}].new_full(received[{i}].shape[1:], {value})"
        for i, value in enumerate(operator_body.identities(words).values())
    )
    texts = []
    if any(summed for summed, _ in found):
        values = {"sum_all": (True, True) in found, "sum_part": (True, False) in found}
        texts.append(render("operator_reduce", **values))
    if not all(summed for summed, _ in found):
        values = {"merge_all": (False, True) in found, "merge_part": (False, False) in found}
        texts.append(render("operator_exchange", fills=fills, **values))
    return "\n\n\n".join(texts)


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
