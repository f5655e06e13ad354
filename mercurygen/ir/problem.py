"""The problem that a schedule is made for: sizes, dtype, mask."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isqrt

from mercurygen.errors import UserError, closest, shorten
from mercurygen.ir.caller import INSIDE, PACKED, check_layout

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MASKS = ("causal", "full")  # that need no width; the other is "window"
ALIGNS = ("top-left", "bottom-right")  # query i at key i; the last query at the last key
BACKWARD = ("attention_backward", "attention_backward_out")
ATTENTION = ("attention", *BACKWARD)  # whose problem is a `Problem`; others' are `Sizes`
LARGEST = 2**40  # beyond any machine: what is larger is a slip


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention: sizes over all ranks.

    Attributes:
        batch: sequences.
        seq: tokens of a sequence: queries, and keys too if `seq_kv` does not say their own.
        heads: query heads.
        kv_heads: key/value heads; divides `heads`.
        head_dim: size of a query and key head.
        v_head_dim: size of a value and output head.
        dtype: of the inputs and outputs; partial results are at least float32.
        mask: "causal", "full" or "window".
        layout: of q, k, v and out as the caller holds them: one of `caller.LAYOUTS`; of packed
            documents `caller.PACKED`.
        documents: lengths of packed documents, in their order; none: every sequence is one.
        window: of a window, its width without what is ahead: a row sees itself and the
            window - 1 before it.
        ahead: of a window, how many after itself a row sees.
        seq_kv: keys and values, where they are another sequence than the queries (of
            cross attention, or of a chunk of queries behind a cache); None: the same.
        align: of these, where under a causal mask or a window a query stands among the keys: one
            of ALIGNS. "top-left": query i at key i. "bottom-right": at key i + seq_kv - seq, as in
            flash-attention from 2.1 on. None: of one sequence, or under a full mask.
    """

    batch: int = 1
    seq: int = 131072
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"
    mask: str = "causal"
    layout: str = INSIDE
    documents: tuple[int, ...] = ()
    window: int | None = None
    ahead: int = 0
    seq_kv: int | None = None
    align: str | None = None

    def __post_init__(self) -> None:
        for name in SIZES if self.seq_kv is None else (*SIZES, "seq_kv"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= LARGEST:
                raise UserError(
                    "size-out-of-range",
                    f"{name}={shorten(str(value))} is not a size",
                    help=f"an integer from 1 to {LARGEST}",
                )
        if self.dtype not in DTYPES:
            raise UserError(
                "unknown-dtype",
                f"dtype {shorten(self.dtype)!r} is not supported",
                help=closest(self.dtype, DTYPES),
            )
        if self.mask not in (*MASKS, "window"):
            raise UserError(
                "unknown-mask",
                f"mask {shorten(self.mask)!r} is not supported",
                help=closest(self.mask, (*MASKS, "window")),
            )
        self._check_align()
        self._check_window()
        if self.documents:
            self._check_documents()
        else:
            check_layout(self.layout)
        if self.heads % self.kv_heads:
            raise UserError(
                "heads-not-grouped",
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}",
                help=f"nearest legal heads: {nearest_multiples(self.heads, self.kv_heads)}",
            )

    def _check_align(self) -> None:
        """Where queries stand among keys: said of two sequences that a mask compares, only."""
        if self.align not in (None, *ALIGNS):
            message = f"no alignment {shorten(str(self.align))!r}"
            raise UserError("unknown-align", message, help=closest(str(self.align), ALIGNS))
        if self.seq_kv is None or self.mask == "full":
            if self.align is None:
                return
            one = self.seq_kv is None
            why = "one sequence has no two places" if one else "a full mask compares no positions"
            help = "leave the alignment out" + (", or give seq_kv" if one else "")
            raise UserError("align-unused", f"align={self.align}: {why}", help=help)
        if self.align is None:
            raise UserError(
                "align-missing",
                f"a {self.mask} mask of {self.seq} queries and {self.seq_kv} keys of their own: "
                "where does a query stand among the keys?",
                help="bottom-right: the last query at the last key, as in flash-attention from 2.1 "
                "on (a chunk behind a cache); top-left: query i at key i, as in torch",
            )

    def _check_window(self) -> None:
        """A width for a window, which some row does not fill, and for nothing else."""
        if self.mask != "window":
            if self.window is not None or self.ahead:
                raise UserError(
                    "window-out-of-range",
                    f"a {self.mask} mask with a window of {self.window}",
                    help='the mask is "window" then',
                )
            return
        if not isinstance(self.window, int) or not 1 <= self.window <= LARGEST:
            raise UserError(
                "window-out-of-range",
                f"a window of {shorten(str(self.window))} is none",
                help="1 or more: a query sees itself, so that 1 is itself alone",
            )
        if not isinstance(self.ahead, int) or not 0 <= self.ahead <= LARGEST:
            raise UserError(
                "window-out-of-range",
                f"a window of {shorten(str(self.ahead))} keys after a query is none",
                help="0 or more",
            )
        behind, ahead = self.window - 1 - self.offset, self.ahead + self.offset
        if behind >= self.seq - 1 and (not self.ahead or ahead >= self.keys - 1):
            same = "full" if self.ahead else "causal"
            raise UserError(
                "window-out-of-range",
                f"a window of {self.window} in a sequence of {self.seq} tokens keeps nothing out",
                help=f"leave the window out: the mask is {same}",
            )

    def _check_documents(self) -> None:
        """Packed documents are all there is: of one sequence, one after the other."""
        what = f"{len(self.documents)} documents"
        wrong = [n for n in self.documents if not isinstance(n, int) or n < 1]
        if wrong:
            message = f"documents of length {shorten(str(wrong[0]))}: a document has a token"
        elif sum(self.documents) != self.seq:
            message = f"{what} have {sum(self.documents)} tokens, seq is {self.seq}"
        elif self.batch != 1:
            message = f"{what} in a batch of {self.batch}: they are packed into one sequence"
        elif self.seq_kv is not None:
            message = f"{what} beside seq_kv: theirs are the keys, too"
        elif self.mask == "window":
            message = f"{what} under a window: they go with the masks full and causal"
        elif self.layout != PACKED:
            message = f"{what} in layout {self.layout}: packed tensors are [T, H, D], {PACKED}"
        else:
            return
        help = "lengths that add up to seq, batch=1, and no layout, as in `documents=4096,2048x2`"
        raise UserError("bad-documents", message, help=help)

    @property
    def keys(self) -> int:
        """Keys and values of a sequence."""
        return self.seq if self.seq_kv is None else self.seq_kv

    @property
    def offset(self) -> int:
        """Which key the first query stands at; below 0 the first queries stand before all keys."""
        return self.keys - self.seq if self.align == "bottom-right" else 0

    @property
    def axes(self) -> dict[str, int]:
        """Extent of every axis of the operator."""
        return {
            "B": self.batch,
            "H": self.kv_heads,
            "G": self.heads // self.kv_heads,
            "S_q": self.seq,
            "S_kv": self.keys,
            "D": self.head_dim,
            "D_v": self.v_head_dim,
        }

    def split_heads(self, tp: int) -> Problem:
        """The problem of one of `tp` tensor-parallel ranks, which hold different heads.

        Raises:
            UserError: `heads-not-divisible`.
        """
        if self.kv_heads % tp:
            legal = divisors(self.kv_heads)
            raise UserError(
                "heads-not-divisible",
                f"kv_heads={self.kv_heads} cannot be split over tp={tp}",
                help=f"legal tensor parallelism: {legal}",
            )
        return Problem(
            **{
                **{f.name: getattr(self, f.name) for f in fields(self)},
                "heads": self.heads // tp,
                "kv_heads": self.kv_heads // tp,
            }
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The problem of any other operator: its axes by name.

    Attributes:
        extents: (axis, extent over all ranks), in the operator's order.
        dtype: of the inputs.
        mask: "causal", "full" or "window"; "full" of an operator without a mask.
        window: width of a window: a row sees itself and the window - 1 before it.
        ahead: of an operator of one's own, 0.
    """

    extents: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    mask: str = "full"
    window: int | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        for name, value in self.extents:
            if not isinstance(value, int) or not 1 <= value <= LARGEST:
                raise UserError(
                    "size-out-of-range",
                    f"{name}={shorten(str(value))} is not a size",
                    help=f"an integer from 1 to {LARGEST}",
                )
        if self.dtype not in DTYPES:
            raise UserError(
                "unknown-dtype",
                f"dtype {shorten(self.dtype)!r} is not supported",
                help=closest(self.dtype, DTYPES),
            )
        if self.mask not in (*MASKS, "window") or (self.mask == "window") != bool(self.window):
            raise UserError(
                "unknown-mask",
                f"mask {shorten(self.mask)!r} (window {self.window}) is not supported",
                help="causal, full, or a window with a width of 1 or more",
            )

    @property
    def axes(self) -> dict[str, int]:
        """Extent of every axis of the operator."""
        return dict(self.extents)

    @property
    def documents(self) -> tuple[int, ...]:
        """Packed ones; only attention has any."""
        return ()

    @property
    def seq_kv(self) -> None:
        """Keys of their own; only attention has any."""
        return None

    @property
    def align(self) -> None:
        """Where its queries stand among these."""
        return None

    @property
    def layout(self) -> str:
        """Tensors lie as the operator's signature has them."""
        return INSIDE

    def split_heads(self, tp: int) -> Sizes:
        """The problem of one of `tp` tensor-parallel ranks; there is just one.

        Raises:
            UserError: `tp-without-heads`.
        """
        if tp != 1:
            raise UserError(
                "tp-without-heads",
                f"tp {tp}: only attention's heads are shared by tensor-parallel ranks",
                help="tp 1",
            )
        return self


SIZES = ("batch", "seq", "heads", "kv_heads", "head_dim", "v_head_dim")


def divisors(value: int) -> str:
    """The numbers that divide a value, for a help text; of many only the smallest."""
    small = [n for n in range(1, isqrt(value) + 1) if value % n == 0]
    found = sorted({*small, *(value // n for n in small)})
    return ", ".join(map(str, found[:16])) + (", …" if len(found) > 16 else "")


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` on both sides of a value, for a help text."""
    below, above = value // step * step, -(-value // step) * step
    return f"{below} or {above}" if below else str(above)
