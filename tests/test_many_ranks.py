"""What keeps groups of hundreds of ranks cheap, against the same worked out rank by rank."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from mercurygen.check.prove import prove
from mercurygen.cost.links import Network
from mercurygen.cost.steps import classes_of, steps_of, telling, walked
from mercurygen.cost.topology import load
from mercurygen.designs.meshes import meshes
from mercurygen.errors import UserError
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.mesh import Dim, Mesh
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.lower.cuts import Cuts
from mercurygen.lower.lower import lower
from mercurygen.lower.visible import NotCuttable, visible
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import attempt, start
from mercurygen.schedule.directives import Along, Parallelize, Patch, Shard, Shift
from mercurygen.search.place import links, place
from mercurygen.search.search import search
from mercurygen.search.space import frame

SIZES = (2, 3, 2)
NAMES = ("a", "b", "c")
SEQ = 12 * 2 * 3
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "broadcast")


def program_of(kind: str, mask: str, kernel: str):
    """A program on a mesh of three dimensions, all of which the tokens are dealt over."""
    mesh = Mesh(tuple(map(Dim, NAMES, SIZES)))
    begin = start(load_operator("attention"), Problem(seq=SEQ, mask=mask), mesh)
    lines = (Parallelize("S_q", NAMES), Shard(("k", "v"), "S_kv", NAMES), Patch("body", kernel))
    return attempt(begin, (*frame(begin, kind), *lines))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_kinds_of_pairs_are_those_of_all_pairs(kind: str, mask: str) -> None:
    """Of every pair of tiles the blocks, and those of the same ranks, by all coordinates."""
    for kernel in ("aten", "triton"):
        program = program_of(kind, mask, kernel)
        atoms = atoms_of(program)
        subsets = [
            tuple(name for name, on in zip(NAMES, bits, strict=True) if on)
            for bits in product((0, 1), repeat=3)
        ]
        for rows, columns in product(subsets, repeat=2):
            both, firsts = [d for d in rows if d in columns], set()
            all_blocks: dict[tuple, tuple] = {}
            try:
                for here, there in product(product(*map(range, SIZES)), repeat=2):
                    mine, theirs = (
                        atoms.owned(program.order, axis, {d: (at[NAMES.index(d)],) for d in dims})
                        for axis, dims, at in (("S_q", rows, here), ("S_kv", columns, there))
                    )
                    blocks = visible(atoms.domain, program.kernel, mine, theirs)
                    all_blocks[here, there] = blocks
                    if all(here[NAMES.index(d)] == there[NAMES.index(d)] for d in both):
                        firsts.add(blocks)
            except NotCuttable:
                with pytest.raises(NotCuttable):
                    Cuts(program, rows, columns)
                continue
            cuts = Cuts(program, rows, columns)
            assert set(cuts.kinds) == set(all_blocks.values())
            assert {cuts.kinds[i] for i in cuts.firsts} == firsts
            for (here, there), blocks in all_blocks.items():
                number = 0
                for digit in cuts.digits:
                    i = NAMES.index(digit.dim)
                    number = number * digit.radix + digit.number(here[i], there[i])
                assert cuts.kinds[cuts.of[number]] == blocks


@pytest.mark.parametrize("name", ["h100x64", "mercury-a100x32"])
def test_collectives_by_one_rank(name: str) -> None:
    """Where all ranks are alike, what one sends tells what all do."""
    topology = load(name)
    for tp in (1, 2):
        group = place(topology, None, tp)
        one, all_ranks = (Network(topology, group, tp) for _ in range(2))
        assert one.alike
        all_ranks.alike = False
        for mesh in meshes(links(topology, group), 2):
            for dim, kind in product(mesh.names, COLLECTIVES):
                short, long = (n.price(kind, mesh, dim) for n in (one, all_ranks))
                assert dict(short.seconds) == pytest.approx(dict(long.seconds), rel=1e-12)
                assert (short.latency, short.small, short.share) == (
                    long.latency,
                    long.small,
                    long.share,
                )
                assert one.spread(kind, mesh, dim) == all_ranks.spread(kind, mesh, dim)


def test_large_groups_are_ranked_by_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is simulated, direct or looped over; bytes and memory are those of the proof."""
    for module in ("space", "loops", "search"):
        monkeypatch.setattr(f"mercurygen.search.{module}.LARGE", 8)
    topology, group = load("a100x16"), (2, 8)
    result = search("attention", Problem(), topology, group=group)
    assert all(candidate.simulated is None for candidate in result.ranked)
    assert not any(
        word in candidate.text
        for candidate in result.ranked
        for word in ("direct", "both", "\ntile")
    )
    refused = {named.name: named.slug for named in result.named if named.best is None}
    assert refused["direct-ring"] == refused["tokenring"] == "too-many-ranks-to-price"
    assert refused["ulysses-chunked"] == "too-many-ranks-to-price"
    assert {named.name for named in result.named if named.best} >= {"ring", "unified"}
    best = result.best
    report = prove(best.plan, best.schedule.links)
    assert report.peak.most == best.cost.peak_memory
    for link in best.cost.links:
        assert max(report.traffic.crossing[link.name].values) == link.most


def test_more_than_4096_ranks_are_refused() -> None:
    """As many are not proved."""
    from mercurygen.cli.request import check_sizes

    check_sizes(Problem(), (512, 8))
    with pytest.raises(UserError, match="4104 ranks: this version proves"):
        check_sizes(Problem(), (513, 8))
    with pytest.raises(UserError, match="136 ranks: this version proves"):
        check_sizes(Sizes(()), (17, 8))


def test_kinds_of_steps_are_those_of_every_class() -> None:
    """Of two rings inside one another: the kinds that any class has, and how often each has one."""
    mesh = Mesh((Dim("a", 3), Dim("b", 4)))
    begin = start(load_operator("attention"), Problem(seq=24 * 12), mesh)
    both = Parallelize("S_q", ("a", "b"))
    ring = Shift(("k", "v"), "S_kv", (Along("b", ()), Along("a", ())))
    plan = lower(attempt(begin, (*frame(begin, "zigzag"), both, ring, Patch("body", "aten"))))
    walks = walked(plan)
    steps = steps_of(plan.program, walks, classes_of(plan.program, telling(plan.program, walks)))
    rows = [steps.row(step) for step in (5, *range(12))][1:]
    assert [frozenset(row) for row in rows] == list(steps.present)
    alike = Counter()
    for first, *rest in zip(*rows, strict=True):
        alike[first, tuple(sorted(Counter(rest).items()))] += 1
    assert alike == Counter({(first, rest): n for first, rest, n in steps.sums})
    for step, row in enumerate(rows):  # the owner of the tile: so many places back along each
        b, a = divmod(step, 3)
        for rank, kind in enumerate(row):
            here = mesh.coordinate(rank)
            owner = {"a": (here["a"] - a) % 3, "b": (here["b"] - b) % 4}
            blocks = visible(plan.atoms.domain, "aten", plan.rows(here), plan.columns(owner))
            less = [one.rows[0] if plan.atoms.striped else 0 for one in blocks]
            assert steps.kinds[kind] == tuple(
                (one.height, one.width, one.band, n, ())
                for one, n in zip(blocks, less, strict=True)
            )
