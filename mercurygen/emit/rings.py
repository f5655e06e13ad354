"""Emitted text of one ring, in every way that tiles come by along one dimension."""

from __future__ import annotations

from mercurygen.emit import direct
from mercurygen.emit.levels import with_owner
from mercurygen.emit.needed import may_be_empty, uneven
from mercurygen.emit.ring_kinds import TILES, Ring, nested, rings, yields
from mercurygen.emit.templates import render
from mercurygen.lower.plan import Plan

_IN_FLIGHT = "finally:  # even if the caller fails: nothing stays in flight"


def functions(plan: Plan) -> list[str]:
    """Every ring, and what rings call."""
    found = rings(plan)
    texts = [_walk(plan, name, ring) for name, ring in found.items()]
    if any(ring.direct and ring.ahead > 1 for ring in found.values()):
        texts.append(render("landed"))
    empty = any(ring.cut for ring in found.values()) and may_be_empty(plan)
    values = {"some": "", "unless": ""}
    if empty:  # nothing may be read of a tile
        either = "recvs or sends" if uneven(plan) else "recvs"
        values = {"some": " if x.numel()", "unless": f" if {either} else []"}
    if any(ring.both for ring in found.values()):
        texts.append(render("shift_both", **values))
    if ways := _ways(plan):
        texts.append(render("shift", **_SHIFTS[tuple(ways)], **values))
    if any(ring.direct for ring in found.values()):
        texts += direct.functions(plan)
    return texts


_SHIFTS = {  # by whether the rings are reversed: the words of `_shift`
    (False,): {
        "parameter": "",
        "to": "to the next rank",
        "theirs": "the previous rank's",
        "before": "me - 1",
        "after": "me + 1",
    },
    (True,): {
        "parameter": "",
        "to": "to the previous rank",
        "theirs": "the next rank's",
        "before": "me + 1",
        "after": "me - 1",
    },
    (False, True): {
        "parameter": ", on: int",
        "to": "`on` ranks forward",
        "theirs": "from as many back",
        "before": "me - on",
        "after": "me + on",
    },
}


def _ways(plan: Plan) -> list[bool]:
    """Whether what is passed on one way goes in reverse: one of the two, or both."""
    relayed = [ring for ring in rings(plan).values() if not ring.direct and ring.both != "odd"]
    carried = [loop.walks[-1] for loop in plan.nest.loops if loop.home == "relayed"]
    return sorted({each.reverse for each in (*relayed, *carried)})


def carries_both_ways(plan: Plan) -> bool:
    """Whether some sums travel with reversed rings and others do not."""
    homes = (loop for loop in plan.nest.loops if loop.home == "relayed")
    return len({loop.walks[-1].reverse for loop in homes}) > 1


def way_argument(plan: Plan, reverse: bool) -> str:
    """`, 1`: which way `_shift` goes, where it goes both."""
    return f", {-1 if reverse else 1}" if len(_ways(plan)) > 1 else ""


# --- rings ----------------------------------------------------------------------------------


def _walk(plan: Plan, name: str, ring: Ring) -> str:
    """One ring. It has its own buffers, unless rings are nested."""
    owner = with_owner(plan)
    count = ring.buffers
    few = f"min({count}, size - 1)" if count > 1 else "1"
    if ring.short:
        few = f"min({count}, {'len(steps)' if ring.direct else 'hops'})"
    buffers = f"[tuple(map(torch.empty_like, tiles)) for _ in range({few})]"
    if count == 1:
        buffers = "tuple(map(torch.empty_like, tiles))"
        buffers = f"[{buffers}]"
    note = "  # used in turn" if count > 1 else "  # used again and again"
    spare = [] if nested(plan) else [f"    spare = {buffers}{note}"]
    spare = [*_length(plan, ring), *spare] if ring.short else spare
    size = "size, me = group.size(), group.rank()" if owner else "size = group.size()"
    given = f"spare: list[{TILES}], " if nested(plan) else ""
    more = "".join(f", {each}" for each in _parameters(plan, ring))
    return "\n".join(
        [
            f"def {name}(tiles: {TILES}, {given}group: dist.ProcessGroup{more})"
            f" -> Iterator[{yields(plan, 'int')}]:",
            f'    """{_doc(plan, ring)}"""',
            f"    {size}",
            *spare,
            *_body(plan, ring),
        ]
    )


