"""Emitted text of the border's functions: x [B, S, H, D], of which one axis is joined, one dealt.

How an axis is dealt to the ranks of a group, and joined of their parts, is a `Side`. An all-to-all
has two of them, any two; a gather has only what is joined, a cut only what is dealt. The fixed
texts of `_split` and `_join` deal and join the sequence, by the order of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

COPY = "clone(memory_format=torch.contiguous_format)"


@dataclass(frozen=True, slots=True)
class Side:
    """How an axis is dealt and joined.

    Attributes:
        name: of the axis in functions.
        dim: of x.
        letter: of its extent.
        count: the name of the number of runs, each of which is dealt; "": it is one run.
        all: what a rank has where the axis is joined, in words.
        part: what it has where it is dealt.
    """

    name: str
    dim: int
    letter: str
    count: str
    all: str
    part: str

    def dealt(self) -> list[str]:
        """Lines that make parts, one for every rank of the group, but the last line's return."""
        if not self.count:
            return [f"torch.stack(x.chunk(group.size(), dim={self.dim}))"]
        at = self.dim + 1
        chunks = f"x.unflatten({self.dim}, ({self.count}, -1)).chunk(group.size(), dim={at})"
        return [f"torch.stack({chunks})", f"parts.flatten({at}, {at + 1})"]

    def joined(self) -> tuple[str, str]:
        """What is made of parts [n, B, S, H, D], in one expression; or in a line before it."""
        at = self.dim + 1
        if not self.count:
            return "", f"torch.cat(parts.unbind(), dim={self.dim})"
        flat = f"flatten({self.dim}, {at})"
        return (
            f"parts = parts.unflatten({at}, ({self.count}, -1))",
            f"torch.cat(parts.unbind(), dim={at}).{flat}",
        )

    def woven(self) -> list[str]:
        """Lines that join parts of which each has its tokens in runs: [n, runs, B, S / runs, ...].

        One copy: the ranks go behind what they have parts of, the runs of tokens before theirs.
        """
        batch = self.dim == 0
        at = 2 if batch else 4  # where the axis is in such parts
        if not self.count:
            order = "transpose(1, 2)" if batch else "permute(2, 1, 3, 0, 4, 5)"
            flat = "flatten(2, 3).flatten(0, 1)" if batch else "flatten(3, 4).flatten(1, 2)"
            shape = "[n, B / n, runs, S / runs, H, D]" if batch else ""
            shape = shape or "[B, runs, S / runs, n, H / n, D]"
            return [f"parts = parts.{order}  # {shape}", f"return parts.{COPY}.{flat}"]
        shape = "[n, runs, B, S / runs, K, H / K / n, D]" if self.name == "query_heads" else ""
        order = "permute(2, 0, 3, 1, 4, 5, 6)" if batch else "permute(2, 1, 3, 4, 0, 5, 6)"
        flat = "flatten(3, 4).flatten(0, 2)" if batch else "flatten(3, 5).flatten(1, 2)"
        return [
            f"parts = parts.unflatten({at}, ({self.count}, -1))" + (f"  # {shape}" * bool(shape)),
            f"parts = parts.{order}.{COPY}",
            f"return parts.{flat}",
        ]


_TOKENS = "all tokens of the n ranks, in global order"
_RUN = "of every run of {} a part"
SEQUENCE = Side("sequence", 1, "S", "", _TOKENS, "this rank's tokens")
HEADS = Side("heads", 2, "H", "", "all heads", "a part of the heads")
QUERY_HEADS = Side(
    *("query_heads", 2, "H", "kv_heads", "all heads"),
    "of every key/value head a part of its query heads",
)
BATCH = Side("batch", 0, "B", "", "all of the batch", "a part of the batch")
HEAD_RUNS = Side("head_runs", 2, "H", "heads", "all heads", _RUN.format("heads"))
BATCH_RUNS = Side("batch_runs", 0, "B", "rows", "all of the batch", _RUN.format("the batch"))


def shape(*split: Side, longer: bool = False) -> str:
    """`[B, n S, H / n, D]`: of x where some axes are split, and the sequence that much longer."""
    letters = ["B", "n S" if longer else "S", "H", "D"]
    for side in split:
        if side is not SEQUENCE:
            letters[side.dim] += " / n"
    return f"[{', '.join(letters)}]"


@dataclass(frozen=True, slots=True)
class Tokens:
    """How the sequence is dealt and joined.

    Attributes:
        split: whether by `_split`; else a rank owns one run of tokens.
        runs: whether that gives runs of tokens.
        count: the name of the number that `_split` and `_join` take; "": none.
    """

    split: bool
    runs: bool
    count: str


