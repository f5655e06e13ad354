"""How results begin, and what a mask or an order makes of tiles that a kernel cannot do."""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.kernel import TRITON
from mercurygen.ir.program import Program
from mercurygen.lower.cuts import Cuts, cuts_of
from mercurygen.lower.plan import Gather, Loop, Plan, Spread, Walk
from mercurygen.lower.reach import places
from mercurygen.lower.recorder import NotARun
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import MOST_BLOCKS, Block, NotCuttable


def begin(program: Program, loops: tuple[Loop, ...]) -> str | Refusal:
    """How the innermost results begin; or why the mask leaves too many blocks of a tile."""
    walks = any(loop.walks and not loop.outputs for loop in loops)
    moving = sum(bool(loop.outputs) for loop in loops)
    partly = any(
        not tensor.carries(axis)
        for tile in program.tiles
        for axis in tile.axes
        for tensor in program.outputs
    )
    if not program.mask_axes:
        return "empty" if walks or partly else "only"
    placed = program.banded and program.align is not None
    straight = [stage.dim for stage in program.stages if "direct" in stage.options]
    if placed and straight:
        return _left_out(straight[0])
    found = _fragments(program, loops)
    if isinstance(found, Refusal):
        return found
    worst, alike, blank = found
    trimmed = _trimmed_beside(loops)
    if blank and trimmed:
        return _skipped(trimmed)
    if worst > MOST_BLOCKS:
        return _fragmented(worst)
    alike = alike and not _come_by(program, loops) and not placed  # some rows may see no column
    if partly or not alike or _some_stay(program, loops):
        return "empty"
    if not moving:
        return "first" if walks else "only"
    last = max(i for i, loop in enumerate(loops) if loop.outputs)
    if any(loop.walks for loop in loops[last:] if not loop.outputs):
        return "empty"  # what goes home is merged from several tiles
    trims = not walks and moving == 1 and all(loop.home != "relayed" for loop in loops)
    if program.order.kind == "striped":  # a square below the diagonal leaves out a row
        trims = False
    all_live = program.mask == "full" and not program.documents
    return "only" if all_live or (trims and worst <= 1) else "empty"


def _some_stay(program: Program, loops: tuple[Loop, ...]) -> bool:
    """Whether some results go home with a loop's tiles and others are of all of them, and stay."""
    home = {name for loop in loops for name in loop.outputs}
    return bool(home) and home != {tensor.name for tensor in program.outputs}


def _come_by(program: Program, loops: tuple[Loop, ...]) -> bool:
    """Whether results that stay are of more than one tile: an output carries what is walked."""
    return any(
        tensor.carries(loop.axis)
        for loop in loops
        if loop.walks and not loop.outputs
        for tensor in program.outputs
    )


def _trimmed_beside(loops: tuple[Loop, ...]) -> tuple[str, str] | None:
    """A dimension of a direct walk, and one of a walk of another loop, inside or outside."""
    for i, loop in enumerate(loops):
        direct = next((walk.dim for walk in loop.walks if walk.direct), None)
        for j, other in enumerate(loops):
            if direct and i != j and other.walks:
                return direct, other.walks[0].dim
    return None


def _skipped(dims: tuple[str, str]) -> Refusal:
    direct, other = dims
    return Refusal(
        "direct-skips-tiles",
        lambda: (
            f"the shift along {direct} is `direct`, and of some tiles a rank reads nothing: it "
            f"would skip the shift along {other}, which the other ranks wait for",
            f"leave `direct` out, gather over {other}, or use `order S: zigzag`",
        ),
    )


def _left_out(dim: str) -> Refusal:
    """Of one sequence every rank reads of its neighbour, or is read by it."""
    return Refusal(
        "direct-skips-tiles",
        lambda: (
            f"the shift along {dim} is `direct`: of two sequences a mask may leave "
            "a rank out of the first exchange, to which all have to come",
            "leave `direct` out and pass the tiles on, or gather them",
        ),
    )


def _not_cuttable(fault: NotCuttable) -> Refusal:
    words = str(fault)
    return Refusal("mask-not-cuttable", lambda: (words, "use another order of tokens"))


def _fragments(program: Program, loops: tuple[Loop, ...]) -> tuple[int, bool, bool] | Refusal:
    """Of all ranks: most blocks of a tile; whether every first tile is one block, of all cells of
    the results; and whether the mask leaves nothing of some tile."""
    key = "fragments", program.kernel, program.layout, tuple([loop.paces for loop in loops])
    found = program.shared.get(key)
    if found is None:
        rows, columns = (places(program, loops, axis) for axis in program.mask_axes)
        try:
            found = _counted(program, cuts_of(program, rows, columns))
        except NotCuttable as fault:
            found = _not_cuttable(fault)
        program.shared[key] = found
    return found


def _counted(program: Program, cuts: Cuts) -> tuple[int, bool, bool]:
    whole = [len(k) == 1 and _covers(program, k[0], cuts.sizes) for k in cuts.kinds]
    alike = all([whole[kind] for kind in cuts.firsts])
    return max(map(len, cuts.kinds)), alike, () in cuts.kinds


