"""torch and JAX agree: the same inputs give the same numbers; seeds have the same bits."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnspan as a  # noqa: E402
from attnspan.jax import attention  # noqa: E402
from attnspan.jax import dropout_seeds as jax_seeds  # noqa: E402
from attnspan.kernels import cpu  # noqa: E402
from attnspan.torch import attention as torchs  # noqa: E402
from attnspan.torch import dropout_seeds as torch_seeds  # noqa: E402

B, HEADS, KV_HEADS, Q_LEN, K_LEN, DIM = 2, 4, 2, 37, 53, 16
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (B, K_LEN)), -1)
MASK = a.causal() & a.segments(IDS)

no_kernel = pytest.mark.skipif(
    not hasattr(cpu.core, "xla_handlers"), reason="there is no compiled module in this process"
)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _inputs() -> dict[str, np.ndarray]:
    return {
        "q": _normal(1, B, HEADS, Q_LEN, DIM),
        "k": _normal(2, B, KV_HEADS, K_LEN, DIM),
        "v": _normal(3, B, KV_HEADS, K_LEN, DIM),
        "sinks": _normal(4, HEADS),
        "table": _normal(5, HEADS, 2 * K_LEN + 1),
    }


def _keywords(x: dict[str, Any]) -> dict[str, Any]:
    return {
        "mask": MASK,
        "softcap": 3.0,
        "bias": a.relative(x["table"]),
        "sinks": x["sinks"],
        "dropout_p": 0.2,
    }


COTANGENTS = (_normal(6, B, HEADS, Q_LEN, DIM), _normal(7, B, HEADS, Q_LEN))


def _by_torch() -> list[np.ndarray]:
    x = {name: torch.from_numpy(value).requires_grad_() for name, value in _inputs().items()}
    given = {**_keywords(x), "dropout_seed": torch.tensor(-3)}
    results = torchs(x["q"], x["k"], x["v"], return_lse=True, backend="cpu", **given)
    cotangents = [torch.from_numpy(y) for y in COTANGENTS]
    gradients = torch.autograd.grad(results, list(x.values()), cotangents)
    return [y.detach().numpy() for y in (*results, *gradients)]


def _by_jax() -> list[np.ndarray]:
    @jax.jit
    def run(x: dict[str, Any], seed: Any, cotangents: Any) -> Any:
        def call(x: dict[str, Any]) -> Any:
            given = {**_keywords(x), "dropout_seed": seed}
            return attention(x["q"], x["k"], x["v"], return_lse=True, backend="cpu", **given)

        results, transposed = jax.vjp(call, x)
        return results, transposed(cotangents)[0]

    results, gradients = run(_inputs(), jnp.array(-3), COTANGENTS)
    return [np.asarray(y) for y in (*results, *(gradients[name] for name in _inputs()))]


@no_kernel
def test_the_kernel_gives_the_same_bits_from_either() -> None:
    names = ("out", "lse", *(f"d{name}" for name in _inputs()))
    for name, ours, theirs in zip(names, _by_jax(), _by_torch(), strict=True):
        assert np.array_equal(ours, theirs), (name, torch.get_num_threads())


@pytest.mark.parametrize("seed", [5, -1, 2**40 + 3, -(2**62)])
def test_seeds_of_rows_and_heads_have_the_same_bits(seed: int) -> None:
    theirs = torch_seeds(torch.tensor(seed), 3, 5).numpy()
    ours = np.asarray(jax_seeds(np.array(seed), 3, 5))
    np.testing.assert_array_equal(ours.view(np.int64)[..., 0], theirs)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_layouts(layout: str) -> None:
    q, k, v = _inputs()["q"], _inputs()["k"], _inputs()["v"]
    if layout == "thd":
        q, k, v = (x[0].swapaxes(0, 1).copy() for x in (q, k, v))
        mask: a.Mask = a.causal() & a.segments(IDS[0])
    else:
        q, k, v = (x.swapaxes(1, 2).copy() for x in (q, k, v))
        mask = MASK
    given: dict[str, Any] = {"mask": mask, "layout": layout, "return_lse": True}
    ours = attention(q, k, v, **given)
    theirs = torchs(*map(torch.from_numpy, (q, k, v)), **given)
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == tuple(y.shape)
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu", marks=no_kernel)])
def test_queries_without_elements_have_scores_of_0(backend: str) -> None:
    x, v = jnp.zeros((1, 5, 2, 0)), jnp.asarray(_normal(1, 1, 5, 2, 4))
    mask = a.causal() & a.segments(np.array([[0, 0, 0, 1, 1]]))
    out, lse = attention(x, x, v, mask=mask, layout="bshd", return_lse=True, backend=backend)
    for row, (start, stop) in enumerate([(0, 1), (0, 2), (0, 3), (3, 4), (3, 5)]):
        np.testing.assert_allclose(out[0, row], v[0, start:stop].mean(0), atol=1e-6)
        np.testing.assert_allclose(lse[0, :, row], np.log(stop - start), atol=1e-6)
    assert attention(x, x, x, mask=mask, layout="bshd").shape == x.shape
