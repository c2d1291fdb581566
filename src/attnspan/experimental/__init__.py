"""Backends that have never run on the hardware that they are for. All are opt-in.

`attnspan.backends.load` imports ``torch_backends`` or ``jax_backends``, which register them.
"""
