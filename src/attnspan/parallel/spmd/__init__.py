"""One attention over the devices of a JAX mesh: `attnspan.jax.shard`."""

from ._shard import shard as shard
from ._sharded import Sharded as Sharded

__all__ = ["Sharded", "shard"]
