"""What `attention` takes for a mask where the problem is spread over ranks."""

from typing import Any

from torch import Tensor

from .._mistakes import OneMask


class ShardedMask(OneMask):
    """A mask together with who holds which part of the problem: `attention` hands its calls to it.

    `attnspan.parallel.ContextParallel` is one.

    Example:
        >>> ShardedMask().attention(None, None, None)
        Traceback (most recent call last):
        NotImplementedError: ShardedMask must say how its part is computed
    """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """The result of `attnspan.torch.attention` for this rank's part.

        Args:
            q: This rank's queries.
            k: This rank's keys.
            v: This rank's values.
            **options: Keywords of `attention`, without ``mask``.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how its part is computed")