def _length(plan: Plan, ring: Ring) -> list[str]:
    """A line that says how far a short ring goes."""
    if ring.direct:
        return ["    steps = _steps(size, tiles[0].shape[1], window)"]
    reach = "window[1]" if ring.reverse else "window[0]"
    tokens = f"({ring.wide} * tiles[0].shape[1])" if ring.wide > 1 else "tiles[0].shape[1]"
    return [
        f"    hops = min(size - 1, -(-{reach} // {tokens}))  # what is further back is not seen"
    ]


def _parameters(plan: Plan, ring: Ring) -> list[str]:
    """What a ring must know beside its tiles and its group."""
    more = ["window: tuple[int, int]"] if ring.short else []
    if ring.uneven:
        return ["rows: list[int]", "cols: list[list[int]]", *more]
    return [*(direct.parameters(plan) if ring.direct else []), *more]


def _doc(plan: Plan, ring: Ring) -> str:
    what = "Yield (owner, tiles)" if with_owner(plan) else "Yield the tiles"
    if ring.both:
        return f"{what} of every rank, ours first, then those of both neighbours, and so on."
    start = f"{what} {'in reach' if ring.short else 'of every rank'}, ours first; "
    if ring.ahead == 0:
        return f"{start}the next arrive when one is used up."
    if ring.ahead == 1:
        return f"{start}the next arrive while one is used."
    return f"{start}{ring.ahead} more are here or on their way."


def _body(plan: Plan, ring: Ring) -> list[str]:
    if ring.both:
        return _both_ways(plan, ring)
    if ring.short and ring.direct:
        return _some_steps(plan, ring)
    if ring.ahead == 0:
        return _at_once(plan, ring)
    if ring.ahead == 1:
        return _one_ahead(plan, ring)
    return _fetched_ahead(plan, ring) if ring.direct else _passed_ahead(plan, ring)


def _owner(plan: Plan, ring: Ring, step: str) -> str:
    """`(me - step) % size, `, where it is asked for."""
    return f"{_rank(ring, step)}, " if with_owner(plan) else ""


def _rank(ring: Ring, *steps: str) -> str:
    """`(me - step - 1) % size`: whose tile is here after some steps."""
    return f"({(' + ' if ring.reverse else ' - ').join(['me', *steps])}) % size"


def _last(plan: Plan, ring: Ring) -> str:
    if ring.short:
        return f"    yield {_owner(plan, ring, 'hops')}tiles"
    sign = "-" if ring.reverse else "+"
    return f"    yield {f'(me {sign} 1) % size, ' if with_owner(plan) else ''}tiles"


def _arriving(ring: Ring, buffer: str, held: str, owner: str) -> str:
    """What a relayed ring receives an owner's tiles into."""
    if ring.uneven:
        return f"_fronts({buffer}, rows, cols[{owner}])"
    return f"tuple(_front(x, {held}[0].shape[1]) for x in {buffer})" if ring.cut else buffer


def _shift(plan: Plan, ring: Ring, held: str) -> str:
    """Pass tiles on."""
    return f"_shift({held}, arriving, group{way_argument(plan, ring.reverse)})"


def _fetch(plan: Plan, ring: Ring, buffer: str, step: str) -> str:
    """Ask for the tiles of a step."""
    step = f"-({step})" if ring.reverse and " " in step else f"-{step}" if ring.reverse else step
    more = "".join(f", {each.partition(':')[0]}" for each in _parameters(plan, ring))
    return f"_fetch(own, {buffer}, {step}, group{more})"


