"""attnspan in Hugging Face transformers: ``from_pretrained(..., attn_implementation="attnspan")``.

Importing this module calls `enable`, which registers the attention and its mask. transformers describes a
mask as a function of indices that is composed of a few known functions. This module adds a description to
each known function. The mask is then lowered to spans in O(S), once for each kind of layer and step, also in
compiled code. Any other function is evaluated on all pairs, and attnspan warns once.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnspan.base.installed import require
from attnspan.base.recorded import is_recorded
from attnspan.call.options import dense_bias
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import Mask, Prepared, causal, documents, from_dense, full, window
from attnspan.masks.bounds import Spans
from attnspan.torch import attention, compat
from attnspan.torch._lowered import lowered_from
from attnspan.torch._sdpa import of_causal_bias
from attnspan.torch.choice import torchs_backend
from attnspan.torch.dtensor import ShardedMask

require("transformers", "attnspan.integrations.transformers", "transformers", ("5.20", "6"))

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402

from ._all_pairs import AllPairsWarning  # noqa: E402
from ._patches import Patches  # noqa: E402
from ._transformers_masks import NAME, WRITTEN, make_mask, patch_masks, reads_masks  # noqa: E402
from ._transformers_names import CAN_SET, attention_of, unregister  # noqa: E402
from ._transformers_positions import follow, follow_all, running  # noqa: E402

__all__ = [
    "NAME",
    "AllPairsWarning",
    "OwnAttentionWarning",
    "attend",
    "disable",
    "enable",
    "make_mask",
    "plans_only",
    "reads_masks",
]

# Lists of key blocks of unknown sizes, and arguments of paged caches.
_REFUSED = ("topk_indices", "block_indices", "block_table", "read_index", "write_index", "cache")


class OwnAttentionWarning(UserWarning):
    """A part of a model computes attention in its own code, so ``attn_implementation`` has no effect on it.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", OwnAttentionWarning)
    """


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' models.

    Args:
        module: The attention layer. Its ``is_causal`` is used if the call has none.
        query: Queries, shape (B, Hq, Sq, D).
        key: Keys, shape (B, Hkv, Sk, D). Hkv divides Hq.
        value: Values, shape (B, Hkv, Sk, Dv).
        attention_mask: A mask from `make_mask`, a plan on a mesh, or your own mask (B|1, Hq|1, Sq|1, Sk).
            Your own mask is boolean, or floating to add to the scores. With a plan, q, k and v are this
            rank's tokens. With None, queries see all keys. In a causal layer they see the keys up to their
            own, and the last query is at the last key.
        dropout: Probability of dropping a weight. The seed comes from torch's generator.
        scaling: Factor of the scores. Default: 1/sqrt(D).
        is_causal: Overrides the layer's ``is_causal``. It is used only without a mask.
        softcap: Scores x become ``softcap * tanh(x / softcap)``.
        s_aux: Logits of sinks, shape (Hq,).
        sliding_window: Number of keys that a query sees to its left, including itself. In a layer that is not
            causal, it also limits keys to the right. It is used only without a mask, because a mask contains
            it.
        position_bias: Added to the scores, shape (B|1, Hq|1, Sq, Sk).
        sinks: Logit of a sink for each query, shape (B, Hq, Sq, 1).
        indices: Keys that each query sees, shape (B, Sq, n). They restrict a floating ``attention_mask``.
        **given: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (n + 1,) each: starts of packed documents, and the
            end of the last one. Attention ignores other keywords.

    Returns:
        The output, contiguous (B, Sq, Hq, Dv), and None for the weights.

    Raises:
        OptionError: The call asks for weights, a paged cache or a list of blocks. Or there is no mask,
            because the model's ``attn_implementation`` is a name without a mask function.
        ShapeError: Without a mask, a causal layer has more queries than keys.
        TypeError: The mask is neither from `make_mask` nor boolean nor floating.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
        >>> out, _ = attend(torch.nn.Module(), q, k, v, make_mask(1, 4, 4))
        >>> out.shape
        torch.Size([1, 4, 2, 8])
    """
    _refuse(given)
    causal_here = getattr(module, "is_causal", True) if is_causal is None else is_causal
    cu_seqlens = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if running.plans_only:
        expected, got = "the plan that the model received", type(attention_mask).__name__
        remedy = f"Train it without context parallelism, as {type(module).__name__} makes its own mask"
        expect(isinstance(attention_mask, ShardedMask), "attention_mask", expected, got, remedy)
    if attention_mask is None:
        _expect_no_mask(module, causal_here, query.shape[2], key.shape[2])
    if indices is not None:
        attention_mask = _of_chosen(attention_mask, indices, key.shape[2])
    mask, bias = _read(attention_mask, causal_here, sliding_window, query, key, cu_seqlens)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    seed = torch.randint(2**62, (), device=query.device) if dropout else None
    # Dropout depends on positions, which bounds do not contain. Any distinct numbers of queries are
    # sufficient.
    numbered = seed is not None and isinstance(mask, Prepared) and mask.bare
    out, lse = attention(
        query,
        key,
        value,
        mask=mask,
        scale=scaling,
        softcap=softcap,
        bias=None if bias is None else dense_bias(bias),
        sinks=s_aux,
        dropout_p=float(dropout),
        dropout_seed=seed,
        q_index=torch.arange(query.shape[2], device=query.device) if numbered else None,
        return_lse=True,
        backend=torchs_backend(),
    )
    if sinks is not None:  # The sink adds to each query's sum of exponentials.
        out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    return out.transpose(1, 2), None


