"""Masks of attnspan for calls in JAX, as code. A mask is offered only if it shows the right pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attnspan_lab.doctor.jax.subject import JaxSubject
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import forms

__all__ = ["form_of", "instead_of"]


def form_of(subject: JaxSubject, batch: Any, visible: np.ndarray) -> str:
    """Write the shortest mask that shows exactly these pairs, bool (B, Sq, Sk), or "" if none is known.

    A mask without data is not offered for a batch with documents or a padding mask: it may be right for this
    batch and wrong for the next one.
    """
    own = next(iter(subject.padding_names(batch)), "")
    # The keys may be another sequence, such as an encoder's states.
    others = (_form(subject, batch, visible, x) for x in subject.other_masks(batch).values())
    found = _form(subject, batch, visible, own)
    return next((x for x in others if x and "(valid)" not in x), found) if "(valid)" in found else found


def _form(subject: JaxSubject, batch: Any, visible: np.ndarray, padding: str) -> str:
    size = visible.shape[:2]
    documents, named = subject.document_ids(batch), subject.named(batch)
    said = Declared(ids="segment_ids" if "segment_ids" in named else "ids", padding=padding)
    if documents is not None:
        cut = documents[..., : size[1]]  # Attention may leave out the last token, as in tokens[:, :-1].
        said.documents = torch.as_tensor(np.broadcast_to(cut, size).copy())
        said.ids += "" if cut.shape == documents.shape else "[:, :-1]"
    if padding:
        valid, has_lengths = subject.marked(batch, padding), np.ndim(named[padding]) == 1
        said.mask = torch.as_tensor(valid[:, : size[1]] if has_lengths else valid)
        said.padding = _VALID if has_lengths else padding
    needed = ["segments("] * (documents is not None) + ["keys("] * bool(padding)
    shown = (text for text, _ in forms(torch.as_tensor(visible.copy()), said))
    found = next((text for text in shown if all(x in text for x in needed)), "")
    return found.replace(f"{_VALID} != 0", f"jnp.arange({size[1]}) < {padding}[:, None]")


_VALID = "VALID"  # stands for the tokens before the length
_REST = "with your scale, softcap and biases"


def instead_of(subject: JaxSubject, batch: Any, call: Attention) -> str:
    """Write the remedy of a call that stores its scores, or "" if its mask is not known."""
    if call.visible is None or any(x.name == "argument" for x in call.pairs):
        return ""
    form = form_of(subject, batch, call.visible)
    if not form or (subject.causal and form == "full()"):
        return ""
    return f"Call attnspan.jax.attention {_REST}. mask={form} shows the same pairs as your step"
