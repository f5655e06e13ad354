"""Checks of an emitted attention module, to be run on every rank by ranks.Ranks or run_ranks.

Every check takes (rank, world, text of the module, problem, ...); it asserts, with the seed in
the message, and returns what a test may want to compare further. The full inputs are made on
every rank from the problem's seed, and cut by reference.tokens_of, not by the module.

    RING = Ranks(4)
    RING.add("float64", check_forward, TEXT, Problem(seq=64, order="zigzag"), torch.float64)
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import math
import re
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import pytest
import reference
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


@dataclass(frozen=True)
class Problem:
    """One attention. Let its sizes and seq / ranks differ, so that mixed up dimensions fail."""

    seq: int
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 24
    value_dim: int | None = None  # head_dim if None
    batch: int = 2
    causal: bool = True
    order: str = "zigzag"
    scale: float | None = None
    seed: int = 20
    window: tuple[int, int] | None = None  # keys before and after a query
    seq_kv: int | None = None  # seq if None
    align: str | None = None  # of keys of their own: "top-left" or "bottom-right"

    def tokens(self, name: str) -> int:
        """How many a whole tensor has."""
        return self.seq if self.seq_kv is None or name not in ("k", "v") else self.seq_kv

    @property
    def offset(self) -> int:
        """The key that the first query stands at."""
        return self.tokens("k") - self.seq if self.align == "bottom-right" else 0

    @property
    def mask(self) -> reference.Mask:
        if self.window is not None:
            return reference.window(*self.window)
        return reference.causal if self.causal else reference.full

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """The full q, k and v: the same on every rank, rounded to dtype."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(self)
        return [x.to(dtype, copy=True) for x in _drawn(self)]


@functools.lru_cache(4)  # for one dtype after the other
def _drawn(problem: Problem) -> list[Tensor]:
    """q, k and v in float64."""
    random = torch.Generator().manual_seed(problem.seed)
    value_dim = problem.value_dim or problem.head_dim
    sizes = (problem.heads, problem.head_dim), (problem.kv_heads, problem.head_dim)
    pairs = zip("qkv", (*sizes, (problem.kv_heads, value_dim)), strict=True)
    shapes = [(problem.batch, problem.tokens(name), *size) for name, size in pairs]
    return [torch.randn(x, generator=random, dtype=torch.float64) for x in shapes]


# --- modules, meshes and slices -------------------------------------------------------------


def load_module(text: str, name: str = "") -> ModuleType:
    """Execute the text of an emitted module in a fresh module object."""
    name = name or named(text)
    path, code = f"<{name}>", compiled(text, name)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
    sys.modules[name] = module
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(code, vars(module))
    return module


@functools.cache
def compiled(text: str, name: str = "") -> CodeType:
    """The code of a module; called before the ranks are forked, they all have it."""
    return compile(text, f"<{name or named(text)}>", "exec")


def named(text: str) -> str:
    """A name for a module's text."""
    return "emitted_" + hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def setup(text: str) -> tuple[ModuleType, DeviceMesh | None]:
    """The module and its mesh on all ranks, made once a fork; all ranks call this in one order."""
    module = load_module(text)
    if module.WORLD_SIZE == 1:
        return module, None
    key = (str(module.MESH), *_OF_MESH.findall(text))
    if key not in _MESHES:
        _MESHES[key] = module.make_mesh()
    return module, _MESHES[key]


# Modules that make a mesh by the same lines share it: each costs new groups and their sockets.
_OF_MESH = re.compile(
    r"^def (?:make_mesh|_level_group_count|_new_group)\(.*\n(?:[ )].*\n|\n)*", re.MULTILINE
)
_MESHES: dict[tuple[str, ...], DeviceMesh] = {}


def place(mesh: DeviceMesh | None) -> int:
    """This rank's number within the mesh, row-major."""
    number = 0
    if mesh is not None:
        for coordinate, size in zip(mesh.get_coordinate() or (), mesh.shape, strict=True):
            number = number * size + coordinate
    return number


def own_tokens(module: ModuleType, mesh: DeviceMesh | None, problem: Problem) -> Tensor:
    """Global positions of this rank's tokens."""
    return reference.tokens_of(problem.order, place(mesh), module.WORLD_SIZE, problem.seq)