def _refuse(given: dict[str, Any]) -> None:
    wanted = bool(given.get("output_attentions"))
    remedy = 'Load the model with attn_implementation="eager" to see them'
    expect(not wanted, "output_attentions", "False, because the weights are never stored", "True", remedy)
    for name in _REFUSED:
        remedy = "Load the model with another attn_implementation"
        expect(given.get(name) is None, name, "None", f"a {type(given.get(name)).__name__}", remedy)


def _expect_no_mask(module: torch.nn.Module, is_causal: bool, q_len: int, k_len: int) -> None:
    """Raise if padding, windows and documents would be lost because `make_mask` was not called."""
    name = attention_of(getattr(module, "config", None), NAME)
    known = name == NAME or name in ALL_MASK_ATTENTION_FUNCTIONS
    remedy = f"Load the model with {NAME!r}, or call AttentionMaskInterface.register({name!r}, make_mask)"
    expected = "a mask, which transformers makes only for names with a mask function"
    expect(known, "attention_mask", expected, f"None, and attn_implementation={name!r}", remedy)
    remedy = "Pass is_causal=False if queries attend to other tokens, as in cross-attention"
    fits = not is_causal or q_len <= k_len
    expect(fits, "key", "at least as many keys as queries, {}", k_len, remedy, q_len, error=ShapeError)


def _of_chosen(mask: Any, indices: Tensor, k_len: int) -> Tensor:
    """Restrict a mask of all pairs to the keys in each query's list."""
    fits = isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 4
    remedy = "Load the model with another attn_implementation"
    expect(fits, "attention_mask with indices", "a floating mask with four dims", type(mask).__name__, remedy)
    pairs: Tensor = mask[..., :k_len].expand(len(indices), -1, -1, -1)
    others = torch.ones_like(pairs, dtype=torch.bool).scatter(3, indices[:, None].long(), False)
    return pairs.masked_fill(others, torch.finfo(pairs.dtype).min)


