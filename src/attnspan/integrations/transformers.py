"""attnspan in Hugging Face transformers: ``from_pretrained(..., attn_implementation="attnspan")``.

Importing this module registers the attention and its mask. transformers describes a mask as a function of
indices, made of a few known ones; here each known function also says what it is, so that the mask is lowered
to spans in O(S), once for each kind of layer and step, inside compiled code too. Any other function is
evaluated on all pairs, which is said once.
"""

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnspan.base.installed import require, require_names
from attnspan.base.recorded import is_recorded
from attnspan.call.options import dense_bias
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import Mask, Prepared, causal, documents, from_dense, full, window
from attnspan.masks.bounds import Spans
from attnspan.torch import attention, compat
from attnspan.torch._sdpa import of_causal_bias
from attnspan.torch.choice import torchs_backend
from attnspan.torch.dtensor import ShardedMask

require("transformers", "attnspan.integrations.transformers", "transformers", ("5.20", "6"))

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402

from ._transformers_masks import NAME, WRITTEN, AllPairsWarning, make_mask  # noqa: E402
from ._transformers_positions import follow, follow_all  # noqa: E402

__all__ = ["NAME", "AllPairsWarning", "OwnAttentionWarning", "attend", "make_mask", "plans_only"]

_CAN_SET = "_can_set_attn_implementation"
require_names(PreTrainedModel, [_CAN_SET], "attnspan.integrations.transformers", "transformers")

# Lists of blocks of keys, whose sizes nobody tells, and what pages the cache.
_REFUSED = ("topk_indices", "block_indices", "block_table", "read_index", "write_index", "cache")


class OwnAttentionWarning(UserWarning):
    """A part of a model computes attention by code of its own: the name of another one changes nothing."""


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
    """Attention as transformers' models call it.

    Args:
        module: The attention layer; its ``is_causal`` counts where the call does not say.
        query: Shape (B, Hq, Sq, D), as key (B, Hkv, Sk, D) and value (B, Hkv, Sk, Dv); Hkv divides Hq.
        attention_mask: What `make_mask` returned; or a plan on a mesh, where q, k and v are this rank's rows;
            or a mask of one's own (B|1, Hq|1, Sq|1, Sk), bool, or floating, which is added to the scores.
            None: all keys, or in a causal layer those up to the query's own, where the last query is at the
            last key.
        dropout: Share of the weights to drop; the seed comes from torch's generator.
        scaling: Factor of the scores; 1/sqrt(D) by default.
        is_causal: See ``module``.
        softcap: Scores x become ``softcap * tanh(x / softcap)``.
        s_aux: Shape (Hq,): logits of sinks.
        sliding_window: How many keys a query sees to its left, itself among them, and in a layer that is not
            causal to its right too. Counts only without a mask, which has it already.
        position_bias: Shape (B|1, Hq|1, Sq, Sk), added to the scores.
        sinks: Shape (B, Hq, Sq, 1): a logit of a sink for each query.
        indices: Shape (B, Sq, n): the only keys that each query sees, of those that a floating
            ``attention_mask`` lets it see.
        **given: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (n + 1,) each: where packed documents start, and the
            last one ends. Others are of no concern to attention.

    Returns:
        The output, contiguous (B, Sq, Hq, Dv), and None for the weights.

    Raises:
        OptionError: The weights are wanted, or a cache in pages, or attention to a list of blocks. Or there
            is no mask, because the model's ``attn_implementation`` is a name without a mask function.
        ShapeError: No mask, a causal layer and more queries than keys.
        TypeError: The mask is neither of `make_mask` nor boolean nor floating.
    """
    _refuse(given)
    causal_here = getattr(module, "is_causal", True) if is_causal is None else is_causal
    cu_seqlens = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if _local.plans_only:
        expected, got = "the plan that the model was given", type(attention_mask).__name__
        remedy = f"{type(module).__name__} makes its own mask: train this model without context parallelism"
        expect(isinstance(attention_mask, ShardedMask), "attention_mask", expected, got, remedy)
    if attention_mask is None:
        _expect_no_mask(module, causal_here, query.shape[2], key.shape[2])
    if indices is not None:
        attention_mask = _of_chosen(attention_mask, indices, key.shape[2])
    mask, bias = _read(attention_mask, causal_here, sliding_window, query, key, cu_seqlens)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    seed = torch.randint(2**62, (), device=query.device) if dropout else None
    # Dropout goes by position, which bounds alone do not tell. Any numbers of rows will do.
    numbered = seed is not None and isinstance(mask, Prepared)
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
    if sinks is not None:  # It takes its share of each row's sum of exponentials.
        out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    return out.transpose(1, 2), None


