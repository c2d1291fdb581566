"""Samples of a batch, cut to some of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.torch.recording.calls import CannotRun
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["Sample", "sample_of"]


class Sample(NamedTuple):
    """A sample of a batch, or all samples.

    Args:
        rows, row: Batch size, and number of the sample. None for all samples.
        length: Number of its tokens.
        known: Known dims of tokens of some tensors, by identity.
    """

    rows: int
    row: int | None
    length: int
    known: Mapping[int, list[int]]

    def cut(self, batch: Any, index: Tensor) -> Any:
        """Take the sample out of the batch, with some of its tokens.

        Raises:
            CannotRun: A tensor has an unknown layout.
        """
        if self.rows == self.length:
            raise CannotRun(f"the batch has {self.rows} samples and as many tokens")

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            dims = self._dims(x)
            if self.row is not None and x.shape[0] == self.rows:
                x = x[self.row : self.row + 1]
            elif x.shape[0] not in (1, self.rows) and dims != list(range(x.dim())):
                raise CannotRun(f"a tensor of shape {tuple(x.shape)} has no row for each sample")
            for dim in dims:
                x = x.index_select(dim, index.to(x.device))
            return x

        return tree_map(cut, batch)

    def _dims(self, x: Tensor) -> list[int]:
        """List the dims of tokens."""
        if id(x) in self.known:
            return self.known[id(x)]
        dims, shape = [i for i, n in enumerate(x.shape) if n == self.length], tuple(x.shape)
        if x.is_floating_point() and x.dim() > 3 and 1 not in dims:
            # An image or a video may have sides of this length, and a bias has pairs of tokens.
            if dims and x.dim() == 4 and shape[1] != 1:
                raise CannotRun(f"a tensor of shape {shape} may be an image or have pairs of tokens")
            dims = dims if shape[1:] == (1, self.length, self.length) else []
        if dims == [1, 2] == list(range(1, x.dim())) and x.is_floating_point():
            raise CannotRun(f"dim 1 or dim 2 of a tensor of shape {shape} may have the tokens")
        return dims


def sample_of(subject: Subject, batch: Any, row: int | None = None) -> Sample:
    """Describe a sample of a batch, or all samples, from the tokens of the batch."""
    name, tokens = subject.tokens(batch) or ("", torch.empty(0, 0))
    x = subject.named(batch).get(name, tokens)
    return Sample(len(tokens), row, tokens.shape[1], {id(x): [int(x.dim() == tokens.dim())]})
