"""Emitted text of partial results: what the ranks' keys give for queries, and its way home.

A nest of several loops prints as functions that call each other: `_attend`, one for every loop
inside it, and `_partial` for what is inside all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mercurygen.emit.border import runs_argument
from mercurygen.emit.templates import render
from mercurygen.emit.words import letters, variable
from mercurygen.lower.plan import Gather, Loop, Plan, Reduce

PAIR = "tuple[Tensor, Tensor]"
SHAPES = (
    '    """q [B, s, h, D], k [B, s, k, D], v [B, s, k, E] -> out [B, s, h, E], lse [B, h, s]"""'
)


def partial(plan: Plan) -> bool:
    """Whether ranks have results for others' queries."""
    return bool(plan.nest.reduces) or any(loop.outputs for loop in plan.nest.loops)


def blind_rows(plan: Plan) -> bool:
    """Whether partial results have rows that see no key of theirs."""
    return partial(plan) and plan.program.mask != "full" and plan.nest.begin != "only"


def merged(plan: Plan) -> bool:
    """Whether partial results are merged here, not by a sum over the ranks."""
    return any(r.axis for r in plan.nest.reduces) or any(x.outputs for x in plan.nest.loops)


@dataclass(frozen=True)
class Level:
    """One function of the nest.

    Attributes:
        gathers: loops whose tensors are gathered first.
        loop: whose tiles come by; None: of the innermost, which may have none.
        last: whether the body runs inside it.
    """

    gathers: tuple[Loop, ...]
    loop: Loop | None
    last: bool

    @property
    def home(self) -> str | None:
        """How the results of the loop go to the owners of its tiles, if they do."""
        return self.loop.home if self.loop else None


def levels(plan: Plan) -> tuple[Level, ...]:
    """The functions of the nest, outermost first."""
    found: list[Level] = []
    gathers: tuple[Loop, ...] = ()
    for loop in plan.nest.loops:
        if not loop.walks:
            gathers = (*gathers, loop)
            continue
        found.append(Level(gathers, loop, False))
        gathers = ()
    last = found[-1] if found else None
    if last is None or last.home:
        return (*found, Level(gathers, None, True))
    return (*found[:-1], Level(last.gathers, last.loop, True))


def not_emitted(plan: Plan) -> str | None:
    """What of a plan with partial results has no text yet."""
    if not partial(plan):
        return "several loops" if len(plan.nest.loops) > 1 else None
    for loop in plan.nest.loops:
        if len(loop.walks) > 1 or loop.partner:
            return "partial results of rings inside rings"
        if not loop.tensors and not _cut_evenly(plan, loop):
            return "results that go home from tokens in this order"
    if plan.nest.begin == "first" and plan.program.mask != "full":
        return "partial results that begin with a block that the mask cuts"
    return None


def _cut_evenly(plan: Plan, loop: Loop) -> bool:
    """Whether each owner's queries are one of equal runs of those that are here."""
    dim = loop.walks[-1].dim
    order, mesh = plan.program.order, plan.program.mesh
    return order.kind == "contiguous" and (
        order.dims[0] == dim
        or all(mesh.extent(d) == 1 for d in order.dims[: order.dims.index(dim)])
    )


