"""The public ``attention`` on XLA tensors. It lowers the mask, derives the specs of all tensors, and runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnspan.call import Call, check_keywords
from attnspan.call.backend import asked
from attnspan.call.options import Given, Options
from attnspan.errors import DeviceError, expect
from attnspan.masks import Prepared
from attnspan.torch import attention as torchs
from attnspan.torch._front import TorchFront, autocast, from_bhsd, to_bhsd

from .lowering import lower_all
from .ops import forward_op, split_seeds_op
from .places import Places, places_of

_WORD = 0xFFFFFFFF


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Any = None,
    partition_spec: tuple[Any, ...] | None = None,
    specs: Mapping[str, tuple[Any, ...]] | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attnspan.torch.attention` on XLA tensors, as a part of the XLA graph that torch_xla builds.

    Arguments, results and errors are the same as in `attnspan.torch.attention`, except for the differences
    below. Values are not read when the graph is built. If values are invalid (ids in more runs than promised,
    illegal bounds), the affected queries become NaN instead of raising an error. Calls that differ only in
    values share a trace.

    With ``partition_spec``, each device computes its own batch elements and heads, and q, k and v are not
    gathered. Every other tensor (segment ids, bounds, biases, sinks, seeds, indices) is split as q is, along
    the axes that it shares with q. With GQA, the query heads may be split further than the key heads.

    Args:
        q: Queries, an XLA tensor of shape (B, Hq, Sq, D) in layout "bhsd".
        k: Keys, (B, Hkv, Sk, D).
        v: Values, (B, Hkv, Sk, Dv).
        mesh: A mesh of ``torch_xla.distributed.spmd``. Default: the global mesh.
        partition_spec: For each dim of q in ``layout``, a mesh axis (its name or number), several axes, or
            None. You can split the batch and the heads. Splitting the sequence or the head dim raises.
        specs: Partition specs of tensors other than q, k and v, keyed by name. Names are keywords of this
            function, or arrays of the mask and the bias, such as ``{"q_ids": ("data", None)}``. Specs never
            change results.
        **options: Keywords of `attnspan.torch.attention` except ``backend``. Arrays of the mask are XLA
            tensors or NumPy arrays. The function of ``from_predicate`` receives XLA tensors.

    Returns:
        The output, and with ``return_lse`` also the log-sum-exp, as in `attnspan.torch.attention`.

    Raises:
        ValueError: Shapes, devices, specs or options do not fit, or a block of `attnspan.backend` is active.
        TypeError: Dtypes do not fit, ``mask`` is not a mask, or a keyword is unknown.

    Example:
        >>> import torch, torch_xla
        >>> from attnspan import causal, segments
        >>> q, k = torch.randn(1, 4, 6, 16, device="xla"), torch.randn(1, 2, 6, 16, device="xla")
        >>> ids = torch.tensor([[0, 0, 0, 1, 1, 1]], device="xla")
        >>> attention(q, k, k, mask=causal() & segments(ids)).shape
        torch.Size([1, 4, 6, 16])
    """
    check_keywords(attention, options)
    named, remedy = asked(None), "Call it outside of the attnspan.backend block, because XLA has one backend"
    expect(named is None, "backend", "None", named, remedy)
    return _run(_Front(mesh, partition_spec, specs or {}), q, k, v, **options)  # type: ignore[no-any-return]


# `check_keywords` reads the keywords here, for its remedies.
_OWN = attention.__kwdefaults__ or {}
attention.__kwdefaults__ = {**(torchs.__kwdefaults__ or {}), **_OWN}
del attention.__kwdefaults__["backend"]


def _run(
    front: "_Front",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    call = Call.of(front, q, k, v, Given(**options), mask=mask, scale=scale, layout=layout)
    k, v, places = call.k, call.v, front.spots
    if places is not None:
        k, v = (_heads_for(x, places.head_parts) for x in (k, v))
    lowered = call.options or Options()
    if lowered.dropout_seed is not None:
        lowered = lowered._replace(dropout_seed=_seeds(lowered.dropout_seed, call.q))
    text = "" if places is None else places.text()
    out, lse = forward_op(call.q, k, v, call.bounds, float(call.scale), *lowered, text)
    return from_bhsd(out, lse, layout, return_lse)


class _Front(TorchFront):
    """Front for XLA tensors, which are split as the specs say."""

    spots: Places | None = None

    def __init__(self, mesh: Any, partition_spec: Any, specs: Mapping[str, tuple[Any, ...]]) -> None:
        self.spec, self.specs = (mesh, partition_spec), specs

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        del mask, given
        for name, x in (("q", q), ("k", k), ("v", v)):
            got, remedy = (
                f"a tensor on {x.device}",
                'Move it with .to("xla"), or call attnspan.torch.attention',
            )
            expect(x.device.type == "xla", name, "an XLA tensor", got, remedy, error=DeviceError)
        self.spots = places_of(q, *self.spec, layout)
        q, k, v = (to_bhsd(x, layout) for x in autocast(q, k, v))
        return q, k, v

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared, Given]:
        given, placed = lower_all(mask, q, k, given, self.spots, self.specs)
        return placed, given

    def bounds(self, placed: Prepared, mask: Any, q: Any) -> tuple[Any, None]:
        del mask, q
        return placed.lowered.bounds, None


def _seeds(seed: Tensor, q: Tensor) -> Tensor:
    """Return low and high words of the seeds of batch elements and heads, as int32 bits, (B, H, 2)."""
    low = seed & _WORD
    # torch_xla implements shifts as divisions and rounds negative numbers up, so a shift must divide evenly.
    high = (seed - low) >> 32
    low = low - ((low >> 31) << 32)
    words = torch.stack([low, high], -1).to(torch.int32)
    return split_seeds_op(words, q.shape[0], q.shape[1]) if seed.dim() == 0 else words


def _heads_for(x: Tensor, parts: int) -> Tensor:
    """Repeat each head of keys or values, so that every device has the heads that its queries use."""
    heads = x.shape[1]
    times = 1
    while heads * times % parts != 0:
        times += 1
    return x if times == 1 else x.repeat_interleave(times, 1)