def _refuse(given: dict[str, Any]) -> None:
    wanted = bool(given.get("output_attentions"))
    remedy = 'Load the model with attn_implementation="eager" to see them'
    expect(not wanted, "output_attentions", "False: the weights are never stored", "True", remedy)
    for name in _REFUSED:
        remedy = "Load the model with another attn_implementation"
        expect(given.get(name) is None, name, "None", f"a {type(given.get(name)).__name__}", remedy)


def _expect_no_mask(module: torch.nn.Module, is_causal: bool, q_len: int, k_len: int) -> None:
    """Padding, windows and documents were lost if nobody asked `make_mask` for them."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    known = name == NAME or name in ALL_MASK_ATTENTION_FUNCTIONS
    remedy = f"Load the model with {NAME!r}, or call AttentionMaskInterface.register({name!r}, make_mask)"
    expected = "a mask, which transformers makes only for names with a mask function"
    expect(known, "attention_mask", expected, f"None, and attn_implementation={name!r}", remedy)
    remedy = "Pass is_causal=False for attention to other tokens than the queries' own"
    fits = not is_causal or q_len <= k_len
    expect(fits, "key", "at least as many keys as queries, {}", k_len, remedy, q_len, error=ShapeError)


def _of_chosen(mask: Any, indices: Tensor, k_len: int) -> Tensor:
    """A mask of all pairs, in which a query sees no other keys than those of its list."""
    fits = isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 4
    remedy = "Load the model with another attn_implementation"
    expect(fits, "attention_mask with indices", "a floating one of four dims", type(mask).__name__, remedy)
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
    """The mask of a call, and what is added to its scores."""
    if isinstance(given, ShardedMask):
        whole, remedy = cu_seqlens == (None, None), "Plan with a mask that has the documents"
        expect(whole, "cu_seq_lens with a plan", "None", "offsets", remedy)
        return given, None
    q_len, k_len = q.shape[2], k.shape[2]
    packed = None if cu_seqlens[0] is None else _documents(cu_seqlens[0], cu_seqlens[1])
    if given is None:
        found: Mask = causal() if is_causal and q_len > 1 else full()
        if sliding_window is not None:
            found = found & window(sliding_window - 1, None if is_causal else sliding_window - 1)
        return found if packed is None else found & packed, None
    given = of_causal_bias(given, q, k_len)
    if isinstance(given, Mask):
        return given if packed is None else given & packed, None
    remedy = "Pass a boolean mask, True for what may be seen, or a floating one"
    expected = "a mask of make_mask, or a boolean or floating tensor of four dims"
    fits = isinstance(given, Tensor) and given.dim() == 4
    got = f"{given.dim()} dims" if isinstance(given, Tensor) else type(given).__name__
    expect(fits, "attention_mask", expected, got, remedy, error=DtypeError)
    if given.dtype == WRITTEN:
        if given.shape[3] == 0:
            return full() if packed is None else packed, None
        fits, shape = given.shape[2] == q_len, tuple(given.shape)
        expect(fits, "attention_mask", "bounds for {} rows", shape, remedy, q_len, error=ShapeError)
        written = given.to(torch.int32).unflatten(3, (-1, 2))
        prepared = Prepared(_spans(written, k_len), bare=True)
        return prepared if packed is None else prepared & packed, None
    kind = given.dtype == torch.bool or given.is_floating_point()
    expect(kind, "attention_mask", expected, given.dtype, remedy, error=DtypeError)
    given = given[..., :k_len]
    if given.is_floating_point():
        return full() if packed is None else packed, given
    found = from_dense(given.expand(-1, -1, q_len, -1))
    return found if packed is None else found & packed, None


def _spans(written: Tensor, k_len: int) -> Spans:
    """Read what `write` wrote: spans, and in the last pair the number of keys that they are for."""
    spans = Spans(written[:, :, :, :-1], k_len)
    if not written.numel():
        return spans
    lowered_for = written[0, 0, 0, -1, 1]
    if is_recorded():
        spans._set(_k_len=lowered_for.to(torch.int64))  # The kernel looks.
    elif written.is_cpu:
        remedy = "Give attention_mask an entry for each key, those of a cache too, or leave it out. "
        remedy += "A model that puts masks together needs another attn_implementation"
        got = int(lowered_for)
        expect(got == k_len, "attention_mask", "a mask for {} keys", got, remedy, k_len, error=ShapeError)
    else:
        compat.assert_async(lowered_for == k_len, "attention_mask of another number of keys")
    return spans


class _Local(threading.local):
    def __init__(self) -> None:
        # In the thread's own dict, where compilers guard on it.
        self.plans_only = False


_local = _Local()


@contextmanager
def plans_only() -> Iterator[None]:
    """Refuse calls of this thread without a plan: a rank's rows would attend to each other alone."""
    before, _local.plans_only = _local.plans_only, True
    try:
        yield
    finally:
        _local.plans_only = before


