"""What is run on every rank of a module for packed documents, and what it must give.

Nothing here but the list of calls comes from mercurygen: a document is computed by itself, from its
own tokens, on one device in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import reference
import torch
from numeric_cases import TOLERANCE, Call, place, recorded, setup
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 8, 4, 24, 40


@dataclass(frozen=True)
class Packed:
    """Documents, and how they lie: lengths of 0 are documents too."""

    lengths: tuple[int, ...]
    order: str
    causal: bool = True
    seed: int = 20

    @property
    def seq(self) -> int:
        return sum(self.lengths)

    @property
    def borders(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of out, of all tokens: the same on every rank."""
        random = torch.Generator().manual_seed(self.seed)
        sizes = (HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)
        shapes = [(self.seq, *size) for size in sizes]
        return [torch.randn(x, generator=random, dtype=torch.float64).to(dtype) for x in shapes]

    def wanted(self, dtype: torch.dtype) -> list[Tensor]:
        """out [T, H, E], lse [T, H], and the gradients of q, k and v: document by document."""
        found: list[list[Tensor]] = []
        whole = self.inputs(dtype)
        full = [x for x in zip(self.borders, self.borders[1:], strict=False) if x[0] < x[1]]
        for start, stop in full:
            *given, grad_out = (x[None, start:stop].double() for x in whole)
            given = [x.requires_grad_() for x in given]
            mask = reference.causal if self.causal else reference.full
            out, lse = reference.attention(*given, mask)
            grads = torch.autograd.grad(out, given, grad_out)
            found.append([x.detach()[0] for x in (out, lse.transpose(1, 2), *grads)])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


def own(module: Any, mesh: Any, packed: Packed, x: Tensor) -> Tensor:
    """A rank's tokens of a whole tensor."""
    return x[reference.tokens_of(packed.order, place(mesh), module.WORLD_SIZE, packed.seq)]


def check_packed(
    rank: int, world: int, text: str, packed: Packed, dtype: torch.dtype, train: bool = False
) -> list[Call]:
    """One call of this rank: its results are right, and what it sent and received, in order."""
    module, mesh = setup(text)
    given = [own(module, mesh, packed, x) for x in packed.inputs(dtype)]
    borders = torch.tensor(packed.borders, dtype=torch.int32)
    if train:
        given = [*(x.requires_grad_() for x in given[:3]), given[3]]
    with recorded(module) as calls:
        out, lse = module.attention(*given[:3], borders, mesh, return_lse=True)
        got = [out.detach(), lse.transpose(0, 1)]
        if train:
            got += torch.autograd.grad(out, given[:3], given[3])
    names = ("out", "lse", "dq", "dk", "dv")
    for name, x, want in zip(names, got, packed.wanted(dtype), strict=False):
        mine = own(module, mesh, packed, want)
        assert x.shape == mine.shape, (name, x.shape, mine.shape, packed)
        error = (x.double() - mine).abs().max().item()
        assert error <= TOLERANCE[dtype], (name, error, packed)
    return calls


def check_all(
    rank: int,
    world: int,
    text: str,
    every: Sequence[Packed],
    dtype: torch.dtype,
    train: bool = False,
) -> list[list[Call]]:
    """The same of several packings."""
    return [check_packed(rank, world, text, packed, dtype, train) for packed in every]


def check_helpers(rank: int, world: int, text: str, packed: Packed) -> None:
    """Positions, labels, padding and balance, against plain loops over the documents."""
    module, mesh = setup(text)
    borders = torch.tensor(packed.borders)
    where = torch.tensor([i for length in packed.lengths for i in range(length)])
    assert torch.equal(module.document_positions(borders, mesh), own(module, mesh, packed, where))
    tokens = torch.arange(packed.seq) + 1000
    after = torch.tensor(
        [
            -100 if i + 1 == length else 1000 + start + i + 1
            for start, length in zip(packed.borders, packed.lengths, strict=False)
            for i in range(length)
        ]
    )
    want = own(module, mesh, packed, after)
    assert torch.equal(module.shard_labels(tokens, borders, mesh), want)
    assert torch.equal(module.shard_labels(tokens[None], borders, mesh), want[None])
    short = module.pad_documents(torch.tensor([0, 7]))
    assert short.tolist() == [0, 7, len(module.pad_sequence(torch.zeros(7), dim=0))]
    size = torch.tensor([n for n in packed.lengths for _ in range(n)])
    pairs = (where + 1 if packed.causal else size).tolist()
    for order in ("contiguous", "zigzag"):
        own_pairs = [
            sum(pairs[i] for i in reference.tokens_of(order, r, world, packed.seq))
            for r in range(world)
        ]
        want_ratio = max(own_pairs) * world / sum(own_pairs)
        assert abs(module.imbalance(borders, order == "zigzag") - want_ratio) < 1e-9


def check_refused(rank: int, world: int, text: str, packed: Packed) -> None:
    """Bad cu_seqlens: a ValueError on every rank, and nothing is sent."""
    module, mesh = setup(text)
    given = [own(module, mesh, packed, x) for x in packed.inputs(torch.float32)][:3]
    n = packed.seq
    bad: Sequence[tuple[Any, str]] = (
        (torch.tensor([1, n]), "from 0"),
        (torch.tensor([0, n - 1]), f"{n} tokens"),
        (torch.tensor([0, n + 1]), f"{n} tokens"),
        (torch.tensor([0, 5, 3, n]), "decreases"),
        (torch.tensor([0.0, n]), "int32 or int64"),
        (torch.tensor([0]), "documents + 1"),
        (torch.tensor([[0, n]]), "documents + 1"),
        ([0, n], "list"),
        (None, "NoneType"),
        (torch.tensor([0, n], device="meta"), "on the CPU"),
    )
    with recorded(module) as calls:
        for borders, words in bad:
            try:
                module.attention(*given, borders, mesh)
            except ValueError as error:
                assert words in str(error), (words, error)
            else:
                raise AssertionError(f"{borders} is taken")
    assert not calls
    right = torch.tensor(packed.borders)
    module.check_inputs(*given, right, mesh)
    other = torch.tensor([0, n]) if rank == 1 else right
    try:
        module.check_inputs(*given, other, mesh)
    except ValueError as error:
        assert "ranks [1] differ" in str(error) and "cu_seqlens" in str(error)
    else:
        raise AssertionError("cu_seqlens that differ are taken")


def check_dense_refuses(rank: int, world: int, text: str) -> None:
    """A module for one sequence takes no cu_seqlens, by position or by name."""
    module, mesh = setup(text)
    x = torch.zeros(2, 8, 4, 16)
    borders = torch.tensor([0, 16])
    for call in (
        lambda: module.attention(x, x, x, borders, mesh),
        lambda: module.attention(x, x, x, mesh, cu_seqlens=borders),
        lambda: module.attention(x, x, x, borders),
    ):
        try:
            call()
        except (TypeError, ValueError):
            continue
        raise AssertionError("a dense module took cu_seqlens")