def held_tokens(module: ModuleType, mesh: DeviceMesh | None, problem: Problem, name: str) -> Tensor:
    """Global positions of the tokens that this rank holds of a tensor: its own, or all."""
    whole = problem.tokens(name)
    if mesh is None:
        return torch.arange(whole)
    ranked = [i for i in range(mesh.ndim) if any(_cuts(module, x, i) for x in module.PLACEMENTS)]
    sizes = [mesh.shape[i] for i in ranked]
    held = []
    for rank, at in enumerate(product(*map(range, sizes))):
        own = zip(ranked, at, strict=True)
        if all(mesh.get_local_rank(i) == x or not _cuts(module, name, i) for i, x in own):
            tokens = reference.tokens_of(problem.order, rank, math.prod(sizes), whole)
            held.append(tokens)
    return torch.cat(held).sort().values


def _cuts(module: ModuleType, name: str, index: int) -> bool:
    """Whether a mesh dimension splits the sequence of a tensor; of slices all dimensions do."""
    place, sequences = module.PLACEMENTS[name][index], getattr(module, "_SEQUENCE", None)
    return place == sequences[name] if sequences else place.is_shard()


def held_rest(module: ModuleType, mesh: DeviceMesh | None, name: str, x: Tensor) -> Tensor:
    """What this rank holds of a tensor's heads and batch."""
    for index, place in enumerate(module.PLACEMENTS[name]):
        if place.is_shard() and not _cuts(module, name, index):
            x = x.chunk(mesh.shape[index], place.dim)[mesh.get_local_rank(index)]
    return x


def own_inputs(
    module: ModuleType, mesh: DeviceMesh | None, problem: Problem, dtype: torch.dtype
) -> list[Tensor]:
    """What this rank holds of q, k and v, contiguous."""
    full = zip("qkv", problem.inputs(dtype), strict=True)
    tokens = {name: held_tokens(module, mesh, problem, name) for name in "qkv"}
    cut = ((name, x.index_select(1, tokens[name])) for name, x in full)
    return [held_rest(module, mesh, name, x).clone() for name, x in cut]


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str, problem: Problem) -> float:
    """The largest difference; an error if it is above the tolerance or not finite."""
    where = f"{what}, {problem}"
    assert got.shape == want.shape, f"{where}: {tuple(got.shape)}, must be {tuple(want.shape)}"
    got, want = got.double(), want.double()
    same = got == want  # also -inf and -inf
    error = (got - want).abs().masked_fill(same, 0).max().item()
    assert error <= tolerance, f"{where}: off by {error:.3g}, allowed {tolerance:.3g}"
    return error


def assert_refused(call: Callable[[], Any], *words: Any, error: Any = ValueError) -> str:
    """Check that a call raises, and that the message has all the words; return the message."""
    try:
        call()
    except error as refusal:
        message = str(refusal)
    else:
        raise AssertionError(f"not refused; should raise {error}, with {words} in the message")
    missing = [word for word in words if str(word) not in message]
    assert not missing, f"the message {message!r} does not name {missing}"
    return message


# --- results --------------------------------------------------------------------------------


def check_forward(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype
) -> tuple[float, float]:
    """out and lse against the reference; returns their largest errors."""
    module, mesh = setup(text)
    return compare(module, mesh, problem, problem.inputs(dtype), TOLERANCE[dtype])


