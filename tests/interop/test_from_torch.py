"""Torch functions inside JAX."""

# ruff: noqa: ARG005  (functions of a fixed signature, some of which need a part of it)

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
from_torch = pytest.importorskip("attnspan.interop.from_torch").from_torch
jnp = jax.numpy


def _normal(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def _mix(x: Any, w: Any) -> Any:
    return {"y": torch.tanh(x @ w), "i": [torch.arange(3, dtype=torch.int32), x.exp() * w.sum()]}


def _mix_jax(x: Any, w: Any) -> Any:
    return {"y": jnp.tanh(x @ w), "i": [jnp.arange(3, dtype="int32"), jnp.exp(x) * w.sum()]}


@pytest.mark.parametrize("jit", [False, True])
def test_results_are_torchs(jit: bool) -> None:
    x, w = _normal(5, 3), _normal(3, 4, seed=1)
    fn = from_torch(_mix)
    got, want = (jax.jit(fn) if jit else fn)(x, w), _mix_jax(x, w)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_are_jaxs(jit: bool) -> None:
    x, w = _normal(5, 3), _normal(3, 4, seed=1)

    def loss(fn: Any) -> Any:
        def of(x: Any, w: Any) -> Any:
            out = fn(x, w)
            return (out["y"] ** 2).sum() + jnp.sin(out["i"][1]).sum()

        grad = jax.grad(of, (0, 1))
        return jax.jit(grad) if jit else grad

    for a, b in zip(loss(from_torch(_mix))(x, w), loss(_mix_jax)(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_arguments_are_read_where_they_are() -> None:
    seen, x = [], _normal(64)
    from_torch(lambda x: (seen.append(x.data_ptr()), x + 1)[1])(x)
    assert seen == [x.unsafe_buffer_pointer()]


@pytest.mark.parametrize("grad", [False, True])
def test_results_that_torch_keeps_are_copied(grad: bool) -> None:
    buffer, x = torch.zeros(64), _normal(64)
    fn = from_torch(lambda x: (buffer.copy_(x), buffer.view(8, 8)))
    out = jax.vjp(fn, x)[0] if grad else fn(x)
    buffer.fill_(7)
    np.testing.assert_array_equal(out[0], x)
    np.testing.assert_array_equal(out[1], x.reshape(8, 8))


def test_an_argument_that_is_returned_is_copied() -> None:
    x = _normal(64)
    first, second = from_torch(lambda x: (x, x.view(8, 8)))(x)
    addresses = {a.unsafe_buffer_pointer() for a in (x, first, second)}
    assert len(addresses) == 3


def test_integers_have_no_gradient() -> None:
    x, at = _normal(6), jnp.array([4, 0, 4])
    got = jax.grad(lambda x, at: from_torch(lambda x, at: x[at] * 2)(x, at).sum())(x, at)
    assert got.tolist() == [2, 0, 0, 0, 4, 0]


def test_complex_gradients_follow_jax() -> None:
    z = _normal(4) + 1j * _normal(4, seed=1)
    ours, theirs = from_torch(lambda z: (z * z).sum().abs()), lambda z: jnp.abs((z * z).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(z), jax.jit(jax.grad(theirs))(z), rtol=1e-5)


def test_declared_results() -> None:
    def count(x: Any) -> Any:  # Its size is known to its caller alone.
        return torch.nonzero(x)[:2, 0].int()

    like = jax.ShapeDtypeStruct((2,), "int32")
    assert jax.jit(from_torch(count, results=like))(jnp.array([0.0, 1, 0, 1])).tolist() == [1, 3]


def test_what_is_no_array_is_handed_on() -> None:
    fn = from_torch(lambda x, k, *, dim: (x * k).sum(dim))
    assert jax.jit(lambda x: fn(x, 3, dim=0))(jnp.ones((2, 2))).tolist() == [6, 6]


def test_modules() -> None:
    layer = torch.nn.Linear(3, 2)
    x = _normal(4, 3)
    weights = {k: jnp.asarray(v.detach().numpy()) for k, v in layer.named_parameters()}
    fn = from_torch(lambda p, x: torch.func.functional_call(layer, p, (x,)))
    grads = jax.jit(jax.grad(lambda p: fn(p, x).sum()))(weights)
    np.testing.assert_allclose(grads["weight"], np.tile(x.sum(0), (2, 1)), rtol=1e-5)


def _spoil(x: Any) -> Any:
    return x.add_(1) * 1


def _fail(x: Any) -> Any:
    if not isinstance(x, torch._subclasses.FakeTensor):
        raise RuntimeError("the words of torch")
    return x * 1


ERRORS: dict[str, tuple[Any, str]] = {
    "no array": (lambda: from_torch(torch.sin)(), "expected at least one array"),
    "no tensor": (lambda: from_torch(lambda x: 3.0)(jnp.ones(2)), "expected tensors, .* got a float"),
    "no tensor, traced": (lambda: jax.jit(from_torch(lambda x: "a"))(jnp.ones(2)), "got a str"),
    "int64": (lambda: from_torch(torch.argmax)(jnp.ones(2)), r"got int64\. .*\.int\(\)"),
    "int64, traced": (lambda: jax.jit(from_torch(torch.argmax))(jnp.ones(2)), r"got int64\. .*\.int\(\)"),
    "writes": (lambda: from_torch(_spoil)(jnp.ones(64)), "got one that it wrote to"),
    "its own": (lambda: from_torch(_fail)(jnp.ones(2)), "the words of torch"),
    "a key": (lambda: from_torch(torch.sin)(jax.random.key(0)), r"got key<fry>\. .*key_data"),
    "a key, traced": (lambda: jax.jit(from_torch(torch.sin))(jax.random.key(0)), r"key<fry>\. .*key_data"),
    "a tensor": (lambda: from_torch(torch.add)(jnp.ones(2), torch.ones(2)), "got a tensor of torch"),
    "int64 of NumPy": (lambda: from_torch(torch.neg)(np.array([2**40])), r"got int64\. .*astype"),
    "shapes": (
        lambda: jax.jit(from_torch(torch.mm))(jnp.ones((2, 3)), jnp.ones((2, 3))),
        "same reduction dim",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    run, message = ERRORS[case]
    with pytest.raises(Exception, match=message):
        run()
