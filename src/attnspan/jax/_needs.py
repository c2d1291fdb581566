"""Imported first: without JAX, the error says what to install."""

from .._installed import require

require("jax", "attnspan.jax", "jax")
