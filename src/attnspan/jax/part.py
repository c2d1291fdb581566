"""Data of a call that JAX programs use: arrays, and the numbers that a program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax import Array

from attnspan.call import Call, Problem
from attnspan.call.options import Options
from attnspan.masks import Mask

__all__ = [
    "OPTIONS",
    "Gradients",
    "JaxPart",
    "MaskWords",
    "Static",
    "part_of",
    "result_dtype",
    "static_of",
    "words_of",
]

#: A mask in words. It exists only if tracing shows that queries and keys both count from 0: ("full",),
#: ("causal",) or ("window", left, right) with None for an open side.
MaskWords = tuple[str | int | None, ...]

#: dq, dk, dv, and the gradients of the bias and the sinks, or None.
Gradients = tuple[Array, Array, Array, Any, Any]


#: The arrays of a part except q, k and v, in its order: the mask and the options. Some are None.
OPTIONS = ("bounds", "bias", "sinks", "seeds", "q_index", "k_index")


@dataclass(frozen=True)
class Static:
    """The numbers of a call. A program is compiled for them.

    Attributes:
        scale: Factor of the scores.
        softcap: 0 for none, else x becomes softcap * tanh(x / softcap), before the bias.
        bias_kind: 0, ALIBI, SIGNED_ALIBI, DISTANCE or DENSE of `attnspan.call.options`.
        dropout_p: Probability of dropping a weight, 0 for no dropout.
        mask: The mask in words, for backends with kernels for a few masks. None if only the bounds describe
            it.
        want_lse: Whether the caller asks for the lse as well.
        sinks: Whether there are sinks.
        wide: Return 16-bit results and gradients in float32, because the caller sums those of several calls.
    """

    scale: float
    softcap: float = 0.0
    bias_kind: int = 0
    dropout_p: float = 0.0
    mask: MaskWords | None = None
    want_lse: bool = True
    sinks: bool = False
    wide: bool = False


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "k", "v", *OPTIONS],
    meta_fields=["static", "layout"],
)
@dataclass(frozen=True, eq=False)
class JaxPart:
    """`attnspan.call.Part` as a pytree. Arrays are its leaves, numbers belong to its structure.

    Attributes:
        q: Shape (B, Hq, Sq, D), or (B, Sq, Hq, D) in layout "bshd". The same order holds for k and v.
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: int32 (B|1, Hq|1, Sq, R, 2), the mask as spans.
        static: The numbers.
        layout: Order of the dims of q, k and v: "bhsd" or "bshd".
        bias: None, or an array that depends on the kind. Slopes are (B|1, Hq) and values by distance
            (Hq, 2L + 1), in float32. Dense values are (B|1, Hq|1, Sq|1, Sk), in q's dtype or float32. With a
            float64 q all are float64.
        sinks: float32 (Hq,), or None.
        seeds: uint32 (B, Hq, 2), low and high word of the seed of each batch element and head, or None.
        q_index: int32 (B|1, Sq), global indices of the queries. None for k_len - q_len + row.
        k_index: int32 (B|1, Sk), global indices of the keys, in any order. None for 0..k_len-1.
    """

    q: Array
    k: Array
    v: Array
    bounds: Array
    static: Static = field(kw_only=True)
    layout: str = field(kw_only=True, default="bhsd")
    bias: Array | None = None
    sinks: Array | None = None
    seeds: Array | None = None
    q_index: Array | None = None
    k_index: Array | None = None

    @property
    def k_len(self) -> int:
        return self.k.shape[2 if self.layout == "bhsd" else 1]

    def in_layout(self, layout: str) -> JaxPart:
        """Return the part with q, k and v in another layout."""
        if layout == self.layout:
            return self
        q, k, v = (x.swapaxes(1, 2) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, layout=layout)

    def with_gradients(self, found: Gradients) -> JaxPart:
        """Return the part with gradients instead of arrays, and None for arrays without a gradient."""
        dq, dk, dv, dbias, dsinks = found
        # A dense bias may have q's dtype, but its gradient is summed in float32.
        dbias = None if dbias is None or self.bias is None else dbias.astype(self.bias.dtype)
        none: Any = dict.fromkeys(("bounds", "seeds", "q_index", "k_index"))
        return replace(self, q=dq, k=dk, v=dv, bias=dbias, sinks=dsinks, **none)


def static_of(call: Call, words: MaskWords | None, want_lse: bool = True, wide: bool = False) -> Static:
    """Return the numbers of a call. `words` is its mask, if words can describe it."""
    o = call.options or Options()
    numbers = float(call.scale), float(o.softcap), o.bias_kind, float(o.dropout_p)
    return Static(*numbers, words, want_lse, o.sinks is not None, wide)


def part_of(call: Call, inputs: tuple[Array, Array, Array], static: Static, layout: str) -> JaxPart:
    """Return the part of a checked call whose q, k and v are `inputs` in `layout`."""
    o = call.options or Options()
    arrays = o.bias, o.sinks, o.dropout_seed, o.q_index, o.k_index
    return JaxPart(*inputs, call.bounds, *arrays, static=static, layout=layout)


def words_of(mask: object, problem: Problem, default_indices: bool) -> MaskWords | None:
    """Describe the mask of `attention` in words. None if only its bounds describe it."""
    if not isinstance(mask, Mask) or not default_indices:
        return None
    band = mask.band()
    if band is None or band.cu_q is not None:
        return None
    if band.name == "full":
        return ("full",)
    # Other libraries align the first query with the first key. attnspan aligns the last ones.
    if problem.q_len != problem.k_len:
        return None
    return ("causal",) if band.name == "causal" else ("window", band.left, band.right)


def result_dtype(like: Any, static: Static) -> Any:
    """Return the dtype of a result or gradient that has the dtype of `like` in a plain call."""
    return jax.numpy.promote_types(like.dtype, "float32") if static.wide else like.dtype
