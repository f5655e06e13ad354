"""Differentiable modules in training code: on real gloo ranks, in a model, against one process."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from differentiable import Trained, check_gradients
from emitted import written
from numeric_cases import Problem
from ranks import Ranks
from test_differentiable import CASES, GATHER, GATHERS, HEADS, RING, RINGS, ROWS, SAVE, SMALL
from test_readme import block
from training import (
    check_autocast,
    check_autocast_alone,
    check_checkpoint,
    check_compiled,
    check_errors,
    check_example,
    check_flat_checkpoints,
    check_gaps,
    check_labels,
    check_options,
    check_repeats,
    check_short,
    check_toy,
)

from mercurygen.errors import UserError

ALL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
RANKS = {world: Ranks(world) for world in (2, 3, 4, 8)}
DESIGNS = {  # forward and backward over one dimension
    "ring": (f"{ROWS} m;{RING} m", f"{RINGS} m"),
    "allgather": (f"{ROWS} m;{GATHER} m", f"{GATHERS} m"),
    "ulysses": (f"{HEADS} m", f"{SAVE} inner"),
}


def over(name: str, world: int, problem: Problem) -> Trained:
    """A design over so many ranks."""
    return Trained(f"m={world}", *DESIGNS[name], problem)


TRAINED = {f"{name} {world}": over(name, world, SMALL) for name in DESIGNS for world in (2, 4)}
TRAINED["ring 3"] = over("ring", 3, SMALL)
TRAINED |= {name: CASES[name] for name in ("unified", "double ring", "chunked ulysses, ring")}

for _name in ("ring 4", "ulysses 4", "allgather 2", "chunked ulysses, ring"):
    _made = TRAINED[_name]
    RANKS[_made.world].add(f"b54 {_name}", check_autocast, _made.late, _made.problem)


@pytest.mark.parametrize("name", ["ring 4", "ulysses 4", "allgather 2", "chunked ulysses, ring"])
def test_b54_autocast_of_mixed_inputs(name: str) -> None:
    """B54: q and k in float32, v in bfloat16; gradients in each input's dtype."""
    RANKS[TRAINED[name].world].result(f"b54 {name}")


FORWARD = f"{ROWS} m\n{RING} m"
for _kernel in ("aten", "triton"):
    _late = written("m=2", f"{FORWARD}\npatch body with {_kernel}", SMALL).late
    RANKS[2].add(f"b54 {_kernel}", check_autocast_alone, _late, SMALL)


@pytest.mark.parametrize("kernel", ["aten", "triton"])
def test_b54_autocast_without_gradients(kernel: str) -> None:
    """B54: modules of the forward alone; Triton's where its kernels do not run."""
    if kernel == "triton":
        pytest.importorskip("triton")
    RANKS[2].result(f"b54 {kernel}")


for _name, _made in TRAINED.items():
    RANKS[_made.world].add(f"b86 {_name}", check_checkpoint, _made.late)


@pytest.mark.parametrize("name", TRAINED)
def test_b86_checkpoints_communicate_alike_on_all_ranks(name: str) -> None:
    """B86: forward, recomputation and backward, each a fixed number of calls."""
    counts = RANKS[TRAINED[name].world].result(f"b86 {name}")
    assert all(each == counts[0] for each in counts) and min(counts[0]) > 0, counts


for _name in ("ring 2", "ulysses 2"):
    RANKS[2].add(f"b88 {_name}", check_flat_checkpoints, TRAINED[_name].late)


@pytest.mark.parametrize("name", ["ring 2", "ulysses 2"])
def test_b88_flat_memory_under_checkpoints(name: str) -> None:
    """B88: fifty steps, the module as the last operation."""
    RANKS[2].result(f"b88 {name}")


COMPILED = [("ring 2", "eager"), ("ulysses 2", "aot_eager")]
for _name, _backend in COMPILED:
    RANKS[2].add(f"b55 {_name} {_backend}", check_compiled, TRAINED[_name].late, _backend)


