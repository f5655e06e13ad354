"""Names that emitted modules use themselves, so that nobody else's may be the same."""

from __future__ import annotations

import builtins

# At the top of a module, and the parameters of its functions beside the operator's own.
MODULE = frozenset(
    "torch dist inspect sys F Tensor DeviceMesh P2POp Placement Replicate Shard Iterable "
    "Iterator timedelta annotations bisect_left groupby pairwise crc32 MESH WORLD_SIZE PLACEMENTS "
    "make_mesh shard unshard positions pad_sequence shard_sequence unshard_sequence shard_labels "
    "triton tl Any WINDOW Band once_differentiable "
    "check_inputs mesh seq return_lse tiles product prod "
    "cu_seqlens document_positions pad_documents imbalance "
    "NamedTuple gethostname perf_counter probe check_placement LinkSpeed".split()
)

# What a schedule says in the place of an axis.
REPLICATED = "replicated"
SCHEDULE = frozenset({REPLICATED})


def reserved(name: str) -> str | None:
    """What a name is that an operator's file cannot give to something else; None if it can."""
    if name in dir(builtins):
        return "is a builtin of Python, which emitted modules may call"
    if name in MODULE:
        return "is a name of emitted modules"
    if name in SCHEDULE:
        return "is a word of schedules that stands where names of axes do"
    if name.startswith("_"):
        return "starts with an underscore, as the private names of emitted modules do"
    return None
