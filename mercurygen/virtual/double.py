"""The functions of torch.distributed as one virtual rank calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mercurygen.virtual.network import Communicator
from mercurygen.virtual.objects import DeviceMesh, P2POp, ProcessGroup, Work
from mercurygen.virtual.rank import Rank
from mercurygen.virtual.transfers import barrier, batch, check_reduction, collective, reduced

if TYPE_CHECKING:
    from torch import Tensor


class Double:
    """Functions of torch.distributed, as one rank calls them.

    Args:
        rank: the rank.
        world: the communicator of all ranks.
        made: groups that this rank has made already, for itself: torch counts them for names.
    """

    def __init__(self, rank: Rank, world: Communicator, made: int) -> None:
        self._rank = rank
        self.everyone = ProcessGroup(rank, world)
        self.group_count, self.pg_names = 1 + made, dict.fromkeys(range(1 + made))

    def _group(self, group: ProcessGroup | None) -> ProcessGroup:
        if group is not None and not isinstance(group, ProcessGroup):
            name = type(group).__name__
            raise self._rank.fail("misuse", f"group is a {name}: must be a ProcessGroup")
        return group or self.everyone

    def _done(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    # --- groups -------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Yes."""
        return True

    def is_initialized(self) -> bool:
        """Yes: the ranks exist."""
        return True

    def get_rank(self, group: ProcessGroup | None = None) -> int:
        """This rank's index in a group."""
        return self._group(group).rank()

    def get_world_size(self, group: ProcessGroup | None = None) -> int:
        """Size of a group."""
        return self._group(group).size()

    def get_backend(self, group: ProcessGroup | None = None) -> str:
        """The CPU's."""
        return "gloo"

    def get_backend_config(self, group: ProcessGroup | None = None) -> str:
        """Backends by device."""
        return "cpu:gloo"

    def get_process_group_ranks(self, group: ProcessGroup | None) -> list[int]:
        """Global ranks of a group, in its order."""
        return list(self._group(group).comm.ranks)

    def get_group_rank(self, group: ProcessGroup, global_rank: int) -> int:
        """Index of a rank in a group."""
        return self._group(group).comm.ranks.index(global_rank)

    def get_global_rank(self, group: ProcessGroup, group_rank: int) -> int:
        """The rank at an index of a group."""
        return self._group(group).comm.ranks[group_rank]

    def get_node_local_rank(self, fallback_rank: int | None = None) -> int:
        """All ranks are on one node."""
        return self._rank.number

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
    ) -> ProcessGroup | None:
        """A group; all ranks call it, or with local synchronization its members alone."""
        rank, world = self._rank, self.everyone.comm.ranks
        members = world if ranks is None else tuple(sorted(ranks) if sort_ranks else ranks)
        if not set(members) <= set(world) or len(set(members)) < len(members):
            raise ValueError(f"ranks {members}: each once, of {len(world)}")
        key = f"{sorted(members)} {self.group_count}"
        self.group_count += 1
        must = members if use_local_synchronization else world
        rank.tick()
        if rank.number in must and len(must) > 1:
            self._meet(f"{key} {members}", must)
        group = ProcessGroup(rank, Communicator(members, key))
        self.pg_names[len(self.pg_names)] = None
        return group if rank.number in members else None

    def _meet(self, key: str, ranks: Sequence[int]) -> None:
        """Wait until all have come to make the same group."""
        network, me = self._rank.network, self._rank.number
        met = network.meetings.setdefault(key, set())
        met.add(me)
        if met >= set(ranks):
            for other in met - {me}:
                network.stage.wake(other)
            return
        absent = next(other for other in ranks if other not in met)
        words = f"which makes the group of ranks {', '.join(map(str, ranks))}: all must make it"
        network.stage.wait(me, (words, absent), lambda: met >= set(ranks))

    def init_device_mesh(
        self,
        device_type: str,
        mesh_shape: Sequence[int],
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """A mesh of all ranks, row-major."""
        import torch

        ranks = torch.arange(self.everyone.size()).view(*mesh_shape)
        groups = []
        for dim, size in enumerate(mesh_shape):
            for line in ranks.movedim(dim, -1).reshape(-1, size).tolist():
                if self._rank.number in line:
                    groups.append(self.new_group(line, use_local_synchronization=True))
        return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh_dim_names)

    # --- point to point -----------------------------------------------------------------------

    def _one(self, way: str, x: Tensor, peer: int | None, group: Any, index: int | None) -> Work:
        made = P2POp(way, x, peer, group, 0, index)
        return batch(self._rank, [made], self._group(group), split=False)[0]

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        """Start to send, as an operation of its own."""
        return self._one("send", tensor, dst, group, group_dst)

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        """Start to receive, as an operation of its own."""
        return self._one("receive", tensor, src, group, group_src)

    def send(self, tensor, dst=None, group=None, tag=0, group_dst=None) -> None:
        """Send."""
        self._one("send", tensor, dst, group, group_dst).wait()

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None) -> int:
        """Receive; the sender's rank."""
        self._one("receive", tensor, src, group, group_src).wait()
        return src if src is not None else self._group(group).comm.ranks[group_src]

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[Work]:
        """Start messages together."""
        made = []
        for one in p2p_op_list:
            if not isinstance(one, P2POp) or one.op not in (self.isend, self.irecv):
                raise self._rank.fail("misuse", "a batch is of P2POp(isend or irecv, ...)")
            way = "send" if one.op == self.isend else "receive"
            made.append(P2POp(way, one.tensor, one.peer, one.group, one.tag, one.group_peer))
        groups = {self._group(one.group).comm for one in made}
        if len(groups) != 1:
            raise self._rank.fail("misuse", f"a batch on {len(groups)} groups: must be one")
        group = self._group(made[0].group)
        return batch(self._rank, made, group, split=self._rank.split_handles)

    # --- collectives --------------------------------------------------------------------------

    def _sized(self, kind: str, whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
        if whole.numel() != part.numel() * group.size():
            raise self._rank.fail(
                "misuse",
                f"the {kind} has {list(whole.shape)} beside {list(part.shape)} on {group.size()} "
                "ranks",
            )

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        """All ranks' tensors, in their order."""
        import torch

        group = self._group(group)
        self._sized("all-gather", output_tensor, input_tensor, group)
        work = collective(
            self._rank,
            group,
            "all-gather",
            [input_tensor],
            [output_tensor],
            lambda given, me: [torch.cat([x.reshape(-1) for (x,) in given])],
        )
        return self._done(work, async_op)

    all_gather_single = all_gather_into_tensor

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        """All ranks' tensors, as a list."""
        group = self._group(group)
        if len(tensor_list) != group.size() or any(x.shape != tensor.shape for x in tensor_list):
            raise self._rank.fail("misuse", f"{len(tensor_list)} tensors for {group.size()} ranks")
        work = collective(
            self._rank,
            group,
            "all-gather",
            [tensor],
            tensor_list,
            lambda given, me: [x for (x,) in given],
        )
        return self._done(work, async_op)

    def all_to_all_single(
        self,
        output,
        input,
        output_split_sizes=None,
        input_split_sizes=None,
        group=None,
        async_op: bool = False,
    ):
        """Part i to rank i, a part from each, in their order."""
        group = self._group(group)
        ways = []
        for x, sizes in ((input, input_split_sizes), (output, output_split_sizes)):
            even = [x.shape[0] // group.size()] * group.size()
            sizes = list(sizes) if sizes else even
            if sum(sizes) != x.shape[0] or len(sizes) != group.size():
                raise self._rank.fail(
                    "misuse", f"{list(x.shape)} in parts {sizes} for {group.size()} ranks"
                )
            ways.append(sizes)
        even = not input_split_sizes and not output_split_sizes
        work = self._exchange([input], [output], ways, group, even)
        return self._done(work, async_op)

    def _exchange(self, sources, targets, ways, group: ProcessGroup, even: bool) -> Work:
        """An all-to-all of one tensor in parts."""
        import torch

        sends, wanted = ways
        each = sources[0][0].numel() if sources[0].shape[0] else 0

        def result(given: list[Any], me: int) -> list[Tensor]:
            """The parts for this rank."""
            parts = []
            for (x, sizes), size in zip(given, wanted, strict=True):
                part = x.split(sizes)[me].reshape(-1)
                if part.numel() != size * each:
                    words = f"a part of {part.numel()} elements where {size * each} are expected"
                    raise self._rank.fail("order", f"the all-to-all brings {words}")
                parts.append(part)
            return [torch.cat(parts)]

        return collective(
            self._rank, group, "all-to-all", sources, targets, result, shared=not even, extra=sends
        )

    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        """Tensor i to rank i, one from each."""
        group = self._group(group)
        if {len(output_tensor_list), len(input_tensor_list)} != {group.size()}:
            raise self._rank.fail("misuse", f"an all-to-all of lists needs {group.size()} tensors")
        wanted = [x.numel() for x in output_tensor_list]

        def result(given: list[Any], me: int) -> list[Tensor]:
            """The tensors for this rank."""
            got = [each[me] for each in given]
            if [x.numel() for x in got] != wanted:
                raise self._rank.fail("order", "the all-to-all brings tensors of other sizes")
            return got

        work = collective(
            self._rank,
            group,
            "all-to-all",
            input_tensor_list,
            output_tensor_list,
            result,
            shared=True,
        )
        return self._done(work, async_op)

    def all_reduce(self, tensor, op=None, group=None, async_op: bool = False):
        """Reduce in place, everywhere."""
        how = check_reduction(self._rank, op)
        work = collective(
            self._rank,
            self._group(group),
            "all-reduce",
            [tensor],
            [tensor],
            lambda given, me: [reduced([x for (x,) in given], op)],
            how=how,
        )
        return self._done(work, async_op)

    def reduce_scatter_tensor(self, output, input, op=None, group=None, async_op=False):
        """Reduce; every rank gets its part."""
        group, how = self._group(group), check_reduction(self._rank, op)
        self._sized("reduce-scatter", input, output, group)
        work = collective(
            self._rank,
            group,
            "reduce-scatter",
            [input],
            [output],
            lambda given, me: [
                reduced([x.reshape(-1).chunk(group.size())[me] for (x,) in given], op)
            ],
            how=how,
        )
        return self._done(work, async_op)

    reduce_scatter_single = reduce_scatter_tensor

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        """The tensor of one rank, everywhere."""
        group = self._group(group)
        if (src is None) == (group_src is None):
            raise self._rank.fail("misuse", "a broadcast needs src or group_src, not both")
        root = group_src if src is None else self.get_group_rank(group, src)
        if not 0 <= root < group.size():
            raise self._rank.fail("misuse", f"root {root} of {group.size()} ranks")
        work = collective(
            self._rank,
            group,
            "broadcast",
            [tensor],
            [tensor],
            lambda given, me: [given[root][0]],
            how=f"from {root}",
        )
        return self._done(work, async_op)

    def barrier(self, group=None, async_op: bool = False, device_ids=None, timeout=None):
        """Wait for all."""
        return self._done(barrier(self._rank, self._group(group)), async_op)
