"""What every back end of JAX is given: numbers that are known when a call is traced, and arrays that are not.

A back end is a module with ``supports(problem, static)``, ``forward(q, k, v, given, static)`` and
``backward(dout, dlse, q, k, v, given, out, lse, static, want_dbias)``; docs/design.md has the contract.
Arrays are in (B, H, S, D) order.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

#: A mask in words, where it is known when a call is traced that queries and keys count from 0 together:
#: ("full",), ("causal",) or ("window", left, right) with None for an open side.
MaskWords = tuple[str | int | None, ...]


@dataclass(frozen=True)
class Static:
    """The part of a call that a compiled program is made for.

    Attributes:
        scale: Factor of the scores.
        softcap: 0 for none, else x becomes softcap * tanh(x / softcap), before the bias.
        bias_kind: 0, ALIBI, SIGNED_ALIBI, DISTANCE or DENSE of `attnspan.options`.
        dropout_p: Probability with which a weight is dropped, 0 for none.
        mask: The mask in words, for back ends that have kernels for a few masks; None where only the bounds
            know it.
        want_lse: The caller asks for the lse as well.
        sinks: There are sinks.
        wide: Results and gradients of 16 bits come in float32, as parts of sums over several calls do.

    Example:
        >>> Static(scale=0.125).softcap
        0.0
    """

    scale: float
    softcap: float = 0.0
    bias_kind: int = 0
    dropout_p: float = 0.0
    mask: MaskWords | None = None
    want_lse: bool = True
    sinks: bool = False
    wide: bool = False


class Operands(NamedTuple):
    """The arrays of a call beside q, k and v; a pytree.

    Attributes:
        bounds: int32 (B|1, Hq|1, Sq, R, 2), the mask as spans.
        bias: By kind, slopes (B|1, Hq) or values by distance (Hq, 2L + 1), float32, or dense values
            (B|1, Hq|1, Sq|1, Sk) in q's dtype or float32; float64 beside a float64 q. None for no bias.
        sinks: float32 (Hq,), or None.
        seeds: uint32 (B, Hq, 2), low and high word of the seed of each batch row and head, or None.
        q_index: int32 (B|1, Sq), global indices of the queries; None for k_len - q_len + row.
        k_index: int32 (B|1, Sk), global indices of the keys, in any order; None for 0..k_len-1.

    Example:
        >>> Operands(jax.numpy.zeros((1, 1, 4, 1, 2), "int32")).sinks is None
        True
    """

    bounds: jax.Array
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    seeds: jax.Array | None = None
    q_index: jax.Array | None = None
    k_index: jax.Array | None = None


def result_dtype(like: Any, static: Static) -> Any:
    """The dtype of a result or gradient, of the array whose dtype it has in a plain call.

    Example:
        >>> x = jax.numpy.ones(2, "bfloat16")
        >>> result_dtype(x, Static(1.0)).name, result_dtype(x, Static(1.0, wide=True)).name
        ('bfloat16', 'float32')
    """
    return jax.numpy.promote_types(like.dtype, "float32") if static.wide else like.dtype


#: dq, dk, dv, and the gradients of the bias and of the sinks where there are any.
Gradients = tuple[jax.Array, jax.Array, jax.Array, Any, Any]
