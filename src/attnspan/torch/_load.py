"""Loads other packages' backends when every name of `attnspan.torch` exists: they may import these names."""

from attnspan.backends import load

load("torch")