def compare(
    module: ModuleType,
    mesh: DeviceMesh | None,
    problem: Problem,
    inputs: Sequence[Tensor],
    tolerance: float,
) -> tuple[float, float]:
    """Run attention on this rank's slices of the full inputs and compare out and lse."""
    held = {name: held_tokens(module, mesh, problem, name) for name in module.PLACEMENTS}
    cut = ((name, x.index_select(1, held[name])) for name, x in zip("qkv", inputs, strict=True))
    q, k, v = (held_rest(module, mesh, name, x).clone() for name, x in cut)
    before = [x.clone() for x in (q, k, v)]
    options: dict[str, Any] = {"scale": problem.scale, "seq": problem.seq}
    if problem.window is not None:
        options["window"] = problem.window
    if problem.seq_kv is not None:
        options["seq_kv"] = problem.seq_kv
    out, lse = module.attention(q, k, v, mesh, **options, return_lse=True)
    rows = held["out"]
    want_out, want_lse = reference.attention(
        inputs[0].index_select(1, rows),
        *inputs[1:],
        problem.mask,
        scale=problem.scale,
        q_positions=rows + problem.offset,
    )
    want_out, want_lse = (
        held_rest(module, mesh, name, x) for name, x in (("out", want_out), ("lse", want_lse))
    )
    errors = (
        assert_close(out, want_out, tolerance, "out", problem),
        assert_close(lse, want_lse, tolerance, "lse", problem),
    )
    assert out.dtype == q.dtype, f"out is {out.dtype}"
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32), f"lse is {lse.dtype}"
    same = all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
    assert same, "attention changed its inputs"
    alone = module.attention(q, k, v, mesh, **options)
    assert_close(alone, out, tolerance, "out without return_lse", problem)
    return errors


def check_layout(rank: int, world: int, text: str, problem: Problem) -> None:
    """The module's helpers and PLACEMENTS against the independent token order."""
    module, mesh = setup(text)
    orders = [
        reference.tokens_of(problem.order, other, module.WORLD_SIZE, problem.seq)
        for other in range(module.WORLD_SIZE)
    ]
    tokens, stored = orders[place(mesh)], torch.cat(orders)
    positions = module.positions(problem.seq, mesh)
    assert positions.dtype == torch.int64 and torch.equal(positions, tokens), positions
    full = dict(zip("qkv", problem.inputs(torch.float32), strict=True))
    full["out"] = full["q"][..., :1] + full["v"][:, :, :1]  # [B, S, H, Dv]
    full["lse"] = full["q"].sum(-1).transpose(1, 2)
    assert set(module.PLACEMENTS) == set(full), set(module.PLACEMENTS)
    for name, x in full.items():
        dim, held = 2 if name == "lse" else 1, held_tokens(module, mesh, problem, name)
        local = x.index_select(dim, held)
        assert torch.equal(module.shard(name, x, mesh), local), f"shard {name}"
        assert torch.equal(module.unshard(name, local, mesh), x), f"unshard {name}"
        if len(held) == problem.seq > len(tokens):
            assert torch.equal(_placed(x, module.PLACEMENTS[name], mesh), x), f"PLACEMENTS {name}"
            continue
        assert torch.equal(module.shard_sequence(x, mesh, dim), local), f"shard_sequence {name}"
        assert torch.equal(module.unshard_sequence(local, mesh, dim), x), f"unshard_sequence {name}"
        placed = _placed(x.index_select(dim, stored), module.PLACEMENTS[name], mesh)
        assert torch.equal(placed, local), f"PLACEMENTS of {name}"
    ids = torch.arange(problem.seq)
    assert torch.equal(module.shard_sequence(ids, mesh, dim=0), tokens)
    assert torch.equal(module.unshard_sequence(tokens, mesh, dim=0), ids)


