"""A module's text on virtual ranks: three calls and the layout helpers, compared with one device.

Everything is compared with the plan of the same schedule for the same small sizes: slices are cut
by its pins, results are those of the parsed operator on one device, and what is called is what its
trace says. Nothing of the module is trusted.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from mercurygen.check.tensors import held_by_caller
from mercurygen.dsl.interpret import interpret
from mercurygen.ir.caller import INSIDE
from mercurygen.ir.documents import borders_of
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Sizes
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import POSITIONS
from mercurygen.schedule.schedule import Schedule
from mercurygen.virtual.backward import gradients
from mercurygen.virtual.calls import compare
from mercurygen.virtual.double import Double
from mercurygen.virtual.imports import namespace
from mercurygen.virtual.layout import uses
from mercurygen.virtual.memory import dense
from mercurygen.virtual.network import Communicator, Network
from mercurygen.virtual.objects import DeviceMesh
from mercurygen.virtual.problem import Tiny, tiny
from mercurygen.virtual.rank import Rank
from mercurygen.virtual.report import Played, VirtualError, Where
from mercurygen.virtual.results import largest_error
from mercurygen.virtual.stage import Stage
from mercurygen.virtual.trial import OWN_TRIALS, TRIALS, Trial, domain, turned, viewed
from mercurygen.virtual.watch import watch

if TYPE_CHECKING:
    from torch import Tensor

MOST_RANKS = 64
SEED = 20
KERNELS = ("_block_forward", "_block_backward")
NUMBER = 0.5  # for a scalar that has no default


def play(
    text: str,
    schedule: Schedule,
    operator: Operator,
    file: str,
    *,
    seed: int = SEED,
    begun: Callable[[Stage], None] | None = None,
) -> Played:
    """Run a module's text on virtual ranks, in this process.

    Args:
        text: of the module; it is executed, once a rank.
        schedule: that it is of.
        operator: parsed.
        file: name of the module, for its code.
        seed: of the inputs.
        begun: called with the stage before anything runs, to look at it from another thread.

    Raises:
        VirtualError: at the first thing that is wrong.
    """
    moves = schedule.backward is not None and schedule.backward.save == "outer"
    layout = schedule.problem.layout
    ranks = Ranks(text, operator, file, schedule.mesh.size, moves_lse=moves, layout=layout)
    if schedule.expected is not None and schedule.expected.hosts is not None:
        ranks.of_mesh["check"] = False  # virtual ranks share a machine
    if begun is not None:
        begun(ranks.stage)
    trials = OWN_TRIALS if isinstance(schedule.problem, Sizes) else TRIALS
    plans = {each.dtype: tiny(operator, schedule, each.dtype) for each in trials}
    try:
        ranks.load(plans["float64"].forward)
        ranks.layout(plans["float64"].forward, seed)
        errors = [ranks.call(plans[trial.dtype], trial, seed) for trial in trials]
    finally:
        linecache.cache.pop(file, None)
    exact = (e for e, trial in zip(errors, trials, strict=True) if trial.dtype == "float64")
    return Played(schedule.mesh.size, len(trials), ranks.operations, max(exact), seed)


class Ranks:
    """A module on all ranks.

    Args:
        text: of the module.
        operator: that it computes.
        file: its name.
        count: of the ranks.
        moves_lse: whether lse goes to the caller's layout even if it is not handed out.
        layout: of the caller's tensors.
    """

    def __init__(
        self,
        text: str,
        operator: Operator,
        file: str,
        count: int,
        *,
        moves_lse: bool = False,
        layout: str = INSIDE,
    ) -> None:
        self.moves_lse, self.lies = moves_lse, partial(turned, layout)
        self.operator, self.count, self.operations = operator, count, 0
        self.stage = Stage(count, file)
        self.network = Network(self.stage)
        self.ranks = [Rank(number, self.stage, self.network) for number in range(count)]
        world = Communicator(tuple(range(count)), "world")
        self.network.names[world] = "all ranks"
        doubles = [Double(rank, world, made=rank.number % 3) for rank in self.ranks]
        self.spaces = [
            namespace(rank, double, "mercurygen_verified")
            for rank, double in zip(self.ranks, doubles, strict=True)
        ]
        self.meshes: list[Any] = [None] * count
        self.of_mesh: dict[str, bool] = {}  # what `make_mesh` is given
        self.code = self._compile(text, file)

    def _compile(self, text: str, file: str) -> Any:
        try:
            code = compile(text, file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            where = Where(((getattr(error, "lineno", 1) or 1, "<module>"),))
            raise VirtualError("module-error", -1, f"it is not Python: {error}", where) from None
        lines = text.splitlines(keepends=True)
        linecache.cache[file] = (len(text), None, lines, file)
        return code

    def play(self, program: Callable[[Rank], None], grad: bool = False, **modes: bool) -> None:
        """Run something on every rank, with gradients or not; afterwards nothing is in flight."""
        import torch

        self.network.reset()
        for rank in self.ranks:
            rank.reset(**modes)

        def act(number: int) -> None:
            """One rank, watched."""
            rank = self.ranks[number]
            with torch.set_grad_enabled(grad), watch(rank):
                program(rank)
                rank.close()

        self.stage.play(act, self.network.explain)

    def own(self, rank: Rank, check: Any, message: str) -> BaseException:
        """A failure that no line of the module stands for."""
        return rank.fail(check, message, Where())

    # --- phases -------------------------------------------------------------------------------

    def load(self, plan: Plan) -> None:
        """Execute the module, and make its mesh."""
        mesh = plan.program.mesh
        want = {dim.name: dim.size for dim in mesh.dims}

        def program(rank: Rank) -> None:
            """One rank."""
            space = self.spaces[rank.number]
            exec(self.code, space)
            for name in KERNELS:
                if name in space:
                    space[name] = _kernel(rank, name, space[name])
            for name in (plan.program.operator, "shard", "unshard"):
                if not callable(space.get(name)):
                    raise self.own(rank, "layout", f"the module has no function `{name}`")
            if self.count == 1:
                return
            made = self.meshes[rank.number] = space["make_mesh"](**self.of_mesh)
            sizes = isinstance(made, DeviceMesh) and zip(
                made.mesh_dim_names or (), made.shape, strict=False
            )
            if not sizes or dict(sizes) != want:
                raise self.own(rank, "layout", f"make_mesh makes {made}, the plan has {want}")
            for dim in mesh.names:
                comm, line = made.get_group(dim).comm, mesh.group(rank.number, dim)
                self.network.names[comm] = dim
                if comm.ranks != line:
                    words = f"make_mesh gives {dim} the ranks {comm.ranks}, they are {line}"
                    raise self.own(rank, "layout", words)

        self.play(program)

    def scalars(self, plan: Plan, trial: Trial) -> dict[str, float | None]:
        """Numbers by name: the trial's scale; of an operator's own lines, what has no default."""
        if not own_lines(plan):
            return {} if trial.scale is None else {"scale": trial.scale}
        return {each.name: NUMBER for each in self.operator.scalars if each.default is None}

    def options(self, plan: Plan, trial: Trial) -> dict[str, Any]:
        """What a call is given by name."""
        program, found = plan.program, self.scalars(plan, trial)
        if own_lines(plan):
            return found
        if trial.with_lse:  # else the defaults
            seq = program.extent(program.mask_axes[0])
            found = {"scale": trial.scale, "seq": seq, "return_lse": True}
            if program.align is not None:
                found["seq_kv"] = program.extent(program.mask_axes[1])
        if program.mask == "window":  # as short as the sequence is
            found["window"] = (program.window - 1, program.ahead)
        return found

    def call(self, tiny: Tiny, trial: Trial, seed: int) -> float:
        """One call on all ranks, and its gradients if there are any; the largest error."""
        import torch

        plan, program = tiny.forward, tiny.forward.program
        whole = inputs(plan, seed, getattr(torch, trial.dtype))
        want = interpret(
            self.operator,
            {n: x.double() if x.is_floating_point() else x for n, x in whole.items()},
            self.scalars(plan, trial),
            mask=domain(plan),
        )
        results: dict[int, tuple[Tensor, ...]] = {}
        given: dict[int, list[Tensor]] = {}

        def act(rank: Rank) -> None:
            """One rank."""
            with rank.silence():
                own = given[rank.number] = [
                    viewed(self.lies(held_by_caller(plan, t, rank.number, x)), trial.views)
                    for t, x in ((t, whole[t.name]) for t in program.inputs)
                ]
                before = [x.clone() for x in own]
                if tiny.backward is not None:
                    own = [x.requires_grad_() for x in own]
            options = self.options(plan, trial)
            function = self.spaces[rank.number][program.operator]
            got = function(*own, *borders(plan), self.meshes[rank.number], **options)
            results[rank.number] = got if isinstance(got, tuple) else (got,)
            with rank.silence():
                for tensor, x, old in zip(program.inputs, own, before, strict=True):
                    if not torch.equal(x, old):
                        raise self.own(rank, "inputs", f"the call changes its input {tensor.name}")

        low = torch.finfo(getattr(torch, trial.dtype)).bits == 16
        differentiable = tiny.backward is not None
        self.play(act, differentiable, low=low, split_handles=trial.split_handles)
        self.operations += sum(rank.started for rank in self.ranks)
        with_lse = trial.with_lse or self.moves_lse
        traces = [trace(plan, n, with_lse=with_lse) for n in range(self.count)]
        for rank in self.ranks:
            compare(rank.number, rank.calls, traces[rank.number], waits=False)
        outputs = [t for t in program.outputs if trial.with_lse or t.dtype == "inputs"]
        told = f"{trial}; seed {seed}"
        error = max(
            largest_error(plan, outputs, n, results[n], want, trial.dtype, told, self.lies)
            for n in results
        )
        for rank in self.ranks:
            compare(rank.number, rank.calls, traces[rank.number], waits=True)
        if tiny.backward is None:
            return error
        calls = {n: (results[n][0], given[n]) for n in results}
        known = {**whole, **want}
        own = gradients(self.play, self.ranks, tiny.backward, trial, seed, calls, known, self.lies)
        self.operations += sum(rank.started for rank in self.ranks)
        return max(error, own)

    def layout(self, plan: Plan, seed: int) -> None:
        """The module's own helpers cut and join as the pins and the order say."""
        import torch

        whole = inputs(plan, seed, torch.float64)
        whole |= interpret(self.operator, whole, self.scalars(plan, TRIALS[0]), mask=domain(plan))
        dims = len(plan.program.mesh.dims)

        def act(rank: Rank) -> None:
            """One rank."""
            space, mesh = self.spaces[rank.number], self.meshes[rank.number]
            for use in uses(plan, rank.number, whole, self.lies):
                if use.name not in space:
                    continue
                before = rank.started
                got = space[use.name](*use.args, mesh, **use.options)
                with rank.silence():
                    if not isinstance(got, torch.Tensor) or not torch.equal(got, use.expected):
                        words = f"`{use.name}` of {use.what} gives another part than the pins say"
                        raise self.own(rank, "layout", words)
                if rank.started - before > dims:
                    words = f"`{use.name}` starts {rank.started - before} operations for {dims} "
                    raise self.own(rank, "calls", words + "dimensions: one for each is enough")

        self.play(act)


