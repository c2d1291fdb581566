"""The public ``attention`` and ``explain`` for JAX: they check a call and select its backend."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from jax import Array

from attnspan.backends import table
from attnspan.call import Call, check_keywords, forwards_to
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import NO_OPTIONS, Bias, Given
from attnspan.errors import DtypeError, expect
from attnspan.kernels import Explanation
from attnspan.masks import Mask, Prepared, full
from attnspan.masks.bounds import Spans

from .backends import choice_of, chosen_for
from .eager import Checked, run_again
from .front import JaxFront, ShardedMask
from .part import JaxPart, band_of, part_of
from .placement import check_devices, check_place, check_sharding, explicit_sharding, in_auto_mode, is_traced
from .promotion import own_promotion, standard_promotion

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
    **others: Any,
) -> Any:
    """Softmax attention under a mask of spans: ``softmax(scale * q k^T, over visible keys) v``.

    The function computes the same as `attnspan.torch.attention`, which describes all masks and options in
    detail. You can call it under jit, grad, vmap, scan and remat. You can pass a mask as an argument of a
    jitted function: new document ids do not recompile it. On CPU, the kernel reads layout "bshd" without a
    copy.

    Args:
        q: Queries, floating. Shape (B, Hq, Sq, D) in layout "bhsd", (B, Sq, Hq, D) in "bshd", (T, Hq, D) in
            "thd".
        k: Keys, in the same layout, with Hkv heads and Sk keys. Hkv divides Hq (GQA and MQA).
        v: Values, in the same layout, with as many heads and keys as ``k``, and head dim Dv.
        mask: A mask, or None for ``full()``. If many layers share a mask, lower it once with
            ``mask.prepare(...)``, or under jit with ``mask.spans(...)``. On a mesh, pass the mask that
            `shard` or a plan's ``on(mesh)`` returns.
        scale: Factor of the scores, a Python number. Default: 1/sqrt(D).
        softcap: Cap of the scores, a Python number: x becomes ``softcap * tanh(x / softcap)``. Default: no
            cap.
        bias: ``alibi(slopes)``, ``relative(table, buckets)``, ``dense_bias(values)``, or a floating array of
            shape (B|1, Hq|1, Sq|1, Sk), which may lack the batch and head axes. Differentiable.
        sinks: One floating number per query head, shape (Hq,). Differentiable.
        dropout_p: Probability of dropping a weight, a Python number in [0, 1). Needs ``dropout_seed``.
        dropout_seed: An integer of shape (), a typed key of two words, or uint32 (B, Hq, 2) from
            `dropout_seeds`. PyTorch drops the same weights for the same seed.
        q_index: Global indices of the queries, integers of shape (Sq,) or (B, Sq). Default: the last Sq keys.
        k_index: Global indices of the keys, ascending integers of shape (Sk,). If the mask is already
            lowered, only ``alibi``, ``relative`` and dropout read both indices. ``k_index`` may then have
            shape (B, Sk) and any order.
        layout: Order of the dims of q, k, v and the output. "thd" packs documents into one sequence.
        return_lse: Also return the log-sum-exp of each query's scores. It is differentiable.
        backend: Name of a backend. Default: the surrounding `attnspan.backend` block's backend, else the
            fastest backend that can run the call (see `explain`).
        **others: Keywords of other libraries, such as ``is_causal``. They raise an error that names the
            equivalent here.

    Returns:
        The output in q's layout with head dim Dv. With ``return_lse`` also ``lse``: float32 (float64 for
        float64 inputs) of shape (B, Hq, Sq), or (Hq, T) in layout "thd". A query that sees no key has output
        0, and as its lse -inf or its head's sink.

    Raises:
        ValueError: Shapes, devices, shardings or options do not fit, or no backend can run the call.
        TypeError: Dtypes do not fit, ``mask`` is not a mask, or a keyword is unknown.
        NotImplementedError: A kernel was asked for a second derivative or for forward mode. For forward mode
            in a jitted function, JAX raises a TypeError about ``custom_vjp`` instead.

    Example:
        >>> import jax.numpy as jnp
        >>> from attnspan import causal, segments
        >>> q, k, v = jnp.ones((1, 4, 6, 16)), jnp.ones((1, 2, 6, 16)), jnp.ones((1, 2, 6, 16))
        >>> ids = jnp.array([[0, 0, 0, 1, 1, 1]])
        >>> attention(q, k, v, mask=causal() & segments(ids)).shape
        (1, 4, 6, 16)
    """
    if others:
        check_keywords(attention, others)
    mask = _FULL if mask is None else mask
    none = bias is None is sinks is None is dropout_seed is None is q_index is None is k_index
    plain = softcap is None and none and not others and type(dropout_p) is float and dropout_p == 0.0
    given = NO_OPTIONS
    if not plain:
        given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index, **others)
    backend = asked_for(backend)
    asked: dict[str, Any] = {"scale": scale, "layout": layout, "return_lse": return_lse, "backend": backend}
    if plain and (found := run_again(q, k, v, mask, _checked, **asked)) is not None:
        return found
    if isinstance(mask, ShardedMask):
        return own_promotion(mask.attention)(q, k, v, **asked, **given.keywords())
    sharding = explicit_sharding(q)
    if sharding is None:
        return _run(q, k, v, mask, given, **asked)
    check_sharding(layout, q=q, k=k, v=v)
    check_place(check_devices(q, k, v, given), "mask", mask)
    return in_auto_mode(partial(_run, **asked), sharding, layout, return_lse)(q, k, v, mask, given)


@own_promotion
def _run(
    q: Any, k: Any, v: Any, mask: Any, given: Given, *, layout: str, return_lse: Any, **asked: Any
) -> Any:
    front = JaxFront()
    out, lse = _checked(q, k, v, mask, given, front, layout=layout, return_lse=return_lse, **asked).run()
    out = out[..., :0] if front.empty_values else out
    if layout == "thd":
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


@own_promotion
def _checked(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    given: Given = NO_OPTIONS,
    front: JaxFront | None = None,
    *,
    scale: Any,
    layout: str,
    return_lse: Any,
    backend: Any,
) -> Checked:
    front = JaxFront() if front is None else front
    call, part = _lowered(front, q, k, v, mask, given, scale, layout, return_lse)
    known = front.place is not None
    chosen = chosen_for(call.problem, part, backend, known)
    return Checked(part if chosen.reads_mask else replace(part, band=None, want_lse=True), chosen)


def _lowered(
    front: JaxFront, q: Any, k: Any, v: Any, mask: Any, given: Given, scale: Any, layout: str, want_lse: bool
) -> tuple[Call, JaxPart]:
    call = Call.of(front, q, k, v, given, mask=mask, scale=scale, layout=layout)
    order = "bhsd" if layout == "bhsd" else "bshd"
    return call, part_of(call, front.inputs, layout=order, band=band_of(mask, call), want_lse=bool(want_lse))


@forwards_to(attention)
def explain(q: Array, k: Array, v: Array, **options: Any) -> Explanation:
    """Say what `attention` would do with the same arguments, without doing it.

    For a mask on a mesh, call the mask's own ``explain``.

    Args:
        q, k, v, **options: As for `attention`. The arrays must have values.

    Returns:
        An `Explanation`: the chosen backend, why the others do not run, and the cost of the call.

    Raises:
        ValueError: `attention` would raise it, or an array is traced.
        TypeError: `attention` would raise it, or the mask belongs to a mesh.

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
        "a mask for one device",
        f"{type(mask).__name__}, a mask for a mesh",
    )
    remedy, single = "Call the mask's own explain()", not isinstance(mask, ShardedMask)
    expect(single, "explain: mask", wanted, got, remedy, error=DtypeError)
    mask = _FULL if mask is None else mask
    with standard_promotion():
        call, part = _lowered(JaxFront(), q, k, v, mask, Given(**asked), scale, layout, return_lse)
    p, bounds = call.problem, call.bounds
    remedy, got = "Call explain outside of jit, with arrays of the same shapes", "traced arrays"
    expect(not is_traced(bounds), "explain", "arrays with values", got, remedy)
    cost = int(Spans(np.asarray(bounds), p.k_len).cost().sum())  # JAX may lack int64.
    pairs = cost * (p.batch // bounds.shape[0]) * (p.q_heads // bounds.shape[1])
    chosen = choice_of(p, part, backend).name
    return Explanation.of(call, table("jax"), chosen, backend is not None, pairs, (part,))
