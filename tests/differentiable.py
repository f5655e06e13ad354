"""Differentiable schedules for the tests: their modules' text, and checks to be run on every rank.

made = Trained("m=4", RING, KV, problem)            # mesh, forward, section backward
RANKS.add("ring", check_gradients, made.late, problem, torch.float64)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import reference
import torch
import torch.distributed as dist
from emitted import problem_of
from numeric_cases import (
    KINDS,
    TOLERANCE,
    Call,
    PeakBytes,
    Problem,
    _let_go,
    assert_close,
    assert_refused,
    held_tokens,
    patched,
    recorded,
    setup,
)
from torch import Tensor
from torch.distributed import DeviceMesh

from mercurygen import operators
from mercurygen.cli.build import Lowered, plans_of
from mercurygen.emit.module import emit
from mercurygen.schedule.problem_text import show_problem
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse

_HEADER = """\
operator attention
problem {problem}
topology test sha256:0123456789abcdef {levels}
group {group}
tp 1
mesh {mesh}
"""
SAVE = "save q, k, v, out, lse:"


@dataclass(frozen=True)
class Trained:
    """A differentiable schedule, as text.

    Attributes:
        mesh: `n=2 m=4`.
        forward: directives, separated by semicolons.
        backward: those of the section.
        problem: sizes, mask and order.
        dtype: that the plans are for.
    """

    mesh: str
    forward: str
    backward: str
    problem: Problem
    dtype: str = "bfloat16"

    @functools.cached_property
    def schedule(self) -> Schedule:
        """As parsed."""
        problem = show_problem(problem_of(self.problem, self.dtype))
        levels = " ".join(f"{x} wire 25GB/s" for x in self.mesh.split() or ["gpu=1"])
        group = self.mesh or "gpu=1"
        text = _HEADER.format(problem=problem, levels=levels, group=group, mesh=self.mesh)
        dims = ", ".join(each.partition("=")[0] for each in self.mesh.split())
        text += f"order S: {self.problem.order} over {dims}\n" if dims else ""
        lines = [*self.forward.split(";"), "backward", *self.backward.split(";")]
        return parse(text + "\n".join(filter(None, map(str.strip, lines))) + "\n").schedule

    @functools.cached_property
    def plans(self) -> tuple[Lowered, Lowered]:
        """Of forward and backward."""
        forward, backward = plans_of(self.schedule)
        assert backward is not None
        return forward, backward

    @functools.cached_property
    def text(self) -> str:
        """The module."""
        forward, backward = self.plans
        operator = operators.load("attention")
        return emit(forward.schedule, forward.plan, "tested", operator, backward.plan)

    @functools.cached_property
    def plain(self) -> str:
        """The module before black has formatted it, which takes longer than all the rest."""
        with patch("mercurygen.emit.module.format_text", str):
            return Trained(self.mesh, self.forward, self.backward, self.problem, self.dtype).text

    @property
    def late(self) -> functools.partial[str]:
        """`plain` as an argument of `Ranks.add`: emitted just before the fork."""
        return functools.partial(getattr, self, "plain")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.schedule.mesh.size

    def of(self, dtype: str) -> Trained:
        """The same with plans for another dtype."""
        return replace(self, dtype=dtype)


class Case(NamedTuple):
    """What one rank holds of one problem, and must get."""

    module: ModuleType
    mesh: DeviceMesh | None
    inputs: list[Tensor]  # q, k and v; they want gradients
    grad_out: Tensor
    want: list[Tensor]  # out, dq, dk and dv, in float64
    alone: list[Tensor]  # the same by the module's kernels on one device


def case_of(text: str, problem: Problem, dtype: torch.dtype) -> Case:
    """Make it, the same full tensors on every rank."""
    module, mesh = setup(text)
    full = problem.inputs(dtype)
    random = torch.Generator().manual_seed(problem.seed + 1)
    shape = *full[0].shape[:3], full[2].shape[3]
    grad = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    held = {name: held_tokens(module, mesh, problem, name) for name in ("out", "q", "k", "v")}

    def own(tensors: list[Tensor]) -> list[Tensor]:
        """This rank's parts of out and of what lies as q, k and v."""
        pairs = zip(tensors, held.values(), strict=True)
        return [x.index_select(1, tokens) for x, tokens in pairs]

    grad_out, *inputs = own([grad, *full])
    want, alone = expected_gradients(problem, full, grad), one_device(module, problem, full, grad)
    inputs = [x.requires_grad_() for x in inputs]
    return Case(module, mesh, inputs, grad_out, own(want), own(alone))


