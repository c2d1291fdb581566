"""Attention as diffusers' models call it. Masks become spans, and floating masks become a bias."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnspan.call import MAX_LENGTH
from attnspan.call.options import dense_bias
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import Mask, Prepared, causal, from_block_mask, from_dense, keys
from attnspan.masks.bounds import Spans
from attnspan.torch import attention, compat
from attnspan.torch._lowered import lowered_from
from attnspan.torch._sdpa import of_causal_bias
from attnspan.torch.choice import torchs_backend

#: The name of this attention in diffusers.
NAME = "attnspan"

# Number of runs of valid keys that compiled code encodes as spans. Padded text and an image have two.
# Compiled code computes the scores of keys after the last span, and a bias hides padding.
_RUNS = 4


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Compute attention for diffusers' backends. All attention of an enabled model calls this function.

    Args:
        query: Queries, shape (B, Sq, H, D).
        key: Keys, shape (B, Sk, Hkv, D).
        value: Values, shape (B, Sk, Hkv, Dv).
        attn_mask: None, a `BlockMask` of FlexAttention, a mask of attnspan, or a tensor. A tensor of shape
            (B, Sk), boolean or integer, hides padding where it is 0. Other tensors broadcast to (B, H, Sq,
            Sk): boolean with True for visible pairs, or floating to add to the scores. A query that sees no
            key has output 0.
        dropout_p: Probability of dropping a weight, in [0, 1). The seed comes from torch's generator.
        is_causal: Query i sees keys 0..i, also if Sq != Sk. You cannot combine it with ``attn_mask``.
        scale: Factor of the scores. Default: 1/sqrt(D).
        enable_gqa: Allow H to be a multiple of Hkv.
        return_lse: Also return the log-sum-exp of each query's scores.
        _parallel_config: None, or the object that `attnspan.integrations.diffusers.parallelize` gave to the
            processors. Its ``attend`` is called instead.

    Returns:
        The output, contiguous (B, Sq, H, Dv). With ``return_lse`` also lse, float32 (B, Sq, H).

    Raises:
        ValueError: Sizes or options do not fit, or the parallel configuration is diffusers' own.
        TypeError: Dtypes do not fit, or ``attn_mask`` is not a mask.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 4, 16).unbind()
        >>> padding = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
        >>> attend(q, k, v, padding).shape
        torch.Size([2, 8, 4, 16])
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    remedy = "Pass enable_gqa=True to share key heads"
    wanted = "as many key heads as query heads"
    expect(enable_gqa or heads == kv_heads, "heads", wanted, (heads, kv_heads), remedy, error=ShapeError)
    remedy = "Combine masks with causal() & mask, and pass the result as attn_mask"
    expect(not is_causal or attn_mask is None, "is_causal", "is_causal or attn_mask", "both", remedy)
    if _parallel_config is not None:
        check_config(_parallel_config)
        remedy = "Call attend without a configuration"
        expect(not return_lse, "return_lse", "False over several ranks", "True", remedy)
        options = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p}
        return _parallel_config.attend(query, key, value, attn_mask=attn_mask, **options)
    if torch.compiler.is_compiling():  # Mochi's lengths are data, so the compiler knows no limit.
        for x in (query, key):
            compat.check_size(x.shape[1] <= MAX_LENGTH)
    mask, bias = read_mask(attn_mask, query, key)
    q_index = None
    if is_causal:
        mask, q_index = causal(), torch.arange(query.shape[1], device=query.device)
    found = attention(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        bias=None if bias is None else dense_bias(bias),
        dropout_p=float(dropout_p),
        dropout_seed=torch.randint(2**62, (), device=query.device) if dropout_p else None,
        q_index=q_index,
        layout="bshd",
        return_lse=True,
        backend=torchs_backend(),
    )
    return (found[0], found[1].transpose(1, 2)) if return_lse else found[0]


def check_config(config: Any) -> None:
    """Raise an OptionError if a parallel configuration is not attnspan's."""
    remedy = "Call attnspan.integrations.diffusers.parallelize instead of enable_parallelism"
    wanted, got = "None or the configuration from parallelize", type(config).__name__
    expect(hasattr(config, "attend"), "parallel config", wanted, got, remedy)


