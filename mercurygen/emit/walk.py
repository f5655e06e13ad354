"""Emitted text of the stages: rings, rings inside rings, and gathers."""

from __future__ import annotations

from mercurygen.emit.border import needs_outer, outer_argument
from mercurygen.emit.nest import Form, mask_form
from mercurygen.emit.templates import render
from mercurygen.emit.words import letters
from mercurygen.lower.plan import Gather, Plan, walk_levels

TILES = "tuple[Tensor, ...]"


def functions(plan: Plan) -> list[str]:
    """Everything that brings tiles, callers first."""
    nest = plan.nest
    texts = []
    if len(walk_levels(nest.walking)) > 1:
        texts += [_walk_tiles(plan), _spare(plan)]
    if nest.walking:
        texts += [_walk_ring(plan), render("transfer")]
    if any(isinstance(stage, Gather) for stage in nest.walking):
        texts.append(_gather_ahead(plan))
    if nest.leading:
        texts.append(_gather(plan))
    if any(isinstance(stage, Gather) for stage in nest.stages):
        texts += [_gathering(plan)]
    return texts


def _yields(plan: Plan, owner: str) -> str:
    return f"tuple[{owner}, {TILES}]" if _with_owner(plan) else TILES


def _with_owner(plan: Plan) -> bool:
    return mask_form(plan) != "all"


def _walk_ring(plan: Plan) -> str:
    """One ring. Alone it has its own buffers; in a nest they are kept outside and reused."""
    nested = len(walk_levels(plan.nest.walking)) > 1
    owner = _with_owner(plan)
    what = "(owner, tiles)" if owner else "the tiles"
    spare = [] if nested else ["    " + _spare_line("tiles")]
    size = "size, me = group.size(), group.rank()" if owner else "size = group.size()"
    return "\n".join(
        [
            f"def _walk_ring(tiles: {TILES}, {f'spare: list[{TILES}], ' if nested else ''}"
            f"group: dist.ProcessGroup) -> Iterator[{_yields(plan, 'int')}]:",
            f'    """Yield {what} of every rank, ours first; the next arrive while one is used."""',
            f"    {size}",
            *spare,
            "    for step in range(size - 1):",
            "        arriving = _shift(tiles, spare[step % 2], group)",
            f"        yield {'(me - step) % size, ' if owner else ''}tiles",
            "        tiles = arriving.wait()",
            f"    yield {'(me + 1) % size, ' if owner else ''}tiles",
        ]
    )


def _spare_line(tiles: str) -> str:
    return (
        f"spare = [tuple(torch.empty_like(x) for x in {tiles}) for _ in range(min(2, size - 1))]"
        "  # used in turn"
    )


def _spare(plan: Plan) -> str:
    """`_spare`: the receive buffers of a ring of a nest."""
    longer = any(isinstance(stage, Gather) for stage in plan.nest.walking)
    parameter = ", longer: int" if longer else ""
    one = "x.new_empty(x.shape[0], longer * x.shape[1], *x.shape[2:])"
    text = "for tiles that many times longer" if longer else "two sets, used in turn"
    buffers = one if longer else "torch.empty_like(x)"
    return (
        f"def _spare(tiles: {TILES}, group: dist.ProcessGroup{parameter}) -> list[{TILES}]:\n"
        f'    """Buffers that a ring receives into, {text}; a ring of two needs one."""\n'
        f"    sets = range(min(2, group.size() - 1))\n"
        f"    return [tuple({buffers} for x in tiles) for _ in sets]\n"
    ).rstrip()


