"""The operator ``attnspan::cache_write``: new tokens into a key-value cache, in place.

A mutating operator and not an indexed assignment: what it writes depends on data (each row has its own
length, and may get fewer tokens than the chunk has), it must never write beyond the cache, and a compiler
that sees one node with mutated arguments writes into the very buffers, without a copy.
"""

from typing import Any

import torch
from torch import Tensor

from ..arrays import INT32_MAX
from ..errors import expect

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "cache_write(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor k_new, Tensor v_new,"
    " Tensor? counts, bool wrap) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)

#: Where values cannot be read, this length marks a row that was asked for what it does not have. Masks of
#: such a row are illegal, and it stays so until `reset`.
LOST = -1


def write_anywhere(keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> None:
    """Write without reading a value on the host, on any device. Rows that would overflow become `LOST`.

    Args:
        keys: Shape (B, Hkv, slots, D), written in place as values (B, Hkv, slots, Dv) and lengths (B,).
        *new: k_new (B, Hkv, n, D) and v_new with n <= slots; counts (B,), how many of the last tokens of the
            chunk are the row's own, or None; wrap: token t goes to slot t % slots, not to slot t.

    Example:
        >>> keys, values, lengths = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.tensor([1])
        >>> new = torch.ones(1, 1, 1, 2)
        >>> write_anywhere(keys, values, lengths, new, new, None, False)
        >>> keys[0, 0, :, 0].tolist(), lengths.tolist()
        ([0.0, 1.0, 0.0], [2])
    """
    k_new, v_new, counts, wrap = new
    n, slots = k_new.shape[2], keys.shape[2]
    if n == 0:
        return
    start = lengths.to(torch.int64)
    count = torch.full_like(start, n) if counts is None else counts.to(torch.int64)
    limit = INT32_MAX if wrap else slots
    legal = (start >= 0) & (count >= 0) & (count <= n) & (start + count <= limit)
    own = torch.where(legal, count, 0)[:, None]
    # Every entry of the chunk writes, so that shapes do not depend on data: padding repeats the row's first
    # token into the same slot, and a row without tokens writes back what is there.
    token = torch.maximum(torch.arange(n, device=keys.device), n - own).clamp(max=n - 1)
    slot = start[:, None] + token - (n - own)
    slot = slot.remainder(slots) if wrap else slot.clamp(0, slots - 1)
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    caches = keys.transpose(1, 2), values.transpose(1, 2)
    # All memory is taken before anything is written: without enough of it, nothing is.
    chunks = [
        torch.where(own[..., None, None] > 0, tokens.transpose(1, 2)[row, token], cache[row, slot])
        for cache, tokens in zip(caches, (k_new, v_new), strict=True)
    ]
    for cache, chunk in zip(caches, chunks, strict=True):
        cache[row, slot] = chunk
    lengths.copy_(torch.where(legal, start + count, LOST))


def _write_cpu(keys: Tensor, values: Tensor, lengths: Tensor, *new: Any) -> None:
    k_new, v_new, counts, wrap = new
    n, slots = k_new.shape[2], keys.shape[2]
    starts = lengths.tolist()
    own = [n] * len(starts) if counts is None else counts.tolist()
    _check(starts, own, n, INT32_MAX if wrap else slots)
    for cache, tokens in ((keys, k_new), (values, v_new)):
        if n == 1 and min(own, default=1) == 1:  # decoding: all rows at once
            cache.transpose(1, 2)[torch.arange(len(starts)), lengths.remainder(slots)] = tokens.squeeze(2)
            continue
        for b, (start, count) in enumerate(zip(starts, own, strict=True)):
            # To the slots from the row's own on, and on from slot 0 where they end.
            slot, own_tokens = start % slots, tokens[b, :, n - count :]
            first = min(count, slots - slot)
            cache[b, :, slot : slot + first].copy_(own_tokens[:, :first])
            cache[b, :, : count - first].copy_(own_tokens[:, first:])
    lengths.add_(n if counts is None else counts)


def _check(starts: list[int], own: list[int], n: int, limit: int) -> None:
    """Raise before anything is written."""
    check_not_lost(starts)
    for b, (start, count) in enumerate(zip(starts, own, strict=True)):
        remedy = "Pass how many of the last tokens of the chunk are the row's own"
        expect(0 <= count <= n, f"counts[{b}]", "0 to {}, the tokens of the chunk", count, remedy, n)
        remedy = "Allocate a larger max_len, or truncate() or reset() the row; nothing was written"
        room, got = start + count <= limit, f"{start} of {limit} taken"
        expect(room, f"cache row {b}", "room for {} more tokens", got, remedy, count)


def check_not_lost(lengths: list[int]) -> None:
    """Raise for a row that carries the mark, where it can be read."""
    if min(lengths, default=0) < 0:
        remedy = "It was asked for what it did not hold: reset() it and fill it anew"
        row = f"cache row {lengths.index(min(lengths))}"
        expect(False, row, "a length of at least 0", "the mark of a lost row", remedy)


def _refuse_gradients(keyset: Any, *arguments: Any) -> None:
    # A cache would cut them off silently.
    wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
    remedy = "Call the model under torch.no_grad() or inference_mode(), or detach them"
    expect(not wanted, "cache", "keys and values without gradients", "ones that require them", remedy)
    with torch._C._AutoDispatchBelowAutograd():
        cache_write_op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _count_versions(keyset: Any, *arguments: Any) -> None:
    # What autograd saved before the write must be found changed in backward.
    torch.autograd.graph.increment_version(arguments[:3])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        cache_write_op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)


def _refuse_vmap(*_: Any) -> None:
    got = "those of one call of several, which would write into one buffer"
    remedy = "Make the vmapped axis part of the batch axis"
    expect(False, "cache: update under vmap", "tokens of all batch rows at once", got, remedy)


cache_write_op = torch.ops.attnspan.cache_write.default
_library.impl("cache_write", _write_cpu, "CPU")  # type: ignore[no-untyped-call]
_library.impl("cache_write", write_anywhere, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("cache_write", _refuse_gradients, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
_library.impl("cache_write", _count_versions, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::cache_write", lambda *_: None, lib=_library)
torch.library.register_vmap("attnspan::cache_write", _refuse_vmap, lib=_library)
