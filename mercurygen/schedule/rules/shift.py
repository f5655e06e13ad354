"""`shift k, v: S_kv along node, gpu`: stored split, and comes by tile by tile.

before: stages
after:  stages walk k, v: S_kv along node; walk k, v: S_kv along gpu

The first dimension is the outer loop; the inner ring goes once around for every tile of it. Of an
output the partial results go home, with the tiles that they are of, or straight to the owner.
"""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Program, Stage
from mercurygen.schedule.directives import Along, Shift
from mercurygen.schedule.rules.common import by_role, in_order, not_brought, unfit_line

MOST_AHEAD = 8  # tiles that a prefetch may hold: more never hides more
CLASHES = (("both", "reverse"), ("both", "direct"), ("both", "skewed"), ("direct", "skewed"))


def refuse(program: Program, d: Shift) -> Refusal | None:
    """See `not_brought`; and options that do not go together."""
    return not_brought(program, d, _unfit)


def _unfit(program: Program, d: Shift) -> Refusal | None:
    found = unfit_line(program, d, "shift")
    if found:
        return found
    if d.dtype is not None:
        return Refusal(
            "reduce-dtype",
            lambda: (
                f"partial results that are shifted cross links as they are merged, not as "
                f"{d.dtype}",
                f"leave `as {d.dtype}` out, or `shard` them",
            ),
        )
    is_output = program.tensor(d.tensors[0]).role == "output"
    for along in d.along:
        refusal = _options(along, is_output)
        if refusal:
            return refusal
    return None


def _options(along: Along, is_output: bool) -> Refusal | None:
    words = {option.split()[0] for option in along.options}
    for one, other in CLASHES:
        if {one, other} <= words:
            return Refusal(
                "options-clash",
                lambda one=one, other=other: (
                    f"a shift along {along.dim} cannot be both `{one}` and `{other}`",
                    "keep one of the two words",
                ),
            )
    if "prefetch" in words and words & {"both", "skewed"}:
        return Refusal(
            "options-clash",
            lambda: (
                f"a shift along {along.dim} cannot be `prefetch` and "
                f"`{min(words & {'both', 'skewed'})}`, which fetches ahead as it is",
                "leave `prefetch` out",
            ),
        )
    ahead = next((int(o.split()[1]) for o in along.options if o.startswith("prefetch")), 1)
    if ahead > MOST_AHEAD:
        return Refusal(
            "prefetch-too-far",
            lambda: (
                f"prefetch {ahead} along {along.dim} would hold {ahead + 1} tiles",
                f"at most prefetch {MOST_AHEAD}",
            ),
        )
    odd = words & {"both", "skewed", "prefetch", "reverse"}
    if is_output and odd:
        return Refusal(
            "options-clash",
            lambda: (
                f"a shift of results along {along.dim} cannot be `{min(odd)}`",
                "write `direct` or no option: results follow the tiles that they are of",
            ),
        )
    return None


def rewrite(program: Program, d: Shift) -> Program:
    """The program with one more walk per dimension, inside the stages before it."""
    key = "walks", d
    stages = program.shared.get(key)
    if stages is None:
        stages = program.shared[key] = tuple(
            Stage(in_order(program, one.tensors), "walk", one.axis, a.dim, a.options, one.dtype)
            for one in by_role(program, d)
            for a in one.along
        )
    return program.changed(stages=(*program.stages, *stages))
