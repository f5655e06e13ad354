"""`patch body with triton`: in schedules and programs, what it makes of plans, and the modules."""

from __future__ import annotations

import importlib.util
from functools import cache

import numeric_cases
import pytest
from emitted import ATTENTION, Emitted, written
from priced import network_of

from mercurygen.check.prove import prove
from mercurygen.cost.kernels import Kernels
from mercurygen.cost.simulate import simulate
from mercurygen.emit.callsites import check_text
from mercurygen.emit.python_subset import TextMismatch
from mercurygen.errors import UserError
from mercurygen.ir.lexer import Line
from mercurygen.ir.text import parse as parse_program
from mercurygen.ir.text import show as show_program
from mercurygen.lower.events import Cast, Kernel
from mercurygen.lower.trace import trace
from mercurygen.lower.visible import DIAGONAL
from mercurygen.schedule.apply import apply
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.virtual.run import play

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
ROWS, COLUMNS = "parallelize S_q over {}\n", "parallelize S_kv over {}\n"
SCHEDULES = {  # (mesh, directives, order)
    "all-gather": ("m=4", ROWS.format("m") + "shard k, v: S_kv over m", "zigzag"),
    "all-gather, contiguous": ("m=3", ROWS.format("m") + "shard k, v: S_kv over m", "contiguous"),
    "pipelined": ("m=2", ROWS.format("m") + "shard k, v: S_kv over m\ntile H by 4", "zigzag"),
    "ring": ("m=4", ROWS.format("m") + "shift k, v: S_kv along m", "zigzag"),
    "ring, contiguous": ("m=3", ROWS.format("m") + "shift k, v: S_kv along m", "contiguous"),
    "striped ring": ("m=3", ROWS.format("m") + "shift k, v: S_kv along m", "striped"),
    "ulysses": ("m=2", "parallelize H over m", "zigzag"),
    "ring of gathers": (
        "n=2 m=2",
        ROWS.format("n, m") + "shift k, v: S_kv along n\nshard k, v: S_kv over m",
        "zigzag",
    ),
    "tokenring": (
        "m=4",
        COLUMNS.format("m") + "shift q: S_q along m\nshift out, lse: S_q along m direct",
        "zigzag",
    ),
    "results travel": (
        "m=3",
        COLUMNS.format("m") + "shift q: S_q along m\nshift out, lse: S_q along m",
        "zigzag",
    ),
    "split-kv": ("m=2", COLUMNS.format("m") + "shard q, out, lse: S_q over m", "zigzag"),
}


@cache
def module(name: str, kernel: str = "triton(rows=64, stages=3)") -> Emitted:
    """A schedule with a kernel."""
    mesh, body, order = SCHEDULES[name]
    if name == "split-kv":
        body = body.replace("q, out", "q: S_q over m\nshard out")
    problem = numeric_cases.Problem(480, 16, 8, order=order)
    return written(mesh, f"{body}\npatch body with {kernel}", problem)


def kernels(emitted: Emitted, rank: int) -> list[Kernel]:
    """The calls of a rank."""
    return [e for e in trace(emitted.plan, rank).events if isinstance(e, Kernel)]


@pytest.mark.parametrize(
    "given, shown",
    [
        ("triton", "triton"),
        ("triton(stages=3, rows=64)", "triton(rows=64, stages=3)"),
        ("triton(rows=128,cols=64,warps=8,stages=2)", None),
    ],
)
def test_text(given: str, shown: str | None) -> None:
    """Options in any order are read, and written in one; a program keeps them."""
    directive = parse_directive(Line("my.sched", 1, f"patch body with {given}"))
    text = f"patch body with {shown or given.replace(',', ', ')}"
    assert str(directive) == text
    assert parse_directive(Line("my.sched", 1, text)) == directive
    schedule = module("ring", given).schedule
    assert text in module("ring", given).shown
    program = apply(ATTENTION, schedule)
    assert program.kernel_options == directive.options
    assert parse_program(show_program(program)) == program


