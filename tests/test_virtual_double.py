"""The stand-in of torch.distributed by itself: what its functions give, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from emitted import ATTENTION

from mercurygen.virtual.report import VirtualError
from mercurygen.virtual.run import Ranks

torch.set_num_threads(1)

HEAD = """
import torch, torch.distributed as dist
from torch.distributed import DeviceMesh, P2POp, init_device_mesh
me, n = dist.get_rank(), dist.get_world_size()
def x(*values): return torch.tensor(values, dtype=torch.float64)
def same(got, *want): assert got.tolist() == list(want), (me, got.tolist(), want)
"""
CALLS = {
    "all_reduce": """
a = x(me, -me); dist.all_reduce(a); same(a, 6, -6)
a = x(me, -me); dist.all_reduce(a, dist.ReduceOp.MAX, async_op=True).wait(); same(a, 3, 0)
a = x(me + 1); dist.all_reduce(a, op=dist.ReduceOp.PRODUCT); same(a, 24)
a = x(me); dist.all_reduce(a, dist.ReduceOp.AVG); same(a, 1.5)
""",
    "reduce_scatter": """
a = x(0); dist.reduce_scatter_tensor(a, x(0, 10, 20, 30) + me); same(a, 40 * me + 6)
if hasattr(dist, "reduce_scatter_single"):
    work = dist.reduce_scatter_single(a, x(1, 2, 3, 4), async_op=True); work.wait()
    same(a, 4 * me + 4)
b = x(1, 2, 3, 4); dist.reduce_scatter_tensor(b[me : me + 1], b); same(b[me : me + 1], 4 * me + 4)
""",
    "all_gather": """
a = x(0, 0, 0, 0); dist.all_gather_into_tensor(a, x(me)); same(a, 0, 1, 2, 3)
a = x(-1, -1, -1, -1); a[me] = me
dist.all_gather_into_tensor(a, a[me : me + 1]); same(a, 0, 1, 2, 3)
b = [x(0) for _ in range(n)]; dist.all_gather(b, x(me)); same(torch.cat(b), 0, 1, 2, 3)
""",
    "broadcast": """
a = x(me); dist.broadcast(a, 2); same(a, 2)
a = x(me); dist.broadcast(a, group_src=1, async_op=True).wait(); same(a, 1)
""",
    "all_to_all": """
a = x(0, 0, 0, 0); dist.all_to_all_single(a, x(0, 1, 2, 3) + 10 * me)
same(a, me, 10 + me, 20 + me, 30 + me)
a = x(*[0] * (4 * me + 4))  # i + 1 elements to rank i
dist.all_to_all_single(a, x(*range(10)), [me + 1] * 4, [1, 2, 3, 4])
start = sum(range(me + 1)); same(a, *list(range(start, start + me + 1)) * 4)
b = [x(0) for _ in range(n)]; dist.all_to_all(b, [x(10 * me + i) for i in range(n)])
same(torch.cat(b), me, 10 + me, 20 + me, 30 + me)
""",
    "point to point": """
a, left, right = x(0), (me - 1) % n, (me + 1) % n
for work in dist.batch_isend_irecv([P2POp(dist.irecv, a, left), P2POp(dist.isend, x(me), right)]):
    work.wait()
same(a, left)
if me % 2: dist.send(x(me), left)
else: assert dist.recv(a, right) in (right, None); same(a, right)
""",
    "groups": """
for _ in range(3 - dist.distributed_c10d._world.group_count):  # torch counts them for names
    dist.new_group([me], use_local_synchronization=True)
two = [me // 2 * 2 + 1, me // 2 * 2]
pair = dist.new_group(two, use_local_synchronization=True, sort_ranks=False)
assert dist.get_process_group_ranks(pair) == two and pair.size() == 2
assert pair.rank() == 1 - me % 2 == dist.get_rank(pair) and dist.get_world_size(pair) == 2
a = x(me); dist.all_reduce(a, group=pair); same(a, me // 2 * 4 + 1)
some = dist.new_group([0, 3]); assert (some is None) == (me in (1, 2))
dist.barrier(); dist.barrier(pair, async_op=True).wait()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "col"))
assert isinstance(mesh, DeviceMesh) and mesh.shape == (2, 2)
assert mesh.get_coordinate() == [*divmod(me, 2)]
assert mesh.get_local_rank("row") == me // 2 and mesh.get_group(1).size() == mesh.size(1) == 2
assert mesh.mesh_dim_names == ("row", "col") and mesh.mesh.tolist() == [[0, 1], [2, 3]]
""",
    "a poll": """
