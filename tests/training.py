"""Checks of differentiable modules as trainers use them, to be run on every rank by ranks.Ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import reference
import torch
import torch._dynamo  # before the fork: it takes long to import
import torch.distributed as dist
import torch.nn.functional as F
from differentiable import case_of, compare, one_device
from numeric_cases import (
    KINDS,
    PeakBytes,
    Problem,
    _let_go,
    assert_close,
    assert_refused,
    load_module,
    own_inputs,
    patched,
    place,
    recorded,
    setup,
)
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MIXED = (torch.float32, torch.float32, torch.bfloat16)  # q and k after a norm in float32


class Block(nn.Module):
    """Attention on views of one fused projection, as the last operation, in float64."""

    def __init__(self, attend: Attend, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.attend, self.heads, self.kv_heads, self.size = attend, heads, kv_heads, size
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * size, dtype=torch.float64)

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """x [B, S, width], and positions [S] for rotary ones -> [B, S, heads, size]"""
        heads = self.qkv(x).unflatten(2, (-1, self.size))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 2)
        if where is not None:
            q, k = rotated(q, where), rotated(k, where)
        assert not v.is_contiguous()
        return self.attend(q, k, v)


def block_of(text: str) -> tuple[ModuleType, Block, Tensor, Tensor]:
    """The module, a block around it, this rank's x [2, 8, 6], and a gradient of its result."""
    module, mesh = setup(text)
    torch.manual_seed(3)
    block = Block(lambda q, k, v: module.attention(q, k, v, mesh), 6, 16, 8, 4)
    random = torch.Generator().manual_seed(place(mesh))
    x = torch.randn(2, 8, 6, generator=random, dtype=torch.float64)
    grad_out = torch.randn(2, 8, 16, 4, generator=random, dtype=torch.float64)
    return module, block, x.requires_grad_(), grad_out


