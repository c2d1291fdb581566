"""The public ``attention`` of JAX: layouts, lowering of the mask, choice of the back end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._mistakes import not_a_mask, refuse_keywords
from .._pytrees import static_key
from ..arrays import own
from ..errors import DtypeError, OptionError
from ..masks import Mask, Prepared, full
from ..options import Bias
from ..problem import Problem, check_arrays, check_layout, check_scale, describe
from ..spans import Spans
from ._choice import choose_backend, static_for
from ._contract import Operands, Static
from ._devices import check_devices, platform_of
from ._foreign import check_framework
from ._ops import How, attend
from ._options import Given, lower_options
from ._sharded import ShardedMask
from ._sharding import check_sharding, explicit_sharding, in_auto_mode
from ._words_of_masks import words_of

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

    The same function as `attnspan.torch.attention`: masks, options, numbers. It works under jit, grad, vmap,
    scan and remat; a mask may be an argument of a jitted function, and new ids compile nothing. On CPU,
    "bshd", the layout of projections, is read without a copy.

    Args:
        q: Shape (B, Hq, Sq, D) in layout "bhsd", (B, Sq, Hq, D) in "bshd", (T, Hq, D) in "thd"; floating.
        k: Same layout with Hkv heads and Sk keys; Hkv divides Hq (query heads share key heads in groups).
        v: Same layout, as many heads and rows as ``k``, head dim Dv.
        mask: What each query may see; None is ``full()``. Lower a mask that many layers share once, by
            ``mask.prepare(...)``, or under jit by ``mask.spans(...)``. Over several devices, what `shard`
            makes.
        scale: Factor of the scores; 1/sqrt(D) by default.
        softcap: Positive number c: scores x become ``c * tanh(x / c)``, before the bias.
        bias: Added to the scores: ``alibi(slopes)``, ``relative(table, buckets)``, ``dense_bias(values)`` or
            a floating array of shape (B|1, Hq|1, Sq|1, Sk), which may lack axes in front; with gradients to
            its arrays. A dense -inf hides its key; a row of nothing else has output 0.
        sinks: Shape (Hq,), floating: logits that take part in each row's softmax without a value of their
            own; with gradient.
        dropout_p: Share of the weights to drop, in [0, 1), as a multiple of 2**-16; needs ``dropout_seed``.
        dropout_seed: Integer of shape (), a typed key of two words, or uint32 (B, Hq, 2), as `dropout_seeds`
            makes them. What is dropped depends on it, batch row, head and the global indices of query and key
            alone, and is what PyTorch drops.
        q_index: Shape (Sq,) or (B, Sq), integer: global indices of the queries; by default the last Sq of the
            keys.
        k_index: Shape (Sk,), ascending integers: global indices of the keys. With a mask that is already
            lowered, both are read by ``alibi``, ``relative`` and dropout only, and ``k_index`` may have shape
            (B, Sk) and any order.
        layout: Order of the dims of q, k, v and the output. "thd" packs documents into one row.
        return_lse: Also return the logarithm of each row's sum of exponentials; it is differentiable.
        backend: Name of a back end, or None for the fastest that can run the call (see `explain`).
        **mistaken: Keywords of other libraries, such as ``is_causal``: refused, with what says the same here.

    Returns:
        The output in q's layout with head dim Dv; with ``return_lse`` also ``lse``, float32 (float64 for
        float64 inputs), of shape (B, Hq, Sq), or (Hq, T) in layout "thd"; it counts sinks, and knows no
        dropout. A row that may see nothing has output 0 and lse -inf, or its sink.

    Raises:
        ValueError: Shapes, devices, shardings or options do not fit; no back end can run the call.
        TypeError: Element types do not fit, ``mask`` is no mask, or a keyword is unknown.
        NotImplementedError: A second derivative is asked of a kernel.

    Example:
        >>> from attnspan import causal, segments
        >>> q, k, v = jnp.ones((1, 4, 6, 16)), jnp.ones((1, 2, 6, 16)), jnp.ones((1, 2, 6, 16))
        >>> ids = jnp.array([[0, 0, 0, 1, 1, 1]])
        >>> attention(q, k, v, mask=causal() & segments(ids)).shape
        (1, 4, 6, 16)
    """
    if mistaken:
        refuse_keywords(attention, mistaken)
    mask = _FULL if mask is None else mask
    if isinstance(mask, ShardedMask):
        return mask.attention(
            *(q, k, v),
            scale=scale,
            softcap=softcap,
            bias=bias,
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            q_index=q_index,
            k_index=k_index,
            layout=layout,
            return_lse=return_lse,
            backend=backend,
        )
    given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    run = partial(_run, layout=layout, scale=scale, return_lse=return_lse, backend=backend)
    sharding = explicit_sharding(q)
    if sharding is None:
        return run(q, k, v, mask, given)
    check_sharding(layout, q=q, k=k, v=v)
    check_devices(q, k, v, mask, given)
    return in_auto_mode(run, sharding, layout, return_lse)(q, k, v, mask, given)


