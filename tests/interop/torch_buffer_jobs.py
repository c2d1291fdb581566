"""What test_torch_buffers.py asks of a process with four virtual devices: JSON on standard output."""

import json
import os

if __name__ == "__main__":  # Not where tests are collected: their process has one device.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnspan.jax import from_torch
from attnspan.jax.backends.cpu import register
from attnspan.kernels import cpu


def bare():
    """Messages of the handler itself."""
    register()
    call = jax.ffi.ffi_call("attnspan_callback", jax.ShapeDtypeStruct((2,), "float32"))

    def message(**attributes):
        try:
            call(jnp.ones(2), **attributes).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return ""

    def raises(key, arguments, results):
        raise TypeError(f"deliberate {key} {arguments} {results}")

    found = {"no function": message(key=np.int64(1)), "no key": message()}
    cpu.core.set_xla_callback(raises)
    return found | {"raises": message(key=np.int64(1))}


def meshes(kind):
    """Pairs of what came and what was to come."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    x, w = jnp.arange(8.0), jnp.float32(0.5)
    rows = jax.device_put(x, NamedSharding(mesh, P("i")))
    sums, tanh = from_torch(lambda x: torch.cumsum(x, 0)), from_torch(lambda x, w: torch.tanh(x * w))
    each = np.cumsum(np.arange(8.0).reshape(4, 2), 1).reshape(-1)
    value, grad = jax.value_and_grad(lambda w: jnp.tanh(x * w).sum())(w)
    found = {
        "whole": (jax.jit(sums)(rows), np.cumsum(x)),
        "whole, gradient": (jax.jit(jax.grad(lambda x: sums(x).sum()))(rows), np.arange(8.0, 0, -1)),
    }
    if kind == AxisType.Auto:
        found["whole, not in jit"] = (jax.grad(lambda x: sums(x).sum())(rows), np.arange(8.0, 0, -1))
    for checked in (False, True):

        def step(x, w, checked=checked):
            value, grad = jax.value_and_grad(lambda w: tanh(x, w).sum())(w)
            return jax.lax.psum(value, "i"), grad if checked else jax.lax.psum(grad, "i")

        def mapped(fn, outs, *ins, checked=checked):
            return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=checked))

        name = f"shards, check_vma={checked}"
        found[name] = (mapped(sums, P("i"), P("i"))(rows), each)
        found[f"{name}, gradient"] = (mapped(step, (P(), P()), P("i"), P())(rows, w), (value, grad))
        singly = jax.vmap(lambda x: sums(x[None])[0] * 2)
        found[f"{name}, vmap"] = (mapped(singly, P("i"), P("i"))(rows), 2 * x)
    return {f"{kind}: {k}": [np.asarray(y).tolist() for y in pair] for k, pair in found.items()}


if __name__ == "__main__":
    result = bare()
    for each_kind in (AxisType.Auto, AxisType.Explicit):
        result |= meshes(each_kind)
    print(json.dumps(result))
