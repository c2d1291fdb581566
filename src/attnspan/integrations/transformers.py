"""attnspan in Hugging Face transformers: ``from_pretrained(..., attn_implementation="attnspan")``.

Importing this module registers the attention and its mask. transformers describes a mask as a function of
indices, made of a few known ones; here each known function also says what it is, so that the mask is lowered
to spans in O(S), once for each kind of layer and step, inside compiled code too. Any other function is
evaluated on all pairs, which is said once.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._installed import require
from ..errors import DtypeError, ShapeError, expect
from ..masks import Mask, Prepared, causal, documents, from_dense, from_predicate, full, groups, keys, window
from ..masks import segments as same_id
from ..options import dense_bias
from ..spans import Spans
from ..torch import attention
from ..torch._watched import constant_when_traced

require("transformers", "attnspan.integrations.transformers", "transformers")

from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    masking_utils,
)

__all__ = ["NAME", "UnknownMaskWarning", "attend", "make_mask"]

#: The name under which transformers knows this attention.
NAME = "attnspan"

# What attends by a list of keys of its own, which is no mask of spans, and what pages the cache.
_REFUSED = ("indices", "topk_indices", "block_table", "read_index", "write_index", "cache")


class UnknownMaskWarning(UserWarning):
    """A mask function is evaluated on all pairs of queries and keys, because nothing says what it is."""


class _Known:
    """A mask function of transformers, with what it is: called, it is the function itself."""

    def __init__(self, fn: Callable[..., Any], kind: str, *data: Any) -> None:
        self.fn, self.kind, self.data = fn, kind, data

    def __call__(self, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.fn(batch_idx, head_idx, q_idx, kv_idx)


def _say_what_they_are() -> None:
    """Let the functions that make mask functions return ones that say what they are.

    Closures would tell it too, but the compiler does not let a program look into them.
    """
    kinds = {
        "and_masks": "and",
        "or_masks": "or",
        "sliding_window_overlay": "window",
        "sliding_window_bidirectional_overlay": "window both ways",
        "chunked_overlay": "chunks",
        "blockwise_overlay": "groups",
        "padding_mask_function": "keys",
        "packed_sequence_mask_function": "segments",
        "remap_positions_for_packed_sequence": "positions",
    }
    for name, kind in kinds.items():
        make = getattr(masking_utils, name)
        if not hasattr(make, "attnspan_kind"):
            setattr(masking_utils, name, _describing(make, kind))


def _describing(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def described(*data: Any) -> _Known:
        return _Known(make(*data), kind, *data)

    described.__name__, described.__doc__ = make.__name__, make.__doc__
    described.__wrapped__ = make  # type: ignore[attr-defined]
    described.attnspan_kind = kind  # type: ignore[attr-defined]
    return described


class _Sizes(NamedTuple):
    """The part of the whole sequence that a mask is made for.

    Keys are numbered from the first that is here: windows and documents do not change with it.
    """

    batch: int
    q_len: int
    k_len: int
    first_key: Any  # index of the first key in the whole sequence
    q_index: Tensor  # (q_len,), counted from the first key
    positions: Tensor | None = None  # (B, S), within packed documents

    @property
    def whole(self) -> Any:
        """Length of the sequence up to the last key."""
        return self.first_key + self.k_len


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """The mask of one kind of layer for one step, as transformers asks for it.

    Args:
        batch_size, q_length, kv_length: Rows, query tokens and key tokens.
        q_offset: Index of the first query in the whole sequence, an int or an integer tensor of one element.
        kv_offset: Index of the first key.
        mask_function: What a query may see, a function of (batch, head, query, key) indices.
        attention_mask: Bool (batch_size, tokens): True for tokens that may be seen. None: all.
        device: Where the mask is wanted.

    Returns:
        The bounds of its spans, int32 of shape (batch_size or 1, 1, q_length, 2 * R), as `attend` takes
        them. In compiled code R is 8 with ``attention_mask``; elsewhere it is the smallest that fits.

    Raises:
        OptionError: Data break a promise, such as blocks of tokens that are not contiguous.

    Example:
        >>> make_mask(1, 3, 3).tolist()
        [[[[0, 1], [0, 2], [0, 3]]]]
    """
    q_index = torch.arange(q_length, device=device) + (q_offset - kv_offset)
    sizes = _Sizes(batch_size, q_length, kv_length, kv_offset, q_index)
    mask = _lower(mask_function, sizes)
    if attention_mask is not None:
        mask = mask & keys(_local(attention_mask.to(torch.bool), sizes, fill=False))
    lower = mask.spans if torch.compiler.is_compiling() else mask.prepare
    like = torch.empty(0, device=device)
    found = lower(q_length, kv_length, batch=batch_size, q_index=q_index, like=like).lowered.bounds
    return torch.as_tensor(found, device=device).flatten(3)


def _local(x: Tensor, sizes: _Sizes, fill: Any) -> Tensor:
    """The entries (B, k_len) of the keys that are here; tokens that it does not describe have ``fill``."""
    missing = sizes.whole - x.shape[1]
    x = torch.nn.functional.pad(x, (0, missing), value=fill) if missing > 0 else x
    return x[:, sizes.first_key : sizes.whole]


def _lower(fn: Callable[..., Any], sizes: _Sizes) -> Mask:
    """The mask that a mask function describes."""
    if fn is masking_utils.causal_mask_function:
        return causal()
    if fn is masking_utils.bidirectional_mask_function:
        return full()
    kind, data = (fn.kind, fn.data) if isinstance(fn, _Known) else ("", ())
    if kind in ("and", "or"):
        found = _lower(data[0], sizes)
        for part in data[1:]:
            found = found & _lower(part, sizes) if kind == "and" else found | _lower(part, sizes)
        return found
    if kind == "window":
        return window(data[0] - 1, None)
    if kind == "window both ways":
        return window(data[0], data[0])
    if kind == "chunks":
        return _chunks(data[0], data[1], sizes)
    if kind == "groups":
        return groups(_local(data[0], sizes, fill=-1))
    if kind == "keys":
        return keys(_local(data[0], sizes, fill=False))
    if kind == "segments":
        return same_id(data[0])
    if kind == "positions":  # Differences of positions are those of indices within a document, as are masks.
        return _lower(data[0], sizes._replace(positions=data[1]))
    _say_once(_name_of(fn))
    return from_predicate(_Shifted(fn, sizes.first_key))


def _chunks(size: int, left_padding: Tensor, sizes: _Sizes) -> Mask:
    """Chunks that start at each row's first token, or at each document's."""
    if sizes.positions is not None:
        ids = sizes.positions // size
        changes = ids.diff(dim=-1, prepend=ids[:, :1]) != 0
        return same_id(changes.cumsum(-1))
    first = left_padding[:, None] - sizes.first_key
    index = torch.arange(sizes.k_len, device=left_padding.device)
    return same_id((sizes.q_index - first) // size, (index - first) // size)


class _Shifted:
    """A mask function of indices in the whole sequence as one of indices from the first key on."""

    def __init__(self, fn: Callable[..., Any], first_key: Any) -> None:
        self.fn, self.first_key = fn, first_key

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible: Tensor = self.fn(b, h, q + self.first_key, k + self.first_key)
        return visible


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


_said: set[str] = set()


@constant_when_traced
def _say_once(name: str) -> None:
    if name not in _said:
        _said.add(name)
        warnings.warn(
            f"attnspan: the mask function {name} is not one of transformers' own, so it is evaluated on all "
            "pairs of queries and keys at each step.",
            UnknownMaskWarning,
            stacklevel=2,
        )


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
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it.

    Args:
        module: The attention layer; its ``is_causal`` counts where the call does not say.
        query: Shape (B, Hq, Sq, D), as key (B, Hkv, Sk, D) and value (B, Hkv, Sk, Dv); Hkv divides Hq.
        attention_mask: What `make_mask` returned; or a mask of one's own (B|1, Hq|1, Sq|1, Sk), bool, or
            floating, which is added to the scores. None: all keys, or in a causal layer those up to the
            query's own.
        dropout: Share of the weights to drop; the seed comes from torch's generator.
        scaling: Factor of the scores; 1/sqrt(D) by default.
        is_causal: See ``module``.
        softcap: Scores x become ``softcap * tanh(x / softcap)``.
        s_aux: Shape (Hq,): logits of sinks.
        sliding_window: Counts without a mask only, which has it already.
        position_bias: Shape (B|1, Hq|1, Sq, Sk), added to the scores.
        **given: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (n + 1,) each: where packed documents start, and the
            last one ends. Others are of no concern to attention.

    Returns:
        The output, contiguous (B, Sq, Hq, Dv), and None for the weights.

    Raises:
        OptionError: The weights are wanted, or a cache in pages, or attention to a list of keys.
        TypeError: The mask is neither of `make_mask` nor boolean nor floating.
    """
    _refuse(given)
    causal_here = getattr(module, "is_causal", True) if is_causal is None else is_causal
    cu_seqlens = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    mask, bias = _read(attention_mask, causal_here, sliding_window, query, key, cu_seqlens)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    seed = torch.randint(2**62, (), device=query.device) if dropout else None
    out = attention(
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
    )
    return out.transpose(1, 2), None


