"""Emitted text of global positions, of chunks, and of what a mask leaves of tiles."""

from __future__ import annotations

from mercurygen.emit import operator_home, operator_tiles
from mercurygen.emit.operator_words import Words
from mercurygen.emit.templates import render


def helpers(words: Words) -> list[str]:
    """The mask and positions, as far as the lines need them."""
    program, found = words.program, []
    kinds = {axis: words.chunks(axis, words.here(axis)) for axis in words.placed}
    if any(chunks != "[0]" for chunks in kinds.values()):
        found.append(_positions(words))
    if words.operator.mask:
        window, causal = program.mask == "window", program.mask == "causal"
        if window or causal:
            striped, count = program.order.kind == "striped", program.order.ranks(program.mesh)
            values = {"window": window, "striped": striped, "count": count}
            found.append(render("operator_visible", **values))
        found.append(render("operator_mask", window=window, causal=causal))
    done: set[str] = set()
    for axis in words.placed:
        name = words.chunks_function(axis)
        if name not in done and name in "".join([*kinds.values(), *found, _reads(words)]):
            done.add(name)
            found.append(_chunks(words, axis))
    return found


def _reads(words: Words) -> str:
    trimmed = operator_tiles.trimmed_axis(words) or operator_home.trimmed_axis(words)
    return operator_tiles.read(words, trimmed) if trimmed else ""


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