def read_mask(given: Any, q: Tensor, k: Tensor) -> tuple[Mask | Spans | None, Tensor | None]:
    """Read a call's mask: the keys that its queries see, and the numbers that are added to their scores.

    Args:
        given: None, a `BlockMask`, a mask of attnspan, or a tensor. A tensor of shape (B, Sk), boolean or
            integer, hides padding where it is 0. Other tensors broadcast to (B, H, Sq, Sk): boolean with True
            for visible pairs, or floating to add to the scores.
        q: Shape (B, Sq, H, D).
        k: Shape (B, Sk, Hkv, D).

    Returns:
        A mask, or None for all keys. And a bias that broadcasts to (B, H, Sq, Sk), or None.

    Raises:
        TypeError: ``given`` has another type, or has integers for pairs.
        ValueError: Its shape does not broadcast.
    """
    if given is None or isinstance(given, Mask | Spans):
        return given, None
    given = of_causal_bias(given, q.transpose(1, 2), k.shape[1])
    if isinstance(given, Mask):
        return given, None
    if isinstance(given, BlockMask):
        return from_block_mask(given), None
    remedy = "Pass a boolean or floating tensor, a BlockMask or a mask of attnspan"
    expect(isinstance(given, Tensor), "attn_mask", "a mask", type(given).__name__, remedy, error=DtypeError)
    own, sizes = given, (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    given = _in_four_dims(given, sizes)
    if given.is_floating_point():
        return None, given
    if given.shape[2] == 1:
        return _of_keys(given, q.device)
    if q.device.type != "cpu" and torch.compiler.is_compiling():
        return None, _hiding(given)  # Compiled code returns NaN for more runs than it has spans.
    if torch.compiler.is_compiling():
        return from_dense(given), None

    def prepared(x: Tensor) -> Prepared:
        visible = _in_four_dims(x, sizes)
        lowered = {"batch": visible.shape[0], "heads": visible.shape[1], "like": q}
        return from_dense(visible).prepare(q.shape[1], k.shape[1], **lowered)

    return lowered_from(own, (*sizes, q.device), prepared), None


def _in_four_dims(given: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """Return a mask as the smallest (B|1, H|1, Sq|1, Sk). Integers for keys become booleans."""
    own = tuple(given.shape)
    if len(own) == 2 and own[0] == sizes[0] and own[1] == sizes[3]:
        integers = not given.is_floating_point() and given.dtype != torch.bool
        given = given.ne(0)[:, None, None] if integers else given[:, None, None]
    remedy = "Convert it with .bool()"
    taken = given.dtype == torch.bool or given.is_floating_point()
    wanted = "a boolean or floating tensor, or integers of shape (B, Sk)"
    expect(taken, "attn_mask", wanted, str(given.dtype), remedy, error=DtypeError)
    fits = given.dim() <= 4
    given = given[(None,) * (4 - given.dim())]
    # Compared with 1 first, because a traced size that is known to be 1 then needs no guard.
    fits = fits and all(n == 1 or n == full for n, full in zip(given.shape, sizes, strict=True))
    wanted, remedy = "shape (B, Sk) or one that broadcasts to {}", "Its last dims are queries and keys"
    expect(fits, "attn_mask", wanted, own, remedy, sizes, error=ShapeError)
    for axis in (0, 1, 2):  # Expanded axes repeat the same values.
        if given.shape[axis] != 1 and given.stride(axis) == 0:
            given = given.narrow(axis, 0, 1)
    return given if given.shape[3] != 1 else given.expand(-1, -1, -1, sizes[3])


def _of_keys(visible: Tensor, device: torch.device) -> tuple[Mask | None, Tensor | None]:
    """Encode booleans (B|1, H|1, 1, Sk), exact for any pattern, without materializing all pairs."""
    if visible.shape[1] != 1 or device.type != "cpu":
        return None, _hiding(visible)
    valid = visible[:, 0, 0]
    if not torch.compiler.is_compiling():
        return keys(valid), None
    before = torch.nn.functional.pad(valid, (1, 0))[:, :-1]
    run = (valid & ~before).cumsum(-1)
    return keys(valid | (run >= _RUNS), max_runs=_RUNS), _hiding(visible)


def _hiding(visible: Tensor) -> Tensor:
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, -torch.inf)