@pytest.mark.parametrize("name, backend", COMPILED)
def test_b55_b56_compiled_models(name: str, backend: str) -> None:
    """B55, B56: gradients are eager's and not zero; as one graph it is refused in our words."""
    RANKS[2].result(f"b55 {name} {backend}")


for _name in ("ring 4", "double ring"):
    RANKS[4].add(f"b67 {_name}", check_repeats, TRAINED[_name].late, TRAINED[_name].problem)


@pytest.mark.parametrize("name", ["ring 4", "double ring"])
def test_b67_repeats_are_bitwise_equal(name: str) -> None:
    """B67: results are merged in a fixed order, however late they come."""
    RANKS[4].result(f"b67 {name}")


# --- numerics -----------------------------------------------------------------------------------

GROWING = Problem(seq=320, heads=4, kv_heads=2, head_dim=40, batch=1)
ULYSSES = replace(GROWING, heads=16, kv_heads=8, head_dim=24)
GROWS = {"ring": GROWING, "allgather": GROWING, "ulysses": ULYSSES}
for _name, _problem in GROWS.items():
    for _world in (2, 4, 8):
        _made = over(_name, _world, _problem)
        RANKS[_world].add(f"b01 {_name}", check_errors, _made.late, _problem)


@pytest.mark.parametrize("name", GROWS)
def test_b01_errors_of_gradients_do_not_grow_with_ranks(name: str) -> None:
    """B01: out, dq, dk and dv in bfloat16 on 2, 4 and 8 ranks."""
    errors = {}
    for world in (2, 4, 8):
        found = RANKS[world].result(f"b01 {name}")
        errors[world] = [max(rank[i][0] for rank in found) for i in range(4)]
    print(name, errors)
    for least, most in zip(errors[2], errors[8], strict=True):
        assert most <= 1.5 * least, errors


GAPS = [("ring", torch.float32), ("ring", torch.bfloat16), ("allgather", torch.float32)]
for _name, _dtype in GAPS:
    _made = over(_name, 4, SMALL)
    RANKS[4].add(f"b02 {_name} {_dtype}", check_gaps, _made.late, SMALL, _dtype)


@pytest.mark.parametrize("name, dtype", GAPS)
def test_b02_gradients_of_large_scores(name: str, dtype: torch.dtype) -> None:
    """B02: no overflow in any gradient."""
    RANKS[4].result(f"b02 {name} {dtype}")


SHORT = {"b04 ring": ("ring", 8, 5), "b36 ring": ("ring", 2, 7), "b04 ulysses": ("ulysses", 4, 5)}
for _name, (_design, _world, _tokens) in SHORT.items():
    _problem = replace(SMALL, seq=16)
    _made = over(_design, _world, _problem)
    RANKS[_world].add(_name, check_short, _made.late, _problem, _tokens)


@pytest.mark.parametrize("name", SHORT)
def test_b04_b36_padding_has_no_gradient(name: str) -> None:
    """B04, B36: fewer tokens than ranks want, an odd number of them: every one counts."""
    RANKS[SHORT[name][1]].result(name)


LAYOUTS = [
    (name, order, causal)
    for name in DESIGNS
    for order in ("zigzag", "contiguous", "striped")
    for causal in (True, False)
]


def laid_out(name: str, order: str, causal: bool) -> Trained:
    """A design with this order and mask."""
    return over(name, 2, replace(SMALL, order=order, causal=causal))


REFUSED = {("allgather", "striped", True)}  # the mask would cut it token by token
for _case in LAYOUTS:
    if _case not in REFUSED:
        _made = laid_out(*_case)
        RANKS[2].add(f"b07 {_case}", check_gradients, _made.late, _made.problem, torch.float64)


@pytest.mark.parametrize("name, order, causal", LAYOUTS)
def test_b07_gradients_of_every_layout(name: str, order: str, causal: bool) -> None:
    """B07: right for each pair of token order and mask, or refused before anything runs."""
    case = name, order, causal
    if case in REFUSED:
        with pytest.raises(UserError):
            _ = laid_out(*case).plain
    else:
        RANKS[2].result(f"b07 {case}")