@pytest.mark.parametrize(
    "given, slug, words",
    [
        ("(rows=100)", "kernel-option-not-legal", "the nearest is rows=128"),
        ("(warps=3)", "kernel-option-not-legal", "the nearest is warps=2"),
        ("(stages=0)", "kernel-option-not-legal", "the nearest is stages=1"),
        ("(row=64)", "syntax", "did you mean `rows`?"),
        ("(rows=64, rows=64)", "named-twice", None),
        ("()", "syntax", None),
        ("(rows=64", "syntax", None),
        ("(rows)", "syntax", None),
    ],
)
def test_refused(given: str, slug: str, words: str | None) -> None:
    """Options are checked by name and value, at their place."""
    line = Line("my.sched", 1, f"patch body with triton{given}")
    with pytest.raises(UserError) as caught:
        parse_directive(line)
    assert caught.value.slug == slug and caught.value.span is not None
    assert words is None or words in caught.value.help


@pytest.mark.parametrize("name", SCHEDULES)
def test_plan_and_text(name: str) -> None:
    """The plan is proved, and the text's calls are the plan's, with the offsets of its blocks."""
    emitted = module(name)
    prove(emitted.plan, emitted.schedule.target.levels)
    assert check_text(emitted.text, emitted.plan).events > 0
    assert "rows=64, cols=64" in emitted.text and "num_stages=3" in emitted.text


@needs_triton
@pytest.mark.parametrize("name", ["all-gather", "ring, contiguous", "striped ring", "tokenring"])
def test_right(name: str) -> None:
    """Numbers on virtual ranks, where blocks are worked out by torch; every call and wait."""
    emitted = module(name)
    ran = play(emitted.text, emitted.schedule, ATTENTION, "edited.py")
    assert ran.ranks == emitted.world and ran.error <= 1e-12


def test_columns_before_the_square_are_one_block_with_it() -> None:
    """A gathered tile is two blocks, of a rank's two chunks; for torch's kernel it is four."""
    for kernel, most in (("triton", 2), ("aten", 4)):
        calls = kernels(module("all-gather", kernel), 1)
        assert len(calls) == most and all(call.merge for call in calls)
        pairs = sum(call.block.pairs for call in calls)
        assert pairs == sum(60 * 60 * n + 60 * 61 // 2 for n in (1, 6))


def test_nothing_beside_the_results() -> None:
    """No scratch, no share that is merged later, and results that are float32 from the start."""
    ours, atens = (module("ring", kernel) for kernel in ("triton", "aten"))
    assert not any(call.scratch for call in kernels(ours, 1))
    assert any(call.scratch for call in kernels(atens, 1))
    casts = [sum(isinstance(e, Cast) for e in trace(x.plan, 1).events) for x in (ours, atens)]
    assert casts[0] == casts[1] - 1  # the first block's, to what the others are merged into
    assert trace(ours.plan, 1).peak() < trace(atens.plan, 1).peak()


def test_price() -> None:
    """The same products at the same rate; no kernels that merge, so less in all."""
    ours, atens = (module("ring", kernel) for kernel in ("triton", "aten"))
    network = network_of(ours.plan.program.mesh)
    gpu = network.topology.gpu
    large = {"B": 1, "H": 8, "G": 2, "S_q": 16384, "S_kv": 16384, "D": 24, "D_v": 24}
    extents = tuple(large[axis.name] for axis in ours.plan.program.axes)
    one, other = (Kernels(x.plan, gpu).call(extents, DIAGONAL, True) for x in (ours, atens))
    assert one[0] == pytest.approx(other[0]) and one[1] == 0 < other[1]
    assert simulate(ours.plan, network).time < simulate(atens.plan, network).time


@pytest.mark.parametrize(
    "old, new",
    [
        ("scale, ahead=0)", "scale, ahead=None)"),
        ("into=(out[:, rows], lse[:, :, rows])", "into=None"),
        ("into=(out[:, rows], lse[:, :, rows])", "into=(out, lse)"),
    ],
)
def test_wrong_calls_are_seen(old: str, new: str) -> None:
    """A block that is masked otherwise, or merged elsewhere or nowhere, is not the plan's."""
    emitted = module("ring")
    assert old in emitted.text
    with pytest.raises(TextMismatch):
        check_text(emitted.text.replace(old, new), emitted.plan)