def expected_gradients(problem: Problem, full: list[Tensor], grad: Tensor) -> list[Tensor]:
    """out and the gradients in float64."""
    inputs = [x.double().clone().requires_grad_() for x in full]
    places = torch.arange(problem.seq) + problem.offset
    scale = problem.scale
    out, _ = reference.attention(*inputs, problem.mask, scale=scale, q_positions=places)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def one_device(
    module: ModuleType, problem: Problem, full: list[Tensor], grad: Tensor
) -> list[Tensor]:
    """out and the gradients by the module's kernels, in one block."""
    q, k, v = full
    scale = q.shape[3] ** -0.5 if problem.scale is None else problem.scale
    if hasattr(module, "_delta"):  # the Triton kernel, which adds into float32
        ahead = 0 if problem.causal else None
        wide, lse = module._block_forward(q, k, v, scale, ahead)
        out = wide.to(q.dtype)
        grads = tuple(x.new_zeros(x.shape, dtype=lse.dtype) for x in full)
        delta = module._delta(grad, out)
        module._block_backward(grad, q, k, v, lse, delta, scale, grads, ahead)
        return [x.to(q.dtype) for x in (out, *grads)]
    mask: object = problem.causal
    if problem.align is not None:
        mask = (None, problem.offset)
    if problem.window is not None:
        mask = (problem.offset - problem.window[0], problem.offset + problem.window[1])
    out, lse = module._block_forward(q, k, v, scale, mask)
    return [out, *module._block_backward(grad, q, k, v, out, lse, scale, mask)]


def compare(case: Case, got: list[Tensor], problem: Problem, dtype: torch.dtype) -> float:
    """out, dq, dk and dv of a rank; returns the largest error."""
    names, errors = ("out", "dq", "dk", "dv"), []
    for name, x, want, alone in zip(names, got, case.want, case.alone, strict=True):
        assert x.dtype == dtype, f"{name} is {x.dtype}"
        tolerance = TOLERANCE[dtype]
        if dtype == torch.bfloat16:
            tolerance = 2.5 * (alone.double() - want).abs().max().item() + 2e-3
        errors.append(assert_close(x, want, tolerance, name, problem))
    return max(errors)


def check_gradients(
    rank: int, world: int, text: str, problem: Problem, *dtypes: torch.dtype
) -> list[float]:
    """out, dq, dk and dv of this rank against float64; returns their largest errors."""
    errors = []
    for dtype in dtypes:
        case = case_of(text, problem, dtype)
        out = case.module.attention(*case.inputs, case.mesh, scale=problem.scale)
        out.backward(case.grad_out)
        got = [out.detach(), *(x.grad for x in case.inputs)]
        errors.append(compare(case, got, problem, dtype))
    return errors


class Used(NamedTuple):
    """Calls of torch.distributed, and most live bytes, in forward and backward."""

    forward: list[Call]
    backward: list[Call]
    most: int
    most_backward: int


def check_used(rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype) -> Used:
    """What one call with return_lse, and its backward, send, receive and hold."""
    module, mesh, inputs, grad_out, *_ = case_of(text, problem, dtype)
    if hasattr(module, "_delta"):  # of the Triton kernels, which need nothing beside their results
        module._block_in_torch = module._gradients_in_torch = lambda *given: None
        module._delta = lambda x, _: x.new_empty(x.shape[0], *x.shape[2:0:-1], dtype=torch.float32)
    given = [x.detach() for x in inputs]
    with recorded(module) as forward:
        out, lse = module.attention(*inputs, mesh, return_lse=True)
    with recorded(module) as backward:
        out.backward(grad_out)
    saved = out.grad_fn, lse.grad_fn
    del out, lse, saved
    context = Context()
    groups = [] if mesh is None else [mesh.get_group(name) for name in module.MESH]
    more = module._Attention.forward.__code__.co_argcount - 5 - len(groups)
    collectives = [name for name, kind in KINDS.items() if kind != "p2p"]
    with torch.no_grad(), patched(module, collectives, _let_go):
        with PeakBytes(*given) as memory:
            module._Attention.forward(context, *given, *groups, 0.5, *[False] * more)
        saved = context.saved_tensors
        with PeakBytes(*saved, grad_out) as after:
            module._Attention.backward(context, grad_out, None)
    return Used(forward, backward, memory.peak, after.peak)


