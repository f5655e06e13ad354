"""The one list of functions that an operator may call.

Each is torch's function of the same name with torch's argument names, so a compute line means
the same when it runs as written, when it is interpreted, and when it is pasted into a module.
torch is imported by the first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Function:
    """A function of tensors.

    Attributes:
        name: here and in torch.
        parameters: all required; `dim` must be an integer literal.
    """

    name: str
    parameters: tuple[str, ...]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """torch's result: tensors in, a tensor out."""
        import torch

        return getattr(torch, self.name)(*args, **keywords)


def _table() -> dict[str, Function]:
    shapes = {
        ("input",): ("abs", "exp", "log", "sqrt", "tanh"),
        ("input", "other"): ("logaddexp", "matmul", "maximum", "minimum"),
        ("input", "dim"): ("amax", "amin", "argmax", "argmin", "logsumexp", "sum"),
        ("condition", "input", "other"): ("where",),
        ("input", "index"): ("take",),
    }
    return {name: Function(name, p) for p, names in shapes.items() for name in sorted(names)}


FUNCTIONS: dict[str, Function] = _table()


def softmax_merge(out: Any, lse: Any, new_out: Any, new_lse: Any) -> tuple[Any, Any]:
    """Merge two partial softmax-weighted averages.

    Args:
        out, new_out: [..., D], averages over disjoint sets of keys; 0 over no keys.
        lse, new_lse: [...], log of the sum of the weights; -inf over no keys.

    Returns:
        (out, lse) over both sets; (0, -inf), never nan, if both are empty.
    """
    import torch

    total = torch.logaddexp(lse, new_lse)
    empty = total == -torch.inf
    # the choice stands inside the exponential: outside it, the gradient would be 0 * nan
    share = torch.exp(torch.where(empty, -torch.inf, lse - total))[..., None]
    new_share = torch.exp(torch.where(empty, -torch.inf, new_lse - total))[..., None]
    return out * share + new_out * new_share, total


def sum_merge(*states: Any) -> tuple[Any, ...]:
    """Add two partial states, one tensor per output in each."""
    half = len(states) // 2
    return tuple(a + b for a, b in zip(states[:half], states[half:], strict=True))