def _some_steps(plan: Plan, ring: Ring) -> list[str]:
    """A direct ring of a window: steps at which nobody reads anything are left out."""
    buffer = f"spare[turn % {ring.buffers}]" if ring.buffers > 1 else "spare[0]"
    fetch = _fetch(plan, ring, buffer, "step")
    owner, place = ("owner, ", _rank(ring, "step")) if with_owner(plan) else ("", "")
    loop = "turn, step in enumerate(steps)" if ring.buffers > 1 else "step in steps"
    if ring.ahead == 0:
        body = [
            f"        yield {owner}tiles",
            f"        works, tiles = {fetch}",
            "        _wait(works)",
            f"        owner = {place}",
        ]
    else:
        body = [
            f"        works, arriving = {fetch}",
            "        try:",
            f"            yield {owner}tiles",
            f"        {_IN_FLIGHT}",
            "            _wait(works)",
            f"        owner, tiles = {place}, arriving",
        ]
    return ["    own, owner = tiles, me", f"    for {loop}:", *body, f"    yield {owner}tiles"]


def _last_step(ring: Ring) -> str:
    """How many hops a ring that passes tiles on has."""
    return "hops" if ring.short else "size - 1"


def _at_once(plan: Plan, ring: Ring) -> list[str]:
    following = _rank(ring, "step", "1")
    if ring.direct:
        lines = [
            f"        works, tiles = {_fetch(plan, ring, 'spare[0]', 'step + 1')}",
            "        _wait(works)",
        ]
    else:
        lines = [
            f"        arriving = {_arriving(ring, 'spare[step % 2]', 'tiles', following)}",
            f"        _wait({_shift(plan, ring, 'tiles')})",
            "        tiles = arriving",
        ]
    return [
        *(["    own = tiles"] if ring.direct else []),
        f"    for step in range({_last_step(ring)}):",
        f"        yield {_owner(plan, ring, 'step')}tiles",
        *lines,
        _last(plan, ring),
    ]


def _one_ahead(plan: Plan, ring: Ring) -> list[str]:
    if ring.direct:
        fetch = _fetch(plan, ring, "spare[step % 2]", "step + 1")
        start = [f"        works, arriving = {fetch}"]
    else:
        following = _rank(ring, "step", "1")
        start = [
            f"        arriving = {_arriving(ring, 'spare[step % 2]', 'tiles', following)}",
            f"        works = {_shift(plan, ring, 'tiles')}",
        ]
    return [
        *(["    own = tiles"] if ring.direct else []),
        f"    for step in range({_last_step(ring)}):",
        *start,
        "        try:",
        f"            yield {_owner(plan, ring, 'step')}tiles",
        f"        {_IN_FLIGHT}",
        "            _wait(works)",
        "        tiles = arriving",
        _last(plan, ring),
    ]


def _passed_ahead(plan: Plan, ring: Ring) -> list[str]:
    ahead = ring.ahead
    buffer = f"spare[(step + {ahead - 1}) % {ahead + 1}]"
    arriving = _arriving(ring, buffer, "held[-1]", _rank(ring, "step", str(ahead)))
    if with_owner(plan):
        rest = [
            f"    for step, tiles in enumerate(held, size - {ahead}):",
            f"        yield {_owner(plan, ring, 'step')}tiles",
        ]
    else:
        rest = ["    yield from held"]
    return [
        *_first_hops(plan, ring),
        f"    for step in range(size - {ahead}):",
        f"        arriving = {arriving}",
        f"        works = {_shift(plan, ring, 'held[-1]')}",
        "        try:",
        f"            yield {_owner(plan, ring, 'step')}held[0]",
        f"        {_IN_FLIGHT}",
        "            _wait(works)",
        "        held = [*held[1:], arriving]",
        *rest,
    ]