HEADED = Problem(seq=48, heads=3, kv_heads=3, head_dim=10, batch=2)
for _name in ("ring", "allgather"):
    RANKS[4].add(f"b22 {_name}", check_gradients, over(_name, 4, HEADED).late, HEADED, *ALL_DTYPES)


@pytest.mark.parametrize("name", ["ring", "allgather"])
def test_b19_b22_b50_gradients_on_every_rank(name: str) -> None:
    """B19, B22, B50: keys of their own on each rank, batch and heads above one; in four dtypes."""
    RANKS[4].result(f"b22 {name}")


# --- models -------------------------------------------------------------------------------------

TOYS = {  # over 4 ranks
    "2 x ring of 2": over("ring", 2, SMALL),
    "ring of 4": over("ring", 4, SMALL),
    "2 x ulysses of 2": over("ulysses", 2, SMALL),
    "unified 2 x 2": CASES["unified"],
    "allgather of 4, contiguous": over("allgather", 4, replace(SMALL, order="contiguous")),
}
for _name, _made in TOYS.items():
    RANKS[4].add(f"toy {_name}", check_toy, _made.late, False)
RANKS[4].add("toy in DDP", check_toy, TOYS["2 x ring of 2"].late, True)


@pytest.mark.parametrize("name", [*TOYS, "in DDP"])
def test_b19_b20_b71_b72_parameter_gradients_of_a_model(name: str) -> None:
    """B19, B20, B71, B72: dp x cp ranks give one process's gradients, summed or as DDP's mean."""
    assert max(RANKS[4].result(f"toy {name}")) < 1e-10


LABELLED = ("ring of 4", "allgather of 4, contiguous")
for _name in LABELLED:
    RANKS[4].add(f"b70 {_name}", check_labels, TOYS[_name].late)


@pytest.mark.parametrize("name", LABELLED)
def test_b70_b72_labels_and_positions(name: str) -> None:
    """B70, B72: no target is lost where a slice ends; positions are each once, in storage order."""
    RANKS[4].result(f"b70 {name}")


def test_b70_labels_of_one_rank() -> None:
    """B70: the same helper where nothing is cut."""
    check_labels(0, 1, Trained("", "", "", SMALL).plain)


RANKS[4].add("example", check_example, TOYS["ring of 4"].late, block("training"))


def test_b71_example_of_readme() -> None:
    """B71: README's lines give one process's gradients."""
    RANKS[4].result("example")


# --- what there is not ---------------------------------------------------------------------------

ABSENT = {"b33": "window_size", "b37": "cu_seqlens", "b69": "dropout_p"}
for _number, _word in ABSENT.items():
    RANKS[2].add(_number, check_options, TRAINED["ring 2"].late, SMALL, _word)


@pytest.mark.parametrize("number", ABSENT)
def test_b33_b37_b69_what_there_is_not_is_refused(number: str) -> None:
    """B33, B37, B69: no window, no packed documents, no dropout is taken and then left out."""
    RANKS[2].result(number)


GENERATED = sorted((Path(__file__).parent.parent / "generated").glob("*_train_*.py"))
AT_SETUP = {"make_mesh", "_level_group_count", "_check", "check_inputs"}
AT_SETUP |= {"_error", "_blind", "_self_check"}


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_b58_b80_no_waiting_for_the_device_and_one_place_for_private_names(path: Path) -> None:
    """B58, B80: no number is read back in a call; torch's own kernels stand in two functions."""
    places, reads = set(), set()
    for function in ast.parse(path.read_text()).body:
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "cpu", "numpy"):
                reads.add(function.name)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_scaled_dot"):
                places.add(function.name)
    assert reads <= AT_SETUP
    own = "@triton.jit" in path.read_text()  # kernels of its own: none of torch's
    assert places == (set() if own else {"_block_forward", "_block_backward"})