a = x(0); dist.barrier()
if me == 0:
    work = dist.irecv(a, 1)
    while not work.is_completed(): pass
    work.wait()
if me == 1: dist.isend(x(7), 0).wait()
dist.barrier()
""",
}


def calls(text: str) -> None:
    """Run a text on four ranks."""
    ranks = Ranks(HEAD + text, ATTENTION, "calls.py", 4)
    ranks.play(lambda rank: exec(ranks.code, ranks.spaces[rank.number]))


@pytest.mark.parametrize("name", CALLS)
def test_double(name: str) -> None:
    """Each function gives what torch's does."""
    calls(CALLS[name])


@pytest.mark.parametrize(
    ("text", "check", "words"),
    [
        (
            "dist.all_reduce(x(me)) if me else dist.all_gather_into_tensor(x(0, 0, 0, 0), x(1))",
            "order",
            "begin the communicator of all ranks unlike",
        ),
        ("dist.barrier(); dist.all_reduce(x(*range(1 + me)))", "order", "8 bytes in"),
        (
            "dist.barrier(); op = dist.ReduceOp; dist.all_reduce(x(1), op.MAX if me else op.SUM)",
            "order",
            "sum",
        ),
        ("dist.barrier(); dist.broadcast(x(me), me)", "order", "from 0"),
        (
            "dist.barrier()\nif me: dist.barrier()",
            "deadlock",
            "rank 0 is at its end and never does",
        ),
        ("dist.barrier()\ndist.isend(x(1), 1 - me).wait() if me < 2 else 0", "deadlock", "closes"),
        (
            "dist.barrier(); way = dist.isend if me else dist.irecv\n"
            "if me < 2: way(x(*[1] * (me + 1)), 1 - me).wait()",
            "order",
            "16 bytes of float64",
        ),
        ("a = x(1, 2)\ndist.all_reduce(a, async_op=True); a += 1", "in-flight-", "being received"),
        (
            "a = x(1, 2, 3, 4)\nw = dist.all_to_all_single(x(*a), a, async_op=True); a[0] = 1",
            "in-flight-write",
            "being sent",
        ),
        ("a = x(1, 2, 3, 4)\nw = dist.all_to_all_single(a, a)", "in-flight-write", "is to receive"),
        ("w = dist.all_reduce(x(1), async_op=True)", "not-waited", "nobody waited for the receive"),
        ("dist.all_reduce(torch.zeros(4, 4).T)", "not-contiguous", "strides"),
        ("dist.all_gather_into_tensor(x(1, 2, 3), x(1))", "misuse", "4 ranks"),
        ("dist.isend(x(1), 9)", "misuse", "rank 9 is not in"),
        ("dist.nn", "not-doubled", "`torch.distributed.nn`"),
        ("dist.barrier(dist.group.WORLD).split_group()", "module-error", "NoneType"),
        ("dist.group.WORLD.allgather", "not-doubled", "`ProcessGroup.allgather`"),
        ("dist.nothing", "module-error", "has no attribute 'nothing'"),
        (
            "i = torch.arange(4)\nw = dist.isend(i, (me + 1) % 4)\ni.flatten()[2:].zero_()",
            "in-flight-write",
            "`i`",
        ),
        (
            "a = torch.zeros(4, 4)\nw = dist.irecv(a[1], (me + 1) % 4); a[0].sum(); a[:, 0].sum()",
            "in-flight-read",
            "a tensor [4]",
        ),
    ],
)
def test_double_refuses(text: str, check: str, words: str) -> None:
    """What is wrong, in words."""
    with pytest.raises(VirtualError) as caught:
        calls(text)
    assert caught.value.check.startswith(check) and words in str(caught.value), caught.value