class Names:
    """How the functions of a plan's nest are called, and what they are given."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program = plan, plan.program
        self.letters = letters(plan.program.mesh.dims)
        self.levels = levels(plan)
        self.causal = plan.program.mask != "full"
        self.raw = plan.nest.begin == "only"  # results are as the kernel leaves them
        self.trimmed = self.raw and self.causal

    def function(self, index: int) -> str:
        """The name of a level's function."""
        if index == 0 and not self.plan.nest.reduces:
            return "_attend"
        level = self.levels[index]
        return "_partial" if level.last else f"_attend_along_{level.loop.walks[-1].dim}"

    def is_block(self, index: int) -> bool:
        """Whether a level is nothing but one call of the kernel."""
        level = self.levels[index]
        return self.raw and not self.causal and not level.loop and not level.gathers

    def places(self, index: int) -> list[str]:
        """Dimensions whose owner the loops around a level have fixed."""
        if not self.causal:
            return []
        return [level.loop.walks[-1].dim for level in self.levels[:index]]

    def groups(self, index: int) -> list[str]:
        """Dimensions whose communicator a level or what is inside it needs."""
        used = set(self.own_places()) if self.causal else set()
        for level in self.levels[index:]:
            loops = (*level.gathers, *([level.loop] if level.loop else []))
            used |= {stage.dim for loop in loops for stage in loop.stages}
        return [dim for dim in self.program.mesh.names if dim in used]

    def own_places(self) -> list[str]:
        """Dimensions along which a rank's own place says what it works on."""
        rows, cols = self.program.mask_axes
        own = []
        for dim in self.program.order.dims:
            axis = self.program.parallel_axis(dim)
            if axis in (rows, cols) and not (axis == rows and self.walked(rows, dim)):
                if axis == rows or not self.walked(cols, dim):
                    own.append(dim)
        return own

    def walked(self, axis: str, dim: str) -> bool:
        """Whether tiles along an axis come by, or go home, along a dimension."""
        return any(
            loop.axis == axis and any(walk.dim == dim for walk in loop.walks)
            for loop in self.plan.nest.loops
        )

    def chunks(self, axis: str, **other: str) -> str:
        """The chunks of a tile's tokens along an axis of the mask, as the text has them."""
        held = []
        for dim in self.program.order.dims:
            if dim in other:
                held.append(f"[{other[dim]}]")
            elif self.walked(axis, dim):
                held.append(f"[{self.letters[dim]}]")
            elif self.program.parallel_axis(dim) == axis:
                held.append(f"[{variable(dim)}.rank()]")
            else:
                held.append(f'range(MESH["{dim}"])')
        return f"_chunks({', '.join(held)})"

    def call(self, index: int, q: str = "q", k: str = "k", v: str = "v") -> str:
        """A call of a level, on these tensors."""
        if self.is_block(index):
            return f"_block_forward({q}, {k}, {v}, scale, causal=False)"
        places = [self.letters[dim] for dim in self.places(index)]
        groups = [variable(dim) for dim in self.groups(index)]
        return f"{self.function(index)}({', '.join([q, k, v, *places, *groups, 'scale'])})"

    def signature(self, name: str, places: list[str], groups: list[str], result: str) -> str:
        """The first line of a function."""
        given = [f"{self.letters[dim]}: int" for dim in places]
        given += [f"{variable(dim)}: dist.ProcessGroup" for dim in groups]
        more = "".join(f", {each}" for each in given)
        return f"def {name}(q: Tensor, k: Tensor, v: Tensor{more}, scale: float) -> {result}:"


def heading(plan: Plan) -> str:
    """What moves, in a few words."""
    words = []
    for loop in plan.nest.loops:
        names = " and ".join(loop.tensors)
        if loop.tensors:
            how = "come by" if len(loop.tensors) > 1 else "comes by"
            words.append(f"{names} {how}" if loop.walks else f"{names} gathered")
        if loop.outputs:
            words.append("results go home")
    words += ["results are merged"] * bool(plan.nest.reduces)
    return ", ".join(dict.fromkeys(words))


def group_dims(plan: Plan) -> list[str]:
    """Dimensions whose communicator `_attend` is given."""
    names = Names(plan)
    dims = {*names.groups(0), *(reduce.dim for reduce in plan.nest.reduces)}
    return [dim for dim in plan.program.mesh.names if dim in dims]


def functions(plan: Plan) -> list[str]:
    """`_attend` and what is inside it, callers first; not what brings tiles."""
    names = Names(plan)
    texts = [_reducing(names)] if plan.nest.reduces else []
    for index in range(len(names.levels)):
        if not names.is_block(index):
            texts.append(_function(names, index))
    return [*texts, *_ways_home(names), *_reductions(plan)]


