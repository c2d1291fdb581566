"""The public ``attention`` and ``explain`` of JAX: one call, the choice of its backend, the program."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from attnspan.base.mistakes import refuse_keywords
from attnspan.call import Call, check_keywords, forwards_to, widened
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import Bias, Given
from attnspan.errors import DtypeError, expect
from attnspan.kernels import Explanation
from attnspan.masks import Mask, Prepared, full
from attnspan.masks.bounds import Spans

from .backends import branches_of, candidates, choice_of, static_for, warn_if_slow
from .front import JaxFront, ShardedMask
from .part import Static, part_of, static_of, words_of
from .placement import check_devices, check_sharding, explicit_sharding, in_auto_mode, is_traced
from .promotion import own_promotion
from .rules import attend, remedy_of_forward_mode

__all__ = ["attention", "explain"]

Layout = Literal["bhsd", "bshd", "thd"]
AnyMask = Mask | Prepared | Spans | ShardedMask

_FULL = full()


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | Array | None = None,
    sinks: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Array | None = None,
    q_index: Array | None = None,
    k_index: Array | None = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    backend: str | None = None,
    **mistaken: Any,
) -> Any:
    """Softmax attention under a mask of spans: ``softmax(scale * q k^T, over visible keys) v``.

    The same function as `attnspan.torch.attention`, which says what each argument means: masks, options,
    numbers. It works under jit, grad, vmap, scan and remat; a mask may be an argument of a jitted function,
    and new ids compile nothing. On CPU, "bshd", the layout of projections, is read without a copy.

    Args:
        q: Shape (B, Hq, Sq, D) in layout "bhsd", (B, Sq, Hq, D) in "bshd", (T, Hq, D) in "thd"; floating.
        k: Same layout with Hkv heads and Sk keys; Hkv divides Hq (query heads share key heads in groups).
        v: Same layout, as many heads and rows as ``k``, head dim Dv.
        mask: None is ``full()``. Lower a mask that many layers share once, by ``mask.prepare(...)``, or under
            jit by ``mask.spans(...)``. Over several devices, what `shard` or a plan's ``on(mesh)`` makes.
        scale, softcap: Python numbers; 1/sqrt(D) and none by default.
        bias: ``alibi(slopes)``, ``relative(table, buckets)``, ``dense_bias(values)`` or a floating array of
            shape (B|1, Hq|1, Sq|1, Sk), which may lack the batch and head axes; with gradients to its arrays.
        sinks: Shape (Hq,), floating; with gradient.
        dropout_p: Python number in [0, 1); needs ``dropout_seed``.
        dropout_seed: Integer of shape (), a typed key of two words, or uint32 (B, Hq, 2), as `dropout_seeds`
            makes them. What is dropped is what PyTorch drops.
        q_index: Shape (Sq,) or (B, Sq), integer; by default the last Sq of the keys.
        k_index: Shape (Sk,), ascending integers. With a mask that is already lowered, both are read by
            ``alibi``, ``relative`` and dropout only, and ``k_index`` may have shape (B, Sk) and any order.
        layout: Order of the dims of q, k, v and the output. "thd" packs documents into one row.
        return_lse: Also return the logarithm of each row's sum of exponentials; it is differentiable.
        backend: Name of a backend, or None for that of the block of `attnspan.backend` around the call, else
            for the fastest that can run the call (see `explain`).
        **mistaken: Keywords of other libraries, such as ``is_causal``: refused, with what says the same here.

    Returns:
        The output in q's layout with head dim Dv; with ``return_lse`` also ``lse``, float32 (float64 for
        float64 inputs), of shape (B, Hq, Sq), or (Hq, T) in layout "thd". A row that may see nothing has
        output 0 and lse -inf, or its sink.

    Raises:
        ValueError: Shapes, devices, shardings or options do not fit; no backend can run the call.
        TypeError: Element types do not fit, ``mask`` is no mask, or a keyword is unknown.
        NotImplementedError: A second derivative or forward mode is asked of a kernel. In a jitted function,
            JAX raises a TypeError about ``custom_vjp`` for forward mode.

    Example:
        >>> import jax.numpy as jnp
        >>> from attnspan import causal, segments
        >>> q, k, v = jnp.ones((1, 4, 6, 16)), jnp.ones((1, 2, 6, 16)), jnp.ones((1, 2, 6, 16))
        >>> ids = jnp.array([[0, 0, 0, 1, 1, 1]])
        >>> attention(q, k, v, mask=causal() & segments(ids)).shape
        (1, 4, 6, 16)
    """
    if mistaken:
        refuse_keywords(attention, mistaken)
    mask = _FULL if mask is None else mask
    given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    backend = asked_for(backend)
    asked: dict[str, Any] = {"scale": scale, "layout": layout, "return_lse": return_lse, "backend": backend}
    if isinstance(mask, ShardedMask):
        return own_promotion(mask.attention)(q, k, v, **asked, **given.keywords())
    run: Any = partial(_run, **asked)
    sharding = explicit_sharding(q)
    if sharding is None:
        return run(q, k, v, mask, given)
    check_sharding(layout, q=q, k=k, v=v)
    check_devices(q, k, v, mask, given)
    return in_auto_mode(run, sharding, layout, return_lse)(q, k, v, mask, given)


@own_promotion
def _lowered(
    front: JaxFront, q: Any, k: Any, v: Any, mask: Any, given: Given, scale: Any, layout: str, want_lse: bool
) -> tuple[Call, Static]:
    """A call, checked, and the part of it that a program is compiled for; the front has q, k and v."""
    call = Call.of(front, q, k, v, given, mask=mask, scale=scale, layout=layout)
    words = words_of(mask, call.problem, given.q_index is None and given.k_index is None)
    return call, static_of(call, words, want_lse)


def _pad_last(x: Any) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])


@own_promotion
def _run(
    q: Any, k: Any, v: Any, mask: Any, given: Given, *, scale: Any, layout: str, return_lse: Any, backend: Any
) -> Any:
    q, k, v, empty = widened(q, k, v, _pad_last)
    front = JaxFront()
    call, static = _lowered(front, q, k, v, mask, given, scale, layout, return_lse)
    if backend is not None and not is_traced(*front.inputs):
        choice_of(call.problem, static, backend)  # The platform is known: what does not run there raises now.
    warn_if_slow(call.problem, static, backend)
    branches = branches_of(call.problem, static, backend)
    static = static_for([branch.backend for branch in branches], static)
    part = part_of(call, front.inputs, static, "bhsd" if layout == "bhsd" else "bshd")
    with remedy_of_forward_mode():
        out, lse = attend(part, branches)
    out = out[..., :0] if empty else out
    if layout == "thd":
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


@forwards_to(attention)
def explain(q: Array, k: Array, v: Array, **options: Any) -> Explanation:
    """Say what `attention` would do with the same arguments, without doing it.

    Args:
        q, k, v, **options: As for `attention`, with values. A mask over a mesh has an ``explain`` of its
            own.

    Raises:
        ValueError: As `attention` would, and for arrays that are being traced.
        TypeError: As `attention` would.

    Example:
        >>> from attnspan import causal
        >>> x = np.ones((1, 2, 4, 8), np.float32)
        >>> explain(x, x, x, mask=causal(), backend="math").coverage
        0.625
    """
    check_keywords(explain, options)
    asked = {**(attention.__kwdefaults__ or {}), **options}
    mask, scale, layout, return_lse, backend = (
        asked.pop(name) for name in ("mask", "scale", "layout", "return_lse", "backend")
    )
    backend = asked_for(backend)
    wanted, got = (
        "the mask of a call on one device",
        f"{type(mask).__name__}, which spreads a call over a mesh",
    )
    remedy, single = "Call explain() of the mask", not isinstance(mask, ShardedMask)
    expect(single, "explain: mask", wanted, got, remedy, error=DtypeError)
    mask = _FULL if mask is None else mask
    q, k, v, _ = widened(q, k, v, _pad_last)
    call, static = _lowered(JaxFront(), q, k, v, mask, Given(**asked), scale, layout, return_lse)
    p, bounds = call.problem, call.bounds
    remedy, got = "Call it outside of jit, with arrays of the same shapes", "ones that are being traced"
    expect(not is_traced(bounds), "explain", "arrays whose values can be read", got, remedy)
    cost = int(Spans(np.asarray(bounds), p.k_len).cost().sum())  # NumPy always has 64 bits.
    pairs = cost * (p.batch // bounds.shape[0]) * (p.q_heads // bounds.shape[1])
    chosen = choice_of(p, static, backend).name
    backends = candidates(static, unasked=backend is None)
    return Explanation.of(call, backends, chosen, backend is not None, pairs)
