"""What only holds of all directives together: every tensor's story along every dimension."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage, Tensor


class Fault:
    """A refusal, the word of the directive that it is about (None: the mesh), and its rival.

    Attributes:
        refusal: what is wrong.
        word, mention: the last line with this word, if possible with what it names.
        rival: likewise the line that conflicts with it.
    """

    def __init__(
        self,
        refusal: Refusal,
        word: str | None,
        mention: str = "",
        rival: tuple[str, str] | None = None,
    ) -> None:
        self.refusal, self.word, self.mention, self.rival = refusal, word, mention, rival


def fault_of_stories(program: Program) -> Fault | None:
    """The first thing that is wrong with how tensors come to the ranks, or go."""
    moved = (*program.read, *program.outputs)
    for index, (dim, axis) in enumerate(zip(program.mesh.names, program.parallel, strict=True)):
        if axis is None:
            return Fault(_unused(program, dim), None)
        for tensor in moved:
            if not _told(program, tensor, index, axis):
                found = _story(program, tensor, dim, axis)
                if found:
                    return found
    if not program.stages and not program.tiles:
        return None
    return next(
        (
            fault
            for check in (_walks, _skewed, _outputs, _loops, _unread)
            for fault in check(program)
        ),
        None,
    )


def _told(program: Program, tensor: Tensor, index: int, axis: str) -> bool:
    """Whether a tensor has its one story along a dimension, at a glance."""
    where = tensor.name, program.mesh.names[index]
    stage, whole = program.moves.get(where), where in program.replicated
    if axis in tensor.axes:
        return stage is None and not whole
    if stage is None or whole:
        return False
    return tensor.pin[index] in (None, stage.axis)


def _unused(program: Program, dim: str) -> Refusal:
    axes = ", ".join(program.loops)
    return Refusal(
        "dimension-unused",
        lambda: (
            f"the mesh dimension {dim}={program.mesh.extent(dim)} splits nothing",
            f"write `parallelize AXIS over {dim}`; axes: {axes}",
        ),
    )


def _unread(program: Program) -> Iterator[Fault]:
    """A directive about an input that the body does not read: it could not do anything."""
    for stage in program.stages:
        for name in stage.tensors:
            if program.tensor(name).role != "output" and name not in program.body:
                explain = (
                    f"the body does not read {name}: it need not move",
                    f"leave {name} out; what is made of it may",
                )
                word = _word(stage)
                yield Fault(Refusal("not-read", lambda e=explain: e), word, name)


def _word(stage: Stage) -> str:
    return "shift" if stage.kind == "walk" else "shard"


def _story(program: Program, tensor: Tensor, dim: str, axis: str) -> Fault | None:
    stages = [s for s in program.stages if s.dim == dim and tensor.name in s.tensors]
    whole = (tensor.name, dim) in program.replicated
    word = "replicate" if whole else _word(stages[0]) if stages else "parallelize"
    if tensor.carries(axis):
        if not stages and not whole:
            return None
        explain = (
            f"{tensor.name} carries {axis}, which {dim} splits: each rank has its own part",
            f"drop {tensor.name} along {dim} from the `{word}`",
        )
        rival = ("parallelize", dim)
        return Fault(Refusal("already-local", lambda: explain), word, dim, rival)
    if stages and whole:
        explain = (
            f"{tensor.name} is both replicated over {dim} and moved along it",
            "each tensor has one story per dimension: keep one of the two lines",
        )
        return Fault(
            Refusal("two-stories", lambda: explain), "replicate", dim, (_word(stages[0]), dim)
        )
    pinned = program.pinned(tensor, dim)
    if whole and pinned is not None:
        return _replicate_of_split(program, tensor, dim, pinned)
    if stages and pinned not in (None, stages[0].axis):
        axis_moved = stages[0].axis
        explain = (
            f"{tensor.name} cannot move along {axis_moved} over {dim}: "
            f"its ranks hold slices of {pinned} there",
            f"write `{word} {', '.join(stages[0].tensors)}: {pinned} …`",
        )
        return Fault(Refusal("not-its-pin", lambda: explain), word, dim, ("pin", tensor.name))
    if not stages and not whole:
        return _no_story(program, tensor, dim, axis)
    return None


def _replicate_of_split(program: Program, tensor: Tensor, dim: str, pinned: str) -> Fault:
    if tensor.role == "output":
        explain = (
            f"{tensor.name} is wanted in slices of {pinned} over {dim}: all of it on every rank "
            "would be cut at once",
            f"write `shard {tensor.name}: {pinned} over {dim}`",
        )
        slug = "reduce-then-slice"
    else:
        explain = (
            f"{tensor.name} is pinned {pinned} over {dim}: nobody gives a rank all of it",
            f"write `shard {tensor.name}: {pinned} over {dim}`",
        )
        slug = "replicate-needs-pin"
    return Fault(Refusal(slug, lambda: explain), "replicate", dim, ("pin", tensor.name))


def _no_story(program: Program, tensor: Tensor, dim: str, axis: str) -> Fault:
    group = next((g for g in program.together if tensor.name in g), (tensor.name,))
    names = ", ".join(group)
    along = program.sequence(tensor) or program.pinned(tensor, dim) or tensor.axes[0]
    if tensor.role == "output":
        explain = (
            f"{tensor.name} does not carry {axis}: every rank along {dim} has partial results",
            f"write `shard {names}: {along} over {dim}`, `shift {names}: {along} along {dim}` "
            f"or `replicate {names} over {dim}`",
        )
    else:
        explain = (
            f"{tensor.name} does not carry {axis}: how does it come to the ranks along {dim}?",
            f"write `shift {names}: {along} along {dim}` or `shard {names}: {along} over {dim}`",
        )
    return Fault(Refusal("no-story", lambda: explain), "parallelize", dim)


# --- several walks ------------------------------------------------------------------------------


def _input_walks(program: Program) -> list[Stage]:
    outputs = program.output_names
    return [s for s in program.stages if s.kind == "walk" and s.tensors[0] not in outputs]


def _output_walks(program: Program) -> list[Stage]:
    outputs = program.output_names
    return [s for s in program.stages if s.kind == "walk" and s.tensors[0] in outputs]


def _walks(program: Program) -> Iterator[Fault]:
    """Walks that do not go together: one axis twice, or one dimension in two ways."""
    walks = _input_walks(program)
    for index, one in enumerate(walks):
        for other in walks[:index]:
            if one.dim == other.dim and (one.axis, one.options) != (other.axis, other.options):
                explain = (
                    f"{', '.join(other.tensors)} and {', '.join(one.tensors)} come along "
                    f"{one.dim} in two ways",
                    "what is shifted along one dimension is at the same tile at a step: use one "
                    "axis and the same options",
                )
                yield _pair(Refusal("shifts-disagree", lambda e=explain: e), one, other)
            skewed = "skewed" in one.options and "skewed" in other.options
            if one.dim != other.dim and one.axis == other.axis and not skewed:
                if set(one.tensors) != set(other.tensors):
                    explain = (
                        f"{one.axis} comes by along {other.dim} for {', '.join(other.tensors)} "
                        f"and along {one.dim} for {', '.join(one.tensors)}: no rank has the same "
                        "tile of both",
                        "write `skewed` behind both, or gather one of them (`shard`)",
                    )
                    yield _pair(Refusal("two-shifts-one-axis", lambda e=explain: e), one, other)
    yield from _interleaved(program)


def _pair(refusal: Refusal, one: Stage, other: Stage) -> Fault:
    return Fault(refusal, _word(one), one.dim, (_word(other), other.dim))


def _interleaved(program: Program) -> Iterator[Fault]:
    """A tensor's stages with another's walk between them; a gather inside a trimmed walk."""
    outputs = program.output_names
    stages = [s for s in program.stages if s.tensors[0] not in outputs]
    for index, stage in enumerate(stages):
        walks = [s for s in stages[:index] if s.kind == "walk"]
        mine = [s for s in stages[:index] if s.tensors == stage.tensors]
        after = any(s.kind == "walk" for s in mine) and walks[-1].tensors != stage.tensors
        if after and walks[-1].dim != stage.dim:
            explain = (
                f"{', '.join(stage.tensors)} go on along {stage.dim} inside the walk of "
                f"{', '.join(walks[-1].tensors)}",
                "write all lines of a tensor next to each other",
            )
            yield _pair(Refusal("walks-interleave", lambda e=explain: e), stage, walks[-1])
        trimmed = [s for s in mine if "direct" in s.options]
        if trimmed and stage.kind == "gather" and program.mask != "full":
            explain = (
                f"{', '.join(stage.tensors)} come along {trimmed[-1].dim} directly, each rank "
                f"what it reads: they cannot be gathered over {stage.dim} after that",
                "gather first, or walk without `direct`",
            )
            yield _pair(Refusal("gather-of-trimmed", lambda e=explain: e), stage, trimmed[-1])


def _skewed(program: Program) -> Iterator[Fault]:
    """Skewed shifts come in pairs, of one axis, along two dimensions of one size."""
    skewed = [s for s in program.stages if "skewed" in s.options]
    if not skewed:
        return
    if len(skewed) != 2:
        explain = (
            f"{len(skewed)} skewed shift{'s' if len(skewed) > 1 else ''}",
            "exactly two shifts of one axis along two dimensions of equal size are skewed",
        )
        first, last = skewed[0], skewed[-1]
        yield _pair(Refusal("skewed-pair", lambda: explain), last, first)
        return
    one, other = skewed
    sizes = [program.mesh.extent(s.dim) for s in skewed]
    outputs = {t.name for t in program.outputs}
    if one.axis != other.axis or one.dim == other.dim or sizes[0] != sizes[1]:
        explain = (
            f"the skewed shifts are of {one.axis} along {one.dim}={sizes[0]} and of {other.axis} "
            f"along {other.dim}={sizes[1]}",
            "both must be of one axis, along two dimensions of equal size",
        )
        yield _pair(Refusal("skewed-pair", lambda: explain), other, one)
    elif set(one.tensors) & set(other.tensors) or {*one.tensors, *other.tensors} & outputs:
        explain = ("skewed shifts are of different inputs", "one operand along each dimension")
        yield _pair(Refusal("skewed-pair", lambda: explain), other, one)
    elif len(_input_walks(program)) > 2 or one.axis in program.mask_axes:
        explain = (
            "skewed shifts stand alone, and not along a sequence with a mask",
            "leave out the other shifts",
        )
        yield _pair(Refusal("skewed-pair", lambda: explain), other, one)


def _outputs(program: Program) -> Iterator[Fault]:
    """Results that go home: along the axis of the tiles that come by, and not both ways."""
    homes = _output_walks(program)
    walks = _input_walks(program) if homes else []
    for index, stage in enumerate(homes):
        for with_it in (s for s in walks if s.dim == stage.dim):
            if with_it.axis != stage.axis:
                explain = (
                    f"{', '.join(stage.tensors)} go home by {stage.axis} along {stage.dim}, but "
                    f"{', '.join(with_it.tensors)} come by by {with_it.axis}",
                    f"shift both along {with_it.axis}, or gather one of them",
                )
                yield _pair(Refusal("shifts-disagree", lambda e=explain: e), stage, with_it)
            if {"both", "skewed"} & set(with_it.options) or any(
                o == "prefetch 0" for o in with_it.options
            ):
                explain = (
                    f"results cannot follow {', '.join(with_it.tensors)} along {stage.dim} "
                    f"({', '.join(with_it.options)})",
                    "leave the option out",
                )
                yield _pair(Refusal("options-clash", lambda e=explain: e), stage, with_it)
            yield from _trimmed_home(program, with_it, walks)
        if all(s.dim != stage.dim for s in walks):
            for other in (s for s in walks if s.axis == stage.axis):
                explain = (
                    f"{', '.join(stage.tensors)} go home by {stage.axis} along {stage.dim}, but "
                    f"its tiles come by along {other.dim}",
                    f"shift {', '.join(other.tensors)} along {stage.dim} too, or gather them",
                )
                yield _pair(Refusal("two-shifts-one-axis", lambda e=explain: e), stage, other)
        for other in homes[:index]:
            if other.dim == stage.dim and (other.axis, other.options) != (
                stage.axis,
                stage.options,
            ):
                explain = (
                    f"results go home along {stage.dim} in two ways",
                    "use one axis and the same options",
                )
                yield _pair(Refusal("shifts-disagree", lambda e=explain: e), stage, other)


def _trimmed_home(program: Program, walk: Stage, walks: list[Stage]) -> Iterator[Fault]:
    """Results that follow a trimmed walk, with another walk around it or inside."""
    other = next((s for s in walks if s.dim != walk.dim), None)
    if "direct" in walk.options and program.mask != "full" and other is not None:
        explain = (
            f"{', '.join(walk.tensors)} come along {walk.dim} directly, each rank what it reads, "
            f"and results follow, while {', '.join(other.tensors)} come along {other.dim}",
            f"leave `direct` out along {walk.dim}",
        )
        yield _pair(Refusal("home-of-trimmed", lambda: explain), walk, other)


# --- tile loops -----------------------------------------------------------------------------------


def _loops(program: Program) -> Iterator[Fault]:
    """Tile loops: parts that divide, transfers that are not repeated, results that are complete."""
    inner: list[str] = []
    for loop in program.tiles:
        for axis in loop.axes:
            yield from _tiled_stages(program, axis, loop)
            carried = [t for t in program.outputs if t.carries(axis)]
            yield from _partly_complete(program, axis, carried)
            if carried and inner:
                explain = (
                    f"{', '.join(t.name for t in carried)} would be complete only after the loop "
                    f"over {inner[-1]}, which is outside that over {axis}",
                    f"`reorder`: {axis} outside {inner[-1]}",
                )
                yield Fault(
                    Refusal("reorder-breaks", lambda e=explain: e),
                    "tile",
                    axis,
                    ("tile", inner[-1]),
                )
        inner += [axis for axis in loop.axes if not all(t.carries(axis) for t in program.outputs)]


def _partly_complete(program: Program, axis: str, carried: list[Tensor]) -> Iterator[Fault]:
    """An axis of some outputs only: these are complete after each part, the others at the end."""
    others = [t.name for t in program.outputs if t not in carried]
    if carried and others:
        explain = (
            f"after a part of {axis} {carried[0].name} is complete, but {', '.join(others)} not",
            "tile an axis that all outputs carry, or none",
        )
        yield Fault(Refusal("tile-of-some", lambda: explain), "tile", axis)


def _tiled_stages(program: Program, axis: str, loop) -> Iterator[Fault]:
    """What moves inside a tile loop must be cut by it."""
    for stage in program.stages:
        cut = program.tensor(stage.tensors[0]).carries(axis)
        if stage.kind == "walk" and (not cut or stage.axis == axis):
            explain = (
                f"{', '.join(stage.tensors)} come by along {stage.dim} for every part of {axis}, "
                "whole",
                f"tile an axis that {', '.join(stage.tensors)} carry, other than {stage.axis}",
            )
            yield Fault(
                Refusal("tile-repeats-shift", lambda e=explain: e),
                "tile",
                axis,
                ("shift", stage.dim),
            )
        if (
            stage.kind == "gather"
            and stage.axis == axis
            and loop.parts % program.mesh.extent(stage.dim)
        ):
            size = program.mesh.extent(stage.dim)
            explain = (
                f"{loop.parts} parts of {axis} do not come from {size} ranks along {stage.dim}",
                f"a multiple of {size} parts",
            )
            yield Fault(
                Refusal("tile-parts", lambda e=explain: e), "tile", axis, ("shard", stage.dim)
            )
        if stage.kind == "scatter" and stage.axis == axis:
            explain = (
                f"{', '.join(stage.tensors)} are scattered along {axis}, which is looped over",
                "tile another axis",
            )
            yield Fault(
                Refusal("tile-of-scattered", lambda e=explain: e),
                "tile",
                axis,
                ("shard", stage.dim),
            )
