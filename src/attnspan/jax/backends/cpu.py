"""Backend "cpu": the compiled CPU kernel as XLA custom calls, on XLA's buffers and threads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnspan.call import Problem, dropout, schema
from attnspan.jax.part import Gradients, JaxPart, result_dtype
from attnspan.jax.varying import axes_of, spread
from attnspan.kernels import cpu

_OPTIONS = schema.names(schema.arrays(schema.OPTIONS))
# Bits of the attribute `given`, as csrc/xla.cc reads them.
_BITS = {"bias": 1, "sinks": 2, "dropout_seed": 4, "q_index": 8, "k_index": 16}
_DLSE, _WANT_DBIAS, _LSE_LOW = 32, 64, 128

#: 0 runs on XLA's threads. Another number runs on as many threads of the process, as calls from torch do. No
#: measurement found a difference.
OWN_THREADS = 0

_registered = False


def supports(problem: Problem, part: JaxPart) -> str | None:
    """Return None, or the reason why the compiled kernel cannot run the problem."""
    del part
    return cpu.supports(problem)


def forward(part: JaxPart, fine: bool = False) -> tuple[Array, Array]:
    """Return out in the layout of the part, and lse (B, H, Sq), which is complex if it is `fine`."""
    q = part.q
    batch, heads, q_len = q.shape[:3] if part.layout == "bhsd" else (q.shape[0], q.shape[2], q.shape[1])
    out = jax.ShapeDtypeStruct((*q.shape[:3], part.v.shape[3]), result_dtype(q, part))
    lse = jax.ShapeDtypeStruct((batch, heads, q_len), np.float32)
    arrays, bits = _options(part)
    operands = (q, part.k, part.v, part.bounds, *arrays)
    if not fine:
        return _call("attnspan_forward", (out, lse), operands, part, bits)  # type: ignore[return-value]
    found = _call("attnspan_forward", (out, lse, lse), operands, part, bits | _LSE_LOW)
    return found[0], jax.lax.complex(found[1], found[2])


def backward(
    part: JaxPart, out: Array, lse: Array, dout: Array, dlse: Array | None, want_dbias: bool
) -> Gradients:
    """Return the gradients in the layout of the part."""
    arrays, bits = _options(part)
    inputs = part.q, part.k, part.v
    results = [jax.ShapeDtypeStruct(x.shape, result_dtype(x, part)) for x in inputs]
    if want_dbias and part.bias is not None:
        bits |= _WANT_DBIAS
        results.append(jax.ShapeDtypeStruct(part.bias.shape, np.float32))
    if part.sinks is not None:
        results.append(jax.ShapeDtypeStruct(part.sinks.shape, np.float32))
    if dlse is not None:
        bits |= _DLSE
        arrays = (*arrays, dlse)
    if jnp.iscomplexobj(lse):
        bits |= _LSE_LOW
        arrays, lse = (*arrays, lse.imag), lse.real
    operands = (dout, *inputs, out, lse, part.bounds, *arrays)
    found = list(_call("attnspan_backward", tuple(results), operands, part, bits))
    dsinks = found.pop() if part.sinks is not None else None
    dbias = found.pop() if bits & _WANT_DBIAS else None
    dq, dk, dv = found
    return dq, dk, dv, dbias, dsinks


def _options(part: JaxPart) -> tuple[tuple[Array, ...], int]:
    """Return the arrays of the options that are used, and their bits, in the order of the bits."""
    there = {name: getattr(part, name) for name in _OPTIONS if getattr(part, name) is not None}
    return tuple(there.values()), sum(_BITS[name] for name in there)


def _call(
    target: str, results: tuple[Any, ...], operands: tuple[Array, ...], part: JaxPart, given: int
) -> tuple[Array, ...]:
    register()
    if 0 in operands[0].shape:  # Without queries, all gradients are zero.
        return tuple(jnp.zeros(x.shape, x.dtype) for x in results)
    axes = axes_of(*operands)
    call = jax.ffi.ffi_call(target, results)
    found: tuple[Array, ...] = call(  # type: ignore[assignment]
        *spread(operands, axes),
        scale=np.float32(part.scale),
        softcap=np.float64(part.softcap),
        bias_kind=np.int64(part.bias_kind),
        dropout_threshold=np.int64(dropout.threshold(part.dropout_p) if part.dropout_p else 0),
        given=np.int64(given),
        bshd=np.int64(part.layout == "bshd"),
        own_threads=np.int64(OWN_THREADS),
    )
    varying: tuple[Array, ...] = spread(tuple(found), axes)
    return varying


def register() -> None:
    """Register the targets of the compiled module with XLA."""
    global _registered
    if not _registered:
        for name, handler in cpu.core.xla_handlers().items():
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        _registered = True
