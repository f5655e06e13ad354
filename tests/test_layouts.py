"""Modules whose caller holds [B, H, S, D] or [S, B, H, D]: numbers, placements, refusals, copies.

What a caller holds is made here by `permute` of letters; nothing of mercurygen says how it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numeric_cases
import pytest
import reference
import torch
from command import SMALL, SMALL_NAME, folder, run
from differentiable import SAVE, Trained
from numeric_cases import Problem, assert_close, assert_refused, held_tokens, recorded, setup
from ranks import Ranks
from torch import Tensor
from torch.distributed import DeviceMesh

from mercurygen.cli.build import plans_of
from mercurygen.emit.callsites import check_text
from mercurygen.emit.module import emit
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.emit.words import mib
from mercurygen.operators import load
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse, show
from mercurygen.virtual.report import VirtualError
from mercurygen.virtual.run import play

ATTENTION = load("attention")
LAYOUTS = ("bshd", "bhsd", "sbhd")
SHAPES = {"bshd": "[B, S, H, D]", "bhsd": "[B, H, S, D]", "sbhd": "[S, B, H, D]"}
ROWS, HEADS = "parallelize S_q over", "parallelize H over"
RING, RINGS = "shift k, v: S_kv along", "shift k, v, dk, dv: S_kv along"
GATHER, GATHERS = "shard k, v: S_kv over", "shard k, v, dk, dv: S_kv over"
BURST = "parallelize S_kv over m;shift q, do, lse, out, dq: S_q along m"
OUTER = f"{SAVE} outer"

# (mesh, forward, backward); forward only where there is no backward
DESIGNS = {
    "ring": ("m=2", f"{ROWS} m;{RING} m", f"{RINGS} m"),
    "ring of 4": ("m=4", f"{ROWS} m;{RING} m", f"{RINGS} m"),
    "burst": ("m=2", f"{ROWS} m;{RING} m", BURST),
    "ulysses": ("m=2", f"{HEADS} m", f"{SAVE} inner"),
    "allgather": ("m=2", f"{ROWS} m;{GATHER} m", f"{GATHERS} m"),
    "unified": ("n=2 m=2", f"{ROWS} n;{HEADS} m;{RING} n", f"{RINGS} n"),
    "chunked ulysses": ("m=2", f"{HEADS} m;tile H by 2", OUTER),
    "chunked ring": ("m=2", f"{ROWS} m;{RING} m;tile H by 2", f"{RINGS} m;{OUTER}"),
    "direct ring": ("m=4", f"{ROWS} m;{RING} m direct", ""),
    "split-kv": (
        "m=2",
        "parallelize S_kv over m;shard q: S_q over m;shard out, lse: S_q over m",
        "",
    ),
    "heads first": ("m=2", f"{HEADS} m", ""),
    "chunked": ("m=2", f"{ROWS} m;{GATHER} m;tile H by 2", ""),
    "batch": ("m=2", "parallelize B over m", ""),
    "alone": ("", "", ""),
}
APART = Problem(seq=24, heads=8, kv_heads=4, head_dim=10, value_dim=6, batch=2)


@dataclass(frozen=True)
class Held:
    """A schedule whose caller holds its tensors in some layout."""

    design: str
    layout: str
    problem: Problem

    @functools.cached_property
    def schedule(self) -> Schedule:
        """As parsed from its text."""
        mesh, forward, backward = DESIGNS[self.design]
        made = Trained(mesh, forward, backward, self.problem, "float64").schedule
        made = replace(made, backward=made.backward if backward else None)
        made = replace(made, problem=replace(made.problem, layout=self.layout))
        return parse(show(made)).schedule

    @functools.cached_property
    def text(self) -> str:
        """The module, before black has formatted it."""
        forward, backward = plans_of(self.schedule)
        with patch("mercurygen.emit.module.format_text", str):
            return emit(
                forward.schedule, forward.plan, "tested", ATTENTION, backward and backward.plan
            )

    @property
    def late(self) -> functools.partial[str]:
        """`text` as an argument of `Ranks.add`: emitted just before the fork."""
        return functools.partial(getattr, self, "text")

    def check(self, text: str) -> int:
        """Events of a text that are the plans'."""
        forward, backward = plans_of(self.schedule)
        plans = forward.plan, None, backward and backward.plan
        return check_text(text, *plans, layout=self.layout).events


