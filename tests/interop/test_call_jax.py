"""JAX functions on torch tensors: results, gradients, memory, errors."""

# ruff: noqa: ARG005  (functions of a fixed signature, some of which need a part of it)

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from attnspan.errors import BackendError, DeviceError, DtypeError, OptionError
from attnspan.torch import call_jax

jax = pytest.importorskip("jax")
jnp = jax.numpy
convert = pytest.importorskip("attnspan.interop._convert")


class Pair(NamedTuple):
    first: Any
    second: Any


def _mix(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w), jnp.exp(x) * w.sum()


def _randn(*shape: int, seed: int = 0, **given: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **given)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_results_and_gradients_are_those_of_jax(wanted: tuple[bool, bool]) -> None:
    x, w = _randn(5, 3), _randn(3, 4, seed=1)
    grads = _randn(5, 4, seed=2), _randn(5, 3, seed=3)
    made = jax.jit(_mix)(x.numpy(), w.numpy())
    want = jax.jit(lambda x, w, g: jax.vjp(_mix, x, w)[1](g))(
        x.numpy(), w.numpy(), tuple(map(np.asarray, grads))
    )
    given = [t.requires_grad_(need) for t, need in zip((x, w), wanted, strict=True)]
    outs = call_jax(_mix, *given)
    for got, out in zip(outs, made, strict=True):
        np.testing.assert_array_equal(got.detach().numpy(), out)
    torch.autograd.backward(outs, grads, retain_graph=True)
    for t, need, g in zip(given, wanted, want, strict=True):
        assert (t.grad is not None) == need
        if need:
            np.testing.assert_allclose(t.grad.numpy(), g, rtol=1e-6, atol=1e-6)
    if wanted[0]:  # An unused result has no gradient to give.
        (alone,) = torch.autograd.grad(outs[1].sum(), x)
        torch.testing.assert_close(alone, x.detach().exp() * w.detach().sum())


def test_integers_pass_between_gradients() -> None:
    x, at = _randn(6, 2, requires_grad=True), torch.tensor([4, 0, 4], dtype=torch.int32)
    taken, where = call_jax(lambda x, i: (x[i], i + 1), x, at)
    assert where.dtype == torch.int32
    assert not where.requires_grad
    taken.sum().backward()
    assert x.grad[:, 0].tolist() == [1, 0, 0, 0, 2, 0]


def test_structures_go_in_and_come_out() -> None:
    x, y = _randn(2), _randn(2, seed=1)

    def fn(given: Any, *, k: int, extra: Any) -> Any:
        assert k == 3
        assert given["b"][1] is None
        return Pair({"a": given["a"] * k}, [None, (given["b"][0], extra[0])])

    out = call_jax(fn, {"a": x, "b": [y, None]}, k=3, extra=(y,))
    assert isinstance(out, Pair)
    assert torch.equal(out.first["a"], x * 3)
    assert out.second[0] is None
    assert all(torch.equal(t, y) for t in out.second[1])


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn),
]


def test_dtypes_and_shapes() -> None:
    shapes = (3, 5), (), (0, 4)
    given = {(dtype, shape): (_randn(*shape) * 3).abs().to(dtype) for dtype in DTYPES for shape in shapes}
    made = call_jax(lambda *given: [x.reshape(x.shape[::-1]) for x in given], *given.values())
    for ((dtype, shape), x), out in zip(given.items(), made, strict=True):
        assert (out.dtype, out.shape) == (dtype, shape[::-1])
        assert torch.equal(out.reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)), (dtype, shape)


def test_64_bits_and_complex_gradients_follow_torch() -> None:
    x, at = _randn(4, dtype=torch.float64, requires_grad=True), torch.tensor([1, 2])
    z = _randn(4, dtype=torch.complex128, requires_grad=True)
    taken, times_sine = (lambda x, i: jnp.sin(x[i]) * x[0]), (lambda z: jnp.sin(z) * z)
    with jax.enable_x64(True):
        assert torch.autograd.gradcheck(lambda x: call_jax(taken, x, at), x)
        assert torch.autograd.gradcheck(lambda z: call_jax(times_sine, z), z)
        got = torch.autograd.grad(call_jax(lambda z: jnp.abs(jnp.sum(z * z * (2 + 1j))), z), z)[0]
    want = torch.autograd.grad((z * z * (2 + 1j)).sum().abs(), z)[0]
    torch.testing.assert_close(got, want)


STRIDES = {
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(4, 6),
    "every other": lambda x: x[::2, ::3],
    "unaligned": lambda x: x.flatten()[1:],
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negative": lambda x: torch.complex(x, x + 1).conj().imag,
}


def test_views() -> None:
    given = {name: view(_randn(4, 6)) for name, view in STRIDES.items()}
    made = call_jax(lambda *given: [x * 2 for x in given], *given.values())
    torch.testing.assert_close(made, [x * 2 for x in given.values()])


# Memory.