def _placed(x: Tensor, placements: Sequence[Any], mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of a tensor, as DTensor cuts it."""
    if mesh is None:
        assert not placements, placements
        return x
    return distribute_tensor(x, mesh, placements, src_data_rank=None).to_local()


def check_large_gaps(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype
) -> None:
    """B02: lse of different ranks' keys more than 300 apart, both ways: still right."""
    module, mesh = setup(text)
    q, k, v = problem.inputs(dtype)
    q = (q.double() * 500).to(dtype)
    owners = [
        reference.tokens_of(problem.order, owner, module.WORLD_SIZE, problem.seq)
        for owner in range(module.WORLD_SIZE)
    ]
    first, last = (
        reference.attention(q, k[:, x], v[:, x], scale=problem.scale)[1]
        for x in owners[:: len(owners) - 1]
    )
    gap = first - last
    assert gap.min() < -300 and gap.max() > 300, f"gaps only {gap.min()} to {gap.max()}"
    top = reference.attention(q, k, v, scale=problem.scale)[1].abs().max().item()
    compare(module, mesh, problem, (q, k, v), TOLERANCE[dtype] * max(1.0, top / 10))


def check_views(rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype) -> None:
    """B47: inputs that are not contiguous give what contiguous ones give."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, dtype)
    sizes = [x.shape[2] * x.shape[3] for x in local]
    parts = torch.cat([x.flatten(2) for x in local], -1).split(sizes, -1)
    views = {
        "transposed": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local],
        "fused qkv": [p.unflatten(2, x.shape[2:]) for p, x in zip(parts, local, strict=True)],
        "head size first": [x.transpose(1, 3).contiguous().transpose(1, 3) for x in local],
        "expanded": [x[:1].expand_as(x) for x in local],
    }
    for name, view in views.items():
        assert not any(x.is_contiguous() for x in view), name
        got = module.attention(*view, mesh, return_lse=True)
        want = module.attention(*(x.contiguous() for x in view), mesh, return_lse=True)
        for x, y in zip(got, want, strict=True):
            assert_close(x, y, TOLERANCE[dtype], name, problem)


def check_sees_others(rank: int, world: int, text: str, problem: Problem) -> None:
    """B74: another K/V on one rank changes exactly the rows of all ranks that see its tokens."""
    module, mesh = setup(text)
    me, tokens = place(mesh), own_tokens(module, mesh, problem)
    q, k, v = own_inputs(module, mesh, problem, torch.float64)
    base = module.attention(q, k, v, mesh, return_lse=True)
    for other in range(module.WORLD_SIZE):
        theirs = reference.tokens_of(problem.order, other, module.WORLD_SIZE, problem.seq)
        mine = other == me
        changed = module.attention(q, -k if mine else k, v + mine, mesh, return_lse=True)
        sees = problem.mask(tokens[:, None], theirs[None, :]).any(1)
        out, lse = ((x - y).abs() > 1e-9 for x, y in zip(changed, base, strict=True))
        where = f"rank {other}'s k and v changed, rank {me}'s rows, {problem}"
        assert torch.equal(out.any(-1).any(-1).any(0), sees), f"out: {where}"
        assert torch.equal(lse.any(0).any(0), sees), f"lse: {where}"


# --- groups and meshes ----------------------------------------------------------------------


def check_groups(
    rank: int, world: int, text: str, problem: Problem, *groups: list[int], repeat: int = 1
) -> None:
    """B16, B40: on disjoint process groups at once, in the order given, each with its own data.

    Several such cases with different groups on one fork are a test too: ranks then have made
    different numbers of groups, from which torch derives names for locally synchronized ones.
    """
    module = load_module(text)
    for _ in range(repeat):
        made = [dist.new_group(ranks, sort_ranks=False) for ranks in groups]
        for number, ranks in enumerate(groups):
            if rank not in ranks:
                continue
            mesh = module.make_mesh(made[number])
            assert place(mesh) == ranks.index(rank), f"place {place(mesh)} in {ranks}"
            mine = replace(problem, seed=problem.seed + number)
            compare(module, mesh, mine, mine.inputs(torch.float64), TOLERANCE[torch.float64])
            expected = own_tokens(module, mesh, mine)
            assert torch.equal(module.positions(problem.seq, mesh), expected)


def check_slice(rank: int, world: int, text: str, problem: Problem) -> None:
    """B42: on a slice of the mesh (dp, *MESH) of all ranks, every replica with its own data."""
    module = load_module(text)
    shape, names = tuple(module.MESH.values()), tuple(module.MESH)
    dp = world // math.prod(shape)
    whole = dist.init_device_mesh("cpu", (dp, *shape), mesh_dim_names=("dp", *names))
    mesh = whole[names if len(names) > 1 else names[0]]
    assert place(mesh) == rank % module.WORLD_SIZE
    mine = replace(problem, seed=problem.seed + whole.get_local_rank("dp"))
    compare(module, mesh, mine, mine.inputs(torch.float64), TOLERANCE[torch.float64])


def check_wrong_world(rank: int, world: int, text: str, problem: Problem) -> None:
    """B92: started on another number of ranks: refused with both numbers, before any message."""
    module = load_module(text)
    assert world != module.WORLD_SIZE
    assert_refused(module.make_mesh, module.WORLD_SIZE, world)
    name = next(iter(module.MESH), "x")
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
    q, k, v = (x[:, :32] for x in problem.inputs(torch.float32))
    with recorded(module) as calls:
        assert_refused(lambda: module.attention(q, k, v, mesh), world, *module.MESH.values())
    assert not calls, calls


# --- refusals -------------------------------------------------------------------------------


def check_refusals(rank: int, world: int, text: str, problem: Problem) -> None:
    """B24: bad arguments raise ValueError on all ranks, before any message; good ones then work."""
    module, mesh = setup(text)
    q, k, v = own_inputs(module, mesh, problem, torch.float32)
    short = q.shape[1] // 2
    bad = {
        "seq": ((q, k, v), problem.seq + module.WORLD_SIZE, (q.shape[1],)),
        "full length": (problem.inputs(torch.float32), problem.seq, (problem.seq,)),
        "k shorter": ((q, k[:, :short], v), None, (short,)),
        "v shorter": ((q, k, v[:, :short]), None, (short,)),
        "another batch": ((q, k[:1], v[:1]), None, ()),
        "another head size": ((q, k[..., :-1], v), None, (k.shape[3] - 1,)),
        "heads of k and v": ((q, k, v[:, :, :1]), None, ()),
        "no multiple": ((q[:, :, :-1], k, v), None, (q.shape[2] - 1,)),
        "three dimensions": ((q[0], k[0], v[0]), None, ()),
        "no dtype in common": ((q, k.double(), v.double()), None, ()),
        "dtype of v": ((q, k, v.half()), None, ()),
        "integers": ((q.long(), k.long(), v.long()), None, ("int64",)),
    }
    if module.WORLD_SIZE == 1:
        del bad["full length"]
    for name, (inputs, seq, words) in bad.items():
        with recorded(module) as calls:
            try:
                assert_refused(lambda x=inputs, s=seq: module.attention(*x, mesh, seq=s), *words)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        assert not calls, f"{name}: refused only after {calls}"
    if module.WORLD_SIZE > 1:
        uneven = torch.arange(problem.seq + 1)
        assert_refused(lambda: module.shard_sequence(uneven, mesh, dim=0), problem.seq + 1)
    compare(module, mesh, problem, problem.inputs(torch.float32), TOLERANCE[torch.float32])


def check_check_inputs(rank: int, world: int, text: str, problem: Problem) -> None:
    """B24: check_inputs raises on all ranks if one of them holds another length or batch."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    module.check_inputs(*local, mesh)
    odd = place(mesh) == module.WORLD_SIZE - 1
    for cut in (
        lambda x: x[:, : x.shape[1] // 2],
        lambda x: x[:, : x.shape[1] - 1],  # no legal length
        lambda x: x[:1],
    ):
        mine = [cut(x) if odd else x for x in local]
        assert_refused(lambda x=mine: module.check_inputs(*x, mesh))
    module.check_inputs(*local, mesh)


def check_positions(rank: int, world: int, text: str, problem: Problem) -> None:
    """B73: tokens in another order than the schedule's are found, on all ranks alike."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    right, mine = module.positions(problem.seq, mesh), place(mesh)
    module.check_inputs(*local, mesh, right)
    module.check_inputs(*local, mesh, right.int())
    plain = torch.arange(problem.seq).chunk(module.WORLD_SIZE)[mine]  # as the data has them
    assert_refused(lambda: module.check_inputs(*local, mesh, plain), "hold other tokens than")
    other = right.flip(0) if mine == 1 else right
    assert_refused(lambda: module.check_inputs(*local, mesh, other), "ranks [1] hold other tokens")
    none = None if mine == 1 else right
    assert_refused(lambda: module.check_inputs(*local, mesh, none), ", where of ranks")


def check_no_backward(rank: int, world: int, text: str, problem: Problem) -> None:
    """Emitted without backward: an input that wants a gradient is refused, unless none is kept."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    words, errors = "emitted without backward", (RuntimeError, ValueError)
    for number in range(3):
        mine = [x.clone().requires_grad_(i == number) for i, x in enumerate(local)]
        assert_refused(lambda x=mine: module.attention(*x, mesh), words, error=errors)
        with torch.no_grad():
            module.attention(*mine, mesh)
    with torch.inference_mode():
        module.attention(*mine, mesh)


def check_single(text: str, problem: Problem, dtype: torch.dtype) -> None:
    """B83: emitted for one rank: no process group, no mesh, no call; runs in this process."""
    assert not dist.is_initialized()
    module = load_module(text)
    assert module.WORLD_SIZE == 1
    with recorded(module) as calls:
        compare(module, None, problem, problem.inputs(dtype), TOLERANCE[dtype])
    assert not calls, calls


# --- communication, memory, time ------------------------------------------------------------

KINDS = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "batch_isend_irecv": "p2p",
    "broadcast": "broadcast",
    "recv": "recv",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "send": "send",
}


class Call(NamedTuple):
    """One call of torch.distributed, as one rank makes it."""

    kind: str  # a value of KINDS
    ranks: tuple[int, ...]  # of the group, as global ranks, in the group's order
    ops: tuple[tuple[str, int, int], ...]  # p2p: ("send" or "recv", peer's rank in group, bytes)
    sent: int  # bytes of the input; p2p: of all sends
    received: int  # bytes of the output; p2p: of all receives
    reduce: str = ""  # "SUM", "MAX", ...


def record_call(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype, return_lse: bool = False
) -> list[Call]:
    """What one attention call of this rank sends and receives, in order."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, dtype)
    with recorded(module) as calls:
        module.attention(*local, mesh, scale=problem.scale, return_lse=return_lse)
    return calls


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[Call]]:
    """Collect the calls of torch.distributed."""
    calls: list[Call] = []

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append(_describe(KINDS[name], bound.arguments))
            return original(*args, **kwargs)

        return call

    with patched(module, tuple(KINDS), wrap):
        yield calls


@contextmanager
def patched(
    module: ModuleType, names: Sequence[str], wrap: Callable[[str, Callable[..., Any]], Any]
) -> Iterator[None]:
    """Wrap functions of torch.distributed, also where the module holds them itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            original = getattr(dist, name, None)
            if original is None:
                continue
            replacement = wrap(name, original)
            patch.setattr(dist, name, replacement)
            for own, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, own, replacement)
        yield


