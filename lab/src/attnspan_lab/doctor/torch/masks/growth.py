"""Growth of scores and masks with the number of tokens. Windows of a fixed size do not grow."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.words import for_long

__all__ = ["grows", "keys_of", "scores_text"]


def keys_of(call: Attention) -> int:
    """Return the number of keys of a call."""
    if call.visible is not None:
        return call.visible.shape[2]
    return call.k[-2] if call.kernel else call.k[-1]  # A stored product has transposed keys.


def grows(sizes: Collection[tuple[int, int]]) -> bool:
    """Whether a call's size grows with the number of tokens, as far as this is known.

    Args:
        sizes: For each call, the number of keys, and the number of tokens of the batch (0: unknown).
    """
    return len({keys for keys, _ in sizes}) > 1 or any(0 < length <= keys for keys, length in sizes)


def scores_text(call: Attention, sizes: Collection[tuple[int, int]]) -> str:
    """Write the memory of a tensor of scores: now, or for long sequences if it grows."""
    heads = prod(call.q[:-2]) * call.dtype.itemsize
    if grows(sizes):
        return f"a tensor of scores has {for_long(heads)}"
    return f"a tensor of scores has {bytes_text(heads * call.q[-2] * keys_of(call))}"
