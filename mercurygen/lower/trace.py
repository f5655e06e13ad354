"""A plan played for one rank: the emitted module's own shape, on buffers that hold nothing.

The functions here, and those that they build on (`border`, `nest`, `walks`), are those of an
emitted module, statement for statement. A buffer lives as long as a Python variable refers to it,
here as there (`recorder`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.border import Border, Flight, Step
from mercurygen.lower.events import Cut, Derive, Return, Trace
from mercurygen.lower.nest import Named, named
from mercurygen.lower.plan import Gather, Loop, Plan, Swap
from mercurygen.lower.recorder import Tile, Works, cuts_of


def trace(plan: Plan, rank: int, *, with_lse: bool = False) -> Trace:
    """What a rank does in one call, with or without handing out the log-sum-exp."""
    return _Player(plan, rank).play(with_lse)


class _Player(Border):
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
        tensors = {**caller, **self.derived(caller)}
        wanted = [
            t for t in self.program.outputs if with_lse or t.name not in self.program.optional
        ]
        if self.plan.tiles:
            self.play_tiles(tensors, wanted)
        else:
            self.play_whole(tensors, wanted)
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

    def steps_of(self, tensor: Tensor) -> tuple[Step, ...]:
        """A tensor's reshards, in order."""
        around = self.plan.after if tensor.role == "output" else self.plan.before
        return tuple(step for step in around if tensor.name in step.tensors)

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
        results = self.nest(tensors)
        for tensor in wanted:
            x, steps = results.pop(tensor.name), self.steps_of(tensor)
            for step, region in zip(steps, self.path(tensor, steps)[1:], strict=True):
                x = self.reshard(x, step, region)
            self.events.append(Return(tensor.name, x.live.number))
            self.returned.append(x)

    # --- tile loops ---------------------------------------------------------------------------

    def play_tiles(self, tensors: Named, wanted: list[Tensor]) -> None:
        """Parts one after the other; the next one's transfers run under this one's body."""
        tensors = self.kept = self.bring_whole(tensors)
        self.led = True
        whole = {t.name: self.tile(t.name, t, self.path(t, self.steps_of(t))[-1]) for t in wanted}
        parts = list(self.parts_of_loops())
        flights = self.start_part(tensors, parts[0])
        results: Named | None = None
        leaving: deque = deque()
        for index, part in enumerate(parts):
            self.enter(part)
            ready = self.finish_part(tensors, flights)
            flights = {}
            if index + 1 < len(parts):
                flights = self.start_part(tensors, parts[index + 1])
                self.enter(part)
            found = self.scope(self.plan.nest.loops, ready)
            del ready
            if results is None:
                results = found
            else:
                self.merge(found, results)
            del found
            while leaving:
                self.finish_leaving(*leaving.popleft(), whole)
                self.enter(part)
            if index + 1 == len(parts) or self.leaves(part, parts[index + 1]):
                leaving.append((part, self.start_leaving(results, wanted)))
                results = None
        while leaving:
            self.finish_leaving(*leaving.popleft(), whole)
        for tensor in wanted:
            self.events.append(Return(tensor.name, whole[tensor.name].live.number))
            self.returned.append(whole[tensor.name])

    def parts_of_loops(self) -> Iterator[dict[str, tuple[int, int]]]:
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

    def enter(self, part: dict[str, tuple[int, int]]) -> None:
        """A part begins: it is what is worked on."""
        self.part, self.limits = part, {}
        for axis, (index, parts) in part.items():
            atoms = self.atoms.iterations(axis, self.place)
            size = len(atoms) // parts
            self.limits[axis] = atoms[index * size : (index + 1) * size]

    def leaves(self, part: dict, following: dict) -> bool:
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

    def bring_whole(self, tensors: Named) -> Named:
        """What the tile loops do not cut, resharded and gathered once."""
        for name, x in tensors.items():
            if self.tiled(x.tensor):
                continue
            steps = self.steps_of(x.tensor)
            for step, region in zip(steps, self.path(x.tensor, steps)[1:], strict=True):
                x = self.reshard(x, step, region)
            for loop, depth, stage in self.leading(x.tensor):
                (x,) = self.gather(loop, depth, (x,), stage)
            tensors = {**tensors, name: x}
        return tensors

    def start_part(self, tensors: Named, part: dict) -> dict[str, tuple]:
        """Start what brings a part of every tensor that is cut: all but its last step is done."""
        self.enter(part)
        return {
            name: self.start_tensor(x)
            for name, x in tensors.items()
            if self.tiled(x.tensor) and name in self.program.body
        }

    def start_tensor(self, x: Tile) -> tuple:
        """Start what brings a part of one tensor: ("here", tile) or what `finish_tensor` ends."""
        steps, gathers = self.steps_of(x.tensor), self.leading(x.tensor)
        path = self.path(x.tensor, steps)
        x = self.without(x, steps)
        for index, (step, region) in enumerate(zip(steps, path[1:], strict=True)):
            region = self.cut_but(x.tensor, region, steps[index + 1 :])
            moves = isinstance(step, Swap) or step.gathers
            if moves and index + 1 == len(steps) and not gathers:
                return "border", self.start(x, step), region
            x = self.reshard(x, step, region)
        for index, (loop, depth, stage) in enumerate(gathers):
            if index == 0 and not steps:
                x = self.cut_part(x, stage)
            if index + 1 == len(gathers):
                held = self.parts((x,), stage)
                return "gather", self.start_of(loop, x, held, stage), (loop, depth, x, held, stage)
            (x,) = self.gather(loop, depth, (x,), stage)
        walked = any(x.tensor.name in loop.tensors for loop in self.plan.nest.loops if loop.walks)
        if walked and not steps:  # a reshard has cut it already
            x = self.dense(x, self.of_part(x.tensor, x.region))
        return "here", x, None

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
                cuts = cuts_of(x.tensor.axes, x.region, region)
                self.events.append(Cut(x.live.number, part.live.number, cuts))
            return part
        return self.dense(x, self.of_part(x.tensor, x.region))

    def start_of(self, loop: Loop, x: Tile, held: tuple[Tile, ...], stage: Gather) -> Works:
        """Start the gather, or the broadcast, of a part."""
        if not stage.broadcast:
            return self.start_gather(loop, (x,), held, stage)
        axis = next(a for a in x.tensor.axes if a in self.part)
        index, parts = self.part[axis]
        root = index * self.mesh.extent(stage.dim) // parts
        return self.collective("broadcast", stage.dim, x, x, root=root)

    def finish_part(self, tensors: Named, flights: dict[str, tuple]) -> Named:
        """Wait for a part of every tensor that is cut."""
        found = dict(tensors)
        for name, (kind, flight, more) in flights.items():
            if kind == "here":
                found[name] = flight
            elif kind == "border":
                self.wait(flight.works)
                found[name] = self.joined(flight.received, flight.step, more)
            else:
                loop, depth, x, held, stage = more
                if stage.broadcast:
                    self.wait(flight)
                    found[name] = x
                    continue
                (found[name],) = self.finish_gather(loop, depth, (x,), held, flight, stage)
        return found

    def start_leaving(self, results: Named, wanted: list[Tensor]) -> dict[str, tuple]:
        """Reduce complete results, and start their way to the caller."""
        for reduce in self.plan.nest.reduces:
            results = self.reduce(results, reduce)
        results = self.narrow(results)
        found: dict[str, tuple] = {}
        for tensor in wanted:
            x, steps = results[tensor.name], self.steps_of(tensor)
            path = self.path(tensor, steps)
            for step, region in zip(steps[:-1], path[1:-1], strict=True):
                x = self.reshard(x, step, self.of_part(tensor, region))
            found[tensor.name] = ("put", x) if not steps else ("join", self.start(x, steps[-1]))
        return found

    def finish_leaving(self, part: dict, leaving: dict[str, tuple], whole: Named) -> None:
        """Put results into their place."""
        self.enter(part)
        for name, (kind, what) in leaving.items():
            if kind == "put":
                self.put(what, whole[name])
                continue
            flight: Flight = what
            self.wait(flight.works)
            step, tensor = flight.step, flight.received.tensor
            axis = step.gathered if isinstance(step, Swap) else step.axis
            if part.get(axis, (0, 1)) != (0, 1):
                self.joined_into(flight.received, step, whole[name])
            else:  # the reshard deals another axis than the loops
                region = self.of_part(tensor, self.path(tensor, self.steps_of(tensor))[-1])
                self.put(self.joined(flight.received, step, region), whole[name])
