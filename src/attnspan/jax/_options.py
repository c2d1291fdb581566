"""The options of a call in the form that back ends take: checked, cast, with positions where they matter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._option_checks import check_dropout_p, check_softcap
from ..arrays import INT32_MAX, arrays_for, is_array, own
from ..errors import DtypeError, OptionError, ShapeError
from ..masks import Prepared
from ..options import DENSE, Bias, dense_bias
from ._words import split_seeds


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "sinks", "dropout_seed", "q_index", "k_index"],
    meta_fields=["softcap", "dropout_p"],
)
@dataclass(frozen=True)
class Given:
    """The options of one call of `attention`, as its user gave them."""

    softcap: float | None = None
    bias: object = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: Array | None = None
    q_index: Array | None = None
    k_index: Array | None = None

    def __str__(self) -> str:
        """The options in words, for `explain`."""
        words = [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        words += [f"bias {_as_bias(self.bias)!r}"] if self.bias is not None else []
        words += ["sinks"] if self.sinks is not None else []
        words += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        return ", ".join(words) or "none"


@dataclass(frozen=True)
class Lowered:
    """The options in the form of `Operands` and `Static`."""

    bias: Array | None = None
    bias_kind: int = 0
    sinks: Array | None = None
    seeds: Array | None = None
    q_index: Array | None = None
    k_index: Array | None = None


def lower_options(
    given: Given, q: Any, k: Any, placed: Prepared, fixed: bool, bare: bool, like: Array
) -> Lowered:
    """Check the options of a call against it, and bring them into the form of back ends.

    Args:
        given: The options.
        q: Anything with the shape (B, Hq, Sq, D) and dtype of the queries.
        k: The same of the keys.
        placed: The mask, lowered, with the indices of rows and keys that are not the default ones.
        fixed: The mask was lowered before the call, which did not read the indices that the call gives.
        bare: It came as spans, which do not say where their rows are.
        like: An array of the call.

    Raises:
        ValueError: Values or sizes do not fit, or nothing would read the indices.
        TypeError: Kinds of values do not fit.
    """
    wide = q.dtype == jnp.float64
    check_softcap(given.softcap)
    bias, kind = _lower_bias(given.bias, q, k, wide, like)
    sinks = _lower_sinks(given.sinks, q, wide)
    seeds = _lower_dropout(given.dropout_p, given.dropout_seed, q)
    positional = seeds is not None or kind not in (0, DENSE)
    if fixed and (given.q_index is not None or given.k_index is not None):
        if not positional:
            raise OptionError(
                "q_index, k_index",
                expected="None with a mask that is already lowered and no option that goes by position",
                got="indices and a lowered mask",
                remedy="Give them to prepare() or spans(); only alibi, relative and dropout read them here",
            )
        placed = Prepared(
            placed.lowered,
            _index("q_index", given.q_index, q, q.shape[2], placed.q_index),
            _index("k_index", given.k_index, q, k.shape[2], placed.k_index),
        )
    if (bare or placed.bare) and positional and given.q_index is None and q.shape[2] != k.shape[2]:
        raise OptionError(
            "q_index",
            expected="the rows' indices beside bare spans, as an option needs positions",
            got="None",
            remedy="Pass what prepare() or spans() gives, which knows its rows, or pass q_index",
        )
    q_index, k_index = (
        None if x is None or not positional else jnp.asarray(own(x), jnp.int32)
        for x in (placed.q_index, placed.k_index)
    )
    return Lowered(bias, kind, sinks, seeds, q_index, k_index)


def dropout_seeds(seed: Array, batch: int, heads: int) -> Array:
    """The seeds of every batch row and head, which `attention` makes of a single one.

    Where batch rows or heads are split over devices, make them of the whole and hand each its slice: what is
    dropped is then what one device alone would drop, and what PyTorch drops.

    Args:
        seed: Integer array of shape (), or a typed `jax.random.key` of two words.
        batch: Number of batch rows, of the whole.
        heads: Number of query heads, of the whole.

    Returns:
        Shape (batch, heads, 2), uint32: low and high words; a ``dropout_seed`` for `attention`.

    Raises:
        TypeError: The seed is neither.
        ValueError: It is not of shape ().

    Example:
        >>> seeds = dropout_seeds(jnp.array(5), 2, 4)
        >>> bool((seeds[:, :2] == dropout_seeds(jnp.array(5), 2, 2)).all())
        True
    """
    _check_seed(seed)
    return split_seeds(*_words_of(seed), batch, heads)


def _as_bias(bias: Any) -> Bias:
    if isinstance(bias, Bias):
        return bias
    if is_array(bias):
        return dense_bias(bias)
    raise DtypeError(
        "bias",
        expected="an array, or what alibi(...), relative(...) or dense_bias(...) makes",
        got=type(bias).__name__,
        remedy="Other functions of the scores are not taken: give their values as an array",
    )


def _lower_bias(bias: Any, q: Any, k: Any, wide: bool, like: Array) -> tuple[Array | None, int]:
    if bias is None:
        return None, 0
    lowered, kind = _as_bias(bias).lower(
        batch=q.shape[0], heads=q.shape[1], q_len=q.shape[2], k_len=k.shape[2], like=like, wide=wide
    )
    # Back ends read q's dtype or float32; of another one float32 holds every value.
    if kind == DENSE and not wide and lowered.dtype != q.dtype:
        lowered = lowered.astype(jnp.float32)
    return jnp.asarray(own(lowered)), kind


def _lower_sinks(sinks: Any, q: Any, wide: bool) -> Array | None:
    if sinks is None:
        return None
    if not is_array(sinks) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        got = str(sinks.dtype) if is_array(sinks) else type(sinks).__name__
        raise DtypeError(
            "sinks", expected="a floating array", got=got, remedy="They are logits: convert them to float32"
        )
    if sinks.shape != (q.shape[1],):
        raise ShapeError(
            "sinks",
            expected=f"({q.shape[1]},): a logit for each query head",
            got=f"shape {tuple(sinks.shape)}",
            remedy="Pass one per query head",
        )
    return jnp.asarray(own(sinks)).astype(jnp.float64 if wide else jnp.float32)


def _lower_dropout(dropout_p: Any, seed: Any, q: Any) -> Array | None:
    """The seeds of all batch rows and heads where anything is dropped."""
    check_dropout_p(dropout_p)
    if seed is None:
        if dropout_p == 0:
            return None
        raise OptionError(
            "dropout_seed",
            expected=f"an integer array or a jax.random.key beside dropout_p={dropout_p}",
            got="None",
            remedy="Pass another one for each layer and step, such as jax.random.fold_in(key, step)",
        )
    batch, heads = q.shape[0], q.shape[1]
    _check_seed(seed, (batch, heads, 2))
    if dropout_p == 0:
        return None
    if seed.ndim == 3:
        return jnp.asarray(seed, jnp.uint32)
    return split_seeds(*_words_of(seed), batch, heads)


def _is_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


def _check_seed(seed: Any, whole: tuple[int, ...] | None = None) -> None:
    key = _is_key(seed)
    if not key and (
        not (is_array(seed) or isinstance(seed, np.generic)) or not jnp.issubdtype(seed.dtype, jnp.integer)
    ):
        got = str(seed.dtype) if is_array(seed) else type(seed).__name__
        raise DtypeError(
            "dropout_seed",
            expected="an integer array or a jax.random.key",
            got=got,
            remedy="Pass jnp.array(seed): under jit a number would be a constant",
        )
    if key and jax.random.key_data(seed).shape[-1] != 2:
        raise DtypeError(
            "dropout_seed",
            expected="a key of two words (threefry2x32)",
            got=str(seed.dtype),
            remedy='Make it by jax.random.key(seed, impl="threefry2x32")',
        )
    own = whole is not None and seed.shape == whole and seed.dtype == jnp.uint32
    if seed.ndim != 0 and not own:
        remedy = "Pass one seed for all, or dropout_seeds(seed, batch, heads)"
        if seed.shape == (2,) and seed.dtype == jnp.uint32:
            remedy = "If it is a raw key of jax.random.PRNGKey, pass jax.random.wrap_key_data(key)"
        raise ShapeError(
            "dropout_seed",
            expected="shape ()" if whole is None else f"shape () or uint32 (B, H, 2) = {whole}",
            got=f"{seed.dtype} {tuple(seed.shape)}",
            remedy=remedy,
        )


def _words_of(seed: Array) -> tuple[Array, Array]:
    """The low and the high word of a seed, whose sign goes on in the high one."""
    if _is_key(seed):
        words = jax.random.key_data(seed)
        return words[0], words[1]
    if isinstance(seed, np.ndarray | np.generic) and seed.dtype.itemsize == 8:  # JAX may have no 64 bits.
        low, high = np.uint32(int(seed) & 0xFFFFFFFF), np.uint32(int(seed) >> 32 & 0xFFFFFFFF)
        return jnp.asarray(low), jnp.asarray(high)
    seed = jnp.asarray(own(seed))
    if seed.dtype.itemsize == 8:
        return seed.astype(jnp.uint32), (seed >> 32).astype(jnp.uint32)
    signed = jnp.issubdtype(seed.dtype, jnp.signedinteger)
    low = seed.astype(jnp.int32).astype(jnp.uint32) if signed else seed.astype(jnp.uint32)
    high = jnp.where(seed < 0, np.uint32(0xFFFFFFFF), np.uint32(0)) if signed else jnp.zeros((), jnp.uint32)
    return low, high.astype(jnp.uint32)


def _index(name: str, index: Any, q: Any, length: int, own: Any) -> Any:
    """Given indices as int32 (B|1, length), or the mask's own where there are none."""
    if index is None:
        return own
    if not is_array(index) or not jnp.issubdtype(index.dtype, jnp.integer):
        got = str(index.dtype) if is_array(index) else type(index).__name__
        raise DtypeError(name, expected="an integer array", got=got, remedy="Pass int32 indices")
    fits = index.ndim in (1, 2) and index.shape[-1] == length
    if not fits or (index.ndim == 2 and index.shape[0] not in (1, q.shape[0])):
        raise ShapeError(
            name,
            expected=f"({length},) or ({q.shape[0]}, {length})",
            got=f"shape {tuple(index.shape)}",
            remedy="Pass one global index for each row of q or k",
        )
    if index.dtype.itemsize == 8 and index.size and arrays_for([index]).concrete(index):
        low, high = int(index.min()), int(index.max())
        if max(-low, high) > INT32_MAX:
            raise OptionError(
                name, expected="int32 indices", got=f"{low} to {high}", remedy="Use smaller ones"
            )
    return (index if index.ndim == 2 else index[None]).astype(np.int32)
