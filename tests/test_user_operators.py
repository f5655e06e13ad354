"""Operators of users, emitted and run on gloo: numbers, calls and memory on every rank; texts.

What is sent and what is alive is compared with the plan, exactly: the operator's own lines aside,
whose temporary values no plan knows. A module of such an operator is not interpreted as those of
attention are (`check_text` lists its call sites only), so these runs are what holds it to its plan.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command import run as command
from numeric_cases import KINDS, PeakBytes, _let_go, load_module, patched, recorded
from ranks import Ranks
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import mercurygen
from mercurygen.check.prove import prove
from mercurygen.check.tensors import cut_whole, join_axes
from mercurygen.dsl.parse import parse_operator
from mercurygen.emit.callsites import check_text
from mercurygen.emit.module import emit, refuse
from mercurygen.errors import Refusal
from mercurygen.ir.lexer import Line
from mercurygen.ir.mesh import Dim, Link, Mesh
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Sizes
from mercurygen.lower.events import Batch, Collective
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directive_text import parse_directive
from mercurygen.schedule.schedule import Schedule, Target
from mercurygen.virtual.report import VirtualError
from mercurygen.virtual.run import play

ROOT = Path(mercurygen.__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial"
REFERENCES = {
    "nearest": f"{TUTORIAL / 'nearest.py'}::nearest",
    "smooth": f"{TUTORIAL / 'smooth.py'}::smooth",
    "soft": f"{ROOT / 'tests' / 'data' / 'soft.py'}::soft",
    "matmul": "matmul",
}
SEED = 7


class Case(NamedTuple):
    """A schedule: operator, mesh, directives, sizes; the mask is that of a window, or its name."""

    operator: str
    mesh: str
    body: str
    sizes: str
    mask: int | str = "full"


NEAREST, SMOOTH, MATMUL = "N=24 M=32 C=3", "T=48 S=48 C=3", "M=16 N=24 K=32"
SOFT = "N=12 M=24 C=3 E=5"
CASES = {
    "nearest gather": Case("nearest", "m=4", "parallelize N over m; shard y: M over m", NEAREST),
    "nearest ring": Case("nearest", "m=4", "parallelize N over m; shift y: M along m", NEAREST),
    "nearest ring on 2": Case(
        "nearest", "m=2", "parallelize N over m; shift y: M along m", NEAREST
    ),
    "nearest ring on 3": Case(
        "nearest", "m=3", "parallelize N over m; shift y: M along m", "N=9 M=21 C=2"
    ),
    "nearest reverse": Case(
        "nearest", "m=3", "parallelize N over m; shift y: M along m reverse", "N=9 M=21 C=2"
    ),
    "nearest both": Case(
        "nearest", "m=8", "parallelize N over m; shift y: M along m both", "N=8 M=40 C=3"
    ),
    "nearest direct": Case(
        "nearest", "m=4", "parallelize N over m; shift y: M along m direct", NEAREST
    ),
    "nearest double ring": Case(
        "nearest", "n=2 m=2", "parallelize N over n, m; shift y: M along n, m", NEAREST
    ),
    "nearest ring of gathers": Case(
        "nearest",
        "n=2 m=2",
        "parallelize N over n, m; shift y: M along n; shard y: M over m",
        NEAREST,
    ),
    "nearest scattered": Case(
        "nearest",
        "m=4",
        "parallelize M over m; shard x: N over m; shard distance, index: N over m",
        NEAREST,
    ),
    "nearest merged everywhere": Case(
        "nearest",
        "m=3",
        "parallelize M over m; replicate x over m; replicate distance, index over m",
        "N=7 M=21 C=2",
    ),
    "nearest home": Case(
        "nearest",
        "m=4",
        "parallelize M over m; shift x: N along m; shift distance, index: N along m direct",
        NEAREST,
    ),
    "nearest travels": Case(
        "nearest",
        "m=3",
        "parallelize M over m; shift x: N along m; shift distance, index: N along m",
        "N=9 M=21 C=2",
    ),
    "nearest on a grid": Case(
        "nearest",
        "n=2 m=2",
        "parallelize N over n; parallelize M over m; shift y: M along n; shard x: N over m; "
        "shard distance, index: N over m",
        NEAREST,
    ),
    "smooth ring": Case("smooth", "m=4", "parallelize T over m; shift x: S along m", SMOOTH, 20),
    "smooth gather": Case("smooth", "m=3", "parallelize T over m; shard x: S over m", SMOOTH, 5),
    "smooth direct": Case(
        "smooth", "m=8", "parallelize T over m; shift x: S along m direct", SMOOTH, 14
    ),
    "smooth direct zigzag": Case(
        "smooth",
        "m=4",
        "order S: zigzag over m; parallelize T over m; shift x: S along m direct",
        SMOOTH,
        9,
    ),
    "smooth striped": Case(
        "smooth",
        "m=4",
        "order S: striped over m; parallelize T over m; shift x: S along m",
        SMOOTH,
        9,
    ),
    "smooth striped gather": Case(
        "smooth",
        "m=3",
        "order S: striped over m; parallelize T over m; shard x: S over m",
        SMOOTH,
        7,
    ),
    "smooth double ring zigzag": Case(
        "smooth",
        "n=2 m=2",
        "order S: zigzag over n, m; parallelize T over n, m; shift x: S along n, m",
        SMOOTH,
        "causal",
    ),
    "smooth two gathers zigzag": Case(
        "smooth",
        "n=2 m=2",
        "order S: zigzag over n, m; parallelize T over n, m; shard x: S over n, m",
        SMOOTH,
        20,
    ),
    "smooth home": Case(
        "smooth",
        "m=4",
        "parallelize S over m; shift rate: T along m; shift out: T along m direct",
        SMOOTH,
        14,
    ),
    "smooth home zigzag": Case(
        "smooth",
        "m=4",
        "order S: zigzag over m; parallelize S over m; shift rate: T along m; "
        "shift out: T along m direct",
        SMOOTH,
        9,
    ),
    "smooth travels": Case(
        "smooth",
        "m=3",
        "parallelize S over m; shift rate: T along m; shift out: T along m",
        SMOOTH,
        20,
    ),
    "smooth tiles scattered": Case(
        "smooth",
        "m=4",
        "parallelize S over m; shift rate: T along m; shard out: T over m",
        SMOOTH,
        14,
    ),
    "smooth scattered": Case(
        "smooth",
        "m=4",
        "parallelize S over m; shard rate: T over m; shard out: T over m",
        SMOOTH,
        14,
    ),
    "smooth full": Case("smooth", "m=2", "parallelize T over m; shift x: S along m", "T=8 S=8 C=2"),
    "soft ring": Case("soft", "m=3", "parallelize N over m; shift y, z: M along m", SOFT),
    "soft home": Case(
        "soft",
        "m=4",
        "parallelize M over m; shift x: N along m; shift mean, weight: N along m direct",
        SOFT,
    ),
    "soft scattered": Case(
        "soft",
        "m=4",
        "parallelize M over m; shard x: N over m; shard mean, weight: N over m",
        SOFT,
    ),
    "matmul gather": Case("matmul", "m=4", "parallelize N over m; shard a: M over m", MATMUL),
    "matmul ring": Case("matmul", "m=3", "parallelize N over m; shift a: M along m", "M=6 N=9 K=5"),
    "matmul reduce": Case("matmul", "m=4", "parallelize K over m; replicate c over m", MATMUL),
    "matmul scatter": Case("matmul", "m=4", "parallelize K over m; shard c: M over m", MATMUL),
    "matmul sums travel": Case("matmul", "m=4", "parallelize K over m; shift c: M along m", MATMUL),
    "matmul sums home": Case(
        "matmul", "m=3", "parallelize K over m; shift c: N along m direct", "M=5 N=9 K=6"
    ),
    "matmul on a grid": Case(
        "matmul",
        "row=2 col=2",
        "parallelize M over row; parallelize N over col; shard a: K over col; shard b: K over row",
        MATMUL,
    ),
}


# --- plans, inputs and what they must give --------------------------------------------------


def made(case: Case) -> tuple[Operator, Plan, Schedule]:
    """The operator, and the plan and schedule of a case."""
    if case.operator in REFERENCES:
        operator = load(REFERENCES[case.operator])
    else:  # a file's text
        operator = parse_operator(case.operator, "mine.py", "owner")
    dims = tuple(Dim(name, int(size)) for name, size in _pairs(case.mesh))
    extents = tuple((name, int(size)) for name, size in _pairs(case.sizes))
    window = case.mask if isinstance(case.mask, int) else None
    problem = Sizes(extents, "float64", "window" if window else str(case.mask), window)
    lines = enumerate(case.body.split(";"), 1)
    directives = tuple(parse_directive(Line("case", i, line.strip())) for i, line in lines)
    program = attempt(start(operator, problem, Mesh(dims)), directives)
    assert not isinstance(program, Refusal), program.explain()
    plan = lower(program)
    assert isinstance(plan, Plan), plan.explain()
    levels = tuple(Link(d.name, d.size, "wire", 25e9) for d in dims)
    target = Target("test", "sha256:0123456789abcdef", levels)
    reference = REFERENCES.get(case.operator, "mine.py::owner")
    reference = reference.replace(f"{ROOT}/", "")
    group = tuple(d.size for d in dims)
    return operator, plan, Schedule(reference, problem, target, group, 1, Mesh(dims), directives)


def _pairs(text: str) -> list[list[str]]:
    return [word.split("=") for word in text.split()]


@functools.cache
def emitted(case: Case) -> str:
    """The module of a case."""
    operator, plan, schedule = made(case)
    return emit(schedule, plan, "tested", operator)


def whole_inputs(plan: Plan) -> dict[str, Tensor]:
    """The full inputs; points with small whole coordinates, of which many are equally near."""
    random, found = torch.Generator().manual_seed(SEED), {}
    for tensor in plan.program.inputs:
        shape = [prod(plan.program.extent(axis) for axis in dim) for dim in tensor.dims]
        if plan.program.operator == "nearest":
            found[tensor.name] = torch.randint(-2, 3, shape, generator=random).double()
        else:
            found[tensor.name] = torch.rand(shape, generator=random, dtype=torch.float64)
    return found


def reference(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the operator gives, by a computation of its own in float64."""
    if case.operator == "matmul":
        return {"c": given["a"] @ given["b"]}
    if case.operator == "nearest":
        squares = ((given["x"][:, None] - given["y"]) ** 2).sum(-1)
        least = squares.amin(1)
        first = (squares == least[:, None]).int().argmax(1)  # argmax: the first of equals
        return {"distance": least, "index": first}
    if case.operator == "soft":
        scores = -((given["x"][:, None] - given["y"]) ** 2).sum(-1)
        return {"mean": scores.softmax(1) @ given["z"], "weight": scores.logsumexp(1)}
    x, rate = given["x"], given["rate"]
    age = torch.arange(len(rate))[:, None] - torch.arange(len(x))
    live = torch.ones_like(age, dtype=torch.bool) if case.mask == "full" else age >= 0
    if isinstance(case.mask, int):
        live &= age < case.mask
    return {"out": torch.exp(-rate[:, None] * age).masked_fill(~live, 0) @ x}


