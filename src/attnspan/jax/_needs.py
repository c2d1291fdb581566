"""Imported first: without JAX, the error says what to install."""

from attnspan.base.installed import require

require("jax", "attnspan.jax", "jax")