def _covers(program: Program, block: Block, sizes: tuple[int, int]) -> bool:
    """Whether a block has all cells of the outputs that the tiles have.

    Of the Triton kernel, and of a window, also all columns: of these ranks have more and less.
    """
    if block.documents and block.height < sizes[0]:
        return False
    spans = zip(program.mask_axes, (block.rows, block.cols), sizes, strict=True)
    return all(
        span == (0, size)
        for axis, span, size in spans
        if program.kernel == TRITON
        or program.banded
        or any(tensor.carries(axis) for tensor in program.outputs)
    )


def _fragmented(worst: int) -> Refusal:
    return Refusal(
        "mask-too-fragmented",
        lambda: (
            f"the mask cuts a tile into {worst} blocks; at most {MOST_BLOCKS} are worth it",
            "split heads over the inner dimensions and the sequence over the outer ones",
        ),
    )


# --- alignment ----------------------------------------------------------------------------------


def _cut_by_walks(plan: Plan) -> bool:
    """Whether something that does not come by is cut to the tiles that do."""
    return any(
        tensor.carries(loop.axis) and tensor.name not in loop.tensors
        for loop in plan.nest.loops
        if loop.walks
        for tensor in plan.program.read
    )


def misaligned(plan: Plan) -> Refusal | None:
    """Refuse a plan that needs parts of tiles that do not lie in one piece.

    Where nothing is cut there are none. Rank 0 shows them. What is cut is a list of the atoms at
    some places of the mesh, to those at one place along a dimension of the list. Contiguous and
    striped lists ascend row-major: the cut is a run if and only if no dimension before that one is
    in the list, whatever the place, and every rank comes to a cut of the kind, at its own place. A
    zigzag list is such a list and, behind it, one mirrored: the cut has a run in each, and these
    touch at the last place only. Walks come to all places on every rank, and what lies on a rank
    is cut at its own: of rank 0 at the first. Fronts and ends of tiles, which direct rings bring,
    have runs where the whole tiles have.
    """
    cuts = any(isinstance(step, Spread) and not step.gathers for step in plan.before)
    moving = any(loop.outputs for loop in plan.nest.loops)
    come_by = _come_by(plan.program, plan.nest.loops)
    if not (cuts or plan.tiles or moving or come_by or _cut_by_walks(plan)):
        return None
    if not (cuts or plan.tiles) and _in_step(plan):
        return None
    program = plan.program
    trims = program.order is not None and program.order.kind != "zigzag"
    alike = tuple(_at_rank_0(loop, trims) for loop in plan.nest.loops)
    key = "aligned", program.kernel, program.layout, alike, plan.nest.begin, plan.nest.reduces
    if key not in program.shared:
        program.shared[key] = _fault_of_rank_0(plan)
    return program.shared[key]


def _in_step(plan: Plan) -> bool:
    """Whether all that carries an axis has the same part of it at every step.

    It depends on what moves along which dimensions, gathered or walked, not on the way.
    """
    key = "in step", plan.program.layout, tuple([loop.course for loop in plan.nest.loops])
    found = plan.program.shared.get(key)
    if found is None:
        found = plan.program.shared[key] = _parts_agree(plan)
    return found


def _parts_agree(plan: Plan) -> bool:
    """Whether all that carries an axis has the same part of it at every step: what is read is that
    of the owner whose results they are, and of one axis that is summed over."""
    program = plan.program
    if any(loop.partner for loop in plan.nest.loops):
        return False
    gathered = {
        (name, stage.dim)
        for loop in plan.nest.loops
        for stage in loop.stages
        if isinstance(stage, Gather)
        for name in loop.tensors
    }
    for axis in {axis for tensor in (*program.read, *program.outputs) for axis in tensor.axes}:
        parts = set()
        for tensor in program.read:
            if axis in tensor.axes:
                held = zip(program.mesh.names, program.storage(tensor), strict=True)
                dims = (d for d, along in held if along == axis)
                parts.add(frozenset(d for d in dims if (tensor.name, d) not in gathered))
        split = program.parallel_dims(axis)
        for tensor in program.outputs:
            if axis in tensor.axes:
                homes = (
                    walk.dim
                    for loop in plan.nest.loops
                    if tensor.name in loop.outputs and loop.axis == axis
                    for walk in loop.walks[-1:]  # with which they go home
                )
                parts.add(frozenset((*split, *homes)))
        if len(parts) > 1:
            return False
    return True


def _at_rank_0(loop: Loop, trims: bool) -> tuple:
    """What of a loop tells which tiles come together on rank 0, in whatever order.

    Under zigzag rank 0 has the last tokens, which read every tile whole, direct or not.
    """
    stages = tuple(
        (s.dim, s.skew, s.direct and trims) if isinstance(s, Walk) else s for s in loop.stages
    )
    return loop.tensors, loop.axis, stages, loop.outputs, loop.partner


def _fault_of_rank_0(plan: Plan) -> Refusal | None:
    try:
        trace(plan, 0)
    except NotCuttable as fault:
        return _not_cuttable(fault)
    except NotARun as fault:
        axis = str(fault)
        return Refusal(
            "tiles-do-not-align",
            lambda: (
                f"what a rank works on along {axis} does not lie in one piece in what it holds",
                "`order S: contiguous`, or bring what carries it in the same tiles",
            ),
        )
    return None
