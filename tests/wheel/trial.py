"""Tries an installed attnspan: `python -I trial.py [torch|jax]`. It uses no other file of the checkout.

Results and gradients are compared with `attnspan.reference` in float64, under a mask of booleans. The program
prints what ran and the largest relative error.
"""

import importlib
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np

import attnspan
from attnspan import causal, documents, from_dense, reference
from attnspan.kernels import cpu

LIMIT = 1e-6  # float32: the kernel's tests hold it to torch's own errors; here a wrong kernel is to be found
MASK = causal() & documents([0, 50, 130, 200])
Arrays = tuple[np.ndarray, ...]


def problem() -> Arrays:
    """q (1, 4, 200, 32), k and v (1, 2, 200, 32), and the gradient of out, float32."""
    rng = np.random.default_rng(0)
    shapes = [(1, heads, 200, 32) for heads in (4, 2, 2, 4)]
    return tuple(rng.standard_normal(x).astype(np.float32) for x in shapes)


def dense(*arrays: np.ndarray) -> Arrays:
    """out, dq, dk, dv in float64, from a mask of booleans."""
    q, k, v, dout = (x.astype(np.float64) for x in arrays)
    row = np.arange(200)
    document = np.searchsorted([50, 130], row, side="right")
    visible = (row[:, None] >= row) & (document[:, None] == document)
    bounds = from_dense(visible).spans(200, 200).lowered.bounds
    out, _ = reference.forward(q, k, v, bounds, 32**-0.5)
    return out, *reference.backward(dout, None, q, k, v, bounds, 32**-0.5)


def with_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray) -> Arrays:
    bounds, scale = MASK.spans(200, 200).lowered.bounds, 32**-0.5
    out, lse, gradients = np.empty_like(q), np.empty(q.shape[:3]), [np.empty_like(x) for x in (q, k, v)]
    cpu.forward(q, k, v, bounds, out, lse, scale=scale, num_threads=2)
    cpu.backward(dout, None, q, k, v, out, lse, bounds, *gradients, scale=scale, num_threads=2)
    return out, *gradients


def with_torch(*arrays: np.ndarray) -> Arrays:
    import torch

    from attnspan.torch import attention, explain

    *qkv, dout = (torch.from_numpy(x).requires_grad_() for x in arrays)
    assert explain(*qkv, mask=MASK).backend == "cpu"
    out = attention(*qkv, mask=MASK)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv, mask=MASK.prepare(200, 200, like=qkv[0])), out)
    return tuple(x.detach().numpy() for x in (out, *torch.autograd.grad(out, qkv, dout)))


def with_jax(*arrays: np.ndarray) -> Arrays:
    import jax

    from attnspan.jax import attention, explain

    *qkv, dout = arrays
    assert explain(*qkv, mask=MASK).backend == "cpu"
    out, pull = jax.vjp(jax.jit(lambda *x: attention(*x, mask=MASK)), *qkv)
    return tuple(np.asarray(x) for x in (out, *pull(dout)))


WAYS: dict[str, Callable[..., Arrays]] = {"torch": with_torch, "jax": with_jax}


def refused(framework: str) -> str:
    """What `attnspan.<framework>` says where the framework is not installed."""
    try:
        importlib.import_module(f"attnspan.{framework}")
    except ModuleNotFoundError as error:
        return str(error)
    raise AssertionError(f"attnspan.{framework} was imported without {framework}")


def main() -> None:
    wanted = sys.argv[1:]
    assert "site-packages" in attnspan.__file__, f"not an installed package: {attnspan.__file__}"
    assert not {"torch", "jax"} & set(sys.modules), "import attnspan loads a framework"
    for framework in WAYS:
        there = find_spec(framework) is not None
        assert there == (framework in wanted), f"{framework} is installed: {there}"
        assert there or f"pip install 'attnspan[{framework}]'" in refused(framework)
    arrays = problem()
    expected, worst = dense(*arrays), 0.0
    for way in (with_numpy, *(WAYS[x] for x in wanted)):
        for got, right in zip(way(*arrays), expected, strict=True):
            error = float(np.linalg.norm(got - right) / np.linalg.norm(right))
            assert error < LIMIT, f"{way.__name__}: {error:.1e}"
            worst = max(worst, error)
    packages = ", ".join(f"{x} {version(x)}" for x in ("numpy", *wanted))
    print(f"Python {platform.python_version()}, {packages}: kernel {cpu.isa()}, errors up to {worst:.1e}")


if __name__ == "__main__":
    main()