def _describe(kind: str, arguments: dict[str, Any]) -> Call:
    if kind == "p2p":
        batch = arguments["p2p_op_list"]
        group = batch[0].group
        assert all(op.group is group for op in batch), "one batch, two groups"
        assert all(op.tensor.is_contiguous() for op in batch), "a buffer is not contiguous"
        ops = tuple(
            (op.op.__name__[1:], dist.get_group_rank(group, op.peer), op.tensor.nbytes)
            for op in batch
        )
        sent, received = (sum(x[2] for x in ops if x[0] == way) for way in ("send", "recv"))
    else:
        group = arguments.get("group") or dist.group.WORLD
        values = [x if isinstance(x, list) else [x] for x in arguments.values()]
        tensors = [x for x in values if x and all(isinstance(y, Tensor) for y in x)]
        sizes = [sum(y.nbytes for y in x) for x in tensors] or [0]
        ops, received, sent = (), sizes[0], sizes[-1]
    reduce = getattr(arguments.get("op"), "name", "")
    return Call(kind, tuple(dist.get_process_group_ranks(group)), ops, sent, received, reduce)


class PeakBytes(TorchDispatchMode):
    """Live bytes of tensors: the given ones and all that are made inside, each storage once."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()
        for x in tensors:
            self._track(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: set[int] = set()  # what an op is given and nothing here has made was there before
        tree_map_only(Tensor, lambda x: given.add(x.untyped_storage()._cdata), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, lambda x: self._track(x, given), result)
        return result

    def _track(self, x: Tensor, given: Collection[int] = ()) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen and key not in given:
            self._seen.add(key)
            weakref.finalize(storage, self._free, key, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def peak_bytes(
    rank: int, world: int, text: str, problem: Problem, dtype: torch.dtype, return_lse: bool = False
) -> int:
    """B44: the most bytes alive during one call, q, k and v included; not inside an aten op."""
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, dtype)
    collectives = [name for name, kind in KINDS.items() if kind != "p2p"]
    with patched(module, collectives, _let_go), PeakBytes(*local) as memory:
        module.attention(*local, mesh, scale=problem.scale, return_lse=return_lse)
    return memory.peak


def _let_go(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A collective after which gloo holds its tensors no longer than its caller and handle do.

    The thread that ran it drops its own references only some time after the wait is over, when
    the caller may have made new tensors. So it gets aliases, and their end is waited for.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        held: list[Any] = []
        tree_map_only(Tensor, lambda x: held.append(torch._C._WeakTensorRef(x)), (args, kwargs))
        work = original(*args, **kwargs)
        del args, kwargs
        handle = _Handle(work, held)
        return handle if work is not None else None

    return call


class _Handle:
    """A collective's handle; its end waits until nobody holds the aliases."""

    def __init__(self, work: Any, held: list[Any]) -> None:
        self.work, self.held = work, held

    def wait(self, *args: Any) -> Any:
        """Wait for the collective."""
        return self.work.wait(*args)

    def __del__(self) -> None:
        self.work = None
        deadline = time.monotonic() + 10
        while not all(x.expired() for x in self.held) and time.monotonic() < deadline:
            time.sleep(0.0005)


