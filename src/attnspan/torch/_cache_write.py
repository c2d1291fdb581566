"""The operator ``attnspan::cache_append``, which writes new tokens into a KV cache in place.

It is a mutating operator and not an indexed assignment, for three reasons:

- The slots depend on data: each batch element has its own length and may receive fewer tokens than the chunk.
- It must never write beyond the cache.
- A compiler that sees one node with mutated arguments writes into the buffers without a copy.

The operator returns the lengths as a new tensor. In torch 2.15 and later, inductor may repeat a read of a
mutated argument after the operator, and positions are read before each write.
"""

from typing import Any

import torch
from torch import Tensor

from attnspan.base.arrays import INT32_MAX, stored
from attnspan.base.plain import check_plain
from attnspan.errors import DeviceError, DtypeError, ShapeError, expect

from . import compat
from ._autograd import below_autograd, define
from ._signature import library

#: Length of a batch element after an illegal request, if values cannot be read. The masks of such an element
#: are illegal until `reset`.
LOST = -1

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def slots_of(tokens: Tensor, keep: int, slots: int) -> Tensor:
    """Slot of each token. Tokens below ``keep`` have the slot of the same number. The others use a ring.

    Example:
        >>> slots_of(torch.arange(7), keep=2, slots=5).tolist()
        [0, 1, 2, 3, 4, 2, 3]
    """
    if keep in (0, slots):
        return tokens if keep else tokens.remainder(slots)
    return torch.where(tokens < keep, tokens, (tokens - keep).remainder(slots - keep) + keep)


