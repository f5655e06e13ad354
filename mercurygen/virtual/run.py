"""A module's text on virtual ranks: three calls and the layout helpers, compared with one device.

Everything is compared with the plan of the same schedule for the same small sizes: slices are cut
by its pins, results are those of the parsed operator on one device, and what is called is what its
trace says. Nothing of the module is trusted.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mercurygen.check.tensors import held_by_caller
from mercurygen.dsl.interpret import interpret
from mercurygen.ir.operator import Domain, Operator
from mercurygen.ir.problem import Sizes
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import POSITIONS
from mercurygen.schedule.schedule import Schedule
from mercurygen.virtual.calls import compare
from mercurygen.virtual.double import Double
from mercurygen.virtual.imports import namespace
from mercurygen.virtual.layout import uses
from mercurygen.virtual.memory import dense
from mercurygen.virtual.network import Communicator, Network
from mercurygen.virtual.objects import DeviceMesh
from mercurygen.virtual.problem import tiny
from mercurygen.virtual.rank import Rank
from mercurygen.virtual.report import Played, VirtualError, Where
from mercurygen.virtual.stage import Stage
from mercurygen.virtual.watch import watch

if TYPE_CHECKING:
    from torch import Tensor

MOST_RANKS = 64
SEED = 20
TOLERANCE = {"float64": 1e-12, "bfloat16": 3e-2}  # relative to the largest value


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of the operator on all ranks.

    Attributes:
        dtype: of the inputs.
        with_lse: all outputs are asked for.
        scale: of the softmax; None: the default.
        split_handles: a batch has a handle for each message, as with gloo; else one, as with NCCL.
        views: inputs are not contiguous.
    """

    dtype: str
    with_lse: bool
    scale: float | None
    split_handles: bool
    views: bool

    def __str__(self) -> str:
        lse = ", with return_lse" if self.with_lse else ""
        views = ", inputs not contiguous" if self.views else ""
        return f"{self.dtype}{lse}{views}"


