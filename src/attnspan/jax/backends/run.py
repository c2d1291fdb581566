"""Run a backend of JAX on a part in any layout."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from attnspan.backends import Backend
from attnspan.jax.part import Gradients, JaxPart


def forward(backend: Backend, part: JaxPart, fine: bool = False) -> tuple[Array, Array]:
    """Return out in the layout of the part, and lse. ``fine`` makes the lse complex.

    The lse is complex even if it is not finer. A backend that JAX differentiates returns None if it has no
    lse.
    """
    own = part if part.layout in backend.layouts else part.in_layout("bhsd")
    if fine and backend.fine_lse:
        out, lse = backend.forward(own, fine=True)
    else:
        out, lse = backend.forward(own)
        lse = lax.complex(lse, jnp.zeros_like(lse)) if fine else lse
    return (out if own is part else out.swapaxes(1, 2)), lse


def backward(
    backend: Backend,
    part: JaxPart,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    want_dbias: bool,
) -> Gradients:
    """Return the gradients. dq, dk and dv are in the layout of the part, as ``out`` and ``dout`` are."""
    assert backend.backward is not None, "JAX differentiates its forward"
    lse = lse if backend.fine_lse else lse.real
    if part.layout in backend.layouts:
        return backend.backward(part, out, lse, dout, dlse, want_dbias)  # type: ignore[no-any-return]
    out, dout = (x.swapaxes(1, 2) for x in (out, dout))
    found = backend.backward(part.in_layout("bhsd"), out, lse, dout, dlse, want_dbias)
    return (*(x.swapaxes(1, 2) for x in found[:3]), *found[3:])  # type: ignore[return-value]