def borders(plan: Plan) -> list[Tensor]:
    """What the operator takes beside its tensors: where packed documents begin, and the end."""
    import torch

    documents = plan.program.documents
    return [torch.tensor(borders_of(documents))] if documents else []


def own_lines(plan: Plan) -> bool:
    """Whether the body is the operator's own lines, not a kernel."""
    return plan.program.kernel == POSITIONS


def inputs(plan: Plan, seed: int, dtype: Any) -> dict[str, Tensor]:
    """The whole inputs by name."""
    import torch

    random, program = torch.Generator().manual_seed(seed), plan.program
    made = {}
    for tensor in program.inputs:
        shape = [prod(map(program.extent, dim)) for dim in tensor.dims]
        if tensor.dtype == "integer":
            made[tensor.name] = torch.randint(0, 2, shape, generator=random)
            continue
        made[tensor.name] = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    return made


def _kernel(rank: Rank, name: str, block: Callable) -> Callable:
    """A local kernel, counted; the log-sum-exp that the forward's returns must be dense."""
    code = getattr(block, "__code__", None)
    line = max((n for *_, n in code.co_lines() if n), default=0) if code else 0

    def counted(*args: Any, **options: Any) -> Any:
        """Call it."""
        rank.kernel()
        result = block(*args, **options)
        merged = options.get("into") is not None  # part of an lse of more rows
        lse = result[1] if isinstance(result, tuple) and len(result) == 2 and not merged else None
        if lse is not None and not dense(lse):
            raise rank.fail(
                "not-contiguous",
                f"the lse that `{name}` returns is not dense: {list(lse.shape)} with "
                f"strides {list(lse.stride())}",
                Where(((line, name),)),
            )
        return result

    return counted