def _reducing(names: Names) -> str:
    """`_attend` around the reductions."""
    plan = names.plan
    lines = [
        names.signature("_attend", [], group_dims(plan), PAIR),
        SHAPES,
        f"    out, lse = {names.call(0)}",
    ]
    if names.raw:
        lines.append("    out = out.to(lse.dtype)")
    for reduce in plan.nest.reduces:
        group = variable(reduce.dim)
        if reduce.axis is None:
            lines.append(f"    _all_reduce(out, lse, {group})")
        else:
            lines.append(f"    out, lse = _reduce_scatter(out, lse, {group}{_outer(plan, reduce)})")
    return "\n".join([*lines, "    return out.to(q.dtype), lse"])


def _function(names: Names, index: int) -> str:
    """One level."""
    level, first = names.levels[index], index == 0
    whole = first and not names.plan.nest.reduces  # this is `_attend`
    result = "list[Tensor]" if names.trimmed and level.last else PAIR
    lines = [
        names.signature(names.function(index), names.places(index), names.groups(index), result),
        *_doc(names, index, whole),
    ]
    dense = _dense_first(names, index)
    if dense:
        plain = ", ".join(dense)
        lines.append(f"    {plain} = {', '.join(f'{x}.contiguous()' for x in dense)}")
    for loop in level.gathers:
        gathered = _tiles(names, loop, index, loop.stages)
        target = ", ".join(loop.tensors) if len(loop.tensors) > 1 else f"({loop.tensors[0]},)"
        lines.append(f"    {target} = {gathered}")
    if level.last:
        return "\n".join([*lines, *_body(names, index)])
    if not level.home:
        end = ["    return out.to(q.dtype), lse" if whole else "    return out, lse"]
        return "\n".join([*lines, *_ring(names, index), *end])
    shares, home = _home(names, index)
    if not whole:
        return "\n".join([*lines, shares, f"    return {home}"])
    end = [f"    out, lse = {home}", "    return out.to(q.dtype), lse"]
    return "\n".join([*lines, shares, *end])


def _doc(names: Names, index: int, whole: bool) -> list[str]:
    """What a level does."""
    level = names.levels[index]
    if whole:
        return [SHAPES]
    if not level.last:
        dim = level.loop.walks[-1].dim
        return [
            f'    """Out and lse of our queries over the keys that all ranks along {dim} have here."""'
        ]
    if names.trimmed:
        return [
            '    """Out and lse of the rows of q that see some of the keys: [] if there are none."""'
        ]
    if names.raw:
        return ['    """Out and lse of q over our keys, as the kernel leaves them."""']
    keys = "all keys that come by" if level.loop else "the keys k"
    none = "; 0 and -inf of rows that see none" if names.causal else ""
    return [f'    """Out and lse of q over {keys}{none}."""']


def _dense_first(names: Names, index: int) -> list[str]:
    """Tensors that functions inside the outermost send: made contiguous once."""
    if index or names.levels[0].last:
        return []
    inner = [t for level in names.levels[1:] for t in _moved(level)]
    outer = _moved(names.levels[0])
    return [x for x in dict.fromkeys(inner) if x not in outer and not _packed(names.plan, x)]


def _moved(level: Level) -> list[str]:
    loops = (*level.gathers, *([level.loop] if level.loop else []))
    return [name for loop in loops for name in loop.tensors]


def _packed(plan: Plan, name: str) -> bool:
    """Whether the border leaves a tensor contiguous."""
    return any(name in swap.tensors for swap in plan.before)


def _tiles(names: Names, loop: Loop, index: int, stages: tuple) -> str:
    """What a loop starts from, gathered over some stages."""
    own = [
        f"{x}.contiguous()" if index == 0 and not _packed(names.plan, x) else x
        for x in loop.tensors
    ]
    tiles = f"({own[0]},)" if len(own) == 1 else f"({', '.join(own)})"
    for stage in stages:
        if isinstance(stage, Gather):
            group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
            tiles = f"_gather({tiles}, {group})"
    return tiles