# Of the last few tensors: the mask keeps its tensor, so that nothing else can have the number.
_known: dict[int, Mask] = {}
_KEPT = 4


def _documents(cu_q: Tensor, cu_k: Tensor | None) -> Mask:
    """One mask for all layers that are given one tensor: a mask remembers how it was lowered."""
    if cu_k is not None and cu_k is not cu_q:
        return documents(cu_q, cu_k)
    if is_recorded():
        return documents(cu_q)
    found = _known.get(id(cu_q))
    if found is None:
        found = documents(cu_q)
        for old in list(_known)[: 1 - _KEPT]:  # Other threads may do the same.
            _known.pop(old, None)
        _known[id(cu_q)] = found
    return found


def _give_offsets(model: PreTrainedModel) -> None:
    """Let encoders of packed images and sound call this attention once, with offsets.

    They do so for flash-attn alone, and else loop over the parts, whose lengths they read on the host. They
    ask by a function that each module imported by name.
    """
    for part in model.modules():
        module: Any = sys.modules.get(type(part).__module__)
        asked: Any = getattr(module, "is_flash_attention_requested", None)
        if asked is not None and _takes_offsets(type(part)):
            if not hasattr(asked, "attnspan"):
                asked = module.is_flash_attention_requested = _also_ours(asked)
            asked.attnspan.add(type(part.config))


def _takes_offsets(kind: type) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    constants = () if code is None else code.co_consts
    return any(isinstance(c, tuple) and "cu_seq_lens_q" in c for c in constants)


def _also_ours(asked: Callable[..., bool]) -> Callable[..., bool]:
    # Modules ask for other reasons too, with other configurations.
    kinds: set[type] = set()

    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        ours = type(config) in kinds and config._attn_implementation == NAME and not args and not kwargs
        return ours or asked(config, *args, **kwargs)

    is_flash_attention_requested.attnspan = kinds  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _expect_our_attention(model: PreTrainedModel) -> None:
    """transformers accepts the name for models that compute attention by code of their own, too."""
    models = [x for x in model.modules() if isinstance(x, PreTrainedModel)]
    if model.config._attn_implementation != NAME or any(getattr(x, _CAN_SET)() for x in models):
        return
    module = vars(sys.modules[type(model).__module__])
    if any(getattr(x, "__module__", "") == "transformers.masking_utils" for x in module.values()):
        _refuse_own_attention(model)
    name = type(model).__name__
    message = f"attnspan: {name} computes attention by code of its own, without masks of transformers."
    warnings.warn(message, OwnAttentionWarning, stacklevel=4)


def _refuse_own_attention(model: PreTrainedModel) -> None:
    expected, remedy = "a model that calls transformers' AttentionInterface", 'Load it with "eager"'
    got = f"{type(model).__name__}, whose attention is its own"
    expect(False, "attn_implementation", expected, got, remedy)


def _expect_no_table(model: PreTrainedModel) -> None:
    """Some models choose a class of attention by the name, from a table that has transformers' own names."""
    if model.config._attn_implementation != NAME:
        return
    for table in vars(sys.modules[type(model).__module__]).values():
        if type(table) is dict and "eager" in table and NAME not in table:
            _refuse_own_attention(model)


def _around_making_a_model() -> None:
    init, post_init = PreTrainedModel.__init__, PreTrainedModel.post_init
    if hasattr(post_init, "attnspan"):
        return

    @functools.wraps(init)
    def look_and_init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _expect_no_table(self)

    PreTrainedModel.__init__ = look_and_init  # type: ignore[method-assign]

    @functools.wraps(post_init)
    def and_look(self: PreTrainedModel) -> None:
        post_init(self)  # type: ignore[no-untyped-call]
        follow(type(self), NAME)
        _expect_our_attention(self)
        _give_offsets(self)

    and_look.attnspan = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = and_look  # type: ignore[method-assign]


_around_making_a_model()
follow_all(NAME)
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