def _pointers(fn: Any, *tensors: Tensor) -> tuple[list[int], list[Any]]:
    """Addresses that XLA reads, and its results, of one run of a program."""
    given = [jax.device_put(x, may_alias=True) for x in convert.as_arguments(tensors)]
    return [x.unsafe_buffer_pointer() for x in given], list(jax.jit(fn)(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_nothing_is_copied(dtype: torch.dtype) -> None:
    x, y = torch.ones(1000, 7, dtype=dtype), torch.ones(1000, 7, dtype=dtype)
    read, made = _pointers(lambda x, y: (x + y, x), x, y)
    assert read == [x.data_ptr(), y.data_ptr()]
    tensors = convert.as_tensors(made)
    assert [t.data_ptr() for t in tensors] == [a.unsafe_buffer_pointer() for a in made]
    del made
    assert (tensors[0] == 2).all(), "a tensor keeps JAX's memory alive"


def test_results_are_the_callers_own() -> None:
    x = torch.ones(64)
    same, again, constant = call_jax(lambda x: (x, x, jnp.arange(64.0)), x)
    assert len({t.data_ptr() for t in (x, same, again, constant)}) == 4
    constant.zero_(), same.zero_()
    assert call_jax(lambda x: (x, x, jnp.arange(64.0)), x)[2][1] == 1
    assert (again == 1).all()
    assert (x == 1).all()


def test_arguments_may_be_changed_at_once() -> None:
    # JAX computes while the caller goes on; the bridge must not.
    x = torch.ones(1 << 19)
    for _ in range(3):
        out = call_jax(lambda x: jnp.sin(jnp.cos(jnp.sin(x))), x)
        x.fill_(1e9)
        torch.testing.assert_close(out, torch.ones(1 << 19).sin().cos().sin())
        x.fill_(1)


def test_residuals_are_arguments_and_results_where_they_can_be() -> None:
    x = _randn(64, requires_grad=True)
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        out = call_jax(lambda x: jnp.exp(x), x)
        assert packed == [out.data_ptr(), 0], "and the anchor, which has no elements"
        packed.clear()
        call_jax(lambda x: x * x, x)
        assert set(packed) == {x.data_ptr(), 0}


def test_changes_of_what_backward_needs_are_found() -> None:
    x = _randn(8).requires_grad_()
    y = x * 1
    out = call_jax(lambda x: x * x, y)
    y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# Derivatives of other kinds.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own
def test_torch_func_and_higher_derivatives_are_taken_in_jax_or_raise() -> None:
    x = _randn(3, requires_grad=True)
    got = torch.func.grad(lambda x: call_jax(lambda x: jnp.sum(jnp.sin(x)), x))(x.detach())
    torch.testing.assert_close(got, x.detach().cos())
    (first,) = torch.autograd.grad(call_jax(lambda x: jnp.sum(x**3), x), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of call_jax.*jax\.grad"):
        (first.sum() + x.sum()).backward()
    with pytest.raises(NotImplementedError, match="second derivatives of call_jax"):
        torch.func.grad(torch.func.grad(lambda x: call_jax(lambda x: x**3, x)))(torch.ones(()))
    inner = call_jax(jax.grad(lambda x: jnp.sum(x**3)), x)
    (second,) = torch.autograd.grad(inner.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives of .*call_jax.*jax\.jvp"):
        torch.func.jvp(lambda x: call_jax(jnp.sin, x), (torch.ones(2),), (torch.ones(2),))


# Errors.

ONES = torch.ones(2)
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (lambda: call_jax(jnp.sin), OptionError, "expected at least one tensor"),
    "array of JAX": (
        lambda: call_jax(jnp.add, ONES, jnp.ones(2)),
        DtypeError,
        r"leaf 1: .* got a ArrayImpl\. ",
    ),
    "array of NumPy": (lambda: call_jax(jnp.add, ONES, np.ones(2)), DtypeError, r"ndarray\. .*from_numpy"),
    "tracer": (
        lambda: jax.jit(lambda y: call_jax(jnp.add, ONES, y))(jnp.ones(2)),
        DtypeError,
        "got a DynamicJaxprTracer.* In JAX, call the function",
    ),
    "int64": (lambda: call_jax(jnp.sin, ONES.long()), DtypeError, r"got int64\. .*\.int\(\)"),
    "float64": (lambda: call_jax(jnp.sin, ONES.double()), DtypeError, "jax_enable_x64"),
    "float8 of another bias": (
        lambda: call_jax(jnp.sin, torch.zeros(2, dtype=torch.float8_e8m0fnu)),
        DtypeError,
        r"a dtype that JAX has, got torch\.float8_e8m0fnu",
    ),
    "meta": (lambda: call_jax(jnp.add, ONES, ONES.to("meta")), DeviceError, "one device, got cpu and meta"),
    "sparse": (lambda: call_jax(jnp.sin, torch.eye(2).to_sparse()), BackendError, r"sparse_coo\. .*to_dense"),
    "result of str": (lambda: call_jax(lambda x: {"x": "text"}, ONES), DtypeError, "got a str"),
    "result of keys": (
        lambda: call_jax(lambda x: jax.random.key(0), ONES),
        DtypeError,
        r"key<fry>\. .*key_data",
    ),
    "tensor inside": (lambda: call_jax(lambda x: ONES, ONES), DtypeError, "got a Tensor"),
    "its own": (lambda: call_jax(lambda x: x @ x, torch.ones(2, 3)), TypeError, "dot_general"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    run, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        run()
