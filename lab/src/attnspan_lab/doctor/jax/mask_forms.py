"""Masks of attnspan for calls in JAX, as code. A mask is offered only if it shows the right pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.subject import JaxSubject
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import forms
from attnspan_lab.doctor.words import listed

__all__ = ["form_of", "instead_of", "masks_of", "only"]

T = TypeVar("T")

_MOST_NAMES = 8  # lines or numbers of calls in a sentence


def form_of(subject: JaxSubject, batch: Any, visible: np.ndarray) -> str:
    """Write the shortest mask that shows exactly these pairs, bool (B, Sq, Sk), or "" if none is known.

    A mask without data is not offered for a batch with documents or a padding mask: it may be right for this
    batch and wrong for the next one.
    """
    own = next(iter(subject.padding_names(batch)), "")
    # The keys may be another sequence, such as an encoder's states.
    others = (_form(subject, batch, visible, x) for x in subject.other_masks(batch).values())
    found = _form(subject, batch, visible, own)
    is_named = found and "(valid)" not in found
    return found if is_named else next((x for x in others if x and "(valid)" not in x), found)


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
_DROPOUT = "Also pass dropout_p and dropout_seed, because weights are dropped here"
_REST = "with your scale, softcap and biases"


def instead_of(subject: JaxSubject, batch: Any, site: list[Attention]) -> str:
    """Write the remedy of the calls of a line that store their scores, or "" if their masks are not known."""
    forms = [_present(subject, batch, x) for x in site]
    said = f"Call attnspan.jax.attention {_REST}"
    said += f". {_DROPOUT}" * any(x.dropout for x in site)
    return masks_of(site, forms, f"{said}. mask={{}} shows the same pairs as your step", said)


def _present(subject: JaxSubject, batch: Any, call: Attention) -> str:
    """Write the mask that shows the same pairs as a call, or "" if it is not known."""
    if call.visible is None or call.by_head or any(x.name == "argument" for x in call.pairs):
        return ""
    form = form_of(subject, batch, call.visible)
    return "" if subject.causal and form == "full()" else form


def masks_of(site: list[Attention], forms: list[str], one: str, many: str) -> str:
    """Write the masks that the calls of a line need, or "" if none is known.

    Args:
        site: All calls of the line: a change of the line changes all of them.
        forms: The mask of each call, or "" if it is not known.
        one: The remedy if all calls need one mask, with {} for the mask.
        many: The beginning of the remedy if they need different masks.
    """
    if not any(forms):
        return ""
    if len(set(forms)) == 1:
        return one.format(forms[0])
    masks = {x: f"mask={x}" if x else "a mask that the doctor does not know" for x in forms}
    own = "; ".join(f"{masks[x]} {at}" for x, at in _at(site, forms).items())
    return f"{many}. {_APART}: {own}"


def only(calls: Sequence[Attention], chosen: list[Attention]) -> str:
    """Say which calls a remedy is for, or "" if it is for all calls of their line."""
    site = [x for x in calls if x.places[:1] == chosen[0].places[:1]]
    at = _at(site, [x in chosen for x in site])
    return f"{_APART}. Change only the mask {at[True]}. " if False in at else ""


_APART = "The calls at this line need different masks, so pass the mask to its function"


def _at(site: list[Attention], forms: list[T]) -> dict[T, str]:
    """Say for each mask which calls need it: by the lines that not all calls share, or by their numbers."""
    shared = set.intersection(*(set(x.places) for x in site))
    own = [next((y for y in x.places if y not in shared), None) for x in site]
    lines = ["" if x is None else f"{Path(x.file).name}:{x.line}" for x in own]
    is_clear = all(lines) and len({*zip(lines, forms, strict=True)}) == len({*lines})
    names = lines if is_clear else [str(1 + i) for i in range(len(site))]
    of = grouped(zip(forms, names, strict=True), lambda x: x[0])
    texts = {x: listed([*dict.fromkeys(name for _, name in pairs)], _MOST_NAMES) for x, pairs in of.items()}
    return {x: f"at {text}" if is_clear else f"in call {text} of {len(site)}" for x, text in texts.items()}
