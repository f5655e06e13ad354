"""The module that chooses among a few schedules of one problem when it runs.

Like any module it is a function of text: what its docstring says of the set, and the schedules of
its members. So `mercurygen check` makes it again without a search.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from mercurygen.emit import outside
from mercurygen.emit.expects import placed
from mercurygen.emit.module import format_text, signed
from mercurygen.emit.templates import render
from mercurygen.errors import UserError
from mercurygen.ir.mesh import cover
from mercurygen.ir.problem import DTYPES
from mercurygen.schedule.schedule import Schedule

ROLES = {  # in the order in which they are tried where their times are alike
    "fast": "the least time as planned",
    "robust": "the least worst regret where links are not as planned",
    "lean": "the least memory",
}
ALIKE = 1.01  # of times that the search takes for the same, too
HEADING = "Schedules of this set, ms a call by the model"
_AXES = {"q": "HD", "k": "KD", "v": "KE"}
_LINE = re.compile(
    r"    (fast|robust|lean) +(\d+\.\d{4}) as planned((?:, \d+\.\d{4} with \w+ slow)*)"
)
_SLOW = re.compile(r", (\d+\.\d{4}) with (\w+) slow")
_SAME = re.compile(r"    (robust|lean) +is (fast|robust)")


@dataclass(frozen=True, slots=True)
class Member:
    """One schedule of the set.

    Attributes:
        role: of ROLES.
        ms: of a call as planned, by the model.
        slow: per level, ms of a call where its links have half their speed.
    """

    role: str
    ms: float
    slow: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the docstring says of a set.

    Attributes:
        name: of the module that chooses; its members are called NAME_ROLE.
        command: that searched.
        members: distinct schedules, in the order of ROLES.
        same: of each other role the one whose schedule it is.
    """

    name: str
    command: str
    members: tuple[Member, ...]
    same: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a member from its schedule alone.

    Attributes:
        schedule: of the member.
        peak: bytes of a rank at the peak, its inputs included.
        multiples: of the whole sequence, the batch, K, and H / K.
    """

    schedule: Schedule
    peak: int
    multiples: tuple[int, int, int, int]


def text(envelope: Envelope, facts: Sequence[Facts]) -> str:
    """The module.

    Args:
        envelope: the set.
        facts: of its members, in their order.
    """
    problem = facts[0].schedule.local_problem
    ranks = facts[0].schedule.mesh.size
    sizes = {
        **{"B": problem.batch, "S": problem.seq // ranks, "H": problem.heads},
        **{"K": problem.kv_heads, "D": problem.head_dim, "E": problem.v_head_dim},
    }
    b, s, h, d = outside.places(problem.layout)
    roles = [member.role for member in envelope.members]
    levels = tuple(level for level, _ in envelope.members[0].slow)
    members = zip(envelope.members, facts, strict=True)
    body = render(
        "envelope",
        doc=_docstring(envelope, ranks),
        imports="\n".join(sorted(f"import {envelope.name}_{x} as {x}" for x in roles)),
        world=ranks,
        sizes=repr(sizes).replace("'", '"'),
        alike=ALIKE,
        levels=str(levels).replace("'", '"'),
        count=2 * (len(sizes) + 1) + 1 + len(levels),
        itemsize=DTYPES[problem.dtype],
        placed=placed(facts[0].schedule.expected),
        shapes=", ".join(
            f"{x}.shape[{i}]" for x, i in zip("qqqkqv", (b, s, h, h, d, d), strict=True)
        ),
        **{x: outside.shape(problem.layout, "B", "S", *axes) for x, axes in _AXES.items()},
        members="\n".join(f'    "{x.role}": {_member(x, each)},' for x, each in members),
    )
    return signed(format_text(body + "\n"), envelope.command)


def _docstring(envelope: Envelope, ranks: int) -> str:
    lines = [f"    {x.role:<7} {x.ms:.4f} as planned{_slow(x)}" for x in envelope.members]
    lines += [f"    {role:<7} is {other}" for role, other in envelope.same]
    roles = "; ".join(f"{role}: {what}" for role, what in ROLES.items())
    files = ", ".join(f"{envelope.name}_{x.role}.py" for x in envelope.members)
    about = (
        f"Chosen by shape, free memory and measured link speeds, alike on all {ranks} ranks. Its "
        f"schedules are {files}, which must be importable too. {roles[0].upper()}{roles[1:]}."
    )
    count = len(envelope.members)
    title = f"Attention by one of {count} schedules." if count > 1 else "Attention by one schedule."
    return "\n\n".join([title, "\n".join(wrap(about, 98)), "\n".join([HEADING, *lines])]) + "\n"


def _slow(member: Member) -> str:
    return "".join(f", {ms:.4f} with {level} slow" for level, ms in member.slow)


def _member(member: Member, facts: Facts) -> str:
    """A member as the module has it."""
    adds = ", ".join(f'"{x}": {round(max(0.0, ms - member.ms), 4)}' for x, ms in member.slow)
    links = facts.schedule.links
    covered = cover(facts.schedule.mesh, links)
    outermost = {dim: links[indices[0]].level for dim, indices in covered.items()}
    levels = ", ".join(f'"{dim}": "{level}"' for dim, level in outermost.items())
    what = f"{member.role}, {member.ms}, {{{adds}}}, {{{levels}}}"
    return f"Member({what}, {facts.peak}, {facts.multiples})"


def parse(name: str, module: str) -> Envelope | None:
    """What a module's docstring says of a set; None if it is no such module.

    Args:
        name: of the file.
        module: its text.

    Raises:
        UserError: `not-an-envelope`: it is one, but the lines of its set are not understood.
    """
    lines = module.split("\n")
    if HEADING not in lines:
        return None
    members, same = [], []
    for line in lines[lines.index(HEADING) + 1 :]:
        if not line.startswith("    "):
            break
        if found := _LINE.fullmatch(line):
            slow = tuple((level, float(ms)) for ms, level in _SLOW.findall(found[3]))
            members.append(Member(found[1], float(found[2]), slow))
        elif found := _SAME.fullmatch(line):
            same.append((found[1], found[2]))
        else:
            raise _not_understood(name, line.strip())
    roles = [member.role for member in members]
    if not members or roles != [role for role in ROLES if role in roles]:
        raise _not_understood(name, "its members")
    return Envelope(name, lines[1].removeprefix("#").strip(), tuple(members), tuple(same))


def _not_understood(name: str, what: str) -> UserError:
    return UserError(
        "not-an-envelope",
        f"{name}.py chooses among schedules, but {what!r} is no line of its set",
        help="emit it again: its second line has the command",
    )
