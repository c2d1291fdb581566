"""Attention over the devices of a JAX mesh: `attnspan.jax.shard`, and `Plan.on` for plans."""

from .placed import PlacedPlan as PlacedPlan
from .placed import Sharded as Sharded
from .placed import place as place
from .placed import shard as shard

__all__ = ["PlacedPlan", "Sharded", "place", "shard"]
