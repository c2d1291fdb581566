"""Causes of pairs that a call shows although it must not: no mask, another mask, or another layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import arguments

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["cause_of_shown", "righted"]


def righted(own: Tensor) -> Tensor:
    """Return the pairs that the user meant if a causal mask is inverted, and else the same pairs."""
    return own.new_ones(own.shape).tril() if _is_inverted(own) else own


def _is_inverted(own: Tensor) -> bool:
    return bool(own.triu(1).any()) and not bool(own.tril(-1).any())


def cause_of_shown(kind: str, call: Attention, own: Tensor, said: Declared) -> tuple[str, str]:
    """Write why a call shows pairs of other documents or of later tokens, and a remedy that fits this cause.

    Args:
        kind: "leak" or "causality-lost". Other kinds have other texts.
        call: The call.
        own: Its visible pairs of the batch's tokens, bool (B, S, S).
        said: Facts of the batch.

    Returns:
        The cause and the remedy. An empty text is for a cause or a remedy that is known otherwise.
    """
    if kind not in ("leak", "causality-lost"):
        return "", ""
    given = arguments(*call.given) if call.given is not None else {}
    if not (call.mask or call.applied or given.get("attn_mask") is not None):
        has = " except is_causal=True" if given.get("is_causal") else ""
        known = call.kind in ("sdpa", "written out")
        return (f"This call has no mask{has}" if known else "This call's mask shows these pairs"), ""
    if kind == "leak":
        return _of_documents(call, own, said)
    if _is_inverted(own):
        return "The causal mask is inverted: it shows later tokens and hides earlier ones", ""
    _, rows, columns = own.triu(1).nonzero(as_tuple=True)
    most, last = int((columns - rows).max()), own.shape[-1] - 1
    if most < last and bool((own.triu(1) == own.new_ones(own.shape).triu(1).tril(most)).all()):
        next_ = "the next token" if most == 1 else f"the next {most} tokens"
        return f"This call's mask also shows each token {next_}", ""
    return "This call's mask shows later tokens", ""


def _of_documents(call: Attention, own: Tensor, said: Declared) -> tuple[str, str]:
    if said.source in call.mask_sources:
        return f"This call's mask is made from {said.source}, but it shows pairs of different documents", ""
    is_plain = bool((own == own.new_ones(own.shape).tril()).all()) or bool(own.all())
    if is_plain or call.mask_sources:
        return "This call's mask is not made from documents", ""
    return (
        "This call's mask is not made from this batch. It hides other pairs: it may be kept from another",
        f"If the mask is kept, make it in each step from {said.source}. Or keep it by these values",
    )
