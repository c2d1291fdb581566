"""Growth of scores and masks with the number of tokens. Windows of a fixed size do not grow."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.words import counted, for_long

__all__ = ["growing_dims", "scores_bytes", "stored_text"]


def growing_dims(calls: Sequence[Attention]) -> int:
    """Count the dims of a line's scores that grow with the tokens: none, the keys, or queries and keys."""
    if len({x.k_len for x in calls}) == 1 and not any(0 < x.step.tokens <= x.k_len for x in calls):
        return 0
    # Learned queries, or one query for each image of a row, are fewer than keys, and do not grow like keys.
    if any(x.q[-2] >= x.k_len or 0 < x.step.tokens <= x.q[-2] for x in calls):
        return 2
    few, many = (f(calls, key=lambda x: x.k_len) for f in (min, max))
    return 2 if few.k_len < many.k_len and many.q[-2] * few.k_len >= few.q[-2] * many.k_len else 1


def scores_bytes(call: Attention) -> int:
    """Return the memory of a tensor of scores."""
    return prod(call.q[:-1]) * call.k_len * call.dtype.itemsize


def stored_text(calls: Sequence[Attention], site: Sequence[Attention]) -> str:
    """Write a number of calls, and the memory of a tensor of scores: now, or for long sequences if it grows.

    Args:
        calls: The calls to count, of one step.
        site: Calls of the same line.
    """
    call, again = site[0], sum(x.recomputed for x in calls)
    many = counted(len(calls) - again, "call") + (f" and {again} more in the backward pass" if again else "")
    if len(calls) < (here := sum(x.step is call.step for x in site)):
        many = f"{many} of the {here} of this line"
    if dims := growing_dims(site):
        return f"{many}; a tensor of scores has {for_long(prod(call.q[:-dims]) * call.dtype.itemsize, dims)}"
    return f"{many}; a tensor of scores has {bytes_text(scores_bytes(call))}"