def parts(plan: Plan, name: str, full: Tensor) -> list[Tensor]:
    """Every rank's part of a tensor, cut by the plan's atoms and not by the module."""
    tensor, atoms, mesh = plan.program.tensor(name), plan.atoms, plan.program.mesh
    return [
        join_axes(tensor, cut_whole(atoms, tensor, atoms.pinned(tensor, place), full).data)
        for place in map(mesh.coordinate, range(mesh.size))
    ]


class Facts(NamedTuple):
    """What a run of a module is held to, per rank, and its inputs."""

    operator: str
    full: dict[str, Tensor]
    inputs: dict[str, list[Tensor]]
    results: dict[str, list[Tensor]]
    calls: list[list[tuple]]
    peaks: list[int]


def facts(case: Case) -> Facts:
    """Of a case."""
    _, plan, schedule = made(case)
    prove(plan, schedule.links)
    given = whole_inputs(plan)
    want = reference(case, given)
    traces = [trace(plan, rank) for rank in range(plan.program.mesh.size)]
    return Facts(
        plan.program.operator,
        {**given, **want},
        {name: parts(plan, name, x) for name, x in given.items()},
        {name: parts(plan, name, x) for name, x in want.items()},
        [planned(each) for each in traces],
        [each.peak() for each in traces],
    )


