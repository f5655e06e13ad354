"""Tile loops: parts one after the other, with the next one's transfers under this one's body.

The functions are those of an emitted module, statement for statement: one yields what a part is
worked out from, one works it out, one puts the results together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.border import Border, Flight, Step
from mercurygen.lower.events import Cut
from mercurygen.lower.plan import Gather, Loop, Swap
from mercurygen.lower.recorder import Tile, Works
from mercurygen.lower.results import Named, named
from mercurygen.lower.visible import POSITIONS

Part = dict[str, tuple[int, int]]  # per axis of the tile loops, which of how many parts


class Coming(NamedTuple):
    """What a part is worked out from.

    Attributes:
        part: which.
        last: of those that add up to one part of the results.
        tiles: by tensor.
    """

    part: Part
    last: bool
    tiles: Named


class Gathering(NamedTuple):
    """A gather, or a broadcast, of a part on its way."""

    works: Works
    loop: Loop
    depth: int
    stage: Gather
    tile: Tile
    received: tuple[Tile, ...]

    def landed(self) -> Gathering:
        """Once it is over."""
        (received,) = self.received
        return self._replace(
            works=Works((), ()), tile=self.tile if self.stage.broadcast else received
        )


Flights = dict[str, Flight | Gathering]  # by tensor


class TileLoops(Border):
    """One rank's parts."""

    def steps_of(self, tensor: Tensor) -> tuple[Step, ...]:
        """A tensor's reshards, in order."""
        around = self.plan.after if tensor.role == "output" else self.plan.before
        return tuple(step for step in around if tensor.name in step.tensors)

    def parts_of_loops(self) -> Iterator[Part]:
        """Per iteration of the tile loops, which part of every axis."""
        spans = []
        for loop in self.plan.tiles:
            each = self.atoms.loop_parts(loop.axes)
            counts = [each[axis] for axis in loop.axes]
            spans.append(
                [
                    {axis: (i, n) for axis, i, n in zip(loop.axes, place, counts, strict=True)}
                    for place in product(*map(range, counts))
                ]
            )
        for chosen in product(*spans):
            yield {axis: at for part in chosen for axis, at in part.items()}

    def enter(self, part: Part) -> None:
        """A part begins: it is what is worked on."""
        self.part, self.limits = part, {}
        for axis, (index, parts) in part.items():
            atoms = self.atoms.iterations(axis, self.place)
            size = len(atoms) // parts
            self.limits[axis] = atoms[index * size : (index + 1) * size]

    def leaves(self, part: Part, following: Part) -> bool:
        """Whether the results of a part are complete: the next one is of other results."""
        carried = {axis for t in self.program.outputs for axis in t.axes}
        return any(part[axis] != following[axis] for axis in part if axis in carried)

    def tiled(self, tensor: Tensor) -> bool:
        """Whether the tile loops cut a tensor."""
        return any(tensor.carries(axis) for loop in self.plan.tiles for axis in loop.axes)

    def leading(self, tensor: Tensor) -> tuple[tuple[Loop, int, Gather], ...]:
        """The gathers of a tensor that are outside every walk."""
        return tuple(
            (loop, depth, stage)
            for loop in self.plan.nest.loops
            if tensor.name in loop.tensors
            for depth, stage in enumerate(loop.leading)
        )

    def walked(self, tensor: Tensor) -> bool:
        """Whether a tensor comes by."""
        return any(tensor.name in loop.tensors for loop in self.plan.nest.loops if loop.walks)

    # --- what a part is worked out from -------------------------------------------------------

    def bring_whole(self, tensors: Named) -> Named:
        """What the tile loops do not cut, resharded and gathered once."""
        whole = {name: x for name, x in tensors.items() if not self.tiled(x.tensor)}
        paths = {n: self.path(x.tensor, self.steps_of(x.tensor)) for n, x in whole.items()}
        for step in self.plan.before:
            resharded = []
            for name in (name for name in step.tensors if name in whole):
                region = paths[name][1 + self.steps_of(whole[name].tensor).index(step)]
                resharded.append(self.reshard(whole[name], step, region))
            whole = {**whole, **named(tuple(resharded))}
            tensors = {**tensors, **whole}
            del resharded
        for loop in self.plan.nest.loops:
            if loop.leading and all(name in whole for name in loop.tensors):
                led = self.lead(loop, tuple(whole[name] for name in loop.tensors))
                whole = {**whole, **named(led)}
                tensors = {**tensors, **whole}
                del led
        return tensors

    def coming_parts(self, tensors: Named) -> Iterator[Coming]:
        """Yield one part after the other; the next one's transfers run while one is used."""
        part, *others = self.parts_of_loops()
        if not any(self.arrives(x.tensor) for x in tensors.values()):
            for here, following in zip([part, *others], [*others, None], strict=True):
                last = following is None or self.leaves(here, following)
                yield Coming(here, last, self.finish_part(tensors, {}, here))
            return
        received = self.landed_of(self.start_part(tensors, part))
        for following in others:
            tiles = self.finish_part(tensors, received, part)
            del received
            arriving = self.start_part(tensors, following)
            yield Coming(part, self.leaves(part, following), tiles)
            received = self.landed_of(arriving)
            del arriving
            part = following
        yield Coming(part, True, self.finish_part(tensors, received, part))

    def landed_of(self, flights: Flights) -> Flights:
        """Wait for all that is on its way; what was sent is not needed any more."""
        self.wait_all(flights)
        return {name: flight.landed() for name, flight in flights.items()}

    def wait_all(self, flights: Flights) -> None:
        """Wait for all that is on its way."""
        for flight in flights.values():
            self.wait(flight.works)

    def start_part(self, tensors: Named, part: Part) -> Flights:
        """Start what brings a part of every tensor that is cut: all but its last step is done."""
        self.enter(part)
        return {name: self.start_tensor(x) for name, x in tensors.items() if self.arrives(x.tensor)}

    def arrives(self, tensor: Tensor) -> bool:
        """Whether a part of a tensor does not just lie here."""
        steps = self.steps_of(tensor)
        moves = self.leading(tensor) or any(isinstance(s, Swap) or s.gathers for s in steps)
        return bool(moves) and self.tiled(tensor) and tensor.name in self.program.body

    def start_tensor(self, x: Tile) -> Flight | Gathering:
        """Start the last transfer that brings a part of one tensor; those before are done."""
        steps, gathers = self.steps_of(x.tensor), self.leading(x.tensor)
        path = self.path(x.tensor, steps)
        x = self.without(x, steps)
        for index, (step, region) in enumerate(zip(steps, path[1:], strict=True)):
            if index + 1 == len(steps) and not gathers:
                return self.start(x, step)
            x = self.reshard(x, step, self.cut_but(x.tensor, region, steps[index + 1 :]))
        for loop, depth, stage in gathers[:-1]:
            x = x if steps or depth else self.cut_part(x, stage)
            (x,) = self.gather(loop, depth, (x,), stage)
        loop, depth, stage = gathers[-1]
        x = x if steps or depth else self.cut_part(x, stage)
        received = self.parts((x,), stage)
        return Gathering(self.start_of(x, received, stage), loop, depth, stage, x, received)

    def cut_but(self, tensor: Tensor, region: Region, steps: tuple[Step, ...]) -> Region:
        """The part that is going on, whole along the axes that some reshards are yet to deal."""
        names = (step.split if isinstance(step, Swap) else step.axis for step in steps)
        dealt = {self.program.named_axis(tensor, name) for name in names}
        part = self.of_part(tensor, region)
        return tuple(
            whole if axis in dealt else cut
            for axis, cut, whole in zip(tensor.axes, part, region, strict=True)
        )

    def without(self, x: Tile, steps: tuple[Step, ...]) -> Tile:
        """A dense copy of a part along the tiled axes that no reshard deals."""
        region = self.cut_but(x.tensor, x.region, steps)
        return self.dense(x, region) if steps and region != x.region else x

    def cut_part(self, x: Tile, stage: Gather) -> Tile:
        """A part of what is stored, dense; of a broadcast, what the root has of it."""
        if stage.broadcast:
            axis = next(a for a in x.tensor.axes if a in self.part)
            wanted = set(self.limits[axis])
            mine = tuple(a for a in x.atoms(axis) if a in wanted)
            index = x.tensor.axes.index(axis)
            region = (*x.region[:index], self.limits[axis], *x.region[index + 1 :])
            part = self.tile(f"a part of {x.tensor.name}", x.tensor, region, x.dtype)
            if mine:  # ours to send
                cuts = self.cuts_of(x.tensor, x.region, region)
                self.events.append(Cut(x.live.number, part.live.number, cuts))
            return part
        return self.dense(x, self.of_part(x.tensor, x.region))

    def start_of(self, x: Tile, held: tuple[Tile, ...], stage: Gather) -> Works:
        """Start the gather, or the broadcast, of a part."""
        if not stage.broadcast:
            return self.start_gather((x,), held, stage)
        axis = next(a for a in x.tensor.axes if a in self.part)
        index, parts = self.part[axis]
        root = index * self.mesh.extent(stage.dim) // parts
        return self.collective("broadcast", stage.dim, x, x, root=root)

    def finish_part(self, tensors: Named, flights: Flights, part: Part) -> Named:
        """A part of every tensor: what has arrived, joined, and what lies here."""
        self.enter(part)
        found = {}
        for name, x in tensors.items():
            match flights.get(name):
                case None:
                    found[name] = self.here(x) if self.tiled(x.tensor) else x
                case Gathering(_, loop, depth, stage, tile, received):
                    if stage.broadcast:
                        found[name] = tile
                        continue
                    (found[name],) = self.join_gathered(loop, depth, (tile,), received, stage)
                case Flight(_, received, step):
                    region = self.path(x.tensor, self.steps_of(x.tensor))[-1]
                    found[name] = self.joined(received, step, self.of_part(x.tensor, region))
        return found

    def here(self, x: Tile) -> Tile:
        """A part of what lies here: dense where it is sent on, or is no run of a dimension."""
        steps = self.steps_of(x.tensor)
        path = self.path(x.tensor, steps)
        for step, region in zip(steps, path[1:], strict=True):  # cuts only
            x = self.reshard(x, step, self.cut_but(x.tensor, region, ()))
        if steps:  # dense, and cut already
            return x
        minor = any(
            axis in self.part and self.part[axis][1] > 1
            for axes in x.tensor.dims
            for axis in axes[1:]
        )
        if self.walked(x.tensor) or (minor and self.program.kernel != POSITIONS):
            return self.dense(x, self.of_part(x.tensor, x.region))
        return x

    # --- what it gives ------------------------------------------------------------------------

    def results_of_parts(self, coming: Iterator[Coming]) -> Iterator[tuple[Part, Named]]:
        """Yield the results of every part that they are cut into, in the dtypes of the outputs."""
        held: list[Named] = []
        for part, last, tiles in coming:
            self.enter(part)
            found = self.scope(self.plan.nest.loops, tiles, held[0] if held else None)
            if not held:
                held.append(found)
            elif found is not held[0]:
                self.merge(found, held[0])
            del found
            if last:
                yield part, self.completed(held.pop())

    def completed(self, results: Named) -> Named:
        """Results reduced over the ranks that have partial ones."""
        for reduce in self.plan.nest.reduces:
            results = self.reduce(results, reduce)
        return self.narrow(results)

    def put_together(self, results: Iterator[tuple[Part, Named]], whole: Named) -> None:
        """Put the results of every part into their place."""
        for part, found in results:
            self.enter(part)
            for name, into in whole.items():
                self.put(found[name], into)
            del found

    def send_home(self, results: Iterator[tuple[Part, Named]], whole: Named) -> None:
        """Send the results of every part to their owners while the next is worked out."""
        part, result = next(results)
        leaving = self.start_home(part, result, whole)
        del result
        for following, result in results:
            self.wait_all(leaving)
            self.put_home(part, leaving, whole)
            del leaving
            leaving = self.start_home(following, result, whole)
            del result
            part = following
        self.wait_all(leaving)
        self.put_home(part, leaving, whole)

    def start_home(self, part: Part, results: Named, whole: Named) -> dict[str, Flight]:
        """Start the last step of each result's way to its owner; those before are done.

        What is with its owner already is put into its place.
        """
        self.enter(part)
        moving = {name for name in whole if self.steps_of(results[name].tensor)}
        for name in whole:
            if name not in moving:
                self.put(results[name], whole[name])
        return {name: self.start_result(results[name]) for name in whole if name in moving}

    def start_result(self, x: Tile) -> Flight:
        """Of one tensor."""
        steps = self.steps_of(x.tensor)
        path = self.path(x.tensor, steps)
        for step, region in zip(steps[:-1], path[1:-1], strict=True):
            x = self.reshard(x, step, self.of_part(x.tensor, region))
        if not isinstance(steps[-1], Swap):
            return self.start(x, steps[-1])
        parts = self.packed(x, steps[-1])
        del x
        return self.sent(parts, steps[-1])

    def put_home(self, part: Part, leaving: dict[str, Flight], whole: Named) -> None:
        """Put what has arrived into its place."""
        self.enter(part)
        for name, (_, received, step) in leaving.items():
            self.joined_into(received, step, whole[name])
