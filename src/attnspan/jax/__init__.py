"""attnspan for JAX."""

from . import _needs as _needs  # isort: skip  (first: without JAX it says what to install)
