"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

import sys
from typing import Any

import torch
from torch import Tensor

from attnspan.base.plain import check_plain
from attnspan.base.recorded import agree, sure, without_tracer_warnings
from attnspan.call.options import check_dropout_p
from attnspan.errors import DtypeError, ShapeError, expect, shown
from attnspan.masks import causal, from_dense, keys

from ._attention import AnyMask, attention
from ._front import PLAIN
from ._jagged import attend_jagged
from .choice import torchs_backend


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | AnyMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's function of the same name, with its top-left causal alignment, on attnspan's kernels.

    If a query sees no key, its output is 0. Some of torch's kernels return NaN.

    Args:
        query: Shape (..., Hq, L, E) with any number of batch dims, or (..., L, E) with three dims. Or jagged
            (B, Hq, j, E): then all three tensors must be jagged, the sequences may have any lengths, and
            ``attn_mask`` must be None. Tensors with fewer dims get leading dims of size 1.
        key: Shape (..., H, S, E). The batch dims of the three tensors broadcast.
        value: Shape (..., H, S, Ev).
        attn_mask: A boolean tensor, a floating tensor, a causal bias of `torch.nn.attention.bias`, or a mask.
            Tensors broadcast to (..., Hq, L, S). A boolean tensor is True for each key that a query may see.
            It is encoded again at each call, so prefer ``from_dense(...).prepare(...)``, made once. In a
            compiled function, its queries may have up to 8 runs of visible keys. For more, pass
            ``from_dense(attn_mask, max_runs=...)``. A floating tensor is added to the scores and receives a
            gradient. A value of -inf hides its key, but its score is still computed, so prefer a mask.
        dropout_p: Share of the weights to drop, in [0, 1). The seed comes from torch's default generator, so
            ``torch.manual_seed`` repeats the dropout. However, attnspan drops other weights than torch.
        is_causal: Whether query i sees keys 0..i, also if L != S. Not with ``attn_mask``.
        scale: Factor of the scores, 1/sqrt(E) by default.
        enable_gqa: Whether Hq may be a multiple of H.

    Returns:
        Shape (..., Hq, L, Ev).

    Raises:
        ValueError: Sizes or options do not fit.
        TypeError: Dtypes do not fit.

    Example:
        >>> q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
        >>> ours = scaled_dot_product_attention(q, k, k, is_causal=True)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        >>> torch.allclose(ours, theirs, atol=1e-5)
        True
    """
    if isinstance(query, Tensor) and query.is_nested:
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "backend": torchs_backend()}
        options["dropout_seed"] = torch.randint(2**62, (), device=query.device) if dropout_p else None
        return attend_jagged(query, key, value, attn_mask, is_causal, enable_gqa, **options)
    with without_tracer_warnings():
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, *rest: Any) -> Tensor:
    dropout_p, is_causal, scale, enable_gqa = rest
    _check(query, key, value)
    dims = max(x.dim() for x in (query, key, value))
    if dims == 2:
        return _attend(query[None], key[None], value[None], attn_mask, *rest)[0]
    query, key, value = (x[(None,) * (dims - x.dim())] for x in (query, key, value))
    _check_heads(query, key, enable_gqa)
    remedy = "Combine masks with causal() & mask, and pass the result as attn_mask"
    expect(not is_causal or attn_mask is None, "is_causal", "no attn_mask with it", "both", remedy)
    query, key, value = _broadcast(query, key, value)
    axis = _own_axis(attn_mask, query)
    if axis is not None:  # One call for each entry, because a single call would expand the mask.
        _check_broadcasts(attn_mask, (*query.shape[:-1], key.shape[-2]))
        of = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
        inputs = zip(*(x.unbind(axis) for x in (query, key, value, of)), strict=True)
        found = [_attend(q, k, v, m, *rest) for q, k, v, m in inputs]
        return torch.stack(found, axis)
    q, k, v = (_to_4d(x) for x in (query, key, value))
    mask: AnyMask | None = None
    bias = q_index = None
    if attn_mask is not None:
        attn_mask = of_causal_bias(attn_mask, q, k.shape[2])
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        bias = _bias(attn_mask, query, k.shape[2])
    elif attn_mask is not None:
        mask = _mask(attn_mask, q, k, query.shape[:-2])
    if is_causal:
        mask, q_index = causal(), torch.arange(q.shape[2], device=q.device)
    check_dropout_p(dropout_p)
    seed = torch.randint(2**62, (), device=q.device) if dropout_p else None
    options: dict[str, Any] = {"bias": bias, "dropout_p": dropout_p, "dropout_seed": seed, "q_index": q_index}
    options["backend"] = torchs_backend()
    out: Tensor = attention(q, k, v, mask=mask, scale=scale, **options)
    return out if query.dim() == 4 else out.reshape(*query.shape[:-2], *out.shape[-2:])


def of_causal_bias(x: Any, q: Tensor, k_len: int) -> Any:
    """A causal bias of `torch.nn.attention.bias` as the equivalent mask. Any other `x` is returned unchanged.

    The data of a causal bias are uninitialised. ``q`` has shape (B, H, Sq, D).
    """
    module = None if type(x) is Tensor else sys.modules.get("torch.nn.attention.bias")
    if module is None or not isinstance(x, module.CausalBias):
        check_plain("attn_mask", x)
        return x
    q_len, own, remedy = q.shape[2], (x.seq_len_q, x.seq_len_kv), "Make it for these lengths"
    fits = own[0] == q_len and own[1] == k_len
    expect(fits, "attn_mask", "a causal bias of shape ({}, {})", own, remedy, q_len, k_len, error=ShapeError)
    if own[0] == own[1] or x.variant.name == "LOWER_RIGHT":
        return causal()
    return causal().spans(q_len, k_len, q_index=torch.arange(q_len, device=q.device), like=q)


def _check(*inputs: Tensor) -> None:
    for name, x in zip(("query", "key", "value"), inputs, strict=True):
        PLAIN.check_taken(name, x, PLAIN.expected)
    if min(x.dim() for x in inputs) < 2:
        # Write shapes only here: traced and data-dependent shapes cannot be written as text.
        got, remedy = ", ".join(shown(x.shape) for x in inputs), "Add the missing dims"
        wanted = "at least 2 dims, (..., heads, length, head_dim)"
        raise ShapeError("query, key and value", expected=wanted, got=got, remedy=remedy)


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if query.dim() > 3 and not enable_gqa and query.shape[-3] != key.shape[-3]:
        got, remedy = f"{query.shape[-3]} and {key.shape[-3]}", "Pass enable_gqa=True to share key heads"
        raise ShapeError("heads", expected="as many key as query heads", got=got, remedy=remedy)


def _broadcast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs with one batch shape: all dims before the heads, or the first dim of three."""
    own = 2 if inputs[0].dim() == 3 else 3
    leads = [x.shape[:-own] for x in inputs]
    # If the sizes are equal, no other operation is traced.
    if leads[0] == leads[1] == leads[2]:
        return inputs
    try:
        lead = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
    except RuntimeError:
        got, remedy = ", ".join(shown(x.shape) for x in inputs), "Expand or index the batch dims"
        wanted = "batch dims that broadcast"
        raise ShapeError("query, key and value", expected=wanted, got=got, remedy=remedy) from None
    return tuple(x.expand(*lead, *x.shape[-own:]) for x in inputs)


