"""`mercurygen emit path.py::name`: an operator of the user's own, searched for and emitted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap

import click

from mercurygen import operators
from mercurygen.cli import choice, names, words
from mercurygen.cli.build import Built, build
from mercurygen.cli.files import write_pair
from mercurygen.cli.options import Size
from mercurygen.cli.request import check_reference, check_sizes, group_of
from mercurygen.cost import topology as topologies
from mercurygen.cost.topology import Topology
from mercurygen.emit.header import WHY
from mercurygen.emit.module import refuse
from mercurygen.errors import UserError, closest, printable, shorten
from mercurygen.ir.operator import Operator
from mercurygen.ir.problem import Sizes
from mercurygen.schedule.schedule import Schedule
from mercurygen.search.operator_space import Priced, search_operator
from mercurygen.search.place import links, place, target

_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,60})=([0-9]{1,15}[kKmM]?)")
_FOLDER = "generated"


def is_attention(op: str) -> bool:
    """Whether OP is what the other options are of: attention, or what is no operator at all."""
    if "::" in op:
        check_reference(op)
        return operators.load(op).name == "attention"
    return op != "matmul"


def emit_operator(
    op: str,
    topo: str | None,
    sizes: tuple[str, ...],
    options: dict,
    name: str | None,
    output: str | None,
    force: bool,
) -> None:
    """Search, prove and write the module of a user's operator; print what was chosen.

    Args:
        op: OP.
        topo: of `--topo`.
        sizes: of `--size`, as given.
        options: the other options by name, None where not given.
        name: of the files, or None.
        output: the folder, or None.
        force: overwrite what was edited.

    Raises:
        UserError: what is wrong, with the closest legal value.
    """
    check_reference(op)
    operator = operators.load(op)
    topology = _topology(topo)
    _refuse_others(options, operator)
    problem = _problem(operator, sizes, options)
    group = place(topology, group_of(options.get("group"), topology), 1)
    check_sizes(problem, group)
    occupied = links(topology, group)
    name = names.check_name(name or f"{operator.name}_{topology.name}".replace("-", "_"))
    ranked, refused = search_operator(operator, problem, occupied, lambda p: refuse(p, operator))
    if not ranked:
        listed = ", ".join(f"{slug} {count}" for slug, count in sorted(refused.items()))
        message = f"no schedule of {operator.name} is legal: {listed or 'there is none'}"
        raise UserError("nothing-fits", message, exit_code=1)
    best = ranked[0]
    comments = (_command(op, topo, problem, options), *_because(ranked))
    made = Schedule(
        op, problem, target(topology), group, 1, best.mesh, best.directives, tuple(comments)
    )
    built = build(made, name)
    written = write_pair(Path(output or _FOLDER), built.texts, force=force)
    click.echo(_report(built, ranked, refused, written))


def _topology(topo: str | None) -> Topology:
    if topo is None:
        help = "shipped: " + ", ".join(topologies.shipped()) + "; or a file that ends in .toml"
        raise UserError("usage", "which machine? give --topo", help=help)
    return topologies.load(topo)


_ATTENTIONS = (
    *("batch", "seq", "heads", "kv_heads", "head_dim", "v_head_dim"),
    *(
        "seq_kv",
        "align",
        "layout",
        "order",
        "kernel",
        "objective",
        "memory_limit",
        "tp",
        "whole",
        "schedule",
        "probe",
        "envelope",
    ),
)


def _refuse_others(options: dict, operator: Operator) -> None:
    """Options that only attention has."""
    for option in _ATTENTIONS:
        if options.get(option) is not None:
            raise UserError(
                "usage",
                f"--{option.replace('_', '-')} is an option of attention, not of {operator.name}",
                help="sizes of another operator are given by axis: " + _wanted(operator, {}),
            )


def _wanted(operator: Operator, given: Iterable[str]) -> str:
    """The sizes that are still to be given."""
    return " ".join(f"--size {axis.name}=…" for axis in operator.axes if axis.name not in given)


def _problem(operator: Operator, sizes: tuple[str, ...], options: dict) -> Sizes:
    """The sizes, dtype and mask.

    Raises:
        UserError: `bad-value`, `unknown-axis`, `named-twice`, `operator-not-bound`, ...
    """
    known, extents = [axis.name for axis in operator.axes], {}
    for text in sizes:
        match = _PAIR.fullmatch(text)
        if match is None:
            shown = shorten(printable(text))
            raise UserError("bad-value", f"--size {shown!r} is not AXIS=N, as in M=1024 or M=64k")
        axis, number = match.groups()
        if axis not in known:
            message = f"{operator.name} has no axis {shorten(axis)!r}"
            raise UserError("unknown-axis", message, help=closest(axis, known))
        if axis in extents:
            raise UserError("named-twice", f"--size gives {axis} twice")
        extents[axis] = Size().convert(number, None, None)
    missing = [axis for axis in known if axis not in extents]
    if missing:
        message = f"{operator.name} needs the extent of {', '.join(missing)}"
        raise UserError("operator-not-bound", message, help=_wanted(operator, extents))
    mask, width = _mask(operator, options)
    ordered = tuple((axis, extents[axis]) for axis in known)
    return Sizes(ordered, options.get("dtype") or "float32", mask, width)


def _mask(operator: Operator, options: dict) -> tuple[str, int | None]:
    """Which mask, and its width."""
    causal, width = options.get("causal"), options.get("window")
    given = [
        word for word, x in (("--window", width), ("--causal/--full", causal)) if x is not None
    ]
    if operator.mask is None:
        if given:
            message = f"{operator.name} has no mask: {given[0]} would do nothing"
            raise UserError("operator-without-mask", message, help="leave it out")
        return "full", None
    if len(given) > 1:
        raise UserError("usage", "--window beside --causal or --full", help="give one mask")
    if width is not None:
        if width[1]:
            message = f"{operator.name} sees {width[1]} after itself"
            raise UserError("usage", message, help="a window of your own operator: --window W")
        return "window", width[0]
    if causal is not None:
        return ("causal" if causal else "full"), None
    default = operator.mask.default
    if default is None:
        message = f"which mask? {operator.name} has no default"
        raise UserError("usage", message, help="--causal, --full or --window W")
    return default.kind, default.width


# --- what is said of the choice -------------------------------------------------------------


def _command(op: str, topo: str | None, problem: Sizes, options: dict) -> str:
    """The command, without folders, in a fixed order."""
    plain = [re.sub(r"[^A-Za-z0-9._:-]", "_", re.split(r"[/\\]", x)[-1]) for x in (op, topo or "")]
    parts = [f"mercurygen emit {plain[0]} --topo {plain[1]}"]
    parts += [f"--size {axis}={size}" for axis, size in problem.extents]
    parts += [f"--dtype {problem.dtype}"] if problem.dtype != "float32" else []
    if options.get("window") is not None:
        parts.append(f"--window {problem.window}")
    elif options.get("causal") is not None:
        parts.append(f"--{problem.mask}")
    if options.get("group"):
        parts.append("--group " + ",".join(f"{k}={v}" for k, v in options["group"].items()))
    return " ".join(parts)


def _because(ranked: list[Priced]) -> list[str]:
    best = ranked[0]
    text = f"of {len(ranked)} legal schedules its bytes need the least time on their links"
    text += f", {words.ms(best.seconds)} ms"
    if len(ranked) > 1 and ranked[1].seconds == best.seconds:
        text += "; of those that need as much it holds the least memory"
    return [WHY + line for line in wrap(text, 90)]


def _report(built: Built, ranked: list[Priced], refused: dict[str, int], written) -> str:
    best, width = ranked[0], choice.WIDTH - 11
    lines = [
        *choice.head(built),
        *choice.field("chosen", [str(directive) for directive in best.directives]),
        *choice.field(
            "links",
            [f"{words.ms(best.seconds)} ms for the bytes of the busiest rank; not measured"],
        ),
        *choice.field("memory", [f"{words.mib(built.proved.report.peak.most)} a GPU at the peak"]),
        *choice.field(
            "proof",
            [
                *wrap(words.proof(built.proved.report), width),
                *wrap(f"text parsed again: {words.call_sites(built.summary)}", width),
            ],
        ),
        "",
    ]
    for second in ranked[1:2]:
        text = f"{'; '.join(map(str, second.directives))}: {words.ms(second.seconds)} ms, "
        text += f"{words.mib(second.peak)}"
        lines += choice.field("runner-up", wrap(text, width))
    counted = ", ".join(f"{slug} {count}" for slug, count in sorted(refused.items()))
    total = len(ranked) + sum(refused.values())
    text = f"{words.plural(total, 'schedule')}, {len(ranked)} legal"
    lines += choice.field(
        "searched", wrap(f"{text}, refused: {counted}" if counted else text, width)
    )
    return "\n".join([*lines, "", *choice.foot(built, written)])