def _first_hops(plan: Plan, ring: Ring) -> list[str]:
    """The hops that are over before our own tiles are used."""
    if ring.ahead == 2:
        return [
            f"    arriving = {_arriving(ring, 'spare[0]', 'tiles', _rank(ring, '1'))}",
            f"    _wait({_shift(plan, ring, 'tiles')})",
            "    held = [tiles, arriving]  # in order of use",
        ]
    following = _rank(ring, "step", "1")
    return [
        "    held = [tiles]  # in order of use",
        f"    for step in range({ring.ahead - 1}):",
        f"        arriving = {_arriving(ring, 'spare[step]', 'held[-1]', following)}",
        f"        _wait({_shift(plan, ring, 'held[-1]')})",
        "        held = [*held, arriving]",
    ]


def _fetched_ahead(plan: Plan, ring: Ring) -> list[str]:
    ahead = ring.ahead
    more = _fetch(plan, ring, f"spare[(step + {ahead - 1}) % {ahead + 1}]", f"step + {ahead}")
    landed = "tiles, flights = _landed(flights)"
    if ahead == 2:
        first = _fetch(plan, ring, "spare[0]", "1")
        owner = f"(me {'-' if ring.reverse else '+'} 2) % size, " if with_owner(plan) else ""
        last = [f"        yield {owner}tiles", f"        {landed}"]
    else:
        first = _fetch(plan, ring, "spare[step]", "step + 1")
        first = f"{first} for step in range({ahead - 1})"
        last = [
            f"        for step in range(size - {ahead}, size - 1):  # all are on their way",
            f"            yield {_owner(plan, ring, 'step')}tiles",
            f"            {landed}",
        ]
    return [
        "    own = tiles",
        f"    flights = [{first}]",
        "    try:",
        f"        for step in range(size - {ahead}):",
        f"            flights = [*flights, {more}]",
        f"            yield {_owner(plan, ring, 'step')}tiles",
        f"            {landed}",
        *last,
        f"    {_IN_FLIGHT}",
        "        for works, _ in flights:",
        "            _wait(works)",
        _last(plan, ring),
    ]


def _both_ways(plan: Plan, ring: Ring) -> list[str]:
    owner = with_owner(plan)

    def pair(place: str, tiles: str) -> str:
        return f"({place}, {tiles})" if owner else tiles

    before, after = "(me - step - 1) % size", "(me + step + 1) % size"
    sides = pair(before, "arriving[0]"), pair(after, "arriving[1]")
    both = "spare[2 * step % 4], spare[(2 * step + 1) % 4]"
    if ring.uneven:
        into = [f"spare[{i}]" for i in ("2 * step % 4", "(2 * step + 1) % 4")]
        owners = zip(into, (before, after), strict=True)
        both = ", ".join(_arriving(ring, each, "", owner) for each, owner in owners)
    elif ring.cut:
        both = f"[tuple(_front(x, forth[0].shape[1]) for x in each) for each in ({both})]"
    lines = [
        "    forth, back = tiles, tiles",
        f"    here = [{pair('me', 'tiles')}]",
        "    for step in range((size - 1) // 2):",
        f"        arriving = {both}",
        "        works = _shift_both(forth, back, *arriving, group)",
        "        try:",
        "            yield from here",
        f"        {_IN_FLIGHT}",
        "            _wait(works)",
        "        forth, back = arriving",
        f"        here = [{', '.join(sides)}]",
    ]
    if ring.both == "odd":
        return [*lines, "    yield from here"]
    opposite = "(me + size // 2) % size"
    return [
        *lines,
        f"    arriving = {_arriving(ring, 'spare[(size - 2) % 4]', 'forth', opposite)}",
        f"    works = {_shift(plan, ring, 'forth')}",
        "    try:",
        "        yield from here",
        f"    {_IN_FLIGHT}",
        "        _wait(works)",
        f"    yield {f'{opposite}, ' if owner else ''}arriving",
    ]
