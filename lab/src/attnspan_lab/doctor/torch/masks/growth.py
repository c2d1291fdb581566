"""Growth of scores and masks with the number of tokens. Windows of a fixed size do not grow."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.words import counted, for_long

__all__ = ["grows", "scores_bytes", "stored_text"]


def grows(calls: Sequence[Attention]) -> bool:
    """Whether a line's calls have more keys for more tokens, as far as this is known."""
    return len({x.k_len for x in calls}) > 1 or any(0 < x.step.tokens <= x.k_len for x in calls)


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
    if grows(site):
        return f"{many}; a tensor of scores has {for_long(prod(call.q[:-2]) * call.dtype.itemsize)}"
    return f"{many}; a tensor of scores has {bytes_text(scores_bytes(call))}"
