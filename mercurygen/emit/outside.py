"""Emitted text of how the caller holds tensors: their dimensions' order, and PLACEMENTS.

Inside, everything is [B, S, H, D]: the public function exchanges two dimensions of what it is
given, and of what it gives back. These are views; a tensor that is sent as it is is copied first.
"""

from __future__ import annotations

from math import prod

from mercurygen.emit import held, windows
from mercurygen.ir.caller import PACKED, arranged, exchanged
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Batch, Collective
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace

# How the self-check's reference makes [B, H, S, D] of a tensor, and back; and what sizes it has.
_TO_HEADS_FIRST = {"bshd": ".transpose(1, 2)", "bhsd": "", "sbhd": ".permute(1, 2, 0, 3)"}
_FROM_HEADS_FIRST = {"bshd": ".transpose(1, 2)", "bhsd": "", "sbhd": ".permute(2, 0, 1, 3)"}
_ANY_SIZE = {
    "bshd": "batch, seq, *size",
    "bhsd": "batch, size[0], seq, size[1]",
    "sbhd": "seq, batch, *size",
}
_OWN_SIZE = {  # of two sequences, which are not equally long
    "bshd": "batch, *size",
    "bhsd": "batch, size[1], size[0], size[2]",
    "sbhd": "size[0], batch, *size[1:]",
}


_PLACES = {
    "told": "every = torch.arange(scores.shape[3], device=scores.device)",
    "places": "every, every",
}
_OWN_PLACES = {
    "told": "rows, cols = (torch.arange(n, device=scores.device) for n in scores.shape[2:])",
    "places": "rows, cols",
}


def shape(layout: str, *sizes: str) -> str:
    """`[B, H, S, D]` of the sizes for B, S, H and D."""
    return f"[{', '.join(arranged(layout, sizes))}]"


def sizes(layout: str, *each: object) -> str:
    """The same without brackets: `2, 16, 64, 40`."""
    return ", ".join(map(str, arranged(layout, each)))


def reference(
    layout: str, rows: int, seq: int, heads: int, kv_heads: int, keys: int | None = None
) -> dict[str, object]:
    """What the self-check's fixed texts need to know: sizes of its inputs, and how they lie.

    Args:
        layout: of the caller.
        rows: of the batch.
        seq: queries.
        heads, kv_heads: of q, and of k and v.
        keys: as many, where they are a sequence of their own.
    """
    pair, first, home = exchanged(layout), _TO_HEADS_FIRST[layout], _FROM_HEADS_FIRST[layout]
    names, numbers = "batch, seq, heads, kv_heads", f"{rows}, {seq}, {heads}, {kv_heads}"
    sized = "(heads, 40), (kv_heads, 40), (kv_heads, 24), (heads, 24)"
    if keys is not None:
        names, numbers = f"{names}, keys", f"{numbers}, {keys}"
        sized = "(seq, heads, 40), (keys, kv_heads, 40), (keys, kv_heads, 24), (seq, heads, 24)"
    return {
        **(_PLACES if keys is None else _OWN_PLACES),
        "counts": f"{names} = {numbers}",
        "sizes": sized,
        "shape": shape(layout, *"BSHE"),
        "back": f".transpose{pair}" if pair else "",
        "heads_first": first,
        "of_inputs": f"(x{first} for x in inputs)" if first else "inputs",
        "out": f"(scores.softmax(-1) @ v){home}" if home else "scores.softmax(-1) @ v",
        "any_size": (_ANY_SIZE if keys is None else _OWN_SIZE)[layout],
        **{
            f"{name}_size": sizes(layout, rows, seq if name == "q" else keys or seq, count, size)
            for name, count, size in each(heads, kv_heads)
        },
    }


def each(heads: int, kv_heads: int) -> tuple[tuple[str, int, int], ...]:
    """The self-check's inputs: name, heads, head size."""
    return ("q", heads, 40), ("k", kv_heads, 40), ("v", kv_heads, 24)


def places(layout: str) -> tuple[int, int, int, int]:
    """Which dimensions of the caller's tensors are B (if there is one), S, H and D."""
    if layout == PACKED:
        return 0, 0, 1, 2
    b, s, h, d = arranged(layout, range(4))
    return b, s, h, d


def into(layout: str) -> list[str]:
    """The public function's line that makes [B, S, H, D] of what it is given."""
    if layout == PACKED:
        return ["q, k, v = (x.unsqueeze(0) for x in (q, k, v))  # [1, S, H, D] from here on"]
    if not (pair := exchanged(layout)):
        return []
    return [f"q, k, v = (x.transpose{pair} for x in (q, k, v))  # [B, S, H, D] from here on"]