class Context(SimpleNamespace):
    """What an autograd function keeps, without autograd."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep them."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing to do."""


# --- as others call it --------------------------------------------------------------------------


def check_uses(rank: int, world: int, text: str, problem: Problem) -> None:
    """Views, an expanded gradient, gradients of some inputs, no gradients, lse, twice."""
    case = case_of(text, problem, torch.float64)
    attention, mesh, inputs = case.module.attention, case.mesh, case.inputs
    options = {"scale": problem.scale}
    with recorded(case.module) as calls:
        out = attention(*inputs, mesh, **options)
        want = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    views = [x.detach().transpose(1, 3).contiguous().transpose(1, 3) for x in inputs]
    views = [x.requires_grad_() for x in views]
    assert not any(x.is_contiguous() for x in views)
    attention(*views, mesh, **options).sum().backward()  # its gradient is expanded
    for x, y in zip(views, want, strict=True):
        assert_close(x.grad, y, 1e-12, "of views", problem)
    for wanted in range(3):
        given = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
        with recorded(case.module) as some:
            attention(*given, mesh, **options).sum().backward()
        assert some == calls, f"only input {wanted} wants a gradient"
        assert [x.grad is not None for x in given] == [i == wanted for i in range(3)]
        assert_close(given[wanted].grad, want[wanted], 1e-12, "alone", problem)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            again = attention(*inputs, mesh, **options)
        assert not again.requires_grad and torch.equal(again, out)
    both, lse = attention(*inputs, mesh, **options, return_lse=True)
    assert both.requires_grad and not lse.requires_grad and torch.equal(both, out)
    got = torch.autograd.grad(both, inputs, torch.ones_like(out))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    ones = torch.ones_like(out).requires_grad_()
    grad, *_ = torch.autograd.grad(out, inputs, ones, create_graph=True)
    assert_refused(grad.sum().backward, "once_differentiable", error=RuntimeError)


def check_slopes(rank: int, world: int, text: str, problem: Problem) -> None:
    """Against differences of the sum of all ranks' results, along directions in all of their
    inputs at once."""
    case = case_of(text, problem, torch.float64)
    random = torch.Generator().manual_seed(problem.seed + rank)

    def loss(step: float, ways: list[Tensor]) -> Tensor:
        """Of all ranks, some way from the inputs."""
        with torch.no_grad():
            moved = [x + step * way for x, way in zip(case.inputs, ways, strict=True)]
            total = (case.module.attention(*moved, case.mesh) * case.grad_out).sum()
        dist.all_reduce(total)
        return total

    out = case.module.attention(*case.inputs, case.mesh)
    grads = torch.autograd.grad(out, case.inputs, case.grad_out)
    for number in range(4):  # in q alone, k alone, v alone, all
        ways = [torch.randn(x.shape, generator=random, dtype=x.dtype) for x in case.inputs]
        ways = [way * (number in (i, 3)) for i, way in enumerate(ways)]
        slope = sum((x * way).sum() for x, way in zip(grads, ways, strict=True))
        dist.all_reduce(slope)
        step = 1e-4
        want = (loss(step, ways) - loss(-step, ways)) / (2 * step)
        assert abs(slope - want) < 1e-6 * max(1.0, abs(want)), f"{slope}, must be {want}"


def check_two_modules(
    rank: int, world: int, text: str, problem: Problem, other: str, second: Problem
) -> None:
    """Two modules in one process, one's backward inside the other's."""
    both = (text, problem), (other, second)
    cases = [case_of(*each, torch.float64) for each in both]
    outs = [case.module.attention(*case.inputs, case.mesh) for case in cases]
    for i in (1, 0):
        case, out = cases[i], outs[i]
        out.backward(case.grad_out)
        compare(case, [out.detach(), *(x.grad for x in case.inputs)], both[i][1], torch.float64)


def check_flat(rank: int, world: int, text: str, problem: Problem) -> None:
    """Twenty steps leave as many bytes alive as one."""
    module, mesh, inputs, grad_out, *_ = case_of(text, problem, torch.float32)
    collectives = [name for name, kind in KINDS.items() if kind != "p2p"]
    alive = []
    with patched(module, collectives, _let_go), PeakBytes(*inputs, grad_out) as memory:
        for _ in range(20):
            module.attention(*inputs, mesh).backward(grad_out)
            for x in inputs:
                x.grad = None
            alive.append(memory.live)
    assert len(set(alive)) == 1, alive
