"""What a schedule costs, without playing every rank: exact bytes and memory, and a time.

All ranks do the same transfers with buffers of the same size, except where each gets only what it
reads of a tile; only the blocks of their kernels differ. So one pass over the plan's own structure
gives traffic and memory exactly (`rings`, `nested`, `homeward` follow `mercurygen.lower`, with sums
for buffers), and a time in lock step: every step takes as long as the slowest rank's kernels or the
busiest link, whichever is longer. The terms are those of the simulation (`kernels`, `links`). What
of a plan others have too is worked out once (`common`, `shape`, `steps`, `lengths`). Plans with
tile loops, skewed shifts and shifts both ways are simulated.
"""

from __future__ import annotations

from mercurygen.cost.common import Common, Part, common_of
from mercurygen.cost.homeward import Homeward
from mercurygen.cost.links import Network
from mercurygen.cost.report import Cost, Times
from mercurygen.cost.rings import NoForm
from mercurygen.cost.shape import shape_of
from mercurygen.cost.simulate import simulate
from mercurygen.cost.tally import Tally
from mercurygen.ir.operator import Operator
from mercurygen.lower.plan import Plan, Spread, Swap


def cost(plan: Plan, network: Network, operator: Operator | None = None) -> Cost:
    """What a plan costs on the links of its group.

    Args:
        plan: the plan.
        network: the links of its group.
        operator: whose lines the body is; torch's attention needs none.
    """
    if plan.tiles:
        return simulate(plan, network, operator)
    try:
        return closed_form(plan, network, operator)
    except NoForm:
        return simulate(plan, network, operator)


def closed_form(plan: Plan, network: Network, operator: Operator | None = None) -> Cost:
    """What a plan costs, in closed form.

    Raises:
        NoForm: it has none.
    """
    common = common_of(plan, network, operator)
    shape = shape_of(plan, common)
    tally, tiles = _begun(plan, common, shape.classes.count)
    nest = Homeward(plan, tally, common, shape)
    _after(plan, tally, nest.whole(tiles))
    links, along = tally.traffic(shape.classes.of)
    (compute, copies, launch, _), imbalance = shape.busiest(plan)
    copies, launch = tally.copies + copies, tally.launches + launch
    exposed = max(0.0, tally.now - compute - copies - launch)
    return Cost(
        times=Times(tally.now, compute, copies, launch, exposed, tally.transfers),
        links=links,
        dims=along,
        operations=tally.most_operations(),
        peak_memory=tally.peak,
        imbalance=imbalance,
    )


def _begun(plan: Plan, common: Common, classes: int) -> tuple[Tally, dict[str, int]]:
    """All ranks after the border before the nest, and the bytes of what they have then.

    The border is the same for all programs of a layout.
    """
    found = common.begun.get(plan.program.layout)
    if found is None:
        tally = Tally(common)
        found = common.begun[plan.program.layout] = tally, _before(plan, tally)
    tally, sizes = found
    return tally.branch(classes), sizes


def _before(plan: Plan, tally: Tally) -> dict[str, int]:
    """What the caller gives and what is derived from it, then the reshards: bytes by tensor."""
    program = plan.program
    sizes = {t.name: plan.held_bytes(t.name) for t in (*program.inputs, *program.derived)}
    tally.up(sum(sizes.values()))
    for tensor in program.derived:
        tally.copy(sizes[tensor.name] + sum(sizes[name] for name in tensor.reads))
    made = {} if plan.tiles else {tensor.name: sizes[tensor.name] for tensor in program.derived}
    for step in plan.before:
        gone = 0
        for name in step.tensors:
            gone += made.get(name, 0)
            sizes[name] = made[name] = _reshard(tally, step, sizes[name])
        tally.down(gone)
    return sizes


def _reshard(tally: Tally, step: Swap | Spread, nbytes: int, dense: int = 0) -> int:
    """One step of a tensor: bytes of what it leaves, beside what it was; a dense copy goes."""
    if isinstance(step, Swap):
        tally.copy(2 * nbytes)
        tally.up(2 * nbytes)
        tally.wait(tally.start(tally.common.wire("all-to-all", step.dim), nbytes))
        tally.copy(2 * nbytes)
        tally.down(nbytes)  # the parts that went
        tally.up(nbytes)
        tally.down(nbytes)  # those that came
        return nbytes
    if not step.gathers:
        tally.up(nbytes // step.join.n)
        tally.copy(2 * (nbytes // step.join.n))
        return nbytes // step.join.n
    whole = nbytes * step.join.n
    tally.up(whole)
    tally.wait(tally.start(tally.common.wire("all-gather", step.dim), nbytes))
    tally.down(dense)
    tally.up(whole)
    tally.copy(2 * whole)
    tally.down(whole)
    return whole


def _after(plan: Plan, tally: Tally, found: dict[str, Part]) -> None:
    """The reshards of what is handed out."""
    for tensor in plan.program.outputs:
        if tensor.name in plan.program.optional:
            continue
        live, nbytes, _ = found[tensor.name]
        for step in plan.after:
            if tensor.name in step.tensors:
                dense = nbytes if isinstance(step, Spread) and live != nbytes else 0
                tally.up(dense)  # as torch's kernel leaves a result it may be strided
                left = _reshard(tally, step, nbytes, dense)
                tally.down(live)
                live = nbytes = left
