"""What the caller of a module holds of every tensor: a slice of the sequence, or all of it."""

from __future__ import annotations

from math import prod

from mercurygen.errors import Refusal
from mercurygen.ir.atoms import atoms_of
from mercurygen.ir.program import Program, Tensor
from mercurygen.lower.plan import Plan, sliced

LETTERS = {"q": "BNHD", "k": "BNKD", "v": "BNKE", "out": "BNHE", "lse": "BHN"}


def not_placed(program: Program) -> Refusal | None:
    """Refuse pins that DTensor has no placement for: parts that are no run of a dimension."""
    for tensor in program.tensors:
        for axis in dict.fromkeys(filter(None, tensor.pin)):
            dims = tuple(d for d in program.mesh.names if program.pinned(tensor, d) == axis)
            order = atoms_of(program).order(tensor, axis).dims
            if axis not in program.mask_axes and (axis not in "BH" or order[: len(dims)] != dims):
                explain = _not_placed(tensor, axis, dims, order)
                return Refusal("pin-not-supported", lambda explain=explain: explain)
    return None


def _not_placed(
    tensor: Tensor, axis: str, dims: tuple[str, ...], order: tuple[str, ...]
) -> tuple[str, str]:
    """Why, and what is possible."""
    over = ", ".join(dims)
    where = f"{tensor.name} is pinned {axis} over {over}"
    if axis not in "BH":
        return (
            f"{where}: a part of every group of {tensor.name}, for which DTensor's placements, in "
            "which a module says what its caller holds, have no word",
            f"pin {tensor.name} by S, H or B over {over}, or not at all",
        )
    return (
        f"{where}, and the schedule deals {axis} over {', '.join(order)}: a rank's part is then no "
        "run, for which DTensor's placements, in which a module says what its caller holds, have "
        "no word",
        f"pin {tensor.name} by {axis} over {', '.join(order)}, or by S over {over}",
    )


def ways(program: Program, tensor: Tensor, axis: str) -> int:
    """Among how many ranks the caller has a tensor's axis split."""
    pinned = zip(program.mesh.dims, tensor.pin, strict=True)
    return prod(dim.size for dim, along in pinned if along == axis)


def sizes(program: Program, name: str) -> list[str]:
    """`B / 2`, `N / 4`, ...: what a rank has of the whole sizes; slices: `B`, `S`, ..."""
    tensor = program.tensor(name)
    if sliced(program):
        letter = _letter(program, name)
        return [each.replace("N", letter) for each in LETTERS[name]]
    shares = [ways(program, tensor, dim[0]) for dim in tensor.dims]
    return [f"{x} / {n}" if n > 1 else x for x, n in zip(LETTERS[name], shares, strict=True)]


def quoted(names: tuple[str, ...]) -> str:
    """`"node", "gpu"`, as a tuple's elements."""
    return ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")


def whole(program: Program, name: str) -> bool:
    """Whether every rank holds all of a tensor that has a sequence."""
    return bool(program.mesh.dims) and not any(program.tensor(name).pin)


def all_whole(plan: Plan) -> tuple[str, ...]:
    """The tensors that every rank holds all of."""
    return tuple(t.name for t in plan.program.tensors if whole(plan.program, t.name))


def length(plan: Plan, name: str) -> str:
    """The letter for the tokens of a tensor on a rank: S, or N of the whole sequence.

    Of keys that are a sequence of their own T, or M.
    """
    return _letter(plan.program, name)


def _letter(program: Program, name: str) -> str:
    own = program.align is not None and name in ("k", "v")
    return ("SN", "TM")[own][whole(program, name)]


def inside(plan: Plan) -> str:
    """The letter for the tokens of keys and values in the body: s, as of queries, or their own."""
    return "s" if plan.program.align is None else "t"


def listed(names: tuple[str, ...], last: str = "and") -> str:
    """`q, out and lse`."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
