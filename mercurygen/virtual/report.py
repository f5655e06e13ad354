"""What a run on virtual ranks says: its failure, with the line, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Check = Literal[
    "in-flight-read",  # a buffer is read while something arrives in it
    "in-flight-write",  # a buffer is written while it is sent, or while something arrives in it
    "not-waited",  # a transfer is in flight when the call ends
    "not-contiguous",  # a buffer of a transfer, or a log-sum-exp that is not dense
    "order",  # the ranks' operations do not fit together
    "deadlock",  # nobody can go on
    "misuse",  # a call that torch.distributed refuses
    "not-doubled",  # something of torch.distributed that has no stand-in
    "precision",  # something is accumulated in 16 bits
    "endless",  # a rank does not come to an end
    "module-error",  # the module raises
    "layout",  # the module's helpers cut other slices than the pins say
    "inputs",  # the caller's tensors are changed
    "result",  # not what the operator computes on one device
    "calls",  # other communication than the plan's
]


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank stands in the module's text: lines and functions, the innermost first."""

    stack: tuple[tuple[int, str], ...] = ()

    @property
    def line(self) -> int:
        """The innermost line; 0 if the module is not running."""
        return self.stack[0][0] if self.stack else 0

    def __str__(self) -> str:
        if not self.stack:
            return "outside the module"
        (line, name), *callers = self.stack
        words = [f"line {line} in {name}"]
        words += [f"called from line {line} in {name}" for line, name in callers[:3]]
        return ", ".join(words)


class VirtualError(Exception):
    """A module that does something wrong on virtual ranks.

    Args:
        check: which of the checks fails.
        rank: where; -1 if it is no rank's own fault.
        message: what is wrong, with the operation and the buffer.
        where: in the module's text.
    """

    def __init__(self, check: Check, rank: int, message: str, where: Where | None = None) -> None:
        super().__init__(check, rank, message, where)
        self.check, self.rank, self.message = check, rank, message
        self.where = where or Where()

    def __str__(self) -> str:
        whose = f"rank {self.rank}: " if self.rank >= 0 else ""
        where = f" ({self.where})" if self.where.stack else ""
        return f"{self.check}: {whose}{self.message}{where}"


@dataclass(frozen=True, slots=True)
class Played:
    """What ran.

    Attributes:
        ranks: virtual ones.
        calls: of the operator, on every rank.
        operations: that all ranks started in those calls: batches and collectives.
        error: the largest in float64, relative to the largest value of its tensor.
        seed: of the inputs.
    """

    ranks: int
    calls: int
    operations: int
    error: float
    seed: int