def _read(
    given: Any,
    is_causal: bool,
    sliding_window: int | None,
    q: Tensor,
    k: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
) -> tuple[Any, Tensor | None]:
    """Return the mask of a call, and the numbers that are added to its scores."""
    if isinstance(given, ShardedMask):
        whole, remedy = cu_seqlens == (None, None), "Make the plan from a mask with the documents"
        expect(whole, "cu_seq_lens with a plan", "None", "offsets", remedy)
        return given, None
    mask, bias = _without_offsets(given, is_causal, sliding_window, q, k.shape[2])
    cu_q, cu_k = cu_seqlens
    if cu_q is None:
        return mask, bias
    key, shared = mask.static_key(), cu_k is None or cu_k is cu_q
    if key is None or not shared or type(q) is not Tensor or is_recorded():
        return mask & documents(cu_q, cu_k), bias

    def prepared(cu: Tensor) -> Prepared:
        return (mask & documents(cu)).prepare(q.shape[2], k.shape[2], batch=q.shape[0], like=q)

    # All layers get the same offsets.
    return lowered_from(cu_q, (key, q.shape[0], q.shape[2], k.shape[2], q.device), prepared), bias


def _without_offsets(
    given: Any, is_causal: bool, sliding_window: int | None, q: Tensor, k_len: int
) -> tuple[Mask, Tensor | None]:
    """Return the mask and the numbers of a call without offsets of documents."""
    q_len = q.shape[2]
    if given is None:
        found: Mask = causal() if is_causal and q_len > 1 else full()
        if sliding_window is not None:
            found = found & window(sliding_window - 1, None if is_causal else sliding_window - 1)
        return found, None
    given = of_causal_bias(given, q, k_len)
    if isinstance(given, Mask):
        return given, None
    remedy = "Pass a boolean mask, True for visible pairs, or a floating mask"
    expected = "a mask from make_mask, or a boolean or floating tensor with four dims"
    fits = isinstance(given, Tensor) and given.dim() == 4
    got = f"{given.dim()} dims" if isinstance(given, Tensor) else type(given).__name__
    expect(fits, "attention_mask", expected, got, remedy, error=DtypeError)
    if given.dtype == WRITTEN:
        if given.shape[3] == 0:
            return full(), None
        fits, shape = given.shape[2] == q_len, tuple(given.shape)
        expect(fits, "attention_mask", "bounds for {} queries", shape, remedy, q_len, error=ShapeError)
        written = given.to(torch.int32).unflatten(3, (-1, 2))
        return Prepared(_spans(written, k_len), bare=True), None
    kind = given.dtype == torch.bool or given.is_floating_point()
    expect(kind, "attention_mask", expected, given.dtype, remedy, error=DtypeError)
    given = given[..., :k_len]
    if given.is_floating_point():
        return full(), given
    return from_dense(given.expand(-1, -1, q_len, -1)), None


def _spans(written: Tensor, k_len: int) -> Spans:
    """Read the result of `write`: spans, and in the last pair their number of keys."""
    spans = Spans(written[:, :, :, :-1], k_len)
    if not written.numel():
        return spans
    lowered_for = written[0, 0, 0, -1, 1]
    if is_recorded():
        spans._set(_k_len=lowered_for.to(torch.int64))  # The kernel checks it.
    elif written.is_cpu:
        remedy = "Pass an attention_mask with an entry for each key, cached keys too, or leave it out. "
        remedy += "A model that combines masks needs another attn_implementation"
        got = int(lowered_for)
        expect(got == k_len, "attention_mask", "a mask for {} keys", got, remedy, k_len, error=ShapeError)
    else:
        compat.assert_async(lowered_for == k_len, "attention_mask for a different number of keys")
    return spans


@contextmanager
def plans_only() -> Iterator[None]:
    """Reject calls of this thread without a plan, because a rank's tokens would attend only to each other.

    Use it as a context manager.

    Example:
        >>> q = torch.randn(1, 2, 4, 8)
        >>> with plans_only():
        ...     attend(torch.nn.Module(), q, q, q)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        attnspan.errors.OptionError: attention_mask: expected the plan that the model received
    """
    before, running.plans_only = running.plans_only, True
    try:
        yield
    finally:
        running.plans_only = before


