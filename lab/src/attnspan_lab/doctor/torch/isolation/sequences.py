"""Sequences of tokens in a batch: the one that the model predicts, and a step whose results have its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.doctor.torch.recording.changes import evaluating
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["LABELS", "has_rows", "of_predicted", "sequences", "with_rows"]

LABELS = re.compile(r"^(\w+_)?(labels?|targets?)$")
# Numbers of tokens that are no tokens themselves.
_OTHERS = re.compile(r"mask|pos|seg|doc|seq(uence)?_?(id|idx|index|num)|type|len|cache")
_OF_DECODER = re.compile(r"^(decoder|dec|tgt|target)_")


def sequences(subject: Subject, batch: Any) -> list[str]:
    """Name the tensors of a batch that hold a sequence of tokens: integers (B, S), or numbers (B, S, D)."""
    first = (subject.tokens(batch) or ("",))[0]

    def fits(name: str, x: Tensor) -> bool:
        if LABELS.search(name.lower()) or _OTHERS.search(name.lower()) or x.dtype == torch.bool:
            return False
        return x.dim() == (3 if x.is_floating_point() else 2)

    return [name for name, x in subject.named(batch).items() if name == first or fits(name, x)]


def of_predicted(names: list[str]) -> list[str]:
    """Choose the sequences that the model may predict. In an encoder-decoder, they belong to the decoder."""
    return [x for x in names if _OF_DECODER.search(x.lower())] or names


def has_rows(results: Mapping[str, Tensor], tokens: Tensor) -> bool:
    """Whether a result has a row for each token. Packed tokens (1, S) have results (S, ...)."""
    rows, length = tokens.shape[:2]
    shapes = [tuple(x.shape) for x in results.values()]
    return any(x[:2] == (rows, length) or (rows == 1 and len(x) > 1 and x[0] == length) for x in shapes)


def with_rows(subject: Subject, batch: Any) -> Any:
    """Leave the labels out of a batch if the model returns a row for each token only without them."""
    tokens = subject.tokens(batch)
    if isinstance(batch, Mapping):
        less: Any = {k: x for k, x in batch.items() if not LABELS.search(str(k).lower())}
    elif isinstance(batch, (tuple, list)) and LABELS.search(
        [*subject.named(batch), ""][len(batch) - 1].lower()
    ):
        less = batch[:-1]
    else:
        return batch
    if tokens is None or len(less) == len(batch) or _returns_rows(subject, batch, tokens[1]):
        return batch
    try:
        return less if _returns_rows(subject, less, tokens[1]) else batch
    except Exception:  # The model needs its labels.
        return batch


def _returns_rows(subject: Subject, batch: Any, tokens: Tensor) -> bool:
    with evaluating(subject.model):
        return has_rows(subject.results(subject.call(subject.model, batch), {}), tokens)
