"""A program with one more option, `gain`: a factor of each head's output. The schema gets one row for it.

The test in tests/test_schema.py runs it: `python tests/samples/fake_option.py torch`, or `jax`.
"""

import importlib.util
import os
import sys
import tempfile
from importlib.machinery import PathFinder, SourceFileLoader
from multiprocessing import get_context
from pathlib import Path

ROW = '    Array("gain", "h", "float32", optional=True, words="a factor for each query head"),\n'
AFTER = '    Array("k_index", "b? k", "int32", optional=True, serves=True),\n'


class Schema(SourceFileLoader):
    """Loads the schema with one more row."""

    def get_code(self, fullname):
        del fullname
        code = Path(self.path).read_text(encoding="utf-8")
        assert code.count(AFTER) == 1
        return compile(code.replace(AFTER, AFTER + ROW), self.path, "exec")


class Finder(PathFinder):
    """Finds the schema for `Schema`. All other modules load as usual."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "attnspan.call.schema":
            return None
        found = super().find_spec(fullname, path, target)
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=Schema(fullname, found.origin)
        )


def add_row():
    sys.meta_path.insert(0, Finder)


def torch_backend():
    import torch

    from attnspan.backends import Backend, register
    from attnspan.kernels import math
    from attnspan.torch._autograd import with_autograd

    def run(part, q, k, v):
        options = part.options._replace(gain=None)
        out, lse = math.forward(q, k, v, part.bounds, scale=part.scale, options=options, wide_lse=True)
        return out * part.options.gain[:, None, None], lse  # the line of the reference

    def forward(part, out):
        found, lse = run(part, part.q, part.k, part.v)
        out.copy_(found)
        return lse

    def backward(part, whole, grads):
        with with_autograd():
            leaves = [x.detach().requires_grad_() for x in (part.q, part.k, part.v)]
            out, _ = run(part, *leaves)
        for into, found in zip(grads, torch.autograd.grad(out, leaves, whole.dout), strict=True):
            into.copy_(found)
        return None, None

    functions = {"supports": lambda _: None, "forward": forward, "backward": backward}
    register(Backend(name="gain", options=("gain",), **functions))


def wanted(q, k, v, gain, **options):
    from attnspan.torch import attention

    return attention(q, k, v, backend="math", **options) * gain[:, None, None]


def one_process():
    """Eager code with gradients, a compiler, and mapped calls."""
    import torch

    from attnspan import causal
    from attnspan.torch import attention

    def attend(q, k, v, gain):
        return attention(q, k, v, mask=causal(), gain=gain, backend="gain")

    same = torch.testing.assert_close
    q, k, v = torch.randn(3, 2, 4, 6, 8, requires_grad=True).unbind()
    gain = torch.tensor([1.0, 2.0, 3.0, 4.0])
    want = wanted(q, k, v, gain, mask=causal())
    grads = torch.autograd.grad(want.square().sum(), (q, k, v), retain_graph=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for name, function in (("eager", attend), ("compile", compiled)):
        found = function(q, k, v, gain)
        same(found, want)
        same(torch.autograd.grad(found.square().sum(), (q, k, v)), grads)
        print(name)
    q, k, v = (x.detach() for x in (q, k, v))
    many, gains = torch.stack([q, 2 * q, 3 * q]), torch.stack([gain, -gain, 2 * gain])
    for axis, given in ((0, gains), (None, gain)):
        each = [wanted(x, k, v, y, mask=causal()) for x, y in zip(many, given.expand(3, 4), strict=True)]
        same(torch.func.vmap(attend, (0, None, None, axis))(many, k, v, given), torch.stack(each))
    print("vmap")


def on_rank(rank, store):
    """DTensors that are split by heads, and a plan that splits the sequence."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from attnspan import causal
    from attnspan.parallel import Layout
    from attnspan.torch import attention

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8, 8).unbind()
    gain = torch.tensor([1.0, 2.0, 3.0, 4.0])
    want = wanted(q, k, v, gain, mask=causal())

    heads = [DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)]) for x in (q, k, v)]
    for x in (DTensor.from_local(gain, mesh, [Replicate()]), gain):
        out = attention(*heads, mask=causal(), gain=x, backend="gain")
        torch.testing.assert_close(out.full_tensor(), want)

    layout = Layout.of(causal(), q_len=8, ranks=2)
    batch = layout.shard({name: x.transpose(1, 2) for name, x in zip("qkv", (q, k, v), strict=True)}, rank)
    plan = layout.plan(causal(), heads=(4, 4)).on(mesh, rows=batch)
    mine = [batch[name].transpose(1, 2) for name in "qkv"]
    out = attention(*mine, mask=plan, gain=gain, backend="gain")
    rows = layout.shard({"out": want.transpose(1, 2)}, rank)["out"]
    torch.testing.assert_close(out.transpose(1, 2), rows)
    dist.destroy_process_group()