def gradients(block: Block, run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list:
    """Of x and the parameters, by one call."""
    return list(torch.autograd.grad(run(x), [x, *block.parameters()], grad))


def equal(got: list[Tensor], want: list[Tensor], what: str) -> None:
    """Bitwise, and none is zero."""
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(x, y) and x.any(), f"{what}: gradient {number}, {(x - y).abs().max()}"


# --- autocast, checkpoints, compilers -----------------------------------------------------------


def check_autocast(rank: int, world: int, text: str, problem: Problem) -> None:
    """q and k in float32, v in bfloat16: refused, but under autocast as torch's own attention."""
    case = case_of(text, problem, torch.float32)
    attention, mesh = case.module.attention, case.mesh
    pairs = zip(case.inputs, MIXED, strict=True)
    mixed = [x.detach().to(dtype).requires_grad_() for x, dtype in pairs]
    assert_refused(lambda: attention(*mixed, mesh), "float32", "bfloat16", "one floating dtype")
    narrow = [x.detach().bfloat16().requires_grad_() for x in mixed]
    grad = case.grad_out.bfloat16()
    want = attention(*narrow, mesh)
    slopes = torch.autograd.grad(want, narrow, grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention(*mixed, mesh, return_lse=True)
        heads = (x.detach().transpose(1, 2) for x in mixed)
        like = F.scaled_dot_product_attention(*heads, enable_gqa=True)
    assert out.dtype == like.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, want)
    for given in (grad, grad.float()):  # a loss may be in float32
        got = torch.autograd.grad(out, mixed, given, retain_graph=True)
        for x, y, of in zip(got, slopes, mixed, strict=True):
            assert x.dtype == of.dtype and torch.equal(x.to(y.dtype), y), of.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = [x.detach().double() for x in mixed]
        assert attention(*exact, mesh).dtype == torch.float64
        numbers = [x.int() for x in exact]
        assert_refused(lambda: attention(*numbers, mesh), "int32")
        assert_refused(lambda: attention(exact[0], *mixed[1:], mesh), "float64", "bfloat16")


def check_autocast_alone(rank: int, world: int, text: str, problem: Problem) -> None:
    """Forward only: what bfloat16 gives, out and the dtype and values of lse."""
    module, mesh = setup(text)
    inputs = own_inputs(module, mesh, problem, torch.float32)
    want = module.attention(*(x.bfloat16() for x in inputs), mesh, return_lse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module.attention(*inputs, mesh, return_lse=True)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def check_checkpoint(rank: int, world: int, text: str) -> list[int]:
    """Gradients through checkpoints; how often forward, backward and recomputation communicate."""
    module, block, x, grad = block_of(text)
    with recorded(module) as forward:
        out = block(x)
    with recorded(module) as backward:
        want = list(torch.autograd.grad(out, [x, *block.parameters()], grad))
    for reentrant in (False, True):
        for p in (x, *block.parameters()):
            p.grad = None
        with recorded(module) as calls:
            out = checkpoint(block, x, use_reentrant=reentrant)
        assert calls == forward, f"reentrant {reentrant}: forward"
        with recorded(module) as calls:
            out.backward(grad)
        assert calls == forward + backward, f"reentrant {reentrant}: backward"
        equal([p.grad for p in (x, *block.parameters())], want, f"reentrant {reentrant}")
    return [len(forward), len(backward)]


def check_flat_checkpoints(rank: int, world: int, text: str) -> None:
    """Fifty steps of a checkpoint whose last operation is the attention leave nothing alive."""
    module, block, x, grad = block_of(text)
    collectives = [name for name, kind in KINDS.items() if kind != "p2p"]
    for reentrant in (False, True):
        alive = []
        with patched(module, collectives, _let_go), PeakBytes(x, grad) as memory:
            for _ in range(50):
                checkpoint(block, x, use_reentrant=reentrant).backward(grad)
                for p in (x, *block.parameters()):
                    p.grad = None
                alive.append(memory.live)
        assert len(set(alive[1:])) == 1, alive


def check_compiled(rank: int, world: int, text: str, backend: str) -> None:
    """torch.compile around a model: the gradients are eager's; one whole graph is refused."""
    module, block, x, grad = block_of(text)
    with recorded(module) as eager:
        want = gradients(block, block, x, grad)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend)
    with recorded(module) as calls:
        equal(gradients(block, compiled, x, grad), want, backend)
    assert calls == eager
    torch._dynamo.reset()
    whole = torch.compile(block, backend=backend, fullgraph=True)
    words = "its transfers cannot be traced; compile without fullgraph=True"
    assert_refused(lambda: whole(x), words, error=torch._dynamo.exc.Unsupported)


def check_repeats(rank: int, world: int, text: str, problem: Problem) -> None:
    """Twenty steps of ranks that sleep at random: bitwise the same results."""
    module, mesh, inputs, grad, *_ = case_of(text, problem, torch.bfloat16)
    random = torch.Generator().manual_seed(rank)

    def late(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(float(torch.rand((), generator=random)) * 2e-3)
            return original(*args, **kwargs)

        return call

    def step() -> list[Tensor]:
        """out and gradients."""
        out = module.attention(*inputs, mesh)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    want = step()
    with patched(module, list(KINDS), late):
        for number in range(20):
            equal(step(), want, f"step {number}")


# --- numerics -----------------------------------------------------------------------------------


def check_errors(rank: int, world: int, text: str, problem: Problem) -> list[tuple[float, float]]:
    """Errors of out, dq, dk and dv in bfloat16, each with that of the kernel on one device."""
    case = case_of(text, problem, torch.bfloat16)
    out = case.module.attention(*case.inputs, case.mesh)
    out.backward(case.grad_out)
    got = [out.detach(), *(x.grad for x in case.inputs)]
    compare(case, got, problem, torch.bfloat16)
    trios = zip(got, case.alone, case.want, strict=True)
    return [tuple((x.double() - y).abs().max().item() for x in both) for *both, y in trios]


def check_gaps(rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype) -> None:
    """Scores in the thousands: gradients are finite, and as good as those of one device."""
    module, mesh = setup(text)
    q, k, v = problem.inputs(dtype)
    full = [(q.double() * 500).to(dtype), k, v]
    random = torch.Generator().manual_seed(problem.seed + 1)
    grad = torch.randn(*q.shape[:3], v.shape[3], generator=random).to(dtype)
    exact = [x.double().requires_grad_() for x in full]
    out, lse = reference.attention(*exact, problem.mask)
    assert lse.abs().max() > 300
    want = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    alone = one_device(module, problem, full, grad)
    own = [module.shard(name, x, mesh) for name, x in zip("qkv", full, strict=True)]
    own = [x.requires_grad_() for x in own]
    out = module.attention(*own, mesh)
    got = [out.detach(), *torch.autograd.grad(out, own, module.shard("out", grad, mesh))]
    names = zip(("out", "q", "k", "v"), got, want, alone, strict=True)
    for name, x, y, one in names:
        least = torch.finfo(dtype).eps * max(1.0, y.abs().max().item())
        allowed = 2.5 * (one.double() - y).abs().max().item() + least
        assert_close(x, module.shard(name, y, mesh), allowed, f"d{name}", problem)


def check_short(rank: int, world: int, text: str, problem: Problem, tokens: int) -> None:
    """A text that is shorter than the ranks need, padded: padding has no part in any gradient."""
    module, mesh = setup(text)
    full = [x[:, :tokens].clone().requires_grad_() for x in problem.inputs(torch.float64)]
    out, _ = reference.attention(*full, problem.mask)
    random = torch.Generator().manual_seed(problem.seed + 1)
    grad = torch.randn(out.shape, generator=random, dtype=torch.float64)
    want = [out, *torch.autograd.grad(out, full, grad)]
    own = [module.shard_sequence(module.pad_sequence(x.detach()), mesh) for x in full]
    own = [x.requires_grad_() for x in own]
    out = module.attention(*own, mesh)
    own_grad = module.shard_sequence(module.pad_sequence(grad), mesh)
    got = [out, *torch.autograd.grad(out, own, own_grad)]
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        whole = module.unshard_sequence(x.detach(), mesh)
        assert whole.shape[1] % world == 0 and whole.shape[1] > tokens
        assert_close(whole[:, :tokens], y.detach(), 1e-12, name, problem)
        assert name == "out" or not whole[:, tokens:].any(), f"{name} of padding"


# --- a model ------------------------------------------------------------------------------------

TOKENS, WIDTH, HEADS, KV_HEADS, SIZE = 11, 12, 4, 4, 6


class Toy(nn.Module):
    """Two layers with rotary positions and a loss over next tokens, in float64."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH, dtype=torch.float64)
        make = (Block(attend, WIDTH, HEADS, KV_HEADS, SIZE) for _ in range(2))
        self.blocks = nn.ModuleList(make)
        back = (nn.Linear(HEADS * SIZE, WIDTH, dtype=torch.float64) for _ in range(2))
        self.back = nn.ModuleList(back)

    def forward(self, tokens: Tensor, where: Tensor) -> Tensor:
        """Tokens [B, S] and their positions [S] -> scores [B, S, TOKENS]"""
        x = self.tokens(tokens)
        for block, back in zip(self.blocks, self.back, strict=True):
            x = x + torch.tanh(back(block(x, where).flatten(2)))
        return x @ self.tokens.weight.T


def summed(scores: Tensor, labels: Tensor) -> Tensor:
    """The loss, over labels that are not -100."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


def rotated(x: Tensor, where: Tensor) -> Tensor:
    """Rotary positions of x [B, S, H, D]."""
    half = x.shape[3] // 2
    angle = where[:, None].double() / 50.0 ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    early, late = x.split(half, 3)
    return torch.cat([early * cos - late * sin, late * cos + early * sin], 3)


def texts_of(dp: int) -> tuple[Tensor, Tensor]:
    """Tokens [2 dp, 32], and what counts of them as a label: unevenly spread."""
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(TOKENS, (2 * dp, 32), generator=random)
    labels = tokens.clone()
    labels[:, :9] = -100
    labels[0, 13:27] = -100
    return tokens, labels


def expected_slopes(dp: int) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one process that has all texts."""
    tokens, labels = texts_of(dp)
    torch.manual_seed(7)
    model = Toy(lambda q, k, v: reference.attention(q, k, v, reference.causal)[0])
    after = torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], 1)
    loss = summed(model(tokens, torch.arange(32)), after) / (after != -100).sum()
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


def check_toy(rank: int, world: int, text: str, wrapped: bool) -> float:
    """Parameter gradients on dp x MESH ranks are those of one process; returns the largest error.

    wrapped: by DistributedDataParallel, which takes the mean over ranks, not the sum.
    """
    module = load_module(text)
    shape, names = tuple(module.MESH.values()), tuple(module.MESH)
    dp = world // module.WORLD_SIZE
    every = dist.init_device_mesh("cpu", (dp, *shape), mesh_dim_names=("dp", *names))
    mesh: DeviceMesh = every[names if len(names) > 1 else names[0]]
    tokens, labels = (x.chunk(dp)[every.get_local_rank("dp")] for x in texts_of(dp))
    own, after = module.shard_sequence(tokens, mesh), module.shard_labels(labels, mesh)
    torch.manual_seed(7)
    model: nn.Module = Toy(lambda q, k, v: module.attention(q, k, v, mesh))
    count = (after != -100).sum()
    dist.all_reduce(count)
    run = nn.parallel.DistributedDataParallel(model) if wrapped else model
    loss = summed(run(own, module.positions(32, mesh)), after) / count
    (loss * world if wrapped else loss).backward()
    total, errors = loss.detach().clone(), []
    dist.all_reduce(total)
    want, slopes = expected_slopes(dp)
    assert abs(total.item() - want) < 1e-10, f"loss {total.item()}, must be {want}"
    for p, slope in zip(model.parameters(), slopes, strict=True):
        if not wrapped:
            dist.all_reduce(p.grad)
        assert p.grad.any()
        errors.append((p.grad - slope).abs().max().item())
    assert max(errors) < 1e-10, errors
    return max(errors)


def check_example(rank: int, world: int, text: str, example: str) -> None:
    """README's lines on training, with another module: the gradients of one process."""
    module = load_module(text, "attention_gqa_causal_train_a100x16")
    torch.manual_seed(7)
    model = Toy(lambda q, k, v: module.attention(q, k, v, scope["mesh"]))
    scope = {"model": model, "tokens": texts_of(1)[0], "dist": dist, "F": F}
    exec(example, scope)
    tokens = scope["tokens"]
    after = torch.cat([tokens[:, 1:], torch.full((len(tokens), 1), -100)], 1)
    torch.manual_seed(7)
    alone = Toy(lambda q, k, v: reference.attention(q, k, v, reference.causal)[0])
    (summed(alone(tokens, torch.arange(32)), after) / (after != -100).sum()).backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=0, atol=1e-10)


def check_labels(rank: int, world: int, text: str) -> None:
    """Every target but the first token is on the rank whose token it follows."""
    module, mesh = setup(text)
    tokens = torch.arange(1, 33).repeat(2, 1) + torch.tensor([[0], [100]])
    after = module.shard_labels(tokens, mesh)
    own = module.shard_sequence(tokens, mesh)
    last = own == tokens[:, -1:]
    assert torch.equal(after, torch.where(last, -100, own + 1)) and after.dtype == tokens.dtype
    whole = module.unshard_sequence(after, mesh)
    assert torch.equal(whole[:, :-1], tokens[:, 1:]) and (whole[:, -1] == -100).all()
    assert torch.equal(module.shard_labels(tokens[0], mesh, -1), torch.where(last, -1, after)[0])
    where = module.unshard_sequence(module.positions(32, mesh), mesh, dim=0)
    assert torch.equal(where, torch.arange(32))


def check_options(rank: int, world: int, text: str, problem: Problem, word: str) -> None:
    """What the schedule does not have cannot be asked for."""
    module, mesh, inputs, *_ = case_of(text, problem, torch.float64)
    with recorded(module) as calls:
        assert_refused(lambda: module.attention(*inputs, mesh, **{word: 1}), word, error=TypeError)
    assert not calls
