"""Reshards at the border of a plan."""

from __future__ import annotations

from typing import NamedTuple

from mercurygen.ir.atoms import Region
from mercurygen.ir.program import Tensor
from mercurygen.lower.events import Cut, Pack, Put, Unpack
from mercurygen.lower.nest import Nest
from mercurygen.lower.plan import Spread, Swap
from mercurygen.lower.recorder import Tile, Works

Step = Swap | Spread


class Flight(NamedTuple):
    """A reshard on its way: the transfer, what it brings, and the step."""

    works: Works
    received: Tile
    step: Step

    def landed(self) -> Flight:
        """Once it is over: what was sent is not needed any more."""
        return self._replace(works=Works((), ()))


class Border(Nest):
    """One rank's reshards."""

    def path(self, tensor: Tensor, steps: tuple[Step, ...]) -> list[Region]:
        """What a rank has of a tensor before each step and after the last."""
        program = self.program
        way = program.stored if tensor.role == "output" else program.pinned
        now = {dim: way(tensor, dim) for dim in self.mesh.names}
        found = [self.split_by(tensor, now)]
        for step in steps:
            if isinstance(step, Swap):
                now[step.dim] = program.named_axis(tensor, step.split)
            else:
                axis = program.named_axis(tensor, step.axis)
                now[step.dim] = None if step.gathers else axis
            found.append(self.split_by(tensor, now))
        return found

    def split_by(self, tensor: Tensor, now: dict[str, str | None]) -> Region:
        """What a rank has of a tensor that is split so."""
        split: dict[str, list[str]] = {}
        for dim, axis in now.items():
            if axis is not None:
                split.setdefault(axis, []).append(dim)
        return self.atoms.region(tensor, self.place, split)

    def reshard(self, x: Tile, step: Step, region: Region) -> Tile:
        """One step of a tensor, done when it returns; `region` is what it leaves here."""
        if isinstance(step, Spread) and not step.gathers:
            part = self.tile(f"{x.tensor.name} of {step.dim}", x.tensor, region, x.dtype)
            cuts = self.cuts_of(x.tensor, x.region, region)
            self.events.append(Cut(x.live.number, part.live.number, cuts))
            return part
        return self.joined(self.exchanged(x, step), step, region)

    def exchanged(self, x: Tile, step: Step) -> Tile:
        """The parts from all ranks."""
        flight = self.start(x, step)
        self.wait(flight.works)
        return flight.received

    def start(self, x: Tile, step: Step) -> Flight:
        """Start to exchange parts: of an all-to-all one for every rank, packed."""
        name = x.tensor.name
        if isinstance(step, Spread):
            x = self.dense(x)  # as torch's kernel leaves a result it may be strided
            live = self.empty(f"{name} from {step.dim}", x.live.nbytes * step.join.n)
            received = x._replace(live=live)
            return Flight(self.collective("all-gather", step.dim, x, received), received, step)
        return self.sent(self.packed(x, step), step)

    def in_rows(self, x: Tile, steps: tuple[Step, ...]) -> Tile:
        """Dense in rows of tokens, which lse has none of, where the first step gathers it."""
        gathered = steps and isinstance(steps[0], Spread) and steps[0].gathers
        if not gathered or not set(x.tensor.dims[-1]) & set(self.program.mask_axes):
            return x
        part = self.like(f"{x.tensor.name} in rows", x)
        self.events.append(Cut(x.live.number, part.live.number, ()))
        return part

    def packed(self, x: Tile, step: Swap) -> Tile:
        """A part for every rank."""
        split = self.program.named_axis(x.tensor, step.split)
        part = self.part.get(split, (0, 1))
        size = self.nbytes(x) // part[1]
        parts = x._replace(live=self.empty(f"{x.tensor.name} in parts", size))
        self.events.append(Pack(x.live.number, parts.live.number, split, step.deal, part))
        return parts

    def sent(self, parts: Tile, step: Swap) -> Flight:
        """Start to send them, and to receive one from every rank."""
        live = self.empty(f"{parts.tensor.name} from {step.dim}", parts.live.nbytes)
        received = parts._replace(live=live)
        return Flight(self.collective("all-to-all", step.dim, parts, received), received, step)

    def joined_axis(self, received: Tile, step: Step) -> str:
        """The axis along which parts join."""
        name = step.gathered if isinstance(step, Swap) else step.axis
        return self.program.named_axis(received.tensor, name)

    def joined(self, received: Tile, step: Step, region: Region) -> Tile:
        """What arrived, in global order."""
        axis = self.joined_axis(received, step)
        live = self.empty(f"{received.tensor.name} resharded", received.live.nbytes)
        self.events.append(Unpack(received.live.number, live.number, axis, step.join))
        return received._replace(live=live, region=region)

    def joined_into(self, received: Tile, step: Step, whole: Tile) -> None:
        """What arrived of a part, in its place in the whole."""
        axis = self.joined_axis(received, step)
        part = self.part.get(axis, (0, 1))
        numbers = received.live.number, whole.live.number
        self.events.append(Unpack(*numbers, axis, step.join, part, into=True))

    def put(self, x: Tile, whole: Tile) -> None:
        """A part, in its place in the whole."""
        cuts = self.cuts_of(x.tensor, whole.region, x.region)
        self.events.append(Put(x.live.number, whole.live.number, cuts))
