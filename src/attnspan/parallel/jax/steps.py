"""Functions of `Plan.on`, `Layout.on` and `roll` on JAX's meshes."""

from .placed import place, place_roll
from .rows import Placing

STEPS = {"plan": place, "layout": Placing.of, "roll": place_roll}
