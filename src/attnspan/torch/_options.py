"""The options of a call in the form that operators take: checked, cast, with positions where they matter."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dropout import split_seeds
from .._option_checks import check_dropout_p, check_softcap
from ..arrays import INT32_MAX, arrays_for, is_array, own
from ..errors import DeviceError, DtypeError, OptionError, ShapeError, shown
from ..masks import Prepared
from ..options import DENSE, Bias, Options, dense_bias


@dataclass(frozen=True)
class Given:
    """The options of one call of `attention`, as its user gave them."""

    softcap: float | None = None
    bias: object = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    q_index: Tensor | None = None
    k_index: Tensor | None = None

    def is_plain(self, kinds: tuple[type, ...]) -> bool:
        """Whether every array is a tensor of one of these types. A bias may hold NumPy arrays too."""
        for x in (self.sinks, self.dropout_seed, self.q_index, self.k_index):
            if x is not None and type(x) not in kinds:
                return False
        for part in vars(self.bias).values() if isinstance(self.bias, Bias) else (self.bias,):
            if isinstance(part, Tensor) and type(part) not in kinds:
                return False
        return True

    def __str__(self) -> str:
        """The options in words, for `explain`."""
        words = [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        if self.bias is not None:
            bias = dense_bias(self.bias) if isinstance(self.bias, Tensor) else self.bias
            words.append(f"bias {bias!r}")
        words += ["sinks"] if self.sinks is not None else []
        words += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        return ", ".join(words) or "none"


def lower_options(
    given: Given, q: Tensor, k: Tensor, placed: Prepared, fixed: bool, bare: bool = False
) -> Options | None:
    """Check the options of a call against it, and bring them into the operator's form.

    Args:
        given: The options.
        q: Shape (B, Hq, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        placed: The mask, lowered, with the indices of rows and keys that are not the default ones.
        fixed: The mask was lowered before the call, which did not read the indices that the call gives.
        bare: It came as spans, which do not say where their rows are.

    Returns:
        The options, float arrays in float32, or in float64 for a float64 q; None where there is none.

    Raises:
        ValueError: Values, sizes or devices do not fit, or nothing would read the indices.
        TypeError: Kinds of values do not fit.
    """
    wide = q.dtype == torch.float64
    if given.softcap is not None:
        check_softcap(given.softcap)
    bias, kind = (None, 0) if given.bias is None else _lower_bias(given.bias, q, k, wide)
    sinks = None if given.sinks is None else _lower_sinks(given.sinks, q, wide)
    plain = given.dropout_seed is None and isinstance(given.dropout_p, float) and given.dropout_p == 0.0
    seed = None if plain else _lower_dropout(given.dropout_p, given.dropout_seed, q)
    positional = seed is not None or kind not in (0, DENSE)
    if fixed and (given.q_index is not None or given.k_index is not None):
        _check_read(positional)
        placed = _placed_anew(placed, given, q, k)
    if (bare or placed.bare) and positional and given.q_index is None and q.shape[2] != k.shape[2]:
        raise OptionError(
            "q_index",
            expected="the rows' indices beside bare spans, as an option needs positions",
            got="None",
            remedy="Pass what prepare() or spans() gives, which knows its rows, or pass q_index",
        )
    if given.softcap is None and bias is None and sinks is None and seed is None:
        return None
    softcap = 0.0 if given.softcap is None else given.softcap
    dropout_p = 0.0 if seed is None else given.dropout_p
    q_index, k_index = _positions(placed, q.device) if positional else (None, None)
    return Options(softcap, bias, kind, sinks, dropout_p, seed, q_index, k_index)


def dropout_seeds(seed: Tensor, batch: int, heads: int) -> Tensor:
    """The seeds of every batch row and head, which `attention` makes of a single one.

    Where batch rows or heads are split over devices, make them of the whole and hand each its slice: what is
    dropped is then what one device alone would drop.

    Args:
        seed: Integer, shape ().
        batch: Number of batch rows, of the whole.
        heads: Number of query heads, of the whole.

    Returns:
        Shape (batch, heads), int64: a ``dropout_seed`` for `attention`.

    Raises:
        TypeError: The seed is no integer tensor.
        ValueError: It is not of shape ().

    Example:
        >>> seeds = dropout_seeds(torch.tensor(5), 2, 4)
        >>> torch.equal(seeds[:, :2], dropout_seeds(torch.tensor(5), 2, 2))
        True
    """
    _check_seed(seed)
    rows, heads_at = torch.arange(batch, device=seed.device), torch.arange(heads, device=seed.device)
    return split_seeds(seed.to(torch.int64), rows[:, None], heads_at[None])  # type: ignore[no-any-return]


def _as_bias(bias: Any) -> Bias:
    if isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor):
        return dense_bias(bias)
    raise DtypeError(
        "bias",
        expected="a tensor, or what alibi(...), relative(...) or dense_bias(...) makes",
        got=type(bias).__name__,
        remedy="Other functions of the scores are not taken: give their values as a tensor",
    )


def _lower_bias(bias: Any, q: Tensor, k: Tensor, wide: bool) -> tuple[Tensor, int]:
    bias = _as_bias(bias)
    for field in fields(bias):
        _check_device(f"bias: {field.name}", getattr(bias, field.name), q)
    lowered, kind = bias.lower(
        batch=q.shape[0], heads=q.shape[1], q_len=q.shape[2], k_len=k.shape[2], like=q, wide=wide
    )
    # Kernels read q's dtype or float32; of another one float32 holds every value.
    if kind == DENSE and not wide and lowered.dtype != q.dtype:
        lowered = lowered.to(torch.float32)
    return lowered, kind


def _lower_sinks(sinks: Any, q: Tensor, wide: bool) -> Tensor:
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = str(sinks.dtype) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise DtypeError(
            "sinks", expected="a floating tensor", got=got, remedy="They are logits: convert them to float32"
        )
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[1]:
        raise ShapeError(
            "sinks",
            expected=f"({q.shape[1]},): a logit for each query head",
            got=f"shape {shown(sinks.shape)}",
            remedy="Pass one per query head",
        )
    _check_device("sinks", sinks, q)
    return sinks.to(torch.float64 if wide else torch.float32)


def _lower_dropout(dropout_p: Any, seed: Any, q: Tensor) -> Tensor | None:
    """The seed where anything is dropped."""
    check_dropout_p(dropout_p)
    if seed is None:
        if dropout_p == 0:
            return None
        raise OptionError(
            "dropout_seed",
            expected=f"an integer tensor beside dropout_p={dropout_p}",
            got="None",
            remedy="Pass another one for each layer and step, such as torch.randint(2**62, ())",
        )
    batch, heads = q.shape[0], q.shape[1]
    _check_seed(seed, batch, heads)
    _check_device("dropout_seed", seed, q)
    if dropout_p == 0:
        return None
    seed = seed.to(torch.int64)
    # Compiled code saves it, and cannot ask whether it was made in inference mode. A copy was not; of this
    # kind it is not made anew in the backward pass.
    return seed[None].cumsum(0)[0] if torch.compiler.is_compiling() else seed  # type: ignore[no-any-return]


def _check_seed(seed: Any, batch: int | None = None, heads: int | None = None) -> None:
    if not isinstance(seed, Tensor) or seed.dtype not in _INTEGERS:
        got = str(seed.dtype) if isinstance(seed, Tensor) else type(seed).__name__
        raise DtypeError(
            "dropout_seed",
            expected="an integer tensor",
            got=got,
            remedy="Pass torch.tensor(seed): a compiler would take a number for a constant",
        )
    own = seed.dim() == 2 and seed.shape[0] == batch and seed.shape[1] == heads
    if seed.dim() != 0 and not own:
        raise ShapeError(
            "dropout_seed",
            expected="shape ()" if batch is None else f"shape () or (B, H) = ({batch}, {heads})",
            got=f"shape {shown(seed.shape)}",
            remedy="Pass one seed for all, or dropout_seeds(seed, batch, heads)",
        )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check_device(name: str, x: Any, q: Tensor) -> None:
    # NumPy arrays, such as buckets, are moved when they are lowered.
    if isinstance(x, Tensor) and x.device != q.device:
        raise DeviceError(
            name, expected=f"device {q.device} (as q)", got=str(x.device), remedy="Move it to one device"
        )


def check_indices(given: Given, q: Tensor) -> None:
    """Raise for indices of another framework or device, which would else be taken for the mask's fault."""
    for name, index in (("q_index", given.q_index), ("k_index", given.k_index)):
        if is_array(index) and not isinstance(index, (Tensor, np.ndarray)):
            raise DtypeError(
                name,
                expected="an integer tensor, or an array of NumPy",
                got=f"one of {arrays_for([index]).name}",
                remedy="Convert it by torch.from_dlpack, or call the attention of its own framework",
            )
        _check_device(name, index, q)


def _check_read(positional: bool) -> None:
    if not positional:
        raise OptionError(
            "q_index, k_index",
            expected="None with a mask that is already lowered and no option that goes by position",
            got="indices and a lowered mask",
            remedy="Give them to prepare() or spans(); only alibi, relative and dropout read them here",
        )


def _placed_anew(placed: Prepared, given: Given, q: Tensor, k: Tensor) -> Prepared:
    """The mask with the indices that the call gives, in place of its own."""
    q_index = _index("q_index", given.q_index, q, q.shape[2], placed.q_index)
    k_index = _index("k_index", given.k_index, q, k.shape[2], placed.k_index)
    return Prepared(placed.lowered, q_index, k_index)


def _positions(placed: Prepared, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Global indices of queries and keys; a mask lowered in NumPy has them there."""
    q_index, k_index = (
        x if x is None or isinstance(x, Tensor) else torch.as_tensor(own(x), device=device)
        for x in (placed.q_index, placed.k_index)
    )
    return q_index, k_index


def _index(name: str, index: Any, q: Tensor, length: int, own: Any) -> Any:
    """Given indices as int32 (B|1, length), or the mask's own where there are none."""
    if index is None:
        return own
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS:
        got = str(index.dtype) if isinstance(index, Tensor) else type(index).__name__
        raise DtypeError(name, expected="an integer tensor", got=got, remedy="Pass int32 or int64 indices")
    _check_device(name, index, q)
    fits = index.dim() in (1, 2) and index.shape[-1] == length
    if not fits or (index.dim() == 2 and index.shape[0] != 1 and index.shape[0] != q.shape[0]):
        raise ShapeError(
            name,
            expected=f"({length},) or ({q.shape[0]}, {length})",
            got=f"shape {shown(index.shape)}",
            remedy="Pass one global index for each row of q or k",
        )
    if index.dtype == torch.int64 and index.numel() and arrays_for([index]).concrete(index):
        low, high = index.aminmax()
        if max(-int(low), int(high)) > INT32_MAX:
            raise OptionError(
                name, expected="int32 indices", got=f"{int(low)} to {int(high)}", remedy="Use smaller ones"
            )
    return (index if index.dim() == 2 else index[None]).to(torch.int32)