def counts(sides: tuple[Side, ...], tokens: Tokens | None = None) -> str:
    """Parameters of a function for how axes fall into runs."""
    named = [tokens.count] if tokens and SEQUENCE in sides else []
    named += [side.count for side in sides]
    return "".join(f", {name}: int" for name in named if name)


def swap(gathered: Side, split: Side, tokens: Tokens, reverse: bool = False) -> str:
    """An all-to-all.

    Args:
        gathered: is joined.
        split: is dealt.
        tokens: how the sequence is.
        reverse: of a function that stands before it.
    """
    given = counts((gathered, split), tokens)
    longer = SEQUENCE in (gathered, split)
    before = shape(gathered, longer=longer and gathered is not SEQUENCE)
    after = shape(split, longer=longer and split is not SEQUENCE)
    what = "the reverse" if reverse else _what(gathered, split)
    lines = [
        f"def _{gathered.name}_to_{split.name}(x: Tensor, group: dist.ProcessGroup{given})"
        " -> Tensor:",
        f'    """{before} -> {after}: {what}."""',
    ]
    return "\n".join([*lines, *(f"    {line}" for line in _swap(gathered, split, tokens))])


def _what(gathered: Side, split: Side) -> str:
    """What a rank has after a swap."""
    if gathered is SEQUENCE:
        return split.part if split.count else gathered.all
    return f"{gathered.all} of {split.part}"


def _swap(gathered: Side, split: Side, tokens: Tokens) -> list[str]:
    """The lines of an all-to-all."""
    if split is SEQUENCE:
        return _to_sequence(gathered, tokens)
    dealt = split.dealt()
    parts = f"[n, {shape(gathered, split)[1:]}" if gathered is not SEQUENCE else ""
    parts = parts or f"[n, {shape(split)[1:]}"
    lines = [f"parts = {dealt[0]}"] if len(dealt) > 1 else []
    lines.append(f"parts = _all_to_all({dealt[-1]}, group)  # {parts}")
    return [*lines, *_join(gathered, tokens)]


def _join(side: Side, tokens: Tokens) -> list[str]:
    """Lines that join parts [n, B, S, H, D] and return that."""
    if side is SEQUENCE:
        return [f"return _join(parts{f', {tokens.count}' if tokens.count else ''})"]
    before, value = side.joined()
    return [*([before] if before else []), f"return {value}"]


def _to_sequence(gathered: Side, tokens: Tokens) -> list[str]:
    """The lines of an all-to-all that deals tokens."""
    more = f", {tokens.count}" if tokens.count else ""
    parts = f"_split(x, group.size(){more})" if tokens.split else SEQUENCE.dealt()[0]
    if tokens.runs:
        return [f"parts = _all_to_all({parts}, group)", *gathered.woven()]
    shaped = f"[n, {shape(gathered)[1:]}"
    return [f"parts = _all_to_all({parts}, group)  # {shaped}", *_join(gathered, tokens)]


def gather(side: Side, tokens: Tokens) -> str:
    """`_all_heads` and the like: of all ranks of a group."""
    before = shape(side) if side is not SEQUENCE else "[B, S, H, D]"
    after = shape(longer=side is SEQUENCE)
    return "\n".join(
        [
            f"def _all_{side.name}(x: Tensor, group: dist.ProcessGroup{counts((side,), tokens)})"
            " -> Tensor:",
            f'    """{before} -> {after}: {side.all}."""',
            "    parts = x.new_empty(group.size(), *x.shape)",
            "    _all_gather(parts, x.contiguous(), group).wait()",
            *(f"    {line}" for line in _join(side, tokens)),
        ]
    )


def own(side: Side) -> str:
    """`_own_heads` and the like: a rank's part of what all have, a run, or one of each run."""
    before = shape(longer=side is SEQUENCE)
    after = shape(side) if side is not SEQUENCE else "[B, S, H, D]"
    part = f"x.chunk(group.size(), dim={side.dim})[group.rank()].{COPY}"
    if side.count:
        at = side.dim + 1
        runs = f"x.unflatten({side.dim}, ({side.count}, -1)).chunk(group.size(), dim={at})"
        part = f"{runs}[group.rank()].{COPY}.flatten({side.dim}, {at})"
    return "\n".join(
        [
            f"def _own_{side.name}(x: Tensor, group: dist.ProcessGroup{counts((side,))})"
            " -> Tensor:",
            f'    """{before} -> {after}: {side.part}."""',
            f"    return {part}",
        ]
    )
