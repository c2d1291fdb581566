"""The masks of transformers as spans, lowered once for each kind of layer and step."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from attnspan.base.installed import require_names
from attnspan.base.recorded import is_recorded
from attnspan.masks import Mask, causal, from_predicate, full, global_keys, groups, keys, segments, window
from attnspan.torch.dtensor import ShardedMask

from ._all_pairs import combined, say_evaluated, say_once
from ._patches import Patches
from ._transformers_names import READ_ARGUMENTS, attention_of
from ._transformers_positions import documents_of, is_new, positions_of

#: The name of this attention in transformers.
NAME = "attnspan"
#: The dtype of written masks, which hold int32 numbers. No other mask has it.
WRITTEN = torch.uint32

# Models that read their masks, to combine them or to add them to their own scores. And kinds of layers that
# select keys by content.
_READING = {"bigbird_pegasus", "doge", "t5gemma2_decoder"}
_READING_LAYERS = {
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}


class _Known:
    """A mask function of transformers with a description. Calling it calls the function."""

    def __init__(self, fn: Callable[..., Any], kind: str, *data: Any) -> None:
        self.fn, self.kind, self.data = fn, kind, data

    def __call__(self, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.fn(batch_idx, head_idx, q_idx, kv_idx)


def patch_masks(patches: Patches) -> None:
    """Let transformers' functions that make masks describe them, read positions and pass plans on."""
    _say_what_they_are(patches)
    patches.replace(masking_utils, READ_ARGUMENTS, _reading_documents(getattr(masking_utils, READ_ARGUMENTS)))
    for kind in ("causal", "sliding_window_causal", "chunked_causal", "bidirectional", _BOTH_WAYS):
        name = f"create_{kind}_mask"
        require_names(masking_utils, [name], "attnspan.integrations.transformers", "transformers")
        patches.replace(masking_utils, name, _with_documents(getattr(masking_utils, name)))


_BOTH_WAYS = "bidirectional_sliding_window"


