"""A refusal of a whole schedule, and which of its lines it is about."""

from __future__ import annotations

from mercurygen.errors import Refusal


class Fault:
    """A refusal, the word of the directive that it is about (None: the mesh), and its rival.

    Attributes:
        refusal: what is wrong.
        word, mention: the last line with this word, if possible with what it names.
        rival: likewise the line that conflicts with it.
    """

    def __init__(
        self,
        refusal: Refusal,
        word: str | None,
        mention: str = "",
        rival: tuple[str, str] | None = None,
    ) -> None:
        self.refusal, self.word, self.mention, self.rival = refusal, word, mention, rival
