"""What a command line asks the search for, checked and in normal form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from mercurygen import operators
from mercurygen.cost import topology as topologies
from mercurygen.cost.topology import Topology
from mercurygen.designs import patterns
from mercurygen.errors import UserError, closest, printable, shorten
from mercurygen.ir import documents
from mercurygen.ir.caller import PACKED
from mercurygen.ir.kernel import ATEN
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Problem, Sizes
from mercurygen.schedule.text import OPERATOR

LARGEST_HEADS = 65536  # beyond any model; a help text lists divisors
MOST_RANKS = 4096  # proved level by level beyond 1024: half a minute for 16 x 32 x 8
MOST_OWN = 128  # of an operator of one's own, whose mask goes by position: every pair is looked at


@dataclass(frozen=True, slots=True)
class Request:
    """A search.

    Attributes:
        operator: a shipped name or `path.py::function`.
        topology: the machine.
        topology_ref: its name or file, as the user gave it.
        problem: over all tensor-parallel ranks.
        group: ranks per level, or None for all that tensor parallelism leaves.
        tp: tensor-parallel ranks.
        design: a named design, or None.
        order: of tokens, or None for the mask's usual one.
        passes: "fwd", or "train": with a backward.
        kernel: that runs the body.
        objective: "time", "memory" or "robust".
        memory_limit: bytes, or None for all of a GPU's.
        whole: whether to search all of the space.
        probe: whether the module looks at the machine that it runs on.
        envelope: whether a set is wanted: the fast, the robust and the lean schedule.
    """

    operator: str
    topology: Topology
    topology_ref: str
    problem: Problem
    group: tuple[int, ...] | None = None
    tp: int = 1
    design: str | None = None
    order: str | None = None
    passes: str = "fwd"
    kernel: str = ATEN
    objective: str = "time"
    memory_limit: int | None = None
    whole: bool = False
    probe: bool = False
    envelope: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks per level."""
        from mercurygen.search.place import place

        return place(self.topology, self.group, self.tp)


def make(operator: str, topo: str | None, options: dict) -> Request:
    """The request of a command line.

    Args:
        operator: OP.
        topo: of `--topo`.
        options: the problem options by name, None where not given.

    Raises:
        UserError: what is wrong, with the closest legal value.
    """
    if topo is None:
        raise UserError(
            "usage",
            "which machine? give --topo",
            help="shipped: " + ", ".join(topologies.shipped()) + "; or a file that ends in .toml",
        )
    check_reference(operator)
    supported(operators.load(operator), operator)
    topology = topologies.load(topo)
    given = {key: value for key, value in options.items() if value is not None}
    group = group_of(given.pop("group", None), topology)
    sizes = {key: given.pop(key) for key in _PROBLEM if key in given}
    sizes.setdefault("v_head_dim", sizes.get("head_dim", Problem().head_dim))
    _pack(sizes, given)
    request = Request(operator, topology, topo, Problem(**sizes), group, **given)
    if request.design is not None:
        patterns.get(request.design)
    check_sizes(request.problem, request.sizes)
    return _normal(request)


_PROBLEM = (
    *("batch", "seq", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "mask"),
    *("layout", "window", "ahead", "seq_kv", "align"),
)


def _pack(sizes: dict, given: dict) -> None:
    """Turn --packed and --documents into what a problem has of them."""
    lengths = given.pop("documents", None)
    if not given.pop("packed", False) and lengths is None:
        return
    if lengths is None:
        lengths = documents.usual(sizes.get("seq", Problem().seq))
    sizes |= {"seq": sizes.get("seq", sum(lengths)), "documents": lengths}
    sizes.setdefault("layout", PACKED)


def check_reference(reference: str) -> None:
    """Refuse an operator's name or path that a schedule cannot hold: it reaches emitted text.

    Raises:
        UserError: `not-a-name`.
    """
    if not OPERATOR.fullmatch(reference):
        raise UserError(
            "not-a-name",
            f"operator {shorten(printable(reference))!r} is not a name or path.py::function",
            help="a path has letters, digits and . _ - / only: rename the file, or emit from its "
            "folder",
        )


def supported(operator: Operator, reference: str, among: tuple[str, ...] = ("attention",)) -> None:
    """Refuse an operator that this version would not emit as it is written.

    Args:
        operator: that is asked for.
        reference: as the user has it.
        among: names of the shipped operators that it may be.

    Raises:
        UserError: `operator-not-supported`.
    """
    ours = operators.load(operator.name if operator.name in among else "attention")
    if replace(operator, name=ours.name, doc=ours.doc, file=ours.file) != ours:
        raise UserError(
            "operator-not-supported",
            f"{reference} is not the attention that this version can emit",
            help="schedules are made for the shipped `attention`, or a copy of it in your own "
            "file; give another operator another name",
        )


def check_sizes(problem: Problem | Sizes, group: tuple[int, ...]) -> None:
    """Refuse what no model or proof has room for.

    Raises:
        UserError: `size-out-of-range`, `too-many-ranks`.
    """
    limited = ("heads", "kv_heads", "head_dim", "v_head_dim")
    for name in () if isinstance(problem, Sizes) else limited:
        if getattr(problem, name) > LARGEST_HEADS:
            raise UserError(
                "size-out-of-range",
                f"{name}={getattr(problem, name)} is not a size",
                help=f"an integer from 1 to {LARGEST_HEADS}",
            )
    most = MOST_OWN if isinstance(problem, Sizes) else MOST_RANKS
    if prod(group) > most:
        raise UserError(
            "too-many-ranks",
            f"{prod(group)} ranks: this version proves schedules of up to {most}",
            help="place the operator on a part of the machine: --group, or the line `group`",
        )


def group_of(pairs: dict[str, int] | None, topology: Topology) -> tuple[int, ...] | None:
    """Ranks per level of `--group`, or None.

    Raises:
        UserError: `group-not-of-topology`.
    """
    if pairs is None:
        return None
    levels = [level.name for level in topology.levels]
    for name in pairs:
        if name not in levels:
            raise UserError(
                "group-not-of-topology",
                f"{topology.name} has no level {name!r}",
                help=closest(name, levels),
            )
    missing = [level for level in levels if level not in pairs]
    if missing:
        whole = ",".join(f"{x.name}={pairs.get(x.name, x.size)}" for x in topology.levels)
        raise UserError(
            "group-not-of-topology",
            f"--group says nothing of the level {', '.join(missing)}",
            help=f"give every level: --group {whole}",
        )
    return tuple(pairs[level] for level in levels)


def _normal(request: Request) -> Request:
    """The request without what says the default in words."""
    from mercurygen.search.place import place

    group, order, limit = request.group, request.order, request.memory_limit
    if group == place(request.topology, None, request.tp):
        group = None
    many = prod(request.sizes) > 1
    if order == ("zigzag" if request.problem.mask == "causal" and many else "contiguous"):
        order = None
    if limit == request.topology.gpu.memory_bytes:
        limit = None
    return replace(request, group=group, order=order, memory_limit=limit)


def run(request: Request, progress=None):
    """The search."""
    from mercurygen.emit.module import refuse
    from mercurygen.search.search import search

    return search(
        request.operator,
        request.problem,
        request.topology,
        group=request.group,
        tp=request.tp,
        design=request.design,
        order=request.order,
        kernel=request.kernel,
        memory_limit=request.memory_limit,
        objective=request.objective,
        whole=request.whole,
        passes=request.passes,
        emits=refuse,
        progress=progress,
    )
