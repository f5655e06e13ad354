"""The problem options that `emit` and `search` share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

from mercurygen.errors import UserError, printable, shorten

_SIZE = re.compile(r"([0-9]{1,15})([kKmM]?)")
_FACTOR = {"": 1, "k": 2**10, "m": 2**20}
_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(|B|[KMGT]i?B)")
_PREFIX = {"K": 1, "M": 2, "G": 3, "T": 4}
_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)=([0-9]{1,9})")


class Size(click.ParamType):
    """A whole number; `128k` is 131072 and `1M` 1048576."""

    name = "N"

    def convert(self, value, param, ctx) -> int:
        """The number."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value)
        if match is None:
            raise _refusal(param, value, "a whole number, as in 131072, 128k or 1M")
        return int(match[1]) * _FACTOR[match[2].lower()]


class Bytes(click.ParamType):
    """An amount of memory: `40GiB`, `500 MB`, or a number of bytes."""

    name = "BYTES"

    def convert(self, value, param, ctx) -> int:
        """The bytes."""
        if isinstance(value, int):
            return value
        match = _BYTES.fullmatch(value)
        if match is None:
            raise _refusal(param, value, "an amount of memory, as in 40GiB, 500MB or 1073741824")
        number, unit = match.groups()
        power = _PREFIX.get(unit[:1], 0)
        found = int(float(number) * (1024 if "i" in unit else 1000) ** power)
        if found < 1:
            raise _refusal(param, value, "more than nothing, as in 40GiB")
        return found


class Window(click.ParamType):
    """A window: `4096`, a query and the 4095 keys before it, or `511,512`, so many on each side."""

    name = "W"

    def convert(self, value, param, ctx) -> tuple[int, int | None]:
        """Keys up to the query itself, and after it; None if only a width is given."""
        if isinstance(value, tuple):
            return value
        matches = [_SIZE.fullmatch(part.strip()) for part in value.split(",", 1)]
        if not all(matches):
            wanted = "a width, as in 4096, or keys before and after, as in 511,512"
            raise _refusal(param, value, wanted)
        width, *after = (int(match[1]) * _FACTOR[match[2].lower()] for match in matches)
        return (width + 1, after[0]) if after else (width, None)


class Group(click.ParamType):
    """Ranks per level: `node=2,gpu=4`."""

    name = "LEVEL=N,..."

    def convert(self, value, param, ctx) -> dict[str, int]:
        """Level -> ranks."""
        if isinstance(value, dict):
            return value
        matches = [_PAIR.fullmatch(part.strip()) for part in value.split(",")]
        pairs = {match[1]: int(match[2]) for match in matches if match}
        if len(pairs) < len(matches):
            raise _refusal(param, value, "levels, each once, as in node=2,gpu=4")
        return pairs


class Lengths(click.ParamType):
    """Lengths of documents: `4096,128x3`, or a file of them, with blanks between."""

    name = "N,N,..."

    def convert(self, value, param, ctx) -> tuple[int, ...]:
        """The lengths, in order."""
        from mercurygen.ir import documents

        if isinstance(value, tuple):
            return value
        text = value
        if not documents.LENGTHS.fullmatch(value) and Path(value).is_file():
            text = ",".join(Path(value).read_text(errors="replace").replace(",", " ").split())
        lengths = documents.read(text)
        if lengths is None:
            wanted = f"lengths of documents, as in 4096,128x3, at most {documents.MOST}, or a file"
            raise _refusal(param, value, wanted)
        return lengths


def _refusal(param: click.Parameter | None, value: str, wanted: str) -> UserError:
    name = param.opts[0] if param else "value"
    return UserError("bad-value", f"{name} {shorten(printable(value))!r} is not {wanted}")


_OPTIONS = (
    click.option("--topo", metavar="T", help="A shipped topology, or a file that ends in .toml."),
    click.option("--batch", type=Size(), help="Sequences.  [default: 1]"),
    click.option("--seq", type=Size(), help="Tokens over all ranks: 131072, 128k, 1M.  [128k]"),
    click.option("--seq-kv", type=Size(), help="Keys and values, if they are not the queries'."),
    click.option(
        "--align",
        metavar="A",
        help="Which of these a query stands at: bottom-right (the last at the last) or top-left.",
    ),
    click.option("--heads", type=Size(), help="Query heads.  [default: 32]"),
    click.option("--kv-heads", type=Size(), help="Key/value heads.  [default: 8]"),
    click.option("--head-dim", type=Size(), help="Size of a head of q and k.  [default: 128]"),
    click.option("--v-head-dim", type=Size(), help="Size of a head of v.  [default: --head-dim]"),
    click.option("--dtype", metavar="T", help="bfloat16 (default), float16, float32 or float64."),
    click.option("--causal/--full", default=None, help="The mask.  [default: causal]"),
    click.option(
        "--window",
        type=Window(),
        help="A query sees itself and W - 1 keys before it; or L,R: L before, R after, as "
        "flash-attention's window_size.",
    ),
    click.option("--layout", metavar="L", help="Of q, k, v, out: bshd (default), bhsd or sbhd."),
    click.option(
        "--packed", is_flag=True, default=None, help="Documents packed into one sequence."
    ),
    click.option("--documents", type=Lengths(), help="Their lengths.  [default: halving]"),
    click.option("--order", metavar="O", help="Of tokens: zigzag, contiguous or any."),
    click.option("--pass", "passes", metavar="P", help="fwd (default), or train: backward too."),
    click.option("--kernel", metavar="K", help="Of a block: aten (default), or triton."),
    click.option("--objective", metavar="O", help="time (default), memory or robust."),
    click.option(
        "--whole-space",
        "whole",
        is_flag=True,
        default=None,
        help="Also split batch and columns; slower.",
    ),
    click.option("--memory-limit", type=Bytes(), help="Of a GPU: 40GiB.  [default: all of it]"),
    click.option("--group", type=Group(), help="Ranks per level.  [default: all]"),
    click.option("--tp", type=Size(), help="Tensor-parallel ranks that share the heads.  [1]"),
)
NAMES = (
    *("batch", "seq", "heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "causal", "window"),
    *("seq_kv", "align", "layout", "packed", "documents", "order", "passes", "kernel"),
    *("objective", "whole", "memory_limit", "group", "tp"),
)


def problem_options(command: Callable) -> Callable:
    """All problem options, in order; the command gets them as keywords."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split(keywords: dict) -> dict:
    """The problem options among a command's keywords, as `request.make` wants them."""
    options = {name: keywords[name] for name in NAMES}
    causal = options.pop("causal")
    options["mask"] = None if causal is None else "causal" if causal else "full"
    window = options.pop("window")
    if window is None:
        return options
    width, after = window
    if causal is False and after is None:
        help = f"--window {width - 1},{width - 1}: as many on both sides"
        raise UserError("usage", "--full --window W: how far does a query see ahead?", help=help)
    if causal and after:
        help = f"--window {width}, or leave --causal out"
        raise UserError("usage", f"--causal beside a window of {after} keys ahead", help=help)
    return {**options, "mask": "window", "window": width, "ahead": after or None}
