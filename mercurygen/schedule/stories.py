"""What only holds of all directives together: every tensor's story along every dimension."""

from __future__ import annotations

from collections.abc import Iterator

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage, Tensor
from mercurygen.schedule.fault import Fault, word_of
from mercurygen.schedule.tile_loops import faults_of_loops


def fault_of_stories(program: Program) -> Fault | None:
    """The first thing that is wrong with how tensors come to the ranks, or go."""
    routes = program.routes
    if program.replicated or not routes.told:
        fault = _fault_of_routes(program)
        if fault:
            return fault
        routes.told = not program.replicated
    if not program.stages and not program.tiles:
        return None
    coming, unread = _faults_of_coming(program)
    if coming:
        return coming
    checks = (_skewed, _outputs, faults_of_loops)
    return next((fault for check in checks for fault in check(program)), unread)


def _faults_of_coming(program: Program) -> tuple[Fault | None, Fault | None]:
    """What is wrong with the walks of the inputs, and with what is moved for nothing.

    It depends on the stages of the inputs alone; in many schedules only results go otherwise.
    """
    outputs = program.output_names
    key = "coming", tuple([s for s in program.stages if s.tensors[0] not in outputs])
    found = program.shared.get(key)
    if found is None:
        found = next(_walks(program), None), next(_unread(program), None)
        program.shared[key] = found
    return found


def _fault_of_routes(program: Program) -> Fault | None:
    """A dimension or a tensor without its one story, in whatever way it moves."""
    moved = (*program.read, *program.outputs)
    for index, (dim, axis) in enumerate(zip(program.mesh.names, program.parallel, strict=True)):
        if axis is None:
            return Fault(_unused(program, dim))
        for tensor in moved:
            if not _told(program, tensor, index, axis):
                found = _story(program, tensor, dim, axis)
                if found:
                    return found
    return None


def _told(program: Program, tensor: Tensor, index: int, axis: str) -> bool:
    """Whether a tensor has its one story along a dimension, at a glance."""
    where = tensor.name, program.mesh.names[index]
    along, whole = program.routes.axes.get(where), where in program.replicated
    if axis in tensor.axes:
        return along is None and not whole
    if along is None or whole:
        return False
    return tensor.pin[index] in (None, along)


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
                    f"{program.operator} does not read {name} where it works on tiles: it need "
                    "not move",
                    f"leave `{name}` out; move what is made of it instead",
                )
                place = (word_of(stage), name, stage.dim)
                yield Fault(Refusal("not-read", lambda e=explain: e), place)


def _story(program: Program, tensor: Tensor, dim: str, axis: str) -> Fault | None:
    stages = [s for s in program.stages if s.dim == dim and tensor.name in s.tensors]
    whole = (tensor.name, dim) in program.replicated
    word = "replicate" if whole else word_of(stages[0]) if stages else "parallelize"
    if tensor.carries(axis):
        if not stages and not whole:
            return None
        explain = (
            f"{tensor.name} carries {axis}, which {dim} splits: each rank has its own part",
            f"leave {tensor.name} along {dim} out of the `{word}`",
        )
        place, rival = (word, tensor.name, dim), ("parallelize", axis, dim)
        return Fault(Refusal("already-local", lambda: explain), place, rival)
    if stages and whole:
        explain = (
            f"{tensor.name} is both replicated over {dim} and moved along it",
            "keep one of the two lines",
        )
        places = (("replicate", tensor.name, dim), (word_of(stages[0]), tensor.name, dim))
        return Fault(Refusal("two-stories", lambda: explain), *places)
    pinned = program.pinned(tensor, dim)
    if whole and pinned is not None:
        return _replicate_of_split(program, tensor, dim, pinned)
    if stages and pinned not in (None, stages[0].axis):
        axis_moved = stages[0].axis
        explain = (
            f"{tensor.name} cannot move by {axis_moved} along {dim}: the caller holds slices of "
            f"{pinned} there",
            f"write `{word} {', '.join(stages[0].tensors)}: {pinned} "
            f"{'along' if word == 'shift' else 'over'} {dim}`",
        )
        place, rival = (word, tensor.name, dim), ("pin", tensor.name, dim)
        return Fault(Refusal("not-its-pin", lambda: explain), place, rival)
    if not stages and not whole:
        return _no_story(program, tensor, dim, axis)
    return None


