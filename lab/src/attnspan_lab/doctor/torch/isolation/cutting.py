"""One sample of a batch, cut to some of its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.torch.recording.calls import CannotRun

__all__ = ["Sample"]


class Sample(NamedTuple):
    """A sample of a batch.

    Args:
        rows, row: Batch size, and number of the sample.
        length: Number of its tokens.
        inputs, others: Its sequences, and other sequences of the same length, by identity.
    """

    rows: int
    row: int
    length: int
    inputs: tuple[int, ...]
    others: tuple[int, ...] = ()

    def cut(self, batch: Any, index: Tensor) -> Any:
        """Take the sample out of the batch, with some of its tokens.

        Raises:
            CannotRun: A tensor has an unknown layout.
        """

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            dims = self._dims(x)
            if x.shape[0] == self.rows:
                x = x[self.row : self.row + 1]
            elif x.shape[0] != 1 and dims != list(range(x.dim())):
                raise CannotRun(f"a tensor of shape {tuple(x.shape)} has no row for each sample")
            for dim in dims:
                x = x.index_select(dim, index.to(x.device))
            return x

        return tree_map(cut, batch)

    def _dims(self, x: Tensor) -> list[int]:
        """List the dims of tokens."""
        dims = [] if id(x) in self.others else [i for i, n in enumerate(x.shape) if n == self.length]
        shape = tuple(x.shape)
        if id(x) not in self.inputs and x.is_floating_point() and x.dim() > 3 and 1 not in dims:
            # An image or a video may have sides of this length, and a bias has pairs of tokens.
            if dims and x.dim() == 4 and shape[1] != 1:
                raise CannotRun(f"a tensor of shape {shape} may be an image or have pairs of tokens")
            dims = dims if shape[1:] == (1, self.length, self.length) else []
        if dims == [1, 2] == list(range(1, x.dim())) and x.is_floating_point():
            raise CannotRun(f"dim 1 or dim 2 of a tensor of shape {shape} may have the tokens")
        return dims
