"""The public ``attention``: one call, the choice of its backend, the operator."""

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from attnspan.backends import defaults, table
from attnspan.base.recorded import without_tracer_warnings
from attnspan.call import Call, check_keywords
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import NO_OPTIONS, Bias, Given, Keywords
from attnspan.masks import Mask, Prepared, full
from attnspan.masks.bounds import Spans

from . import _eager
from ._front import TorchFront, from_bhsd
from ._unplanned import plans, warn_without_plan
from .backends import attend
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
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention under a mask of spans: ``softmax(scale * q k^T, over visible keys) v``.

    Tensors are not copied if their last stride is 1. Autocast casts q, k and v to its dtype, as it does for
    torch's own attention. It does not cast float64.

    Args:
        q: Floating queries, shape (B, Hq, Sq, D) in layout "bhsd", (B, Sq, Hq, D) in "bshd", (T, Hq, D) in
            "thd".
        k: Keys in the same layout, with Hkv heads and Sk keys. Hkv must divide Hq (GQA).
        v: Values in the same layout, with k's heads and length, and head dim Dv.
        mask: The keys that each query may see. None means ``full()``. If many layers share a mask, lower it
            once with ``mask.prepare(...)``. For several ranks, pass a plan on a mesh:
            `attnspan.parallel.Layout`.
        scale: Factor of the scores, 1/sqrt(D) by default.
        softcap: Positive number c: a score x becomes ``c * tanh(x / c)``, before the bias. None: no softcap.
        bias: Term added to the scores: ``alibi(slopes)``, ``relative(table, buckets)``,
            ``dense_bias(values)`` or a floating tensor of shape (B|1, Hq|1, Sq|1, Sk). Leading axes may be
            missing. The bias's tensors receive gradients. A dense value of -inf hides its key. If all values
            of a query are -inf, its output is 0.
        sinks: Shape (Hq,), floating, with gradient: logits that take part in each query's softmax and have no
            value.
        dropout_p: Share of the weights to drop, in [0, 1), as a multiple of 2**-16. If it is above 0, pass
            ``dropout_seed`` too.
        dropout_seed: Integer tensor, shape (), or shape (B, Hq) as `dropout_seeds` makes it. The dropout mask
            depends only on the seed, batch index, head, and global indices of query and key.
        q_index: Integer, shape (Sq,) or (B, Sq): global indices of the queries. By default they are the last
            Sq of the keys' indices.
        k_index: Ascending integers, shape (Sk,): global indices of the keys. If the mask is already lowered,
            only ``alibi``, ``relative`` and dropout read the two indices. ``k_index`` may then have shape
            (B, Sk) and any order.
        layout: Order of the dims of q, k, v and the output. "thd" packs documents into one sequence.
        return_lse: Whether to return the log-sum-exp of each query's scores too. It is differentiable.
        backend: Name of a backend. None selects the backend of the block of `attnspan.backend` around the
            call, or else the fastest one that can run the call (see `explain`).
        **others: Keywords of other libraries, such as ``is_causal``. They raise an error that names the
            equivalent option.

    Returns:
        The output in q's layout with head dim Dv (stored as (B, Sq, Hq, Dv)). If a query sees no key, its
        output is 0. With ``return_lse`` also ``lse``, of shape (B, Hq, Sq), or (Hq, T) in layout "thd". It is
        float32, or float64 for float64 inputs. It includes sinks and ignores dropout. If a query sees no key,
        its lse is -inf, or its sink.

    Raises:
        ValueError: Shapes, devices, options or bounds do not fit, or no backend can run the call.
        TypeError: Dtypes do not fit, ``mask`` is not a mask, or a keyword is unknown.
        NotImplementedError: You take a second derivative or a forward-mode derivative of a kernel.

    Example:
        >>> import torch
        >>> from attnspan import causal, segments
        >>> q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
        >>> ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
        >>> attention(q, k, v, mask=causal() & segments(ids), backend="math").shape
        torch.Size([1, 4, 6, 16])
    """
    if others:
        check_keywords(attention, others)
    mask = _FULL if mask is None else mask
    none = bias is None is sinks is None is dropout_seed is None is q_index is None is k_index
    plain = softcap is None and none and not others and isinstance(dropout_p, float) and dropout_p == 0.0
    given = NO_OPTIONS
    if not plain:
        given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index, **others)
    if isinstance(mask, ShardedMask):
        asked = {"scale": scale, "layout": layout, "return_lse": return_lse, "backend": backend}
        return mask.attention(q, k, v, **asked, **given.keywords())  # type: ignore[no-any-return]
    backend = asked_for(backend)
    if not torch.compiler.is_compiling():
        if plans:
            warn_without_plan(q, k, mask, layout)
        if backend == "cpu" or (backend is None and defaults("torch", "cpu")[0] == "cpu"):
            found = _eager.attend(q, k, v, mask, scale, layout, bool(return_lse), given)
            if found is not None:
                return found  # type: ignore[no-any-return]
    front = TorchFront(return_lse, widens=True)
    with without_tracer_warnings():
        call = Call.of(front, q, k, v, given, mask=mask, scale=scale, layout=layout)
        chosen = table("torch")[backend_for(call.problem, backend)]
        out, lse = attend(chosen, call, return_lse=front.return_lse)
    out = out[..., :0] if front.empty_values else out
    return from_bhsd(out, lse, call.layout, return_lse)  # type: ignore[no-any-return]