def _replicate_of_split(program: Program, tensor: Tensor, dim: str, pinned: str) -> Fault:
    names = ", ".join(_moving_with(program, tensor))
    if tensor.role == "output":
        explain = (
            f"{tensor.name} is wanted in slices of {pinned} over {dim}: all of it on every rank "
            "would be cut at once",
            f"write `shard {names}: {pinned} over {dim}`",
        )
        slug = "reduce-then-slice"
    else:
        explain = (
            f"{tensor.name} cannot be replicated over {dim}: the caller holds slices of {pinned} "
            "there",
            f"write `shard {names}: {pinned} over {dim}`, or pin it replicated",
        )
        slug = "replicate-needs-pin"
    place, rival = ("replicate", tensor.name, dim), ("pin", tensor.name, dim)
    return Fault(Refusal(slug, lambda: explain), place, rival)


def _moving_with(program: Program, tensor: Tensor) -> tuple[str, ...]:
    return next((g for g in program.together if tensor.name in g), (tensor.name,))


def _no_story(program: Program, tensor: Tensor, dim: str, axis: str) -> Fault:
    names = ", ".join(_moving_with(program, tensor))
    along = program.sequence(tensor) or program.pinned(tensor, dim) or tensor.axes[0]
    if tensor.role == "output":
        explain = (
            f"{tensor.name} does not carry {axis}: no line says what becomes of the partial "
            f"results of the ranks along {dim}",
            f"write `shard {names}: {along} over {dim}`, `shift {names}: {along} along {dim}` "
            f"or `replicate {names} over {dim}`",
        )
    else:
        explain = (
            f"{tensor.name} does not carry {axis}: no line says how it comes to the ranks along "
            f"{dim}",
            f"write `shift {names}: {along} along {dim}` or `shard {names}: {along} over {dim}`",
        )
    return Fault(Refusal("no-story", lambda: explain), ("parallelize", axis, dim))


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
                    "what is shifted along one dimension is at the same tile at a step: write one "
                    "axis and the same options in both lines",
                )
                yield _pair(Refusal("shifts-disagree", lambda e=explain: e), one, other)
            skewed = "skewed" in one.options and "skewed" in other.options
            if one.dim != other.dim and one.axis == other.axis and not skewed:
                if set(one.tensors) != set(other.tensors):
                    explain = (
                        f"{one.axis} comes by along {other.dim} for {', '.join(other.tensors)} "
                        f"and along {one.dim} for {', '.join(one.tensors)}: no rank has the same "
                        "tile of both",
                        f"write `skewed` behind both, or gather one: `shard "
                        f"{', '.join(one.tensors)}: {one.axis} over {one.dim}`",
                    )
                    yield _pair(Refusal("two-shifts-one-axis", lambda e=explain: e), one, other)
    yield from _interleaved(program)


def _pair(refusal: Refusal, one: Stage, other: Stage) -> Fault:
    places = ((word_of(s), *s.tensors, s.axis, s.dim, *s.options) for s in (one, other))
    return Fault(refusal, *places)


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
                f"the lines of {', '.join(stage.tensors)} are apart: the shift of "
                f"{', '.join(walks[-1].tensors)} along {walks[-1].dim} stands between them",
                "write all lines of a tensor next to each other",
            )
            yield _pair(Refusal("walks-interleave", lambda e=explain: e), stage, walks[-1])
        trimmed = [s for s in mine if "direct" in s.options]
        if trimmed and stage.kind == "gather" and program.mask != "full":
            explain = (
                f"the shift of {', '.join(stage.tensors)} along {trimmed[-1].dim} is `direct` and "
                f"brings a rank only what it reads: it cannot be gathered over {stage.dim} then",
                "write the `shard` before the `shift`, or leave `direct` out",
            )
            yield _pair(Refusal("gather-of-trimmed", lambda e=explain: e), stage, trimmed[-1])


