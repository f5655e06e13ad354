"""Modules whose ranks have partial results for others' queries: on gloo, against their plan."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from numeric_cases import Call, Problem, check_forward, peak_bytes, record_call
from ranks import Ranks

from mercurygen.emit.callsites import check_text
from mercurygen.emit.module import emit
from mercurygen.errors import Refusal
from mercurygen.lower.events import Batch, Collective, Message, Trace
from mercurygen.lower.lower import lower
from mercurygen.lower.plan import Plan
from mercurygen.lower.trace import trace
from mercurygen.operators import load
from mercurygen.schedule.apply import apply
from mercurygen.schedule.schedule import Schedule
from mercurygen.schedule.text import parse

ATTENTION = load("attention")
TOKENRING = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m direct"
RELAYED = "parallelize S_kv over m\nshift q: S_q along m\nshift out, lse: S_q along m"
SPLIT_KV = "parallelize S_kv over m\nshard q: S_q over m\nshard out, lse: S_q over m"
ALONE = "parallelize S_kv over m\nshard q: S_q over m\nshift out, lse: S_q along m"
DOUBLE = "parallelize S_kv over n, m\nshift q: S_q along n, m\nshift out, lse: S_q along n{0}, m{0}"
KV_RING = "parallelize S_q over n\nshift k, v: S_kv along n"
SCHEDULES = {  # mesh, body
    "tokenring": ("m=4", TOKENRING),
    "relayed": ("m=4", RELAYED),
    "split-kv": ("m=4", SPLIT_KV),
    "alone": ("m=4", ALONE),
    "alone-direct": ("m=4", f"{ALONE} direct"),
    "double": ("n=2 m=2", DOUBLE.format(" direct")),
    "double-relayed": ("n=2 m=2", DOUBLE.format("")),
    "double-mixed": (
        "n=2 m=3",
        "parallelize S_kv over n, m\nshift q: S_q along n, m\nshift out, lse: S_q along n, m direct",
    ),
    "ring-of-split-kv": ("n=2 m=2", f"{KV_RING}\n{SPLIT_KV}"),
    "ring-of-tokenring": ("n=2 m=2", f"{KV_RING}\n{TOKENRING}"),
    "tokenring-of-ring": (
        "n=3 m=2",
        f"parallelize S_q over n\n{TOKENRING}\nshift k, v: S_kv along n",
    ),
    "ring-of-relayed": ("n=2 m=2", f"{KV_RING}\n{RELAYED}"),
    "heads-around": ("n=2 m=2", f"parallelize H over n\n{TOKENRING}"),
    "heads-around-split-kv": ("n=2 m=2", f"parallelize H over n\n{SPLIT_KV}"),
    "heads-inside": (
        "m=3 n=2",
        f"{TOKENRING}\nparallelize H over n",
    ),
    "two-split-kv": (
        "n=2 m=2",
        "parallelize S_kv over n, m\nshard q: S_q over n, m\nshard out, lse: S_q over n, m",
    ),
}
CONTIGUOUS_ONLY = ("alone", "alone-direct")
VARIANTS = {
    "bfloat16": {"head_dim": 24, "value_dim": 40},
    "bfloat16-padded": {"head_dim": 20, "value_dim": 12},
    "float32": {"head_dim": 24, "value_dim": 24},
    "float32-padded": {"head_dim": 20, "value_dim": 20},
    "float64": {"head_dim": 12, "value_dim": 30},
}


@dataclass(frozen=True)
class Made:
    """A schedule and its plan."""

    schedule: Schedule
    plan: Plan

    @functools.cached_property
    def text(self) -> str:
        return emit(self.schedule, self.plan, "tested")

    @property
    def late(self) -> functools.partial[str]:
        """The text, made just before the fork."""
        return functools.partial(_text_of, self)


_TEXTS: dict[str, str] = {}


def _text_of(made: Made) -> str:
    """The text of a schedule: sizes are no part of the code."""
    schedule = made.schedule
    key = f"{schedule.mesh} {schedule.directives} {schedule.problem.mask}"
    if key not in _TEXTS:
        _TEXTS[key] = emit(schedule, made.plan, "tested")
    return _TEXTS[key]


def made(mesh: str, body: str, problem: Problem, dtype: str = "bfloat16", pins: str = "") -> Made:
    """A schedule on levels that are its mesh."""
    dims = ", ".join(word.partition("=")[0] for word in mesh.split())
    pins = pins or f"pin q, k, v, out, lse: S over {dims}\n"
    source = parse(f"""operator attention
problem batch={problem.batch} seq={problem.seq} heads={problem.heads} \
kv_heads={problem.kv_heads} head_dim={problem.head_dim} \
v_head_dim={problem.value_dim or problem.head_dim} {dtype} {"causal" if problem.causal else "full"}
topology test sha256:0123456789abcdef {" ".join(f"{x} wire 25GB/s" for x in mesh.split())}
group {mesh}
tp 1
mesh {mesh}
order S: {problem.order} over {dims}
{pins}{body}
""")
    plan = lower(apply(ATTENTION, source.schedule, source.spans))
    assert not isinstance(plan, Refusal), plan.slug
    return Made(source.schedule, plan)
