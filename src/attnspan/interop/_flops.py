"""FLOP formulas of wrapped kernels, for `torch.utils.flop_counter`."""

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._derivative import Derivative
from ._operators import Op
from ._parameters import ByName, Parameters


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


def register_flops(
    ops: tuple[Op, Op | None],
    derivative: Derivative | None,
    own: ByName | None,
    parameters: Parameters,
    layout: str,
) -> None:
    """Tell torch's counter what the operators cost: backward 2.5 times forward, and what it runs again."""

    def count(*values: Any, **_: Any) -> int:
        named = dict(zip(parameters.names, values, strict=True))
        if own is not None:
            return int(own(named))
        causal = bool(named.get("causal", named.get("is_causal", False)))
        return attention_flops(*(named[x] for x in parameters.required[:3]), layout=layout, causal=causal)

    forward, backward = ops
    register_flop_formula(forward.overloadpacket, get_raw=True)(count)
    if backward is not None and derivative is not None:
        first, halves = len(derivative.incoming), 7 if derivative.recomputes else 5
        inputs = slice(first, first + len(parameters.names))
        again = register_flop_formula(backward.overloadpacket, get_raw=True)
        again(lambda *values, **_: count(*values[inputs]) * halves // 2)