def _refuse(given: dict[str, Any]) -> None:
    wanted = bool(given.get("output_attentions"))
    remedy = 'Load the model with attn_implementation="eager" to see them'
    expect(not wanted, "output_attentions", "False: the weights are never stored", "True", remedy)
    for name in _REFUSED:
        remedy = "Load the model with another attn_implementation"
        expect(given.get(name) is None, name, "None", f"a {type(given.get(name)).__name__}", remedy)


def _read(
    given: Any,
    is_causal: bool,
    sliding_window: int | None,
    q: Tensor,
    k: Tensor,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
) -> tuple[Any, Tensor | None]:
    """The mask of a call, and what is added to its scores."""
    q_len, k_len = q.shape[2], k.shape[2]
    packed = None if cu_seqlens[0] is None else _documents(cu_seqlens[0], cu_seqlens[1])
    if given is None:
        found: Mask = causal() if is_causal and q_len > 1 else full()
        if is_causal and sliding_window is not None:
            found = found & window(sliding_window - 1, None)
        return found if packed is None else found & packed, None
    remedy = "Pass a boolean mask, True for what may be seen, or a floating one"
    expected = "a mask of make_mask, or a boolean or floating tensor of four dims"
    fits = isinstance(given, Tensor) and given.dim() == 4
    got = f"{given.dim()} dims" if isinstance(given, Tensor) else type(given).__name__
    expect(fits, "attention_mask", expected, got, remedy, error=DtypeError)
    if given.dtype == torch.int32:
        fits = given.shape[2] == q_len and given.shape[3] % 2 == 0
        expect(
            fits, "attention_mask", "bounds for {} rows", tuple(given.shape), remedy, q_len, error=ShapeError
        )
        prepared = Prepared(Spans(given.unflatten(3, (-1, 2)), k_len), bare=True)
        return prepared if packed is None else prepared & packed, None
    kind = given.dtype == torch.bool or given.is_floating_point()
    expect(kind, "attention_mask", expected, given.dtype, remedy, error=DtypeError)
    given = given[..., :k_len]
    if given.is_floating_point():
        return full() if packed is None else packed, given
    found = from_dense(given.expand(-1, -1, q_len, -1))
    return found if packed is None else found & packed, None


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _documents(cu_q: Tensor, cu_k: Tensor | None) -> Mask:
    """One mask for all layers that are given one tensor: a mask remembers how it was lowered."""
    if cu_k is not None and cu_k is not cu_q:
        return documents(cu_q, cu_k)
    if torch.compiler.is_compiling():
        return documents(cu_q)
    if cu_q not in _known:
        _known[cu_q] = documents(cu_q)
    found: Mask = _known[cu_q]
    return found