def planned(played: Any) -> list[tuple]:
    """The transfers of a trace, as `recorded` has them."""
    found: list[tuple] = []
    for event in played.events:
        if isinstance(event, Batch):
            ops = [("recv", m) for m in event.recvs] + [("send", m) for m in event.sends]
            sizes = [
                played.buffers[m.buffer].nbytes if m.nbytes is None else m.nbytes for _, m in ops
            ]
            found.append(
                ("p2p", tuple((way, m.peer, n) for (way, m), n in zip(ops, sizes, strict=True)))
            )
        elif isinstance(event, Collective):
            kind = event.kind.replace("-", "_")
            found.append(
                (kind, played.buffers[event.source].nbytes, played.buffers[event.target].nbytes)
            )
    return found


# --- on every rank --------------------------------------------------------------------------


def check(rank: int, world: int, text: str, want: Facts) -> float:
    """Numbers, layout, calls and memory of one module; returns the largest error."""
    module = load_module(text)
    mesh = module.make_mesh()
    local = {name: each[rank] for name, each in want.inputs.items()}
    for name, each in (want.inputs | want.results).items():
        assert torch.equal(module.shard(name, want.full[name], mesh), each[rank]), f"shard {name}"
        assert torch.equal(
            module.unshard(name, each[rank], mesh), want.full[name]
        ), f"unshard {name}"
    run = getattr(module, want.operator)
    before = [x.clone() for x in local.values()]
    with recorded(module) as calls:
        got = run(*local.values(), mesh)
    assert all(map(torch.equal, local.values(), before)), "it changed its inputs"
    got = got if isinstance(got, tuple) else (got,)
    errors = [compare(n, x, want.results[n][rank]) for n, x in zip(want.results, got, strict=True)]
    mine = [(c.kind, c.ops) if c.kind == "p2p" else (c.kind, c.sent, c.received) for c in calls]
    assert mine == want.calls[rank], f"rank {rank}: {mine}, planned {want.calls[rank]}"
    assert peak(module, run, local, mesh) == want.peaks[rank], f"memory of rank {rank}"
    narrow = run(*(x.float() for x in local.values()), mesh)
    for x, y in zip(narrow if isinstance(narrow, tuple) else (narrow,), got, strict=True):
        assert x.dtype == (torch.float32 if y.is_floating_point() else torch.int64)
        assert torch.allclose(x.double(), y.double(), rtol=1e-5, atol=1e-5)
    assert max(module._errors(mesh, torch.float64)) <= 1
    return max(errors)


