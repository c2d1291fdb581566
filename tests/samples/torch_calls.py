"""Small problems, masks and options of the tests of the torch front end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnspan
from attnspan.kernels import cpu
from samples.masks import BATCH, SAMPLES
from samples.masks import KEYS as K_LEN
from samples.parts import ALL, Case, keywords
from samples.problems import Problem, make

Q_LEN = K_LEN
#: torch passes on the ValueError of a compiled operator, from 2.15 on as a RuntimeError of the same text.
OPERATOR_ERROR = (ValueError, RuntimeError) if torch.__version__ >= "2.15" else ValueError


def _blocks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query // 5 == key // 5


def _dense() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(BATCH, 1, Q_LEN, K_LEN, generator=generator) < 0.8


def _own_spans() -> Tensor:
    rows = torch.arange(Q_LEN)
    bounds = torch.stack([torch.stack([rows // 4, rows // 2], -1), torch.stack([rows // 2, rows], -1)], -2)
    bounds[5] = 0  # a row that sees nothing
    return bounds.to(torch.int32).view(1, 1, Q_LEN, 2, 2)


_TAKEN = (
    *("full", "causal", "window, both sides", "segments, per batch row", "causal documents", "prefix-LM"),
    *("groups", "images in text", "key_padding", "keys, per batch row", "causal cache", "window and sinks"),
)
#: Every kind of mask, for BATCH rows of Q_LEN == K_LEN tokens; a new one at each call.
MASKS: dict[str, Callable[[], attnspan.Mask]] = {
    sample.function: partial(sample.mask, torch.from_numpy) for sample in SAMPLES if sample.name in _TAKEN
}
MASKS |= {
    "spans": lambda: attnspan.spans(_own_spans()),
    "from_predicate": lambda: attnspan.from_predicate(_blocks),
    "from_dense": lambda: attnspan.from_dense(_dense()),
}

_PARTS = (
    *("softcap", "sinks", "sinks, bf16", "alibi", "alibi, per batch row", "alibi, signed", "distance table"),
    *("T5", "dense", "dense, per key and head, float32", "dense, all heads, float16"),
    *("dropout", "dropout by seeds"),
)
#: Keywords of `attention` by option, for numbers of batch rows, query heads, queries and keys; parameters are
#: leaves that require gradients.
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {name: partial(keywords, name) for name in _PARTS}
OPTIONS["all"] = partial(keywords, ALL)

SMALL = Case(
    batch=2, heads=4, q_len=7, k_len=9, head_dim=16, v_dim=16, mask_batch=1, mask_heads=1, stored="bshd"
)


def small(*options: str, **changes: Any) -> Problem:
    """A problem under random spans, of SMALL but for changes."""
    return make(replace(SMALL, options=options, **changes))


def qkv(**changes: Any) -> tuple[Tensor, ...]:
    """q, k and v of 24 queries and keys."""
    return tuple(small(**{"q_len": 24, "k_len": 24, "v_dim": 24, **changes}).inputs.values())


@contextmanager
def counted_kernel_calls() -> Iterator[list[str]]:
    """Collect the names of the kernel's entry points, once for each call; complete when the block ends."""
    before = cpu.counters()
    calls: list[str] = []
    try:
        yield calls
    finally:
        after = cpu.counters()
        for name in after:
            calls.extend([name] * int(after[name]["calls"] - before[name]["calls"]))
