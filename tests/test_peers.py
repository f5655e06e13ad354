"""An emitted module beside torch's own ring attention: same ranks, same inputs, same errors."""

from __future__ import annotations

from pathlib import Path

import peer_systems
import peers
import torch
from ranks import run_ranks

SHAPE = peers.Shape(batch=2, seq=64, heads=4, kv_heads=2, head_dim=16)


def errors(
    rank: int, world: int, systems: list[peer_systems.Peer], exact: list[torch.Tensor]
) -> dict[str, tuple[float, ...]]:
    """Of out, dq, dk and dv by system, the largest of all ranks."""
    given = peers.whole(SHAPE, torch.float32)
    return {s.name: peers.measure(s.make(), given, exact, repeats=1).errors for s in systems}


def test_errors_are_those_of_torchs_ring(tmp_path: Path) -> None:
    theirs = [peer for peer in peer_systems.PEERS if peer.name.startswith("torch")]
    ours = peers.emitted(tmp_path, SHAPE, 2, "float32", ["ring"])
    exact = peers.reference(SHAPE, torch.float32)
    found, _ = run_ranks(2, errors, [*ours, *theirs], exact)
    assert list(found) == ["mercurygen ring", "torch ring, all-gather", "torch ring, all-to-all"]
    for name, worst in found.items():
        assert max(worst) < 5e-6, (name, worst)