def compare(name: str, got: Tensor, want: Tensor) -> float:
    """The largest error; whole numbers must be equal."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}"
    if not got.is_floating_point():
        assert torch.equal(got, want), f"{name}, seed {SEED}: {got}, must be {want}"
        return 0.0
    error = (got - want).abs().masked_fill(got == want, 0).max().item()
    allowed = 1e-12 * max(1.0, want.abs().max().item())
    assert error <= allowed, f"{name}, seed {SEED}: off by {error:.3g}, allowed {allowed:.3g}"
    return error


def peak(module: Any, run: Any, local: dict[str, Tensor], mesh: Any) -> int:
    """Most bytes alive in a call, the temporary values of the operator's lines aside.

    A softmax merge is not the operator's: the plan knows what it needs.
    """

    def aside(function: Any, copy: bool) -> Any:
        def call(*args: Any) -> Any:
            with _disable_current_modes():
                made = function(*args)
            if not copy:
                return made
            return tuple(x.clone() for x in made) if isinstance(made, tuple) else made.clone()

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_body", aside(module._body, True))
        for name in ("_merge", "_positions"):
            there = getattr(module, name, None)
            if there and "sigmoid" not in there.__code__.co_names:
                patch.setattr(module, name, aside(getattr(module, name), False))
        collectives = [name for name, kind in KINDS.items() if kind != "p2p"]
        with patched(module, collectives, _let_go), PeakBytes(*local.values()) as memory:
            run(*local.values(), mesh)
    return memory.peak


GROUPS = {world: Ranks(world) for world in (2, 3, 4, 8)}
WORLDS = {}
for _name, _case in CASES.items():
    WORLDS[_name] = prod(int(size) for _, size in _pairs(_case.mesh))
    _late = functools.partial(emitted, _case), functools.partial(facts, _case)
    GROUPS[WORLDS[_name]].add(_name, check, *_late)


@pytest.mark.parametrize("name", CASES)
def test_on_every_rank(name):
    GROUPS[WORLDS[name]].result(name)


# --- texts ----------------------------------------------------------------------------------


def lines_of(operator: Operator) -> list[str]:
    """The compute lines and comments of an operator, and of its merge functions."""
    found = [line.strip() for line in operator.source.split("\n")]
    for combine in operator.combines:
        if combine.merge:
            found += [line.strip() for line in combine.merge.source.split("\n")]
    return [line for line in found if line]


@pytest.mark.parametrize("name", ["nearest ring", "smooth direct", "matmul scatter"])
def test_the_lines_are_the_users(name):
    operator, _, _ = made(CASES[name])
    there = [line.strip() for line in emitted(CASES[name]).split("\n")]
    first = there.index(lines_of(operator)[0])
    body = [line.strip() for line in operator.source.split("\n")]
    assert there[first : first + len(body)] == body
    assert not [line for line in lines_of(operator) if line not in there]


def test_the_texts_are_clean(tmp_path):
    texts = {f"case_{i}": emitted(case) for i, case in enumerate(CASES.values())}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        assert all(n.end_lineno - n.lineno < 60 for n in functions)
        assert all(ast.get_docstring(n) for n in functions)
        called = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
        called |= {"_self_check"}
        private = [n.name for n in functions if n.name.startswith("_") and n.name not in called]
        assert not private, f"{name} never calls {private}"
        assert 300 <= text.count("\n") <= 560
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
    for tool in ([ruff, "check"], [sys.executable, "-m", "black", "-l", "100", "--check", "-q"]):
        ran = subprocess.run([*tool, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_call_sites_are_listed_and_not_compared():
    _, plan, _ = made(CASES["nearest ring"])
    summary = check_text(emitted(CASES["nearest ring"]), plan)
    assert summary.ranks == () and summary.events == 0
    assert summary.sites["_shift"][-1] == "batch_isend_irecv"


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "tile": (
            Case("matmul", "m=2", "parallelize M over m; shard b: N over m; tile K by 2", MATMUL),
            "tile loop",
        ),
        "prefetch": (
            Case("nearest", "m=4", "parallelize N over m; shift y: M along m prefetch 2", NEAREST),
            "prefetch",
        ),
        "skewed": (
            Case(
                "matmul",
                "row=2 col=2",
                "parallelize M over row; parallelize N over col; "
                "shift a: K along col skewed; shift b: K along row skewed",
                MATMUL,
            ),
            "skewed",
        ),
        "pins": (
            Case(
                "nearest",
                "m=2",
                "pin x: N over m; pin y, distance, index: replicated; parallelize N over m; "
                "replicate y over m",
                NEAREST,
            ),
            "reshard",
        ),
    }.values(),
    ids=["tile", "prefetch", "skewed", "pins"],
)
def test_what_is_not_emitted_says_why(case, words):
    operator, plan, schedule = made(case)
    refusal = refuse(plan, operator)
    assert refusal.slug == "not-emitted" and words in refusal.explain()[0]


# --- names and comments that would like to be ours -------------------------------------------

HOSTILE = r'''"A file with the names of emitted functions, and comments that look like code."

from mercurygen.dsl import (
    Axis, Input, Mask, Output, Scalar, accumulator, combine, exp, operator, sum, tiles, where,
    window,
)

size, rank = Axis('row """ and quote'), Axis("column # noqa: F401")
group = Axis("what is summed over { {{ braces }}")


