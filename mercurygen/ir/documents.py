"""Packed documents: several texts one after the other in one sequence, none of which sees another.

Lengths are in tokens, in the order of the documents, and add up to the sequence.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

_RUN = r"[0-9]{1,13}(?:x[0-9]{1,7})?"
LENGTHS = re.compile(rf"{_RUN}(?:,{_RUN})*", re.ASCII)
MOST = 1024  # documents of a problem, which is an example; a module takes any number
SHORTEST = 128  # of the usual lengths


def show(lengths: Iterable[int]) -> str:
    """`4096,128x3`: lengths, equal neighbours as one."""
    runs = ((length, len(list(run))) for length, run in groupby(lengths))
    return ",".join(f"{length}x{count}" if count > 1 else f"{length}" for length, count in runs)


def read(text: str) -> tuple[int, ...] | None:
    """The lengths of a text as `show` makes it; None if it is none, or there are too many."""
    if not LENGTHS.fullmatch(text):
        return None
    pairs = [run.partition("x") for run in text.split(",")]
    runs = [(int(length), int(count or "1")) for length, _, count in pairs]
    if sum(count for _, count in runs) > MOST:
        return None
    return tuple(length for length, count in runs for _ in range(count)) or None


def usual(tokens: int) -> tuple[int, ...]:
    """Lengths where no others are given: half of what is left each time, the longest first.

    So every doubling of the length has as many tokens, as in a mix of short and long texts. What
    is left below twice `SHORTEST` is one document.
    """
    found = []
    while tokens >= 2 * SHORTEST:
        found.append(tokens // 2)
        tokens -= tokens // 2
    return (*found, tokens)


def borders_of(lengths: Iterable[int]) -> tuple[int, ...]:
    """Where each document begins, and the end."""
    return tuple(accumulate(lengths, initial=0))


def within(borders: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The documents that have any of the positions from `start` up to `stop`, first to last."""
    first = bisect_right(borders, start) - 1
    for index in range(first, len(borders) - 1):
        if borders[index] >= stop:
            return
        yield borders[index], borders[index + 1]


def pairs_at(borders: tuple[int, ...], start: int, stop: int, causal: bool) -> int:
    """(query, key) pairs of the queries at the positions from `start` up to `stop`."""
    total = 0
    for begin, end in within(borders, start, stop):
        first, last = max(start, begin), min(stop, end)
        rows = last - first
        if causal:  # row i of a document sees i + 1 columns
            total += rows * (first - begin + last - begin + 1) // 2
        else:
            total += rows * (end - begin)
    return total


def work(lengths: Iterable[int], ranks: int, zigzag: bool, causal: bool) -> list[int]:
    """Pairs of the queries that each rank owns, contiguous or zigzag.

    Args:
        lengths: of the documents; their sum is a multiple of the chunks.
        ranks: that own the sequence.
        zigzag: whether rank r owns chunks r and 2 ranks - 1 - r of 2 ranks, else chunk r of ranks.
        causal: the mask within a document; else full.
    """
    borders = borders_of(lengths)
    chunks = 2 * ranks if zigzag else ranks
    size = borders[-1] // chunks
    each = [pairs_at(borders, i * size, (i + 1) * size, causal) for i in range(chunks)]
    return [each[r] + each[chunks - 1 - r] for r in range(ranks)] if zigzag else each


def busiest(lengths: Iterable[int], ranks: int, zigzag: bool, causal: bool) -> tuple[int, float]:
    """The most pairs of a rank, and the mean; arguments as of `work`."""
    each = work(lengths, ranks, zigzag, causal)
    return max(each), sum(each) / ranks
