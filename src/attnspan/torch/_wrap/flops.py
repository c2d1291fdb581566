"""FLOP formulas of wrapped kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .derivative import Derivative
from .outputs import names_wanted
from .parameters import Parameters

Formula = Callable[[tuple[Any, ...]], int]


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *, layout: str, causal: bool = False) -> int:
    """Floating-point operations of one forward call: 2 * pairs * (D + Dv).

    Args:
        q: Shape (B, H, Sq, D), (B, Sq, H, D) or (T, H, D) by the layout.
        k: Same layout.
        v: Same layout.
        layout: "bhsd", "bshd" or "thd"; in "thd" every pair counts, as documents are unknown.
        causal: Count what each of the last Sq rows sees of Sk keys (aligned bottom-right) only.

    Returns:
        The count (FlashAttention-2, arXiv:2307.08691, section 4.1).

    Example:
        >>> x = torch.zeros(1, 2, 1, 8)
        >>> attention_flops(x, x, x, layout="bshd"), attention_flops(x, x, x, layout="bshd", causal=True)
        (128, 96)
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
    forward: torch._ops.OpOverload,
    backward: torch._ops.OpOverload | None,
    parameters: Parameters,
    derivative: Derivative | None,
    formula: Formula,
    recomputes: bool,
) -> None:
    """Tell torch's FLOP counter what the operators cost: backward 2.5 times forward, and what it runs again.

    Args:
        forward: The operator.
        backward: Its backward operator.
        parameters: The parameters of the kernel.
        derivative: Its derivative.
        formula: Of the forward operator's values.
        recomputes: The backward runs the kernel again.
    """

    def count_forward(*values: Any, **kwargs: Any) -> int:
        del kwargs
        return formula(values)

    register_flop_formula(forward.overloadpacket, get_raw=True)(count_forward)
    if backward is None or derivative is None:
        return
    first, parts = len(derivative.incoming), 7 if recomputes else 5

    def count_backward(*values: Any, **kwargs: Any) -> int:
        del kwargs
        return formula(values[first : first + len(parameters.items)]) * parts // 2

    register_flop_formula(backward.overloadpacket, get_raw=True)(count_backward)


def read_flops(flops: Callable[..., int] | None, parameters: Parameters, layout: str) -> Formula:
    """A formula of the operator's values from the user's formula of arguments by name, or attention's.

    Raises:
        ValueError: The formula wants what no parameter is called.

    Example:
        >>> from attnspan.torch._wrap.parameters import read_parameters
        >>> parameters = read_parameters(max, "Tensor q, Tensor k, Tensor v")
        >>> read_flops(lambda q: 5 * len(q), parameters, "bhsd")((torch.zeros(2), None, None))
        10
    """
    if flops is not None:
        wanted = names_wanted(flops, parameters.traced, "flops")

        def own(values: tuple[Any, ...]) -> int:
            named = dict(zip(parameters.names, values, strict=True))
            return int(flops(**{name: named[name] for name in wanted}))

        return own
    roles = parameters.required_tensors[:3]

    def attention(values: tuple[Any, ...]) -> int:
        named = dict(zip(parameters.names, values, strict=True))
        causal = bool(named.get("causal", named.get("is_causal", False)))
        return attention_flops(*(named[name] for name in roles), layout=layout, causal=causal)

    return attention
