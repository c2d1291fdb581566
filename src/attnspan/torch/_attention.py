"""The public ``attention``: layouts, autocast, lowering of the mask, choice of the backend."""

import warnings
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from .._leaves import Causal, Full, GlobalKeys, Window
from .._mistakes import not_a_mask, refuse_keywords
from ..arrays import own
from ..errors import DtypeError, OptionError
from ..kernels import Choice, choose, cpu
from ..kernels import math as math_kernel
from ..masks import Mask, Prepared, full
from ..options import Bias, Options
from ..problem import Problem, check_arrays, check_layout, check_scale, describe
from ..spans import Spans
from . import _eager
from ._lowered import as_tensors, lowered
from ._options import Given, check_indices, lower_options
from .dtensor import Places, ShardedMask, lower_mask, on_mesh, places_of
from .ops import check_k_len, forward_op

#: Every backend that torch can drive, the preferred one first.
BACKENDS: dict[str, Any] = {"cpu": cpu, "math": math_kernel}

Layout = Literal["bhsd", "bshd", "thd"]
AnyMask = Mask | Prepared | Spans | ShardedMask

_FULL = full()
_NO_OPTIONS = Given()
_warned: set[str] = set()


class SlowPathWarning(UserWarning):
    """Attention runs on a slower backend than its device has.

    Example:
        >>> issubclass(SlowPathWarning, UserWarning)
        True
    """


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    bias: Bias | Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    q_index: Tensor | None = ...,
    k_index: Tensor | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    bias: Bias | Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
    q_index: Tensor | None = ...,
    k_index: Tensor | None = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
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
            Over several ranks, an `attnspan.parallel.ContextParallel`.
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
        backend: Name of a backend, or None for the fastest that can run the call (see `explain`).
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
    if isinstance(mask, ShardedMask):
        return mask.attention(  # type: ignore[no-any-return]
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
    plain = (
        softcap is None is bias is None is sinks is None is dropout_seed is None is q_index is None is k_index
    )
    plain = plain and isinstance(dropout_p, float) and dropout_p == 0.0
    given = _NO_OPTIONS if plain else Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    if not torch.compiler.is_compiling() and backend in (None, "cpu"):
        found = _eager.attend(q, k, v, mask, scale, layout, bool(return_lse), None if plain else given)
        if found is not None:
            return found  # type: ignore[no-any-return]
    q, k, v, bounds, problem, options = lower_call(q, k, v, mask, given, layout)
    check_scale(scale)
    choice = choose(problem, BACKENDS, backend)
    warn_if_slow(choice)
    scale = problem.head_dim**-0.5 if scale is None else scale
    k_len = _unread_k_len(mask, q)
    if choice.name == "math":
        out, lse = math_kernel.forward(q, k, v, bounds, scale=scale, options=options, lowered_for=k_len)
    else:
        bounds, arguments, k_len = on_mesh(q, bounds, options, k_len)
        out, lse = forward_op(q, k, v, bounds, scale, *arguments, k_len=k_len)
    out, lse = _from_bhsd(out, layout), lse[0] if layout == "thd" else lse
    return (out, lse) if return_lse else out


def lower_call(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, given: Given, layout: Layout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Problem, Options | None]:
    """Validate a call and bring it into the operator's form: q, k, v as (B, H, S, D), bounds and options."""
    _check_tensors(q=q, k=k, v=v)
    check_layout(layout, q, k, v)
    places = places_of(q, k, v, layout, given)
    q, k, v = (_to_bhsd(x, layout) for x in _autocast(q, k, v))
    check_arrays(q, k, v)
    check_indices(given, q)
    placed = _lower(mask, q, k, given, layout, places)
    bounds = placed.lowered.bounds
    bounds = bounds if isinstance(bounds, Tensor) else _moved(bounds, q)
    problem = describe(q, k, v, bounds)
    options = lower_options(given, q, k, placed, isinstance(mask, (Prepared, Spans)), isinstance(mask, Spans))
    return q, k, v, bounds, problem, options


def _check_tensors(**inputs: object) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise DtypeError(
                name,
                expected="a torch.Tensor",
                got=type(x).__name__,
                remedy="Convert it with torch.as_tensor",
            )


def warn_if_slow(choice: Choice) -> None:
    """Warn once per reason when the math backend stands in for a kernel."""
    if choice.name == "math":
        for name, reason in choice.refusals.items():
            _warn_once(
                "attention runs as plain framework code, which stores every score: "
                f"backend {name!r} refused ({reason})"
            )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(
            f'{message}. Pass backend="math" to choose it without this warning.',
            SlowPathWarning,
            stacklevel=3,
        )


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    device = q.device.type
    if not math_kernel.has_autocast(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))