def equal(design: str) -> Problem:
    """B, a rank's S and H are equal, and so are the shapes of q, k and v in every layout."""
    count = max(1, len(DESIGNS[design][0].split())) * 2 if design != "ring of 4" else 4
    return Problem(seq=4 * count, heads=4, kv_heads=4, head_dim=8, batch=4)


CASES = {
    f"{design}, {layout}, {sizes}": Held(
        design, layout, replace(APART, seq=48) if "4" in design else APART
    )
    for design in DESIGNS
    for layout in LAYOUTS
    for sizes in ("apart", "equal")
    if layout != "bshd" or design in ("ring", "burst", "chunked ulysses")
}
CASES = {
    name: replace(held, problem=equal(held.design)) if name.endswith("equal") else held
    for name, held in CASES.items()
}


def world_of(held: Held) -> int:
    """Number of ranks."""
    return held.schedule.mesh.size


def as_held(layout: str, x: Tensor) -> Tensor:
    """Of [B, S, H, D], dense, what a caller of a layout holds; lse as it is."""
    return x.permute(["bshd".index(axis) for axis in layout]).contiguous() if x.ndim == 4 else x


# --- on the ranks -------------------------------------------------------------------------------


@contextmanager
def copies() -> Iterator[list[int]]:
    """Bytes of the copies that `contiguous` makes of tensors of four dimensions."""
    found: list[int] = []
    plain = torch.Tensor.contiguous

    def contiguous(x: Tensor, *args: object, **options: object) -> Tensor:
        if x.ndim == 4 and not x.is_contiguous():
            found.append(x.nbytes)
        return plain(x, *args, **options)

    with patch.object(torch.Tensor, "contiguous", contiguous):
        yield found


def check_held(
    rank: int, world: int, text: str, problem: Problem, layout: str, grads: bool
) -> list[int]:
    """out, lse and gradients of this rank against float64; bytes copied forward and backward."""
    module, mesh = setup(text)
    full = problem.inputs(torch.float64)
    inputs = [x.requires_grad_() for x in full] if grads else full
    out, lse = reference.attention(*inputs, problem.mask)
    random = torch.Generator().manual_seed(problem.seed + 1)
    grad = torch.randn(out.shape, generator=random, dtype=torch.float64)
    want = torch.autograd.grad(out, inputs, grad) if grads else ()
    whole = dict(zip("qkv", full, strict=True)) | {"out": out, "lse": lse, "grad": grad}
    whole |= dict(zip(("dq", "dk", "dv"), want, strict=False))

    def own(name: str) -> Tensor:
        """What this rank holds."""
        like = {"grad": "out", "dq": "q", "dk": "k", "dv": "v"}.get(name, name)
        x, tokens = whole[name].detach(), held_tokens(module, mesh, problem, like)
        return as_held(layout, x.index_select(2 if name == "lse" else 1, tokens))

    check_helpers(module, mesh, problem, layout, {name: whole[name].detach() for name in whole})
    given, grad = [own(name).requires_grad_(grads) for name in "qkv"], own("grad")
    with copies() as forward:
        got = module.attention(*given, mesh, seq=problem.seq, return_lse=True)
    pairs = dict(zip(("out", "lse"), got, strict=True))
    with copies() as backward:
        if grads:
            found = torch.autograd.grad(got[0], given, grad)
            pairs |= zip(("dq", "dk", "dv"), found, strict=True)
    check_itself(module, mesh)
    for name, x in pairs.items():
        assert_close(x.detach(), own(name), 1e-12, f"{name}, layout {layout}", problem)
    return [sum(forward), sum(backward)]