def _walk_tiles(plan: Plan) -> str:
    """`_walk_tiles`: rings inside rings, the loops in the order of the schedule."""
    levels = walk_levels(plan.nest.walking)
    form, names = mask_form(plan), letters(plan.program.mesh.dims)
    groups = ", ".join(f"{stage.dim}: dist.ProcessGroup" for stage in plan.nest.walking)
    around = " for every tile of ".join(f"{dim}" for dim, _ in reversed(levels))
    what = {"all": "the tiles", "chunks": "(places, tiles)"}.get(form, "(slot, tiles)")
    owner = "int" if form != "chunks" else f"tuple[{', '.join(['int'] * len(levels))}]"
    lines = [
        f"def _walk_tiles(tiles: {TILES}, {groups}) -> Iterator[{_yields(plan, owner)}]:",
        f'    """Yield {what} of every rank, ours first: once around {around}."""',
    ]
    scaled = any(isinstance(stage, Gather) for stage in plan.nest.walking)
    longer, source = 1, "tiles"
    body: list[str] = []
    for depth, (dim, gathers) in enumerate(levels):
        buffers = f"_spare(tiles, {dim}{f', {longer}' if scaled else ''})"
        if depth:
            lines.append(f"    at_{dim} = {buffers}")
            buffers = f"at_{dim}"
        call = f"_walk_ring({source}, {buffers}, {dim})"
        for stage in gathers:
            call = f"_gather_ahead({call}, {stage.dim}{outer_argument(plan, stage.join)})"
            longer *= plan.program.mesh.extent(stage.dim)
        last = depth + 1 == len(levels)
        pad = "    " * (depth + 1)
        if form == "all":
            body.append(f"{pad}yield from {call}" if last else f"{pad}for of_{dim} in {call}:")
        else:
            tile = "tile" if last else f"of_{dim}"
            body.append(f"{pad}for {names[dim]}, {tile} in {call}:")
        source = f"of_{dim}"
    if form != "all":
        body.append(f"{'    ' * (len(levels) + 1)}yield {_slot(plan, form)}, tile")
    return "\n".join([*lines, *body])


def _slot(plan: Plan, form: Form) -> str:
    """The owner of a tile: its place along every walk, or one number, row-major."""
    names = letters(plan.program.mesh.dims)
    if form == "chunks":
        return f"({', '.join(names[dim] for dim in plan.nest.walks)})"
    number = ""
    for dim in plan.row_dims:
        if number:
            number = f"({number})" if " " in number else number
            number = f"{number} * {dim}.size() + "
        number += names[dim]
    return number


def _gather_ahead(plan: Plan) -> str:
    outer = needs_outer(plan)
    parameter, argument = (", outer: int", ", outer") if outer else ("", "")
    owner = _with_owner(plan)
    first, loop = ("owner, tiles", "following, tiles") if owner else ("tiles", "tiles")
    after = "owner, gathered = following, arriving.wait()" if owner else "gathered = arriving.wait()"
    of_tile = "owner, gathered" if owner else "gathered"
    kind = _yields(plan, "int") if len(plan.nest.walks) <= 1 or owner else TILES
    return "\n".join(
        [
            f"def _gather_ahead(walk: Iterator[{kind}], group: dist.ProcessGroup{parameter})"
            f" -> Iterator[{kind}]:",
            '    """Gather every tile of a walk; the next one\'s gather runs while one is used."""',
            f"    {first} = next(walk)",
            "    parts = [x.new_empty(group.size(), *x.shape) for x in tiles]",
            f"    gathered = _start_gather(tiles, parts, group{argument}).wait()",
            f"    for {loop} in walk:",
            f"        arriving = _start_gather(tiles, parts, group{argument})",
            f"        yield {of_tile}",
            f"        {after}",
            f"    yield {of_tile}",
        ]
    )


def _gather(plan: Plan) -> str:
    parameter, argument = (", outer: int", ", outer") if needs_outer(plan) else ("", "")
    return "\n".join(
        [
            f"def _gather(tiles: {TILES}, group: dist.ProcessGroup{parameter}) -> {TILES}:",
            '    """The tiles of all ranks of the group, joined in global order."""',
            "    parts = [x.new_empty(group.size(), *x.shape) for x in tiles]",
            f"    return _start_gather(tiles, parts, group{argument}).wait()",
        ]
    )


def _gathering(plan: Plan) -> str:
    outer = needs_outer(plan)
    parameter, argument = (", outer: int", ", outer") if outer else ("", "")
    field = "    outer: int\n" if outer else ""
    join = f"_join(x{', self.outer' if outer else ''})"
    return f'''\
class _Gathering(NamedTuple):
    """Parts of tiles on their way to us, one from every rank of a group."""

    parts: list[Tensor]
    works: list[dist.Work]
{field}
    def wait(self) -> {TILES}:
        """Return the tiles, joined in global order, once all parts are here."""
        for work in self.works:
            work.wait()
        return tuple({join} for x in self.parts)


def _start_gather(
    tiles: {TILES}, parts: list[Tensor], group: dist.ProcessGroup{parameter}
) -> _Gathering:
    """Start to gather tiles [B, S, h, D] from every rank of the group into parts [n, B, S, h, D]."""
    works = [_all_gather(into, x, group) for into, x in zip(parts, tiles, strict=True)]
    return _Gathering(parts, works{argument})'''

