"""Attention over ranks as others wrote it, and as modules emitted here, behind one interface.

Each system attends over [B, S, H, D] tensors that it cuts itself, and is differentiable. torch's
templates are private: they were read in torch 2.13.0, and another version may not have them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Cut = Callable[[Tensor], Tensor]
aten = torch.ops.aten


class System(NamedTuple):
    """What a rank runs.

    Attributes:
        attend: q, k, v of this rank [B, s, H, D] -> out [B, s, H, D].
        cut: a whole tensor [B, S, H, D] -> this rank's part.
    """

    attend: Attend
    cut: Cut


class Peer(NamedTuple):
    """A system by name, made on every rank of a started process group.

    Attributes:
        name: as the table prints it.
        needs: the package that must be installed, or "".
        make: the function that makes it; it may start process groups, on all ranks alike.
        dtypes: in which it is right (`why` says what goes wrong in others).
        why: of the dtypes.
    """

    name: str
    needs: str
    make: Callable[[], System]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    why: str = ""


def ours(name: str, path: Path) -> Peer:
    """A module emitted for the group's size."""

    def make() -> System:
        spec = spec_from_file_location(path.stem, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        mesh = module.make_mesh(device_type="cpu")
        return System(
            lambda q, k, v: module.attention(q, k, v, mesh),
            lambda x: module.shard_sequence(x, mesh),
        )

    return Peer(name, "", make)


# --- torch ---------------------------------------------------------------------------------------


def _torch_ring(rotation: str) -> Callable[[], System]:
    def make() -> System:
        from torch.distributed.tensor.experimental import _attention
        from torch.distributed.tensor.experimental._context_parallel import _attention as templates

        _attention.set_rotate_method(rotation)
        templates._cp_options.enable_load_balance = True
        function = _ring_function(templates)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            return function.apply(q, k, v).transpose(1, 2)

        return System(attend, zigzag)

    return make


def _ring_function(templates: ModuleType) -> type[torch.autograd.Function]:
    """torch's ring templates around its CPU kernel; on GPUs they are reached through SDPA."""

    def block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **more: Any) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=more.get("scale")
        )

    def block_backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
        **more: Any,
    ) -> Any:
        kept = query, key, value, out, logsumexp
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, *kept, 0.0, is_causal, scale=more.get("scale")
        )

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = dist.group.WORLD
            found = templates._templated_ring_attention(group, 2, block, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, *found)
            return found[0]

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            given = grad_out.contiguous(), "grad_out", q, k, v, out, lse.contiguous(), True
            group = dist.group.WORLD
            return templates._templated_ring_attention_backward(group, 2, block_backward, *given)

    return Ring


# --- ring-flash-attn -----------------------------------------------------------------------------


def _ring_flash(file: str, call: str, cut: Cut) -> Callable[[], System]:
    def make() -> System:
        function = getattr(_ring_flash_module(file), call)
        return System(lambda q, k, v: function(q, k, v, causal=True), cut)

    return make


def _llama3() -> System:
    """Keys and values of some heads gathered at a time; one sequence a call."""
    module = _ring_flash_module("llama3_flash_attn_varlen")
    rank, world = dist.get_rank(), dist.get_world_size()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = torch.tensor([0, q.shape[1] * world], dtype=torch.int32)
        found = module.llama3_flash_attn_prepare_cu_seqlens(ends, True, rank, world)
        given = dict(zip(_LLAMA3, found, strict=True), heads_k_stride=1, causal=True)
        call = module.llama3_flash_attn_varlen_func
        return torch.stack([call(*one, **given) for one in zip(q, k, v, strict=True)])

    return System(attend, contiguous)


_LLAMA3 = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")


def _ring_flash_module(file: str) -> ModuleType:
    """One file of ring-flash-attn 0.1.8, whose package imports names that transformers 5 lacks."""
    name = "ring_flash_attn"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = list(find_spec(name).submodule_search_locations)
        sys.modules[name] = package
    __import__(f"{name}.{file}")
    return sys.modules[f"{name}.{file}"]


# --- yunchang ------------------------------------------------------------------------------------


def _yunchang_ulysses() -> System:
    import yunchang
    from yunchang.kernels import AttnType

    module = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)
    return System(lambda q, k, v: module(q, k, v, causal=True), contiguous)


def _yunchang_hybrid() -> System:
    """Heads over two ranks, a zigzag ring over the others."""
    import yunchang
    from yunchang.kernels import AttnType

    rank, world = dist.get_rank(), dist.get_world_size()
    yunchang.set_seq_parallel_pg(2, world // 2, rank, world)
    module = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)
    place = yunchang.EXTRACT_FUNC_DICT["zigzag"]
    return System(
        lambda q, k, v: module(q, k, v, causal=True),
        lambda x: place(x, rank, world_size=world, rd=world // 2, ud=2).contiguous(),
    )


# --- which tokens a rank owns --------------------------------------------------------------------


def contiguous(x: Tensor) -> Tensor:
    """[B, S, H, D] -> this rank's run [B, S / ranks, H, D]"""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def zigzag(x: Tensor) -> Tensor:
    """[B, S, H, D] -> chunks `rank` and `2 ranks - 1 - rank` of it"""
    parts, rank = x.chunk(2 * dist.get_world_size(), 1), dist.get_rank()
    return torch.cat([parts[rank], parts[-1 - rank]], 1)


def striped(x: Tensor) -> Tensor:
    """[B, S, H, D] -> every ranks-th token"""
    return x[:, dist.get_rank() :: dist.get_world_size()].contiguous()


_ALIASED = ("bfloat16",)
_SAID = "in float32 its buffers of gradients are written while they are sent"
PEERS = (
    Peer("torch ring, all-gather", "", _torch_ring("allgather")),
    Peer("torch ring, all-to-all", "", _torch_ring("alltoall")),
    Peer(
        "ring-flash-attn ring",
        "ring_flash_attn",
        _ring_flash("ring_flash_attn", "ring_flash_attn_func", contiguous),
        _ALIASED,
        _SAID,
    ),
    Peer(
        "ring-flash-attn zigzag",
        "ring_flash_attn",
        _ring_flash("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func", zigzag),
        _ALIASED,
        _SAID,
    ),
    Peer(
        "ring-flash-attn stripe",
        "ring_flash_attn",
        _ring_flash("stripe_flash_attn", "stripe_flash_attn_func", striped),
        _ALIASED,
        _SAID,
    ),
    Peer("ring-flash-attn llama3", "ring_flash_attn", _llama3),
    Peer("yunchang Ulysses", "yunchang", _yunchang_ulysses),
    Peer("yunchang USP 2 x ring", "yunchang", _yunchang_hybrid, _ALIASED, _SAID),
)
