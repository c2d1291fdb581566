"""A call as programs of JAX have it: arrays, and the numbers that a program is compiled for."""

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

#: A mask in words, where it is known when a call is traced that queries and keys count from 0 together:
#: ("full",), ("causal",) or ("window", left, right) with None for an open side.
MaskWords = tuple[str | int | None, ...]

#: dq, dk, dv, and the gradients of the bias and of the sinks where there are any.
Gradients = tuple[Array, Array, Array, Any, Any]


#: The arrays of a part besides q, k and v, in its order: masks and options, of which some are None.
OPTIONS = ("bounds", "bias", "sinks", "seeds", "q_index", "k_index")


@dataclass(frozen=True)
class Static:
    """The numbers of a call, for which a program is compiled.

    Attributes:
        scale: Factor of the scores.
        softcap: 0 for none, else x becomes softcap * tanh(x / softcap), before the bias.
        bias_kind: 0, ALIBI, SIGNED_ALIBI, DISTANCE or DENSE of `attnspan.call.options`.
        dropout_p: Probability with which a weight is dropped, 0 for none.
        mask: The mask in words, for backends that have kernels for a few masks; None where only the bounds
            know it.
        want_lse: The caller asks for the lse as well.
        sinks: There are sinks.
        wide: Results and gradients of 16 bits come in float32, as parts of sums over several calls do.
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
    """`attnspan.call.Part` as a pytree: arrays are its leaves, numbers belong to its structure.

    Attributes:
        q: Shape (B, Hq, Sq, D), or (B, Sq, Hq, D) in the layout "bshd"; as k and v.
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: int32 (B|1, Hq|1, Sq, R, 2), the mask as spans.
        static: The numbers.
        layout: Order of the dims of q, k and v: "bhsd" or "bshd".
        bias: By kind, slopes (B|1, Hq) or values by distance (Hq, 2L + 1), float32, or dense values
            (B|1, Hq|1, Sq|1, Sk) in q's dtype or float32; float64 with a float64 q. None for no bias.
        sinks: float32 (Hq,), or None.
        seeds: uint32 (B, Hq, 2), low and high word of the seed of each batch row and head, or None.
        q_index: int32 (B|1, Sq), global indices of the queries; None for k_len - q_len + row.
        k_index: int32 (B|1, Sk), global indices of the keys, in any order; None for 0..k_len-1.
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
        """The same with q, k and v in another order."""
        if layout == self.layout:
            return self
        q, k, v = (x.swapaxes(1, 2) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, layout=layout)

    def with_gradients(self, found: Gradients) -> JaxPart:
        """Gradients in the places of their arrays, None for what has none."""
        dq, dk, dv, dbias, dsinks = found
        # A dense bias may have q's dtype; its gradient is summed in float32.
        dbias = None if dbias is None or self.bias is None else dbias.astype(self.bias.dtype)
        none: Any = dict.fromkeys(("bounds", "seeds", "q_index", "k_index"))
        return replace(self, q=dq, k=dk, v=dv, bias=dbias, sinks=dsinks, **none)


def static_of(call: Call, words: MaskWords | None, want_lse: bool = True, wide: bool = False) -> Static:
    """The numbers of a call; `words` is its mask, where words say it."""
    o = call.options or Options()
    numbers = float(call.scale), float(o.softcap), o.bias_kind, float(o.dropout_p)
    return Static(*numbers, words, want_lse, o.sinks is not None, wide)


def part_of(call: Call, inputs: tuple[Array, Array, Array], static: Static, layout: str) -> JaxPart:
    """A checked call whose q, k and v are `inputs`, in a layout."""
    o = call.options or Options()
    arrays = o.bias, o.sinks, o.dropout_seed, o.q_index, o.k_index
    return JaxPart(*inputs, call.bounds, *arrays, static=static, layout=layout)


def words_of(mask: object, problem: Problem, default_indices: bool) -> MaskWords | None:
    """The mask of `attention` in words; None where only its bounds say what it is."""
    if not isinstance(mask, Mask) or not default_indices:
        return None
    band = mask.band()
    if band is None or band.cu_q is not None:
        return None
    if band.name == "full":
        return ("full",)
    # Other libraries align the first query with the first key, we the last ones.
    if problem.q_len != problem.k_len:
        return None
    return ("causal",) if band.name == "causal" else ("window", band.left, band.right)


def result_dtype(like: Any, static: Static) -> Any:
    """The dtype of a result or gradient, of the array whose dtype it has in a plain call."""
    return jax.numpy.promote_types(like.dtype, "float32") if static.wide else like.dtype
