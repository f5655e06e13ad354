"""What a module checks of the machine that it runs on: where its ranks are, how fast its links."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import ModuleType

import pytest
from emitted import one
from numeric_cases import Problem, load_module
from ranks import Ranks

from mercurygen.cost.topology import load
from mercurygen.emit.module import emit
from mercurygen.errors import UserError
from mercurygen.ir.mesh import Dim, Mesh
from mercurygen.schedule.expected import Expected
from mercurygen.schedule.text import parse, show
from mercurygen.search.place import expected, place, target

TWO_BY_TWO = one("double-ring", (2, 2), Problem(seq=16))
FOUR = Ranks(4)


@cache
def probed(hosts: int | None, **speeds: float) -> str:
    """A module of four ranks that looks."""
    told = replace(TWO_BY_TWO.schedule, expected=Expected(hosts, tuple(speeds.items())))
    return emit(told, TWO_BY_TWO.plan, "probed")


# --- the line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [None, 1, 2, 4])
def test_round_trip(hosts: int | None) -> None:
    """In the schedule, below the header."""
    told = Expected(hosts, (("node", 24e9), ("gpu", 213.328e9)))
    schedule = replace(TWO_BY_TWO.schedule, expected=told)
    text = show(schedule)
    words = "" if hosts is None else f" hosts={hosts}"
    assert f"\nexpect{words} node=24GB/s gpu=213.328GB/s\norder" in text
    assert parse(text).schedule == schedule


@pytest.mark.parametrize(
    "line",
    [
        *("expect hosts=3 node=24GB/s gpu=1GB/s", "expect hosts=0 node=24GB/s gpu=1GB/s"),
        *("expect node=24GB/s", "expect gpu=1GB/s node=24GB/s", "expect node=0GB/s gpu=1GB/s"),
        *("expect", "expect node=24 gpu=1", "expect hosts=2"),
    ],
)
def test_refused(line: str) -> None:
    """Of another mesh, uneven, or no speeds."""
    text = show(TWO_BY_TWO.schedule).replace("\norder", f"\n{line}\norder", 1)
    with pytest.raises(UserError) as caught:
        parse(text)
    assert caught.value.slug in ("expected-otherwise", "syntax") and caught.value.span


@pytest.mark.parametrize(
    "name, group, mesh, found",
    [
        ("a100x16", (2, 8), (("node", 2), ("gpu", 8)), (2, 24.0, 240.0)),
        ("a100x16", (2, 8), (("all", 16),), (2, 24.0)),
        ("a100x16", (1, 8), (("gpu", 8),), (1, 240.0)),
        ("l40x8", (2, 4), (("switch", 2), ("gpu", 4)), (1, 1.976, 24.0)),  # four share the port
        ("l40x8", (2, 2), (("switch", 2), ("gpu", 2)), (1, 1.976, 24.0)),  # and so do siblings
        ("racks-h100x128", (2, 4, 2), (("rack", 2), ("node", 4), ("gpu", 2)), (8, 24, 48, 319.95)),
        ("gb200x72", (72,), (("gpu", 72),), (None, 639.9)),
    ],
)
def test_from_a_topology(name: str, group: tuple, mesh: tuple, found: tuple) -> None:
    """Machines by the level `node`; speeds as the cost model takes them, siblings at work."""
    topology = load(name)
    group = place(topology, group, 1)
    dims = Mesh(tuple(Dim(*dim) for dim in mesh))
    schedule = replace(TWO_BY_TWO.schedule, target=target(topology), group=group, mesh=dims)
    told = expected(topology, schedule)
    assert (told.hosts, *(speed / 1e9 for _, speed in told.speeds)) == pytest.approx(found)


# --- on ranks ---------------------------------------------------------------------------------


def named(text: str, *hosts: str) -> ModuleType:
    """The module on a rank that believes to be on one of these machines."""
    import torch.distributed as dist

    module = load_module(text)
    module.gethostname = lambda: hosts[dist.get_rank()]
    return module


def placed(rank: int, world: int, text: str, *hosts: str) -> tuple[str, int]:
    """What `make_mesh` says; and that it can be told not to look."""
    module, said = named(text, *hosts), ""
    try:
        module.make_mesh()
    except ValueError as error:
        said = str(error)
    return said, module.make_mesh(check=False).size()


def speeds(rank: int, world: int, text: str) -> list[tuple[str, float, float, str]]:
    """What `probe` finds."""
    module = named(text, "a", "a", "b", "b")
    return [(*found, str(found)) for found in module.probe(module.make_mesh(), 2**16, 2)]


PLACES = {
    "as expected": ("a", "a", "b", "b"),
    "interleaved": ("a", "b", "a", "b"),
    "one elsewhere": ("a", "a", "b", "stray"),
    "one machine": ("a", "a", "a", "a"),
}
SAID = {
    "as expected": [],
    "interleaved": ["ranks [1, 3] are apart", "a has ranks [0, 2]", "b has ranks [1, 3]"],
    "one elsewhere": ["ranks [3] are apart", "stray has ranks [3]", "--nproc-per-node 2"],
    "one machine": ["some share one", "a has ranks [0, 1, 2, 3]", "make_mesh(check=False)"],
}
_TEXT = partial(probed, 2, node=1e15, gpu=1e6)
for _name, _hosts in PLACES.items():
    FOUR.add(_name, placed, _TEXT, *_hosts)
FOUR.add("speeds", speeds, _TEXT)


@pytest.mark.parametrize("place", PLACES)
def test_placement(place: str) -> None:
    """The same words on all ranks, with the ranks that are wrong and what to do."""
    (said, size), *others = FOUR.result(place)
    assert size == 4 and all(other == (said, size) for other in others)
    assert bool(said) == bool(SAID[place]) and all(word in said for word in SAID[place])


def test_speeds() -> None:
    """One number of every dimension, the same on all ranks, beside what it was priced with."""
    found, *others = FOUR.result("speeds")
    assert all(other == found for other in others)
    (node, slow, least, words), (gpu, fast, one, good) = found
    assert (node, least, gpu, one) == ("node", 1e15, "gpu", 1e6) and 0 < slow < 1e15
    assert fast > 1e6
    assert "too slow" in words and "priced with 1e+06" in words and "too slow" not in good


def test_where_machines_are_not_known() -> None:
    """Speeds only: `make_mesh` is as it always is."""
    text = probed(None, node=24e9, gpu=240e9)
    assert "def probe(" in text and "check_placement" not in text and "HOSTS" not in text
    assert max(map(len, _TEXT().splitlines())) <= 100
