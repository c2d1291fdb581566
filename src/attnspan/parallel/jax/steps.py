"""Functions of `Plan.on` and `Layout.on` on JAX's meshes."""

from .placed import place
from .rows import Placing

STEPS = {"plan": place, "layout": Placing.of}