class _Late:
    """A transfer that ends no sooner than at a given time."""

    def __init__(self, work: Any, end: float) -> None:
        self.work, self.end = work, end

    def wait(self, *args: Any) -> Any:
        """Wait for both."""
        time.sleep(max(0.0, self.end - time.monotonic()))
        return self.work.wait(*args)


def _slowed(seconds: float, blocks: list[float], transfers: list[float]) -> tuple[Any, Any]:
    """Wrappers that make a block and a transfer take that long, and note that they ran."""

    def slow_block(original: Callable[..., Any]) -> Callable[..., Any]:
        def block(*args: Any, **kwargs: Any) -> Any:
            blocks.append(time.monotonic())
            time.sleep(seconds)
            return original(*args, **kwargs)

        return block

    def slow_transfer(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(*args: Any, **kwargs: Any) -> Any:
            transfers.append(end := time.monotonic() + seconds)
            works = original(*args, **kwargs)
            if works is None:  # a blocking collective
                time.sleep(max(0.0, end - time.monotonic()))
                return None
            return [_Late(x, end) for x in works] if isinstance(works, list) else _Late(works, end)

        return transfer

    return slow_block, slow_transfer


def check_overlap(
    rank: int,
    world: int,
    text: str,
    problem: Problem,
    seconds: float = 0.1,
    names: Sequence[str] = ("batch_isend_irecv",),
) -> tuple[float, int, int]:
    """B61: with every block and every transfer taking `seconds`, transfers hide under blocks.

    Returns:
        the least time taken, the blocks computed and the transfers started.
    """
    module, mesh = setup(text)
    local = own_inputs(module, mesh, problem, torch.float32)
    blocks: list[float] = []  # when each began
    transfers: list[float] = []
    slow_block, slow_transfer = _slowed(seconds, blocks, transfers)

    def timed() -> float:
        """Of the slowest rank."""
        dist.barrier()
        start = time.monotonic()
        module.attention(*local, mesh)
        taken = torch.tensor(time.monotonic() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    bare, taken, limit = timed(), math.inf, 0.0
    for _ in range(6):  # a busy machine makes it longer, never shorter
        blocks.clear()
        transfers.clear()
        with patched(module, names, slow_transfer), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_block_forward", slow_block(module._block_forward))
            taken = min(taken, timed())
        compute, moving = len(blocks) * seconds, len(transfers) * seconds
        assert compute and moving, "nothing to overlap"
        limit = max(compute, moving) + min(compute, moving) / 2 + min(4 * bare, seconds / 2)
        if taken < limit:
            break
    text = f"{taken:.3f} s for {len(blocks)} blocks, {len(transfers)} transfers of {seconds} s"
    assert taken < limit, f"{text}, allowed {limit:.3f}"
    return taken, len(blocks), len(transfers)