def _walk(names: Names, index: int) -> str:
    """The tiles of a level, one after the other."""
    loop = names.levels[index].loop
    walk = loop.walks[-1]
    if not loop.tensors:
        return f"_by_owner(q, {variable(walk.dim)})"
    call = f"_walk_ring({_tiles(names, loop, index, loop.leading)}, {variable(walk.dim)})"
    for stage in loop.walking[1:]:
        group = f"{variable(stage.dim)}{runs_argument(names.plan, stage.join)}"
        call = f"_gather_ahead({call}, {group})"
    return call


def _home(names: Names, index: int) -> tuple[str, str]:
    """A loop whose results go to the owners of its tiles: a line, and what it comes to."""
    loop, plan = names.levels[index].loop, names.plan
    dim = loop.walks[-1].dim
    owner, tile = names.letters[dim], "(queries,)" if loop.tensors else "queries"
    inner = names.call(index + 1, q="queries")
    share = f"({owner}, {inner})" if loop.home == "direct" else inner
    target = f"{owner}, {tile}" if with_owner(plan) else tile
    way = "_to_owners" if loop.home == "direct" else "_carry"
    line = f"    shares = ({share} for {target} in {_walk(names, index)})"
    return line, f"{way}(shares, {variable(dim)})"


def with_owner(plan: Plan) -> bool:
    """Whether a walk says whose tile it yields."""
    return plan.program.mask != "full" or any(x.home == "direct" for x in plan.nest.loops)


def _ring(names: Names, index: int) -> list[str]:
    """A loop around others whose results go home."""
    owner = names.letters[names.levels[index].loop.walks[-1].dim]
    tile = f"{owner}, (keys, values)" if with_owner(names.plan) else "keys, values"
    inner = names.call(index + 1, k="keys", v="values")
    return [
        f"    tiles = {_walk(names, index)}",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {inner}",
        f"    for {tile} in tiles:",
        f"        _merge(out, lse, *{inner})",
    ]


def _body(names: Names, index: int) -> list[str]:
    """The body on what the mask leaves of tiles."""
    level = names.levels[index]
    if names.raw and not names.causal:
        return ["    return _block_forward(q, k, v, scale, causal=False)"]
    if names.plan.nest.begin == "first":
        return _first(names, index)
    rows, cols = (names.chunks(axis) for axis in names.program.mask_axes)
    block = "_block_forward(q[:, rows], {k}[:, cols], {v}[:, cols], scale, causal)"
    if names.trimmed:
        return [
            f"    theirs, mine = {rows}, {cols}",
            "    blocks = _visible(theirs, mine, q.shape[1] // len(theirs))  # one at most",
            f"    return [x for rows, cols, causal in blocks for x in {block.format(k='k', v='v')}]",
        ]
    lines = [
        "    dtype = torch.promote_types(q.dtype, torch.float32)",
        "    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)",
        "    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)",
    ]
    k, v = ("keys", "values") if level.loop else ("k", "v")
    pad = "        " if level.loop else "    "
    if not names.causal:
        owner = f"{names.letters[level.loop.walks[-1].dim]}, " if with_owner(names.plan) else ""
        tile = f"_, ({k}, {v})" if owner else f"{k}, {v}"
        lines.append(f"    for {tile} in {_walk(names, index)}:")
        whole = f"_merge(out, lse, *_block_forward(q, {k}, {v}, scale, causal=False))"
        return [*lines, f"        {whole}", "    return out, lse"]
    lines += [f"    mine = {rows}", "    size = q.shape[1] // len(mine)"]
    if level.loop:
        owner = names.letters[level.loop.walks[-1].dim]
        lines.append(f"    for {owner}, ({k}, {v}) in {_walk(names, index)}:")
    return [
        *lines,
        f"{pad}for rows, cols, causal in _visible(mine, {cols}, size):",
        f"{pad}    _merge(out[:, rows], lse[:, :, rows], *{block.format(k=k, v=v)})",
        "    return out, lse",
    ]


