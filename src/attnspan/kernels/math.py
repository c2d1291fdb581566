"""Attention in plain torch code: it stores every score, and every derivative exists.

Memory is O(q_len * k_len). Use this backend for higher derivatives, forward mode, float64 and devices without
a kernel. A NaN or inf in a key, a query or an incoming gradient reaches only visible pairs. A plain matmul
would spread it, because 0 * NaN = NaN.

Shape suffixes: b batch, h kv heads, m query heads of one group times queries, s keys, d head_dim, e v_dim, r
spans.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from attnspan.call import Problem
from attnspan.call.biases import HIDES
from attnspan.call.dropout import kept, scale_of_kept, split_seeds
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options
from attnspan.masks.bounds import Spans

from ._autocast import has_autocast

_NONE = Options()


def supports(problem: Problem) -> str | None:
    """Return None, because plain torch code runs every validated call."""
    del problem
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    *,
    scale: float,
    options: Options | None = None,
    lowered_for: Tensor | None = None,
    wide_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention that is differentiable to any order and in forward mode.

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), floating.
        bounds: (B|1, Hq|1, Sq, R, 2), int32. Illegal spans raise if they can be read (CPU, eager).
            Otherwise, their queries give NaN.
        scale: Factor of the scores.
        options: Softcap, bias, sinks and dropout, as tensors on q's device. Bias and sinks are
            differentiated too.
        lowered_for: (), integer, the number of keys that the mask was lowered for, if Python cannot read it.
            All results are NaN if it is not Sk.
        wide_lse: Return ``lse`` in float64, for softmaxes that are merged from several calls.

    Returns:
        ``out`` (B, Hq, Sq, Dv) in q's dtype, stored as (B, Sq, Hq, Dv). Then ``lse`` (B, Hq, Sq), the natural
        log-sum-exp, float64 for float64 inputs and else float32. A query that sees nothing has out 0. Its lse
        is -inf, or the head's sink.

    Raises:
        OptionError: If a span is illegal. The error names the query.

    Example:
        >>> x = torch.randn(1, 2, 3, 8)
        >>> bounds = torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32).view(1, 1, 3, 1, 2)
        >>> out, lse = forward(x, x, x, bounds, scale=8**-0.5)
        >>> torch.allclose(out[:, :, 0], x[:, :, 0])
        True
    """
    options = options or _NONE
    on = has_autocast(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if on else nullcontext():
        batch, q_heads, q_len, head_dim = q.shape
        kv_heads, k_len = k.shape[1], k.shape[2]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        visible_bhms, illegal_bhm1 = _visible(bounds, q_heads, kv_heads, k_len)
        if lowered_for is not None:
            illegal_bhm1 = illegal_bhm1 | (lowered_for != k_len)
        q_bhmd = q.to(wide).reshape(batch, kv_heads, q_heads // kv_heads * q_len, head_dim) * scale
        scores = _pair_product(q_bhmd, k.to(wide), visible_bhms)
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        base_bhm1 = None
        if options.bias_kind and k_len:
            bias, base_bhm1 = _bias(options, q, k, visible_bhms)
            scores = scores + bias
        scores = torch.where(visible_bhms, scores, -torch.inf)
        sink = None
        if options.sinks is not None:
            sink = _fold(options.sinks.to(wide).view(1, q_heads, 1, 1), kv_heads, q_heads, q_len)
            sink = sink if base_bhm1 is None else sink - base_bhm1
        weights, lse_bhm1 = _softmax(scores, visible_bhms, sink)
        # In float32, a large base would hide the differences between parts of a softmax.
        lse_bhm1 = lse_bhm1.double() if wide_lse else lse_bhm1
        lse_bhm1 = lse_bhm1 if base_bhm1 is None else lse_bhm1 + base_bhm1
        if options.dropout_p:
            keep = _kept(options, q, k).to(wide) * scale_of_kept(options.dropout_p)
            weights = weights * _fold(keep, kv_heads, q_heads, q_len)
        out_bhme = _row_product(weights, v.to(wide), visible_bhms)
        out_bhme = torch.where(illegal_bhm1, torch.nan, out_bhme).to(q.dtype)
        lse_bhm1 = torch.where(illegal_bhm1, torch.nan, lse_bhm1)
        out = out_bhme.reshape(batch, q_heads, q_len, v.shape[3])
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse_bhm1.reshape(batch, q_heads, q_len)


def _softmax(scores: Tensor, visible: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of each query, and its log-sum-exp."""
    # The maximum cancels in every result, so it needs no derivative. Without keys it is -inf.
    top = scores.new_full((*scores.shape[:3], 1), -torch.inf)
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    # Masked again, because a NaN gradient of a hidden weight would reach the query through the total.
    weights = torch.where(visible, weights / total, 0.0)
    return weights, torch.where(empty, -torch.inf, top + torch.log(total))


def _fold(x: Tensor, kv_heads: int, q_heads: int, q_len: int) -> Tensor:
    """Reshape (B|1, Hq|1, Sq|1, n) to (B|1, Hkv, m, n): query heads of one group become rows."""
    x = x.expand(x.shape[0], q_heads, q_len, x.shape[3])
    return x.reshape(x.shape[0], kv_heads, q_heads // kv_heads * q_len, x.shape[3])


def _positions(options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Global indices of queries (B|1, Sq) and keys (B|1, Sk), int64."""
    q_len, k_len = q.shape[2], k.shape[2]
    queries = torch.arange(q_len, device=q.device)[None] + (k_len - q_len)
    keys = torch.arange(k_len, device=q.device)[None]
    if options.q_index is not None:
        queries = options.q_index.to(torch.int64)
    if options.k_index is not None:
        keys = options.k_index.to(torch.int64)
    return queries, keys


def _bias(options: Options, q: Tensor, k: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The bias of each pair (B|1, Hkv, m, Sk) minus the query's largest, and the largest (B|1, Hkv, m, 1).

    The sum of a score and a large bias would lose the score. A constant in all biases of a query changes only
    its lse.
    """
    kind, wide = options.bias_kind, torch.float64 if q.dtype == torch.float64 else torch.float32

    def fold(x: Tensor) -> Tensor:
        return _fold(x.to(wide), k.shape[1], q.shape[1], q.shape[2])

    def largest(x: Tensor) -> Tensor:
        top = torch.where(visible, x.detach(), -torch.inf).amax(-1, keepdim=True)
        return torch.where(top == -torch.inf, 0.0, top)

    if kind == DENSE:
        bias = fold(torch.where(options.bias < HIDES, -torch.inf, options.bias))
        return bias - largest(bias), largest(bias)
    queries, keys = _positions(options, q, k)
    distance = keys[:, None, :] - queries[:, :, None]
    if kind == DISTANCE:
        reach = options.bias.shape[1] // 2
        column = distance.clamp(-reach, reach) + reach
        bias = fold(options.bias[:, column].transpose(0, 1))
        return bias - largest(bias), largest(bias)
    assert kind in (ALIBI, SIGNED_ALIBI), kind
    factor = (distance if kind == SIGNED_ALIBI else -distance.abs())[:, None]
    factor = _fold(factor, k.shape[1], q.shape[1], q.shape[2])
    slope = fold(options.bias[:, :, None, None])
    # Integers, because float32 cannot distinguish neighbouring distances beyond 2^24.
    up = torch.where(slope < 0, -factor, factor)
    top = torch.where(visible, up, torch.iinfo(up.dtype).min).amax(-1, keepdim=True)
    seen = visible.any(-1, keepdim=True)
    origin = torch.where(seen, torch.where(slope < 0, -top, top), 0)
    base = torch.where(seen, slope * origin, 0.0)  # a query without keys has no base, for any slope
    return slope * (factor - origin), base


def _kept(options: Options, q: Tensor, k: Tensor) -> Tensor:
    """Return whether dropout keeps each weight, (B, Hq, Sq, Sk)."""
    seeds = options.dropout_seed
    if seeds.dim() == 0:
        rows, heads = (torch.arange(n, device=q.device) for n in q.shape[:2])
        seeds = split_seeds(seeds, rows[:, None], heads[None])
    queries, keys = _positions(options, q, k)
    return kept(options.dropout_p, seeds, queries, keys)  # type: ignore[no-any-return]


def _visible(bounds: Tensor, q_heads: int, kv_heads: int, k_len: int) -> tuple[Tensor, Tensor]:
    """The dense mask (B|1, Hkv|1, m, Sk), and the queries (B|1, Hkv|1, m, 1) with an illegal span."""
    spans = Spans._checked(bounds, k_len)
    visible, illegal = spans.dense(), spans._illegal_rows()
    batch, heads, q_len = illegal.shape
    # Query heads of one group are folded into rows, so that products are plain 4-d products without a
    # broadcast to sum over.
    group = q_heads // kv_heads
    grouped = (batch, kv_heads, group, q_len) if heads != 1 else (batch, 1, group, q_len)
    spread = (group if heads != 1 else 1, q_len)
    visible = visible.view(batch, grouped[1], *spread, k_len).expand(*grouped, k_len)
    illegal = illegal.view(batch, grouped[1], *spread).expand(grouped)
    folded = (batch, grouped[1], group * q_len)
    return visible.reshape(*folded, k_len), illegal.reshape(*folded, 1)


class _Masked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class _PairProduct(_Masked):
    """(a, b) -> a @ b^T on visible pairs, else 0. Its derivatives never multiply a hidden 0 by a NaN."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
        return torch.where(visible, a @ b.transpose(-1, -2), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, visible = ctx.saved_tensors
        grad = torch.where(visible, grad, 0.0)
        flipped = visible.transpose(-1, -2)
        return _row_product(grad, b, visible), _row_product(grad.transpose(-1, -2), a, flipped), None


class _RowProduct(_Masked):
    """(w, x) -> w @ x over visible pairs only, for a w that is 0 elsewhere."""

    @staticmethod
    def forward(w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        finite = torch.isfinite(x)
        out = w @ torch.where(finite, x, 0.0)
        hit = visible.to(w.dtype) @ torch.where(finite, 0.0, 1.0).to(w.dtype)
        return torch.where(hit > 0, torch.nan, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        w, x, visible = ctx.saved_tensors
        flipped = visible.transpose(-1, -2)
        return _pair_product(grad, x, visible), _row_product(w.transpose(-1, -2), grad, flipped), None


def _with_jvp(function: type[_Masked], product: Callable[..., Tensor]) -> type[_Masked]:
    """Make a class with forward mode, because compilers refuse an autograd function with a ``jvp``."""

    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, _: None) -> Any:
        a, b, visible = ctx.saved_tensors
        left = None if da is None else product(da, b, visible)
        right = None if db is None else product(a, db, visible)
        return right if left is None else left if right is None else left + right

    return type(function.__name__, (function,), {"jvp": staticmethod(jvp)})


def _pair_product(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    function = _PairProduct if torch.compiler.is_compiling() else _PairProductWithJvp
    return function.apply(a, b, visible)  # type: ignore[no-any-return, no-untyped-call]


def _row_product(w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
    function = _RowProduct if torch.compiler.is_compiling() else _RowProductWithJvp
    return function.apply(w, x, visible)  # type: ignore[no-any-return, no-untyped-call]


_PairProductWithJvp = _with_jvp(_PairProduct, _pair_product)
_RowProductWithJvp = _with_jvp(
    _RowProduct, lambda w, x, visible: _row_product(torch.where(visible, w, 0.0), x, visible)
)
