"""A plan played for one rank: the emitted module's own shape, on buffers that hold nothing.

The functions here, and those that they build on (from `tiles`, `border` and `nest` down to
`walks` and `rings`), are those of an emitted module, statement for statement. A buffer lives as
long as a Python variable refers to it, here as there (`recorder`).
"""

from __future__ import annotations

from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Derive, Return, Trace
from mercurygen.lower.plan import Plan
from mercurygen.lower.recorder import Tile
from mercurygen.lower.results import Named, named
from mercurygen.lower.tiles import TileLoops


def trace(plan: Plan, rank: int, *, with_lse: bool = False) -> Trace:
    """What a rank does in one call, with or without handing out the log-sum-exp."""
    return _Player(plan, rank).play(with_lse)


class _Player(TileLoops):
    """One rank at work."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.kept: Named = {}
        self.returned: list[Tile] = []

    def play(self, with_lse: bool) -> Trace:
        """The public function: border, nest, border; or the tile loops around them."""
        caller = {}
        for tensor in self.program.inputs:
            region = self.atoms.pinned(tensor, self.place)
            caller[tensor.name] = self.tile(tensor.name, tensor, region)
        inputs = {name: x.live.number for name, x in caller.items()}
        wanted = [
            t for t in self.program.outputs if with_lse or t.name not in self.program.optional
        ]
        if self.plan.tiles:
            self.play_tiles({**caller, **self.derived(caller)}, wanted)
        else:  # what is derived goes once it is resharded: nothing else refers to it
            self.play_whole({**caller, **self.derived(caller)}, wanted)
        return Trace(self.rank, tuple(self.events), tuple(self.buffers), inputs, self.regions)

    def derived(self, caller: Named) -> Named:
        """Tensors that are made of inputs, where their rows live."""
        found = {}
        for tensor in self.program.derived:
            region = self.atoms.pinned(tensor, self.place)
            found[tensor.name] = x = self.tile(tensor.name, tensor, region)
            reads = tuple(caller[name].live.number for name in tensor.reads)
            self.events.append(Derive(reads, x.live.number))
        return found

    def play_whole(self, tensors: Named, wanted: list[Tensor]) -> None:
        """Without tile loops."""
        paths = {
            x.tensor.name: self.path(x.tensor, self.steps_of(x.tensor)) for x in tensors.values()
        }
        for step in self.plan.before:
            resharded = []
            for name in step.tensors:
                region = paths[name][1 + self.steps_of(tensors[name].tensor).index(step)]
                resharded.append(self.reshard(tensors[name], step, region))
            tensors = {**tensors, **named(tuple(resharded))}
            del resharded
        self.kept = tensors  # as the variables of the function: to its end
        self.hand_out(self.nest(tensors), wanted)

    def hand_out(self, results: Named, wanted: list[Tensor]) -> None:
        """Results on their way to the caller."""
        for tensor in wanted:
            steps = self.steps_of(tensor)
            x = self.in_rows(results.pop(tensor.name), steps)
            for step, region in zip(steps, self.path(tensor, steps)[1:], strict=True):
                x = self.reshard(x, step, region)
            self.events.append(Return(tensor.name, x.live.number))
            self.returned.append(x)

    # --- tile loops ---------------------------------------------------------------------------

    def play_tiles(self, tensors: Named, wanted: list[Tensor]) -> None:
        """Parts one after the other; the next one's transfers run under this one's body."""
        tensors = self.kept = self.bring_whole(tensors)
        self.led = True
        if not any(self.tiled(tensor) for tensor in self.program.outputs):
            ((_, results),) = self.results_of_parts(self.coming_parts(tensors))
            self.enter({})
            self.hand_out(results, wanted)
            return
        whole = {t.name: self.tile(t.name, t, self.path(t, self.steps_of(t))[-1]) for t in wanted}
        results = self.results_of_parts(self.coming_parts(tensors))
        if any(self.steps_of(tensor) for tensor in wanted):
            self.send_home(results, whole)
        else:
            self.put_together(results, whole)
        for tensor in wanted:
            self.events.append(Return(tensor.name, whole[tensor.name].live.number))
            self.returned.append(whole[tensor.name])
