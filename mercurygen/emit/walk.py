"""Emitted text of the stages: rings, rings inside rings, and gathers."""

from __future__ import annotations

from textwrap import wrap

from mercurygen.emit import direct, ring_kinds, rings, windows
from mercurygen.emit.border import needs_runs, runs_argument, runs_name
from mercurygen.emit.levels import with_owner
from mercurygen.emit.loops import leading, levels, part_counts, walked, walking
from mercurygen.emit.masks import LISTED, Form, mask_form
from mercurygen.emit.needed import need_form
from mercurygen.emit.ring_kinds import TILES
from mercurygen.emit.templates import render
from mercurygen.emit.words import letters, variable
from mercurygen.lower.plan import Gather, Plan, Stages, Walk


def functions(plan: Plan) -> list[str]:
    """Everything that brings tiles, callers first."""
    texts = []
    if ring_kinds.nested(plan):
        texts += [_walk_tiles(plan), _spare(plan)]
    texts += rings.functions(plan)
    if any(isinstance(stage, Gather) for loop in plan.nest.loops for stage in loop.walking):
        texts.append(_gather_ahead(plan))
    if leading(plan) and not part_counts(plan):
        texts.append(gather(plan))
    if any(isinstance(stage, Gather) for stage in _inside(plan)):
        texts += gathering(plan)
    if _inside(plan):
        texts.append(render("wait"))
    return texts


def _inside(plan: Plan) -> Stages:
    """The stages that are not outside the tile loops."""
    return walking(plan) if part_counts(plan) else plan.nest.stages


def _walk_tiles(plan: Plan) -> str:
    """`_walk_tiles`: rings inside rings, the loops in the order of the schedule."""
    found = levels(plan)
    form, names = _owner_form(plan), letters(plan.program.mesh.dims)
    groups = ", ".join(f"{variable(dim)}: dist.ProcessGroup" for dim in nest_dims(plan))
    around = " for every tile of ".join(f"{dim}" for dim, _ in reversed(found))
    what = {"all": "the tiles", "chunks": "(places, tiles)"}.get(form, "(slot, tiles)")
    owner = "int" if form != "chunks" else f"tuple[{', '.join(['int'] * len(found))}]"
    window = windows.parameter(plan) if ring_kinds.any_short(plan) else ""
    lines = [
        f"def _walk_tiles(tiles: {TILES}, {groups}{window})"
        f" -> Iterator[{ring_kinds.yields(plan, owner)}]:",
        *_doc(f"Yield {what} of every rank, ours first: once around {around}."),
    ]
    scaled = any(isinstance(stage, Gather) for stage in walking(plan))
    longer, source = 1, "tiles"
    body: list[str] = []
    for depth, (dim, gathers) in enumerate(found):
        group, lists = variable(dim), direct.Lists(plan, depth)
        most = _spare_argument(plan, walked(plan)[depth])
        buffers = f"_spare(tiles, {group}{most}{f', {longer}' if scaled else ''})"
        if depth:
            lines.append(f"    at_{dim} = {buffers}")
            buffers = f"at_{dim}"
        more = _around(plan, depth) + (", window" if ring_kinds.short(plan, dim) else "")
        call = f"{ring_kinds.ring_name(plan, dim)}({source}, {buffers}, {group}{more})"
        for stage in gathers:
            call = f"_gather_ahead({call}, {variable(stage.dim)}{runs_argument(plan, stage.join)})"
            longer *= plan.program.mesh.extent(stage.dim)
        last = depth + 1 == len(found)
        pad = "    " * (depth + 1)
        if lists.names:
            lines.append(f"    {lists.rows}")
            body.append(f"{pad}{lists.cols}")
        if form == "all":
            body.append(f"{pad}yield from {call}" if last else f"{pad}for of_{dim} in {call}:")
        else:
            tile = "tile" if last else f"of_{dim}"
            body.append(f"{pad}for {names[dim]}, {tile} in {call}:")
        source = f"of_{dim}"
    if form != "all":
        pad, slot = "    " * (len(found) + 1), _slot(plan, form)
        if len(found) > 2 and form != "chunks":
            body.append(f"{pad}slot = {slot}")
            slot = "slot"
        body.append(f"{pad}yield {slot}, tile")
    return "\n".join([*lines, *body])


def _owner_form(plan: Plan) -> Form:
    """How the nest says whose tile it yields: by number, by "chunks" of places, or ("all") not."""
    form = mask_form(plan)
    return "chunks" if form in LISTED or form == "all" and with_owner(plan) else form


def _spare(plan: Plan) -> str:
    """`_spare`: the receive buffers of a ring of a nest."""
    longer = any(isinstance(stage, Gather) for stage in walking(plan))
    counts = {ring.buffers for ring in ring_kinds.rings(plan).values()}
    count = "most" if len(counts) > 1 else str(*counts)
    parameter = (", most: int" if len(counts) > 1 else "") + (", longer: int" if longer else "")
    one = "x.new_empty(x.shape[0], longer * x.shape[1], *x.shape[2:])"
    text = "used in turn" + (", that many times as long as tiles" if longer else "")
    buffers = f"tuple({one} for x in tiles)" if longer else "tuple(map(torch.empty_like, tiles))"
    return "\n".join(
        [
            f"def _spare(tiles: {TILES}, group: dist.ProcessGroup{parameter}) -> list[{TILES}]:",
            f'    """Buffers that a ring receives into, {text}."""',
            f"    return [{buffers} for _ in range(min({count}, group.size() - 1))]",
        ]
    )


