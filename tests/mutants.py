"""Traces with one mistake each, and which check must find it.

A mutant that does nothing is not made, by rules that are said where they apply; one whose traces
are those of the plan is dropped by `different`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from mercurygen.check.order import check_order
from mercurygen.lower.events import (
    Alloc,
    Batch,
    Cast,
    Collective,
    Cut,
    Derive,
    Event,
    Fill,
    Free,
    Kernel,
    Merge,
    Message,
    Pack,
    Put,
    Return,
    Trace,
    Unpack,
    Unweigh,
    Wait,
    Weigh,
)
from mercurygen.lower.plan import Plan
from mercurygen.lower.visible import DIAGONAL, EVERY, Block, trimmed

Traces = tuple[Trace, ...]
CUT = (Cut, Put, Merge)
BUFFERS, LINEAGE, MEMORY, ORDER = ({x} for x in ("buffers", "lineage", "memory", "order"))


class Mutant(NamedTuple):
    """A mistake, the checks that may find it, and the traces."""

    name: str
    checks: set[str]
    traces: Traces


def edit(traces: Traces, rank: int, *edits: tuple[int, tuple[Event, ...]]) -> Traces:
    """The traces with some events of one rank, each by number, put in the place of others."""
    events: list[Event] = list(traces[rank].events)
    for index, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        events[index : index + 1] = new
    changed = replace(traces[rank], events=tuple(events))
    return (*traces[:rank], changed, *traces[rank + 1 :])


def found(one: Trace, kind: type | tuple[type, ...]) -> list[tuple[int, Event]]:
    """Events of a kind, with their numbers."""
    return [(i, event) for i, event in enumerate(one.events) if isinstance(event, kind)]


def wait_of(one: Trace, op: int) -> int:
    """The wait for an operation."""
    return next(i for i, e in enumerate(one.events) if isinstance(e, Wait) and e.op == op)


def everywhere(traces: Traces, kind: type, number: int, change: Callable) -> Traces | None:
    """The same change of the same event on all ranks; None if a rank has it not."""
    for rank, one in enumerate(traces):
        events = found(one, kind)
        if number >= len(events):
            return None
        index, event = events[number]
        new = change(rank, event)
        if new is None:
            return None
        traces = edit(traces, rank, (index, new))
    return traces


def mutants(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    """All of them."""
    for rank in sorted({0, len(traces) - 1}):
        for make in (of_batches, of_collectives, of_kernels, of_copies, of_parts, of_buffers):
            yield from make(plan, traces, rank)
        yield from of_sizes(traces, rank)
    yield from of_all_batches(plan, traces)
    yield from of_all_collectives(plan, traces)
    yield from of_all_joins(traces)
    yield from of_order(plan, traces)


# --- transfers ------------------------------------------------------------------------------------


def exchanged(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """What the first brings the last does, and so on; the peers stay where they are."""
    pairs = zip(messages, messages[::-1], strict=True)
    return tuple(replace(other, peer=each.peer) for each, other in pairs)


def of_batches(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """One rank's batch is not what the others expect, or not when."""
    mesh, one = plan.program.mesh, traces[rank]
    for index, b in found(one, Batch):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        size, me = mesh.extent(b.dim), mesh.coordinate(rank)[b.dim]
        wait = wait_of(one, b.op)
        yield Mutant("missing wait", BUFFERS | ORDER, become(at=wait))
        yield Mutant("no batch", ORDER | BUFFERS, edit(traces, rank, (index, ()), (wait, ())))
        yield Mutant("batch twice", BUFFERS | ORDER, become(b, b))
        if len(b.sends) + len(b.recvs) > 1 or not b.recvs:
            yield Mutant("dropped send", ORDER, become(replace(b, sends=b.sends[1:])))
        if b.sends:
            sends = (b.sends[0], *b.sends)
            yield Mutant("doubled send", ORDER, become(replace(b, sends=sends)))
            astray = tuple(replace(m, peer=(m.peer + 1) % size) for m in b.sends)
            yield Mutant("misdirected send", ORDER, become(replace(b, sends=astray)))
            itself = tuple(replace(m, peer=me) for m in b.sends)
            yield Mutant("send to itself", ORDER, become(replace(b, sends=itself)))
            full = one.buffers[b.sends[0].buffer].nbytes
            short = (replace(b.sends[0], nbytes=full // 2), *b.sends[1:])
            yield Mutant("half a message", ORDER, become(replace(b, sends=short)))
        if b.recvs:
            yield Mutant("dropped receive", ORDER | BUFFERS, become(replace(b, recvs=b.recvs[1:])))
            back = tuple(replace(m, peer=(m.peer + 1) % size) for m in b.recvs)
            yield Mutant("receive from another", ORDER, become(replace(b, recvs=back)))
            given = tuple(replace(m, buffer=min(one.inputs.values())) for m in b.recvs)
            yield Mutant("receive into the caller's", BUFFERS, become(replace(b, recvs=given)))
        if len(b.sends) > 1:
            # of another length the other side sees it, else only what is in it tells
            swapped = replace(b, sends=exchanged(b.sends))
            yield Mutant("swapped sends", LINEAGE | ORDER, become(swapped))
        if len(b.recvs) > 1:
            swapped = replace(b, recvs=exchanged(b.recvs))
            yield Mutant("swapped receives", LINEAGE | ORDER, become(swapped))
        for dim in mesh.names:
            if dim != b.dim:
                yield Mutant("wrong dimension", ORDER, become(replace(b, dim=dim)))
        for at, k in found(one, Kernel):
            read = {operand.buffer for operand in k.inputs}
            if at > wait and read & {m.buffer for m in b.recvs}:
                late = edit(traces, rank, (wait, ()), (at, (k, one.events[wait])))
                yield Mutant("late wait", BUFFERS, late)
                break


def of_all_batches(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    """The same mistake on every rank: everything matches, and the tiles are wrong.

    Not where the mask leaves nothing of some tile: two tiles that nobody reads may be swapped.
    """
    mesh = plan.program.mesh
    if plan.program.mask != "full":
        return
    for number, (_, b) in enumerate(found(traces[0], Batch)):
        size = mesh.extent(b.dim)

        def further(rank: int, event: Event, size: int = size) -> tuple[Event, ...] | None:
            """One rank further: from the owner of another tile."""
            me = mesh.coordinate(rank)[event.dim]
            sends = tuple(replace(m, peer=(m.peer + 1) % size) for m in event.sends)
            recvs = tuple(replace(m, peer=(m.peer - 1) % size) for m in event.recvs)
            if not (sends and recvs) or me in {m.peer for m in (*sends, *recvs)}:
                return None
            return (replace(event, sends=sends, recvs=recvs),)

        if size > 2:
            changed = everywhere(traces, Batch, number, further)
            if changed is not None:
                yield Mutant("another owner's tile", LINEAGE | MEMORY | ORDER, changed)
        short = everywhere(traces, Batch, number, lambda rank, event: _halved(traces[rank], event))
        if short is not None:
            # (ranks of a Cannon begin unlike: their batches of one number are not each other's)
            yield Mutant("half of every message", MEMORY | ORDER, short)


def _halved(one: Trace, event: Batch) -> tuple[Event, ...]:
    """Messages of half the bytes on both sides."""

    def half(message):
        nbytes = message.nbytes or one.buffers[message.buffer].nbytes
        return replace(message, nbytes=nbytes // 2)

    return (
        replace(event, sends=tuple(map(half, event.sends)), recvs=tuple(map(half, event.recvs))),
    )


def of_collectives(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """One rank's collective is not that of the others."""
    mesh, one = plan.program.mesh, traces[rank]
    for index, c in found(one, Collective):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        at, size = wait_of(one, c.op), mesh.extent(c.dim)
        yield Mutant("missing wait", BUFFERS | ORDER, become(at=at))
        yield Mutant("no collective", BUFFERS | ORDER, edit(traces, rank, (index, ()), (at, ())))
        yield Mutant("collective twice", BUFFERS | ORDER, become(c, c))
        for dim in mesh.names:
            if dim != c.dim:
                yield Mutant("wrong dimension", ORDER, become(replace(c, dim=dim)))
        kinds = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "broadcast")
        kind = kinds[(kinds.index(c.kind) + 1) % len(kinds)]
        yield Mutant("wrong kind", ORDER | BUFFERS, become(replace(c, kind=kind)))
        if c.source != c.target:
            into = replace(c, target=c.source)
            yield Mutant("receive into what is sent", BUFFERS | ORDER, become(into))
        if c.kind == "broadcast":
            # (the buffers of a rank that is said to send must hold its part)
            root = replace(c, root=(c.root + 1) % size)
            yield Mutant("wrong root", ORDER, become(root))
        if c.kind == "all-reduce":
            other = replace(c, reduce="sum" if c.reduce == "max" else "max")
            yield Mutant("max for sum", ORDER, become(other))
        if c.kind in ("all-to-all", "reduce-scatter"):
            copied = next(e.source for _, e in found(one, Pack) if e.target == c.source)
            whole = replace(c, source=copied)
            yield Mutant("send what is not in parts", LINEAGE | ORDER | BUFFERS, become(whole))


def of_all_collectives(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    """The same mistake on every rank."""
    mesh = plan.program.mesh
    for number, (_, c) in enumerate(found(traces[0], Collective)):
        size = mesh.extent(c.dim)

        if c.kind == "broadcast":
            root = altered(traces, number, root=(c.root + 1) % size)
            yield Mutant("wrong root everywhere", LINEAGE | MEMORY | BUFFERS, root)
        if c.kind == "all-reduce":
            other = altered(traces, number, reduce="sum" if c.reduce == "max" else "max")
            yield Mutant("max for sum everywhere", LINEAGE, other)
        gone = traces
        for rank, one in enumerate(traces):
            index, event = found(one, Collective)[number]
            gone = edit(gone, rank, (index, ()), (wait_of(one, event.op), ()))
        yield Mutant("no collective anywhere", LINEAGE | BUFFERS | MEMORY, gone)


def altered(traces: Traces, number: int, **more: object) -> Traces | None:
    """One collective, changed in the same way on all ranks."""
    return everywhere(traces, Collective, number, lambda rank, event: (replace(event, **more),))


def of_all_joins(traces: Traces) -> Iterator[Mutant]:
    """Parts that all ranks interleave wrongly, and alike."""
    for kind in (Pack, Unpack):
        for number in range(len(found(traces[0], kind))):

            def joined(rank: int, event: Event) -> tuple[Event, ...]:
                return (replace(event, join=replace(event.join, outer=2 * event.join.outer)),)

            changed = everywhere(traces, kind, number, joined)
            if changed is not None:
                yield Mutant("wrong join everywhere", LINEAGE | MEMORY, changed)


def of_order(plan: Plan, traces: Traces) -> Iterator[Mutant]:
    """Two communicators, each waited for at once, in opposite order on ranks across."""
    mesh = plan.program.mesh
    if any(loop.outputs for loop in plan.nest.loops):
        return  # what is sent home is made between the two
    for (_, one), (_, other) in pairwise(found(traces[0], Batch)):
        if [one.dim, other.dim] != list(plan.nest.walks[:2]):
            continue
        crossed = apart = traces
        for each in traces:
            at = [next(i for i, e in found(each, Batch) if e.op == op) for op in (one.op, other.op)]
            runs = [(each.events[i], Wait(each.events[i].op)) for i in at]
            waits = [(wait_of(each, op), ()) for op in (one.op, other.op)]
            edits = (*waits, (at[0], (*runs[0], *runs[1])), (at[1], ()))
            apart = edit(apart, each.rank, *edits)
            if sum(mesh.coordinate(each.rank).values()) % 2:
                edits = (*waits, (at[0], (*runs[1], *runs[0])), (at[1], ()))
            crossed = edit(crossed, each.rank, *edits)
        check_order(plan, apart)
        yield Mutant("communicators crossed", ORDER, crossed)


# --- kernels and merges ---------------------------------------------------------------------------


def of_kernels(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """A call on other things, or never, or twice."""
    one = traces[rank]
    for index, k in found(one, Kernel):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        yield Mutant("dropped call", LINEAGE | BUFFERS, become())
        yield Mutant("doubled call", LINEAGE, become(k, k))
        yield Mutant(
            "merge or not", LINEAGE | BUFFERS | MEMORY, become(replace(k, merge=not k.merge))
        )
        first, second, *rest = k.inputs
        crossed = replace(k, inputs=(second, first, *rest))
        yield Mutant("operands crossed", LINEAGE | BUFFERS, become(crossed))
        yield Mutant(
            "an operand too few", LINEAGE | BUFFERS, become(replace(k, inputs=k.inputs[1:]))
        )
        if len(k.outputs) > 1:
            outputs = replace(k, outputs=k.outputs[::-1])
            yield Mutant("outputs swapped", LINEAGE | BUFFERS | MEMORY, become(outputs))
        larger = replace(k, extents=(k.extents[0] + 1, *k.extents[1:]))
        yield Mutant("another size", LINEAGE, become(larger))
        yield Mutant("another scratch", MEMORY, become(replace(k, scratch=k.scratch + 1)))
        for name, operands in (("inputs", k.inputs), ("outputs", k.outputs)):
            for at, operand in enumerate(operands):
                for cuts in shifted(operand.cuts):
                    if k.block is not None and same_rows(plan, operand.cuts, cuts):
                        continue
                    new = (*operands[:at], replace(operand, cuts=cuts), *operands[at + 1 :])
                    yield Mutant(
                        "wrong cut of an operand", LINEAGE, become(replace(k, **{name: new}))
                    )
        if k.block is not None:
            (top, end), (left, right), (low, high), *_ = k.block
            for name, block in (
                ("shifted block", k.block._replace(cols=(left + 1, right + 1))),
                ("shifted block", k.block._replace(rows=(top + 1, end + 1))),
                ("narrower block", k.block._replace(cols=(left, right - 1))),
                ("lower block", k.block._replace(rows=(top, end - 1))),
                ("wider block", k.block._replace(cols=(left, right + 1))),
                ("masked or not", masked_or_not(k.block, plan)),
                ("wrong diagonal", k.block._replace(band=(low, (high or 0) + 1))),
                ("wrong diagonal", k.block._replace(band=((low or 0) - 1, high))),
            ):
                if same_pairs(k.block, block):
                    continue
                yield Mutant(name, LINEAGE, become(replace(k, block=block)))


def masked_or_not(block: Block, plan: Plan) -> Block:
    """A block without its mask, or with one; to mask by position what is whole does nothing."""
    if plan.program.kernel == "body":
        return block._replace(by_position=False)
    return block._replace(band=DIAGONAL if block.band == EVERY else EVERY)


def same_pairs(block: Block, other: Block) -> bool:
    """Whether a band says the same of these rows and columns, or nothing at all."""
    return block[:2] == other[:2] and (
        (block.by_position and other.by_position)
        or trimmed(block.height, block.width, block.band)
        == trimmed(other.height, other.width, other.band)
        and block.by_position == other.by_position
    )


def shifted(cuts) -> Iterator[tuple]:
    """Cuts moved by one atom, and left out."""
    for at, (axis, start, stop) in enumerate(cuts):
        yield (*cuts[:at], (axis, start + 1, stop + 1), *cuts[at + 1 :])
        yield (*cuts[:at], *cuts[at + 1 :])


def same_rows(plan: Plan, cuts, others) -> bool:
    """Whether all that is left out is a cut from 0 on: a block says the same rows without it."""
    gone = set(cuts) - set(others)
    less = len(others) < len(cuts)
    return less and all(axis in plan.program.mask_axes and not start for axis, start, _ in gone)


def of_parts(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """Partial results: merged twice, never, elsewhere; weighed wrongly.

    (A merge of nothing may be left out: not made where the mask may leave nothing of a tile.)
    """
    one = traces[rank]
    for index, m in found(one, Merge):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        if plan.program.mask == "full":
            yield Mutant("dropped merge", LINEAGE, become())
            yield Mutant("doubled merge", LINEAGE, become(m, m))
        if len(m.sources) > 1:
            swapped = replace(m, sources=m.sources[::-1])
            yield Mutant("out and lse crossed", LINEAGE | MEMORY | BUFFERS, become(swapped))
            half = replace(m, sources=m.sources[:1], targets=m.targets[:1])
            if any(c.kind != "sum" for c in plan.program.combines):
                yield Mutant("merge of out alone", LINEAGE, become(half))
        yield Mutant("another scratch", MEMORY, become(replace(m, scratch=m.scratch + 8)))
        if m.part is not None:
            again = replace(m, part=m.part - 1 if m.part else 1)
            yield Mutant("another rank's part", LINEAGE, become(again))
        yield Mutant("merge into itself", BUFFERS, become(replace(m, targets=m.sources)))
        for cuts in shifted(m.cuts):
            yield Mutant("merged elsewhere", LINEAGE, become(replace(m, cuts=cuts)))
    for index, w in found(one, (Weigh, Unweigh)):
        name = "weigh" if isinstance(w, Weigh) else "unweigh"
        yield Mutant(f"no {name}", BUFFERS | LINEAGE, edit(traces, rank, (index, ())))
        pair = (
            {"sources": w.sources[::-1]} if isinstance(w, Weigh) else {"targets": w.targets[::-1]}
        )
        crossed = edit(traces, rank, (index, (replace(w, **pair),)))
        yield Mutant(f"{name}, out and lse crossed", LINEAGE | MEMORY, crossed)
        other = w.sources[1] if isinstance(w, Weigh) else w.source
        by = edit(traces, rank, (index, (replace(w, most=other),)))
        yield Mutant(f"{name} by something else", LINEAGE, by)
    for index, d in found(one, Derive):
        yield Mutant("not derived", BUFFERS, edit(traces, rank, (index, ())))
        crossed = edit(traces, rank, (index, (replace(d, inputs=d.inputs[::-1]),)))
        yield Mutant("derived of inputs crossed", LINEAGE, crossed)


# --- copies and buffers -------------------------------------------------------------------------


def of_copies(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """Copies from, or to, another place."""
    one = traces[rank]
    for index, c in found(one, (Pack, Unpack, Cast, Cut, Put)):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        # (what a broadcast's root has not cut shows when it is sent)
        later = isinstance(c, Cut | Put) or getattr(c, "part", None)
        checks = LINEAGE if later else BUFFERS
        yield Mutant("dropped copy", checks | BUFFERS, become())
        into = replace(c, target=c.source)
        yield Mutant("copy in place", LINEAGE | BUFFERS | MEMORY, become(into))
        if isinstance(c, Cut | Put):
            for cuts in shifted(c.cuts):
                yield Mutant("wrong place", LINEAGE | MEMORY, become(replace(c, cuts=cuts)))
            continue
        if isinstance(c, Cast):
            continue
        join = c.join
        for axis in plan.program.extents:
            if axis != c.axis:
                yield Mutant("wrong axis", LINEAGE, become(replace(c, axis=axis)))
        more = replace(c, join=replace(join, n=2 * join.n))
        yield Mutant("wrong number of parts", LINEAGE, become(more))
        mixed = replace(c, join=replace(join, outer=2 * join.outer))
        yield Mutant("wrong join", LINEAGE | MEMORY, become(mixed))
        if c.part is not None and c.part[1] > 1:
            part = ((c.part[0] + 1) % c.part[1], c.part[1])
            yield Mutant("another part of a tile loop", LINEAGE, become(replace(c, part=part)))


def of_buffers(plan: Plan, traces: Traces, rank: int) -> Iterator[Mutant]:
    """Buffers that live too short, or are not what is returned."""
    one = traces[rank]
    read = {b for _, e in found(one, Return) for b in (e.buffer,)}
    for index, event in found(one, (Alloc, Free, Fill, Return)):

        def become(*new: Event, at: int = index) -> Traces:
            return edit(traces, rank, (at, new))

        match event:
            case Alloc(buffer):
                yield Mutant("allocated twice", BUFFERS, become(event, event))
                if buffer in read:
                    yield Mutant("not allocated", BUFFERS, become())
            case Free(buffer):
                yield Mutant("freed twice", BUFFERS, become(event, event))
            case Fill(outputs):
                yield Mutant("not filled", BUFFERS, become())
                later = [i for i, k in found(one, Kernel) if written(k) & set(outputs)]
                if later:
                    again = edit(traces, rank, (later[0], (one.events[later[0]], event)))
                    yield Mutant("filled again", LINEAGE, again)
                if len(outputs) > 1:
                    yield Mutant("half filled", BUFFERS, become(Fill(outputs[:1])))
            case Return(name, buffer):
                yield Mutant("no result", LINEAGE, become())
                yield Mutant("another's result", LINEAGE, become(Return(name, 0)))
                yield Mutant("result twice", LINEAGE, become(event, event))
                yield Mutant("result freed", BUFFERS, become(event, Free(buffer)))
                yield Mutant("result written", BUFFERS, become(event, Fill((buffer,))))


def written(kernel: Kernel) -> set[int]:
    """Buffers that a call writes."""
    return {operand.buffer for operand in kernel.outputs}


def of_sizes(traces: Traces, rank: int) -> Iterator[Mutant]:
    """What arrives is of another length, here, or on all ranks alike: as of another dtype."""

    def longer(one: Trace, numbers: set[int]) -> Trace:
        buffers = (
            replace(b, nbytes=2 * b.nbytes) if i in numbers else b
            for i, b in enumerate(one.buffers)
        )
        return replace(one, buffers=tuple(buffers))

    for number, (_, c) in enumerate(found(traces[rank], Collective)):
        here = longer(traces[rank], {c.target})
        changed = (*traces[:rank], here, *traces[rank + 1 :])
        yield Mutant("longer buffer", ORDER | MEMORY, changed)
        if rank:
            continue
        each = [found(one, Collective)[number][1] for one in traces]
        wide = tuple(longer(one, {e.source, e.target}) for one, e in zip(traces, each, strict=True))
        yield Mutant("another dtype everywhere", MEMORY | ORDER, wide)