def check_itself(module: ModuleType, mesh: DeviceMesh | None) -> None:
    """The module's own checks."""
    for dtype in (torch.float64, torch.bfloat16):
        error, allowed = module._error(mesh, dtype)
        assert error <= allowed, f"{dtype}"
    if hasattr(module, "_blind"):
        assert not any(module._blind(mesh, other) for other in range(module.WORLD_SIZE))


def check_helpers(
    module: ModuleType,
    mesh: DeviceMesh | None,
    problem: Problem,
    layout: str,
    whole: dict[str, Tensor],
) -> None:
    """shard, unshard and PLACEMENTS, which DTensor cuts by."""
    order = [
        reference.tokens_of(problem.order, other, module.WORLD_SIZE, problem.seq)
        for other in range(module.WORLD_SIZE)
    ]
    stored = torch.cat(order) if module.WORLD_SIZE > 1 else torch.arange(problem.seq)
    for name, places in module.PLACEMENTS.items():
        dim, tokens = 2 if name == "lse" else 1, held_tokens(module, mesh, problem, name)
        x = as_held(layout, whole[name])
        local = as_held(layout, whole[name].index_select(dim, tokens))
        assert torch.equal(module.shard(name, x, mesh), local), f"shard {name}"
        assert torch.equal(module.unshard(name, local, mesh), x), f"unshard {name}"
        placed = numeric_cases._placed(
            as_held(layout, whole[name].index_select(dim, stored)), places, mesh
        )
        assert torch.equal(placed, local), f"PLACEMENTS of {name}"


def check_wrong(rank: int, world: int, text: str, problem: Problem, layout: str) -> None:
    """Tensors in another layout are refused by name, before anything is sent."""
    module, mesh = setup(text)
    own = [
        x.index_select(1, held_tokens(module, mesh, problem, name))
        for name, x in zip("qkv", problem.inputs(torch.float32), strict=True)
    ]
    for other in LAYOUTS:
        given = [as_held(other, x) for x in own]
        call = functools.partial(module.attention, *given, mesh, seq=problem.seq)
        if other == layout:
            assert call().shape == (*given[0].shape[:3], problem.value_dim)
            continue
        with recorded(module) as calls:
            message = assert_refused(call, str(tuple(given[0].shape)))
        assert not calls, f"{message} only after {calls}"
        assert f"layout {layout}, " in message, message
    with recorded(module) as calls:
        flat = [as_held(layout, x).flatten(0, 1) for x in own]
        assert_refused(lambda: module.attention(*flat, mesh), f"must be {SHAPES[layout]}")
    assert not calls


RANKS = {world: Ranks(world) for world in (2, 4)}
for _name, _held in CASES.items():
    if DESIGNS[_held.design][0]:
        _grads = bool(DESIGNS[_held.design][2])
        _more = _held.problem, _held.layout, _grads
        RANKS[world_of(_held)].add(_name, check_held, _held.late, *_more)
WRONG = [x for x in CASES if "apart" in x and "bshd" not in x and "alone" not in x]
for _name in WRONG:
    _held = CASES[_name]
    if not DESIGNS[_held.design][2]:
        RANKS[world_of(_held)].add(
            f"wrong {_name}", check_wrong, _held.late, _held.problem, _held.layout
        )


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    """out, lse and gradients; the helpers; and as many bytes copied as the docstring says."""
    held = CASES[name]
    if not DESIGNS[held.design][0]:
        check_held(0, 1, held.text, held.problem, held.layout, False)
        return
    ranks = RANKS[world_of(held)].result(name)
    if held.layout == "bshd":
        return
    plain = name.replace(held.layout, "bshd")  # copies out, which the kernel leaves as a view
    fewer = RANKS[world_of(held)].result(plain) if held.design == "burst" else [[0, 0]] * 4
    said = " ".join(held.text.split('"""')[1].split())
    assert f"out are {SHAPES[held.layout]} for the caller" in said
    made = zip(("a call copies", "its backward copies"), zip(*ranks, strict=True), strict=True)
    for what, found in made:
        most = max(found) - fewer[0][what.startswith("its")]
        assert (what in said) == bool(most), f"{what}, {found}: {said}"
        if most:
            assert mib(most) in said.partition(what)[2].split(" a rank")[0], f"{found}: {said}"


