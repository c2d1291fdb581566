"""Check that JAX is installed. The package imports this module first, so the error says what to install."""

from attnspan.base.installed import require

require("jax", "attnspan.jax", "jax")
