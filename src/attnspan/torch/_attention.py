"""The public ``attention``: one call, the choice of its backend, the operator."""

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from attnspan.base.mistakes import refuse_keywords
from attnspan.base.recorded import without_tracer_warnings
from attnspan.call import Call, widened
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import NO_OPTIONS, Bias, Given, Keywords
from attnspan.masks import Mask, Prepared, full
from attnspan.masks.bounds import Spans

from . import _eager
from ._front import TorchFront, from_bhsd, pad_last
from ._unplanned import plans, warn_without_plan
from .backends import BACKENDS
from .choice import backend_for
from .dtensor import ShardedMask

Layout = Literal["bhsd", "bshd", "thd"]
AnyMask = Mask | Prepared | Spans | ShardedMask

_FULL = full()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Keywords[Tensor, AnyMask]],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Keywords[Tensor, AnyMask]],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    backend: str | None = None,
    **mistaken: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention under a mask of spans: ``softmax(scale * q k^T, over visible keys) v``.

    Arguments may have any strides with a unit last stride; no copy is made of them. Under autocast q, k and v
    are cast to autocast's dtype, as torch's own attention does (float64 is left alone).

    Args:
        q: Shape (B, Hq, Sq, D) in layout "bhsd", (B, Sq, Hq, D) in "bshd", (T, Hq, D) in "thd"; floating.
        k: Same layout with Hkv heads and Sk keys; Hkv divides Hq (query heads share key heads in groups).
        v: Same layout, as many heads and rows as ``k``, head dim Dv.
        mask: What each query may see; None is ``full()``. Lower a mask that many layers share once, by
            ``mask.prepare(...)``.
            Over several ranks, a plan on a mesh: `attnspan.parallel.Layout`.
        scale: Factor of the scores; 1/sqrt(D) by default.
        softcap: Positive number c: scores x become ``c * tanh(x / c)``, before the bias.
        bias: Added to the scores: ``alibi(slopes)``, ``relative(table, buckets)``, ``dense_bias(values)`` or
            a floating tensor of shape (B|1, Hq|1, Sq|1, Sk), which may lack axes in front; with gradients to
            its tensors. A dense -inf hides its key; a row of nothing else has output 0.
        sinks: Shape (Hq,), floating: logits that take part in each row's softmax without a value of their
            own; with gradient.
        dropout_p: Share of the weights to drop, in [0, 1), as a multiple of 2**-16; needs ``dropout_seed``.
        dropout_seed: Integer, shape () or, as `dropout_seeds` makes them, (B, Hq). What is dropped depends on
            it, batch row, head and the global indices of query and key alone.
        q_index: Shape (Sq,) or (B, Sq), integer: global indices of the queries; by default the last Sq of the
            keys.
        k_index: Shape (Sk,), ascending integers: global indices of the keys. With a mask that is already
            lowered, both are read by ``alibi``, ``relative`` and dropout only, and ``k_index`` may have shape
            (B, Sk) and any order.
        layout: Order of the dims of q, k, v and the output. "thd" packs documents into one row.
        return_lse: Also return the logarithm of each row's sum of exponentials; it is differentiable.
        backend: Name of a backend, or None for that of the block of `attnspan.backend` around the call, else
            for the fastest that can run the call (see `explain`).
        **mistaken: Keywords of other libraries, such as ``is_causal``: refused, with what says the same here.

    Returns:
        The output in q's layout with head dim Dv (stored as (B, Sq, Hq, Dv)); with ``return_lse`` also
        ``lse``, float32 (float64 for float64 inputs), of shape (B, Hq, Sq), or (Hq, T) in layout "thd"; it
        counts sinks, and knows no dropout. A row that may see nothing has output 0 and lse -inf, or its sink.

    Raises:
        ValueError: Shapes, devices, options or bounds do not fit; no backend can run the call.
        TypeError: Element types do not fit, ``mask`` is no mask, or a keyword is unknown.
        NotImplementedError: A second derivative or a forward-mode one is asked of a kernel.

    Example:
        >>> import torch
        >>> from attnspan import causal, segments
        >>> q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
        >>> ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
        >>> attention(q, k, v, mask=causal() & segments(ids), backend="math").shape
        torch.Size([1, 4, 6, 16])
    """
    if mistaken:
        refuse_keywords(attention, mistaken)
    mask = _FULL if mask is None else mask
    none = bias is None is sinks is None is dropout_seed is None is q_index is None is k_index
    plain = softcap is None and none and isinstance(dropout_p, float) and dropout_p == 0.0
    given = NO_OPTIONS if plain else Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    backend = asked_for(backend)
    if isinstance(mask, ShardedMask):
        asked = {"scale": scale, "layout": layout, "return_lse": return_lse, "backend": backend}
        return mask.attention(q, k, v, **asked, **given.keywords())  # type: ignore[no-any-return]
    if not torch.compiler.is_compiling():
        if plans:
            warn_without_plan(q, k, mask, layout)
        if backend in (None, "cpu"):
            found = _eager.attend(q, k, v, mask, scale, layout, bool(return_lse), given)
            if found is not None:
                return found  # type: ignore[no-any-return]
    front = TorchFront()
    front.return_lse = bool(return_lse)
    with without_tracer_warnings():
        q, k, v, empty = widened(q, k, v, pad_last)
        call = Call.of(front, q, k, v, given, mask=mask, scale=scale, layout=layout)
        chosen = BACKENDS[backend_for(call.problem, backend)]
        out, lse = chosen.attend(call, return_lse=bool(return_lse))
    out = out[..., :0] if empty else out
    return from_bhsd(out, lse, call.layout, return_lse)  # type: ignore[no-any-return]