def _spare_argument(plan: Plan, walk: Walk) -> str:
    """`, 4`: how many buffers a ring uses, where rings differ in that."""
    counts = {ring.buffers for ring in ring_kinds.rings(plan).values()}
    return f", {ring_kinds.ring_of(plan, walk).buffers}" if len(counts) > 1 else ""


def spare_call(plan: Plan, walk: Walk, tiles: str) -> str:
    """The buffers of a ring beside a nest of them."""
    scaled = any(isinstance(stage, Gather) for stage in walking(plan))
    more = f"{_spare_argument(plan, walk)}{', 1' if scaled else ''}"
    return f"_spare({tiles}, {variable(walk.dim)}{more})"


def nest_dims(plan: Plan) -> tuple[str, ...]:
    """The dimensions that `_walk_tiles` needs the groups of."""
    return (*(stage.dim for stage in walking(plan)), *direct.beside(plan))


def _around(plan: Plan, depth: int) -> str:
    """Our places along the rings around a direct one, and the owner's of the tile that is here;
    or the chunks of the rows and columns that it goes by."""
    lists = direct.Lists(plan, depth).names
    if lists or need_form(plan) == "chunks":
        return "".join(f", {name}" for name in lists)
    if not walked(plan)[depth].direct or not direct.parameters(plan):
        return ""
    names, outer = letters(plan.program.mesh.dims), [each.dim for each in walked(plan)[:depth]]
    ours = [f"{variable(dim)}.rank()" for dim in outer]
    return "".join(
        f", ({', '.join(places)}{',' if len(places) == 1 else ''})"
        for places in (ours, [names[dim] for dim in outer])
    )


def _doc(text: str) -> list[str]:
    """A docstring of one sentence; of several lines if it is long."""
    if len(text) <= 90:
        return [f'    """{text}"""']
    start, _, rest = text.partition(": ")
    more = wrap(rest[0].upper() + rest[1:], 92, break_long_words=False, break_on_hyphens=False)
    return [f'    """{start}.', "", *(f"    {line}" for line in more), '    """']


def _slot(plan: Plan, form: Form) -> str:
    """The owner of a tile: its place along every walk, or one number, row-major."""
    names = letters(plan.program.mesh.dims)
    if form == "chunks":
        return f"({', '.join(names[walk.dim] for walk in walked(plan))})"
    number = ""
    for dim in plan.row_dims:
        if number:
            number = f"({number})" if " " in number else number
            number = f"{number} * {variable(dim)}.size() + "
        number += names[dim]
    return number


def _gather_ahead(plan: Plan) -> str:
    parameter, argument = _outer(plan)
    owner = with_owner(plan)
    first, loop = ("owner, tiles", "following, tiles") if owner else ("tiles", "tiles")
    finish = f"_finish_gather(parts, works{argument})"
    after = f"owner, gathered = following, {finish}" if owner else f"gathered = {finish}"
    of_tile = "owner, gathered" if owner else "gathered"
    kind = ring_kinds.yields(plan, "int")
    return "\n".join(
        [
            f"def _gather_ahead(walk: Iterator[{kind}], group: dist.ProcessGroup{parameter})"
            f" -> Iterator[{kind}]:",
            '    """Gather every tile of a walk; the next one\'s gather runs while one is used."""',
            f"    {first} = next(walk)",
            "    parts = [x.new_empty(group.size(), *x.shape) for x in tiles]",
            "    works = _start_gather(tiles, parts, group)",
            f"    gathered = {finish}",
            f"    for {loop} in walk:",
            "        works = _start_gather(tiles, parts, group)",
            f"        yield {of_tile}",
            f"        {after}",
            f"    yield {of_tile}",
        ]
    )


def _outer(plan: Plan) -> tuple[str, str]:
    """Parameter and argument for the number of runs, where the module needs them."""
    name = runs_name(plan)
    return (f", {name}: int", f", {name}") if needs_runs(plan) else ("", "")


def gather(plan: Plan) -> str:
    """`_gather`: a gather that is waited for."""
    parameter, argument = _outer(plan)
    return "\n".join(
        [
            f"def _gather(tiles: {TILES}, group: dist.ProcessGroup{parameter}) -> {TILES}:",
            '    """The tiles of all ranks of the group, joined in global order."""',
            "    parts = [x.new_empty(group.size(), *x.shape) for x in tiles]",
            f"    return _finish_gather(parts, _start_gather(tiles, parts, group){argument})",
        ]
    )


def gathering(plan: Plan) -> list[str]:
    """`_start_gather` and `_finish_gather`."""
    parameter, argument = _outer(plan)
    start = [
        f"def _start_gather(tiles: {TILES}, parts: list[Tensor], group: dist.ProcessGroup)"
        " -> list[dist.Work]:",
        '    """Start to gather tiles [B, S, h, D] from every rank into parts [n, B, S, h, D]."""',
        "    return [_all_gather(into, x, group) for into, x in zip(parts, tiles, strict=True)]",
    ]
    finish = [
        f"def _finish_gather(parts: list[Tensor], works: list[dist.Work]{parameter}) -> {TILES}:",
        '    """Wait for the parts, and join them: [B, n S, h, D] each."""',
        "    _wait(works)",
        f"    return tuple(_join(x{argument}) for x in parts)",
    ]
    return ["\n".join(start), "\n".join(finish)]