def _to_bhsd(x: Tensor, layout: Layout) -> Tensor:
    if layout == "bhsd":
        return x
    return x.transpose(1, 2) if layout == "bshd" else x.transpose(0, 1).unsqueeze(0)


def _from_bhsd(x: Tensor, layout: Layout) -> Tensor:
    if layout == "bhsd":
        return x
    return x.transpose(1, 2) if layout == "bshd" else x[0].transpose(0, 1)


def _lower(
    mask: AnyMask, q: Tensor, k: Tensor, given: Given, layout: Layout, places: Places | None
) -> Prepared:
    q_len, k_len = q.shape[2], k.shape[2]
    if layout == "thd" and isinstance(mask, Mask) and not isinstance(mask, Prepared):
        _check_packed(mask)
    if (found := lower_mask(mask, places, q, k_len, given.q_index, given.k_index)) is not None:
        return found
    if isinstance(mask, (Prepared, Spans)):
        placed = mask if isinstance(mask, Prepared) else Prepared(mask)
        if isinstance(placed.lowered.bounds, np.ndarray) and _may_remember(given, q) and placed is mask:
            placed = as_tensors(placed, q.device)
    elif isinstance(mask, Mask):
        indices = {"q_index": given.q_index, "k_index": given.k_index}
        if _may_remember(given, q) and (known := lowered(mask, q, k)) is not None:
            return known
        placed = mask.placed(q_len, k_len, batch=q.shape[0], heads=q.shape[1], like=q, **indices)
    else:
        raise not_a_mask(mask)
    if _can_read_k_len(placed.lowered):
        check_k_len(placed.lowered.k_len, k_len)
    return placed


def _may_remember(given: Given, q: Tensor) -> bool:
    """Whether a mask means here what it means in other calls, and tensors are what they seem."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in (Tensor, torch.nn.Parameter)
        and given.q_index is None is given.k_index
        and not _eager.is_transformed()
    )


def _can_read_k_len(spans: Spans) -> bool:
    """Whether reading costs nothing: to a compiler the number is a constant; on a device it is waited for."""
    if torch.compiler.is_compiling():
        return False
    return "k_len" in vars(spans) or not isinstance(spans._k_len, Tensor) or spans._k_len.is_cpu


def _unread_k_len(mask: AnyMask, q: Tensor) -> Tensor | None:
    """The k_len of a mask that was lowered before as a tensor, where `_lower` could not check the number."""
    if not isinstance(mask, (Prepared, Spans)):
        return None
    spans = mask if isinstance(mask, Spans) else mask.lowered
    if _can_read_k_len(spans):
        return None
    k_len = spans._k_len
    return k_len if isinstance(k_len, Tensor) else torch.as_tensor(k_len, device=q.device)


def _moved(bounds: Any, q: Tensor) -> Tensor:
    """A mask that was lowered in NumPy."""
    if not isinstance(bounds, np.ndarray):
        raise DtypeError(
            "mask",
            expected="arrays of torch or NumPy, as q, k and v",
            got=f"{type(bounds).__module__.partition('.')[0]} arrays",
            remedy="Convert them by torch.from_dlpack, or call the attention of their framework",
        )
    return torch.as_tensor(own(bounds), device=q.device)


def _check_packed(mask: Mask) -> None:
    if all(isinstance(leaf, (Causal, Full, GlobalKeys, Window)) for leaf in mask._leaves()):
        raise OptionError(
            "mask with layout='thd'",
            expected="one that keeps packed documents apart",
            got=f"{mask!r}, under which they see each other",
            remedy="Combine it with documents(cu_seqlens) or segments(ids)",
        )