def _give_offsets(model: PreTrainedModel) -> None:
    """Let encoders of packed images and audio call this attention once, with offsets.

    They do so only for flash-attn. Otherwise they loop over the parts and read lengths on the host. They
    check for flash-attn with a function that each module has imported.
    """
    for part in model.modules():
        module: Any = sys.modules.get(type(part).__module__)
        asked: Any = getattr(module, "is_flash_attention_requested", None)
        if asked is not None and _takes_offsets(type(part)):
            if not hasattr(asked, "attnspan"):
                asked = _also_ours(asked)
                _patches.set(module, "is_flash_attention_requested", asked)
            asked.attnspan.add(type(part.config))


def _takes_offsets(kind: type) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    constants = () if code is None else code.co_consts
    return any(isinstance(c, tuple) and "cu_seq_lens_q" in c for c in constants)


def _also_ours(asked: Callable[..., bool]) -> Callable[..., bool]:
    # Modules also call it for other reasons, with other configurations.
    kinds: set[type] = set()

    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        ours = type(config) in kinds and attention_of(config) == NAME and not args and not kwargs
        return ours or asked(config, *args, **kwargs)

    is_flash_attention_requested.attnspan = kinds  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _expect_our_attention(model: PreTrainedModel) -> None:
    """Warn if a model computes attention in its own code, because transformers accepts any name for it.

    Raises if such a model uses transformers' masks.
    """
    models = [x for x in model.modules() if isinstance(x, PreTrainedModel)]
    if attention_of(model.config) != NAME or any(getattr(x, CAN_SET)() for x in models):
        return
    module = vars(sys.modules[type(model).__module__])
    if any(getattr(x, "__module__", "") == "transformers.masking_utils" for x in module.values()):
        _refuse_own_attention(model)
    name = type(model).__name__
    message = f"attnspan: {name} computes attention in its own code, without transformers' masks."
    warnings.warn(message, OwnAttentionWarning, stacklevel=4)


def _refuse_own_attention(model: PreTrainedModel) -> None:
    expected, remedy = "a model that calls transformers' AttentionInterface", 'Load it with "eager"'
    got = f"{type(model).__name__}, which has its own attention"
    expect(False, "attn_implementation", expected, got, remedy)


def _expect_no_table(model: PreTrainedModel) -> None:
    """Raise if a model selects its attention class from a table that has only transformers' own names."""
    if attention_of(model.config) != NAME:
        return
    for table in vars(sys.modules[type(model).__module__]).values():
        if type(table) is dict and "eager" in table and NAME not in table:
            _refuse_own_attention(model)


def _around_making_a_model() -> None:
    init, post_init = PreTrainedModel.__init__, PreTrainedModel.post_init

    @functools.wraps(init)
    def look_and_init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _expect_no_table(self)

    @functools.wraps(post_init)
    def and_look(self: PreTrainedModel) -> None:
        post_init(self)  # type: ignore[no-untyped-call]
        follow(_patches, type(self), NAME)
        _expect_our_attention(self)
        _give_offsets(self)

    _patches.set(PreTrainedModel, "__init__", look_and_init)
    _patches.set(PreTrainedModel, "post_init", and_look)


_patches = Patches("transformers")


def enable() -> None:
    """Register the name "attnspan" in transformers, and patch transformers' functions that make masks.

    The import of this module calls it. You need it only after `disable`.

    Raises:
        ImportError: transformers lacks a function that attnspan patches.

    Example:
        >>> enable()  # It is enabled already.
    """
    _patches.apply(_enable)


def _enable() -> None:
    patch_masks(_patches)
    _around_making_a_model()
    follow_all(_patches, NAME)
    for interface, ours in ((AttentionInterface, attend), (AttentionMaskInterface, make_mask)):
        interface.register(NAME, ours)
        _patches.later(functools.partial(unregister, interface, NAME))


def disable() -> None:
    """Undo `enable`. transformers then has its own functions again, and does not know the name "attnspan".

    Models that were loaded with "attnspan" raise an error when they run, until you call `enable`, or
    ``model.set_attn_implementation`` with another name.

    Raises:
        UsageError: Another package has patched the same function since.

    Example:
        >>> disable()
        >>> "attnspan" in ALL_MASK_ATTENTION_FUNCTIONS
        False
        >>> enable()
    """
    _patches.undo()


enable()
