"""One padded sample of a batch, cut to a number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.names import words_of
from attnspan_lab.doctor.torch.isolation.cutting import Sample
from attnspan_lab.doctor.torch.isolation.declared import paddings
from attnspan_lab.doctor.torch.isolation.sequences import sequences
from attnspan_lab.doctor.torch.recording.calls import changed_tokens
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["PaddedSample", "padded_samples"]

_STRIDES = (32, 16, 8, 4, 2, 1)


class PaddedSample(NamedTuple):
    """A sample with padding behind its tokens.

    Args:
        padding: Name of the mask (B, S) that states the padding.
        names, inputs: Names of the sequences that have this padding, and the sequences by identity.
        real: Number of tokens without the padding.
        sample: The sample with its padding.
    """

    padding: str
    names: tuple[str, ...]
    inputs: tuple[int, ...]
    real: int
    sample: Sample

    @property
    def rounded(self) -> int:
        """Number of tokens with some padding, so that layers with a stride see the same windows."""
        sizes = (-(-self.real // x) * x for x in _STRIDES)
        return next(x for x in sizes if x < self.sample.length)

    def alone(self, batch: Any, stop: int) -> Any:
        """Take the sample out of the batch, and keep its first tokens."""
        return self.sample.cut(batch, torch.arange(stop))

    def changed(self, batch: Any, start: int) -> Any:
        """Change the inputs of a batch from a token on."""

        def change(x: Any) -> Any:
            if id(x) not in self.inputs:
                return x
            dim = next(i for i, n in enumerate(x.shape) if n == self.sample.length and i)
            rest = start, self.sample.length - start
            return torch.cat([x.narrow(dim, 0, rest[0]), changed_tokens(x).narrow(dim, *rest)], dim)

        return tree_map(change, batch)


def padded_samples(subject: Subject, batch: Any) -> Iterator[PaddedSample]:
    """Yield the sample with the most padding for each mask (B, S) of a batch."""
    named = subject.named(batch)
    masks = list(paddings(named))
    for name, valid in masks:
        rows, length = valid.shape
        real = valid.sum(1)
        in_front = ((torch.arange(length) < real[:, None]) == valid).all(1)
        fits = in_front & (real >= 2) & (real < length)
        same = [x for _, x in masks if x.shape == valid.shape and not torch.equal(x, valid)]
        if not bool(fits.any()) or same or length in (1, rows):
            continue
        names = [x for x in sequences(subject, batch) if length in named[x].shape[1:]]
        own = [x for x in names if len(names) == 1 or words_of(x) == words_of(name)]
        row = int(real.masked_fill(~fits, length).argmin())
        others = {id(named[x]): list[int]() for x in names if x not in own}
        if own:
            inputs = tuple(id(named[x]) for x in own)
            yield PaddedSample(name, tuple(own), inputs, int(real[row]), Sample(rows, row, length, others))
