"""How many schedules a second one core prices in closed form.

    python benchmarks/search.py [--topo a100x16] [--most 3] [--profile]
    python benchmarks/search.py --scale [--artifact CHECKOUT]

Takes every product of axes {B, H, G, S_q, S_kv} over the meshes of a topology of at most so many
dimensions, with every story of the tensors that an axis leaves apart (gather, walk, direct walk;
results scattered, travelling, sent home), and prints candidates a second of processor time: from
directives (order and pins as the search writes them) to bytes, memory and time. What schedules
share is worked out for the first of them, within the time. What is refused is counted apart.

With --scale: schedules a second, time and memory of whole searches for 8 to 4096 ranks, by
`benchmarks/scale.py`, and beside them what the paper's open artifact takes to enumerate its
programs, where --artifact names a checkout of it (`benchmarks/artifact.py`).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import artifact
import scale

from mercurygen.cost import closed
from mercurygen.cost.links import Network
from mercurygen.cost.topology import Topology, load
from mercurygen.designs.meshes import meshes
from mercurygen.errors import Refusal
from mercurygen.ir.mesh import Mesh
from mercurygen.ir.problem import Problem
from mercurygen.lower.lower import lower
from mercurygen.operators import load as load_operator
from mercurygen.schedule.apply import Attempts, start
from mercurygen.schedule.directives import Along, Directive, Parallelize, Shard, Shift
from mercurygen.search.collect import seldom_collected
from mercurygen.search.place import links
from mercurygen.search.space import frame

ARTIFACT = 4, 8, 16  # ranks: as many as it is said to have been run with
AXES = ("B", "H", "G", "S_q", "S_kv")
COMING = ("gather", "walk", "direct")
ROUND = (
    ("gather", "scatter"),
    ("walk", "walk"),
    ("walk", "direct"),
    ("direct", "walk"),
    ("direct", "direct"),
)


def line(tensors: tuple[str, ...], axis: str, dim: str, way: str) -> Directive:
    """One tensor's story along one dimension."""
    if way in ("gather", "scatter"):
        return Shard(tensors, axis, (dim,))
    return Shift(tensors, axis, (Along(dim, ("direct",) if way == "direct" else ()),))


def bodies(mesh: Mesh) -> Iterator[tuple[Directive, ...]]:
    """Every split of the iterations, with every story."""
    for axes in product(AXES, repeat=len(mesh.dims)):
        split = tuple(zip(mesh.names, axes, strict=True))
        head = tuple(
            Parallelize(axis, tuple(dim for dim, other in split if other == axis))
            for axis in dict.fromkeys(axes)
        )
        brought = [dim for dim, axis in split if axis in ("S_q", "G")]
        around = [dim for dim, axis in split if axis == "S_kv"]
        for ways in product(COMING, repeat=len(brought)):
            keys = [
                line(("k", "v"), "S_kv", dim, way) for dim, way in zip(brought, ways, strict=True)
            ]
            for both in product(ROUND, repeat=len(around)):
                pairs = list(zip(around, both, strict=True))
                queries = [line(("q",), "S_q", dim, way) for dim, (way, _) in pairs]
                results = [line(("out", "lse"), "S_q", dim, way) for dim, (_, way) in pairs]
                yield (*head, *keys, *queries, *results)


def price(attempts: Attempts, lines: tuple[Directive, ...], network: Network) -> str:
    """Price one candidate; the slug of what refuses it, or "priced"."""
    settled = attempts.attempt(lines)
    if isinstance(settled, Refusal):
        return settled.slug
    plan = lower(settled)
    if isinstance(plan, Refusal):
        return plan.slug
    closed.cost(plan, network)
    return "priced"


def main() -> None:
    """Price the space."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topo", default="a100x16")
    parser.add_argument("--most", type=int, default=3, help="dimensions of a mesh")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--scale", action="store_true", help="whole searches, 8 to 4096 ranks")
    parser.add_argument("--artifact", type=Path, help="a checkout of the paper's artifact")
    options = parser.parse_args()
    if options.scale or options.artifact:
        searches(options.artifact)
        return
    profile = cProfile.Profile(time.process_time) if options.profile else None
    with seldom_collected():
        seconds, counts = spend(load(options.topo), options.most, profile)
    priced, spent = counts.pop("priced"), seconds.pop("priced")
    refused, lost = counts.total(), seconds.total()
    print(f"{priced} candidates priced in {spent:.2f} s: {priced / spent:.0f} a second")
    print(f"{refused} refused in {lost:.2f} s: {refused / lost:.0f} a second")
    for slug, count in counts.most_common():
        print(f"  {count:6} {slug}, {seconds[slug] / count * 1e6:.0f} us each")
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def searches(checkout: Path | None, most: int = 4096) -> None:
    """Print what whole searches take, and what the artifact's enumeration does."""
    print(scale.HEAD)
    for name, group in scale.groups(most):
        print(scale.show(scale.measured(name, group, 0)), flush=True)
    if checkout is None:
        return
    print("artifact  ranks  programs  distinct  seconds  a second    MiB")
    for ranks in ARTIFACT:
        try:
            found = artifact.enumerated(checkout, ranks)
        except artifact.NotRun as reason:
            print(f"artifact {ranks:6}  not run: {reason}")
            continue
        print(
            f"artifact {ranks:6} {found.programs:9} {found.distinct:9} {found.seconds:8.2f} "
            f"{found.programs / found.seconds:9.0f} {found.mib:6.0f}",
            flush=True,
        )


def spend(
    topology: Topology, most: int, profile: cProfile.Profile | None = None
) -> tuple[Counter[str], Counter[str]]:
    """Price the space: seconds, and how many candidates, by what became of them."""
    group = tuple(level.size for level in topology.levels)
    network, operator = Network(topology, group), load_operator("attention")
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for mesh in meshes(links(topology, group), most):
        attempts = Attempts(start(operator, Problem(), mesh))
        held = frame(attempts.start, "zigzag")
        for body in bodies(mesh):
            if profile:
                profile.enable()
            began = time.process_time()
            slug = price(attempts, (*held, *body), network)
            seconds[slug] += time.process_time() - began
            if profile:
                profile.disable()
            counts[slug] += 1
    return seconds, counts


if __name__ == "__main__":
    main()
