"""The public ``attention`` on XLA tensors: lowering of the mask, specs of all tensors, the call."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .._mistakes import refuse_keywords
from ..errors import DeviceError
from ..masks import Mask, Prepared, full
from ..options import Bias, Options
from ..problem import check_arrays, check_layout, check_scale, describe
from ..spans import Spans
from ..torch._attention import _check_packed, _check_tensors, _from_bhsd, _to_bhsd
from ..torch._options import Given, check_indices, lower_options
from ._lowering import lower_all
from ._ops import forward_op, split_seeds_op
from ._places import Places, places_of

Layout = Literal["bhsd", "bshd", "thd"]

_FULL = full()
_WORD = 0xFFFFFFFF


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Prepared | Spans | None = None,
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
    mesh: Any = None,
    partition_spec: tuple[Any, ...] | None = None,
    specs: Mapping[str, tuple[Any, ...]] | None = None,
    **mistaken: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnspan.torch.attention` on XLA tensors, as a part of the XLA graph that torch_xla builds.

    Arguments, results and their meaning are those of `attnspan.torch.attention`; here is what differs. Values
    are not read when the graph is built, so what the others refuse by value (ids in more runs than promised,
    illegal bounds) makes the rows concerned NaN. Calls that differ in values only share a trace.

    With ``partition_spec`` each device computes its own batch rows and heads, and nothing of q, k and v is
    gathered. Every other tensor (segment ids, bounds, biases, sinks, seeds, indices) is split as q is, on the
    axes that it shares with q. Heads that share keys may be split further than the keys' heads.

    Args:
        q: Shape (B, Hq, Sq, D) in layout "bhsd"; on an XLA device.
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        mask: What each query may see; None is ``full()``. Its arrays are XLA tensors or of NumPy. From a
            function (``from_predicate``), the function is given XLA tensors.
        scale: Factor of the scores; 1/sqrt(D) by default.
        softcap: Positive number c: scores x become ``c * tanh(x / c)``, before the bias.
        bias: Added to the scores, with gradients to its tensors.
        sinks: Shape (Hq,), logits without a value of their own; with gradient.
        dropout_p: Share of the weights to drop, in [0, 1); needs ``dropout_seed``.
        dropout_seed: Integer, shape () or (B, Hq).
        q_index: Shape (Sq,) or (B, Sq), integer, global indices of the queries.
        k_index: Shape (Sk,), ascending integers, global indices of the keys.
        layout: Order of the dims of q, k, v, the output and ``partition_spec``.
        return_lse: Also return the logarithm of each row's sum of exponentials.
        mesh: A mesh of ``torch_xla.distributed.spmd``; by default the global one.
        partition_spec: For each dim of q, a mesh axis by name or number, a tuple of them, or None. Batch and
            heads may be split.
        specs: Where tensors beside q, k and v lie, by name: keywords of this function, or names of the mask's
            and the bias's arrays, such as ``{"q_ids": ("data", None)}``. They never change results.
        **mistaken: Keywords of other libraries, such as ``is_causal``: refused, with what says the same here.

    Returns:
        The output in q's layout; with ``return_lse`` also ``lse``, shape (B, Hq, Sq), or (Hq, T) in "thd".

    Raises:
        ValueError: Shapes, devices, options or specs do not fit; a spec splits the sequence or the head dim.
        TypeError: Element types do not fit, ``mask`` is no mask, or a keyword is unknown.

    Example:
        >>> import torch, torch_xla
        >>> from attnspan import causal, segments
        >>> q, k = torch.randn(1, 4, 6, 16, device="xla"), torch.randn(1, 2, 6, 16, device="xla")
        >>> ids = torch.tensor([[0, 0, 0, 1, 1, 1]], device="xla")
        >>> attention(q, k, k, mask=causal() & segments(ids)).shape
        torch.Size([1, 4, 6, 16])
    """
    if mistaken:
        refuse_keywords(attention, mistaken)
    mask = _FULL if mask is None else mask
    _check_tensors(q=q, k=k, v=v)
    check_layout(layout, q, k, v)
    _check_devices(q, k, v)
    places = places_of(q, mesh, partition_spec, layout)
    q, k, v = (_to_bhsd(x, layout) for x in _autocast(q, k, v))
    check_arrays(q, k, v)
    given = Given(softcap, bias, sinks, dropout_p, dropout_seed, q_index, k_index)
    if layout == "thd" and isinstance(mask, Mask) and not isinstance(mask, Prepared):
        _check_packed(mask)
    check_indices(given, q)
    given, placed = lower_all(mask, q, k, given, places, specs or {})
    problem = describe(q, k, v, placed.lowered.bounds)
    options = lower_options(given, q, k, placed, isinstance(mask, (Prepared, Spans)), isinstance(mask, Spans))
    check_scale(scale)
    if places is not None:
        k, v = (_heads_for(x, places.head_parts) for x in (k, v))
    scale = problem.head_dim**-0.5 if scale is None else float(scale)
    out, lse = _attend(q, k, v, placed.lowered.bounds, scale, options or Options(), places)
    out, lse = _from_bhsd(out, layout), lse[0] if layout == "thd" else lse
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, o: Options, places: Places | None
) -> tuple[Tensor, Tensor]:
    seeds = None if o.dropout_seed is None else _seeds(o.dropout_seed, q)
    given = (o.bias, o.sinks, seeds, o.q_index, o.k_index)
    static = (scale, float(o.softcap), o.bias_kind, float(o.dropout_p))
    text = "" if places is None else places.text()
    return forward_op(q, k, v, bounds, *given, *static, text)  # type: ignore[no-any-return]


def _seeds(seed: Tensor, q: Tensor) -> Tensor:
    """Low and high words of the seeds of batch rows and heads, as int32 of the same bits, (B, H, 2)."""
    low = seed & _WORD
    # torch_xla shifts as if it divided, and rounds negative numbers up: what it shifts must divide.
    high = (seed - low) >> 32
    low = low - ((low >> 31) << 32)
    words = torch.stack([low, high], -1).to(torch.int32)
    return split_seeds_op(words, q.shape[0], q.shape[1]) if seed.dim() == 0 else words


def _heads_for(x: Tensor, parts: int) -> Tensor:
    """Keys or values with each head repeated, so that every device has the heads that its queries use."""
    heads = x.shape[1]
    times = 1
    while heads * times % parts != 0:
        times += 1
    return x if times == 1 else x.repeat_interleave(times, 1)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    if not torch.is_autocast_enabled("xla"):
        return tensors
    dtype = torch.get_autocast_dtype("xla")
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _check_devices(*tensors: Tensor) -> None:
    for name, x in zip("qkv", tensors, strict=True):
        if x.device.type != "xla":
            raise DeviceError(
                name,
                expected="an XLA tensor",
                got=f"one on {x.device}",
                remedy='Move it by .to("xla"), or call attnspan.torch.attention',
            )