def _own_axis(attn_mask: Any, query: Tensor) -> int | None:
    """The first batch dim that a floating mask does not broadcast, if it broadcasts another batch dim."""
    if query.dim() < 5 or not isinstance(attn_mask, Tensor) or torch.compiler.is_compiling():
        return None
    if attn_mask.dim() > query.dim():
        return None  # It does not broadcast, which is found later.
    own = (1,) * (query.dim() - attn_mask.dim()) + tuple(attn_mask.shape)
    sizes = list(zip(own[:-3], query.shape[:-3], strict=True)) if attn_mask.is_floating_point() else []
    shares = any(n == 1 != size for n, size in sizes)
    return next((i for i, (n, _) in enumerate(sizes) if n != 1), None) if shares else None


def _to_4d(x: Tensor) -> Tensor:
    if x.dim() == 3:
        return x.unsqueeze(1)
    return x if x.dim() == 4 else x.flatten(0, -4)  # reshape(-1, ...) fails if a size is 0.


def _bias(attn_mask: Tensor, query: Tensor, k_len: int) -> Tensor:
    """A floating mask as (B|1, H|1, L|1, S), no larger than it must be."""
    size = (*query.shape[:-1], k_len)
    _check_broadcasts(attn_mask, size)
    values = attn_mask[(None,) * (len(size) - attn_mask.dim())]
    if values.shape[-1] != k_len:
        values = values.expand(*values.shape[:-1], k_len)
    if query.dim() == 3:
        return values.unsqueeze(1)
    lead = values.shape[:-3]
    if query.dim() > 4 and not all(sure(n == 1) for n in lead):  # Several batch dims are merged.
        values = values.expand(*size[:-3], *values.shape[-3:])
    return values if query.dim() == 4 else values.flatten(0, -4)


def _check_broadcasts(attn_mask: Tensor, size: tuple[int, ...]) -> Tensor:
    # Do not catch torch's error instead: a compiler would stop there.
    own = attn_mask.shape
    fits = len(own) <= len(size)
    fits = fits and all(sure(n == 1) or agree(n, m) for n, m in zip(own[::-1], size[::-1], strict=False))
    wanted, remedy = "a shape that broadcasts to {}", "Its last dims are queries and keys"
    expect(fits, "attn_mask", wanted, own, remedy, size, error=ShapeError)
    return attn_mask.expand(size)


def _mask(attn_mask: Tensor | AnyMask, q: Tensor, k: Tensor, lead: torch.Size) -> AnyMask:
    if not isinstance(attn_mask, Tensor):
        return attn_mask
    boolean, wanted = attn_mask.dtype == torch.bool, "torch.bool, a floating dtype or a mask"
    expect(boolean, "attn_mask", wanted, str(attn_mask.dtype), "Convert it with .bool()", error=DtypeError)
    dense = _check_broadcasts(attn_mask, (*lead, q.shape[2], k.shape[2]))
    if len(lead) == 1:
        return from_dense(dense.unsqueeze(1))
    # Encode once what batch elements, heads or queries share.
    own = attn_mask[(None,) * (len(lead) + 2 - attn_mask.dim())]
    if len(lead) > 2:
        batch = lead[:-1] if not all(sure(n == 1) for n in own.shape[:-3]) else own.shape[:-3]
        own = own.expand(*batch, *own.shape[-3:]).flatten(0, -4)
    if not torch.compiler.is_compiling() and own.shape[1] == 1 == own.shape[2]:
        return keys(own[:, 0, 0].expand(own.shape[0], k.shape[2]))
    return from_dense(own.expand(own.shape[0], own.shape[1], q.shape[2], k.shape[2]))
