"""A refusal of lines that are legal one by one, and which lines these are."""

from __future__ import annotations

from mercurygen.errors import Refusal
from mercurygen.ir.program import Stage

Place = tuple[str, ...]  # a directive's word, then what its line names: by these a line is found


class Fault:
    """A refusal, and by which words to find its line, and the line that it conflicts with.

    Attributes:
        refusal: what is wrong.
        place: the line that it is about; empty: none, as of the mesh.
        rival: the line that conflicts with it.
        instead: the line that it is about if there is none at `place`.
    """

    def __init__(
        self, refusal: Refusal, place: Place = (), rival: Place = (), instead: Place = ()
    ) -> None:
        self.refusal, self.place, self.rival, self.instead = refusal, place, rival, instead


def word_of(stage: Stage) -> str:
    """The word of the directive that a stage is from."""
    return "shift" if stage.kind == "walk" else "shard"