TRIALS = (
    Trial("float64", False, None, False, False),
    Trial("float64", True, 0.3, True, True),
    Trial("bfloat16", True, None, True, False),
)
OWN_TRIALS = (  # of an operator's own lines
    Trial("float64", True, None, False, False),
    Trial("float64", True, None, True, True),
)
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
    ranks = Ranks(text, operator, file, schedule.mesh.size)
    if begun is not None:
        begun(ranks.stage)
    trials = OWN_TRIALS if isinstance(schedule.problem, Sizes) else TRIALS
    plans = {each.dtype: tiny(operator, schedule, each.dtype) for each in trials}
    try:
        ranks.load(plans["float64"])
        ranks.layout(plans["float64"], seed)
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
    """

    def __init__(self, text: str, operator: Operator, file: str, count: int) -> None:
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

    def play(self, program: Callable[[Rank], None], **modes: bool) -> None:
        """Run something on every rank; afterwards nothing may be in flight."""
        import torch

        self.network.reset()
        for rank in self.ranks:
            rank.reset(**modes)

        def act(number: int) -> None:
            """One rank, watched."""
            rank = self.ranks[number]
            with torch.no_grad(), watch(rank):
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
            if "_block_forward" in space:
                space["_block_forward"] = _kernel(rank, space["_block_forward"])
            for name in (plan.program.operator, "shard", "unshard"):
                if not callable(space.get(name)):
                    raise self.own(rank, "layout", f"the module has no function `{name}`")
            if self.count == 1:
                return
            made = self.meshes[rank.number] = space["make_mesh"]()
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

    def call(self, plan: Plan, trial: Trial, seed: int) -> float:
        """One call on all ranks; the largest error."""
        import torch

        program = plan.program
        whole = inputs(plan, seed, getattr(torch, trial.dtype))
        want = interpret(
            self.operator,
            {n: x.double() if x.is_floating_point() else x for n, x in whole.items()},
            self.scalars(plan, trial),
            mask=_domain(plan),
        )
        results: dict[int, tuple[Tensor, ...]] = {}

        def act(rank: Rank) -> None:
            """One rank."""
            with rank.silence():
                given = [
                    _viewed(held_by_caller(plan, t, rank.number, whole[t.name]), trial.views)
                    for t in program.inputs
                ]
                before = [x.clone() for x in given]
            options = self.scalars(plan, trial)
            if trial.with_lse and not own_lines(plan):  # else the defaults
                seq = program.extent(program.mask_axes[0])
                options = {"scale": trial.scale, "seq": seq, "return_lse": True}
            function = self.spaces[rank.number][program.operator]
            got = function(*given, self.meshes[rank.number], **options)
            results[rank.number] = got if isinstance(got, tuple) else (got,)
            with rank.silence():
                for tensor, x, old in zip(program.inputs, given, before, strict=True):
                    if not torch.equal(x, old):
                        raise self.own(rank, "inputs", f"the call changes its input {tensor.name}")

        low = torch.finfo(getattr(torch, trial.dtype)).bits == 16
        self.play(act, low=low, split_handles=trial.split_handles)
        self.operations += sum(rank.started for rank in self.ranks)
        traces = [trace(plan, n, with_lse=trial.with_lse) for n in range(self.count)]
        for rank in self.ranks:
            compare(rank.number, rank.calls, traces[rank.number], waits=False)
        error = max(self._error(plan, trial, n, results[n], want, seed) for n in results)
        for rank in self.ranks:
            compare(rank.number, rank.calls, traces[rank.number], waits=True)
        return error

    def _error(
        self,
        plan: Plan,
        trial: Trial,
        rank: int,
        got: tuple[Tensor, ...],
        want: Mapping[str, Tensor],
        seed: int,
    ) -> float:
        """Compare what a rank returned with its part of the operator's results."""
        import torch

        def wrong(what: str) -> VirtualError:
            """A result that is not right."""
            return VirtualError("result", rank, f"{what} ({trial}; seed {seed})")

        outputs = [t for t in plan.program.outputs if trial.with_lse or t.dtype == "inputs"]
        if len(got) != len(outputs):
            raise wrong(f"{len(got)} results, must be {len(outputs)}")
        dtype = getattr(torch, trial.dtype)
        worst = 0.0
        for tensor, x in zip(outputs, got, strict=True):
            if not isinstance(x, torch.Tensor):
                raise wrong(f"{tensor.name} is a {type(x).__name__}, must be a tensor")
            own = held_by_caller(plan, tensor, rank, want[tensor.name])
            kinds = {"inputs": dtype, "integer": torch.int64}
            kind = kinds.get(tensor.dtype, torch.promote_types(dtype, torch.float32))
            facts = f"{tensor.name} is {x.dtype} {list(x.shape)}"
            if x.dtype != kind or x.shape != own.shape:
                raise wrong(f"{facts}, must be {kind} {list(own.shape)}")
            if x.isnan().any():
                raise wrong(f"{tensor.name} has {int(x.isnan().sum())} NaN of {x.numel()}")
            same = x.double() == own  # also -inf and -inf
            scale = max(1.0, own[own.isfinite()].abs().max().item())
            error = (x.double() - own).abs().masked_fill(same, 0).max().item() / scale
            if not error <= TOLERANCE[trial.dtype]:
                allowed = TOLERANCE[trial.dtype]
                raise wrong(f"{tensor.name} is off by {error:.3g}, {allowed:.1g} is allowed")
            worst = max(worst, error)
        return worst

    def layout(self, plan: Plan, seed: int) -> None:
        """The module's own helpers cut and join as the pins and the order say."""
        import torch

        whole = inputs(plan, seed, torch.float64)
        whole |= interpret(self.operator, whole, self.scalars(plan, TRIALS[0]), mask=_domain(plan))
        dims = len(plan.program.mesh.dims)

        def act(rank: Rank) -> None:
            """One rank."""
            space, mesh = self.spaces[rank.number], self.meshes[rank.number]
            for use in uses(plan, rank.number, whole):
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


def own_lines(plan: Plan) -> bool:
    """Whether the body is the operator's own lines, not a kernel."""
    return plan.program.kernel == POSITIONS


def _domain(plan: Plan) -> Domain | str | None:
    """The mask, as the operator takes it."""
    program = plan.program
    if not program.mask_axes:
        return None
    return Domain("window", program.window) if program.mask == "window" else program.mask


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


def _viewed(x: Tensor, view: bool) -> Tensor:
    """The same values, in memory in another order of the dimensions if asked for."""
    if not view or x.ndim < 2:
        return x.contiguous()
    dims = (1, 2) if x.ndim == 4 else (0, 1)
    return x.transpose(*dims).contiguous().transpose(*dims)


def _kernel(rank: Rank, block: Callable) -> Callable:
    """The local kernel, counted; its log-sum-exp must be dense."""
    code = getattr(block, "__code__", None)
    line = max((n for *_, n in code.co_lines() if n), default=0) if code else 0

    def counted(*args: Any, **options: Any) -> Any:
        """Call it."""
        rank.kernel()
        result = block(*args, **options)
        merged = options.get("into") is not None  # part of an lse of more rows
        lse = result[1] if isinstance(result, tuple) and len(result) > 1 and not merged else None
        if lse is not None and not dense(lse):
            raise rank.fail(
                "not-contiguous",
                f"the lse that `_block_forward` returns is not dense: {list(lse.shape)} with "
                f"strides {list(lse.stride())}",
                Where(((line, "_block_forward"),)),
            )
        return result

    return counted