def two_ranks():
    import torch.distributed.tensor  # noqa: F401  (once, before the fork)

    import attnspan.parallel.torch  # noqa: F401

    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(2) as pool:
        pool.starmap(on_rank, [(i, folder + "/store") for i in range(2)], chunksize=1)
    print("DTensor, plan")


def jax_backend():
    from dataclasses import replace

    import jax

    from attnspan.backends import Backend, register
    from attnspan.jax.backends import math

    def forward(part):
        out, lse = math.forward(replace(part, gain=None))
        return out * part.gain[:, None, None], lse  # the line of the reference

    def backward(part, out, lse, dout, dlse, want_dbias):
        def attend(q, k, v):
            return forward(replace(part, q=q, k=k, v=v))[0]

        _, pull = jax.vjp(attend, part.q, part.k, part.v)
        return *pull(dout), None, None

    functions = {"supports": lambda *_: None, "forward": forward, "backward": backward}
    register(Backend(name="gain", framework="jax", options=("gain",), **functions))


def by_jax():
    """Eager code with gradients, jit, mapped calls, a mesh that jit splits, and a mask for a mesh."""
    import jax
    import numpy as np
    from jax import numpy as jnp

    from attnspan import causal
    from attnspan.jax import attention, shard

    one_mask = causal()

    def attend(q, k, v, gain, mask=one_mask):
        return attention(q, k, v, mask=mask, gain=gain, backend="gain")

    def expected(q, k, v, gain):
        return attention(q, k, v, mask=causal(), backend="math") * gain[:, None, None]

    def step(function):
        def both(*given):
            out, pull = jax.vjp(lambda *qkv: function(*qkv, given[3]), *given[:3])
            return out, pull(2 * out)

        return both

    def same(found, want):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, want)

    gain = jnp.array([1.0, 2.0, 3.0, 4.0])
    given = *jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 4, 6, 8), np.float32)), gain
    want = jax.jit(step(expected))(*given)
    for name, wrap in (("eager", lambda x: x), ("jit", jax.jit)):
        same(wrap(step(attend))(*given), want)
        print(name)
    q, *others = given
    many = jnp.stack([q, 2 * q]), *others[:2], jnp.stack([gain, -gain])
    for axes, x in (((0, None, None, 0), many), ((0, None, None, None), (*many[:3], gain))):
        found, want_many = jax.jit(lambda *x, axes=axes: [jax.vmap(y, axes)(*x) for y in (attend, expected)])(
            *x
        )
        same(found, want_many)
    print("vmap")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = *[jax.P("data", "model")] * 3, jax.P()
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]
    found = jax.jit(step(attend))(*placed)
    assert found[0].sharding.spec == jax.P("data", "model")
    same(found, want)
    same(attend(*placed, mask=shard(mesh, mask=causal(), batch="data", heads="model")), want[0])
    print("mesh")


if __name__ == "__main__":
    add_row()
    if sys.argv[1] == "torch":
        torch_backend()
        one_process()
        two_ranks()
    else:
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
        )
        jax_backend()
        by_jax()