def _give_offsets(model: PreTrainedModel) -> None:
    """Let encoders of packed images and sound call this attention once, with offsets.

    They do so for flash-attn alone, and else loop over the parts, whose lengths they read on the host. They
    ask by a function that each module imported by name.
    """
    for name in {type(part).__module__ for part in model.modules()}:
        module = sys.modules.get(name)
        asked = getattr(module, "is_flash_attention_requested", None)
        if asked is not None and not hasattr(asked, "attnspan") and _takes_offsets(module):
            module.is_flash_attention_requested = _also_ours(asked)  # type: ignore[union-attr]


def _takes_offsets(module: Any) -> bool:
    classes = [x for x in vars(module).values() if isinstance(x, type) and "forward" in vars(x)]
    codes = [getattr(vars(x)["forward"], "__code__", None) for x in classes]
    constants = [c for code in codes if code is not None for c in code.co_consts]
    return any(isinstance(c, tuple) and "cu_seq_lens_q" in c for c in constants)


def _also_ours(asked: Callable[..., bool]) -> Callable[..., bool]:
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return (name == NAME and version is None) or asked(
            config, requested_attention_implementation, version
        )

    is_flash_attention_requested.attnspan = True  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _after_making_a_model() -> None:
    post_init = PreTrainedModel.post_init
    if hasattr(post_init, "attnspan"):
        return

    @functools.wraps(post_init)
    def and_give_offsets(self: PreTrainedModel) -> None:
        post_init(self)  # type: ignore[no-untyped-call]
        _give_offsets(self)

    and_give_offsets.attnspan = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = and_give_offsets  # type: ignore[method-assign]


_say_what_they_are()
_after_making_a_model()
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