def x(own, other):
    """A merge with 'quotes' and {braces}; # not a comment"""
    total = own + other  # """ ' \\ # noqa
    return total


@operator
def owner(
    gpu: Input[size, group],
    dtype: Input[rank, group],
    out: Output[size, accumulator],
    share_out: Output[size],
    scale: Scalar,
    lse: Scalar = group**0.5,
    seen: Mask[size, rank] = window(5),
):
    """Has 'quotes', "doubled" {braces} and é."""
    combine(out, by=x, identity=0)
    combine(share_out, by=sum)

    for step, place in tiles(size, rank):
        # fmt: off
        # """ + exit() + """ \ {{ x }} {% raw %} # type: ignore
        name = gpu[step] @ dtype[place].T  # noqa: E501 ' " \
        given = where(seen[step, place], exp(name / lse) * scale, 0)
        rows = where(seen[step, place], name, 0)  # -inf, inf: {inf}
        works = sum(given, dim=-1) + 0 * group
        out[step] = works
        share_out[step] = sum(rows, dim=-1)
        # the last word
'''


def test_lines_that_the_parser_misplaces_are_printed_anew():
    body = "parallelize size over gpu; shift dtype: rank along gpu"
    case = Case("\\\n" + HOSTILE, "gpu=2", body, "size=12 rank=12 group=3", 5)
    operator, plan, schedule = made(case)
    tree = ast.parse(emit(schedule, plan, "tested", operator))
    wanted = ast.parse(HOSTILE)
    for name, of in (("_body", "owner"), ("x", "x")):
        there, here = (
            next(n for n in ast.walk(t) if isinstance(n, ast.FunctionDef) and n.name == each)
            for t, each in ((tree, name), (wanted, of))
        )
        lines = here.body[-1].body if of == "owner" else here.body[1:]
        dumped = [ast.dump(line) for line in there.body]
        assert all(ast.dump(line) in dumped for line in lines)


def hostile_reference(given: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """What the hostile operator gives."""
    rows, cols = given["gpu"], given["dtype"]
    age = torch.arange(len(rows))[:, None] - torch.arange(len(cols))
    live, name = (age >= 0) & (age < 5), rows @ cols.T
    weighed = (torch.exp(name / rows.shape[1] ** 0.5) * scale).masked_fill(~live, 0).sum(-1)
    return weighed, name.masked_fill(~live, 0).sum(-1)


def run_hostile(rank: int, world: int, text: str, given: dict[str, Tensor]) -> None:
    """The hostile module against its reference."""
    module = load_module(text)
    mesh = module.make_mesh()
    local = [module.shard(name, x, mesh) for name, x in given.items()]
    got = module.owner(*local, mesh, scale=0.3)
    for name, x, y in zip(("out", "share_out"), got, hostile_reference(given, 0.3), strict=True):
        torch.testing.assert_close(x, module.shard(name, y, mesh), rtol=0, atol=1e-12)
    assert max(module._errors(mesh, torch.float64)) <= 1
    with pytest.raises(ValueError, match="dtype is"):
        module.owner(local[0][..., :-1], local[1], mesh, scale=0.3)
    with pytest.raises(TypeError):
        module.owner(*local, mesh)


HOSTILE_CASES = {
    f"hostile {number}": Case(HOSTILE, "gpu=2", body, "size=12 rank=12 group=3", 5)
    for number, body in enumerate(
        (
            "parallelize size over gpu; shift dtype: rank along gpu",
            "parallelize size over gpu; shift dtype: rank along gpu direct",
            "parallelize rank over gpu; shift gpu: size along gpu; "
            "shift out, share_out: size along gpu",
            "parallelize rank over gpu; shift gpu: size along gpu; "
            "shift out, share_out: size along gpu direct",
        )
    )
}


def hostile_inputs(case: Case) -> dict[str, Tensor]:
    """The full inputs of a case whose plan is proved."""
    _, plan, schedule = made(case)
    prove(plan, schedule.links)
    return whole_inputs(plan)


for _name, _case in HOSTILE_CASES.items():
    _late = functools.partial(emitted, _case), functools.partial(hostile_inputs, _case)
    GROUPS[2].add(_name, run_hostile, *_late)


@pytest.mark.parametrize("name", HOSTILE_CASES)
def test_names_and_comments_of_a_hostile_file(name):
    operator, _, _ = made(HOSTILE_CASES[name])
    text = emitted(HOSTILE_CASES[name])
    there = [line.strip() for line in text.split("\n")]
    missing = [line for line in lines_of(operator) if line not in there]
    assert not missing, missing
    assert "# ruff: noqa" not in text
    assert "exit" not in {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    GROUPS[2].result(name)


# --- on virtual ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, *HOSTILE_CASES])
def test_on_virtual_ranks(name):
    """Results are the parsed operator's; every call and wait is the plan's."""
    case = {**CASES, **HOSTILE_CASES}[name]
    operator, _, schedule = made(case)
    played = play(emitted(case), schedule, operator, "operator.py")
    assert played.ranks == schedule.mesh.size and played.operations and played.error <= 1e-12


EDITS = {  # what: case, what its text says, what it is made to say, check
    "no wait": (
        "smooth ring",
        "            _wait(works)\n",
        "            pass\n",
        "in-flight-read",
    ),
    "another's tile": ("smooth ring", "yield (me - step)", "yield (me + step)", "result"),
    "not merged": (
        "smooth ring",
        "_merge(out[rows], _body",
        "_merge(out[rows].clone(), _body",
        "result",
    ),
    "the largest for the sum": (
        "matmul reduce",
        "dist.all_reduce(x, group=group)",
        "dist.all_reduce(x, dist.ReduceOp.MAX, group=group)",
        "calls",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_text_on_virtual_ranks(what):
    name, old, new, check = EDITS[what]
    operator, _, schedule = made(CASES[name])
    text = emitted(CASES[name])
    assert text.count(old) == 1, text
    with pytest.raises(VirtualError) as caught:
        play(text.replace(old, new), schedule, operator, "operator.py")
    assert caught.value.check == check, caught.value


# --- the command line -----------------------------------------------------------------------

NEAR = ("emit", REFERENCES["nearest"], "--topo", "a100x8")
SIZES = ("--size", "N=64", "--size", "M=1k", "--size", "C=3")


@pytest.mark.parametrize(
    ("words", "slug", "said"),
    [
        (SIZES[:4], "operator-not-bound", "--size C=…"),
        ((), "operator-not-bound", "N, M, C"),
        ((*SIZES, "--size", "K=2"), "unknown-axis", "known: N, M, C"),
        ((*SIZES, "--size", "C=2"), "named-twice", "C"),
        ((*SIZES[:4], "--size", "C"), "bad-value", "AXIS=N"),
        ((*SIZES[:4], "--size", "C=0"), "size-out-of-range", "C=0"),
        ((*SIZES[:4], "--size", "C=\x1b[31m"), "bad-value", "AXIS=N"),
        ((*SIZES, "--window", "4"), "operator-without-mask", "--window"),
        ((*SIZES, "--full"), "operator-without-mask", "--causal/--full"),
        ((*SIZES, "--dtype", "float23"), "unknown-dtype", "float32"),
        ((*SIZES, "--seq", "1k"), "usage", "--size N=…"),
        ((*SIZES, "--schedule", "ring"), "usage", "--schedule"),
        ((*SIZES, "--group", "gpu=3"), "group-not-of-topology", "legal"),
        ((*SIZES, "--name", "torch"), "not-a-name", "--name"),
    ],
)
def test_bad_use(words, slug, said, tmp_path):
    command(*NEAR, *words, "-o", str(tmp_path)).refused(slug, said)
    assert not list(tmp_path.iterdir())


def test_sizes_that_no_schedule_fits(tmp_path):
    sizes = ("--size", "N=7", "--size", "M=5", "--size", "C=3")
    command(*NEAR, *sizes, "-o", str(tmp_path)).refused("nothing-fits", "not-divisible", code=1)


def test_size_is_no_option_of_attention():
    command("emit", "attention", "--topo", "a100x8", "--size", "S=1k").refused("usage", "--seq")


def test_emit_check_and_edit(tmp_path, monkeypatch):
    monkeypatch.chdir(TUTORIAL)
    sizes = ("--size", "T=1k", "--size", "S=1k", "--size", "C=8")
    words = ("emit", "smooth.py::smooth", "--topo", "a100x8", *sizes, "-o", str(tmp_path))
    out = command(*words).done()
    assert "from smooth_a100x8 import smooth, make_mesh, shard" in out
    assert "not compared with the plan" in " ".join(out.split())
    assert "(unchanged)" in command(*words).done()
    command("check", str(tmp_path)).done()
    file = tmp_path / "smooth_a100x8.sched"
    text = file.read_text()
    assert "problem T=1024 S=1024 C=8 float32 window=128\n" in text
    assert "# mercurygen emit smooth.py::smooth --topo a100x8 --size T=1024" in text
    file.write_text(text.replace(" direct\n", "\n"))
    assert command("check", str(tmp_path)).code == 1
    command("emit", "--schedule", str(file)).done()
    assert "_walk_ring" in (tmp_path / "smooth_a100x8.py").read_text()
    command("check", str(tmp_path)).done()


def test_a_matmul(tmp_path):
    sizes = ("--size", "M=1k", "--size", "N=1k", "--size", "K=1k", "--dtype", "bfloat16")
    words = ("--topo", "a100x16", "--group", "node=2,gpu=2", "-o", str(tmp_path))
    out = command("emit", "matmul", *sizes, *words).done()
    assert re.search(r"\d+ schedules, \d+ legal", out)
    module = load_module((tmp_path / "matmul_a100x16.py").read_text())
    assert module.MESH and module.WORLD_SIZE == 4


def test_same_text_whatever_the_hash_seed() -> None:
    """Of operators with several outputs: the text, and the memory that it says."""
    names = [name for name in CASES if name.startswith("soft")]
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_user_operators as tests\n"
        "for name in sys.argv[2:]: print(tests.emitted(tests.CASES[name]))"
    )
    texts = set()
    for seed in ("1", "2", "3"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        line = [sys.executable, "-c", program, str(Path(__file__).parent), *names]
        ran = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
        texts.add(ran.stdout)
    assert len(texts) == 1 and texts.pop().count("def soft(") == len(names) > 1
