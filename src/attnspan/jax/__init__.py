"""attnspan for JAX."""