def _first(names: Names, index: int) -> list[str]:
    """The body on tiles of which the first is one block: the others are merged into its result."""
    tile = "_, (keys, values)" if with_owner(names.plan) else "keys, values"
    block = "_block_forward(q, keys, values, scale, causal=False)"
    return [
        f"    tiles = {_walk(names, index)}",
        f"    {tile} = next(tiles)  # our own",
        f"    out, lse = {block}",
        "    out = out.to(lse.dtype)",
        f"    for {tile} in tiles:",
        f"        _merge(out, lse, *{block})",
        "    return out, lse",
    ]


# --- ways home and reductions ---------------------------------------------------------------


def _ways_home(names: Names) -> list[str]:
    """Functions that bring results to the owners of their queries."""
    plan = names.plan
    loops = [loop for loop in plan.nest.loops if loop.outputs]
    texts = []
    if any(not loop.tensors for loop in loops):
        relayed = any(loop.home == "relayed" for loop in loops if not loop.tensors)
        owner = with_owner(plan)
        texts.append(
            render(
                "by_owner",
                relayed=relayed,
                owner=owner,
                yields="tuple[int, Tensor]" if owner else "Tensor",
                what="(owner, queries)" if owner else "the queries",
            )
        )
    shares = "list[Tensor]" if names.trimmed else PAIR
    for home in dict.fromkeys(loop.home for loop in loops):
        if home == "direct":
            texts.append(_to_owners(names, shares))
        else:
            alone = any(not loop.tensors for loop in loops if loop.home == "relayed")
            texts.append(render("carry", alone=alone, raw=names.raw))
    if names.raw and loops:
        dense = "list[Tensor]" if names.trimmed else "tuple[Tensor, ...]"
        values = {"share_type": shares, "dense_type": dense, "trimmed": names.trimmed}
        texts.append(render("dense", **values))
    return texts


def _to_owners(names: Names, shares: str) -> str:
    loop = next(loop for loop in names.plan.nest.loops if loop.home == "direct")
    dim = loop.walks[-1].dim
    rows, cols = names.program.mask_axes
    part = "tuple[Tensor, ...]"
    return render(
        "to_owners",
        trimmed=names.trimmed,
        raw=names.raw,
        share_type=shares,
        arriving_type=f"tuple[slice, {part}]" if names.trimmed else part,
        sends_type=shares if names.trimmed else part,
        recvs_type="Iterable[Tensor]" if names.trimmed else part,
        mine=names.chunks(rows, **{dim: "me"}).removeprefix("_chunks(").removesuffix(")"),
        theirs=names.chunks(cols, **{dim: "peer"}).removeprefix("_chunks(").removesuffix(")"),
    )


def _reductions(plan: Plan) -> list[str]:
    """Functions that merge what all ranks of a dimension have."""
    texts, outer = [], reduce_outer(plan)
    kinds = dict.fromkeys(reduce.axis is None for reduce in plan.nest.reduces)
    for everywhere in kinds:
        if everywhere:
            texts.append(render("all_reduce", causal=plan.program.mask != "full"))
            continue
        texts.append(
            render(
                "scatter",
                zigzag=plan.program.order.halves == 2,
                runs=outer,
                parameter=", outer: int" if outer else "",
                argument=", outer" if outer else "",
            )
        )
        if not plan.before:  # else the border has it
            texts.append(render("all_to_all"))
    return texts


def reduce_outer(plan: Plan) -> bool:
    """Whether a reduction deals tokens of slower dimensions that are here."""
    return any(reduce.join and reduce.join.outer > 1 for reduce in plan.nest.reduces)


def _outer(plan: Plan, reduce: Reduce) -> str:
    return f", {reduce.join.outer}" if reduce_outer(plan) else ""
