"""Differentiable schedules for the tests: their modules' text, and checks to be run on every rank.

made = Trained("m=4", RING, KV, problem)            # mesh, forward, section backward
RANKS.add("ring", check_gradients, made.late, problem, torch.float64)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numeric_cases
import reference
import torch
from emitted import problem_of
from numeric_cases import Problem, held_tokens, setup
from torch import Tensor

from mercurygen import operators
from mercurygen.cli.build import Lowered, plans_of
from mercurygen.emit.module import emit
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse

_HEADER = """\
operator attention
problem batch={batch} seq={seq} heads={heads} kv_heads={kv_heads} head_dim={head_dim} \
v_head_dim={v_head_dim} {dtype} {mask}
topology test sha256:0123456789abcdef {levels}
group {group}
tp 1
mesh {group}
"""


@dataclass(frozen=True)
class Trained:
    """A differentiable schedule, as text.

    Attributes:
        mesh: `n=2 m=4`.
        forward: directives, separated by semicolons.
        backward: those of the section.
        problem: sizes, mask and order.
    """

    mesh: str
    forward: str
    backward: str
    problem: Problem

    @functools.cached_property
    def schedule(self) -> Schedule:
        """As parsed."""
        problem = problem_of(self.problem)
        sizes = {f: getattr(problem, f) for f in _SIZES}
        levels = " ".join(f"{each} wire 25GB/s" for each in self.mesh.split())
        text = _HEADER.format(levels=levels, group=self.mesh, **sizes)
        dims = ", ".join(each.partition("=")[0] for each in self.mesh.split())
        text += f"order S: {self.problem.order} over {dims}\n"
        lines = [*self.forward.split(";"), "backward", *self.backward.split(";")]
        return parse(text + "\n".join(line.strip() for line in lines) + "\n").schedule

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

    @property
    def late(self) -> functools.partial[str]:
        """The module's text as an argument of `Ranks.add`: emitted just before the fork."""
        return functools.partial(getattr, self, "text")


_SIZES = ("batch", "seq", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "mask")


def check_gradients(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype
) -> tuple[float, ...]:
    """out, dq, dk and dv of this rank against float64; returns their largest errors."""
    module, mesh = setup(text)
    full = problem.inputs(dtype)
    random = torch.Generator().manual_seed(problem.seed + 1)
    value_dim = problem.value_dim or problem.head_dim
    shape = problem.batch, problem.seq, problem.heads, value_dim
    grad = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    want = expected(problem, full, grad)
    held = {name: held_tokens(module, mesh, problem, name) for name in ("q", "k", "v", "out")}
    own = [x.index_select(1, held[n]).requires_grad_() for n, x in zip("qkv", full, strict=True)]
    out = module.attention(*own, mesh, scale=problem.scale)
    out.backward(grad.index_select(1, held["out"]))
    got = [out.detach(), *(x.grad for x in own)]
    alone = one_device(module, problem, full, grad)
    errors = []
    for name, x, y, z in zip(("out", "q", "k", "v"), got, want, alone, strict=True):
        assert x.dtype == dtype, f"gradient of {name} is {x.dtype}"
        y, z = (each.index_select(1, held[name]) for each in (y, z))
        tolerance = numeric_cases.TOLERANCE[dtype]
        if dtype == torch.bfloat16:
            tolerance = 2.5 * (z.double() - y).abs().max().item() + 2e-3
        errors.append(numeric_cases.assert_close(x, y, tolerance, f"d{name}", problem))
    return tuple(errors)


def expected(problem: Problem, full: list[Tensor], grad: Tensor) -> list[Tensor]:
    """out and the gradients in float64."""
    inputs = [x.double().clone().requires_grad_() for x in full]
    out, _ = reference.attention(*inputs, problem.mask, scale=problem.scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.double())]


def one_device(module, problem: Problem, full: list[Tensor], grad: Tensor) -> list[Tensor]:
    """out and the gradients by the module's kernels, in one block."""
    q, k, v = full
    scale = q.shape[3] ** -0.5 if problem.scale is None else problem.scale
    out, lse = module._block_forward(q, k, v, scale, problem.causal)
    return [out, *module._block_backward(grad, q, k, v, out, lse, scale, problem.causal)]
