"""What `attention` takes for a mask where the problem is spread over the devices of a mesh."""

from typing import Any

import jax

from .._mistakes import OneMask


class ShardedMask(OneMask):
    """A mask together with which device holds which part of the problem: `attention` hands its calls to it.

    `attnspan.jax.shard` makes one.

    Example:
        >>> ShardedMask().attention(None, None, None)
        Traceback (most recent call last):
        NotImplementedError: ShardedMask must say how its parts are computed
    """

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
        """The result of `attnspan.jax.attention` for global arrays.

        Args:
            q: The queries of all devices.
            k: The keys of all devices.
            v: The values of all devices.
            **options: Keywords of `attention`, without ``mask``.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how its parts are computed")
