"""The emitted Triton kernels, run or compiled; a program, since Triton reads its settings once.

python triton_runs.py numbers MODULE.py   every case on the CPU, with TRITON_INTERPRET=1
python triton_runs.py compile MODULE.py   for sm_80 and sm_90, no GPU needed

Both print one JSON object. The interpreter multiplies the bits of bfloat16 as if they were
numbers, so `test_triton` writes the module's products in float32 for the first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Block = tuple[slice, slice, int | None]  # rows, columns, `ahead`
ALL = slice(None)


@dataclass(frozen=True)
class Case:
    """Blocks of an attention, and its sizes.

    Attributes:
        rows, cols: of q, and of k and v.
        blocks: folded in this order; where they do not reach, nothing is seen.
        heads, dims: (H, K) and (D, E).
        change: of (q, k, v, grad_out), in place or by others.
        alike: what torch's kernel does at once, causal or not, to compare the error with its own.
    """

    rows: int
    cols: int
    blocks: tuple[Block, ...] = ((ALL, ALL, None),)
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    change: Callable[[list[Tensor]], list[Tensor]] = field(default=list)
    batch: int = 1
    alike: bool | None = None


def three_blocks(first: int, second: int) -> tuple[Block, ...]:
    """All rows of a causal square, its columns cut in three."""
    cuts = (0, first, second)
    spans = (slice(0, first), slice(first, second), slice(second, None))
    return tuple((ALL, span, -cut) for span, cut in zip(spans, cuts, strict=True))


def raised(by: float) -> Callable[[list[Tensor]], list[Tensor]]:
    """Scores of the columns from 20 on, and with them their lse, raised."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        q, k, _, _ = tensors
        q[..., 0] = 4.0  # 16 ** -0.5 takes it back
        k[:, 20:, :, 0] = by
        k[:, :20, :, 0] = 0.0
        return tensors

    return change


def strided(tensors: list[Tensor]) -> list[Tensor]:
    """Views as callers have them: heads first, a part of a fused projection, every other element,
    one number for all."""
    q, k, v, grad = tensors
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.cat([v, k, v], 3)[..., v.shape[3] : v.shape[3] + k.shape[3]]
    apart = torch.stack([v, v], 4)[..., 0]
    return [heads_first, fused, apart, torch.ones((), dtype=grad.dtype).expand_as(grad)]


CASES = {
    **{f"full {n}": Case(n, n) for n in (7, 63, 64, 65, 130)},
    "causal square": Case(65, 65, ((ALL, ALL, 0),)),
    "causal, rows after": Case(33, 70, ((ALL, ALL, 20),)),
    "causal, rows before": Case(70, 33, ((ALL, ALL, -25),)),
    "nothing seen": Case(20, 40, ((ALL, ALL, -1000),)),
    "nothing seen of one block": Case(
        40, 40, ((ALL, slice(0, 20), None), (ALL, slice(20, None), -99))
    ),
    "later block 300 higher": Case(
        20,
        40,
        ((ALL, slice(0, 20), None), (ALL, slice(20, None), None)),
        change=raised(300.0),
        alike=False,
    ),
    "later block 300 lower": Case(
        20,
        40,
        ((ALL, slice(0, 20), None), (ALL, slice(20, None), None)),
        change=raised(-300.0),
        alike=False,
    ),
    "4 queries a key head": Case(33, 40, ((ALL, ALL, 7),), heads=(8, 2)),
    "one key head": Case(33, 40, heads=(4, 1)),
    "heads 40 and 24": Case(33, 40, ((ALL, ALL, 7),), dims=(40, 24)),
    "heads 96": Case(20, 20, dims=(96, 96)),
    "heads 192 and 128": Case(33, 40, ((ALL, ALL, 7),), dims=(192, 128)),
    "heads 256": Case(17, 17, ((ALL, ALL, 0),), dims=(256, 256)),
    "views": Case(33, 40, ((ALL, ALL, 7),), heads=(4, 2), change=strided, batch=2),
    "three blocks": Case(64, 64, three_blocks(16, 40)),
    "blocks of some rows": Case(
        48, 48, ((slice(0, 24), slice(0, 20), None), (slice(10, 40), slice(20, None), -3))
    ),
    "float16": Case(65, 65, three_blocks(16, 40), (4, 2), (32, 32), torch.float16, alike=True),
    "bfloat16": Case(65, 65, three_blocks(16, 40), (4, 2), (32, 32), torch.bfloat16, alike=True),
}
NAMES = ("out", "lse", "dq", "dk", "dv")