def back(layout: str) -> list[str]:
    """Its line that makes the caller's layout of out."""
    if layout == PACKED:
        return ["out = out.squeeze(0)"]
    return [f"out = out.transpose{pair}"] if (pair := exchanged(layout)) else []


def lse(layout: str) -> str:
    """`lse` as the caller has it, of one that is [B, H, S]."""
    return "lse.squeeze(0)" if layout == PACKED else "lse"


def sent(plan: Plan) -> tuple[Tensor, ...]:
    """The inputs that some rank sends as they are, not packed: they have to be dense."""
    found: set[str] = set()
    for rank in range(plan.program.mesh.size):
        played = trace(plan, rank)
        names = {number: name for name, number in played.inputs.items()}
        for event in played.events:
            if isinstance(event, Batch):
                found |= {names[m.buffer] for m in event.sends if m.buffer in names}
            elif isinstance(event, Collective) and event.source in names:
                found.add(names[event.source])
    return tuple(tensor for tensor in plan.program.inputs if tensor.name in found)


def stays_dense(plan: Plan, tensor: Tensor, layout: str) -> bool:
    """Whether a tensor is dense in both orders: one of the two dimensions has one index."""
    pair = exchanged(layout)  # of packed ones none
    return pair is None or any(prod(map(plan.program.extent, tensor.dims[i])) == 1 for i in pair)


def _sequences(plan: Plan, layout: str) -> list[str]:
    """Which dimension of every tensor is its sequence, as a placement says it."""
    found: dict[str, list[str]] = {}
    for tensor in plan.program.tensors:
        dims = arranged(layout, range(len(tensor.dims)))
        at = dims.index(tensor.dimension(plan.program.sequence(tensor)))
        found.setdefault(f"Shard({at})", []).append(tensor.name)
    each = (f'"{name}": {place}' for place, names in found.items() for name in names)
    return [f"_SEQUENCE = {{{', '.join(each)}}}"]


def constants(plan: Plan, layout: str) -> str:
    """MESH, WORLD_SIZE and PLACEMENTS; layout: of the caller's tensors."""
    mesh, program = plan.program.mesh, plan.program
    sizes = ", ".join(f'"{dim.name}": {dim.size}' for dim in mesh.dims)
    lines = [f"MESH: dict[str, int] = {{{sizes}}}", f"WORLD_SIZE = {mesh.size}"]
    placements: dict[str, list[str]] = {}
    for tensor in program.tensors:
        dims = arranged(layout, range(len(tensor.dims)))
        cut = {a: f"Shard({dims.index(tensor.dimension(a))})" for a in filter(None, tensor.pin)}
        places = [cut[axis] if axis else "Replicate()" for axis in tensor.pin]
        same = f"({places[0]},) * {len(places)}" if len(set(places)) == 1 < len(places) else ""
        comma = "," if len(places) == 1 else ""
        place = same or f"({', '.join(places)}{comma})"
        placements.setdefault(place, []).append(tensor.name)
    if program.mask == "window":
        pair = f"({program.window - 1}, {program.ahead})"
        lines.append(
            f"WINDOW: tuple[int, int] = {pair}  # keys before and after itself that a query sees"
        )
    if program.banded:
        lines.append(
            "Band = tuple[int | None, int | None]  # row i sees columns i + low to i + high"
        )
    if windows.apart(plan):
        lines += [
            "# Keys before and after its number that a query sees; tokens of a chunk of q, of k.",
            "Window = tuple[int, int, int, int]",
        ]
    count = len(mesh.dims)
    if count:
        lines.append("# Of the sequence in storage order: unshard puts it into global order.")
    if not count:
        names = ", ".join(f'"{tensor.name}"' for tensor in program.tensors)
        lines.append(f"PLACEMENTS: dict[str, tuple] = dict.fromkeys(({names}), ())")
        return "\n".join(lines)
    for index, (place, tensors) in enumerate(placements.items()):
        names = ", ".join(f'"{name}"' for name in tensors)
        if index == 0:
            lines.append(
                "PLACEMENTS: dict[str, tuple[Placement, ...]] = "
                f"{{name: {place} for name in ({names})}}"
            )
        else:
            lines += [f'PLACEMENTS["{name}"] = {place}' for name in tensors]
    return "\n".join(lines + ([] if held.sliced(program) else _sequences(plan, layout)))
