"""Bytes, operations and memory of the known designs, by formulas worked out here.

Those of attention are from `reference/schedules.md`, section 4 (their numbers are the names of the
tests); those of the matrix product follow from what each rank must get and keep.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
from plans import lowered, mesh_of

from mercurygen.check.prove import prove
from mercurygen.check.report import Report
from mercurygen.ir.mesh import Link
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.lower.plan import Plan

B, S, HEADS, KV_HEADS, D, DV = 1, 1920, 48, 24, 16, 8
E, F = 2, 4  # bytes of a bfloat16 and of a float32


@cache
def proved(operator: str, mesh: str, body: str, mask: str = "full") -> tuple[Plan, Report]:
    """A plan of these sizes, and its proof."""
    problem = Problem(B, S, HEADS, KV_HEADS, D, DV, "bfloat16", mask)
    return prove_of(operator, problem, mesh, body)


def prove_of(operator: str, problem: Problem | Sizes, mesh: str, body: str) -> tuple[Plan, Report]:
    """A plan, and its proof."""
    plan = lowered(operator, problem, mesh, body)
    assert isinstance(plan, Plan), plan.explain()
    links = tuple(Link(dim.name, dim.size, "wire", 1e9) for dim in mesh_of(mesh).dims)
    return plan, prove(plan, links)


class Rank:
    """Elements that one of P ranks holds: Q, O, K and V, L of the reference."""

    def __init__(self, ranks: int) -> None:
        tokens = Fraction(B * S, ranks)
        self.q, self.out, self.lse = tokens * HEADS * D, tokens * HEADS * DV, tokens * HEADS
        self.k, self.v = tokens * KV_HEADS * D, tokens * KV_HEADS * DV
        self.kv = self.k + self.v


def sent(report: Report, dim: str = "m") -> int:
    """Bytes that every rank sends along a dimension: all alike."""
    spread = report.traffic.sent[dim]
    assert len(set(spread.values)) == 1
    return spread.most


RING = "parallelize S_q over m\nshift k, v: S_kv along m"
DIRECT = RING + " direct"


# --- 4.13: straight from the owner ----------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_direct_ring_of_a_full_mask(ranks: int) -> None:
    """What the relayed ring sends, in as many steps."""
    for body in (RING, DIRECT):
        _, report = proved("attention", f"m={ranks}", body)
        assert sent(report) == (ranks - 1) * Rank(ranks).kv * E
        assert report.traffic.steps == {"m": ranks - 1}


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_direct_ring_of_a_contiguous_causal_mask(ranks: int) -> None:
    """Rank r receives the r tiles before its own; its own goes to the P - 1 - r after it."""
    body = "order S: contiguous over m\n" + DIRECT
    _, report = proved("attention", f"m={ranks}", body, "causal")
    tile = Rank(ranks).kv * E
    want = tuple((ranks - 1 - r) * tile for r in range(ranks))
    assert report.traffic.sent["m"].values == want
    assert report.traffic.sent["m"].mean == float(tile * (ranks - 1) / 2)


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_direct_ring_of_a_zigzag_causal_mask(ranks: int) -> None:
    """Half a tile from each owner before, a whole one from each after; of P = 16, 7.5 to 15."""
    plan, report = proved("attention", f"m={ranks}", "order S: zigzag over m\n" + DIRECT, "causal")
    tile, last = Rank(ranks).kv * E, ranks - 1
    received = [Fraction(r, 2) + (last - r) for r in range(ranks)]
    given = [r + Fraction(last - r, 2) for r in range(ranks)]
    assert report.traffic.sent["m"].values == tuple(n * tile for n in given)
    assert sum(given) == sum(received)
    if ranks == 16:
        assert (min(given), sum(given) / 16, max(given)) == (7.5, 11.25, 15)
    assert report.traffic.steps == {"m": last}


@pytest.mark.parametrize("width", [1, 2, 60, 120, 121, 130, 240, 241, 480, 960])
def test_direct_ring_of_a_window(width: int) -> None:
    """A rank reads the W - 1 samples before its own, in whole atoms of the tiles that hold them."""
    ranks, tokens = 8, 960
    slab = tokens // ranks
    problem = Sizes((("T", tokens), ("S", tokens), ("C", 5)), "float32", "window", width)
    body = "order S: contiguous over m\nparallelize T over m\nshift x: S along m direct"
    _, report = prove_of("smooth", problem, f"m={ranks}", body)
    tiles = -(-(width - 1) // slab)
    want = tuple(min(tiles, ranks - 1 - r) * slab * 5 * F for r in range(ranks))
    assert report.traffic.sent["m"].values == want
    assert report.traffic.steps == {"m": min(tiles, ranks - 1)}


# --- 4.3, 4.4, 4.7: striped, chunked, pipelined ------------------------------------------------


@pytest.mark.parametrize("ranks", [3, 8])
def test_striped_ring(ranks: int) -> None:
    """The same bytes as the ring; every step is one causal square a rank."""
    _, report = proved("attention", f"m={ranks}", "order S: striped over m\n" + RING, "causal")
    assert sent(report) == (ranks - 1) * Rank(ranks).kv * E
    assert report.traffic.steps == {"m": ranks - 1}


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunked_ulysses(chunks: int) -> None:
    """Four all-to-alls a chunk of heads; all together move (P - 1) / P of q, k, v and out."""
    ranks, each = 4, Rank(4)
    body = "parallelize H over m" + (f"\ntile H by {chunks}" if chunks > 1 else "")
    _, report = proved("attention", f"m={ranks}", body)
    share = Fraction(ranks - 1, ranks)
    assert sent(report) == share * (each.q + each.kv + each.out) * E
    assert report.traffic.steps == {"m": 4 * chunks}
    more = report.with_lse
    assert sent(more) - sent(report) == share * each.lse * F
    assert more.traffic.steps == {"m": 5 * chunks}


@pytest.mark.parametrize("chunks", [2, 6])
def test_pipelined_gather_of_keys_and_values(chunks: int) -> None:
    """A gather of k and one of v per chunk of heads; memory: two chunks, not all of them."""
    ranks, each = 4, Rank(4)
    body = "parallelize S_q over m\nshard k, v: S_kv over m"
    _, whole = proved("attention", f"m={ranks}", body)
    _, tiled = proved("attention", f"m={ranks}", f"{body}\ntile H by {chunks}")
    assert sent(whole) == sent(tiled) == (ranks - 1) * each.kv * E
    assert whole.traffic.steps == {"m": 2} and tiled.traffic.steps == {"m": 2 * chunks}
    assert tiled.peak.most < whole.peak.most or chunks == 2


# --- 4.8, 4.9: queries move, or nothing does -----------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_token_ring(ranks: int) -> None:
    """q P - 1 times on; out and lse, both float32, P - 1 times straight to their owners."""
    each = Rank(ranks)
    body = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m direct"
    _, report = proved("attention", f"m={ranks}", body)
    assert sent(report) == (ranks - 1) * (each.q * E + (each.out + each.lse) * F)
    assert report.traffic.steps == {"m": 2 * (ranks - 1)}


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_travelling_results(ranks: int) -> None:
    """They need P hops with the queries that they are of."""
    each = Rank(ranks)
    body = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m"
    _, report = proved("attention", f"m={ranks}", body)
    assert sent(report) == (ranks - 1) * each.q * E + ranks * (each.out + each.lse) * F
    assert report.traffic.steps == {"m": 2 * ranks - 1}


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_split_kv_of_a_sequence(ranks: int) -> None:
    """q is gathered; partial results go all-to-all, in float32."""
    each = Rank(ranks)
    body = "parallelize S_kv over m\nshard q: S_q over m\nshard out, lse: S_q over m"
    _, report = proved("attention", f"m={ranks}", body)
    assert sent(report) == (ranks - 1) * (each.q * E + (each.out + each.lse) * F)
    assert report.traffic.steps == {"m": 3}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_split_kv_of_replicas(ranks: int) -> None:
    """Two all-reduces: the largest lse, then out and the weights in one; k and v stay."""
    whole = Rank(1)
    body = (
        "order S: contiguous over m\npin k, v: S over m\npin q, out, lse: replicated\n"
        "parallelize S_kv over m\nreplicate q over m\nreplicate out, lse over m"
    )
    _, report = proved("attention", f"m={ranks}", body)
    times = Fraction(2 * (ranks - 1), ranks)
    assert sent(report) == times * (2 * whole.lse + whole.out) * F
    assert report.traffic.steps == {"m": 2}


# --- the backward pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ring_backward(ranks: int) -> None:
    """4.1: k and v P - 1 hops, dk and dv P hops in float32."""
    each = Rank(ranks)
    body = RING + "\nshift dk, dv: S_kv along m"
    _, report = proved("attention_backward", f"m={ranks}", body)
    assert sent(report) == (ranks - 1) * each.kv * E + ranks * each.kv * F
    assert report.traffic.steps == {"m": 2 * ranks - 1}


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ring_backward_straight_home(ranks: int) -> None:
    """4.13: one arrival a step."""
    each = Rank(ranks)
    for walk in (RING, DIRECT):
        body = walk + "\nshift dk, dv: S_kv along m direct"
        _, report = proved("attention_backward", f"m={ranks}", body)
        assert sent(report) == (ranks - 1) * each.kv * (E + F)
        assert report.traffic.steps == {"m": 2 * (ranks - 1)}


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_burst_backward(ranks: int) -> None:
    """4.10: q, do, lse and delta P - 1 hops, dq P hops in float32; k, v, dk and dv stay."""
    each = Rank(ranks)
    body = "parallelize S_kv over m\nshift q, do, lse, delta: S_q along m\nshift dq: S_q along m"
    _, report = proved("attention_backward", f"m={ranks}", body)
    moved = (each.q + each.out) * E + 2 * each.lse * F
    assert sent(report) == (ranks - 1) * moved + ranks * each.q * F
    assert report.traffic.steps == {"m": 2 * ranks - 1}


@pytest.mark.parametrize(("cast", "size"), [("", F), (" as bfloat16", E)])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_gather_and_reduce_scatter_backward(ranks: int, cast: str, size: int) -> None:
    """4.7: k and v gathered, dk and dv reduce-scattered, in float32 unless asked for less."""
    each = Rank(ranks)
    body = f"parallelize S_q over m\nshard k, v: S_kv over m\nshard dk, dv: S_kv over m{cast}"
    _, report = proved("attention_backward", f"m={ranks}", body)
    assert sent(report) == (ranks - 1) * each.kv * (E + size)
    assert report.traffic.steps == {"m": 4}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ulysses_backward(ranks: int) -> None:
    """4.4: all-to-alls of what is read (q, k, v, do, lse, delta) and of the gradients."""
    each = Rank(ranks)
    _, report = proved("attention_backward", f"m={ranks}", "parallelize H over m")
    moved = (2 * each.q + 2 * each.kv + each.out) * E + 2 * each.lse * F
    assert sent(report) == Fraction(ranks - 1, ranks) * moved
    assert report.traffic.steps == {"m": 9}


# --- the matrix product ---------------------------------------------------------------------------

M, N, K = 96, 48, 192


@cache
def product(mesh: str, body: str) -> Report:
    """Proof of a matrix product in float32."""
    return prove_of("matmul", Sizes((("M", M), ("N", N), ("K", K))), mesh, body)[1]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("story", "steps"),
    [
        ("shard a: M over m", lambda p: 1),
        ("shift a: M along m", lambda p: p - 1),
        ("shift a: M along m direct", lambda p: p - 1),
        ("shift a: M along m both", lambda p: p // 2),
    ],
)
def test_all_gather_of_a_product(ranks: int, story: str, steps) -> None:
    """Everybody gets the P - 1 parts of a that it has not, however they come."""
    report = product(f"m={ranks}", f"parallelize N over m\n{story}")
    assert sent(report) == (ranks - 1) * M * K // ranks * F
    assert report.traffic.steps == {"m": steps(ranks)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("story", "size", "steps"),
    [
        ("shard c: M over m", F, lambda p: 1),
        ("shard c: M over m as bfloat16", E, lambda p: 1),
        ("shift c: M along m", F, lambda p: p - 1),
        ("shift c: M along m direct", F, lambda p: p - 1),
    ],
)
def test_reduce_scatter_of_a_product(ranks: int, story: str, size: int, steps) -> None:
    """A sum of P parts, each on another rank: P - 1 of a P-th of c leave every rank."""
    report = product(f"m={ranks}", f"parallelize K over m\n{story}")
    assert sent(report) == (ranks - 1) * M * N // ranks * size
    assert report.traffic.steps == {"m": steps(ranks)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_reduce_of_a_product(ranks: int) -> None:
    """A reduce-scatter and an all-gather of c."""
    report = product(f"m={ranks}", "parallelize K over m\nreplicate c over m")
    assert sent(report) == 2 * (ranks - 1) * M * N // ranks * F
    assert report.traffic.steps == {"m": 1}


GRID = "parallelize M over row\nparallelize N over col\n"
SUMMA = GRID + "shard a: K over col\nshard b: K over row\ntile K by {0}"
CANNON = GRID + "shift a: K along col skewed\nshift b: K along row skewed"


@pytest.mark.parametrize(("rows", "cols", "parts"), [(2, 2, 4), (4, 2, 4), (4, 4, 8)])
def test_summa(rows: int, cols: int, parts: int) -> None:
    """A chain of every part along its row, or its column: of n ranks all but the last send it."""
    report = product(f"row={rows} col={cols}", SUMMA.format(parts))
    block_a, block_b = Fraction(M * K, rows), Fraction(K * N, cols)
    assert sent(report, "col") == block_a * F * Fraction(cols - 1, cols)
    assert sent(report, "row") == block_b * F * Fraction(rows - 1, rows)
    assert report.traffic.steps == {"row": parts, "col": parts}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_cannon(n: int) -> None:
    """n - 1 shifts of a block, and one more to align: none where the distance is 0."""
    report = product(f"row={n} col={n}", CANNON)
    a, b = M * K // n**2 * F, K * N // n**2 * F
    mesh = mesh_of(f"row={n} col={n}")
    places = [mesh.coordinate(rank) for rank in range(n * n)]
    along_row = tuple(((n - 1) + (place["row"] > 0)) * a for place in places)
    along_col = tuple(((n - 1) + (place["col"] > 0)) * b for place in places)
    assert report.traffic.sent["col"].values == along_row
    assert report.traffic.sent["row"].values == along_col
    assert report.traffic.steps == {"row": n, "col": n}


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_two_and_a_half_dimensions(depth: int) -> None:
    """Every layer a Cannon of its part of K, then a reduce-scatter of c over the layers."""
    n = 2
    body = f"parallelize K over depth\n{CANNON}\nshard c: M over depth"
    report = product(f"depth={depth} row={n} col={n}", body)
    a, b, c = (x * F for x in (M * K // n**2 // depth, K * N // n**2 // depth, M * N // n**2))
    assert report.traffic.sent["col"].most == n * a
    assert report.traffic.sent["row"].most == n * b
    assert sent(report, "depth") == c * (depth - 1) // depth
    assert report.traffic.steps == {"depth": 1, "row": n, "col": n}


# --- memory -----------------------------------------------------------------------------------


def test_memory_of_rings() -> None:
    """Beside the caller's tensors and the results: the tiles that are held, and one block."""
    ranks, each = 8, Rank(8)
    held = {}
    for ahead in (1, 2, 3):
        _, report = proved("attention", f"m={ranks}", f"{RING} prefetch {ahead}")
        held[ahead] = report.peak.most
    assert held[2] - held[1] == held[3] - held[2] == each.kv * E


def test_memory_of_matrix_products() -> None:
    """a and b as given, c, and what was gathered, or the tiles of the ring."""
    ranks = 8
    a, b, c = M * K // ranks * F, K * N // ranks * F, M * N // ranks * F
    ring = product(f"m={ranks}", "parallelize N over m\nshift a: M along m").peak.most
    assert ring == a + b + c + 2 * a + c // ranks  # the share of a tile, while it is merged
    whole = product(f"m={ranks}", "parallelize N over m\nshard a: M over m").peak.most
    assert whole == a + b + 2 * ranks * a  # while the parts are joined
    scatter = product(f"m={ranks}", "parallelize K over m\nshard c: M over m").peak.most
    assert scatter == a + b + 2 * ranks * c + c  # packed, and what is kept
