"""FLOP formulas of wrapped kernels, for `torch.utils.flop_counter`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._derivative import Derivative
from ._outputs import names_wanted
from ._parameters import Parameters

Formula = Callable[[tuple[Any, ...]], int]


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *, layout: str, causal: bool = False) -> int:
    """Operations of one forward call, 2 * pairs * (D + Dv) (FlashAttention-2, arXiv:2307.08691, section 4.1).

    In layout "thd" every pair counts, as documents are unknown; ``causal`` is aligned bottom-right.
    """
    heads, length = (1, 2) if layout == "bhsd" else (-2, -3)
    q_len, k_len = q.shape[length], k.shape[length]
    pairs = q_len * k_len
    if causal:
        # Rows see k_len - q_len + 1 .. k_len keys, none fewer than 0.
        first, rows = max(k_len - q_len + 1, 1), min(q_len, k_len)
        pairs = rows * (first + k_len) // 2
    batch = 1 if layout == "thd" else q.shape[0]
    return int(2 * batch * q.shape[heads] * pairs * (q.shape[-1] + v.shape[-1]))


def read_flops(flops: Callable[..., int] | None, parameters: Parameters, layout: str) -> Formula:
    """A formula of the operator's values from the user's formula of arguments by name, or attention's."""
    wanted = () if flops is None else names_wanted(flops, parameters.traced, "flops")

    def count(values: tuple[Any, ...]) -> int:
        named = dict(zip(parameters.names, values, strict=True))
        if flops is not None:
            return int(flops(**{name: named[name] for name in wanted}))
        causal = bool(named.get("causal", named.get("is_causal", False)))
        q, k, v = (named[name] for name in parameters.required[:3])
        return attention_flops(q, k, v, layout=layout, causal=causal)

    return count


def register_flops(
    forward: torch._ops.OpOverload,
    backward: torch._ops.OpOverload | None,
    derivative: Derivative | None,
    formula: Formula,
) -> None:
    """Tell torch's counter what the operators cost: backward 2.5 times forward, and what it runs again."""
    register_flop_formula(forward.overloadpacket, get_raw=True)(lambda *values, **_: formula(values))
    if backward is None or derivative is None:
        return
    first, halves = len(derivative.incoming), 7 if derivative.recomputes else 5
    last = first + len(forward._schema.arguments)

    def count(*values: Any, **_: Any) -> int:
        return formula(values[first:last]) * halves // 2

    register_flop_formula(backward.overloadpacket, get_raw=True)(count)
