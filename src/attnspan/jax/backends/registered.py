"""The backends of JAX, which register here. `attnspan.backends` has the protocol and the table."""

from __future__ import annotations

from attnspan.backends import ALL_OPTIONS, EVERYWHERE, Backend, register

from .lazy import functions_of

_HERE = __package__

for _backend in (
    Backend(
        name="cpu",
        framework="jax",
        options=ALL_OPTIONS,
        **functions_of(f"{_HERE}.cpu"),
        default_on=("cpu",),
        layouts=("bhsd", "bshd"),
        fine_lse=True,
    ),
    Backend(
        name="cudnn",
        framework="jax",
        options=ALL_OPTIONS,
        **functions_of(f"{_HERE}.cudnn", own_derivative=True),
        default_on=("gpu",),
        reads_mask=True,
    ),
    Backend(
        name="xla",
        framework="jax",
        options=ALL_OPTIONS,
        **functions_of(f"{_HERE}.xla"),
        default_on=(EVERYWHERE,),
        fine_lse=True,
    ),
    Backend(
        name="math",
        framework="jax",
        options=ALL_OPTIONS,
        **functions_of(f"{_HERE}.math", own_derivative=True),
        opt_in="it stores every score, so it must be requested",
    ),
):
    register(_backend, last=True)