def _skewed(program: Program) -> Iterator[Fault]:
    """Skewed shifts come in pairs, of one axis, along two dimensions of one size."""
    skewed = [s for s in program.stages if "skewed" in s.options]
    if not skewed:
        return
    if len(skewed) != 2:
        explain = (
            f"{len(skewed)} skewed shift{'s' if len(skewed) > 1 else ''}: "
            + ", ".join(f"{', '.join(s.tensors)} along {s.dim}" for s in skewed),
            "exactly two shifts of one axis, along two dimensions of equal size, can be skewed",
        )
        last, axis = skewed[-1], skewed[-1].axis
        others = [s for s in program.stages if s.axis == axis and s is not last]
        rival = (*skewed[:-1], *others, last)[0]
        yield _pair(Refusal("skewed-pair", lambda: explain), last, rival)
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
        both = (*one.tensors, *other.tensors)
        explain = (
            f"skewed shifts of {', '.join(both)}: two different inputs can be skewed",
            "shift one input along each dimension",
        )
        yield _pair(Refusal("skewed-pair", lambda: explain), other, one)
    elif len(_input_walks(program)) > 2 or one.axis in program.mask_axes:
        explain = (
            f"{', '.join((*one.tensors, *other.tensors))} cannot be skewed beside other shifts, "
            "nor along a sequence with a mask",
            "gather the rest with `shard`, or leave `skewed` out",
        )
        third = next((s for s in _input_walks(program) if s not in skewed), one)
        yield _pair(Refusal("skewed-pair", lambda: explain), other, third)


def _outputs(program: Program) -> Iterator[Fault]:
    """Results that go home: along the axis of the tiles that come by, and not both ways."""
    homes = _output_walks(program)
    walks = _input_walks(program) if homes else []
    for index, stage in enumerate(homes):
        for with_it in (s for s in walks if s.dim == stage.dim):
            if with_it.axis != stage.axis:
                explain = (
                    f"the shift of {', '.join(stage.tensors)} along {stage.dim} returns results by "
                    f"{stage.axis}, but that of {', '.join(with_it.tensors)} brings tiles of "
                    f"{with_it.axis}",
                    "shift both by one axis, or use `shard` for one of them",
                )
                yield _pair(Refusal("shifts-disagree", lambda e=explain: e), stage, with_it)
            if {"both", "skewed"} & set(with_it.options) or any(
                o == "prefetch 0" for o in with_it.options
            ):
                explain = (
                    f"the shift of {', '.join(stage.tensors)} cannot follow that of "
                    f"{', '.join(with_it.tensors)} along {stage.dim}, which is "
                    f"`{' '.join(with_it.options)}`",
                    "leave the option out, or `shard` the results",
                )
                yield _pair(Refusal("options-clash", lambda e=explain: e), stage, with_it)
            yield from _trimmed_home(program, with_it, walks)
        if all(s.dim != stage.dim for s in walks):
            for other in (s for s in walks if s.axis == stage.axis):
                explain = (
                    f"the shift of {', '.join(stage.tensors)} returns results by {stage.axis} "
                    f"along {stage.dim}, but tiles of {stage.axis} come by along {other.dim}",
                    f"shift {', '.join(other.tensors)} along {stage.dim} too, or write `shard` for "
                    f"{', '.join(stage.tensors)}",
                )
                yield _pair(Refusal("two-shifts-one-axis", lambda e=explain: e), stage, other)
        for other in homes[:index]:
            if other.dim == stage.dim and (other.axis, other.options) != (
                stage.axis,
                stage.options,
            ):
                explain = (
                    f"the shifts of {', '.join(other.tensors)} and {', '.join(stage.tensors)} "
                    f"return results along {stage.dim} in two ways",
                    "write one axis and the same options in both lines",
                )
                yield _pair(Refusal("shifts-disagree", lambda e=explain: e), stage, other)


def _trimmed_home(program: Program, walk: Stage, walks: list[Stage]) -> Iterator[Fault]:
    """Results that follow a trimmed walk, with another walk around it or inside."""
    other = next((s for s in walks if s.dim != walk.dim), None)
    if "direct" in walk.options and program.mask != "full" and other is not None:
        explain = (
            f"the shift of {', '.join(walk.tensors)} along {walk.dim} is `direct` and brings a "
            f"rank only what it reads: results cannot follow it beside a shift along {other.dim}",
            f"leave `direct` out along {walk.dim}",
        )
        yield _pair(Refusal("home-of-trimmed", lambda: explain), walk, other)