@pytest.mark.parametrize("name", [x for r in RANKS.values() for x in r.ids if "wrong" in x])
def test_another_layout(name: str) -> None:
    """Is refused."""
    RANKS[world_of(CASES[name.removeprefix("wrong ")])].result(name)


# --- the text, without ranks --------------------------------------------------------------------


@pytest.mark.parametrize("name", [x for x in CASES if "apart" in x])
def test_text(name: str) -> None:
    """Is what the plans say, on every rank."""
    assert CASES[name].check(CASES[name].text) > 3


INTO = "    q, k, v = (x.transpose{} for x in (q, k, v))  # [B, S, H, D] from here on\n"
SPOILED = {
    "not into": lambda text, pair: text.replace(INTO.format(pair), ""),
    "not back": lambda text, pair: text.replace(f"    out = out.transpose{pair}\n", ""),
    "only k": lambda text, pair: text.replace(INTO.format(pair), f"    k = k.transpose{pair}\n"),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("design", ["ring", "chunked ulysses", "split-kv"])
def test_spoiled_text(design: str, how: str) -> None:
    """Is seen without running it."""
    held = CASES[f"{design}, sbhd, apart"]
    text = SPOILED[how](held.text, (0, 1))
    assert text != held.text
    with pytest.raises(TextMismatch):
        held.check(text)


VIRTUAL = {"ring": "sbhd", "chunked ulysses": "bhsd"}


@pytest.mark.parametrize("design", VIRTUAL)
def test_virtual(design: str) -> None:
    """On virtual ranks, which see what is spoiled."""
    held = CASES[f"{design}, {VIRTUAL[design]}, apart"]
    played = play(held.text, held.schedule, ATTENTION, "<held>")
    assert played.calls == 3 and played.error < 1e-12
    spoiled: dict[tuple[str, ...], Callable[[str], str]] = {
        ("layout", "module-error"): lambda text: text.replace("Shard(0)", "Shard(1)").replace(
            "Shard(2)", "Shard(1)"
        ),
        ("result",): lambda text: text.replace(
            f"    out = out.transpose{(0, 1) if held.layout == 'sbhd' else (1, 2)}\n", ""
        ),
    }
    for checks, change in spoiled.items():
        with pytest.raises(VirtualError) as caught:
            play(change(held.text), held.schedule, ATTENTION, "<spoiled>")
        assert caught.value.check in checks


def test_one_sequence() -> None:
    """Of one sequence [S, B, H, D] is dense inside: nothing is copied, and the module says so."""
    held = Held("ring", "sbhd", replace(APART, batch=1))
    said = " ".join(held.text.split('"""')[1].split())
    assert "With one sequence k and v are dense both ways" in said and "a call copies" not in said
    one_head = Held("ring", "bhsd", replace(APART, kv_heads=1))
    assert "With one head k and v are dense both ways" in " ".join(one_head.text.split())


def test_command_line(tmp_path: Path) -> None:
    """The layout is in the name, in the schedule and in the module; both check out."""
    with folder(tmp_path):
        run("emit", *SMALL, "--layout", "sbhd").done()
        name = SMALL_NAME.replace("_s1024", "_s1024_sbhd")
        schedule = Path("generated", f"{name}.sched").read_text()
        assert "--layout sbhd" in schedule and "bfloat16 causal sbhd\n" in schedule
        assert "as this version emits" in run("check").done()
        run("verify", "--no-run", f"generated/{name}.sched").done()
        run("emit", *SMALL, "--layout", "thd").refused("unknown-layout", "packed documents")