def _run(
    q: Array,
    k: Array,
    v: Array,
    mask: AnyMask,
    given: Given,
    *,
    layout: str,
    scale: float | None,
    return_lse: bool,
    backend: str | None,
) -> Any:
    call = lower_call(q, k, v, mask, given, layout, scale, return_lse)
    chosen = choose_backend(call.problem, call.static, backend)
    how = How(static_for(chosen, call.static), chosen, "bhsd" if layout == "bhsd" else "bshd")
    out, lse = attend(call.q, call.k, call.v, call.operands, how)
    if layout == "thd":
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Call:
    """A call in the form of back ends; q, k and v in "bhsd" or "bshd"."""

    q: Array
    k: Array
    v: Array
    operands: Operands
    static: Static
    problem: Problem


def lower_call(
    q: Array,
    k: Array,
    v: Array,
    mask: AnyMask,
    given: Given,
    layout: str,
    scale: float | None,
    want_lse: bool,
) -> Call:
    """Validate a call and bring it into the form of back ends."""
    q, k, v = _as_arrays(q=q, k=k, v=v)
    check_framework(mask, given)
    check_layout(layout, q, k, v)
    check_sharding(layout, q=q, k=k, v=v)
    check_devices(q, k, v, mask, given)
    if layout == "thd":
        _check_packed(mask)
        q, k, v = q[None], k[None], v[None]
    platform = platform_of(q, k, v)
    views = tuple(_view(x, layout, platform) for x in (q, k, v))
    check_arrays(*views)
    check_scale(scale)
    placed = _lower(mask, views[0], views[1], given, q)
    bounds = jnp.asarray(own(placed.lowered.bounds))
    problem = describe(views[0], views[1], views[2], _View(bounds.shape, bounds.dtype, platform))
    fixed, bare = isinstance(mask, Prepared | Spans), isinstance(mask, Spans)
    options = lower_options(given, views[0], views[1], placed, fixed, bare, q)
    static = Static(
        scale=problem.head_dim**-0.5 if scale is None else float(scale),
        softcap=0.0 if given.softcap is None else float(given.softcap),
        bias_kind=options.bias_kind,
        dropout_p=0.0 if options.seeds is None else float(given.dropout_p),
        mask=words_of(mask, problem, given.q_index is None and given.k_index is None),
        want_lse=want_lse,
        sinks=options.sinks is not None,
    )
    operands = Operands(bounds, options.bias, options.sinks, options.seeds, options.q_index, options.k_index)
    return Call(q, k, v, operands, static, problem)


@dataclass(frozen=True)
class _View:
    """Shape, dtype and platform of an array in (B, H, S, D) order: all that checks look at."""

    shape: tuple[int, ...]
    dtype: Any
    device: str

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _view(x: Array, layout: str, platform: str) -> _View:
    shape = x.shape if layout == "bhsd" else (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    return _View(tuple(shape), x.dtype, platform)


def _as_arrays(**inputs: Any) -> tuple[Array, ...]:
    for name, x in inputs.items():
        if not isinstance(x, jax.Array | np.ndarray):
            raise DtypeError(
                name,
                expected="a JAX or NumPy array",
                got=f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}",
                remedy="Convert it by jnp.asarray (of a torch tensor: jax.dlpack.from_dlpack), or call the "
                "attention of its own framework",
            )
    return tuple(map(jnp.asarray, inputs.values()))


def _lower(mask: AnyMask, q: _View, k: _View, given: Given, like: Array) -> Prepared:
    q_len, k_len = q.shape[2], k.shape[2]
    if isinstance(mask, Prepared | Spans):
        placed = mask if isinstance(mask, Prepared) else Prepared(mask)
    elif isinstance(mask, Mask):
        # Eager masks without arrays are lowered by NumPy, at once; under a tracer they become part of the
        # program, where a constant of the size of the bounds would be copied into it.
        traced = like if isinstance(like, jax.core.Tracer) else None
        indices = {"q_index": given.q_index, "k_index": given.k_index}
        placed = mask.spans(q_len, k_len, batch=q.shape[0], heads=q.shape[1], like=traced, **indices)
    else:
        raise not_a_mask(mask)
    if placed.lowered.k_len != k_len:
        raise OptionError(
            "mask",
            expected=f"spans over k_len={k_len} keys (as k)",
            got=f"spans over {placed.lowered.k_len}",
            remedy="Lower the mask for these keys",
        )
    return placed


def _check_packed(mask: AnyMask) -> None:
    if not isinstance(mask, Mask) or isinstance(mask, Prepared):
        return
    if static_key(mask) is not None:
        raise OptionError(
            "mask with layout='thd'",
            expected="one that keeps packed documents apart",
            got=f"{mask!r}, under which they see each other",
            remedy="Combine it with documents(cu_seqlens) or segments(ids)",
        )