def write_anywhere(keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> Tensor:
    """Write without a synchronization, on any device. A batch element that would overflow becomes `LOST`.

    Args:
        keys: Shape (B, Hkv, slots, D), written in place.
        values: Shape (B, Hkv, slots, Dv), written in place.
        lengths: Shape (B,).
        *new: Four arguments. k_new and v_new have shape (B, Hkv, n, D) with n <= slots. counts, of shape (B,)
            or None, is the number of each element's tokens at the end of the chunk. keep is the number of
            slots that hold the first tokens permanently. The other slots are a ring. With ``keep == slots``
            there is no ring.

    Returns:
        The new lengths.

    Example:
        >>> keys, values, lengths = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.tensor([1])
        >>> new = torch.ones(1, 1, 1, 2)
        >>> write_anywhere(keys, values, lengths, new, new, None, 3).tolist()
        [2]
        >>> keys[0, 0, :, 0].tolist()
        [0.0, 1.0, 0.0]
    """
    k_new, v_new, counts, keep = new
    n, slots = _check_chunk(keys, values, lengths, *new), keys.shape[2]
    if n == 0:
        return lengths.clone()
    start = lengths.to(torch.int64)
    count = torch.full_like(start, n) if counts is None else counts.to(torch.int64)
    legal = (start >= 0) & (count >= 0) & (count <= n) & (start + count <= _limit(keep, slots))
    own = torch.where(legal, count, 0)[:, None]
    # Every entry of the chunk writes, so that shapes do not depend on data. Padding writes the element's
    # first token into its slot again. An element without tokens writes the stored values back.
    token = torch.maximum(torch.arange(n, device=keys.device), n - own).clamp(max=n - 1)
    slot = slots_of((start[:, None] + token - (n - own)).clamp(min=0), keep, slots).clamp(max=slots - 1)
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    caches = keys.transpose(1, 2), values.transpose(1, 2)
    # All memory is allocated before anything is written, so that a failed allocation writes nothing.
    chunks = [
        torch.where(own[..., None, None] > 0, tokens.transpose(1, 2)[row, token], cache[row, slot])
        for cache, tokens in zip(caches, (k_new, v_new), strict=True)
    ]
    for cache, chunk in zip(caches, chunks, strict=True):
        cache[row, slot] = chunk
    return torch.where(legal, start + count, LOST).to(lengths.dtype)


def _write_cpu(keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> Tensor:
    k_new, v_new, counts, keep = new
    n, slots = _check_chunk(keys, values, lengths, *new), keys.shape[2]
    starts = lengths.tolist()
    own = [n] * len(starts) if counts is None else counts.tolist()
    check_room(starts, own, n, _limit(keep, slots))
    for cache, tokens in zip((keys, values), apart((keys, values), (k_new, v_new)), strict=True):
        if n == 1 and min(own, default=1) == 1:  # decoding: all batch elements at once
            slot = slots_of(lengths, keep, slots)
            cache.transpose(1, 2)[torch.arange(len(starts)), slot] = tokens.squeeze(2)
            continue
        for b, (start, count) in enumerate(zip(starts, own, strict=True)):
            done = n - count
            while done < n:  # up to the end of the kept slots, or to the end of the ring
                at = start + done - (n - count)
                slot = at if at < keep else keep + (at - keep) % (slots - keep)
                end = min(n, done + (keep if at < keep else slots) - slot)
                cache[b, :, slot : slot + end - done].copy_(tokens[b, :, done:end])
                done = end
    return lengths + (n if counts is None else counts.to(lengths.dtype))


def _limit(keep: int, slots: int) -> int:
    return slots if keep == slots else INT32_MAX


def apart(caches: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> list[Tensor]:
    """New tokens, copied if they share memory with a cache: a write could change them before the read."""
    alias = compat.is_alias_of
    return [x.clone() if any(alias(x, cache) for cache in caches) else x for x in new]


def check_kind(
    name: str, x: Any, dtypes: tuple[torch.dtype, ...], expected: str, remedy: str, device: torch.device
) -> None:
    """Raise unless a tensor has one of the dtypes, and is on the device of the cache."""
    kind, to_tensor = type(x).__name__, "Convert it with torch.as_tensor"
    move = "Move the cache with .to(device), or the tensor"
    expect(isinstance(x, Tensor), name, "a torch.Tensor", kind, to_tensor, error=DtypeError)
    check_plain(name, x)
    expect(x.dtype in dtypes, name, expected, x.dtype, remedy, *dtypes, error=DtypeError)
    expect(x.device == device, name, "device {}, as the cache", x.device, move, device, error=DeviceError)


def check_new(heads: int, keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> int:
    """Raise unless new tokens fit a cache. The check reads only sizes, so it also works in compiled code.

    Args:
        heads: Number of key heads, Hkv.
        keys: Storage of keys, with D as the last axis.
        values: Storage of values, with Dv as the last axis.
        lengths: Shape (B,).
        *new: k_new (B, Hkv, n, D), v_new (B, Hkv, n, Dv), counts (B,) or None.

    Returns:
        The number of new tokens, n.
    """
    for name, x in (("keys", keys), ("values", values), ("lengths", lengths)):
        stored(x, f"cache: {name}")
    k_new, v_new, counts = new
    same, shape = keys.shape[:-1] == values.shape[:-1], tuple(keys.shape[:-1])
    got, remedy = tuple(values.shape[:-1]), "Pass the buffers of one cache"
    expect(same, "values", "the keys' sizes {}", got, remedy, shape, error=ShapeError)
    n = k_new.shape[2] if k_new.dim() == 4 else 0
    for name, x, cache in (("k_new", k_new, keys), ("v_new", v_new, values)):
        shape = lengths.shape[0], heads, n, cache.shape[-1]
        remedy = "Pass as many values as keys, of the cache's sizes"
        expect(x.shape == shape, name, "shape {}", tuple(x.shape), remedy, shape, error=ShapeError)
        remedy = "Make the cache with the dtype of k and v"
        check_kind(name, x, (cache.dtype,), "{}, as the cache", remedy, cache.device)
    if counts is not None:
        fits, remedy = counts.shape == lengths.shape, "Pass one for each batch element of the cache"
        expect(
            fits, "counts", "shape {}", tuple(counts.shape), remedy, tuple(lengths.shape), error=ShapeError
        )
        check_kind("counts", counts, INTEGERS, "integers", remedy, counts.device)
    return n  # type: ignore[no-any-return]


def _check_chunk(keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> int:
    n, keep = check_new(keys.shape[1], keys, values, lengths, *new[:3]), new[3]
    fits, got = keys.shape[0] == lengths.shape[0], lengths.shape[0]
    remedy = "Pass one for each batch element"
    expect(fits, "lengths", "batch size {}", got, remedy, keys.shape[0], error=ShapeError)
    most = keys.shape[2] - (keep if keep < keys.shape[2] else 0)
    expect(n <= most, "k_new", "at most {} tokens", n, "Split them into chunks", most, error=ShapeError)
    return n


def check_room(starts: list[int], own: list[int], n: int, limit: int) -> None:
    """Raise before anything is written."""
    check_not_lost(starts)
    for b, (start, count) in enumerate(zip(starts, own, strict=True)):
        remedy = "Pass the number of the element's tokens, which are the last ones of the chunk"
        expect(0 <= count <= n, f"counts[{b}]", "0 to {}, the tokens of the chunk", count, remedy, n)
        remedy = "Allocate a larger max_len, or truncate() or reset() it. Nothing was written"
        room, got = start + count <= limit, f"{start} of {limit} taken"
        expect(room, f"cache: batch element {b}", "room for {} more tokens", got, remedy, count)


def check_not_lost(lengths: list[int]) -> None:
    """Raise for a batch element with an illegal length."""
    if min(lengths, default=0) < 0:
        remedy = "An earlier call asked for tokens that it did not hold. Call reset() and fill it again"
        row = f"cache: batch element {lengths.index(min(lengths))}"
        expect(False, row, "a length of at least 0", "the mark of lost tokens", remedy)


def refuse_gradients(op: compat.OpOverload, what: str, arrays: str) -> None:
    """Make an operator reject gradients, which it would detach silently."""

    def kernel(keyset: Any, *arguments: Any) -> Any:
        wanted = torch.is_grad_enabled() and compat.any_requires_grad(*arguments)
        remedy = "Call the model under torch.no_grad() or inference_mode(), or detach them"
        expect(not wanted, what, f"{arrays} without gradients", "ones that require them", remedy)
        return below_autograd(op, keyset, arguments)

    library.impl(op, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def guard(op: compat.OpOverload) -> None:
    """Make an operator that writes into a cache reject gradients and vmap, and report writes to autograd."""
    refuse_gradients(op, "cache", "keys and values")

    def count_versions(keyset: Any, *arguments: Any) -> Tensor:
        # The backward pass must detect that tensors saved before the write have changed.
        torch.autograd.graph.increment_version(arguments[:2])
        with compat.BelowInplaceOrView():
            return op.redispatch(keyset & compat.after_inplace_or_view, *arguments)  # type: ignore[no-any-return]

    library.impl(op, count_versions, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]
    torch.library.register_vmap(op, _refuse_vmap, lib=library)


def _refuse_vmap(*_: Any) -> None:
    got = "the tokens of one call among several that would write into one buffer"
    remedy = "Make the vmapped axis part of the batch axis"
    expect(False, "cache: update under vmap", "tokens of the whole batch at once", got, remedy)


def new_lengths(keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> Tensor:
    """Uninitialised lengths, after checks of the new tokens and counts, the last arguments but one."""
    # The number of tokens may be an unknown symbol, so the call compares it when it runs.
    check_new(keys.shape[1], keys, values, lengths, *new[-4:-1])
    return torch.empty_like(lengths)


cache_append_op = define(
    library,
    "cache_append(Tensor(a!) keys, Tensor(b!) values, Tensor lengths, Tensor k_new, Tensor v_new,"
    " Tensor? counts, int keep) -> Tensor",
    new_lengths,
    CPU=_write_cpu,
    CompositeExplicitAutograd=write_anywhere,
)
guard(cache_append_op)