def _say_what_they_are(patches: Patches) -> None:
    """Let the functions that make mask functions return functions with a description.

    Closures contain the same information, but the compiler does not let a program read them.
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
    }
    require_names(masking_utils, kinds, "attnspan.integrations.transformers", "transformers")
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # since 5.23
        kinds["remap_positions_for_packed_sequence"] = "positions"
    for name, kind in kinds.items():
        patches.replace(masking_utils, name, _describing(getattr(masking_utils, name), kind))


def _describing(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
    names = tuple(inspect.signature(make).parameters)

    def described(*data: Any, **named: Any) -> _Known:
        made = make(*data, **named)
        return _Known(made, kind, *data, *(named[name] for name in names[len(data) :] if name in named))

    described.__name__, described.__doc__ = make.__name__, make.__doc__
    described.__wrapped__ = make  # type: ignore[attr-defined]
    return described


def _reading_documents(read: Callable[..., Any]) -> Callable[..., Any]:
    """Let restarting positions mean documents even if the model makes a cache, as models do by default.

    transformers reads positions only without a cache. With an empty cache, all tokens are present too. Plans
    of context parallelism are passed on, as transformers does with prepared masks, which have four dims.
    """
    # transformers 5.24 renamed the cache.
    names = tuple(inspect.signature(read).parameters)

    @functools.wraps(read)
    def read_documents(*args: Any, **named: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        config, inputs_embeds, attention_mask, cache, position_ids = (given[name] for name in names[:5])
        if isinstance(attention_mask, ShardedMask):
            ready, _, *others = read(**{**given, names[2]: inputs_embeds.new_empty(1, 1, 1, 1)})
            return ready, attention_mask, *others
        found = read(**given)
        if attention_mask is not None or cache is None or attention_of(config) != NAME:
            return found
        ready, mask, packed, q_len, k_len, q_offset, *others = found
        if ready or packed is not None or position_ids is None or position_ids.dim() != 2:
            return found
        if isinstance(q_offset, Tensor) or q_offset != 0 or q_len != k_len:
            return found
        positions = position_ids.expand(inputs_embeds.shape[0], -1)
        packed = masking_utils.find_packed_sequence_indices(positions)
        return ready, mask, packed, q_len, k_len, q_offset, *others

    return read_documents


def _with_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(make).parameters)
    cache = "cache" if "cache" in names else "past_key_values"

    @functools.wraps(make)
    def with_documents(*args: Any, **named: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        positions = positions_of(given["inputs_embeds"])
        ours = attention_of(given["config"]) == NAME and given.get("encoder_hidden_states") is None
        if not ours or positions is None:
            return make(**given)
        if "position_ids" in names and given.get("attention_mask") is None:
            given["position_ids"] = positions if given.get("position_ids") is None else given["position_ids"]
        elif is_new(given.get(cache)) and (packed := documents_of(positions)) is not None:
            # Looked up in the module, whose functions have descriptions.
            own, found = given.get("and_mask_function"), masking_utils.packed_sequence_mask_function(packed)
            given["and_mask_function"] = found if own is None else masking_utils.and_masks(own, found)
        return make(**given)

    return with_documents


class _Extent(NamedTuple):
    """The part of the whole sequence that a mask is made for.

    Keys are numbered from the first present key. Windows and documents do not depend on this origin.
    """

    batch: int
    q_len: int
    k_len: int
    first_key: Any  # first key's index in the whole sequence
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
    config: Any = None,
    **rest: Any,
) -> Tensor:
    """Make the mask of one kind of layer for one step, as transformers requests it.

    Args:
        batch_size: Size of the batch.
        q_length: Number of queries.
        kv_length: Number of keys.
        q_offset: Index of the first query in the whole sequence, an int or an integer tensor of one element.
        kv_offset: Index of the first key.
        mask_function: The visible pairs, a function of (batch, head, query, key) indices.
        attention_mask: Bool (batch_size, tokens), True for visible tokens. None if all are visible.
        device: Device of the mask.
        config: The model's configuration. Its ``layer_types`` are the model's kinds of attention.
        **rest: ``allow_is_bidirectional_skip``: the model accepts a mask of width 0. And arguments for masks
            that the model reads, such as ``dtype``.

    Returns:
        The bounds of the spans, then 0 and kv_length: uint32 of shape (batch_size or 1, 1, q_length, 2 * R +
        2), for `attend`. In compiled code with ``attention_mask``, R is 8. Otherwise R is the smallest that
        fits. If every query sees all keys, the width is 0, because an encoder's cache has keys that
        transformers does not count. Models that read their masks get the mask of the eager implementation: 0
        or the lowest number of ``dtype`` for all pairs, (batch_size, 1, q_length, kv_length).

    Raises:
        OptionError: Data break a promise, for example blocks of tokens that are not contiguous.

    Example:
        >>> make_mask(1, 3, 3).tolist()
        [[[[0, 1, 0, 3], [0, 2, 0, 3], [0, 3, 0, 3]]]]
    """
    if reads_masks(config):
        say_once(f"{config.model_type} reads its masks, so they are made")
        rest |= {"mask_function": mask_function, "attention_mask": attention_mask, "device": device}
        rest |= {"allow_is_bidirectional_skip": False}
        made: Tensor = masking_utils.eager_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **rest)
        return made
    alone = mask_function is masking_utils.bidirectional_mask_function
    if alone and rest.get("allow_is_bidirectional_skip") and _hides_nothing(attention_mask):
        return torch.empty(batch_size, 1, q_length, 0, dtype=WRITTEN, device=device)
    q_index = torch.arange(q_length, device=device) + (q_offset - kv_offset)
    sizes = _Extent(batch_size, q_length, kv_length, kv_offset, q_index)
    mask = _lower(mask_function, sizes)
    if attention_mask is not None:
        mask = mask & keys(_local(attention_mask.to(torch.bool), sizes, fill=False))
    lower = mask.spans if is_recorded() else mask.prepare
    like = torch.empty(0, device=device)
    found = lower(q_length, kv_length, batch=batch_size, q_index=q_index, like=like).lowered.bounds
    return write(torch.as_tensor(found, device=device), kv_length)


def _hides_nothing(attention_mask: Tensor | None) -> bool:
    """Return whether all tokens are known to be visible, without synchronizing a device."""
    if attention_mask is None:
        return True
    return attention_mask.is_cpu and not is_recorded() and bool(attention_mask.all())


def reads_masks(config: Any) -> bool:
    """Return whether models of this configuration need masks of all pairs.

    Example:
        >>> from transformers import LlamaConfig
        >>> reads_masks(LlamaConfig())
        False
    """
    layers = getattr(config, "layer_types", None) or ()
    return getattr(config, "model_type", "") in _READING or bool(_READING_LAYERS.intersection(layers))


def write(bounds: Tensor, k_len: int) -> Tensor:
    """Return bounds (B|1, 1, Sq, R, 2) as a tensor with four dims, followed by their number of keys.

    The dtype distinguishes it from masks of all pairs, because programs for any length must not depend on a
    width.
    """
    bounds = bounds.flatten(3)
    number = bounds.new_full((*bounds.shape[:3], 1), k_len)
    return torch.cat([torch.nn.functional.pad(bounds, (0, 1)), number], 3).to(WRITTEN)


def _local(x: Tensor, sizes: _Extent, fill: Any) -> Tensor:
    """Return the entries (B, k_len) of the present keys. Tokens that `x` does not describe get ``fill``."""
    missing = sizes.whole - x.shape[1]
    x = torch.nn.functional.pad(x, (0, missing), value=fill) if missing > 0 else x
    return x[:, sizes.first_key : sizes.whole]


def _lower(fn: Callable[..., Any], sizes: _Extent) -> Mask:
    """Return the mask that a mask function describes."""
    if fn is masking_utils.causal_mask_function:
        return causal()
    if fn is masking_utils.bidirectional_mask_function:
        return full()
    kind, data = (fn.kind, fn.data) if isinstance(fn, _Known) else ("", ())
    if kind in ("and", "or"):
        return combined(kind, (_lower(part, sizes) for part in data))
    if kind == "window":  # The size is None if no layer uses the window.
        return window(data[0] - 1, None) if data[0] > 0 else global_keys(0)
    if kind == "window both ways":
        return window(data[0], data[0])
    if kind == "chunks":
        return _chunks(data[0], data[1], sizes)
    if kind == "groups":
        return groups(_local(data[0], sizes, fill=-1))
    if kind == "keys":
        return keys(_local(data[0], sizes, fill=False))
    if kind == "segments":
        return segments(data[0])
    if kind == "positions":  # Within a document, positions and indices have equal differences.
        return _lower(data[0], sizes._replace(positions=data[1]))
    say_evaluated(_name_of(fn), "transformers'")
    return from_predicate(_Shifted(fn, sizes.first_key, sizes.positions))


def _chunks(size: int, left_padding: Tensor, sizes: _Extent) -> Mask:
    """Return chunks that start at the first token of each batch element or of each document."""
    if sizes.positions is not None:
        ids = sizes.positions // size
        changes = ids.diff(dim=-1, prepend=ids[:, :1]) != 0
        return segments(changes.cumsum(-1))
    first = left_padding[:, None] - sizes.first_key
    index = torch.arange(sizes.k_len, device=left_padding.device)
    return segments((sizes.q_index - first) // size, (index - first) // size)


class _Shifted:
    """A mask function of indices in the sequence or in documents, taking indices from the first key."""

    def __init__(self, fn: Callable[..., Any], first_key: Any, positions: Tensor | None) -> None:
        self.fn, self.first_key, self.positions = fn, first_key, positions

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if self.positions is None:
            q, k = q + self.first_key, k + self.first_key
        else:
            q, k = self.positions[b, q], self.positions[b, k]
        visible: Tensor = self.fn(b, h, q, k)
        return visible


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def describe(fn: Callable[..., Any]) -> str:
    """Return a mask function as text, without its tensors.

    Example:
        >>> describe(masking_utils.sliding_window_causal_mask_function(4))
        'and(window(4), causal_mask_function)'
    """
    if not isinstance(fn, _Known):
        return _name_of(fn)
    parts = ["data" if isinstance(x, Tensor) else describe(x) if callable(x) else str(x) for x in fn.data]
    return f"{fn.kind}({', '.join(parts)})"
