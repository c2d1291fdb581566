"""Registers the experimental backends of JAX."""

from attnspan.backends import ALL_OPTIONS, Backend, register
from attnspan.jax.backends.lazy import functions_of

register(
    Backend(
        name="pallas",
        framework="jax",
        options=ALL_OPTIONS,
        **functions_of("attnspan.experimental.pallas.backend"),
        opt_in="it was never measured on hardware, so it must be requested",
    ),
    last=True,
)