# --- numbers --------------------------------------------------------------------------------


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    torch.manual_seed(0)
    (h, kv), (d, e) = case.heads, case.dims
    shapes = (case.rows, h, d), (case.cols, kv, d), (case.cols, kv, e), (case.rows, h, e)
    return case.change([torch.randn(case.batch, *shape).to(case.dtype) for shape in shapes])


def expected(case: Case, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The five results in float64, by autograd."""
    *read, grad = (x.detach().double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in read)
    seen = torch.zeros(case.rows, case.cols, dtype=torch.bool)
    for rows, cols, ahead in case.blocks:
        part = seen[rows, cols]
        part |= torch.ones_like(part) if ahead is None else torch.ones_like(part).tril(ahead)
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    score = torch.einsum("brhd,bchd->bhrc", q, keys) * q.shape[3] ** -0.5
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.logsumexp(3)
    blind = ~seen.any(1)
    weight = torch.where(blind[:, None], 0.0, score.masked_fill(blind[:, None], 0.0).softmax(3))
    out = torch.einsum("bhrc,bche->brhe", weight, values)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def found(module: ModuleType, case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """The five results, block by block."""
    q, k, v, grad = tensors
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    scale, first = q.shape[3] ** -0.5, case.blocks[0][0] == ALL
    for rows, cols, ahead in case.blocks:
        into = None if first else (out[:, rows], lse[:, :, rows])
        given = module._block_forward(q[:, rows], k[:, cols], v[:, cols], scale, ahead, into)
        out, lse, first = (*given, False) if first else (out, lse, False)
    grads = tuple(torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    delta = module._delta(grad, out)
    for rows, cols, ahead in case.blocks:
        module._block_backward(
            *(grad[:, rows], q[:, rows], k[:, cols], v[:, cols]),
            *(lse[:, :, rows], delta[:, :, rows], scale),
            *((grads[0][:, rows], grads[1][:, cols], grads[2][:, cols]), ahead),
        )
    return [out, lse, *grads]


def on_one_device(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """The five results of torch's kernel, in the inputs' dtype."""
    q, k, v, grad = (x.transpose(1, 2) for x in tensors)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    out, lse = getattr(torch.ops.aten, name)(q, k, v, 0.0, causal)
    back = getattr(torch.ops.aten, f"{name}_backward")
    grads = back(grad, q, k, v, out, lse, 0.0, causal)
    return [out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in grads)]


def errors(given: list[Tensor], right: list[Tensor], read: list[Tensor]) -> dict[str, float]:
    """Largest difference of each result, in terms of its largest number, at least 1.

    Infinities, of rows that see nothing, must agree: elsewhere the difference is no number. A
    gradient's error grows with what was read, whatever is left of the sum.
    """
    largest = max(x.abs().max().item() for x in read)
    found = {}
    for name, x, y in zip(NAMES, given, right, strict=True):
        same = x.double() == y  # -inf less -inf is no number
        difference = torch.where(same, 0.0, (x.double() - y).abs()).max().item()
        size = torch.where(y.isfinite(), y.abs(), 1.0).max().item()
        found[name] = difference / max(1.0, size, largest if name.startswith("d") else 1.0)
    return found


def numbers(module: ModuleType) -> dict[str, object]:
    """Errors of every case: of the kernels, of what runs in their place, of one device."""
    module._runs_kernels = lambda q: q.dtype != torch.float64
    results: dict[str, object] = {}
    for name, case in CASES.items():
        tensors = inputs(case)
        right = expected(case, tensors)
        for way, given in ("kernels", tensors), ("torch", [x.double() for x in tensors]):
            results[f"{name}, {way}"] = {
                "found": errors(found(module, case, given), right, given),
                "floor": {8: 1e-12, 4: 1e-5, 2: 2e-3}[given[0].element_size()],
            }
            if case.alike is not None:
                single = errors(on_one_device(given, case.alike), right, given)
                results[f"{name}, {way}"]["one device"] = single
    return results | {"kept": kept(module), "skipped": skipped(module), "far": far(module)}


def kept(module: ModuleType) -> bool:
    """Whether rows keep the bits of (out, lse) where a block shows them nothing."""
    q, k, v, _ = inputs(Case(40, 40))
    out, lse = torch.randn(1, 40, 1, 16), 100 * torch.randn(1, 1, 40)
    out[:, 3], lse[:, :, 3] = 0.0, -torch.inf  # a row that has seen nothing so far
    before = out[:, :20].clone(), lse[:, :, :20].clone()
    module._block_forward(q, k, v, 0.25, -20, (out, lse))
    return torch.equal(out[:, :20], before[0]) and torch.equal(lse[:, :, :20], before[1])


def skipped(module: ModuleType) -> bool:
    """Whether tiles of columns that no row of a tile sees are not even read: they hold NaN."""
    q, k, v, _ = inputs(Case(32, 80))
    k[:, 48:] = v[:, 48:] = torch.nan
    out, lse = module._block_forward(q, k, v, 0.25, 0)
    return bool(out.isfinite().all() and lse.isfinite().all())


def far(module: ModuleType) -> dict[str, float]:
    """Errors with rows that lie 2 ** 30 elements apart: the third is past what int32 counts."""
    case = Case(3, 3, dtype=torch.float16)
    q, k, v, grad = inputs(case)
    storage = torch.empty(2**31 + 16, dtype=torch.float16)  # 4 GiB of which 3 pages are touched
    apart = torch.as_strided(storage, k.shape, (1, 2**30, 16, 1))
    apart.copy_(k)
    right = expected(case, (q, k, v, grad))
    return errors(found(module, case, [q, apart, v, grad]), right, [q])


# --- compiling ------------------------------------------------------------------------------


class Gpu:
    """What Triton asks of a driver before it compiles, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """The GPU."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A number of its own: what was compiled is kept by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def compiled(module: ModuleType) -> dict[str, object]:
    """What every kernel takes of a GPU, launched as the module launches it, but not run."""
    module._runs_kernels = lambda q: True
    torch.cuda.device_of = lambda x: contextlib.nullcontext()
    launched = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args, grid, warmup, **options):
        launched.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    results = {}
    for capability in (80, 90):
        driver.set_active(Gpu(capability))
        for d, e in ((128, 128), (192, 128)):
            launched.clear()
            launch(module, d, e)
            results |= {f"sm_{capability} {d}/{e} {n}": resources(k) for n, k in launched}
    return results


def launch(module: ModuleType, d: int, e: int) -> None:
    """A causal block that is merged, and its gradient, in bfloat16; on no device."""
    q, k, v, grad = (
        torch.empty(1, n, heads, size, dtype=torch.bfloat16)
        for n, heads, size in ((96, 4, d), (80, 2, d), (80, 2, e), (96, 4, e))
    )
    lse = torch.empty(1, 4, 96)
    module._block_forward(q, k, v, 0.1, 5, (grad.float(), lse))
    delta = module._delta(grad, grad)
    grads = tuple(x.float() for x in (q, k, v))
    module._block_backward(grad, q, k, v, lse, delta, 0.1, grads, 5)


def resources(kernel: object) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(tool), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout + shown.stderr).groups()
    return {"registers": int(registers), "stack": int(stack), "shared": kernel.metadata.shared}


def load(path: str) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location("emitted_kernels", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["emitted_kernels"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    work = {"numbers": numbers, "compile": compiled}[sys.argv[1]]
    torch.set_num_threads(1)
    print(json.dumps(work(load(sys.argv[2]))))
