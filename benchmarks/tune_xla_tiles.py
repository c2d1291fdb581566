"""Search the tile sizes of attnspan.jax's xla backend on this machine: python benchmarks/tune_xla_tiles.py

Each candidate is a separate program, compiled in advance, so that all candidates are comparable. The tuner
caches the result, and a second run reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan import Mask, causal, documents, window
from attnspan.jax import attention
from attnspan.jax.backends import xla_tiles
from attnspan_lab.bench.devices import JaxDevice
from attnspan_lab.tune.cache import tuned

LENGTH, HEADS, HEAD_DIM = 4096, 8, 64
SIDES = (64, 128, 256, 512)
MASKS: dict[str, Mask] = {
    "causal": causal(),
    "window 128": window(128),
    "32 documents": causal() & documents(list(range(0, LENGTH + 1, LENGTH // 32))),
}


def main() -> None:
    default = xla_tiles._Q_BLOCK, xla_tiles._K_BLOCK
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, HEADS, LENGTH, HEAD_DIM)), jnp.float32) for _ in range(3))
    for name, mask in MASKS.items():
        prepared = mask.prepare(LENGTH, LENGTH, like=q)

        def make_call(tiles: tuple[int, int], prepared: Any = prepared) -> Callable[[], Any]:
            xla_tiles._Q_BLOCK, xla_tiles._K_BLOCK = tiles
            jax.clear_caches()  # JAX's cache key of a program does not contain the tile sizes.
            call = jax.jit(lambda q, k, v: attention(q, k, v, mask=prepared, backend="xla"))
            program = call.lower(q, k, v).compile()
            xla_tiles._Q_BLOCK, xla_tiles._K_BLOCK = default
            return lambda: program(q, k, v)

        expected = np.asarray(make_call(default)())

        def check(out: Any, expected: Any = expected) -> None:
            np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)

        named = f"xla tiles, float32, {name}, S={LENGTH}, H={HEADS}, D={HEAD_DIM}"
        candidates = list(product(SIDES, SIDES))
        found = tuned(named, make_call, candidates, default, seconds=60, check=check, device=JaxDevice("cpu"))
        r = found.ratio
        gain = f", speedup {r.median:.2f} [{r.low:.2f}, {r.high:.2f}]" if r else ""
        print(f"{name}: {found.config} instead of {default}{gain}; {found.reason}")


if __name__ == "__main__":
    main()
