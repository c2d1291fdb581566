"""Loads other packages' backends when every name of `attnspan.jax` exists: they may import these names."""

from attnspan.backends import load

load("jax")
